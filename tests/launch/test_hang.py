"""A rank that gives no sign of life: when it counts as hung, what is told of it, what is done."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infini_run as ir
from infini_run.system import procfs
from infini_run.watchdog.hang_detector import HangDetector
from infini_run.watchdog.pyspy import find_pyspy
from tests.launch.test_terminal import terminal  # noqa: F401
from tests.support.command import play, play_in_python
from tests.support.processes import is_alive, marked
from tests.support.waiting import LIMIT_S

PYSPY = pytest.mark.skipif(not find_pyspy(os.environ), reason="py-spy is not installed")
HOST = os.uname().nodename


def reads(path):
    return json.loads(Path(path).read_text())


def hung(content):
    return [look["rank"] for look in content["snapshots"] if look["kind"] == "hung"]


@pytest.fixture
def fake(tmp_path):
    """A py-spy of ours, first on PATH: a script."""

    def make(script):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "py-spy").chmod(0o755)
        return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    return make


# ---- when it counts as hung


def check(detector, now_s, output_s=0.0, ping_s=0.0, cpu_s=0.0, is_suspended=False, reads_output=True, written=None):
    return detector.check(now_s, output_s, ping_s, cpu_s, is_suspended, reads_output, written)


def test_a_rank_hangs_when_it_says_nothing_and_uses_no_cpu():
    detector = HangDetector(10.0, 100.0)
    assert detector.deadline_s(0.0, 0.0) == 110.0
    assert check(detector, 110.0) == "no output and no CPU used for 10.0 s"


def test_output_puts_the_deadline_off_and_cpu_does_at_the_deadline():
    detector = HangDetector(10.0, 100.0)
    assert detector.deadline_s(105.0, 0.0) == 115.0
    assert check(detector, 115.0, output_s=105.0, cpu_s=3.0) == ""
    assert detector.deadline_s(105.0, 0.0) == 125.0
    assert check(detector, 125.0, output_s=105.0, cpu_s=3.05) == "no output and no CPU used for 10.0 s"


def test_a_library_that_ticks_on_is_no_sign_of_life():
    detector = HangDetector(100.0, 0.0)
    assert check(detector, 100.0, cpu_s=20.0) == ""
    assert check(detector, 200.0, cpu_s=20.9) != ""


def test_who_ever_pinged_hangs_without_pings_whatever_it_says_or_computes():
    detector = HangDetector(10.0, 100.0)
    assert detector.deadline_s(109.0, 102.0) == 112.0
    assert check(detector, 112.0, output_s=111.0, ping_s=102.0, cpu_s=12.0) == "no WATCHDOG=1 for 10.0 s"


def test_a_stopped_rank_does_not_hang_and_has_all_its_time_when_it_goes_on():
    detector = HangDetector(10.0, 100.0)
    assert check(detector, 110.0, is_suspended=True) == ""
    assert check(detector, 119.0, is_suspended=True) == ""
    assert detector.deadline_s(0.0, 0.0) == 129.0
    assert check(detector, 129.0) != ""
    pinging = HangDetector(10.0, 100.0)
    assert check(pinging, 115.0, ping_s=105.0, is_suspended=True) == ""
    assert pinging.deadline_s(105.0, 105.0) == 125.0


def test_when_all_were_stopped_silence_counts_from_then():
    detector = HangDetector(10.0, 100.0)
    detector.refresh(500.0)
    assert detector.deadline_s(0.0, 104.0) == detector.deadline_s(104.0, 0.0) == 510.0


def test_a_silence_is_told_once_and_the_next_one_again():
    detector = HangDetector(10.0, 100.0)
    assert check(detector, 110.0) != ""
    assert check(detector, 120.0) == check(detector, 130.0) == ""
    assert not detector.has_come_back(109.0)
    assert detector.has_come_back(131.0)
    assert detector.deadline_s(131.0, 0.0) == 141.0
    assert check(detector, 141.0, output_s=131.0) != ""
    assert check(detector, 151.0, output_s=131.0, cpu_s=5.0) == ""
    assert check(detector, 161.0, output_s=131.0, cpu_s=5.0) != ""


def test_what_cannot_be_seen_is_not_judged():
    assert check(HangDetector(10.0, 100.0), 110.0, cpu_s=None) == ""


def test_kernels_count_is_a_sign_where_output_is_not_read():
    detector = HangDetector(10.0, 100.0)
    assert check(detector, 110.0, reads_output=False, written=4) == "", "since its start"
    assert (detector.written_s, detector.idle_since_s, detector.deadline_s(0.0, 0.0)) == (110.0, 100.0, 120.0)
    assert check(detector, 120.0, reads_output=False, written=9) == ""
    why = "no writes and no CPU used for 10.0 s"
    assert check(detector, 130.0, reads_output=False, written=9) == why
    assert check(detector, 140.0, reads_output=False, written=9) == "", "the same silence"
    assert check(detector, 150.0, reads_output=False, written=5) == "", "a child has gone that nobody waited for"
    assert check(detector, 160.0, reads_output=False, written=5) == why


def test_rank_that_writes_during_a_look_has_come_back():
    detector = HangDetector(10.0, 100.0)
    assert check(detector, 110.0, reads_output=False, written=0) != ""
    assert not detector.has_come_back(0.0)
    detector.note_written(112.0, None)
    assert not detector.has_come_back(0.0)
    detector.note_written(112.0, 7)
    assert detector.has_come_back(0.0)


def test_check_just_after_a_look_counts_the_writes_during_it():
    detector = HangDetector(10.0, 100.0)
    assert check(detector, 110.0, reads_output=False, written=4) == ""
    detector.note_written(119.5, 8)
    assert detector.deadline_s(0.0, 0.0) == 129.5, "of a look from 117.5"
    assert check(detector, 129.5, reads_output=False, written=8) == "no writes and no CPU used for 10.0 s"


def test_writes_that_may_be_a_dump_put_the_check_off_once():
    """A rank that was asked for its records writes them. What else it wrote during the look is unknown."""
    healthy, hung, pinging = (HangDetector(10.0, 100.0) for _ in range(3))
    assert check(healthy, 110.0, reads_output=False, written=4) == ""
    assert check(hung, 110.0, reads_output=False, written=0) != ""
    for detector in (healthy, hung, pinging):
        detector.skip_written(119.5, 9)
    assert healthy.deadline_s(0.0, 0.0) == 129.5
    assert healthy.written_s == 110.0, "no report says that it wrote"
    assert check(healthy, 129.5, reads_output=False, written=9) == "no writes and no CPU used for 10.0 s"
    assert not hung.has_come_back(0.0)
    assert hung.deadline_s(0.0, 0.0) == 120.0
    assert check(hung, 130.0, reads_output=False, written=9) == "", "the same silence"
    assert pinging.deadline_s(0.0, 111.0) == 121.0


def test_unknown_count_is_no_sign():
    assert check(HangDetector(10.0, 100.0), 110.0, reads_output=False) == "no CPU used for 10.0 s"


def test_rank_without_pings_hangs_although_it_writes():
    detector = HangDetector(10.0, 100.0)
    assert check(detector, 112.0, ping_s=102.0, reads_output=False, written=9) == "no WATCHDOG=1 for 10.0 s"


def test_a_rank_may_say_itself_that_it_hangs():
    detector = HangDetector(10.0, 100.0)
    assert detector.trigger(101.0, 101.0) == "it sent WATCHDOG=trigger"
    assert detector.trigger(102.0, 101.0) == ""
    assert detector.trigger(105.0, 104.0) != ""
    assert check(detector, 115.0, output_s=104.0) == "", "the same silence"


@given(st.lists(st.tuples(st.floats(0.1, 50), st.booleans(), st.floats(0, 5), st.booleans()), max_size=40))
def test_a_deadline_is_never_in_the_past_once_it_was_judged(steps):
    """So that nothing can make us look again and again."""
    detector, now_s, output_s, cpu_s = HangDetector(10.0, 0.0), 0.0, 0.0, 0.0
    for pause_s, speaks, used_s, is_suspended in steps:
        now_s += pause_s
        output_s = now_s if speaks else output_s
        cpu_s += used_s
        if now_s >= detector.deadline_s(output_s, 0.0):
            check(detector, now_s, output_s, cpu_s=cpu_s, is_suspended=is_suspended)
            assert detector.deadline_s(output_s, 0.0) >= now_s + 10.0


# ---- what /proc says


def test_the_tree_of_a_rank_has_its_group_and_its_descendants(infini_run):
    kid, stray = ("group", "say=kid", "wait", "done"), ("daemon", "say=stray", "wait", "done")
    command = infini_run(*play(*kid, *stray, "say=up", "wait"))
    ((_, _, pid),) = command.read_lines(b"up")
    ((_, _, kid),) = command.read_lines(b"kid")
    members = [member.pid for member in procfs.ProcessTable().tree(int(pid))]
    assert members == [int(pid), int(kid)], "a daemon is nobody's child any more"
    command.signal(signal.SIGTERM)
    command.wait()


def test_a_look_at_what_is_gone_finds_nothing():
    with ir.ProcessLauncher(["true"]) as launcher:
        launcher.launch()
        launcher.wait()
        pid = launcher.status()[0].pid
    gone = procfs.Process(pid=pid, parent=1, group=pid, state="S", name="true", cpu_s=0.0, memory=0)
    assert procfs.ProcessTable().tree(pid) == []
    assert procfs.snapshot_processes([gone])[0].threads == ()


# ---- what is told


SLEEPER = "import time\n\ndef all_reduce():\n    time.sleep(1000)\n\nall_reduce()\n"


@PYSPY
@pytest.mark.rows(2)
def test_a_hang_is_told_with_what_every_rank_is_in(infini_run, every_path, tmp_path):
    """In a shell's child, too; the ranks that do not hang are looked at, and nothing of it is a stray."""
    (tmp_path / "train.py").write_text(SLEEPER)
    script = f"{sys.executable} {tmp_path}/train.py; exit 1"
    logs, report = tmp_path / "logs", tmp_path / "report"
    command = infini_run(
        "--nproc_per_node=3", "--hang_timeout=1", f"--log_dir={logs}", f"--report={report}", "sh", "-c", script
    )
    command.read_error_until(b"all stacks: ")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    text = command.err.decode()
    assert text.startswith("infini-run: no output and no CPU used for ")
    assert (
        f": all 3 ranks wait in all_reduce (train.py:4)\n  ranks 0-2 on {HOST}  all_reduce (train.py:4)  0% CPU\n"
        in text
    )
    content = reads(report)
    assert content["exit_code"] == 143
    assert not any("py-spy" in stray["name"] for stray in content["leftover_processes"])
    looks = content["snapshots"][:3]  # others may follow, which the stop cut short
    assert {look["rank"] for look in looks} == {0, 1, 2}
    for look in looks:
        assert "all_reduce (train.py:4)" in look["python"][0]
        shell, python = look["processes"]
        assert (shell["name"], shell["pid"]) == ("sh", look["pid"])
        assert all(thread["wchan"] or thread["syscall"] for thread in python["threads"])
    for rank in range(3):
        file = logs / f"hang_{rank}.txt"
        assert file.stat().st_mode & 0o777 == 0o600
        assert "all_reduce (train.py:4)" in file.read_text()


