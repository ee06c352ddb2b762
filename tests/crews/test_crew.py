"""Crews: tasks and their answers, events, health, from threads and from asyncio; what is refused."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, as_completed, wait
from functools import partial
from importlib import import_module

import pytest

import infini_run as ir
from tests.support.command import CHILDREN
from tests.support.processes import is_alive, marked
from tests.support.waiting import LIMIT_S, until

sys.path.insert(0, str(CHILDREN))
from crew_parts import echo, obey

ROOT = os.path.dirname(os.path.dirname(ir.__file__))
HEAVY = {
    *("argparse", "cloudpickle", "concurrent", "contextlib", "ctypes", "enum", "importlib", "inspect", "json"),
    *("logging", "pickle", "re", "selectors", "signal", "socket", "subprocess", "tempfile", "threading", "typing"),
    *("traceback", "warnings", "weakref"),
}


@pytest.fixture
def crew():
    with ir.Crew(obey, nproc=2, grace=1) as crew:
        yield crew


# ---- tasks


def test_a_task_is_answered_by_its_worker():
    with ir.Crew(echo, nproc=2) as crew:
        assert [crew.worker(rank).ask("x").result() for rank in (1, 0)] == [(1, "x"), (0, "x")]


def test_an_ask_of_the_crew_is_answered_by_any_worker():
    with ir.Crew(echo, nproc=2) as crew:
        asks = [crew.ask(i) for i in range(100)]
        assert [ask.result()[1] for ask in asks] == list(range(100))


def test_a_closure_and_a_class_of_the_caller_travel_by_value():
    factor = 3

    class Number:
        def __init__(self, n):
            self.n = n

    with ir.Crew(lambda ctx, number: Number(factor * number.n)) as crew:
        answer = crew.ask(Number(5)).result()
    assert isinstance(answer, Number)
    assert answer.n == 15


def test_a_class_starts_once_and_stops_last(bell):
    path = bell.path

    class Counter:
        def start(self, ctx):
            self.count = 100

        def task(self, ctx, n):
            self.count += n
            return self.count

        def stop(self, ctx):
            with open(path, "w") as file:
                print("stopped at", self.count, file=file)

    with ir.Crew(Counter) as crew:
        assert [crew.ask(n).result() for n in (1, 2)] == [101, 103]
    assert bell.hear(1) == ["stopped at 103"]


def test_what_a_worker_raises_is_raised_here_with_its_traceback_and_place(crew):
    with pytest.raises(ValueError, match="the last word") as caught:
        crew.worker(1).ask(("burst and raise", 0)).result()
    assert caught.value.rank == 1
    assert caught.value.host == os.uname().nodename
    (note,) = caught.value.__notes__
    assert "on rank 1" in note
    assert "in burst_and_raise" in note
    assert "crews/worker/worker_main.py" not in note


class Unmakeable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one}-{two}")


def test_an_exception_that_cannot_be_made_again_comes_in_words():
    def serve(ctx, task):
        raise Unmakeable(1, 2)

    with ir.Crew(serve) as crew, pytest.raises(ir.RemoteError, match=r"Unmakeable: 1-2") as caught:
        crew.ask(0).result()
    assert "raise Unmakeable(1, 2)" in caught.value.trace


def test_a_result_that_cannot_be_pickled_is_told_by_name_and_the_worker_lives(crew):
    with pytest.raises(ir.UnpicklableError, match=r"^result of rank 0 cannot be sent: a generator does not pickle"):
        crew.worker(0).ask("unpicklable").result()
    assert crew.worker(0).ask(("square", 3)).result() == 9


def test_large_tasks_and_results_go_both_ways_at_once(crew):
    data = bytes(20_000_000)
    asks = [crew.worker(0).ask(("size", data)) for _ in range(3)]
    more = [crew.worker(0).ask(("bytes", 20_000_000)) for _ in range(3)]
    assert [ask.result() for ask in asks] == [20_000_000] * 3
    assert all(ask.result() == data for ask in more)


def test_ten_thousand_small_tasks_come_back_in_order(crew):
    assert list(crew.map(("square", n) for n in range(10_000))) == [n * n for n in range(10_000)]


def test_a_map_takes_items_as_there_is_room(crew):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield "pid"

    results = crew.map(endless())
    next(results)
    assert len(taken) < 500
    results.close()


def test_a_map_fails_as_soon_as_any_item_does(crew, bell, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def items():
        yield ("be slow", bell.path, str(gate))
        bell.hear(1)  # a task that has not begun is cancelled
        yield ("burst and raise", 0)

    with pytest.raises(ValueError, match="the last word"):
        list(crew.map(items()))
    with open(gate, "w") as file:
        file.write("go on")


def test_a_map_fails_with_the_death_of_a_worker_and_loses_no_other_task():
    with ir.Crew(obey, nproc=2, restart=ir.Restart()) as crew:
        with pytest.raises(ir.WorkerDied, match="SIGKILL"):
            list(crew.map([*(("square", n) for n in range(100)), "killed", *(("square", n) for n in range(100))]))
        assert list(crew.map(("square", n) for n in range(100))) == [n * n for n in range(100)]


# ---- cancelling


def test_a_task_that_has_begun_is_cancelled_at_its_checkpoint(crew, bell):
    ask = crew.worker(0).ask(("wait for cancel", bell.path))
    bell.hear(1)
    assert ask.cancel()
    with pytest.raises(CancelledError):
        ask.result()
    assert crew.worker(0).ask(("square", 2)).result() == 4
    assert ask.cancelled()


def test_a_task_that_waits_is_cancelled_before_it_begins(crew, bell, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    first = crew.worker(0).ask(("be slow", bell.path, str(gate)))
    bell.hear(1)
    second = crew.worker(0).ask(("be slow", bell.path, str(gate)))
    second.cancel()
    crew.worker(1).ask("pid").result()  # so that has been told
    gate.write_text("opened")
    assert first.result() == "opened"
    assert crew.worker(0).ask("pid").result() > 0  # nobody rang a second time, nor waits at the gate
    assert second.cancelled()


def test_a_task_that_was_cancelled_is_handed_to_nobody_though_its_removal_is_late(bell, tmp_path):
    """Its worker has room again, and the supervisor learns that before it comes to the call that removes the task."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    blocked, go_on = threading.Event(), threading.Event()
    with ir.Crew(obey, nproc=1) as crew:
        worker = crew.worker(0)
        worker.ask("pid").result()
        first = worker.ask(("sleep", 0.2))
        short = [worker.ask("pid") for _ in range(10)]
        last = worker.ask(("be slow", bell.path, str(gate)))
        waiting = [crew.ask("pid") for _ in range(8)]
        first.add_done_callback(lambda _: (blocked.set(), go_on.wait(LIMIT_S)))  # in the supervisor's thread
        assert blocked.wait(LIMIT_S)
        bell.hear(1)  # so the ends of the short ones are there to be read
        assert all(ask.cancel() for ask in waiting)
        go_on.set()
        until(lambda: short[-1].done() and crew.status().waiting == 0)
        assert crew.status().workers[0].tasks == 1
        gate.write_text("on")
        assert last.result(LIMIT_S) == "on"


