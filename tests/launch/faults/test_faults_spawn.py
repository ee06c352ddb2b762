"""Faults of the start: programs that cannot be run, limits that are hit, signals and SIGKILL at any point of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support.command import CHILDREN, play
from tests.support.launch_shapes import as_root, pass_time, strace, with_strace
from tests.support.processes import is_alive, marked, processes
from tests.support.waiting import until

EARLY_TRIALS = int(os.environ.get("FAULT_TRIALS", "100"))  # `make stress` asks for 10,000
SLEEP = ("sh", "-c", "setsid sleep 1000 <&- >&- 2>&- & exec sleep 1000")


def script(path, text, mode=0o755):
    path.write_bytes(text)
    path.chmod(mode)
    return path


def ranks_of(report):
    return json.loads(report.read_text())["ranks"]


def check_that_no_rank_followed(report, most):
    """The ranks that were started are the first ones, at most so many, and were ended by us."""
    ranks = ranks_of(report)
    started = [rank for rank in ranks if rank["pid"] is not None]
    assert [rank["rank"] for rank in started] == list(range(len(started)))
    assert len(started) <= most
    assert {rank["signal"] for rank in started} <= {"SIGTERM"}
    assert all(rank["stopped"] for rank in started)


# ---- programs


REFUSED = {
    "missing": (None, 0, 127, b"does not exist"),
    "no run bit": (b"#!/bin/sh\n", 0o644, 126, b"has no run bit; use "),
    "no first line": (b"echo hello\n", 0o755, 126, b"has no #! line"),
    "missing interpreter": (b"#!/no/such/shell\n", 0o755, 126, b"needs the interpreter /no/such/shell"),
    "DOS line ends": (b"#!/bin/sh\r\necho\r\n", 0o755, 126, b"DOS line ends"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.rows(6)
def test_program_that_cannot_be_run_is_refused_in_one_line(launch, tmp_path, case):
    text, mode, code, words = REFUSED[case]
    path = tmp_path / "program"
    if text is not None:
        script(path, text, mode)
    command = launch(path)
    assert command.wait() == code
    assert words in command.err
    assert str(path).encode() in command.err
    assert command.err.count(b"\n") == 1


def test_directory_and_link_to_itself_are_refused_in_one_line(launch, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    directory, loop = launch(tmp_path), launch(tmp_path / "loop")
    assert (directory.wait(), loop.wait()) == (126, 127)
    assert b"is a directory" in directory.err
    assert b"loop cannot be reached: " in loop.err
    assert (directory.err + loop.err).count(b"\n") == 2


@pytest.mark.rows(5)
def test_what_only_the_kernel_refuses_is_126_with_its_word(launch, every_path, tmp_path):
    command = launch(script(tmp_path / "program", b"\0\1\2 no format that anybody knows"))
    assert command.wait() == 126
    assert b"could not be started: executing the program: Exec format error" in command.err
    assert b"next: put its interpreter in front; the file is not a program for this machine" in command.err
    assert command.err.count(b"\n") == 2


@pytest.mark.rows(5)
def test_program_that_is_being_written_is_126_with_the_kernels_word(launch, every_path, tmp_path):
    path = tmp_path / "program"
    shutil.copy("/bin/true", path)
    with open(path, "ab"):
        command = launch(path)
        assert command.wait() == 126
    assert b"Text file busy" in command.err


@pytest.mark.rows(5)
def test_arguments_that_are_too_long_are_126_and_a_hint(launch, every_path):
    """A string of 128 KiB is what Linux takes (execve(2)); what the flag still fits, its variable does not."""
    command = launch("--run_id=" + "y" * (128 * 1024 - 17), "true")
    assert command.wait() == 126
    assert b"executing the program: Argument list too long" in command.err
    assert b"ulimit -s" in command.err
    assert command.err.count(b"\n") == 2


def test_path_with_holes_and_empty_entries_is_searched_to_its_end(launch, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "prog").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    script(tmp_path / "a" / "prog", b"#!/bin/sh\n", 0o644)
    script(tmp_path / "c" / "prog", b"#!/bin/sh\necho found\n")
    path = f"/nonexistent::{tmp_path}/a:{tmp_path}/b:{tmp_path}/c:{os.environ['PATH']}:"
    command = launch("prog", env={**os.environ, "PATH": path}, cwd=tmp_path)
    assert command.wait() == 0, command.err
    assert command.out == b"found\n" * launch.ranks


@as_root
@with_strace
def test_term_ends_ranks_that_hang_in_exec(launch, tmp_path):
    """A slow file system: strace holds every exec for 2.5 s. The launcher does not wait in it."""
    words = ("-f", "--trace=execve", "-e", "inject=execve:delay_enter=2500ms:when=1")
    count, parents = launch.ranks, tmp_path / "pids"
    start = ("sh", "-c", f'echo $$ > {parents}; exec "$@"', "sh")
    command = launch("--grace=1000", "sleep", "1000", under=(*start, *strace(tmp_path / "trace", *words)))

    def hang_in_exec():
        children = [pid for pid, (parent, state, _) in processes().items() if parent == command.pid and state == "t"]
        return sum(call_of(pid) == EXECVE for pid in children) >= count

    until(hang_in_exec)
    assert command.stop() == 143


EXECVE = {"x86_64": "59", "aarch64": "221"}.get(os.uname().machine, "")


def call_of(pid):
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0]
    except OSError:
        return ""


# ---- limits


def unprivileged(uid):
    """A user of its own, whose processes are counted; it may read what is in root's home."""
    words = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *words, "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override")


