"""No signal is lost: those that end the job end all of it, the others are passed on and it goes on."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from tests.support.command import play
from tests.support.waiting import until

STOPPING = {"TERM": "TERM", "INT": "INT", "QUIT": "QUIT"}
ALL_BLOCKED = 0xFFFFFFFFFFFFFFFF & ~(1 << 8 | 1 << 18 | 3 << 31)  # but KILL, STOP and glibc's own two


def number(name):
    return signal.SIGRTMIN + int(name[6:]) if name.startswith("RTMIN+") else signal.Signals[f"SIG{name}"]


def status_field(pid, name):
    with open(f"/proc/{pid}/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith(f"{name}:")), 16)


def has_taken_over(pid):
    """Whether it is past the interpreter's start, where nobody can be ready for a signal yet."""
    return status_field(pid, "SigBlk") & ALL_BLOCKED == ALL_BLOCKED


def ignoring(*names):
    def ignore():
        for name in names:
            signal.signal(number(name), signal.SIG_IGN)

    return ignore


def blocking(*names):
    return lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [number(name) for name in names])


# ---- those that end the job


@pytest.mark.parametrize("name", STOPPING)
@pytest.mark.rows(5)
def test_stopping_signal_reaches_every_rank_as_itself(infini_run, name, every_path):
    command = infini_run("--nproc_per_node=3", *play(f"end={name}:0", "say=ready", "wait"))
    command.pids_of(b"ready", 3)
    command.signal(number(name))
    assert command.wait() == 0
    assert command.out.count(f"got {name}".encode()) == 3
    assert f"SIG{name}: stopping".encode() in command.err


@pytest.mark.parametrize(("sent", "seen"), [("TERM", "USR1"), ("INT", "INT"), ("QUIT", "QUIT"), ("SEGV", "USR1")])
def test_stop_signal_stands_for_term_and_not_for_ctrl_c(infini_run, sent, seen):
    words = [f"end={name}:0" for name in ("TERM", "INT", "QUIT", "USR1")]
    command = infini_run("--nproc_per_node=2", "--stop_signal=USR1", *play(*words, "say=ready", "wait"))
    command.pids_of(b"ready", 2)
    command.signal(number(sent))
    assert command.wait() == 0
    assert [line.split()[1] for line in command.out.decode().split("\n") if line.startswith("got")] == [seen] * 2


# ---- those that do not


def test_passed_on_to_the_leader_only_but_hangup_to_its_group(infini_run):
    words = ["tell=USR1", "tell=HUP", "end=TERM:0", "group", "say=ready", "wait", "done", "say=ready", "wait"]
    command = infini_run(*play(*words))
    leader = command.read_lines(b"ready", 2)
    command.signal(signal.SIGUSR1)
    command.read_lines(b"got USR1")
    command.signal(signal.SIGHUP)
    assert len({line[-1] for line in command.read_lines(b"got HUP", 2)}) == 2
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert command.out.count(b"got USR1") == 1
    assert len(leader) == 2


# ---- what we found at our start


# ---- while the ranks are being started


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.rows(5)
def test_term_at_any_moment_of_the_start_ends_all_and_reaches_all(infini_run, tmp_path, every_path, seed):
    chance = random.Random(seed)
    for turn in range(4):
        report = tmp_path / f"{turn}"
        command = infini_run("--nproc_per_node=64", "--grace=1000", f"--report={report}", "sleep", "1000")
        until(lambda pid=command.pid: has_taken_over(pid))
        until_s = time.perf_counter() + chance.uniform(0, 0.08)
        while time.perf_counter() < until_s:  # the moment is the test's input: it is drawn, not waited for
            pass
        command.signal(signal.SIGTERM)
        assert command.wait() == 143, command.err
        ranks = json.loads(report.read_text())["ranks"]
        started = [rank for rank in ranks if rank["pid"] is not None]
        assert {rank["signal"] for rank in started} <= {"SIGTERM"}
        assert all(rank["stopped"] for rank in started)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.rows(5)
def test_term_among_the_first_ranks_starts_no_more_of_them(infini_run, tmp_path, every_path, turn):
    command = infini_run(
        "--nproc_per_node=64", "--grace=1000", f"--report={tmp_path}/r", "sh", "-c", "echo started; exec sleep 1000"
    )
    command.read_until(b"started")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    ranks = json.loads((tmp_path / "r").read_text())["ranks"]
    started = [rank["pid"] is not None for rank in ranks]
    assert started == sorted(started, reverse=True)
    assert {rank["signal"] for rank in ranks if rank["pid"] is not None} == {"SIGTERM"}


def test_second_term_during_the_start_ends_all(infini_run, every_path):
    for _ in range(4):
        command = infini_run(
            "--nproc_per_node=64", "--grace=1000", "sh", "-c", "trap '' TERM; echo on; exec sleep 1000"
        )
        command.read_until(b"on")
        command.signal(signal.SIGTERM)
        command.signal(signal.SIGTERM)
        command.signal(signal.SIGINT)
        assert command.wait() in (130, 143)
