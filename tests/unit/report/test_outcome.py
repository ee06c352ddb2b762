"""Events in, the story out: who failed first, who was stopped, what is told meanwhile."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.core.c_structs import KINDS, LAUNCHERS_OWN, STEPS, Event
from infini_run.node.outcome import Outcome
from infini_run.options.options import resolve
from infini_run.plan.model import Command, FoundProgram, Node
from infini_run.plan.planner import make_plan


def outcome_of(*flags, oom_kills=-1):
    options = resolve([*flags, "prog"], {}).options
    node = Node(index=options.node_rank, host="here", nproc=options.nproc_per_node, cpus=1)
    program = FoundProgram(options=options, command=Command(file="/p", argv=("p",)), master_port=1)
    plan = make_plan(options, (program,), (node,), launch_id="ir-1", environ={})
    return Outcome(plan, options, oom_kills=oom_kills)


def event(kind, rank=-1, **fields):
    blank = dict.fromkeys(("pid", "code", "signal", "time_ns", "user_us", "system_us", "max_rss_kib"), 0)
    blank |= {"dumped_core": False, "after_stop": False, "status_lost": False, "name": ""}
    return Event(**(blank | {"kind": kind, "worker": rank, "rank": rank} | fields))


def test_every_kind_of_event_is_understood():
    outcome = outcome_of()
    for kind in set(KINDS.values()) - LAUNCHERS_OWN:
        rank = 0 if kind in ("unplaced", "started", "ready", "start_failed", "exited", "output_held") else -1
        is_step = kind in ("start_failed", "unguarded")
        code = next(iter(STEPS)) if is_step else 1 if kind == "output_held" else ord("D")
        assert isinstance(outcome.record_event(event(kind, rank, signal=5, code=code, name="x", pid=1)), str)


def test_a_rank_is_told_with_its_times_and_what_it_used():
    outcome = outcome_of()
    outcome.record_event(event("started", 0, pid=7, time_ns=5_000_000_000))
    usage = {"user_us": 1_500_000, "system_us": 250_000, "max_rss_kib": 99}
    outcome.record_event(event("exited", 0, pid=7, code=3, time_ns=7_000_000_000, **usage))
    (exit_,) = outcome.exits()
    assert exit_.end_s - exit_.start_s == pytest.approx(2.0)
    assert (exit_.pid, exit_.code, exit_.user_s, exit_.system_s, exit_.max_rss_kib) == (7, 3, 1.5, 0.25, 99)
    assert exit_.host == os.uname().nodename


def test_the_first_to_fail_is_the_first_failure_whatever_its_rank():
    outcome = outcome_of("--nproc_per_node=3")
    outcome.record_event(event("exited", 1, code=0))
    assert outcome.first is None
    outcome.record_event(event("exited", 2, code=4))
    outcome.record_event(event("exited", 0, code=5))
    assert outcome.first_failure().rank == 2
    assert outcome.report().exit_code == 4


def test_what_we_stopped_is_never_the_first_failure():
    outcome = outcome_of("--nproc_per_node=2")
    outcome.record_event(event("exited", 1, signal=15, after_stop=True))
    assert outcome.first_failure() is None
    outcome.record_event(event("exited", 0, code=1, after_stop=True))
    assert outcome.first_failure() is None
    assert [e.stopped for e in outcome.exits()] == [True, True]


def test_a_status_that_somebody_else_took_is_a_failure_without_a_code():
    outcome = outcome_of()
    outcome.record_event(event("exited", 0, code=0, status_lost=True))
    assert outcome.first_failure().code is None
    assert outcome.report().exit_code == 1


@pytest.mark.parametrize(
    ("fields", "is_failure"),
    [
        ({}, False),
        ({"code": 1}, True),
        ({"signal": 15}, True),
        ({"signal": 15, "after_stop": True}, False),
        ({"code": 1, "after_stop": True}, False),
        ({"status_lost": True}, True),
    ],
)
def test_what_an_event_calls_a_failure_is_what_the_report_calls_one(fields, is_failure):
    outcome = outcome_of()
    ended = event("exited", 0, **fields)
    outcome.record_event(ended)
    assert ended.is_failure == outcome.exits()[0].is_failure == is_failure


@pytest.mark.parametrize(("before", "is_told"), [(-1, False), (0, True), (10**9, False)])
def test_a_kill_is_the_kernels_for_memory_where_its_count_went_up(before, is_told, monkeypatch):
    monkeypatch.setattr("infini_run.node.outcome.oom_kills", lambda: 1)
    outcome = outcome_of(oom_kills=before)
    outcome.record_event(event("exited", 0, signal=9))
    assert outcome.first_failure().out_of_memory == is_told


def test_a_signal_to_us_is_told_with_the_grace_and_the_second_with_the_end():
    outcome = outcome_of("--grace=2.5")
    assert (
        outcome.record_event(event("signalled", signal=15))
        == "SIGTERM: stopping; SIGKILL in 2.5 s, or now if repeated"
    )
    assert outcome.record_event(event("signalled", signal=2)) == "SIGINT again: killing what is left"
    assert outcome.report().exit_code == 143


def test_signals_that_were_passed_on_are_kept_each_once():
    outcome = outcome_of()
    for number in (10, 1, 10):
        assert outcome.record_event(event("forwarded", signal=number)) == ""
    assert outcome.report().forwarded_signals == (1, 10)
    assert outcome.report().received_signal == 0


@pytest.mark.parametrize(
    ("given_event", "text"),
    [
        (
            event("output_lost", signal=28),
            "the console takes no more output (No space left on device); the job continues",
        ),
        (
            event("output_lost", 1, signal=28),
            "the log of rank 1 cannot be written (No space left on device); the job",
        ),
        (event("output_held", 1, code=1), "stderr of rank 1 is still open in a process that infini-run may not end"),
        (event("console_stuck"), "all ranks exited; waiting for the reader of their output"),
        (
            event("unseen", signal=2),
            "cannot read /proc (it is missing): if infini-run is SIGKILLed, processes that left",
        ),
        (
            event("unseen", signal=18, code=1),
            "cannot read /proc (it shows another PID namespace): processes that left",
        ),
        (event("unseen", signal=24, code=1), "cannot read /proc (Too many open files): processes that left"),
    ],
)
def test_trouble_is_told_now_and_kept(given_event, text):
    outcome = outcome_of("--nproc_per_node=2")
    told = outcome.record_event(given_event)
    assert text in told
    assert outcome.report().notices == (told,)
    assert outcome.report().exit_code == 0


def test_strays_and_what_is_stuck_are_kept():
    outcome = outcome_of("--nproc_per_node=2")
    outcome.record_event(event("leftover", pid=5, name="loader"))
    outcome.record_event(event("stuck", 1, pid=6, name="train", code=ord("D")))
    report = outcome.report()
    assert [(s.pid, s.name) for s in report.leftover_processes] == [(5, "loader")]
    assert [(s.pid, s.name, s.state) for s in report.stuck] == [(6, "train", "D")]
    assert report.exits[1].stuck
    assert report.exit_code == 1


@pytest.mark.parametrize("how", [{"signal": 2}, {"signal": 3}, {"code": 130}, {"code": 131}])
def test_ctrl_c_in_a_lone_ranks_terminal_is_not_told_to_the_one_who_typed_it(how):
    outcome = outcome_of()
    outcome.record_event(event("exited", 0, had_terminal=True, **how))
    assert outcome.report().user_interrupted
    other = outcome_of()
    other.record_event(event("exited", 0, **how))
    assert not other.report().user_interrupted


def test_last_words_belong_to_the_first_failure():
    outcome = outcome_of("--nproc_per_node=2")
    outcome.set_last_output("nobody", ("asked",), ("for it",))
    assert [e.error_message for e in outcome.exits()] == ["", ""]
    outcome.record_event(event("exited", 1, code=1))
    outcome.set_last_output("it broke", ("a", "b"), ("main",))
    first = outcome.report().first_failure
    assert (first.error_message, first.last_lines, first.python_stack) == ("it broke", ("a", "b"), ("main",))
    assert outcome.exits()[1] == first


ENDS = st.tuples(st.integers(0, 255), st.sampled_from([0, 0, 0, 6, 9, 11, 15]), st.booleans())


@given(st.lists(ENDS, min_size=1, max_size=8), st.randoms())
def test_whatever_happens_the_story_is_consistent(ends, random):
    outcome = outcome_of(f"--nproc_per_node={len(ends)}")
    order = list(range(len(ends)))
    random.shuffle(order)
    for rank in order:
        code, number, after = ends[rank]
        outcome.record_event(event("exited", rank, code=0 if number else code, signal=number, after_stop=after))
    failures = [rank for rank in order if (ends[rank][0] or ends[rank][1]) and not ends[rank][2]]
    failures = [rank for rank in failures if outcome.exits()[rank].is_failure]
    report = outcome.report()
    assert [e.rank for e in report.exits] == sorted(order)
    if failures:
        assert report.first_failure.rank == failures[0]
        assert report.exit_code == report.first_failure.shell_code != 0
    else:
        assert report.first_failure is None
        assert report.exit_code == next((e.shell_code for e in report.exits if e.shell_code), 0)