def test_a_hang_is_told_again_after_a_sign_of_life(infini_run):
    command = infini_run("--hang_timeout=500ms", "--console=prefix", *play("tell=USR1", "say=up", "wait"))
    command.read_until(b"up")
    for said in (b"up", b"got USR1"):
        command.read_until(said)
        command.err = b""
        command.read_error_until(b" hung: no output and no CPU used")
        command.signal(signal.SIGUSR1)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_idle_rank_that_writes_nothing_hangs_where_output_is_not_read(infini_run):
    command = infini_run("--hang_timeout=500ms", *play("wait"))
    command.read_error_until(b" hung: no writes and no CPU used for ")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize(("script", "has_output"), [("exec sleep 1000", False), ("echo step; exec sleep 1000", True)])
def test_output_that_never_came_is_no_last_sign(infini_run, tmp_path, script, has_output):
    """Nor is what the launcher writes in the rank's process, before its exec."""
    report = tmp_path / "report"
    flags = ("--hang_timeout=1s", "--on_hang=stop", "--grace=1", "--console=none", f"--report={report}")
    command = infini_run(*flags, "sh", "-c", script)
    assert command.wait() == 1
    assert (reads(report)["snapshots"][0]["signs"]["output"] is not None) is has_output
    assert (b"later: output " in command.err) is has_output


