"""An Ask is a concurrent.futures.Future, and a crew does what its users may expect of an executor.

executor_cases.md has the cases of CPython's and loky's test suites, and the test here that holds each of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
import weakref
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    as_completed,
    wait,
)
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two
from types import SimpleNamespace

import pytest

import infini_run as ir
from tests.support.command import CHILDREN
from tests.support.waiting import LIMIT_S, until

sys.path.insert(0, str(CHILDREN))
from crew_parts import obey

FAIL = ("burst and raise", 0)


@pytest.fixture
def crew():
    with ir.Crew(obey, nproc=2, restart=ir.Restart(max_restarts=100), grace=1) as crew:
        yield crew


@pytest.fixture
def slow(crew, bell, tmp_path):
    """A task that runs until the test ends."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ask = crew.worker(0).ask(("be slow", bell.path, str(gate)))
    bell.hear(1)
    yield ask
    gate.write_text("on")
    assert ask.result(LIMIT_S) == "on"


def test_wait_for_the_first_exception_does_not_wait_for_the_others(crew, slow):
    crew.worker(1).ask(("sleep", 0.2))  # so that the wait has begun when the next one fails
    failing, found = crew.worker(1).ask(FAIL), []
    thread = threading.Thread(target=lambda: found.append(wait([slow, failing], None, FIRST_EXCEPTION)))
    thread.daemon = True
    thread.start()
    thread.join(LIMIT_S / 4)
    assert found == [({failing}, {slow})]


def test_wait_for_the_first_exception_finds_one_that_has_happened(crew, slow):
    failing = crew.worker(1).ask(FAIL)
    assert failing.exception() is not None
    assert wait([slow, failing], LIMIT_S, FIRST_EXCEPTION).done == {failing}


def test_wait_for_the_first_exception_without_any_waits_for_all(crew):
    asks = [crew.ask(("square", n)) for n in range(5)]
    assert wait(asks, LIMIT_S, FIRST_EXCEPTION) == (set(asks), set())


def test_wait_for_the_first_that_is_done(crew, slow):
    quick = crew.worker(1).ask(("square", 2))
    assert wait([slow, quick], LIMIT_S, FIRST_COMPLETED) == ({quick}, {slow})


def test_wait_for_all_counts_failures_and_cancelled_ones(crew, slow):
    waiting = crew.worker(0).ask("pid")
    assert waiting.cancel()
    asks = {crew.worker(1).ask(("square", 2)), crew.worker(1).ask(FAIL), waiting}
    assert wait(asks, LIMIT_S, ALL_COMPLETED) == (asks, set())
    assert wait([slow], 0) == (set(), {slow})


def test_as_completed_yields_each_once_and_the_quick_ones_first(crew, slow):
    asks = [crew.worker(1).ask(("square", n)) for n in range(3)]
    found = as_completed([slow, *asks, asks[0]], LIMIT_S)
    assert {next(found) for _ in range(3)} == set(asks)
    with pytest.raises(FutureTimeout):
        list(as_completed([slow], 0.01))


def test_running_and_done_tell_the_state(crew, slow):
    waiting = crew.worker(0).ask("pid")
    until(slow.running)  # the task has rung; that it has begun is told by another way
    assert (slow.done(), slow.cancelled()) == (False, False)
    assert (waiting.running(), waiting.done(), waiting.cancelled()) == (False, False, False)
    waiting.cancel()
    assert (waiting.running(), waiting.done(), waiting.cancelled()) == (False, True, True)
    done = crew.worker(1).ask("pid")
    done.result()
    assert (done.running(), done.done(), done.cancelled(), done.cancel()) == (False, True, False, False)


def test_an_exception_is_the_same_object_each_time_and_is_raised(crew):
    ask = crew.ask(FAIL)
    error = ask.exception(LIMIT_S)
    assert isinstance(error, ValueError)
    with pytest.raises(ValueError, match="the last word") as caught:
        ask.result()
    assert caught.value is error is ask.exception()


