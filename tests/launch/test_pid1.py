"""As process 1 of a container: everything is reaped, nothing survives, signals and codes are the same."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.support.command import play
from tests.support.processes import marked, processes
from tests.support.rows import FORK_STORM
from tests.support.waiting import until

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
STRAY = ["daemon", "name=left-behind", "say=stray", "wait", "done"]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root"),
]


def process_1(command):
    """Its number in our own namespace."""
    (pid,) = [pid for pid, (parent, _, _) in processes().items() if parent == command.pid]
    return pid


def is_reading_signals(pid):
    with open(f"/proc/{pid}/status") as file:
        return "SigBlk:\tffff" in file.read()


def test_exit_code_is_the_same(infini_run, every_path):
    assert infini_run("--nproc_per_node=2", "true", under=UNSHARE).wait() == 0
    assert infini_run("--nproc_per_node=2", "sh", "-c", "exit 7", under=UNSHARE).wait() == 7
    assert infini_run("sh", "-c", "kill -KILL $$", under=UNSHARE).wait() == 137


def test_zombies_of_many_double_forks_are_reaped_while_the_job_runs(infini_run, every_path):
    command = infini_run("--nproc_per_node=2", *play("orphans=100", "reaped", "say=clean"), under=UNSHARE)
    assert command.wait() == 0
    assert command.out.count(b"clean") == 2


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT"])
@pytest.mark.rows(5)
def test_stopping_signal_stops(infini_run, every_path, name):
    command = infini_run("--nproc_per_node=2", *play(f"end={name}:0", "say=ready", "wait"), under=UNSHARE)
    command.read_lines(b"ready", 2)
    os.kill(process_1(command), signal.Signals[f"SIG{name}"])
    assert command.wait() == 0
    assert command.out.count(b"got ") == 2


def test_term_from_inside_stops(infini_run, every_path):
    command = infini_run("--nproc_per_node=2", *play("say=ready", "wait"), under=UNSHARE)
    command.read_lines(b"ready", 2)
    inside = ("nsenter", f"--target={process_1(command)}", "--pid", "--mount", "kill", "-TERM", "1")
    os.spawnvp(os.P_WAIT, inside[0], inside)  # its end may be that of the namespace
    assert command.wait() == 143


@pytest.mark.parametrize("stubborn", [[], ["ignore=TERM"]], ids=["meek", "stubborn"])
def test_strays_are_ended_and_named(infini_run, stubborn, every_path):
    words = ["daemon", *stubborn, *STRAY[1:], "exit=0"]
    command = infini_run("--nproc_per_node=2", "--grace=0.2", *play(*words), under=UNSHARE)
    assert command.wait() == 0
    assert b"stopped 2 processes left behind: left-behind (" in command.err
    assert not marked()


def test_strays_get_the_stop_signal_and_their_grace(infini_run, every_path):
    words = ["daemon", "end=TERM:0", "say=stray", "wait", "done", "exit=0"]
    command = infini_run("--grace=1000", *play(*words), under=UNSHARE)
    assert command.wait() == 0
    assert b"got TERM" in command.out


@FORK_STORM
def test_trees_that_fork_as_fast_as_they_are_killed_are_ended(infini_run, every_path):
    hopper = ["daemon", "ignore=TERM", "say=stray", "hop", "done"]
    command = infini_run("--grace=0.1", "--nproc_per_node=2", *play(*hopper, *hopper, "exit=0"), under=UNSHARE)
    assert command.wait() == 0
    assert not marked()


def test_killed_process_1_takes_everything_with_it(infini_run, every_path):
    command = infini_run("--nproc_per_node=2", *play(*STRAY, "say=ready", "wait"), under=UNSHARE)
    command.read_lines(b"ready", 2)
    os.kill(process_1(command), signal.SIGKILL)
    assert command.wait() != 0
    until(lambda: not marked())


def test_what_was_brought_into_the_container_outlives_the_strays_of_an_attempt_and_not_the_command(infini_run, gate):
    """docker exec: between two attempts only what the ranks have left is ended, at the end everything."""
    fails, ends = gate(), gate()
    first = f"setsid sleep 1000 & echo first; read x </dev/fd/{fails}; exit 3"
    script = f"if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then {first}; fi; echo second; read x </dev/fd/{ends}; exit 0"
    words = ("--max_restarts=1", "--grace=0.2", "sh", "-c", script)
    command = infini_run(*words, under=UNSHARE, gates=(fails, ends))
    command.read_lines(b"first")
    inside = ("nsenter", f"--target={process_1(command)}", "--pid", "--mount", "sleep", "1000")
    visitor = subprocess.Popen(inside)
    try:
        until(lambda: "sleep" in {name for parent, _, name in processes().values() if parent == visitor.pid})
        fails.open()
        command.read_lines(b"second")
        assert visitor.poll() is None
        ends.open()
        assert command.wait() == 0
        assert b"left behind" in command.err
        assert visitor.wait() != 0
    finally:
        visitor.kill()
        visitor.wait()