def test_what_was_sent_is_cancelled_by_its_number(crew, bell):
    task = crew.worker(0).send(("wait for cancel", bell.path))
    bell.hear(1)
    crew.worker(0).cancel(task)
    kinds = {}
    while "cancelled" not in kinds:
        kinds |= {event.kind: event.task for event in crew.events(LIMIT_S)}
    assert kinds["cancelled"] == task


# ---- events


def test_events_tell_what_workers_say_in_order():
    with ir.Crew(obey, nproc=1) as crew:
        task = crew.worker(0).send(("emit", 3))
        crew.worker(0).send(("status", "loading"))
        crew.worker(0).send(("progress", 3, 32))
        pid = crew.status().workers[0].pid
        events = []
        while sum(event.kind == "done" for event in events) < 3:
            events += crew.events(LIMIT_S)
    kinds = [event.kind for event in events]
    assert kinds == [
        "started",
        "ready",
        "emitted",
        "emitted",
        "emitted",
        "done",
        "status",
        "done",
        "progress",
        "done",
    ]
    assert [event.pid for event in events[:3]] == [pid, pid, 0]
    assert [event.value for event in events[2:6]] == [0, 1, 2, 3]
    assert {event.task for event in events[2:6]} == {task}
    assert events[6].text == "loading"
    assert (events[8].done, events[8].of) == (3, 32)
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)


