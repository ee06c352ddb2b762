"""What the test suites of concurrent.futures (CPython 3.13) and loky ask of an executor, asked of a crew.

executor_cases.md has a row for each of their cases: the test that holds it here, or why there is none. Futures are
real ones: Asks of tasks that wait, run, have ended, have failed or were cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    as_completed,
    wait,
)
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10 has two
from itertools import repeat

import pytest

import infini_run as ir
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S, ended_after, until


def serve(ctx, task):
    """Call what was sent: executors have a function for each task."""
    function, *args = task
    return function(*args)


def wait_for_file(path):
    with open(path) as file:  # a FIFO: until somebody opens it for writing
        file.read()
    return "opened"


def exit_when_opened(path):
    wait_for_file(path)
    os._exit(3)


def raise_(kind, *args):
    raise kind(*args)


@pytest.fixture
def crew():
    with ir.Crew(serve, nproc_per_node=2, grace=1, restart=ir.Restart(max_restarts=10_000)) as crew:
        yield crew


@pytest.fixture
def running(crew, tmp_path):
    """A task of worker 0 that runs until the test ends; what is asked of that worker meanwhile waits."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ask = crew.worker(0).ask((wait_for_file, str(gate)))
    until(ask.running)
    yield ask
    with open(gate, "w"):
        pass
    assert ask.result(LIMIT_S) == "opened"


@pytest.fixture
def done(crew):
    ask = crew.worker(1).ask((int, "42"))
    assert ask.result(LIMIT_S) == 42
    return ask


@pytest.fixture
def failed(crew):
    ask = crew.worker(1).ask((raise_, OSError, "failed"))
    assert isinstance(ask.exception(LIMIT_S), OSError)
    return ask


@pytest.fixture
def cancelled(crew, running):
    ask = crew.worker(0).ask((int,))
    assert ask.cancel()
    return ask


# ---- wait, as_completed


@pytest.mark.parametrize("limit_s", [0, 0.1])
def test_wait_returns_what_has_ended_when_the_time_is_over(running, done, failed, cancelled, limit_s):
    found = wait([running, done, failed, cancelled], limit_s, ALL_COMPLETED)
    assert found == ({done, failed, cancelled}, {running})


def test_wait_counts_a_future_that_is_given_twice_once(crew):
    ask = crew.ask((int,))
    assert wait([ask, ask], LIMIT_S, ALL_COMPLETED) == ({ask}, set())


def test_wait_for_the_first_does_not_wait_if_some_have_ended(running, done, failed, cancelled):
    assert wait([running, done, cancelled], None, FIRST_COMPLETED) == ({done, cancelled}, {running})
    assert wait([running, failed], None, FIRST_EXCEPTION) == ({failed}, {running})


def test_wait_for_the_first_exception_does_not_stop_at_a_cancelled_one(crew, running, done, cancelled):
    failing = crew.worker(1).ask((divmod, 21, 0))
    found = wait([running, done, cancelled, failing], LIMIT_S, FIRST_EXCEPTION)
    assert found == ({done, cancelled, failing}, {running})


def test_many_futures_that_end_while_threads_switch_are_all_counted(crew):
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asks = {crew.ask((int,)) for _ in range(100)}
        assert wait(asks, LIMIT_S, ALL_COMPLETED) == (asks, set())
    finally:
        sys.setswitchinterval(interval_s)


def test_as_completed_gives_every_kind_of_end(crew, done, failed, cancelled):
    asks = [crew.worker(1).ask((divmod, 7, n)) for n in range(3)]
    assert set(as_completed([done, failed, cancelled, *asks], LIMIT_S)) == {done, failed, cancelled, *asks}


@pytest.mark.parametrize("limit_s", [0, 0.1])
def test_as_completed_gives_what_has_ended_and_then_says_how_many_have_not(running, done, cancelled, limit_s):
    found = []
    with pytest.raises(FutureTimeout, match=r"^1 \(of 3\) futures unfinished$"):
        found.extend(as_completed([running, done, cancelled], limit_s))  # one after the other, up to the error
    assert set(found) <= {done, cancelled}


def test_as_completed_takes_any_iterable_and_gives_a_future_once(crew):
    ask = crew.ask((int,))
    assert list(as_completed(repeat(ask, 3), LIMIT_S)) == [ask]


def test_as_completed_keeps_no_future_that_it_has_given(crew):
    asks = [crew.ask((int,)) for _ in range(4)]
    wait(asks, LIMIT_S)
    for ask in as_completed(list(asks), LIMIT_S):
        asks.remove(ask)
        kept = weakref.ref(ask)
        del ask
        until(lambda kept=kept: gc.collect() >= 0 and kept() is None)


