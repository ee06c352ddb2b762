"""Faults of the entry: what whoever starts us left closed, ignored, blocked, limited or running."""

from __future__ import annotations

import itertools
import os
import resource
import shlex
import signal
import subprocess
import sys

import pytest

from tests.support.command import LIBC_OWN, play
from tests.support.launch_shapes import as_root
from tests.support.processes import is_alive, marked, state_of
from tests.support.waiting import until

READY = play("tell=USR2", "end=TERM:0", "say=ready", "wait")


def masks_of(text, field):
    """One per rank, without those that a sanitizer's runtime may have changed."""
    found = [int(line.split()[1], 16) for line in text.decode().splitlines() if line.startswith(field)]
    return [mask & ~LIBC_OWN for mask in found]


def bits(*names):
    return sum(1 << signal.Signals[f"SIG{name}"] - 1 for name in names)


# ---- signals


@pytest.mark.parametrize("how", ["--ignore-signal=CHLD", "--block-signal=CHLD", "--block-signal"])
@pytest.mark.rows(12)
def test_exit_code_is_kept_though_sigchld_was_ignored_or_blocked_at_entry(launch, every_path, how):
    command = launch("sh", "-c", "grep ^Sig /proc/self/status; exit $((RANK * 3 + 3))", under=("env", how))
    assert command.wait() in range(3, 3 * launch.ranks + 1, 3)
    assert not any(mask & bits("CHLD") for mask in masks_of(command.out, "SigIgn"))


@pytest.mark.rows(5)
def test_ranks_get_the_mask_and_the_ignored_signals_that_we_were_started_with(launch, every_path):
    how = ("env", "--block-signal=USR1", "--block-signal=TERM", "--ignore-signal=HUP", "--ignore-signal=QUIT")
    command = launch("cat", "/proc/self/status", under=how)
    assert command.wait() == 0
    assert masks_of(command.out, "SigBlk") == [bits("USR1", "TERM")] * launch.ranks
    assert masks_of(command.out, "SigIgn") == [bits("HUP", "QUIT")] * launch.ranks


def test_term_stops_a_job_that_was_started_with_every_signal_blocked(launch):
    command = launch("--grace=0.1", *play("say=ready", "wait"), under=("env", "--block-signal"))
    command.pids_of(b"ready", launch.ranks)
    assert command.stop() == 143


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "TERM", "USR1"])
@pytest.mark.rows(6)
def test_signal_ignored_at_entry_is_ignored_by_ranks_and_stops_nothing(launch, name):
    words = play("tell=USR2", "end=ALRM:0", "say=ready", "wait")
    command = launch(*words, under=("env", f"--ignore-signal={name}"))
    command.pids_of(b"ready", launch.ranks)
    command.signal(signal.Signals[f"SIG{name}"])
    command.signal(signal.SIGUSR2)
    command.pids_of(b"got USR2", launch.ranks)
    command.signal(signal.SIGALRM)
    assert command.wait() == 0


def test_nohup_keeps_a_hangup_from_the_job(launch):
    command = launch(*READY, under=("nohup",))
    command.pids_of(b"ready", launch.ranks)
    command.signal(signal.SIGHUP)
    command.signal(signal.SIGUSR2)
    command.pids_of(b"got USR2", launch.ranks)
    assert command.stop() == 0


@pytest.mark.rows(5)
def test_what_python_ignores_is_not_ignored_in_ranks(launch, every_path):
    command = launch("cat", "/proc/self/status", under=("env", "--ignore-signal=PIPE", "--ignore-signal=XFSZ"))
    assert command.wait() == 0
    assert masks_of(command.out, "SigIgn") == [0] * launch.ranks


# ---- descriptors, directory, children


@pytest.mark.parametrize("closed", [c for n in range(4) for c in itertools.combinations(range(3), n)])
@pytest.mark.rows(10)
def test_closed_stdio_is_dev_null_in_ranks_and_takes_no_other_file(launch, tmp_path, closed):
    look = f"exec 3> {tmp_path}/$RANK; for fd in 0 1 2; do to=$(readlink /proc/$$/fd/$fd); echo $to >&3; done"
    under = ("sh", "-c", 'exec "$@" ' + " ".join(f"{fd}>&-" for fd in closed), "sh")
    assert launch("sh", "-c", look, under=under).wait() == 0
    for rank in range(launch.ranks):
        for fd, target in enumerate((tmp_path / str(rank)).read_text().split()):
            assert target.startswith("/dev/null" if fd in (0, *closed) else "pipe:")


