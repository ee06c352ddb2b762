"""Restart policies of a crew: who is started again, when, how often; and how a crew fails."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infini_run as ir
from infini_run.crews.supervision.restart_policy import STRATEGIES, Budget, ranks_to_restart
from tests.support.command import CHILDREN
from tests.support.processes import is_alive
from tests.support.waiting import until

sys.path.insert(0, str(CHILDREN))
from crew_parts import obey


def pids_of(crew):
    return [worker.pid for worker in crew.status().workers]


def follow(crew, kind):
    """Events until the first of that kind, the last one."""
    while True:
        for event in crew.events():
            if event.kind == kind:
                return event


# ---- the policy


@pytest.mark.parametrize(("strategy", "ranks"), list(zip(STRATEGIES, ([1], [0, 1, 2, 3], [1, 2, 3]), strict=True)))
def test_a_strategy_says_who_is_affected(strategy, ranks):
    assert list(ranks_to_restart(strategy, 1, 4)) == ranks


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "all"}, "expected one_for_one, one_for_all, rest_for_one"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"within_s": 0}, "within_s=0"),
        ({"within_s": "60s"}, "within_s='60s'"),
        ({"delay_s": 5, "max_delay_s": 1}, "delay_s=5"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_where_it_is_made(given, words):
    with pytest.raises(ir.UsageError, match=words):
        ir.Restart(**given)


def test_a_policy_takes_its_values_by_name():
    with pytest.raises(
        TypeError, match=r"^Restart\(\) takes its values by name: strategy=, max_restarts=, within_s=, "
    ):
        ir.Restart("one_for_all", 3, 60)


def test_a_budget_allows_so_many_within_a_time():
    budget = Budget(ir.Restart(max_restarts=2, within_s=10))
    assert [budget.spend(now) for now in (0, 5, 9)] == [0.0, 0.0, None]
    assert [budget.spend(now) for now in (10, 12, 15, 15)] == [0.0, None, 0.0, None]


def test_the_delay_doubles_up_to_its_limit_and_is_small_again_after_a_good_time():
    budget = Budget(ir.Restart(max_restarts=9, within_s=100, delay_s=0.5, max_delay_s=3))
    assert [budget.spend(now) for now in (0, 1, 2, 3, 4)] == [0.5, 1, 2, 3, 3]
    assert budget.spend(200) == 0.5


@given(st.lists(st.floats(0, 1000)), st.integers(0, 5), st.floats(0.1, 100))
def test_there_are_never_more_restarts_within_the_time_than_allowed(times, most, within_s):
    budget = Budget(ir.Restart(max_restarts=most, within_s=within_s))
    granted = [now for now in sorted(times) if budget.spend(now) is not None]
    for at in granted:
        assert sum(at <= other < at + within_s and other - at < within_s for other in granted) <= most


# ---- at work


def test_one_for_one_starts_the_failed_one_alone():
    with ir.Crew(obey, nproc=3, restart=ir.Restart()) as crew:
        before = pids_of(crew)
        with pytest.raises(ir.WorkerDied):
            crew.worker(1).ask("killed").result()
        assert crew.worker(1).ask("restarts").result() == 1
        after = pids_of(crew)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize(("strategy", "first"), [("one_for_all", 0), ("rest_for_one", 1)])
def test_the_others_are_stopped_and_started_with_it(strategy, first, bell, shut):
    with ir.Crew(obey, nproc=3, restart=ir.Restart(strategy=strategy), grace=1) as crew:
        before = pids_of(crew)
        busy = crew.worker(2).ask(("be slow", bell.path, shut))
        bell.hear(1)
        with pytest.raises(ir.WorkerDied):
            crew.worker(1).ask("killed").result()
        with pytest.raises(
            ir.WorkerDied, match="rank 2 was stopped: rank 1 failed, and all workers restart together"
        ):
            busy.result()
        restarts = [crew.worker(rank).ask("restarts").result() for rank in range(3)]
        after = pids_of(crew)
    assert restarts == [int(rank >= first) for rank in range(3)]
    assert [old != new for old, new in zip(before, after, strict=True)] == [rank >= first for rank in range(3)]


def test_workers_that_fail_before_their_restart_cost_one_restart():
    with ir.Crew(obey, nproc=2, restart=ir.Restart(strategy="one_for_all", max_restarts=1)) as crew:
        first = crew.worker(1).ask("closes")
        until(lambda: crew.status().workers[1].state == "failed")  # its end is not known yet
        with pytest.raises(ir.WorkerDied, match=r"rank 0 on .* SIGKILL"):
            crew.worker(0).ask("killed").result()
        with pytest.raises(ir.WorkerDied, match=r"rank 1 on .* closed its channel"):
            first.result()
        assert [crew.worker(rank).ask("restarts").result() for rank in range(2)] == [1, 1]
        kinds = [(event.kind, event.rank) for event in crew.events() if event.kind in ("died", "restarting")]
    assert kinds == [("died", 0), ("restarting", 0), ("died", 1), ("restarting", 1)]


def test_all_of_them_meet_at_a_new_port_when_all_are_started_again():
    with ir.Crew(obey, nproc=2, restart=ir.Restart(strategy="one_for_all")) as crew:
        ports = {crew.worker(rank).ask(("env", "MASTER_PORT")).result() for rank in range(2)}
        with pytest.raises(ir.WorkerDied):
            crew.worker(1).ask("killed").result()
        again = {crew.worker(rank).ask(("env", "MASTER_PORT")).result() for rank in range(2)}
    assert len(ports) == len(again) == 1
    assert ports != again


def test_a_replacement_starts_only_when_nothing_of_the_old_one_is_left(bell):
    with ir.Crew(obey, restart=ir.Restart(), grace=0.3) as crew:
        crew.worker(0).ask(("children", bell.path)).result()
        pids = list(map(int, bell.hear(1)[0].split()[1:]))
        with pytest.raises(ir.WorkerDied):
            crew.worker(0).ask("killed").result()
        follow(crew, "restarting")
        follow(crew, "started")
        assert not any(map(is_alive, pids))


def test_what_was_asked_of_a_worker_that_is_away_waits_for_its_next_life():
    with ir.Crew(obey, restart=ir.Restart(delay_s=0.3)) as crew:
        with pytest.raises(ir.WorkerDied):
            crew.worker(0).ask("killed").result()
        assert crew.worker(0).ask(("square", 4)).result() == 16


def test_back_off_is_told_and_waited_for():
    with ir.Crew(obey, restart=ir.Restart(delay_s=0.2, max_delay_s=0.3)) as crew:
        delays, gaps = [], []
        for _ in range(3):
            crew.worker(0).send("killed")
            died = follow(crew, "restarting")
            started = follow(crew, "started")
            delays.append(died.delay_s)
            gaps.append(started.time_s - died.time_s)
    assert delays == [0.2, 0.3, 0.3]
    assert all(gap >= delay - 0.05 for gap, delay in zip(gaps, delays, strict=True))


def test_crew_failed_counts_the_failures_it_leaves_out():
    with ir.Executor(1, initializer=int, initargs=("x",), restart=ir.Restart(max_restarts=4)) as executor:
        error = executor.submit(int).exception()
    assert len(error.causes) == 5
    assert str(error).splitlines()[-1] == "  ... and 2 earlier; `causes` has all 5"


def test_tasks_that_had_not_begun_say_so(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ir.Crew(lambda path: os._exit(len(open(path).read())), restart=ir.Restart(max_restarts=1)) as crew:
        asks = [crew.worker(0).ask(gate) for _ in range(3)]
        until(lambda: crew.status().workers[0].tasks == 3)
        gate.write_text("333")
        errors = [ask.exception() for ask in asks]
    assert [ask.has_begun for ask in asks] == [True, False, False]
    assert ["this task had not begun" in str(error) for error in errors] == [False, True, True]
    assert {error.exit_code for error in errors} == {3}


def test_too_many_failures_fail_the_crew_with_all_causes():
    crew = ir.Crew(obey, nproc=2, restart=ir.Restart(max_restarts=2))
    for how in ("killed", "segv", "exited"):
        with pytest.raises(ir.WorkerDied):
            crew.worker(0).ask(how).result()
    with pytest.raises(ir.CrewFailed, match="3 failures, with at most 2 restarts within 60 s") as caught:
        crew.worker(1).ask("hangs").result()
    assert [cause.signal for cause in caught.value.causes] == [9, 11, 0]
    assert [cause.exit.code for cause in caught.value.causes] == [None, None, 3]
    assert isinstance(caught.value.__cause__, ir.WorkerDied)
    assert "earlier" not in str(caught.value)
    with pytest.raises(ir.CrewFailed):
        list(crew)
    assert (crew.close().phase, crew.failure.rank) == ("CLOSED", 0)


def test_the_first_failure_fails_a_crew_without_a_policy(bell, shut):
    crew = ir.Crew(obey, nproc=2, grace=1)
    other = crew.worker(1).ask(("be slow", bell.path, shut))
    bell.hear(1)
    with pytest.raises(ir.WorkerDied, match=r"rank 0 .* SIGSEGV"):
        crew.worker(0).ask("segv").result()
    with pytest.raises(ir.WorkerDied, match="rank 1 was stopped: the crew failed"):
        other.result()
    with pytest.raises(ir.CrewFailed, match=r"rank 0 .* SIGSEGV"):
        crew.ask("pid")
    crew.close()


def test_leaving_the_block_tells_that_the_crew_has_failed():
    def use():
        with ir.Crew(obey) as crew:
            crew.worker(0).send("killed")
            follow(crew, "died")

    with pytest.raises(ir.CrewFailed, match="SIGKILL"):
        use()


def test_an_exception_in_the_block_is_not_hidden_by_the_crew_s():
    def use():
        with ir.Crew(obey) as crew:
            crew.worker(0).send("killed")
            follow(crew, "died")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()


def test_failures_one_after_the_other_while_all_are_being_started_again():
    with ir.Crew(obey, nproc=4, restart=ir.Restart(strategy="rest_for_one", max_restarts=50, delay_s=0.05)) as crew:
        for rank in (3, 2, 1, 0, 2):
            crew.worker(rank).send("killed")
        asks = [crew.worker(rank).ask(("square", rank)) for rank in range(4) for _ in range(3)]
        for ask in asks:
            assert isinstance(ask.exception(), (ir.WorkerDied, type(None)))
        for rank in range(4):
            while crew.worker(rank).ask(("square", rank)).exception() is not None:
                pass