# ---- the future


def test_every_state_has_its_repr(crew, running, done, failed, cancelled):
    waiting = crew.worker(0).ask((int,))
    states = {waiting: "pending", running: "running", done: "done", failed: "failed", cancelled: "cancelled"}
    for ask, state in states.items():
        assert repr(ask) == f"<Ask of task {ask.task}: {state}>"
    assert waiting.cancel()


def test_result_and_exception_do_not_wait_with_a_limit_of_zero(running, done, failed, cancelled):
    for get in (running.result, running.exception):
        with pytest.raises(TimeoutError):
            get(timeout=0)
    for get in (cancelled.result, cancelled.exception):
        with pytest.raises(CancelledError):
            get(timeout=0)
    with pytest.raises(OSError, match="failed"):
        failed.result(timeout=0)
    assert isinstance(failed.exception(timeout=0), OSError)
    assert (done.result(timeout=0), done.exception(timeout=0)) == (42, None)


def test_what_has_ended_cannot_be_cancelled_and_what_was_cancelled_can_be_again(done, failed, cancelled):
    assert (done.cancel(), failed.cancel(), cancelled.cancel()) == (False, False, True)
    assert (done.cancelled(), failed.cancelled(), cancelled.cancelled()) == (False, False, True)


def test_a_thread_that_waits_is_woken_by_cancel(crew, running):
    ask = crew.worker(0).ask((int,))
    caught = []

    def get():
        try:
            ask.result(LIMIT_S)
        except CancelledError as error:
            caught.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    until(lambda: ask._condition._waiters)  # the thread waits
    ask.cancel()
    thread.join(LIMIT_S)
    assert len(caught) == 1