@pytest.mark.rows(5)
def test_extra_descriptor_is_inherited_by_ranks_and_not_kept_by_us(launch, every_path, tmp_path):
    os.mkfifo(tmp_path / "extra")
    keep = ("sh", "-c", f'exec 7> {tmp_path}/extra; exec "$@"', "sh")
    command = launch("sh", "-c", 'echo extra >&7; exec 7>&-; exec "$@"', "sh", *READY, under=keep)
    with open(tmp_path / "extra", "rb") as reader:
        assert reader.read() == b"extra\n" * launch.ranks  # to the end: nobody has it any more
    command.pids_of(b"ready", launch.ranks)
    assert command.stop() == 0


@pytest.mark.rows(5)
def test_children_inherited_through_exec_are_reaped_and_neither_counted_nor_waited_for(launch, every_path, gate):
    goes = gate()
    before = '(exit 7) & sleep 1000 >/dev/null 2>&1 & echo "foreign 0 $!"; exec "$@"'
    words = ("sh", "-c", before, "sh")
    command = launch(*play("say=ready", f"hold={goes}", "exit=0"), under=words, gates=(goes,))
    foreign = command.pids_of(b"foreign")[0]
    command.pids_of(b"ready", launch.ranks)
    goes.open()
    assert command.wait() == 0
    assert b"left behind" not in command.err
    if not launch.is_process_1:  # the kernel ends a namespace with its process 1
        assert is_alive(foreign)
        os.kill(foreign, signal.SIGKILL)
    until(lambda: not is_alive(foreign))


@pytest.mark.rows(5)
def test_foreign_child_that_ends_while_we_run_is_no_zombie_and_no_failure(launch, every_path, gate):
    goes = gate()
    ends = shlex.join(play(f"hold={goes}", "exit=9"))
    before = f'{ends} & echo "foreign 0 $!"; exec "$@"'
    command = launch(*READY, under=("sh", "-c", before, "sh"), gates=(goes,))
    foreign = command.pids_of(b"foreign")[0]
    command.pids_of(b"ready", launch.ranks)
    goes.open()
    until(lambda: state_of(foreign) == "")
    assert command.stop() == 0


@pytest.mark.rows(5)
def test_working_directory_that_was_deleted_is_no_obstacle(launch, every_path, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    command = launch("true", under=("sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh"), cwd=folder)
    assert command.wait() == 0, command.err


@pytest.mark.rows(5)
def test_we_sit_in_the_root_directory_and_our_ranks_where_we_were_started(launch, every_path, tmp_path):
    command = launch(*play("end=TERM:0", "ask=cwd", "wait"), cwd=tmp_path)
    assert {words[1] for words in command.read_lines(b"cwd", launch.ranks)} == {str(tmp_path.resolve())}
    until(lambda: os.readlink(f"/proc/{command.pid}/cwd") == "/")
    assert command.stop() == 0


# ---- limits and what else is inherited


def needed_descriptors():
    """How many Python itself needs to come as far as us: below that nobody can speak."""
    words = [sys.executable, "-c", "import infini_run.cli, infini_run.options.options, infini_run.core.group"]
    for n in range(3, 60):
        limit = (resource.RLIMIT_NOFILE, (n, n))
        done = subprocess.run(words, preexec_fn=lambda limit=limit: resource.setrlimit(*limit), capture_output=True)
        if done.returncode == 0:
            return n
    raise AssertionError("Python does not start at all")


@pytest.mark.parametrize("flags", [(), ("--console=prefix",)], ids=["inherit", "prefix"])
@pytest.mark.rows(3)
def test_descriptor_limit_walked_one_by_one_starts_all_and_leaves_no_stray_or_starts_nothing(launch, tmp_path, flags):
    """The hunt for strays needs descriptors of its own, when all others are in use."""
    results = []
    for n in range(needed_descriptors(), 70):
        started = tmp_path / str(n)
        started.mkdir()
        stray = f"setsid sleep 1000 <&- >&- 2>&- & : > {started}/$RANK"
        command = launch("--grace=0.1", *flags, "sh", "-c", stray, under=("prlimit", f"--nofile={n}:{n}"))
        code = command.wait()
        assert not marked()
        results.append(code == 0)
        assert len(list(started.iterdir())) == (launch.ranks if code == 0 else 0)
        if code != 0:
            assert (code, command.err.count(b"\n")) == (1, 1), command.err
            assert b"ulimit -n" in command.err
        if results[-2:] == [True, True]:
            break
    assert results == sorted(results), "more descriptors made it worse"
    assert results[-1]


@as_root
def test_niceness_and_oom_score_are_handed_on(launch):
    under = ("sh", "-c", 'echo 300 > /proc/self/oom_score_adj; exec nice -n 3 "$@"', "sh")
    command = launch("sh", "-c", 'echo "is $(nice) $(cat /proc/self/oom_score_adj)"', under=under)
    assert command.wait() == 0
    assert command.out == b"is %d 300\n" % min(19, os.nice(0) + 3) * launch.ranks