def check_refusal(command):
    """A process could not be created: one line that names the limit; nothing is left."""
    assert command.err.count(b"\n") == 1, command.err
    assert re.search(rb"(rank \d+|nothing) can(not)? be started: ", command.err)
    assert b"ulimit -u, the cgroup's pids.max" in command.err


@as_root
@pytest.mark.rows(5)
def test_process_limit_walked_one_by_one_starts_all_or_leaves_none(launch, every_path):
    codes, most = [], launch.ranks + 8
    for n in range(1, most):
        under = (*unprivileged(40000 + os.getpid() % 20000), "prlimit", f"--nproc={n}:{n}")
        command = launch("sleep", "1", under=under)  # all of them at once, however slowly they start
        codes.append(command.wait())
        assert not marked()
        if codes[-1]:
            check_refusal(command)
        if codes[-2:] == [0, 0]:
            break
    assert codes == sorted(codes, reverse=True), "a higher limit made it worse"
    assert set(codes) == {0, 1}


PIDS = Path("/sys/fs/cgroup/pids")


@pytest.fixture
def counted():
    """A cgroup in which so many processes may be: what to put before the command, for a number."""
    folder = PIDS / f"test-{os.getpid()}"
    if os.geteuid() != 0 or not (PIDS / "cgroup.procs").exists():
        pytest.skip("no pids controller here that we may use")
    folder.mkdir()

    def limit(most):
        (folder / "pids.max").write_text(str(most))
        return ("sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")

    yield limit
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_rank_that_the_cgroup_has_no_room_for_takes_the_others_down(launch, counted):
    room = 1 + launch.ranks // 2
    command = launch("--grace=1000", "sh", "-c", "trap '' TERM; exec sleep 1000", under=counted(room))
    assert command.wait() == 1
    check_refusal(command)
    assert not marked()


def test_a_thousand_ranks_start_and_end(infini_run, tmp_path):
    """Once, not in every shape: it is the number that is tried."""
    assert infini_run("--nproc_per_node=1000", "true").wait() == 0
    command = infini_run("--nproc_per_node=1000", "--grace=1000", f"--report={tmp_path}/r", "sleep", "1000")
    until(lambda: sum(name == "sleep" for parent, _, name in processes().values() if parent == command.pid) == 1000)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert {rank["signal"] for rank in ranks_of(tmp_path / "r")} == {"SIGTERM"}


# ---- signals while ranks are being started


