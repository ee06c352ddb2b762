"""Executor: the interface of concurrent.futures, and who is built upon it (asyncio, joblib).

The suites of CPython and of loky run it in the place of their own executors: test_executor_suites.py.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool

import pytest

import infini_run as ir
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S, interrupt_main, until

_state = {}


def remember(value):
    _state["value"] = value


def read_fifo(path):
    with open(path) as file:
        return file.read()


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def open_gate(gate):
    with open(gate, "w"):
        pass


def starts(executor):
    return sum(worker.pid > 0 for worker in executor._crew.status().workers)


def test_calls_of_any_function_have_their_results():
    with ir.Executor(2) as executor:
        assert executor.submit(pow, 2, exp=5).result(LIMIT_S) == 32
        assert executor.submit(lambda: ir.this_worker().world_size).result(LIMIT_S) == 2
        for chunksize in (1, 3):
            assert list(executor.map(pow, range(7), range(7), chunksize=chunksize)) == [n**n for n in range(7)]
        assert repr(executor) == "<Executor of 2: running>"
    assert repr(executor) == "<Executor of 2: closed>"
    assert marked() == {}


def test_workers_start_when_none_is_free():
    with ir.Executor(8) as executor:
        for _ in range(3):
            executor.submit(int).result(LIMIT_S)
        assert starts(executor) == 1


def test_worker_starts_for_call_whose_worker_another_thread_took(gate):
    class Late:
        """Lets another thread submit a call before it is pickled."""

        def __reduce__(self):
            pickles.set()
            assert submitted.wait(LIMIT_S)
            return int, ()

    pickles, submitted = threading.Event(), threading.Event()
    with ir.Executor(2) as executor:
        executor.submit(int).result(LIMIT_S)
        until(lambda: [worker.state for worker in executor._crew.status().workers] == ["ready", "stopped"])
        late = []
        thread = threading.Thread(target=lambda: late.append(executor.submit(int, Late())))
        thread.start()
        assert pickles.wait(LIMIT_S)
        blocked = executor.submit(read_fifo, gate)
        submitted.set()
        thread.join()
        assert late[0].result(LIMIT_S) == 0
        open_gate(gate)
        assert blocked.result(LIMIT_S) == ""


def test_initializer_runs_once_in_each_worker():
    with ir.Executor(2, initializer=remember, initargs=("it",)) as executor:
        assert [executor.submit(_state.get, "value").result(LIMIT_S) for _ in range(3)] == [
            None
        ] * 3  # sent, not read
        assert executor.submit(lambda: sys.modules[remember.__module__]._state).result(LIMIT_S) == {"value": "it"}


def test_no_call_waits_behind_another_while_a_worker_is_free(gate):
    with ir.Executor(2) as executor:
        list(executor.map(int, range(20)))
        blocked = executor.submit(read_fifo, gate)
        until(blocked.running)
        assert list(executor.map(int, range(20), timeout=LIMIT_S)) == list(range(20))
        open_gate(gate)


def test_call_is_cancelled_until_worker_has_it(gate):
    with ir.Executor(1) as executor:
        running, waiting = executor.submit(read_fifo, gate), executor.submit(int)
        until(running.running)
        assert (running.cancel(), waiting.cancel(), waiting.cancel()) == (False, True, True)
        assert (waiting.cancelled(), waiting.running(), running.cancelled()) == (True, False, False)
        open_gate(gate)
        assert running.result(LIMIT_S) == ""


def test_shutdown_cancels_what_no_worker_has(gate):
    executor = ir.Executor(1)
    running, *waiting = [executor.submit(read_fifo, gate), *(executor.submit(int) for _ in range(5))]
    until(running.running)
    executor.shutdown(wait=False, cancel_futures=True)
    wait(waiting, LIMIT_S)
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown$"):
        executor.submit(int)
    open_gate(gate)
    executor.shutdown()
    assert running.result(0) == ""
    assert marked() == {}


def test_dead_worker_breaks_the_executor_for_all_calls(gate):
    with ir.Executor(2) as executor:
        running = executor.submit(read_fifo, gate)
        until(running.running)
        died, waiting = executor.submit(os._exit, 3), executor.submit(read_fifo, gate)
        for future in (died, running, waiting):
            error = future.exception(LIMIT_S)
            assert isinstance(error, ir.ExecutorFailed)
            assert isinstance(error, BrokenProcessPool)
            assert (error.exit_code, type(error.causes[0])) == (3, ir.WorkerDied)
            assert "exit code 3" in str(error)
        with pytest.raises(ir.ExecutorFailed, match=r"^the executor is broken\n  rank \d on .* died: exit code 3"):
            executor.submit(int)
    assert type(pickle.loads(pickle.dumps(error))) is ir.ExecutorFailed
    assert marked() == {}


def test_dead_worker_costs_its_call_alone_with_restarts():
    with ir.Executor(1, restart=ir.Restart(max_restarts=9, within_s=60)) as executor:
        died, other = executor.submit(os._exit, 3), executor.submit(int)
        assert type(died.exception(LIMIT_S)) is ir.WorkerDied
        assert other.result(LIMIT_S) == 0


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize("call", [(id, Unreadable()), (Unreadable,)], ids=["call", "result"])
def test_what_cannot_be_unpickled_breaks_unless_there_are_restarts(call):
    with ir.Executor(1) as executor:
        assert "cannot be unpickled" in str(executor.submit(*call).exception(LIMIT_S))
        until(lambda: executor._crew.failure is not None)
        with pytest.raises(BrokenProcessPool, match="no number"):
            executor.submit(int)
    with ir.Executor(1, restart=ir.Restart(max_restarts=1)) as executor:
        error = executor.submit(*call).exception(LIMIT_S)
        assert type(error) is ir.RemoteError
        assert "cannot be unpickled" in str(error)
        assert "_UnreadableCall" not in str(error)
        assert executor.submit(int).result(LIMIT_S) == 0


def test_failing_initializer_breaks_the_executor():
    executor = ir.Executor(1, initializer=int, initargs=("no number",))
    with executor, pytest.raises(ir.ExecutorFailed, match="ValueError: invalid literal"):
        executor.submit(int).result(LIMIT_S)


def cancel():
    raise ir.Cancelled


def test_call_that_raises_cancelled_has_that_for_its_error():
    with ir.Executor(1) as executor:
        assert type(executor.submit(cancel).exception(LIMIT_S)) is ir.Cancelled
        assert executor.submit(int).result(LIMIT_S) == 0


def test_sys_exit_and_unpicklable_call_are_errors_of_the_call():
    with ir.Executor(1) as executor:
        assert executor.submit(sys.exit, 4).exception(LIMIT_S).code == 4
        assert type(executor.submit(int, (n for n in ())).exception(LIMIT_S)) is ir.UnpicklableError
        with pytest.raises(ZeroDivisionError) as caught:
            executor.submit(divmod, 1, 0).result(LIMIT_S)
        assert "ZeroDivisionError" in caught.value.__cause__.tb
        assert executor.submit(int).result(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"max_workers": 0}, ValueError, "max_workers must be greater than 0"),
        ({"max_workers": 2.0}, ir.UsageError, r"^max_workers=2\.0: expected a whole number of at least 1$"),
        ({"max_workers": "2"}, ir.UsageError, "^max_workers='2': expected a whole number of at least 1$"),
        ({"hosts": 4}, ir.UsageError, "; for 4 workers, use max_workers=4$"),
        ({"initializer": 3}, TypeError, "initializer must be a callable"),
        ({"max_workers": 1, "hosts": ["a", "b"]}, ir.UsageError, r"2 hosts need a worker each; use hosts=\['a'\]"),
        (
            {"max_workers": 8, "hosts": ["a:2", "b:3"]},
            ir.UsageError,
            "^max_workers=8: needs 4 workers on a, with room for 2; use max_workers=4$",
        ),
        (
            {"max_workers": 5, "hosts": ["a", "b"], "nnodes": (1, 2)},
            ir.UsageError,
            "^max_workers=5: .* cannot replace each other; use max_workers=4$",
        ),
        (
            {"hosts": ["a:1", "b:2"], "nnodes": (1, 2)},
            ir.UsageError,
            "cannot replace each other; use max_workers=N$",
        ),
        ({"max_workers": 10**7}, ir.UsageError, "^max_workers=10000000: expected 1 to 4194304$"),
        ({"max_worker": 1}, TypeError, "unexpected keyword argument 'max_worker'; did you mean max_workers"),
        ({"keep_going": True}, ir.UsageError, "no effect on a crew"),
        ({"max_workers": 2, "nproc": 3}, ir.UsageError, "^nproc=3: not a keyword of an Executor; use max_workers=N$"),
        ({"nproc_per_node": 3}, ir.UsageError, "^nproc_per_node=3: not a keyword of an Executor; use max_workers=N$"),
    ],
)
def test_invalid_argument_is_refused_before_anything_starts(given, error, text):
    with pytest.raises(error, match=text):
        ir.Executor(**given)


def test_call_that_does_not_pickle_is_named_by_its_argument():
    with ir.Executor(1) as executor:
        for call, part in (
            (executor.submit(print, 1, {"lock": threading.Lock()}), r"argument 1\['lock'\]"),
            (executor.submit(print, end=threading.Lock()), "argument end"),
        ):
            with pytest.raises(ir.UnpicklableError, match=f"^{part} cannot be sent: a _thread.lock does not pickle"):
                call.result(LIMIT_S)


def test_chunksize_below_one_is_refused():
    with ir.Executor(1) as executor, pytest.raises(ValueError, match="chunksize must be >= 1"):
        executor.map(int, [1], chunksize=0)


def test_asyncio_runs_calls_in_it():
    import asyncio

    async def main(executor):
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(executor, pow, n, 2) for n in range(10)))

    with ir.Executor(2) as executor:
        assert asyncio.run(main(executor)) == [n * n for n in range(10)]


def test_cancelled_coroutine_cancels_a_waiting_call(gate):
    import asyncio

    async def main(executor):
        running = executor.submit(read_fifo, gate)
        task = asyncio.wrap_future(executor.submit(int))
        task.cancel()
        await asyncio.sleep(0)
        open_gate(gate)
        return await asyncio.wrap_future(running), task.cancelled()

    with ir.Executor(1) as executor:
        assert asyncio.run(main(executor)) == ("", True)


# ---- joblib


@pytest.fixture
def joblib():
    module = pytest.importorskip("joblib")
    ir.register_joblib()
    return module


def test_joblib_runs_batches_in_it(joblib):
    with joblib.parallel_config("infini_run", n_jobs=2):
        assert joblib.Parallel()(joblib.delayed(pow)(n, 2) for n in range(50)) == [n * n for n in range(50)]
        found = joblib.Parallel(return_as="generator")(joblib.delayed(pow)(n, 2) for n in range(9))
        assert list(found) == [n * n for n in range(9)]
    with joblib.parallel_backend("infini_run"):
        assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(-n) for n in range(3)) == [0, 1, 2]
    assert marked() == {}


def test_joblib_uses_an_open_executor_and_leaves_it_open(joblib):
    def rank():
        return ir.this_worker().world_size

    with ir.Executor(3) as executor, joblib.parallel_config("infini_run", executor=executor):
        for _ in range(2):
            assert joblib.Parallel()(joblib.delayed(rank)() for _ in range(4)) == [3] * 4
        assert executor.submit(int).result(LIMIT_S) == 0


def test_joblib_raises_the_error_of_a_call(joblib):
    with joblib.parallel_config("infini_run", n_jobs=2), pytest.raises(ZeroDivisionError):
        joblib.Parallel()(joblib.delayed(divmod)(1, n) for n in range(4))
    assert marked() == {}


@pytest.fixture
def calls(joblib, gate):
    """A call that ignores the stop signal and never ends, then one that raises once it has begun."""

    def call(fails):
        if fails:
            with open(gate):
                raise ZeroDivisionError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(gate, "w"):
            signal.pause()

    return [joblib.delayed(call)(fails) for fails in (False, True)]


PARALLEL = {"n_jobs": 2, "backend": "infini_run", "batch_size": 1}


def test_joblib_kills_running_calls_after_failure(joblib, calls):
    with pytest.raises(ZeroDivisionError):
        joblib.Parallel(**PARALLEL)(calls)
    assert marked() == {}


def test_joblib_has_new_workers_after_failure(joblib, calls):
    with joblib.Parallel(**PARALLEL) as parallel:
        with pytest.raises(ZeroDivisionError):
            parallel(calls)
        assert parallel(joblib.delayed(abs)(-n) for n in range(3)) == [0, 1, 2]
    assert marked() == {}


def test_joblib_kills_running_calls_at_its_timeout(joblib, calls):
    with pytest.raises(multiprocessing.TimeoutError):
        joblib.Parallel(**PARALLEL, timeout=0.5)(calls[:1])
    assert marked() == {}


def test_joblib_kills_running_calls_when_interrupted(joblib, calls, gate, raised):
    def interrupt():
        with open(gate):
            interrupt_main(raised)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        joblib.Parallel(**PARALLEL)(calls[:1])
    thread.join()
    assert marked() == {}


def test_joblib_kills_running_calls_of_dropped_generator(joblib, calls, gate):
    found = joblib.Parallel(**PARALLEL, return_as="generator")(calls[:1])
    with open(gate), pytest.warns(UserWarning, match="have been cancelled"):
        del found
    assert marked() == {}


def test_joblib_cancels_waiting_calls_of_open_executor(joblib, gate, tmp_path):
    def call(number):
        if number < 2:
            with open(gate, "rb", buffering=0) as file:
                file.read(1)
        if number == 0:
            raise ZeroDivisionError
        (tmp_path / f"ran {number}").touch()

    bell = os.open(gate, os.O_RDWR)
    with ir.Executor(2) as executor, joblib.parallel_config("infini_run", executor=executor):
        os.mkfifo(tmp_path / "other")
        other = executor.submit(read_fifo, tmp_path / "other")

        def ring():
            until(lambda: executor._crew.status().waiting == 3)
            os.write(bell, b"x")

        thread = threading.Thread(target=ring)
        thread.start()
        with pytest.raises(ZeroDivisionError):
            joblib.Parallel(pre_dispatch="all", batch_size=1)(joblib.delayed(call)(number) for number in range(4))
        thread.join()
        os.write(bell, b"x")  # a worker may have the next call
        with open(tmp_path / "other", "w") as file:
            file.write("kept")
        assert other.result(LIMIT_S) == "kept"
    os.close(bell)
    assert not {"ran 2", "ran 3"} & {path.name for path in tmp_path.iterdir()}


def test_joblib_refuses_options_beside_an_executor(joblib):
    refused = pytest.raises(ir.UsageError, match=r"(hosts|initializer): conflicts with executor=")
    with ir.Executor(1) as executor, refused:
        joblib.parallel_config("infini_run", executor=executor, hosts=["a"])
    with ir.Executor(1) as executor, joblib.parallel_config("infini_run", executor=executor), refused:
        joblib.Parallel(initializer=print)(joblib.delayed(abs)(n) for n in range(2))


@pytest.mark.parametrize("where", ["Parallel", "parallel_config"])
def test_joblib_hands_keywords_to_executor(where, joblib):
    options = {"initializer": setattr, "initargs": (os, "kept", "by the initializer")}
    shared, own = ({}, options) if where == "Parallel" else (options, {})
    kept = joblib.delayed(getattr)(os, "kept", None)
    failing = joblib.delayed(divmod)(1, 0)
    with joblib.parallel_config("infini_run", **shared), joblib.Parallel(n_jobs=2, **own) as parallel:
        assert parallel([kept] * 3) == ["by the initializer"] * 3
        with pytest.raises(ZeroDivisionError):
            parallel([failing] * 2)
        assert parallel([kept] * 3) == ["by the initializer"] * 3
    assert not hasattr(os, "kept")


def test_joblib_refuses_unknown_keyword(joblib):
    parallel = joblib.Parallel(n_jobs=2, backend="infini_run", initialiser=print)
    with pytest.raises(TypeError, match=r"^Executor\(\) got an .* 'initialiser'; did you mean initializer\?$"):
        parallel(joblib.delayed(abs)(n) for n in range(2))


def test_program_that_ends_finishes_submitted_calls():
    code = (
        "import infini_run as ir, time\n"
        "executor = ir.Executor(2, console='inherit')\n"
        "executor.submit(time.sleep, 0.1)\n"
        "executor.submit(print, 'apple')\n"
        "executor.shutdown(wait=False)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, "apple")
