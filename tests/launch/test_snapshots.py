"""--snapshots: what the other ranks were in when one failed, and that it delays nothing else."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.report.hang_groups import lines_before_stop
from infini_run.report.hang_snapshot import BEFORE_RESTART, BEFORE_STOP, HangSnapshot
from infini_run.watchdog import snapshot_collector, watchdog
from infini_run.watchdog.pyspy import find_pyspy
from tests.launch.test_hang import fake  # noqa: F401
from tests.support.command import CHILDREN, PATIENT, altered, play_in_python
from tests.support.processes import is_alive, state_of
from tests.support.waiting import until

PYSPY = pytest.mark.skipif(not find_pyspy(os.environ), reason="py-spy is not installed")
HOST = os.uname().nodename
TRAIN = f"{CHILDREN}/train.py"
HEADING = "  the others before the stop"


def reads(path):
    return json.loads(Path(path).read_text())


def is_in_place(pid):
    wchan = Path(f"/proc/{pid}/wchan").read_text()
    return state_of(pid) in "SDT" and wchan not in ("", "0")


@pytest.fixture
def fails(infini_run, tmp_path):
    """Start four ranks of train.py, make rank 0 fail once all are in place, and return the command and its report."""

    def run(kind, *flags, nproc=4, **kwargs):
        report = tmp_path / "report"
        words = ("--snapshots=failure", f"--nproc_per_node={nproc}", f"--report={report}", "--grace=1", *flags)
        program = (sys.executable, TRAIN, kind, tmp_path / "go")
        command = infini_run(*words, *program, under=altered(PATIENT), **kwargs)
        pids = command.pids_of(b"up", nproc)
        until(lambda: kind != "suspended" or state_of(pids[1]) == "T")
        (tmp_path / "go").touch()
        assert command.wait() == 1, command.err
        return command, reads(report)

    return run


@PYSPY
def test_failure_shows_where_the_others_were_if_a_group_differs(fails, every_path, tmp_path):
    command, content = fails("loader", f"--log_dir={tmp_path}/logs", "--console=lines")
    lines = command.err.decode().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("infini-run: "))
    assert lines[first].startswith(f"infini-run: rank 0 on {HOST} failed: exit code 1 (")
    assert lines[first].endswith("; 3 others were stopped")
    at = lines.index(f"{HEADING} (all stacks: {tmp_path}/logs/stacks_*.txt):")
    assert lines[at + 1].startswith(f"  rank 1 on {HOST}     loader (train.py:")
    assert lines[at + 2].startswith(f"  ranks 2-3 on {HOST}  all_reduce (train.py:")
    assert len(lines) - first <= 10
    assert [(shot["rank"], shot["kind"], shot["why"]) for shot in content["snapshots"]] == [
        (rank, None, BEFORE_STOP) for rank in (1, 2, 3)
    ]
    assert content["first_failure"] == 0
    assert all(rank["stopped"] for rank in content["ranks"][1:])
    assert not any("py-spy" in stray["name"] for stray in content["leftover_processes"])
    file = tmp_path / "logs" / "stacks_1.txt"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "loader (train.py:" in file.read_text()


@PYSPY
def test_files_are_in_a_relative_log_folder(fails, tmp_path, monkeypatch):
    """The launcher changes to / before it makes them."""
    monkeypatch.chdir(tmp_path)
    _, content = fails("all_reduce", "--log_dir=logs", "--console=lines")
    assert sorted(path.name for path in (tmp_path / "logs").glob("stacks_*")) == [
        f"stacks_{n}.txt" for n in (1, 2, 3)
    ]
    assert content["notices"] == []


@PYSPY
def test_failure_shows_nothing_if_all_others_are_in_one_place(fails):
    command, content = fails("all_reduce")
    assert HEADING.encode() not in command.err
    assert len(content["snapshots"]) == 3


@pytest.mark.parametrize("flags", [(), ("--snapshots=hang",), ("--snapshots=off",)])
def test_failure_takes_no_snapshots_unless_asked(infini_run, tmp_path, flags):
    words = play_in_python("@0", "exit=3", "@*", "wait")
    command = infini_run("--nproc_per_node=2", *flags, f"--report={tmp_path}/report", *words)
    assert command.wait() == 3
    assert reads(tmp_path / "report")["snapshots"] == []


def test_hang_is_reported_without_a_look_if_snapshots_are_off(infini_run, tmp_path):
    flags = ("--hang_timeout=500ms", "--on_hang=stop", "--snapshots=off", f"--log_dir={tmp_path}/logs")
    command = infini_run("--nproc_per_node=3", *flags, f"--report={tmp_path}/report", *play_in_python("wait"))
    assert command.wait() == 1
    content = reads(tmp_path / "report")
    assert f"rank {content['first_failure']} on {HOST} hung: no output and no CPU used for ".encode() in command.err
    assert b" wait in " not in command.err
    assert {shot["kind"] for shot in content["snapshots"]} == {"hung"}
    assert not any(shot["processes"] or shot["python"] for shot in content["snapshots"])
    assert list((tmp_path / "logs").glob("hang_*")) == []


# ---- ranks of every kind


def test_rank_in_state_d_is_seen_and_shown(fails):
    command, content = fails("uninterruptible")
    (shot,) = (shot for shot in content["snapshots"] if shot["rank"] == 1)
    assert shot["state"] == "D"
    assert HEADING.encode() in command.err


def test_suspended_rank_is_seen_and_shown(fails):
    command, content = fails("suspended")
    (shot,) = (shot for shot in content["snapshots"] if shot["rank"] == 1)
    assert shot["state"] == "T"
    assert b", suspended by a signal\n" in command.err


@PYSPY
def test_faulthandler_of_a_rank_is_left_alone(fails):
    command, content = fails("registered")
    (shot,) = (shot for shot in content["snapshots"] if shot["rank"] == 1)
    assert "registered (train.py:" in shot["python"][0]
    assert b"most recent call first" not in command.err


@PYSPY
def test_forks_of_preload_are_seen_with_their_python_stacks(fails):
    command, content = fails("loader", "--preload=decimal")
    assert {rank["start_method"] for rank in content["ranks"]} == {"fork"}
    assert all(shot["frames"] for shot in content["snapshots"])
    assert b"  rank 1 on " in command.err


def test_without_pyspy_the_kernel_says_where_ranks_wait(monkeypatch):
    monkeypatch.setattr(snapshot_collector, "find_pyspy", lambda environ: "")
    with ir.ProcessLauncher(play_in_python("wait"), nproc_per_node=4, snapshots="failure") as launcher:
        launcher.launch()
        until(lambda: all(is_in_place(exit_.pid) for exit_ in launcher.status()))
        launcher.signal(signal.SIGKILL, rank=0)
        assert launcher.wait()
    snapshots = launcher.report().snapshots
    assert [snapshot.rank for snapshot in snapshots] == [1, 2, 3]
    assert {snapshot.python_note for snapshot in snapshots} == {"py-spy is not installed; pip install py-spy"}
    assert all(snapshot.wait and snapshot.processes[0].threads for snapshot in snapshots)
    assert launcher.report().exit_code == 137


def test_last_rank_that_fails_is_not_waited_for(infini_run, tmp_path):
    command = infini_run("--snapshots=failure", f"--report={tmp_path}/report", *play_in_python("exit=3"))
    assert command.wait() == 3
    assert reads(tmp_path / "report")["snapshots"] == []


def test_keep_going_takes_no_snapshots(infini_run, tmp_path):
    flags = ("--nproc_per_node=2", "--snapshots=failure", "--keep_going", f"--report={tmp_path}/report")
    command = infini_run(*flags, *play_in_python("@0", "exit=3", "@*", "exit=0"))
    assert command.wait() == 3
    assert reads(tmp_path / "report")["snapshots"] == []


def test_restart_follows_a_look(infini_run, tmp_path):
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && exit 3; exec sleep 1000"
    flags = ("--nproc_per_node=3", "--snapshots=failure", "--max_restarts=1", "--restart_delay=0")
    command = infini_run(*flags, f"--report={tmp_path}/report", "sh", "-c", script)
    assert command.wait() == 0, command.err
    assert reads(tmp_path / "report")["restarts"] == 1


# ---- one program that restarts alone

ATTEMPT = "$TORCHELASTIC_RESTART_COUNT"
ALONE = ("--restart_scope=program", "--restart_delay=0", "--snapshots=failure", "--console=lines")


def patient(infini_run, *words):
    return infini_run(*words, under=altered(PATIENT))


def test_restart_of_one_program_follows_a_look_at_its_ranks(infini_run, bell, tmp_path):
    """Not at those of the other program, which run on. The report has the look before the last restart."""
    script = (
        f"test {ATTEMPT} = 2 && exit 0; echo $$ > {bell.path}; "
        f"test $RANK = 0 && {{ read go < {bell.path}.go; exit 3; }}; exec sleep 1000"
    )
    os.mkfifo(f"{bell.path}.go")
    flags = (*ALONE, f"--log_dir={tmp_path}/logs", f"--report={tmp_path}/report")
    other = ("--program=t", "sh", "-c", "exec sleep 1000")
    program = ("--program=r", "--nproc_per_node=3", "--max_restarts=2", "--ends_job", "sh", "-c", script)
    command = patient(infini_run, *flags, *other, ":", *program)
    pids = []
    for _ in range(2):
        pids = sorted(map(int, bell.hear(3)))
        until(lambda: sum(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in pids) == 2)  # noqa: B023
        Path(f"{bell.path}.go").write_text("go\n")
    assert command.wait() == 0, command.err
    content = reads(tmp_path / "report")
    assert (content["restarts"], content["first_failure"]) == (2, None)
    seen = content["snapshots"]
    assert [(shot["program"], shot["program_rank"], shot["why"]) for shot in seen] == [
        ("r", rank, BEFORE_RESTART) for rank in (1, 2)
    ]
    assert {shot["pid"] for shot in seen} < set(pids)
    assert all(shot["processes"][0]["name"] == "sleep" for shot in seen)
    assert sorted(path.name for path in (tmp_path / "logs").glob("stacks_*")) == ["stacks_2.txt", "stacks_3.txt"]
    assert (tmp_path / "logs/stacks_2.txt").read_text().count(BEFORE_RESTART) == 2
    assert HEADING.encode() not in command.err


@pytest.mark.parametrize(("end", "code"), [("signal", 128 + signal.SIGTERM), ("failure", 4)])
def test_end_of_job_during_look_at_one_program(infini_run, fake, bell, tmp_path, end, code):  # noqa: F811
    """A signal ends the look. After another failure, the ranks that still run are looked at before the stop."""
    flags = (*ALONE, "--grace=1", f"--report={tmp_path}/report")
    other = ("--program=t", "sh", "-c", f"read go < {bell.path}.go; exit 4")
    program = ("--program=r", "--nproc_per_node=2", "--max_restarts=2", *play_in_python("say=up", "wait"))
    os.mkfifo(f"{bell.path}.go")
    words = (*flags, *other, ":", *program)
    command = infini_run(*words, env=fake(f"echo $$ > {bell.path}; exec sleep 1000"))
    pids = command.pids_of(b"up", 2)
    os.kill(pids[0], signal.SIGKILL)
    pyspies = [int(pid) for pid in bell.hear(1)]
    if end == "signal":
        command.signal(signal.SIGTERM)
    else:
        Path(f"{bell.path}.go").write_text("go\n")
    assert command.wait() == code, command.err
    assert not any(map(is_alive, pyspies))
    content = reads(tmp_path / "report")
    assert BEFORE_RESTART in {shot["why"] for shot in content["snapshots"]}
    assert content["restarts"] in (0, 1)
    assert [each["program"] for each in content["earlier_failures"]] == ["r"]


def test_rank_that_hung_is_looked_at_once(infini_run, tmp_path):
    script = f"test {ATTEMPT} = 1 && exit 0; exec sleep 1000"
    flags = (*ALONE, "--hang_timeout=500ms", "--on_hang=stop", f"--report={tmp_path}/report")
    other = ("--program=t", "sh", "-c", "for i in $(seq 50); do echo on; sleep 0.1; done")
    program = ("--program=r", "--max_restarts=2", "--ends_job", "sh", "-c", script)
    command = infini_run(*flags, *other, ":", *program)
    assert command.wait() == 0, command.err
    content = reads(tmp_path / "report")
    assert content["restarts"] == 1
    assert BEFORE_RESTART not in {shot["why"] for shot in content["snapshots"]}


# ---- within a second, and never against a stop


@pytest.mark.slow
def test_pyspy_that_does_not_end_delays_the_stop_of_64_ranks_by_its_limit_only(infini_run, fake, tmp_path):  # noqa: F811
    command = infini_run(
        *("--nproc_per_node=64", "--snapshots=failure", f"--report={tmp_path}/report"),
        *play_in_python("say=up", "wait"),
        env=fake("exec sleep 1000"),
    )
    pids = command.pids_of(b"up", 64)
    os.kill(pids[0], signal.SIGKILL)
    assert command.wait() == 137
    content = reads(tmp_path / "report")
    assert content["snapshots"]
    assert {shot["python_note"] for shot in content["snapshots"]} == {"py-spy took longer than 0.7 s"}
    assert (content["leftover_processes"], content["stuck"]) == ([], [])


@pytest.fixture
def endless(monkeypatch, fake, bell):  # noqa: F811
    """A look without any limit: only a stop ends it. Return the environment."""
    monkeypatch.setattr(watchdog, "LOOK_S", float("inf"))
    monkeypatch.setattr(watchdog, "STOP_S", float("inf"))
    return fake(f"echo $$ > {bell.path}; exec sleep 1000")


@pytest.mark.parametrize("how", ["terminate", "kill", "close"])
def test_stop_does_not_wait_for_a_look(endless, bell, how):
    launcher = ir.ProcessLauncher(play_in_python("wait"), nproc_per_node=3, snapshots="failure", env=endless)
    with launcher:
        launcher.launch()
        until(lambda: all(is_in_place(exit_.pid) for exit_ in launcher.status()))
        launcher.signal(signal.SIGKILL, rank=0)
        waiting = threading.Thread(target=launcher.wait)
        waiting.start()
        pyspies = [int(pid) for pid in bell.hear(2)]
        getattr(launcher, how)()
        waiting.join()
    assert not any(map(is_alive, pyspies))
    snapshots = launcher.report().snapshots
    assert [snapshot.rank for snapshot in snapshots] == [1, 2], "what was seen is kept"


def test_signal_does_not_wait_for_a_look(infini_run, fake, bell, tmp_path):  # noqa: F811
    """The core stops the ranks; the look ends, and the report has what it saw."""
    command = infini_run(
        *("--nproc_per_node=3", "--snapshots=failure", f"--report={tmp_path}/report"),
        *play_in_python("say=up", "wait"),
        env=fake(f"echo $$ > {bell.path}; exec sleep 1000"),
    )
    pids = command.pids_of(b"up", 3)
    os.kill(pids[0], signal.SIGKILL)
    pyspies = [int(pid) for pid in bell.hear(2)]
    command.signal(signal.SIGTERM)
    assert command.wait() == 137
    assert not any(map(is_alive, pyspies))
    content = reads(tmp_path / "report")
    assert content["first_failure"] == 0
    assert [shot["rank"] for shot in content["snapshots"]] == [1, 2]


# ---- what is shown


def seen(rank, *frames, state="S"):
    return HangSnapshot(rank=rank, pid=1, host="a", time_s=0.0, why=BEFORE_STOP, frames=frames, state=state)


def test_lines_are_five_at_most():
    many = [seen(rank, f"step (train.py:{rank})") for rank in range(5)]
    wait = [seen(rank, "all_reduce (train.py:9)") for rank in range(5, 20)]
    lines = lines_before_stop([*many, *wait], {})
    assert lines[0] == f"{HEADING}:"
    assert lines[1:4] == [f"  rank {rank} on a  step (train.py:{rank})" for rank in range(3)]
    assert lines[4:] == ["  and 3 more groups, of 17 ranks"]


def test_computing_ranks_are_no_group_that_differs():
    assert lines_before_stop([seen(rank, f"step (train.py:{rank})") for rank in range(5)], {}) == []
    assert lines_before_stop([], {}) == []