def test_rank_that_reads_its_own_pipe_waits_for_no_rank(infini_run):
    script = "[ $RANK = 1 ] && exec sleep 1000; sleep 1000 | cat"
    command = infini_run("--nproc_per_node=4", *STOPS[1:], "--console=none", "sh", "-c", script)
    assert command.wait() == 1
    assert b": 4 ranks are in 2 places, and none is the odd one out" in command.err
    assert b"(own pipe)" in command.err


PRINTS = "import time\nfor step in range(12):\n    print('step', step, flush=True)\n    time.sleep(0.25)\n"
STOPS = ("--nproc_per_node=2", "--hang_timeout=1", "--on_hang=stop", "--grace=1")


def test_rank_that_prints_and_sleeps_at_a_terminal_does_not_hang(terminal):  # noqa: F811
    """No output comes through infini-run there."""
    terminal.run("--standalone", *STOPS, sys.executable, "-c", PRINTS)
    assert terminal.code() == 0
    assert terminal.seen.count(b"step 11\r\n") == 2
    assert b"hung" not in terminal.seen


ONE_HANGS = "while [ $RANK = 0 ]; do echo step; sleep 0.1; done; exec sleep 1000"


def test_silent_rank_among_ranks_that_print_is_named_at_a_terminal(terminal):  # noqa: F811
    terminal.run(*STOPS, "sh", "-c", ONE_HANGS)
    assert terminal.code() == 1
    assert f"infini-run: rank 1 on {HOST} hung: no writes and no CPU used for ".encode() in terminal.seen


