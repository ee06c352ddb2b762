"""Tasks for several workers, and methods by name."""

from __future__ import annotations

import io
import os
import sys

import pytest

import infini_run as ir
from tests.support.waiting import LIMIT_S


class Counter:
    def __init__(self, first=0):
        self.count = first

    def add(self, number, times=1):
        self.count += number * times
        return ir.this_worker().rank, self.count

    def fail(self, rank):
        if ir.this_worker().rank == rank:
            raise ValueError(f"on purpose: {rank}")
        return "done"

    async def never(self): ...

    def _hidden(self): ...

    limit = 3


@pytest.fixture
def crew():
    with ir.Crew(Counter, args=(10,), nproc_per_node=3) as crew:
        yield crew


@pytest.fixture
def asked():
    with ir.Crew(lambda ctx, task: (ctx.rank, task), nproc_per_node=3) as crew:
        yield crew


def test_broadcast_has_one_answer_of_each_worker(asked):
    import asyncio

    assert asked.broadcast("it").result(LIMIT_S) == [(0, "it"), (1, "it"), (2, "it")]

    async def main():
        return await asked.broadcast("it")

    assert asyncio.run(main()) == [(0, "it"), (1, "it"), (2, "it")]


def test_broadcast_pickles_its_task_once(asked):
    pickled = []

    class Counted:
        def __reduce__(self):
            pickled.append(1)
            return str, ("made",)

    assert asked.broadcast(Counted()).result(LIMIT_S) == [(0, "made"), (1, "made"), (2, "made")]
    assert len(pickled) == 1


def test_slice_asks_its_workers(asked):
    some = asked[1:3]
    assert (some.ranks, len(some), [worker.rank for worker in some]) == ((1, 2), 2, [1, 2])
    assert some.ask(5).result(LIMIT_S) == [(1, 5), (2, 5)]
    assert asked[::2].ask(5).result(LIMIT_S) == [(0, 5), (2, 5)]
    assert asked[-1].ask(6).result(LIMIT_S) == (2, 6)
    assert repr(some) == "<CrewSlice of ranks 1, 2>"


@pytest.mark.parametrize("index", [3, -4, slice(3, 9), slice(2, 1)])
def test_index_without_worker_is_refused(asked, index):
    with pytest.raises(IndexError, match=r"use (ranks )?0 to 2"):
        asked[index]


@pytest.mark.parametrize("index", ["a", [0, 2], 1.0, None])
def test_index_of_another_type_is_one_line(asked, index):
    with pytest.raises(TypeError) as caught:
        asked[index]
    assert str(caught.value) == f"crew[{index!r}]: expected a rank or a slice, such as crew[0] or crew[0:2]"


def test_methods_are_called_by_name_on_objects_that_stay(crew):
    rank, count = crew.worker(0).call("add", 5, times=2).result(LIMIT_S)
    assert (rank, count) == (0, 20)
    assert crew[1:3].call("add", 1).result(LIMIT_S) == [(1, 11), (2, 11)]
    assert crew.call("add", 0).result(LIMIT_S)[1] in (20, 11)


def test_first_failure_of_several_is_raised(crew):
    asks = crew[:].call("fail", 1)
    with pytest.raises(ValueError, match="on purpose: 1") as caught:
        asks.result(LIMIT_S)
    assert caught.value.rank == 1
    assert [asks[0].result(LIMIT_S), asks[2].result(LIMIT_S)] == ["done", "done"]


def test_results_that_come_too_late_are_a_timeout(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ir.Crew(lambda path: open(path).close(), nproc_per_node=1) as crew:
        asks = crew.broadcast(gate)
        with pytest.raises(TimeoutError):
            asks.result(0.01)
        with open(gate, "w"):
            pass
        assert asks.result(LIMIT_S) == [None]
        assert crew.broadcast(os.devnull).cancel() is None


@pytest.mark.parametrize("name", ["nothing", "_hidden", "limit", "start", "task", "__init__"])
def test_unknown_method_is_refused_at_once(crew, name):
    with pytest.raises(ir.UsageError, match=r"unknown method of .*; use .*call[(]'fail', [.]{3}[)], "):
        crew.worker(0).call(name)


def test_method_of_a_function_and_task_of_a_class_without_one_are_refused(crew, asked):
    with pytest.raises(ir.UsageError, match="use a class with methods as target"):
        asked.call("add", 1)
    with pytest.raises(ir.UsageError, match=r"has no method task; use call\(METHOD, ...\)"):
        crew.ask(1).result(LIMIT_S)


def test_method_that_does_not_pickle_its_arguments_is_refused(crew):
    with pytest.raises(ir.UnpicklableError, match="call"):
        crew.call("add", (n for n in ()))


# ---- the bar of a map


@pytest.mark.parametrize("items", [range(200), iter(range(200))], ids=["sized", "unsized"])
def test_map_shows_how_much_was_read(asked, items, monkeypatch):
    pytest.importorskip("rich")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    assert [task for _, task in asked.map(items, progress="rich")] == list(range(200))
    assert ("100%" if isinstance(items, range) else "200 results") in shown.getvalue()


def test_map_refuses_an_unknown_bar(asked):
    with pytest.raises(ir.UsageError, match="expected True, False, 'rich', or 'tqdm'"):
        asked.map([], progress="bar")