@pytest.mark.parametrize("count", [0, 1, 20, 5000])
@pytest.mark.parametrize(("how", "last"), [("burst and raise", ValueError), ("burst and die", ir.WorkerDied)])
def test_a_burst_and_the_error_after_it_all_come(count, how, last):
    with ir.Crew(obey, restart=ir.Restart()) as crew:
        crew.worker(0).send((how, count))
        values, error = [], None
        while error is None:
            for event in crew.events(LIMIT_S):
                if event.kind == "emitted":
                    values.append(event.value)
                elif event.kind == "failed":
                    error = event.error
    assert values == list(range(count))
    assert isinstance(error, last)


def test_what_was_said_before_a_close_is_still_read():
    crew = ir.Crew(obey)
    for _ in range(5):
        crew.worker(0).send(("emit", 100))
    assert crew.close().problems == ()
    values = [event.value for event in crew if event.kind == "emitted"]
    assert values == list(range(100)) * 5


def test_a_worker_s_last_words_are_in_the_error():
    crew = ir.Crew(obey)
    with pytest.raises(ir.WorkerDied, match="exit code 7") as caught:
        crew.ask("say and die").result()
    assert caught.value.last_lines[-1] == "my last words"
    assert "  | my last words" in str(caught.value)
    crew.close()


def test_prints_are_prefixed_and_logged(tmp_path, capfd):
    def serve(ctx, task):
        print("hello from", ctx.rank)

    with ir.Crew(serve, nproc=2, log_dir=tmp_path) as crew:
        crew.worker(1).ask(0).result()
    assert "[rank 1] hello from 1" in capfd.readouterr().out
    assert "hello from 1" in (tmp_path / "rank_1.log").read_text()


def test_logging_records_come_to_our_loggers_with_rank_and_host(caplog):
    def serve(ctx, task):
        logging.getLogger("mine").warning("careful, %s", task)

    with caplog.at_level(logging.INFO), ir.Crew(serve, nproc=2, log_level=logging.INFO) as crew:
        crew.worker(1).ask("you").result()
    (record,) = [record for record in caplog.records if record.name == "mine"]
    assert (record.getMessage(), record.rank, record.host) == ("careful, you", 1, os.uname().nodename)


# ---- health


def test_signs_of_life_keep_the_watchdog_quiet():
    with ir.Crew(obey, watchdog_s=2) as crew:
        assert crew.ask(("ping", 50, 0.05)).result() == "alive"


def test_silence_is_a_failure():
    with ir.Crew(obey, watchdog_s=0.2, restart=ir.Restart()) as crew:
        with pytest.raises(ir.WorkerDied, match="hung: no sign of life for"):
            crew.ask(("sleep", 600)).result()
        assert crew.ask(("square", 2)).result() == 4


def test_who_asks_for_more_time_gets_it():
    with ir.Crew(obey, watchdog_s=1.5) as crew:
        assert crew.ask(("extend", LIMIT_S, 2)).result() == "done"


def test_a_slow_start_may_ask_for_more_time():
    """In whichever time this machine lets a worker ask."""

    def starts(ready_s):
        class Slow:
            def start(self, ctx):
                ctx.extend(60)
                time.sleep(ready_s + 0.5)

            def task(self, ctx, task):
                return task

        try:
            with ir.Crew(Slow, ready_timeout_s=ready_s) as crew:
                return crew.ask(1).result() == 1
        except ir.InfiniRunError:
            return False

    assert any(map(starts, (1, 2, 4, 8, 16)))


def test_watchdog_says_so_in_the_environment():
    with ir.Crew(obey, watchdog_s=2.5) as crew:
        assert crew.ask(("env", "WATCHDOG_USEC")).result() == "2500000"


def test_a_ping_to_the_notify_socket_is_a_sign_of_life():
    def serve(ctx, task):
        import os
        import socket
        import time

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for _ in range(25):
                sender.sendto(b"WATCHDOG=1", os.environ["NOTIFY_SOCKET"])
                time.sleep(0.1)
        return "alive"

    with ir.Crew(serve, watchdog_s=2) as crew:
        assert crew.ask(0).result() == "alive"


def test_a_worker_that_says_itself_that_it_hangs_is_believed():
    def serve(ctx, task):
        import os
        import signal
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"WATCHDOG=trigger", os.environ["NOTIFY_SOCKET"])
        signal.pause()

    with ir.Crew(serve, restart=ir.Restart(), grace=1) as crew:
        with pytest.raises(ir.WorkerDied, match="WATCHDOG=trigger"):
            crew.worker(0).ask(0).result()
        assert crew.status().phase == "RUNNING"