@pytest.mark.parametrize("console", ["none", "inherit"])
def test_silent_rank_among_ranks_that_print_is_named_without_logs(infini_run, tmp_path, console):
    report = tmp_path / "report"
    command = infini_run(*STOPS, f"--console={console}", f"--report={report}", "sh", "-c", ONE_HANGS)
    assert command.wait() == 1
    content = reads(report)
    assert (content["first_failure"], hung(content)) == (1, [1])
    looks = {look["rank"]: look for look in content["snapshots"]}
    assert looks[1]["why"].startswith("no writes and no CPU used for ")
    assert looks[0]["signs"]["output"] is not None
    assert looks[1]["signs"]["output"] is None


@pytest.mark.parametrize("console", ["none", "inherit"])
def test_rank_that_prints_does_not_hang_after_a_look_at_another(infini_run, tmp_path, console):
    """The look at rank 0 ends just before the check of rank 1, which has written since it began."""
    report = tmp_path / "report"
    prints = shlex.join([sys.executable, "-c", PRINTS.replace("0.25", "0.7")])
    script = f"[ $RANK = 0 ] && exec sleep 4; exec {prints}"
    flags = ("--nproc_per_node=2", "--hang_timeout=1", f"--console={console}", f"--report={report}")
    command = infini_run(*flags, "sh", "-c", script)
    assert command.wait() == 0
    assert hung(reads(report)) == [0]
    assert b" rank 0 on " in command.err
    assert b"rank 1" not in command.err


def test_look_at_another_rank_stops_no_rank_that_writes_in_time(infini_run, tmp_path):
    """Rank 0 asks for a look, and exits during it. Rank 1 writes during that look, and again 3.3 s later."""
    report = tmp_path / "report"
    trigger = " ".join(play("notify=WATCHDOG=trigger"))
    first = f"[ $RANK = 0 ] && {{ sleep 2.2; {trigger}; exec sleep 1; }}"
    script = f"{first}; for step in 1 2 3; do echo $step; sleep 3.3; done"
    flags = ("--nproc_per_node=2", "--hang_timeout=3.5", "--on_hang=stop", "--console=none", f"--report={report}")
    command = infini_run(*flags, "sh", "-c", script)
    assert command.wait() == 0, command.err
    assert hung(reads(report)) == [0]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_rank_whose_count_is_unreadable_is_judged_by_its_cpu(infini_run):
    """It is not dumpable, and the launcher has no CAP_SYS_PTRACE."""
    script = f"import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n{PRINTS}"  # PR_SET_DUMPABLE
    under = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    command = infini_run("--hang_timeout=500ms", "--console=none", sys.executable, "-c", script, under=under)
    command.read_error_until(b" hung: no CPU used for ")
    assert command.wait() == 0


def test_a_rank_that_computes_in_silence_does_not_hang(infini_run, tmp_path):
    command = infini_run(
        *("--nproc_per_node=2", "--hang_timeout=1", "--on_hang=stop", f"--report={tmp_path}/report"),
        *play("@0", "spin", "@1", "wait"),
    )
    assert command.wait() == 1
    content = reads(tmp_path / "report")
    assert (content["first_failure"], hung(content)) == (1, [1])
    assert (content["ranks"][0]["stopped"], content["ranks"][0]["failed"]) == (True, False)


