"""Our exit code is the first failure's: the earliest to die, and never one that we stopped."""

from __future__ import annotations

import json
import os
import signal

from tests.support.command import play
from tests.support.processes import state_of
from tests.support.waiting import until

ONE_FAILS = 'test "$RANK" = 1 || exec sleep 1000; ulimit -c 0; '


def sh(script):
    return ["sh", "-c", script]


def report_of(path):
    return json.loads(path.read_text())


def test_zero_when_every_rank_exits_zero(infini_run, every_path):
    assert infini_run("--nproc_per_node=4", "true").wait() == 0


def test_failure_and_signal_are_ours_on_every_path(infini_run, every_path):
    assert infini_run("--nproc_per_node=3", *sh(f"{ONE_FAILS} exit 7")).wait() == 7
    assert infini_run("--nproc_per_node=3", *sh(f"{ONE_FAILS} kill -SEGV $$")).wait() == 128 + signal.SIGSEGV


def test_first_to_die_wins_though_a_lower_rank_fails_20_ms_later(infini_run, gate, every_path):
    first, later = gate(), gate()
    pause = 0.5 if "nopidfd" in every_path else 0.02  # there a thread of ours waits for each, and may be held up
    words = ["@1", f"hold={first}", "exit=5", "@0", f"after={later}", f"pause={pause}", "exit=7"]
    command = infini_run("--nproc_per_node=2", *play("ignore=TERM", "say=ready", *words), gates=(first, later))
    pids = command.pids_of(b"ready", 2)
    later.open(str(pids[1]))
    first.open()
    assert command.wait() == 5
    assert b"rank 1 on " in command.err


def test_rank_that_we_stopped_is_never_the_failure(infini_run, tmp_path, every_path):
    words = ["@0", "end=TERM:9", "@1", "end=USR2:4", "@2", "end=TERM:-SEGV", "@*", "say=ready", "wait"]
    command = infini_run("--nproc_per_node=3", f"--report={tmp_path}/r", *play(*words))
    os.kill(command.pids_of(b"ready", 3)[1], signal.SIGUSR2)
    assert command.wait() == 4
    report = report_of(tmp_path / "r")
    assert [rank["failed"] for rank in report["ranks"]] == [False, True, False]
    assert [rank["stopped"] for rank in report["ranks"]] == [True, False, True]
    assert [rank["exit_code"] for rank in report["ranks"]] == [9, 4, None]


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