def test_a_callback_is_given_each_kind_of_end_and_an_error_in_it_is_logged(crew, done, failed, cancelled, caplog):
    for ask, end in ((done, 42), (failed, OSError), (cancelled, CancelledError)):
        seen = []
        ask.add_done_callback(seen.append)
        with caplog.at_level(logging.ERROR, "concurrent.futures"):
            ask.add_done_callback(lambda _: raise_(ZeroDivisionError, "in a callback"))
        assert seen == [ask], end
    assert caplog.text.count("in a callback") >= 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_no_callback_ends_the_crew(crew, error, caplog, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    tasks = [(wait_for_file, str(gate)), (raise_, OSError), (raise_, ir.Cancelled)]
    asks = [crew.worker(0).ask(task) for task in tasks]
    for ask in asks:
        ask.add_done_callback(lambda _: raise_(error, "in a callback"))
    with open(gate, "w"):  # none has ended before
        pass
    assert not wait(asks, LIMIT_S).not_done
    assert crew.ask((int, "2")).result(LIMIT_S) == 2
    until(lambda: caplog.text.count(f"{error.__name__}: in a callback") == 3)


def test_a_callback_may_submit_a_task(crew):
    found = []
    ready = threading.Event()

    def again(ask):
        following = crew.ask((int, str(ask.result() + 1)))
        following.add_done_callback(lambda last: (found.append(last.result()), ready.set()))

    crew.ask((int, "1")).add_done_callback(again)
    assert ready.wait(LIMIT_S)
    assert found == [2]


def test_a_callback_may_submit_a_task_when_a_worker_has_died(crew):
    found = []
    ready = threading.Event()

    def again(ask):
        crew.ask((int, "7")).add_done_callback(lambda last: (found.append(last.result()), ready.set()))

    crew.worker(0).ask((os._exit, 3)).add_done_callback(again)
    assert ready.wait(LIMIT_S)
    assert found == [7]


# ---- map


def test_a_map_is_that_of_python_with_and_without_chunks(crew):
    for chunksize in (1, 3, 6, 40, 50):
        tasks = list(zip(repeat(pow), range(40), range(40), strict=False))
        assert list(crew.map(tasks, chunksize=chunksize)) == [n**n for n in range(40)]


def test_a_map_gives_its_result_and_keeps_none(crew):
    for result in crew.map([(set, [n]) for n in range(10)]):
        kept = weakref.ref(result)
        del result
        until(lambda kept=kept: kept() is None)  # the supervisor's thread may not be through with it


def test_a_map_that_fails_raises_the_tasks_exception(crew):
    with pytest.raises(ZeroDivisionError):
        list(crew.map([(divmod, 1, 2), (divmod, 1, 3), (divmod, 1, 0), (divmod, 1, 5)]))


def test_a_map_whose_time_is_over_does_none_of_its_waiting_tasks(tmp_path):
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    os.mkfifo(gate)
    notes.mkdir()

    def note(ctx, name):
        (notes / name).touch()
        if name == "first":
            wait_for_file(gate)

    with ir.Crew(note, nproc_per_node=1) as crew:
        first = crew.ask("first")
        until(first.running)
        with contextlib.closing(crew.map(["second", "third"], timeout_s=0)) as results, pytest.raises(TimeoutError):
            next(results)
        with open(gate, "w"):
            pass
    assert [path.name for path in notes.iterdir()] == ["first"]


# ---- nothing is kept


def test_a_task_that_was_submitted_is_not_kept(crew):
    class Thing:
        def method(self):
            return "done"

    thing = Thing()
    kept = weakref.ref(thing)
    ask = crew.ask((thing.method,))
    del thing
    gc.collect()
    assert kept() is None
    assert ask.result(LIMIT_S) == "done"


class Noted:
    """Writes to a FIFO when it is freed."""

    def __init__(self, path):
        self.path, self.pid = path, os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            with open(self.path, "w") as file:
                file.write("freed\n")


def test_a_worker_keeps_no_argument_of_a_task_that_has_ended(crew, bell):
    assert crew.worker(1).ask((type, Noted(bell.path))).result(LIMIT_S).__name__ == "Noted"
    assert bell.hear(1) == ["freed"]


def test_a_cycle_of_a_task_ends_with_it_or_with_the_next_collection(crew, bell):
    def cycle(noted):
        noted.me = noted

    crew.worker(1).ask((cycle, Noted(bell.path))).result(LIMIT_S)
    crew.worker(1).ask((gc.collect,)).result(LIMIT_S)
    assert bell.hear(1) == ["freed"]


# ---- an exception has the worker's traceback


def test_the_workers_traceback_is_shown_with_the_exception(crew, capsys):
    def fail():
        raise RuntimeError(123)  # a comment

    error = crew.ask((fail,)).exception(LIMIT_S)
    assert (type(error), error.args) == (RuntimeError, (123,))
    assert "raise RuntimeError(123)  # a comment" in error.__cause__.trace
    sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "RuntimeError: 123" in shown
    if sys.version_info >= (3, 11):  # notes are shown
        assert "raise RuntimeError(123)  # a comment" in shown


# ---- crashes, exits and errors at every point of a task


class At:
    """Does something when it is pickled here or there, or unpickled there or here."""

    def __init__(self, act, *, when_unpickled=False):
        self.act, self.when_unpickled = act, when_unpickled

    def __reduce__(self):
        return self.act if self.when_unpickled else self.act[0](*self.act[1:])


class Unpickled(At):
    def __reduce__(self):
        return (self.act[0], self.act[1:])


CRASH, EXIT, QUIT, ERROR = (ctypes.string_at, 0), (sys.exit, 1), (os._exit, 1), (raise_, ValueError, "on purpose")


@pytest.mark.parametrize("act", [EXIT, ERROR])
def test_what_goes_wrong_while_a_task_is_pickled_is_raised_at_once(crew, act):
    with pytest.raises((ir.UnpicklableError, SystemExit, ValueError)):
        crew.ask((id, At(act)))
    assert crew.ask((int, "1")).result(LIMIT_S) == 1


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize(
    ("act", "error"),
    [(CRASH, ir.WorkerDied), (QUIT, ir.WorkerDied), (EXIT, ir.CannotUnpickle), (ERROR, ValueError)],
)
def test_what_goes_wrong_while_a_task_is_unpickled_is_an_error_of_that_task(crew, act, error, chunk):
    task = (id, Unpickled(act))
    with pytest.raises(error):
        list(crew.map([task], chunksize=2)) if chunk else crew.ask(task).result(LIMIT_S)
    assert crew.ask((int, "1")).result(LIMIT_S) == 1


@pytest.mark.parametrize(
    ("act", "error"),
    [(CRASH, ir.WorkerDied), (QUIT, ir.WorkerDied), (EXIT, ir.WorkerDied), (ERROR, ValueError)],
)
def test_what_goes_wrong_in_a_task_is_an_error_of_that_task(crew, act, error):
    with pytest.raises(error):
        crew.ask(act).result(LIMIT_S)
    assert crew.ask((int, "1")).result(LIMIT_S) == 1


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (CRASH, ir.WorkerDied),
        (QUIT, ir.WorkerDied),
        (EXIT, ir.WorkerDied),
        (ERROR, (ir.UnpicklableError, ValueError)),
    ],
)
def test_what_goes_wrong_while_a_result_is_pickled_is_an_error_of_that_task(crew, act, error):
    with pytest.raises(error):
        crew.ask((At, act)).result(LIMIT_S)
    assert crew.ask((int, "1")).result(LIMIT_S) == 1