def test_a_rank_whose_watchdog_falls_silent_hangs_even_while_it_computes(infini_run, tmp_path):
    words = play("@0", "pings=3", "spin", "@1", "spin")
    command = infini_run(
        *("--nproc_per_node=2", "--hang_timeout=1", "--on_hang=stop", f"--report={tmp_path}/report"), *words
    )
    assert command.wait() == 1
    assert f"rank 0 on {HOST} hung: no WATCHDOG=1 for ".encode() in command.err
    assert hung(reads(tmp_path / "report")) == [0]


def test_a_rank_that_somebody_stopped_hangs_and_the_reason_says_so(infini_run, tmp_path):
    command = infini_run(
        *("--nproc_per_node=2", "--hang_timeout=1s", "--on_hang=stop", f"--report={tmp_path}/report"),
        *("--console=prefix", "sh", "-c", "[ $RANK = 1 ] || kill -STOP $$; while sleep 0.1; do echo; done"),
    )
    assert command.wait() == 1
    content = reads(tmp_path / "report")
    assert (content["first_failure"], hung(content)) == (0, [0])
    assert content["ranks"][0]["watchdog_reason"].endswith(": suspended by a signal")


@pytest.mark.parametrize("chosen", [0, None])
def test_a_rank_that_its_launcher_suspends_does_not_hang(chosen, tmp_path):
    words = ["sh", "-c", "while sleep 0.1; do echo; done"]
    launcher = ir.ProcessLauncher(words, nproc_per_node=2, hang_timeout=1, on_hang="stop", console="prefix")
    with launcher:
        launcher.launch()
        launcher.signal(signal.SIGSTOP, rank=chosen)
        assert not launcher.wait(3.0)
        launcher.signal(signal.SIGCONT, rank=chosen)
        assert not launcher.wait(2.0)
        launcher.terminate()
        assert launcher.wait()
    assert launcher.report().snapshots == ()


@pytest.mark.rows(2)
def test_a_rank_that_says_itself_that_it_hangs_is_believed_without_any_timeout(infini_run, every_path):
    words = play("@1", "notify=STATUS=lost the mesh;WATCHDOG=trigger", "@*", "wait")
    command = infini_run("--nproc_per_node=2", "--on_hang=stop", *words)
    assert command.wait() == 1
    text = command.err.decode()
    assert f"rank 1 on {HOST} hung: it sent WATCHDOG=trigger (pid " in text
    assert "  status: lost the mesh\n" in text


def test_a_job_that_is_stopped_for_a_hang_fails_with_1_and_ten_lines(infini_run, tmp_path):
    report = tmp_path / "report"
    command = infini_run(
        *("--nproc_per_node=3", "--hang_timeout=500ms", "--on_hang=stop", f"--report={report}", "--grace=200ms"),
        *play_in_python("ignore=TERM", "wait"),
    )
    assert command.wait() == 1
    content = reads(report)
    assert content["exit_code"] == 1
    assert content["ranks"][content["first_failure"]]["watchdog_reason"].startswith("hung: ")
    said, *lines = command.err.decode().splitlines()
    assert said.endswith(": stopping")
    assert 1 <= len(lines) <= 10


def test_a_file_of_a_hang_is_never_written_through_a_link(infini_run, tmp_path):
    victim, logs = tmp_path / "victim", tmp_path / "logs"
    victim.write_text("untouched")
    logs.mkdir()
    (logs / "hang_0.txt").symlink_to(victim)
    command = infini_run("--hang_timeout=300ms", f"--log_dir={logs}", *play_in_python("wait"))
    command.read_error_until(f"infini-run: {logs}/hang_0.txt cannot be written: ".encode())
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert victim.read_text() == "untouched"


def test_a_status_cannot_steer_the_terminal(infini_run):
    words = play("notify=STATUS=\x1b[2Jgone;WATCHDOG=trigger", "wait")
    command = infini_run("--on_hang=stop", *words)
    assert command.wait() == 1
    assert b"\x1b" not in command.err
    assert rb"status: \x1b[2Jgone" in command.err


# ---- py-spy is a guest


HANGS = ("--hang_timeout=300ms", "--console=prefix")


