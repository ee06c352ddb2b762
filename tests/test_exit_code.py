"""Our exit code is the first failure's: the earliest to die, and never one that we stopped."""

from __future__ import annotations

import json
import os
import signal

import pytest
from conftest import play, state_of, until

SIGNALS = ["HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL"]
SIGNALS += ["USR1", "SEGV", "PIPE", "ALRM", "TERM", "XCPU", "SYS"]
ONE_FAILS = 'test "$RANK" = 1 || exec sleep 1000; ulimit -c 0; '


def sh(script):
    return ["sh", "-c", script]


def report_of(path):
    return json.loads(path.read_text())


def test_zero_when_every_rank_exits_zero(infini_run, every_path):
    assert infini_run("--nproc_per_node=4", "true").wait() == 0


@pytest.mark.parametrize("code", [1, 2, 3, 42, 99, 125, 126, 127, 128, 130, 137, 143, 200, 254, 255])
def test_code_of_a_failed_rank_is_ours(infini_run, code):
    assert infini_run("--nproc_per_node=3", *sh(f"{ONE_FAILS} exit {code}")).wait() == code


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_that_ended_a_rank_is_ours_with_128_added(infini_run, name):
    command = infini_run("--nproc_per_node=3", *sh(f"{ONE_FAILS} kill -{name} $$"))
    assert command.wait() == 128 + signal.Signals[f"SIG{name}"]
    assert f"killed by SIG{name} " in command.err.decode()


def test_real_time_signal_that_ended_a_rank_is_named(infini_run):
    command = infini_run("--nproc_per_node=2", *sh(f"{ONE_FAILS} kill -37 $$"))
    assert command.wait() == 128 + 37
    assert b"killed by SIGRTMIN+3 " in command.err


def test_failure_and_signal_are_ours_on_every_path(infini_run, every_path):
    assert infini_run("--nproc_per_node=3", *sh(f"{ONE_FAILS} exit 7")).wait() == 7
    assert infini_run("--nproc_per_node=3", *sh(f"{ONE_FAILS} kill -SEGV $$")).wait() == 128 + signal.SIGSEGV


def test_first_to_die_wins_though_a_lower_rank_fails_20_ms_later(infini_run, gate, every_path):
    first, later = gate(), gate()
    words = ["@1", f"hold={first}", "exit=5", "@0", f"after={later}", "pause=0.02", "exit=7"]
    command = infini_run("--nproc_per_node=2", *play("ignore=TERM", "say=ready", *words), gates=(first, later))
    pids = command.pids_of(b"ready", 2)
    later.open(str(pids[1]))
    first.open()
    assert command.wait() == 5
    assert b"rank 1 on " in command.err


@pytest.mark.parametrize("path", ["", "fork"])  # without pidfds the kernel tells deaths in the order of birth
def test_first_to_die_wins_among_deaths_that_are_seen_at_once(infini_run, gate, monkeypatch, path):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    order = [2, 0, 3, 1]
    gates = [gate() for _ in order]
    words = [word for rank in order for word in (f"@{rank}", f"hold={gates[rank]}", f"exit={10 + rank}")]
    command = infini_run("--nproc_per_node=4", *play("say=ready", *words), gates=tuple(gates))
    pids = command.pids_of(b"ready", 4)
    command.suspend()
    for rank in order:
        gates[rank].open()
        until(lambda rank=rank: state_of(pids[rank]) == "Z")
    command.signal(signal.SIGCONT)
    assert command.wait() == 12
    assert b"; 3 more failed" in command.err


def test_rank_that_we_stopped_is_never_the_failure(infini_run, tmp_path, every_path):
    words = ["@0", "end=TERM:9", "@1", "end=USR2:4", "@2", "end=TERM:-SEGV", "@*", "say=ready", "wait"]
    command = infini_run("--nproc_per_node=3", f"--report={tmp_path}/r", *play(*words))
    os.kill(command.pids_of(b"ready", 3)[1], signal.SIGUSR2)
    assert command.wait() == 4
    report = report_of(tmp_path / "r")
    assert [rank["failed"] for rank in report["ranks"]] == [False, True, False]
    assert [rank["stopped"] for rank in report["ranks"]] == [True, False, True]
    assert [rank["exit_code"] for rank in report["ranks"]] == [9, 4, None]


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT"])
def test_told_to_stop_is_128_plus_the_signal_though_ranks_exit_zero(infini_run, name):
    command = infini_run("--nproc_per_node=2", *play(f"end={name}:0", "say=ready", "wait"))
    command.pids_of(b"ready", 2)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 128 + signal.Signals[f"SIG{name}"]
    assert command.out.count(b"got ") == 2


def test_failure_before_we_were_told_wins(infini_run, gate, every_path):
    fails = gate()
    command = infini_run(
        "--nproc_per_node=2", *play("say=ready", "@1", f"hold={fails}", "exit=3", "@0", "wait"), gates=(fails,)
    )
    pids = command.pids_of(b"ready", 2)
    command.suspend()
    fails.open()
    until(lambda: state_of(pids[1]) == "Z")
    command.signal(signal.SIGTERM)
    command.signal(signal.SIGCONT)
    assert command.wait() == 3


def test_failure_after_we_were_told_does_not_count(infini_run, every_path):
    command = infini_run("--nproc_per_node=2", *play("end=TERM:3", "say=ready", "wait"))
    command.pids_of(b"ready", 2)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_keep_going_lets_the_others_finish_and_still_fails(infini_run, gate, every_path):
    rest = gate()
    words = ["say=ready", "@1", "exit=3", "@*", f"hold={rest}", "say=done", "@2", "exit=4"]
    command = infini_run("--nproc_per_node=3", "--keep_going", *play(*words), gates=(rest,))
    pids = command.pids_of(b"ready", 3)
    until(lambda: state_of(pids[1]) == "")
    rest.open()
    assert command.wait() == 3
    assert command.out.count(b"done") == 2


def test_program_that_is_missing_is_127_and_starts_nothing(infini_run):
    command = infini_run("--nproc_per_node=4", "no-such-program-anywhere")
    assert command.wait() == 127
    assert command.err.count(b"\n") == 1
    assert b"no-such-program-anywhere" in command.err


def test_program_that_cannot_be_executed_is_126(infini_run, tmp_path):
    (tmp_path / "program").write_text("#!/bin/sh\n")
    command = infini_run("--nproc_per_node=4", tmp_path / "program")
    assert command.wait() == 126
    assert command.err.count(b"\n") == 1