@with_strace
@pytest.mark.parametrize("call", ["clone", "setpgid", "epoll_ctl"])
@pytest.mark.rows(4)
def test_term_at_each_system_call_of_the_start_starts_no_further_rank(launch, tmp_path, call):
    """Exactly there: strace sends it on entry of the k-th such call after the launcher took its signals."""
    before = 3 if call == "epoll_ctl" else 0  # what the group itself watches, before rank 0
    for k in range(1, before + launch.ranks + 1):
        report = tmp_path / f"{call}{k}"
        under = strace(tmp_path / "trace", "-e", f"trace={call}", "-e", f"inject={call}:signal=TERM:when={k}")
        command = launch("--grace=1000", f"--report={report}", *SLEEP, under=under)
        assert command.wait() == 143, command.err
        check_that_no_rank_followed(report, k)
        assert not marked()


def test_term_at_any_moment_of_the_start_reaches_all_that_was_started(launch, tmp_path, draw):
    for turn in range(12):
        report = tmp_path / f"{turn}"
        command = launch("--grace=1000", f"--report={report}", "sleep", "1000")
        command.until_it_takes_signals()
        pass_time(draw(0.02))
        assert command.stop() == 143, command.err
        check_that_no_rank_followed(report, launch.ranks)


def test_no_term_of_the_first_milliseconds_is_lost(launch, tmp_path, draw):
    """After our exec it does what it does to any program, and nothing was started; once we take signals it stops
    the job. To process 1 the kernel delivers nothing before that (pid_namespaces(7))."""
    for turn in range(EARLY_TRIALS // 4):
        command = launch("--grace=1000", "sh", "-c", f"echo $RANK >> {tmp_path}/started; exec sleep 1000")
        if launch.is_process_1 or turn % 2:
            command.until_it_takes_signals()
        pass_time(draw(0.003))
        code = command.stop()
        assert code == 143 or (code == -signal.SIGTERM and not (tmp_path / "started").exists()), command.err
        assert not marked()
        (tmp_path / "started").unlink(missing_ok=True)


@pytest.mark.rows(5)
def test_storm_of_ten_thousand_signals_loses_none_that_is_counted(launch, every_path, bell):
    """Real-time signals are queued, not merged: every rank gets every one, whatever else comes meanwhile."""
    noise = [signal.SIGCHLD, signal.SIGPIPE, signal.SIGTTOU, signal.SIGTTIN, signal.SIGCONT]
    command = launch(sys.executable, "-ISE", CHILDREN / "answer.py", bell.path)
    command.until_it_takes_signals()
    for _ in range(1000):  # while ranks are started
        for number in noise:
            command.signal(number)
    assert sorted(bell.hear(launch.ranks)) == sorted(f"up {rank}" for rank in range(launch.ranks))
    heard = []
    for _ in range(10):
        for _ in range(100):
            for number in (signal.SIGRTMIN, *noise[:4]):
                command.signal(number)
        heard += bell.hear(100 * launch.ranks)
    assert sorted(heard) == sorted(f"SIGRTMIN {rank}" for rank in range(launch.ranks) for _ in range(1000))
    command.signal(signal.SIGUSR2)
    assert command.wait() == 7


# ---- the launcher dies meanwhile


@with_strace
@pytest.mark.parametrize("call", ["clone", "setpgid"])
def test_no_rank_outlives_a_launcher_that_is_killed_at_a_point_of_the_start(launch, tmp_path, call):
    """On entry of its k-th clone; and of the setpgid that follows one, when the child may be anywhere before exec."""
    for k in range(1, launch.ranks + 1):
        under = strace(tmp_path / "trace", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={k}")
        command = launch("sleep", "1000", under=under)
        assert command.wait() in (-signal.SIGKILL, 1)  # 1 is unshare's word for it
        until(lambda: not marked())
        assert not is_alive(command.pid)


def test_no_rank_outlives_a_launcher_that_is_killed_at_any_moment_of_the_start(launch, draw):
    for _ in range(12):
        command = launch(*play("say=ready", "wait"))
        command.until_it_takes_signals()
        pass_time(draw(0.03))
        command.signal(signal.SIGKILL)
        command.wait()
        until(lambda: not marked())