def test_a_wait_that_is_too_short_is_a_timeout_of_python_and_of_its_futures(crew, slow):
    results = crew.map([("sleep", 0.1)], timeout_s=0)
    for get in (lambda: slow.result(0.01), lambda: slow.exception(0.01), lambda: next(results)):
        with pytest.raises(TimeoutError) as caught:
            get()
        assert isinstance(caught.value, FutureTimeout)


def test_a_cancelled_ask_raises_that(crew, slow):
    ask = crew.worker(0).ask("pid")
    ask.cancel()
    for get in (ask.result, ask.exception):
        with pytest.raises(CancelledError):
            get(LIMIT_S)


@pytest.mark.parametrize("task", [("square", 2), FAIL])
def test_callbacks_are_called_once_with_the_future_before_or_after_the_end(task, crew):
    ask, seen, called = crew.ask(task), [], threading.Event()
    ask.add_done_callback(seen.append)
    ask.add_done_callback(lambda _: called.set())
    assert called.wait(LIMIT_S)
    ask.add_done_callback(seen.append)
    assert seen == [ask, ask]
    assert isinstance(ask, Future)


def test_a_callback_that_raises_keeps_no_other_from_being_called(crew, caplog):
    ask, called = crew.ask(("sleep", 0.05)), threading.Event()
    ask.add_done_callback(lambda _: 1 / 0)
    ask.add_done_callback(lambda _: called.set())
    assert called.wait(LIMIT_S)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_exits_ends_nothing_either(kind, crew, caplog):
    def leave(_):
        raise kind(3)

    ask, called = crew.ask(("sleep", 0.05)), threading.Event()
    ask.add_done_callback(leave)
    ask.add_done_callback(lambda _: called.set())
    assert called.wait(LIMIT_S)
    assert f"a callback raised {kind.__name__}" in caplog.text
    assert crew.ask(("square", 3)).result(LIMIT_S) == 9


def test_a_handler_of_logging_that_exits_fails_the_crew_with_its_cause():
    class Leave(logging.Handler):
        def emit(self, record):
            sys.exit("from a handler")

    def log(ctx, name):
        logging.getLogger(name).error("now")

    logger, handler = logging.getLogger("tests.leaving"), Leave()
    logger.addHandler(handler)
    try:
        crew = ir.Crew(log, log_level="ERROR")
        with pytest.raises((ir.CrewFailed, ir.WorkerDied)):
            crew.ask(logger.name).result(LIMIT_S)
        crew.close()
        assert isinstance(crew.failure.__cause__, SystemExit)
    finally:
        logger.removeHandler(handler)


def test_a_handler_of_logging_that_exits_fails_a_launch_and_not_its_caller():
    class Leave(logging.Handler):
        def emit(self, record):
            sys.exit("from a handler")

    def log(name):
        logging.getLogger(name).error("now")

    logger, handler = logging.getLogger("tests.leaving"), Leave()
    logger.addHandler(handler)
    try:
        with pytest.raises(ir.InfiniRunError, match="SystemExit was raised") as raised:
            ir.Launcher(nproc_per_node=1, log_level="ERROR").run(log, logger.name)
        assert isinstance(raised.value.__cause__, SystemExit)
    finally:
        logger.removeHandler(handler)


def test_a_cancelled_ask_calls_its_callbacks(crew, slow):
    ask, seen = crew.worker(0).ask("pid"), []
    ask.add_done_callback(seen.append)
    ask.cancel()
    assert seen == [ask]


def test_cancel_holds_no_lock_during_callbacks(crew, slow):
    ask, lock, seen = crew.worker(0).ask("pid"), threading.Lock(), []
    is_called, is_held = threading.Event(), threading.Event()

    def call_back(ask):
        is_called.set()
        is_held.wait(LIMIT_S)
        with lock:
            seen.append(ask)

    ask.add_done_callback(call_back)
    first = threading.Thread(target=ask.cancel, daemon=True)
    first.start()
    assert is_called.wait(LIMIT_S)
    second = threading.Thread(target=ask.cancel, daemon=True)
    with lock:
        is_held.set()
        second.start()
        second.join(LIMIT_S / 4)
        assert not second.is_alive()
    first.join(LIMIT_S)
    assert seen == [ask]
    assert wait([ask], LIMIT_S).done == {ask}


