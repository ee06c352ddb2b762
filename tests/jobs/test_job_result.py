"""How an attempt ended, from what was seen of it."""

from __future__ import annotations

import pytest

from infini_run.errors import NodeLost, ProgramMissing
from infini_run.jobs.allocation.result import check_cancelled, check_timeouts, classify, restart_reason
from infini_run.report.exit import Exit
from infini_run.report.hang_snapshot import HangSnapshot
from infini_run.report.report import Report

KILLED = NodeLost(
    "lost node 0 (n1), and with it n2: srun exited with 137: slurmstepd-n2: error: StepId=1.0 exceeded "
    "memory limit (451506176 > 104857600), being killed", "n1", 0,
)  # fmt: skip
LOST = NodeLost("lost node 1 (n2): gone", "n2", 1)


def ended(rank=5, code=None, signal=0, **more):
    return Exit(rank=rank, local_rank=1, host="n2", pid=1, code=code, signal=signal, start_s=1.0, end_s=2.0, **more)


SAVED = (ended(rank=0, code=85, stopped=True),)


def judged(first=None, told=0, error=None, *, also=(), cancelled=False, late=False, preempted=False, warned=False):
    report = Report(
        launch_id="l", run_id="", host="n1", world_size=8, start_s=1.0, end_s=2.0,
        exits=(*((first,) if first else ()), *also), first_failure=first, received_signal=told,
    )  # fmt: skip
    return classify(
        report, error, is_node_failure=error is not None, is_cancelled=cancelled, is_late=late,
        is_preempted=preempted, is_warned=warned,
        attempt=3,
    )  # fmt: skip


def test_job_that_is_canceled_after_a_rank_asked_for_another_run_is_canceled():
    end = check_cancelled(judged(ended(code=85)))
    assert (end.state, end.code, end.node, end.rank, end.attempt) == ("CANCELLED", 143, "", -1, 3)
    failed = judged(ended(code=7))
    assert check_cancelled(failed) is failed