def test_idle_workers_are_not_watched():
    with ir.Crew(obey, watchdog_s=1) as crew:
        assert crew.ask(("square", 2)).result() == 4
        assert crew.events(0)
        assert crew.events(1.5) == []
        assert crew.ask(("square", 3)).result() == 9


# ---- threads and asyncio


def test_a_callback_may_ask_and_close():
    crew = ir.Crew(obey)
    asked, closed = [], threading.Event()

    def go_on(ask):
        asked.append(crew.ask(("square", ask.result())))
        crew.close()
        closed.set()

    crew.ask(("square", 2)).add_done_callback(go_on)
    assert closed.wait(LIMIT_S)
    assert crew.close().phase == "CLOSED"
    assert asked[0].result() == 16


def test_many_threads_ask_at_once(crew):
    found = []

    def ask(n):
        found.extend(crew.ask(("square", n * 100 + i)).result() for i in range(50))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((n * 100 + i) ** 2 for n in range(8) for i in range(50))


def test_futures_are_those_of_concurrent_futures(crew):
    asks = [crew.ask(("square", n)) for n in range(20)]
    assert {ask.result() for ask in as_completed(asks)} == {n * n for n in range(20)}
    assert not wait(asks).not_done
    assert asks[0].exception() is None
    failed = crew.ask(("burst and raise", 0))
    assert isinstance(failed.exception(), ValueError)


def test_asyncio_awaits_asks_and_events():
    import asyncio

    async def main():
        async with ir.Crew(obey, nproc=2) as crew:
            answers = await asyncio.gather(*(crew.ask(("square", n)) for n in range(50)))
            crew.worker(1).send(("emit", 3))
            values = []
            async for event in crew:
                if event.kind == "emitted":
                    values.append(event.value)
                if event.kind == "done":
                    break
            with pytest.raises(ValueError, match="the last word"):
                await crew.ask(("burst and raise", 0))
            return answers, values

    assert asyncio.run(main()) == ([n * n for n in range(50)], [0, 1, 2])


def test_cancelling_a_coroutine_cancels_its_task(crew, bell):
    import asyncio

    async def main():
        async def ask():
            await crew.worker(0).ask(("wait for cancel", bell.path))

        task = asyncio.ensure_future(ask())
        while not select_ready(bell):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert crew.worker(0).ask(("square", 2)).result() == 4


def select_ready(bell):
    import select

    return select.select([bell._fd], [], [], 0)[0]


def test_async_iteration_ends_when_the_crew_is_closed():
    import asyncio

    async def main():
        crew = ir.Crew(obey)
        closing = asyncio.ensure_future(crew.aclose())
        kinds = [event.kind async for event in crew]
        await closing
        return kinds

    assert asyncio.run(main())[-1] == "stopped"


def test_two_crews_at_once_know_nothing_of_each_other():
    with ir.Crew(echo, nproc=2) as one, ir.Crew(echo, nproc=1) as two:
        assert two.ask(1).result() == (0, 1)
        assert one.worker(1).ask(2).result() == (1, 2)
        two.close()
        assert one.worker(0).ask(3).result() == (0, 3)


def test_a_crew_in_a_worker_works_and_goes_with_it():
    def serve(ctx, task):
        import os

        import infini_run as ir

        with ir.Crew(lambda ctx, task: (os.getpid(), task), nproc=2) as inner:
            answers = [inner.worker(i).ask(i).result() for i in range(2)]
            if task == "die":
                os.kill(os.getpid(), 9)
            return answers

    with ir.Crew(serve, restart=ir.Restart(), grace=1) as crew:
        assert [answer for _, answer in crew.ask("live").result()] == [0, 1]
        with pytest.raises(ir.WorkerDied):
            crew.ask("die").result()
        assert [answer for _, answer in crew.ask("live").result()] == [0, 1]
    until(lambda: marked() == {})


# ---- what a worker is


def test_a_worker_imports_little(crew):
    modules = crew.ask("modules").result()
    for heavy in (
        "argparse",
        "asyncio",
        "typing",
        "cloudpickle",
        "dataclasses",
        "subprocess",
        "infini_run.core.group",
    ):
        assert heavy not in modules