def test_a_worker_that_crashes_fails_what_it_had_and_wakes_every_waiter(crew, bell, shut):
    asks = [crew.worker(0).ask(("be slow", bell.path, shut)), *(crew.worker(0).ask("pid") for _ in range(5))]
    (words,) = bell.hear(1)
    os.kill(int(words.split()[1]), 9)
    assert wait(asks[:1], LIMIT_S, FIRST_EXCEPTION).not_done == set()
    assert all(isinstance(ask.exception(LIMIT_S), ir.WorkerDied) for ask in asks)


def test_what_does_not_pickle_fails_its_own_task_and_no_other(crew):
    with pytest.raises(ir.UnpicklableError):
        crew.ask(threading.Lock())
    bad, good = crew.worker(0).ask("unpicklable"), crew.worker(0).ask(("square", 4))
    assert wait([bad, good], LIMIT_S, FIRST_EXCEPTION).not_done <= {good}
    assert isinstance(bad.exception(), ir.UnpicklableError)
    assert good.result(LIMIT_S) == 16


def test_an_exception_is_made_by_the_thread_that_asks_for_it(crew):
    where = []

    class Noted(Exception):
        def __setstate__(self, state):
            where.append(threading.current_thread())

        def __reduce__(self):
            return Noted, (), {"any": 1}

    def serve(ctx, task):
        raise Noted

    with ir.Crew(serve) as other:
        ask = other.ask(0)
        assert not wait([ask], LIMIT_S).not_done
        assert ask.has_failed
        assert where == []
        assert ask.exception() is not None
    assert set(where) <= {threading.current_thread()}


def test_every_event_loop_may_await_an_ask(crew):
    import asyncio

    ask = crew.ask(FAIL)

    async def main():
        with pytest.raises(ValueError, match="the last word"):
            await ask
        return await asyncio.gather(*(crew.ask(("square", n)) for n in range(5)))

    assert [asyncio.run(main()) for _ in range(2)] == [[0, 1, 4, 9, 16]] * 2


def test_asyncio_wraps_an_ask(crew, slow):
    import asyncio

    async def main():
        found, failing, waiting = (
            asyncio.wrap_future(crew.worker(rank).ask(task))
            for rank, task in ((1, ("square", 3)), (1, FAIL), (0, "pid"))
        )
        assert await found == 9
        with pytest.raises(ValueError, match="the last word"):
            await failing
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_what_asyncio_of_python_3_14_reads_of_a_future_is_there(crew, slow):
    """Future._get_snapshot: done, cancelled, result, exception."""
    found, failing, waiting = crew.worker(1).ask(("square", 3)), crew.worker(1).ask(FAIL), crew.worker(0).ask("pid")
    waiting.cancel()
    assert not wait([found, failing], LIMIT_S).not_done
    assert [ask._get_snapshot() for ask in (slow, waiting)] == [(False, False, None, None), (True, True, None, None)]
    assert found._get_snapshot() == (True, False, 9, None)
    assert failing._get_snapshot() == (True, False, None, failing.exception())


class Local:
    """A variable of who asks."""


def local_of(get):
    local = Local()
    with contextlib.suppress(ValueError):
        get()
    return weakref.ref(local)


@pytest.mark.parametrize("has_ipython", [False, True])
def test_a_failure_that_was_raised_keeps_no_variable_of_its_callers(crew, has_ipython, monkeypatch):
    """Its traceback has their frames: who refers to it must not stand there, or all wait for the collector."""
    if has_ipython:
        import IPython

        assert IPython
    else:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)

    def fail():
        raise ValueError

    launcher = ir.Launcher(nproc_per_node=1)
    calls = [
        lambda: crew.ask(FAIL).result(),
        lambda: launcher.run(fail),
        lambda: launcher.start(fail).result(),
    ]
    gc.disable()
    try:
        kept = [local_of(call) for call in calls]
        until(lambda: [local() for local in kept] == [None] * len(kept))
    finally:
        gc.enable()