@pytest.mark.parametrize(
    ("seen", "state", "code", "node", "rank", "scheduler_ended_it"),
    [
        ({}, "COMPLETED", 0, "", -1, False),
        ({"first": ended(code=7)}, "FAILED", 7, "n2", 5, False),
        ({"first": ended(signal=11)}, "FAILED", 139, "n2", 5, False),
        ({"first": ended(signal=9, out_of_memory=True)}, "OOM", 137, "n2", 5, False),
        ({"first": ended(signal=15)}, "FAILED", 143, "n2", 5, True),  # by whom? the scheduler may say
        ({"first": ended(signal=15), "told": 15}, "CANCELLED", 143, "", -1, True),
        ({"first": ended(code=143), "told": 15, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"first": ended(code=3), "told": 15}, "FAILED", 3, "n2", 5, False),
        ({"told": 15}, "CANCELLED", 143, "", -1, True),
        ({"cancelled": True}, "COMPLETED", 0, "", -1, False),  # it was quicker
        ({"first": ended(signal=15), "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"first": ended(code=7), "cancelled": True}, "FAILED", 7, "n2", 5, False),
        ({"error": LOST, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"told": 15, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"told": 15, "late": True}, "TIMEOUT", 143, "", -1, True),
        ({"told": 15, "late": True, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"told": 15, "preempted": True}, "PREEMPTED", 143, "", -1, False),
        ({"told": 15, "preempted": True, "late": True}, "PREEMPTED", 143, "", -1, False),
        ({"told": 15, "preempted": True, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"first": ended(signal=15), "preempted": True}, "PREEMPTED", 143, "", -1, False),
        ({"error": LOST, "preempted": True}, "PREEMPTED", 143, "", -1, False),
        ({"first": ended(code=85), "told": 15, "preempted": True}, "FAILED", 85, "n2", 5, False),
        ({"first": ended(code=85), "told": 15, "late": True}, "FAILED", 85, "n2", 5, False),
        ({"first": ended(code=85), "told": 15}, "CANCELLED", 143, "", -1, True),  # scancel, qdel
        ({"first": ended(code=85), "told": 15, "late": True, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"first": ended(code=85), "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"first": ended(signal=15), "told": 15, "preempted": True, "also": SAVED}, "FAILED", 85, "n2", 0, False),
        ({"told": 15, "preempted": True, "also": SAVED}, "FAILED", 85, "n2", 0, False),
        ({"told": 15, "late": True, "also": SAVED}, "FAILED", 85, "n2", 0, False),
        ({"first": ended(signal=11), "told": 15, "preempted": True, "also": SAVED}, "FAILED", 139, "n2", 5, False),
        ({"first": ended(signal=15), "told": 15, "also": SAVED}, "CANCELLED", 143, "", -1, True),
        ({"told": 15, "preempted": True, "cancelled": True, "also": SAVED}, "CANCELLED", 143, "", -1, False),
        ({"error": LOST}, "NODE_FAIL", 1, "n2", -1, False),
        ({"error": KILLED}, "OOM", 137, "", -1, False),
        ({"error": LOST, "told": 15}, "NODE_FAIL", 1, "n2", -1, True),
        ({"error": LOST, "told": 15, "late": True}, "TIMEOUT", 143, "", -1, True),
        ({"error": LOST, "told": 15, "cancelled": True}, "CANCELLED", 143, "", -1, False),
        ({"error": ProgramMissing("no such program", "x")}, "FAILED", 127, "", -1, False),
    ],
)
def test_what_was_seen_is_judged(seen, state, code, node, rank, scheduler_ended_it):
    ending = judged(**seen)
    assert (ending.state, ending.code, ending.node, ending.rank) == (state, code, node, rank)
    assert (ending.scheduler_ended_it, ending.attempt) == (scheduler_ended_it, 3)
    assert bool(ending.reason) is (state != "COMPLETED")


def test_result_names_program_and_its_rank():
    first = ended(code=85, program="server", program_rank=1)
    for seen in ({"first": first}, {"told": 15, "preempted": True, "also": (first,)}):
        result = judged(**seen)
        assert (result.node, result.rank, result.program, result.program_rank) == ("n2", 5, "server", 1)
        assert restart_reason(result, failures=0, restarts=0) == "server 1 on n2 asked to run again (exit code 85)"


@pytest.mark.parametrize(
    ("place", "headline"),
    [
        (("read (data.py:88)",), "all 2 ranks wait in read (data.py:88)"),
        (("all_reduce (train.py:41)",), "1 of 2 ranks waits for rank 5"),
    ],
)
def test_hang_names_only_a_rank_that_others_wait_for(place, headline):
    """Where all wait in one place, the first of them stands for all, and no headline blames it."""
    known = {"kind": "hung", "why": "no output for 9.0 s", "host": "n2", "is_sure": True, "state": "S", "time_s": 1.0}
    shots = [
        HangSnapshot(rank=rank, pid=rank, frames=place if rank == 4 else ("read (data.py:88)",), **known)
        for rank in (4, 5)
    ]
    first = ended(rank=5, code=1, watchdog_reason="hung: no output for 9.0 s")
    report = Report(
        launch_id="l", run_id="", host="n1", world_size=2, start_s=1.0, end_s=2.0, exits=(first,),
        first_failure=first, snapshots=tuple(shots),
    )  # fmt: skip
    end = classify(report, None, is_node_failure=False, is_cancelled=False, is_late=False, attempt=1)
    blamed = ("n2", 5) if "for rank 5" in headline else ("", -1)
    assert (end.state, end.code, end.node, end.rank) == ("FAILED", first.shell_code, *blamed)
    assert headline in end.reason


@pytest.mark.parametrize(
    ("seen", "timeouts", "most", "state"),
    [
        ({"first": ended(code=85), "warned": True}, 5, None, "FAILED"),
        ({"first": ended(code=85), "warned": True}, 1, 2, "FAILED"),
        ({"first": ended(code=85), "warned": True}, 2, 2, "TIMEOUT"),
        ({"first": ended(code=85), "warned": True}, 0, 0, "TIMEOUT"),
        ({"first": ended(code=85), "told": 15, "late": True}, 0, 0, "TIMEOUT"),
        ({"told": 15, "late": True, "also": SAVED}, 0, 0, "TIMEOUT"),
        ({"first": ended(code=85), "told": 15, "preempted": True}, 0, 0, "FAILED"),
        ({"first": ended(code=85)}, 0, 0, "FAILED"),
        ({"first": ended(code=7), "warned": True}, 0, 0, "FAILED"),
        ({"first": ended(signal=15), "told": 15, "cancelled": True, "warned": True}, 0, 0, "CANCELLED"),
        ({"warned": True}, 0, 0, "COMPLETED"),
    ],
)
def test_time_limits_beyond_most_end_job(seen, timeouts, most, state):
    before = judged(**seen)
    ending = check_timeouts(before, timeouts=timeouts, most=most)
    assert (ending.state, ending.code) == (state, before.code)
    assert ending.reason.endswith(f"; --max_timeouts={most} permits no further run") is (state == "TIMEOUT")