@pytest.mark.parametrize("act", [EXIT, ERROR])
def test_what_goes_wrong_while_a_result_is_unpickled_here_is_an_error_of_that_task(crew, act):
    with pytest.raises(ir.RemoteError, match="cannot be unpickled here"):
        crew.ask((Unpickled, act)).result(LIMIT_S)
    assert crew.ask((int, "1")).result(LIMIT_S) == 1


@pytest.mark.parametrize("act", [CRASH, QUIT])
def test_a_worker_that_dies_when_it_frees_a_task_costs_no_other_task(crew, act):
    class Deadly:
        pid = os.getpid()

        def __del__(self):
            if os.getpid() != self.pid:
                act[0](*act[1:])

    with pytest.raises(ir.WorkerDied):
        crew.worker(0).ask((id, Deadly())).result(LIMIT_S)
    assert crew.worker(0).ask((int, "1")).result(LIMIT_S) == 1


def test_a_worker_that_crashes_with_large_data_on_the_way_is_one_error(crew, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    data = b"x" * 50_000_000
    asks = [crew.worker(0).ask((exit_when_opened, str(gate))), crew.worker(0).ask((len, data))]
    until(lambda: crew.status().workers[0].tasks == 2)  # else the worker that comes next may do the second
    with open(gate, "w"):
        pass
    assert [type(ask.exception(LIMIT_S)) for ask in asks] == [ir.WorkerDied] * 2
    assert crew.worker(0).ask((len, data)).result(LIMIT_S) == len(data)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_that_are_killed_while_tasks_come_cost_only_tasks_that_had_begun(crew, number):
    asks = [crew.ask((int, str(n))) for n in range(500)]
    crew.signal(number)
    ends = [ask.exception(LIMIT_S) for ask in asks]
    assert {type(end) for end in ends} <= {type(None), ir.WorkerDied}
    assert sum(end is not None for end in ends) <= 2 * 2
    assert crew.ask((int, "1")).result(LIMIT_S) == 1


def test_a_thousand_tasks_at_once_block_nothing(crew):
    asks = [crew.ask((int, str(n))) for n in range(1000)]
    assert [ask.result(LIMIT_S) for ask in asks] == list(range(1000))


def test_threads_may_submit_at_the_same_time(crew):
    found = []

    def submit(first):
        found.append(sum(crew.map([(int, str(n)) for n in range(first, first + 50)])))

    threads = [threading.Thread(target=submit, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [sum(range(first, first + 50)) for first in range(0, 800, 100)]


def test_a_task_may_have_a_crew_of_its_own(crew):
    def nest():
        with ir.Crew(lambda ctx, n: n + 1, nproc_per_node=1) as inner:
            return list(inner.map(range(3)))

    assert crew.ask((nest,)).result(LIMIT_S) == [1, 2, 3]


def test_a_task_may_start_a_program_that_reads_stdin(crew):
    assert crew.ask((subprocess.run, ["cat"])).result(LIMIT_S).returncode == 0


# ---- the end


def test_a_crew_that_was_closed_takes_no_task():
    crew = ir.Crew(serve, nproc_per_node=1)
    crew.close()
    with pytest.raises(RuntimeError, match="closed") as caught:
        crew.ask((pow, 2, 5))
    assert isinstance(caught.value, ir.CrewClosed)
    with pytest.raises(ir.CrewClosed):
        crew.map([(pow, 2, 5)])


def test_tasks_before_close_are_done_also_those_of_a_map_that_was_not_read():
    with ir.Crew(serve, nproc_per_node=2) as crew:
        asks = [crew.ask((int, str(n))) for n in range(50)]
        results = crew.map([(int, str(n)) for n in range(7)])
    assert [ask.result(timeout=0) for ask in asks] == list(range(50))
    assert list(results) == list(range(7))
    assert marked() == {}


def test_a_map_is_read_though_nothing_refers_to_its_crew():
    with ended_after():
        crew = ir.Crew(serve, nproc_per_node=2)
        results = crew.map([(abs, n) for n in range(-5, 5)])
        del crew
        assert list(results) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]
        maps = [results]
        del results
        with pytest.warns(ResourceWarning, match="was dropped while its workers ran"):
            maps.clear()


def test_a_task_that_is_cancelled_just_before_close_does_not_keep_it():
    with ir.Crew(serve, nproc_per_node=1) as crew:
        crew.ask((int,)).result(LIMIT_S)
        crew.ask((int,)).cancel()
    assert marked() == {}


def test_close_without_drain_leaves_no_future_open(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ir.Crew(serve, nproc_per_node=2, grace=1) as crew:
        done = crew.ask((int,))
        done.result(LIMIT_S)
        asks = [crew.ask((wait_for_file, str(gate))) for _ in range(50)]
        until(lambda: any(ask.running() for ask in asks))
        crew.close(drain=False)
        assert wait(asks, LIMIT_S).not_done == set()
    assert done.result() == 0
    assert {type(ask.exception()) for ask in asks} == {ir.CrewClosed}
    assert marked() == {}


def test_a_submission_that_races_with_close_is_done_or_refused():
    crew, ends = ir.Crew(serve, nproc_per_node=2), []

    def submit():
        try:
            while True:
                ends.append(crew.ask((int, "1")))
        except ir.CrewClosed:
            return

    thread = threading.Thread(target=submit)
    thread.start()
    until(lambda: len(ends) > 20)
    crew.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert wait(ends, LIMIT_S).not_done == set()
    assert {type(ask.exception()) for ask in ends} <= {type(None), ir.CrewClosed}
    assert ends[0].result() == 1


@pytest.mark.parametrize("max_tasks", [1, 3])
def test_workers_that_are_replaced_do_every_task_before_close(max_tasks):
    with ir.Crew(serve, nproc_per_node=3, max_tasks_per_child=max_tasks) as crew:
        asks = [crew.ask((pow, n, 2)) for n in range(6)]
    assert [ask.result(timeout=0) for ask in asks] == [n * n for n in range(6)]


def test_every_worker_is_started_by_the_targets_start():
    class Started:
        def start(self, ctx):
            self.status = "started"

        def task(self, ctx, task):
            return self.status

    with ir.Crew(Started, nproc_per_node=2) as crew:
        assert [crew.worker(rank).ask(0).result(LIMIT_S) for rank in range(2)] == ["started"] * 2


def test_a_start_that_fails_breaks_the_crew():
    class Fails:
        def start(self, ctx):
            raise ValueError("error in start")

        def task(self, ctx, task): ...

    crew = ir.Crew(Fails, nproc_per_node=2)
    with contextlib.suppress(BrokenExecutor):
        crew.ask(0).result(LIMIT_S)
    until(lambda: crew.failure is not None)
    with pytest.raises(BrokenExecutor, match="ValueError: error in start") as caught:
        crew.ask(0)
    assert isinstance(caught.value, ir.CrewFailed)
    crew.close()


def test_a_dead_worker_breaks_a_crew_without_restarts():
    crew = ir.Crew(serve, nproc_per_node=1)
    ask = crew.ask((os._exit, 0))
    with pytest.raises(ir.WorkerDied):
        ask.result(LIMIT_S)
    until(lambda: crew.failure is not None)
    with pytest.raises(BrokenExecutor):
        crew.ask((pow, 2, 8))
    crew.close()


def test_what_a_callback_submits_when_the_crew_has_failed_is_refused():
    crew, caught, called = ir.Crew(serve, nproc_per_node=1), [], threading.Event()

    def again(_):
        try:
            crew.ask((int,)).exception(LIMIT_S)
        except (ir.InfiniRunError, RuntimeError) as error:
            caught.append(error)
        called.set()

    until(lambda: crew.status().workers[0].state == "ready")
    crew.worker(0).ask((os._exit, 3))
    waiting = crew.worker(0).ask((int,))
    until(lambda: crew.failure is not None)
    waiting.add_done_callback(again)
    assert called.wait(LIMIT_S)
    assert [type(error) for error in caught] == [ir.CrewFailed]
    crew.close()


def script(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_pending_tasks_are_done_when_the_interpreter_exits():
    found = script(
        "import time\nimport infini_run as ir\n"
        "def serve(ctx, text):\n    time.sleep(0.5)\n    print(text)\n"
        "crew = ir.Crew(serve, console='inherit')\ncrew.ask('apple')\n"
    )
    assert (found.returncode, found.stdout.strip()) == (0, "apple")


def test_an_atexit_handler_is_refused_a_task():
    found = script(
        "import atexit\nimport infini_run as ir\n"
        "@atexit.register\ndef last():\n"
        "    try:\n        crew.ask(1)\n    except RuntimeError as error:\n        print(type(error).__name__)\n"
        "crew = ir.Crew(lambda ctx, n: n)\nassert crew.ask(42).result() == 42\n"
    )
    assert (found.returncode, found.stdout.strip()) == (0, "CrewClosed")