@pytest.mark.parametrize("nproc", [1, 6])
@pytest.mark.usefixtures("every_path")
def test_a_signal_is_not_kept_waiting_by_a_pyspy_that_does_not_end(infini_run, fake, bell, tmp_path, nproc):
    environ = fake(f"echo $$ > {bell.path}; exec sleep 1000")
    command = infini_run(
        *HANGS, f"--report={tmp_path}/report", f"--nproc_per_node={nproc}", *play_in_python("wait"), env=environ
    )
    pids = [int(pid) for pid in bell.hear(min(nproc, 4))]
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert not any(map(is_alive, pids))
    assert b" hung: " not in command.err, "the look was not complete"
    assert b"no output" not in command.err
    content = reads(tmp_path / "report")
    assert (content["leftover_processes"], content["stuck"]) == ([], [])


def test_ranks_that_end_meanwhile_end_the_job_and_the_pyspy(infini_run, every_path, fake, bell, gate):
    until_told = gate()
    environ = fake(f"echo $$ > {bell.path}; exec sleep 1000")
    command = infini_run(*HANGS, *play_in_python(f"hold={until_told}", "exit=0"), env=environ, gates=(until_told,))
    (pid,) = bell.hear(1)
    until_told.open()
    assert command.wait() == 0
    assert not is_alive(int(pid))
    assert b"left behind" not in command.err


def test_a_pyspy_gets_the_users_signal_mask_and_no_descriptor_of_ours(infini_run, fake, tmp_path):
    seen = tmp_path / "seen"
    environ = fake(f"grep SigBlk /proc/self/status > {seen}; ls /proc/self/fd >> {seen}; exit 1")
    command = infini_run("--hang_timeout=300ms", "--on_hang=stop", *play_in_python("wait"), env=environ)
    assert command.wait() == 1
    mask, *fds = seen.read_text().splitlines()
    assert int(mask.split()[1], 16) == 0
    assert fds == ["0", "1", "2", "3"], "the last is ls's own"


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("echo 'Error: Permission denied' >&2; exit 1", "py-spy: Error: Permission denied"),
        ("exit 3", "py-spy: it printed nothing"),
        ("kill -9 $$", "py-spy: it printed nothing"),
    ],
)
def test_a_pyspy_that_fails_is_told_and_does_no_harm(infini_run, fake, script, note):
    command = infini_run("--hang_timeout=300ms", "--on_hang=stop", *play_in_python("wait"), env=fake(script))
    assert command.wait() == 1
    assert f"  no Python stack: {note}\n".encode() in command.err


def test_a_pyspy_that_cannot_be_executed_is_told(infini_run, fake):
    environ = fake("")
    program = Path(environ["PATH"].split(":")[0]) / "py-spy"
    program.write_bytes(b"\x7fELF, but no more")
    command = infini_run("--hang_timeout=300ms", "--on_hang=stop", *play_in_python("wait"), env=environ)
    assert command.wait() == 1
    assert b"no Python stack: py-spy cannot be started: executing the program: Exec format error" in command.err


def test_a_relative_path_is_not_searched_for_a_pyspy(tmp_path, monkeypatch):
    """We sit in /, and what lies in a folder that somebody else may write to is not ours to run."""
    (tmp_path / "py-spy").write_text("#!/bin/sh\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    beside = str(Path(sys.executable).parent / "py-spy")
    assert find_pyspy({"PATH": ".:"}) in ("", beside)
    assert find_pyspy({"PATH": f".:{tmp_path}"}) == f"{tmp_path}/py-spy"


# ---- in Python


@PYSPY
def test_a_thread_of_a_host_hears_of_a_hang_and_the_report_has_the_stacks(tmp_path):
    (tmp_path / "train.py").write_text(SLEEPER)
    found = []

    def follow():
        words = [sys.executable, f"{tmp_path}/train.py"]
        with ir.ProcessLauncher(words, nproc_per_node=2, hang_timeout=0.5) as launcher:
            launcher.launch()
            while not any(event.kind == "hung" for event in found):
                found.extend(launcher.events(LIMIT_S))
            looks = launcher.report().snapshots
            found.extend(look for look in looks if "all_reduce (train.py:4)" in look.python[0])

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert len([look for look in found if isinstance(look, ir.HangSnapshot)]) >= 2
    assert marked() == {}


def test_a_hang_may_end_a_launch_of_the_library():
    with pytest.raises(ir.WorkerError, match="hung: no writes and no CPU used for") as caught:
        ir.run(play_in_python("wait"), hang_timeout=0.3, on_hang="stop")
    assert (caught.value.rank, caught.value.exit_code) == (0, 1)