def test_a_worker_never_sees_the_caller_s_main(crew):
    assert "obey" not in crew.ask("main").result()


def test_a_script_without_a_main_guard_makes_one_crew(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "import infini_run as ir\n"
        "print('main', flush=True)\n"
        "class Thing: pass\n"
        "def helper(): return Thing()\n"
        "def serve(ctx, task): return helper()\n"
        "with ir.Crew(serve, nproc=2) as crew:\n"
        "    print(isinstance(crew.ask(0).result(), Thing))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "main\nTrue\n", "")


def test_a_worker_s_stdin_is_empty_and_its_argv_ours(crew):
    def serve(ctx, task):
        import sys

        return sys.stdin.read(), sys.argv

    with ir.Crew(serve) as crew:
        assert crew.ask(0).result() == ("", sys.argv)


@pytest.mark.parametrize("inherits", [True, False])
def test_env_is_added_to_the_environment_or_is_all_of_it(monkeypatch, inherits):
    monkeypatch.setenv("OURS", "1")
    with ir.Crew(obey, env={"THEIRS": "2"}, inherit_env=inherits) as crew:
        assert crew.ask(("env", "THEIRS")).result() == "2"
        assert crew.ask(("env", "OURS")).result() == ("1" if inherits else None)
        assert crew.ask(("env", "RANK")).result() == "0"


def test_what_a_worker_started_ends_with_it(bell):
    with ir.Crew(obey, restart=ir.Restart(), grace=0.3) as crew:
        crew.ask(("children", bell.path)).result()
        pids = list(map(int, bell.hear(1)[0].split()[1:]))
        with pytest.raises(ir.WorkerDied):
            crew.ask("killed").result()
        assert crew.ask(("restarts",)).result() == 1
        assert not any(map(is_alive, pids))


def test_a_signal_reaches_a_worker(crew):
    with pytest.raises(ir.UsageError, match="unknown signal"):
        crew.signal(9999)
    assert crew.signal(signal.SIGCONT) == 2
    assert crew.worker(1).signal(signal.SIGCONT) == 1


# ---- what is refused, with nothing started


@pytest.mark.parametrize("make", [ir.Launcher, ir.Pool, partial(ir.Crew, echo)])
def test_a_keyword_that_is_no_flag_is_a_type_error_where_the_object_is_made(make):
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'nproc_per_nod'; did you mean nproc_per_node\?"
    ):
        make(nproc_per_nod=2)


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("no function", {}, "target='no function': expected a function"),
        (int, {}, "expected a function"),
        (echo, {"nproc": 0}, "nproc=0: expected 1"),
        (echo, {"nproc": 1, "nproc_per_node": 1}, "nproc_per_node=1 conflicts with nproc=1: both are one flag"),
        (echo, {"watchdog_s": -1}, "watchdog_s=-1: expected a number of seconds"),
        (echo, {"drain_s": float("nan")}, "drain_s=nan"),
        (echo, {"ready_timeout_s": float("inf")}, "ready_timeout_s=inf"),
        (echo, {"max_events": 0}, "max_events=0"),
        (echo, {"restart": "always"}, "restart='always'"),
        (echo, {"cwd": "/nowhere"}, "cwd=/nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(target, more, words):
    with pytest.raises(ir.UsageError) as caught:
        ir.Crew(target, **more)
    assert words in str(caught.value)


def test_a_target_that_cannot_be_pickled_is_refused_by_name():
    lock = threading.Lock()
    with pytest.raises(
        ir.UnpicklableError, match=r"^target's variable lock cannot be sent: a _thread.lock does not pickle"
    ):
        ir.Crew(lambda ctx, task: lock)


def test_a_task_that_cannot_be_pickled_is_refused_at_the_sender(crew):
    with pytest.raises(ir.UnpicklableError, match=r"^task cannot be sent: a generator does not pickle"):
        crew.ask(i for i in range(3))


def scale(item, factor=2):
    return item * factor


def add_context(ctx, task):
    return ctx + task


def test_task_alone_is_hinted_where_context_came_first():
    hint = "; a function of two arguments gets (ctx, task); for the task alone, use functools.partial("
    with ir.Crew(scale) as crew, pytest.raises(TypeError, match=re.escape(f"'Context' and 'int'{hint}")):
        crew.ask(3).result()
    with ir.Crew(partial(scale, factor=2)) as crew:
        assert crew.ask(3).result() == 6
    with ir.Crew(add_context) as crew, pytest.raises(TypeError, match=r"'Context' and 'int'$"):
        crew.ask(3).result()


def hide_a_generator(ctx, task):
    hidden = {"deep": [1, (n for n in ())]}
    if task == "emit":
        ctx.emit(hidden)
    elif task == "raise":
        raise ValueError(hidden)
    return hidden


def test_what_cannot_be_pickled_is_named_by_its_path_on_every_way():
    with ir.Crew(hide_a_generator, nproc=1) as crew:
        for send in (crew.ask, crew.worker(0).ask, crew.worker(0).send):
            with pytest.raises(
                ir.UnpicklableError, match=r"^task\['deep'\]\[1\] cannot be sent: a generator"
            ) as caught:
                send({"deep": [1, (n for n in ())]})
            assert caught.value.path == "task['deep'][1]"
        with pytest.raises(ir.UnpicklableError, match=r"^result\['deep'\]\[1\] of rank 0 cannot be sent") as caught:
            crew.ask("return").result()
        assert caught.value.path == "result['deep'][1]"
        with pytest.raises(ir.UnpicklableError, match=r"^emitted\['deep'\]\[1\] cannot be sent"):
            crew.ask("emit").result()
        with pytest.raises(ir.RemoteError, match=r"^ValueError: "):
            crew.ask("raise").result()


class FailsToLoad:
    def __reduce__(self):
        return int, ("not a number",)


def test_a_result_that_cannot_be_unpickled_here_is_told_with_its_rank():
    with ir.Crew(lambda ctx, task: FailsToLoad(), nproc=1) as crew:
        with pytest.raises(
            ir.RemoteError, match=r"the result of rank 0 on .* cannot be unpickled here: ValueError: "
        ) as e:
            crew.ask(0).result()
        assert (e.value.rank, e.value.kind) == (0, "ValueError")
        assert isinstance(e.value.__cause__, ValueError)


def swap(ctx, task):
    return task[::-1] if isinstance(task, bytes) else {"bytes": bytes(task["array"]), "array": task["array"]}


def test_large_bytes_and_arrays_keep_their_types_and_can_be_written_to_as_before():
    with ir.Crew(swap, nproc=1) as crew:
        data = bytes(range(256)) * 4096
        found = crew.ask(data).result()
        assert (type(found), found) == (bytes, data[::-1])
        found = crew.ask({"array": bytearray(data)}).result()
        assert (type(found["bytes"]), type(found["array"])) == (bytes, bytearray)
        assert found["bytes"] == found["array"] == data
        found["array"][0] = 7


def test_a_task_over_the_limit_is_refused_at_the_sender(crew, monkeypatch):
    monkeypatch.setattr("infini_run.crews.protocol.LIMIT", 1 << 20)
    with pytest.raises(ir.MessageTooLong, match="exceeds the channel's limit of 1048576"):
        crew.ask(bytes(1 << 20))
    assert crew.ask(("square", 2)).result() == 4


def test_a_result_over_the_limit_is_its_task_s_failure():
    def serve(ctx, task):
        from infini_run.crews import protocol

        protocol.LIMIT = 1 << 20
        return bytes(task)

    with ir.Crew(serve) as crew:
        with pytest.raises(ir.MessageTooLong):
            crew.ask(1 << 20).result()
        assert crew.ask(3).result() == bytes(3)


def test_a_target_that_cannot_be_unpickled_says_so():
    class Bad:
        def __reduce__(self):
            return (__import__, ("no_such_module",))

        def __call__(self, ctx, task):
            return None

    with pytest.raises(ir.CrewFailed, match=r"could not start.*no_such_module"), ir.Crew(Bad()) as crew:
        crew.ask(0).result()


def test_a_rank_that_is_not_there_is_refused(crew):
    with pytest.raises(ir.UsageError, match=r"worker\(2\): unknown rank; use 0 to 1"):
        crew.worker(2)


def test_nothing_is_asked_of_a_closed_crew():
    crew = ir.Crew(obey)
    crew.close()
    for ask in (crew.ask, crew.worker(0).ask, crew.worker(0).send):
        with pytest.raises(ir.InfiniRunError, match="closed"):
            ask("pid")
    assert crew.signal(15) == 0
    assert [event.kind for event in crew][-1] == "stopped"


# ---- preloaded


def test_preloaded_workers_are_forked_and_come_back_after_a_death():
    def serve(ctx, task):
        import os
        import sys

        if task == "die":
            os.kill(os.getpid(), 9)
        return "fractions" in sys.modules, ctx.restarts

    with ir.Crew(serve, nproc=2, preload=["fractions"], restart=ir.Restart()) as crew:
        assert crew.worker(0).ask("look").result() == (True, 0)
        with pytest.raises(ir.WorkerDied, match="SIGKILL"):
            crew.worker(0).ask("die").result()
        assert crew.worker(0).ask("look").result() == (True, 1)
        assert crew.worker(1).ask("look").result() == (True, 0)


def test_preload_takes_a_list_of_modules_that_are_there():
    with pytest.raises(ir.UsageError, match="expected a list of modules"):
        ir.Crew(echo, preload="math")
    with pytest.raises(ir.UsageError, match="no_such_module"):
        ir.Crew(echo, preload=["no_such_module"])


# ---- what a caller's mistake, or a task's own, must not do


def raise_cancelled(ctx, task):
    if task == "cancel":
        raise ir.Cancelled
    return task


def test_a_task_that_cancels_itself_is_a_cancelled_ask():
    with ir.Crew(raise_cancelled) as crew:
        with pytest.raises(CancelledError):
            crew.ask("cancel").result(LIMIT_S)
        assert crew.ask("next").result(LIMIT_S) == "next"


def test_a_task_that_is_cancelled_by_its_number_is_a_cancelled_ask(bell):
    with ir.Crew(obey, nproc=1) as crew:
        running = crew.worker(0).ask(("wait for cancel", bell.path))
        waiting = crew.worker(0).ask("pid")
        bell.hear(1)
        for ask in (waiting, running):
            crew.worker(0).cancel(ask.task)
        for ask in (waiting, running):
            with pytest.raises(CancelledError):
                ask.result(LIMIT_S)


def test_a_rank_that_is_no_number_is_refused_and_harms_nobody(crew):
    for rank in (0.5, "0", True, 2, -1):
        with pytest.raises(ir.UsageError, match="unknown rank; use 0 to 1"):
            crew.worker(rank)
    assert crew.worker(1).ask("pid").result(LIMIT_S)


class Careless(logging.Handler):
    def emit(self, record):
        raise ValueError("a handler's own mistake")


def log_and_answer(ctx, task):
    logging.getLogger("of.a.worker").warning("said")
    return task


def test_a_handler_of_ours_that_raises_ends_nothing(capfd):
    logger, handler = logging.getLogger("of.a.worker"), Careless()
    logger.addHandler(handler)
    try:
        with ir.Crew(log_and_answer, log_level=logging.INFO) as crew:
            assert crew.ask("first").result(LIMIT_S) == "first"
            assert crew.ask("second").result(LIMIT_S) == "second"
    finally:
        logger.removeHandler(handler)
    assert "a logging handler raised ValueError: a handler's own mistake" in capfd.readouterr().err


def test_a_module_that_makes_a_crew_when_it_is_imported_makes_one(tmp_path):
    (tmp_path / "bomb.py").write_text(
        "import os\nimport infini_run as ir\n"
        "depth = int(os.environ.get('DEPTH', 0))\nassert depth < 3\nos.environ['DEPTH'] = str(depth + 1)\n"
        "def serve(ctx, task):\n    return task\n"
        "crew = ir.Crew(serve)\nprint(crew.ask(1).result())\ncrew.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import bomb"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "a worker imports your module, which launches workers or submits a job" in done.stderr
    assert "AssertionError" not in done.stderr


def test_a_worker_starts_without_these_modules(monkeypatch, tmp_path):
    """With them a start takes half as many instructions again (decision 90)."""
    (tmp_path / "of_a_start.py").write_text("import sys\n\n\ndef modules(_):\n    return list(sys.modules)\n")
    monkeypatch.syspath_prepend(tmp_path)
    argv = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    bare = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout.split()
    with ir.Crew(import_module("of_a_start").modules, log_level=False) as crew:
        loaded = set(crew.ask(0).result())
    assert "infini_run.crews.worker.worker_main" in loaded
    assert sorted((loaded - set(bare)) & HEAVY) == []


def test_nproc_per_node_is_nproc():
    with ir.Crew(echo, nproc_per_node=2) as crew:
        assert crew.nproc == 2
