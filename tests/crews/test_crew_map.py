"""Crew.map: several iterables, chunks, a limit of time, results as they come."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time

import pytest

import infini_run as ir
from infini_run.crews.api.task_map import MapOptions, TaskMap
from infini_run.crews.protocol import TaskDone, dump
from infini_run.crews.supervision.future import Ask
from tests.support.waiting import LIMIT_S


def times(ctx, pair):
    return pair[0] * pair[1]


def sleep(ctx, seconds):
    time.sleep(seconds)
    return seconds


@pytest.fixture
def sleepers():
    with ir.Crew(sleep, nproc_per_node=2, grace=1) as crew:
        for rank in range(2):  # both are up
            crew.worker(rank).ask(0).result()
        yield crew


@pytest.mark.parametrize("chunksize", [1, 2, 100])
@pytest.mark.parametrize("ordered", [True, False])
def test_several_iterables_are_mapped_together_in_chunks_or_not(chunksize, ordered):
    with ir.Crew(times, nproc_per_node=2) as crew:
        results = crew.map(range(7), itertools.count(1), chunksize=chunksize, ordered=ordered)
        assert sorted(results) == [n * (n + 1) for n in range(7)]


def test_results_in_order_even_in_chunks():
    with ir.Crew(lambda ctx, n: n, nproc_per_node=3) as crew:
        assert list(crew.map(range(1000), chunksize=7)) == list(range(1000))
        assert list(crew.map([], chunksize=7)) == []


def test_death_costs_only_its_task_among_short_ones():
    """The end of a task and the start of the next one are one message: neither may be lost or come late."""

    def serve(ctx, n):
        if n == 20 and not ctx.restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    with ir.Crew(serve, nproc_per_node=1, restart=ir.Restart(max_restarts=1)) as crew:
        asks = [crew.ask(n) for n in range(100)]
        with pytest.raises(ir.WorkerDied):
            asks[20].result()
        assert [ask.result() for ask in asks if ask is not asks[20]] == [n for n in range(100) if n != 20]


def test_without_order_the_first_to_end_comes_first(sleepers):
    assert list(sleepers.map([0.5, 0.01], ordered=False)) == [0.01, 0.5]
    assert list(sleepers.map([0.5, 0.01])) == [0.5, 0.01]


def test_a_limit_that_has_passed_raises_and_cancels_the_rest(sleepers):
    begin_s = time.monotonic()
    results = sleepers.map([0.01, *[0.5] * 100], timeout_s=3, ordered=False)
    assert next(results) == 0.01
    with pytest.raises(TimeoutError, match=r"within 3 s"):
        list(results)
    assert sleepers.ask(0).result() == 0
    assert time.monotonic() - begin_s < 20


def test_a_limit_beyond_any_clock_is_none(sleepers):
    assert list(sleepers.map([0, 0], timeout_s=1e12)) == [0, 0]


def test_the_first_failure_ends_the_map_without_order_too():
    def serve(ctx, n):
        if n == 5:
            raise ValueError("five")
        return n

    with ir.Crew(serve, nproc_per_node=2) as crew, pytest.raises(ValueError, match="five"):
        list(crew.map(range(100), ordered=False, chunksize=2))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failure_comes_though_results_keep_coming(ordered):
    """Of workers that are always ahead of the reader."""
    numbers = itertools.count()

    def ask(task):
        ended = Ask(next(numbers))
        ended.set_answer(
            ValueError("three") if task == 3 else (TaskDone(task=ended.task, body=dump(task, "x")), 0, "here")
        )
        return ended

    results = TaskMap(ask, itertools.count(), MapOptions(None, 1, 8, ordered, 1), lambda: None)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)


def test_results_that_were_there_before_a_failure_are_read_first():
    def serve(ctx, n):
        if n == 4:
            raise ValueError("four")
        return n

    with ir.Crew(serve, nproc_per_node=1) as crew:
        results = crew.map(range(1, 6))
        assert next(results) == 1
        assert crew.ask(0).result(LIMIT_S) == 0  # after all of them
        assert [next(results), next(results)] == [2, 3]
        with pytest.raises(ValueError, match="four"):
            next(results)


def test_a_failure_is_raised_while_a_result_before_it_is_not_there(shut):
    def serve(ctx, path):
        return open(path).close() if path else 1 / 0

    with pytest.raises(ZeroDivisionError), ir.Crew(serve, nproc_per_node=2, grace=0.2) as crew:
        next(crew.map([shut, ""]))


def test_tasks_are_submitted_by_the_call_as_many_as_there_is_room_for():
    done = threading.Event()
    taken = itertools.count()
    with ir.Crew(lambda ctx, n: n, nproc_per_node=1) as crew:
        results = crew.map((next(taken) for _ in range(100)), buffersize=10)
        assert next(taken) == 10
        crew.ask(0).add_done_callback(lambda _: done.set())
        assert done.wait(60)  # it is behind them
        assert crew.status().waiting == 0
        assert len(list(results)) == 100


def test_tasks_that_were_submitted_are_done_though_nobody_reads_a_result(tmp_path):
    def note(ctx, n):
        (tmp_path / str(n)).touch()

    with ir.Crew(note, nproc_per_node=2) as crew:
        crew.map(range(100))
    assert len(list(tmp_path.iterdir())) == 100


def test_a_map_of_which_nothing_was_read_tells_that_tasks_are_not_done():
    with ir.Crew(lambda ctx, n: n, nproc_per_node=1) as crew:
        with pytest.warns(ResourceWarning, match="before its first result; tasks after the first 5 are not done"):
            crew.map(range(100), buffersize=5)
        crew.map(range(100), buffersize=5).close()  # which is said


def test_a_map_that_was_read_in_part_and_dropped_is_cancelled(sleepers):
    begin_s = time.monotonic()
    for _ in sleepers.map([0, *[1] * 100]):
        break
    gc.disable()  # it is dropped at once
    try:
        assert sleepers.ask(0).result() == 0
    finally:
        gc.enable()
    assert time.monotonic() - begin_s < 40


def test_results_can_be_read_when_the_crew_is_closed():
    with ir.Crew(lambda ctx, n: -n, nproc_per_node=2) as crew:
        results = crew.map(range(10), chunksize=3)
    assert list(results) == [-n for n in range(10)]


def test_a_task_that_raises_stopiteration_does_not_end_the_results():
    def serve(ctx, n):
        if n == 3:
            raise StopIteration("three")
        return n

    with ir.Crew(serve, nproc_per_node=1) as crew, pytest.raises(RuntimeError, match="a task raised StopIteration"):
        list(crew.map(range(10)))


def test_an_iterable_that_raises_cancels_what_was_submitted(sleepers):
    def items():
        yield 1  # it may have begun
        raise ValueError("no more items")

    with pytest.raises(ValueError, match="no more items"):
        sleepers.map(items())
    assert sleepers.ask(0).result() == 0


def test_items_are_taken_as_there_is_room():
    taken = itertools.count()
    endless = (next(taken) for _ in itertools.count())
    with ir.Crew(lambda ctx, n: n) as crew:
        results = crew.map(endless, ordered=False, chunksize=3)
        assert len(set(itertools.islice(results, 30))) == 30
        results.close()
        assert next(taken) < 1000


@pytest.mark.parametrize("given", [{"chunksize": 0}, {"chunksize": 1.5}, {"timeout_s": -1}])
def test_arguments_that_make_no_sense_are_refused_at_once(sleepers, given):
    with pytest.raises(ir.UsageError):
        sleepers.map([1], **given)
    with pytest.raises(ir.UsageError, match="at least one"):
        sleepers.map()


def test_what_does_not_pickle_in_a_chunk_is_named(sleepers):
    with pytest.raises(ir.UnpicklableError, match=r"task\.items\[1\]"):
        list(sleepers.map([0, threading.Lock()], chunksize=2))


@pytest.mark.parametrize("ordered", [True, False])
def test_results_that_were_read_are_kept_nowhere(ordered):
    """A map may have any number of items."""
    with ir.Crew(lambda ctx, n: bytes(1000), nproc_per_node=1) as crew:
        for number, _ in enumerate(crew.map(range(1000), ordered=ordered)):
            if number == 900:
                gc.collect()
                assert sum(type(thing) is ir.Ask for thing in gc.get_objects()) < 200
