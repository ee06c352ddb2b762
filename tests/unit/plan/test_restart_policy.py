"""Whether a launch is started again and when: vectors, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.options.options import resolve
from infini_run.plan.restart_policy import (
    JITTER,
    MOST_DELAY_S,
    Decision,
    RestartCount,
    RestartState,
    decide,
    delay_of,
    describe,
    healthy_s,
    spend,
)
from infini_run.record import replace
from infini_run.report.exit import Exit, LeftoverProcess
from infini_run.report.report import Report


def options(*flags):
    return resolve([*flags, "program"], {}).options


def failed(rank=0, **fields):
    blank = Exit(rank=rank, local_rank=rank, host="h", pid=9, code=3, start_s=100.0, ready_s=None, end_s=160.0)
    return replace(blank, **fields)


def report(*exits, **fields):
    exits = exits or (failed(),)
    first = next((e for e in exits if e.is_failure), None)
    blank = {"launch_id": "ir-1", "run_id": "", "host": "h", "world_size": len(exits), "start_s": 100.0}
    return Report(**(blank | {"end_s": 170.0, "exits": exits, "first_failure": first} | fields))


AGAIN = ("--max_restarts=3", "--restart_delay=2s")


@pytest.mark.parametrize(
    ("first_s", "delays"),
    [
        (1.0, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
        (0.5, [0.5, 1, 2, 4]),
        (0.0, [0, 0, 0]),
        (299.0, [299, 300, 300]),
        (300.0, [300, 300]),
        (1000.0, [1000, 1000, 1000]),
    ],
)
def test_the_delay_doubles_up_to_five_minutes_or_what_was_asked_for(first_s, delays):
    assert [delay_of(first_s, number) for number in range(1, len(delays) + 1)] == delays


@given(st.floats(0, 2**31), st.integers(1, 2**31))
def test_a_delay_never_falls_and_has_a_bound(first_s, number):
    assert first_s <= delay_of(first_s, number) <= delay_of(first_s, number + 1) <= max(first_s, MOST_DELAY_S)


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (report(failed(code=0)), ""),
        (report(received_signal=15), ""),
        (report(failed(code=None, signal=2), user_interrupted=True), ""),
        (report(failed(code=None, signal=1), forwarded_signals=(1, 28)), "SIGHUP was sent to the job"),
        (report(failed(code=129), forwarded_signals=(1,)), "SIGHUP was sent to the job"),
        (report(failed(code=127)), "exit code 127 means that a program does not exist"),
        (report(failed(code=126)), "exit code 126 means that a program cannot be executed"),
        (report(failed(code=126, start_failure="executing the program", start_errno=8)), "exit code 126 means"),
        (report(stuck=(LeftoverProcess(pid=5, name="x", state="D"),)), "some processes did not end"),
    ],
)
def test_some_ends_are_never_followed_by_a_restart(ended, why):
    decision = decide(ended, options(*AGAIN), RestartCount())
    assert not decision.again
    assert decision.why.startswith(why)
    assert bool(decision.why) == bool(why)


@pytest.mark.parametrize(
    "exit_",
    [failed(), failed(code=2), failed(code=None, signal=9), failed(code=0, stopped=True, watchdog_reason="hung")],
)
def test_a_rank_that_failed_is_followed_by_a_restart(exit_):
    wanted = Decision(again=True, count=RestartCount(spent=1, total=1), delay_s=2.0)
    assert decide(report(exit_), options(*AGAIN), RestartCount()) == wanted


@pytest.mark.parametrize("exit_", [failed(), failed(code=None, signal=9), failed(code=1), failed(code=28)])
def test_signal_that_was_passed_on_and_killed_nobody_is_no_reason(exit_):
    assert decide(report(exit_, forwarded_signals=(1, 28)), options(*AGAIN), RestartCount()).again


def test_the_budget_is_used_up_restart_by_restart_and_whole_after_a_good_run():
    asked = options(*AGAIN, "--restart_window=10s")
    count, delays = RestartCount(), []
    while (decision := spend(asked, count, 9.9)).again:
        count = decision.count
        delays.append(decision.delay_s)
    assert (delays, count, decision.why) == ([2, 4, 8], RestartCount(spent=3, total=3), "")
    fresh = spend(asked, count, 10.0)
    assert (fresh.again, fresh.count, fresh.delay_s) == (True, RestartCount(spent=1, total=4), 2)
    assert describe(count, asked) == "restart 3 of 3"
    assert describe(fresh.count, asked) == "restart 1 of 3 (4 since the start)"


@given(st.integers(0, 50), st.floats(0, 100), st.lists(st.floats(0, 200), max_size=100))
def test_between_two_good_runs_there_are_never_more_restarts_than_allowed(most, window_s, runs):
    asked = options(f"--max_restarts={most}", f"--restart_window={window_s}")
    count, in_a_row = RestartCount(), 0
    for run_s in runs:
        in_a_row = 0 if 0 < window_s <= run_s else in_a_row
        decision = spend(asked, count, run_s)
        assert decision.again == (in_a_row < most)
        if not decision.again:
            break
        in_a_row += 1
        assert decision.count == RestartCount(spent=in_a_row, total=count.total + 1)
        count = decision.count


@given(st.floats(0, 1))
def test_only_several_nodes_do_not_all_come_back_in_one_moment(chance):
    alone, many = options(*AGAIN), options(*AGAIN, "--nnodes=2", "--rdzv_endpoint=h:1")
    assert spend(alone, RestartCount(), 0.0, chance).delay_s == 2.0
    assert spend(many, RestartCount(), 0.0, chance).delay_s == pytest.approx(2.0 * (1 - JITTER * chance))


@pytest.mark.parametrize(
    ("flags", "exits", "wanted_s"),
    [
        ((), (failed(),), 60),  # from the start to the first failure, whatever came after it
        ((), (failed(1, end_s=130.0), failed(0, stopped=True)), 30),
        (("--ready_timeout=1h",), (failed(ready_s=120.0),), 40),
        (("--ready_timeout=1h",), (failed(ready_s=120.0), failed(1, ready_s=150.0, end_s=165.0)), 10),
        (("--ready_timeout=1h",), (failed(ready_s=120.0), failed(1)), 0),
        (("--hang_timeout=10s", "--grace=5"), (failed(watchdog_reason="hung"),), 35),
        (("--hang_timeout=10s", "--grace=5"), (failed(),), 60),
        (("--hang_timeout=30s",), (failed(watchdog_reason="hung"),), 0),  # it hung from the start
    ],
)
def test_good_running_is_the_time_in_which_all_were_up_and_well(flags, exits, wanted_s):
    assert healthy_s(report(*exits), options(*AGAIN, *flags)) == wanted_s


def test_a_launch_that_did_not_fail_is_not_said_to_be_not_restarted():
    """What it left behind is no reason: nothing was to be started again."""
    ended = report(failed(code=0), leftover_processes=(LeftoverProcess(pid=5, name="x"),), leftover_count=1)
    state = RestartState(options(*AGAIN))
    assert state.decide(ended) == ""
    assert state.add_to(ended).not_restarted == ""


def test_a_restart_counts_when_it_begins():
    """Nobody may come to run it; its failure is then that of the last attempt, and no earlier one."""
    first, last = report(failed(code=3)), report(failed(code=4))
    state = RestartState(options(*AGAIN))
    assert state.decide(first)
    assert (state.add_to(first).restarts, state.add_to(first).earlier_failures) == (0, ())
    state.begin()
    assert (state.add_to(last).restarts, state.add_to(last).earlier_failures) == (1, (first.first_failure,))
    assert state.go_on(last.first_failure, "a node was lost")
    assert (state.add_to(last).restarts, state.add_to(last).earlier_failures) == (1, (first.first_failure,))
    state.begin()
    assert (state.add_to(last).restarts, len(state.add_to(last).earlier_failures)) == (2, 2)


def test_a_failure_whose_restart_was_cancelled_is_an_earlier_one():
    first = report(failed())
    state = RestartState(options(*AGAIN))
    assert state.decide(first)
    state.cancel(15)
    told = state.add_to(first)
    assert (told.restarts, told.first_failure, told.earlier_failures) == (0, None, (first.first_failure,))


def attempts(state, *progress):
    """Whether each of these attempts, which fail, is followed by another one; the numbers are what they got to."""
    again = []
    for value in progress:
        state.note_progress(value)
        again.append(bool(state.decide(report())))
    return again


def test_budget_is_spent_once_nothing_can_renew_it():
    assert RestartState(options()).is_spent
    state = RestartState(options("--max_restarts=1"))
    assert not state.is_spent
    assert attempts(state, -1) == [True]
    assert state.is_spent
    state.note_progress(3)  # the first one renews the budget
    assert not state.is_spent
    state.give_up("some processes did not end")
    assert state.is_spent
    window = RestartState(options("--max_restarts=1", "--restart_window=1000s"))
    assert attempts(window, -1) == [True]
    assert not window.is_spent


@given(st.lists(st.integers(-1, 3), max_size=20), st.integers(0, 3))
def test_spent_budget_allows_no_restart(reached, budget):
    state = RestartState(options(f"--max_restarts={budget}", "--max_no_progress=0"))
    for value in reached:
        state.note_progress(value)
        is_spent = state.is_spent
        assert not (attempts(state, value)[0] and is_spent)


def test_progress_makes_the_budget_whole_again():
    state = RestartState(options("--max_restarts=1", "--restart_delay=2s"))
    assert attempts(state, 10, 20, 30, 40) == [True] * 4
    assert state.heading.startswith("restart 1 of 1 (4 since the start)")
    assert attempts(state, 40) == [False]


def test_three_attempts_in_a_row_that_got_no_further_end_the_job():
    state = RestartState(options("--max_restarts=100"))
    assert attempts(state, 10, 5, -1, 11, 11, -1, 0) == [True, True, True, True, True, True, False]
    assert state.add_to(report()).not_restarted == "3 attempts in a row without exceeding PROGRESS=11"


def test_without_progress_ever_sent_the_bound_does_not_hold():
    assert attempts(RestartState(options("--max_restarts=5")), *[-1] * 6) == [True] * 5 + [False]


@pytest.mark.parametrize(("flag", "again"), [("1", [False]), ("2", [True, False]), ("0", [True] * 7)])
def test_the_bound_is_what_was_asked_for(flag, again):
    state = RestartState(options("--max_restarts=9", f"--max_no_progress={flag}"))
    assert attempts(state, 0, *[0] * len(again)) == [True, *again]


def test_an_attempt_that_could_not_be_started_got_no_further():
    state = RestartState(options("--max_restarts=100", "--max_no_progress=2"))
    assert attempts(state, 7) == [True]
    assert state.start_failed("no more processes")
    assert not state.start_failed("no more processes")
    why = "no more processes; 2 attempts in a row without exceeding PROGRESS=7"
    assert state.add_to(report()).not_restarted == why


@given(st.lists(st.integers(-1, 3), max_size=40), st.integers(1, 4), st.integers(0, 5))
def test_a_job_that_gets_no_further_ends_after_as_many_attempts_as_were_allowed(reached, bound, budget):
    state = RestartState(options(f"--max_restarts={budget}", f"--max_no_progress={bound}"))
    highest, fruitless, spent = -1, 0, 0
    for value in reached:
        if value > highest:
            highest, fruitless, spent = value, 0, 0
        elif highest >= 0:
            fruitless += 1
        expected = fruitless < bound and spent < budget
        assert attempts(state, value) == [expected]
        if not expected:
            break
        spent += 1