def test_a_stopiteration_of_a_task_does_not_keep_its_awaiter_waiting():
    """PEP 479; asyncio's own future takes none (gh-112182)."""
    import asyncio

    def serve(ctx, task):
        raise StopIteration(task)

    async def main(crew):
        for way in (lambda ask: ask, asyncio.gather, lambda ask: asyncio.wait_for(ask, LIMIT_S)):
            with pytest.raises(RuntimeError, match="StopIteration") as caught:
                await way(crew.ask(7))
            assert caught.value.__cause__.args == (7,)

    with ir.Crew(serve) as crew:
        asyncio.run(asyncio.wait_for(main(crew), LIMIT_S))
        with pytest.raises(StopIteration):
            crew.ask(7).result()


def test_a_coroutine_that_is_cancelled_cancels_its_task(crew, slow):
    import asyncio

    async def main():
        waiting = crew.worker(0).ask("pid")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting, 0.05)
        assert waiting.cancelled()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_a_launch_is_awaited_and_its_failure_raised():
    import asyncio

    def half(n):
        return n // 2 if n % 2 == 0 else 1 / 0

    async def main():
        launcher = ir.Launcher(nproc_per_node=2)
        found = await asyncio.gather(launcher.arun(half, 4), launcher.arun(half, 8))
        with pytest.raises(ZeroDivisionError):
            await launcher.arun(half, 1)
        with launcher.start(half, 6) as handle:
            return [list(result) for result in (*found, await handle)]

    assert asyncio.run(main()) == [[2, 2], [4, 4], [3, 3]]


def test_a_coroutine_that_is_cancelled_stops_its_launch(bell):
    import asyncio

    def stay(path):
        import signal

        with open(path, "w") as file:
            file.write(f"{os.getpid()}\n")
        signal.pause()

    async def main():
        running = asyncio.ensure_future(ir.Launcher(nproc_per_node=1, grace=1).arun(stay, bell.path))
        pid = int((await asyncio.to_thread(bell.hear, 1))[0])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return pid

    pid = asyncio.run(main())
    until(lambda: not os.path.exists(f"/proc/{pid}"))


ASKING = """
import sys

class Thing: pass

asked = sys.modules.get("asked")
if asked:
    asked.importing.set()
    assert asked.unpickling.wait(60)
    asked.got.append(asked.ask.result(60))
"""
MAKING = "def make(task):\n    import asking\n    return asking.Thing()\n"


def test_result_comes_though_importing_thread_asks_for_it_too(tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text(ASKING)
    (tmp_path / "making.py").write_text(MAKING)
    monkeypatch.syspath_prepend(tmp_path)
    making = importlib.import_module("making")
    with ir.Crew(making.make) as crew:
        ask = crew.ask(0)
        wait([ask])
        asked = SimpleNamespace(ask=ask, importing=threading.Event(), unpickling=threading.Event(), got=[])
        monkeypatch.setitem(sys.modules, "asked", asked)
        thread = threading.Thread(target=importlib.import_module, args=("asking",), daemon=True)
        thread.start()
        assert asked.importing.wait(LIMIT_S)
        waiter = threading.Thread(target=lambda: asked.got.append(ask.result()), daemon=True)
        threading.setprofile(lambda frame, *_: asked.unpickling.set() if frame.f_code.co_name == "load" else None)
        try:
            waiter.start()
            assert asked.unpickling.wait(LIMIT_S)
        finally:
            threading.setprofile(None)
        waiter.join(LIMIT_S)
        thread.join(LIMIT_S)
        assert len(asked.got) == 2
        assert asked.got[0] is asked.got[1]
    monkeypatch.delitem(sys.modules, "asking")
    monkeypatch.delitem(sys.modules, "making")
