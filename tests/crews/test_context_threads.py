"""One Context used by several threads of a worker: no task is lost, and none waits for ever."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time

import infini_run as ir
from tests.support.rows import TAKES_ALL
from tests.support.waiting import LIMIT_S, until


class Watched:
    """Threads of its own look at the context all the time, between the tasks too."""

    def start(self, ctx):
        self.is_over = False
        self.errors = []
        self.threads = [threading.Thread(target=self.look, args=(ctx,), daemon=True) for _ in range(4)]
        for thread in self.threads:
            thread.start()

    def look(self, ctx):
        try:
            while not self.is_over:
                ctx.cancelled  # noqa: B018
                ctx.stopping  # noqa: B018
        except BaseException as error:
            self.errors.append(repr(error))

    def task(self, ctx, n):
        return n

    def stop(self, ctx):
        self.is_over = True
        for thread in self.threads:
            thread.join()
        assert self.errors == []


def test_tasks_are_done_in_order_while_threads_look():
    count = 2000 if TAKES_ALL else 300
    with ir.Crew(Watched, nproc_per_node=1) as crew:
        asks = [crew.worker(0).ask(n) for n in range(count)]
        assert [ask.result(60) for ask in asks] == list(range(count))
        for n in range(count // 10):  # each is the only one there is: the main thread does it, whichever takes it in
            assert crew.worker(0).ask(n).result(60) == n
        problems = crew.close().problems
    assert problems == ()


def test_a_thread_sees_that_its_task_is_cancelled():
    def serve(ctx, task):
        seen = threading.Event()

        def look():
            while not ctx.cancelled:
                time.sleep(0.01)
            seen.set()

        thread = threading.Thread(target=look)
        thread.start()
        ctx.emit("up")
        assert seen.wait(60)
        thread.join()
        ctx.emit("seen")
        ctx.checkpoint()

    with ir.Crew(serve, nproc_per_node=1) as crew:
        ask = crew.worker(0).ask(0)
        emitted = []
        for event in crew:
            if event.kind == "emitted":
                emitted.append(event.value)
                if event.value == "up":
                    ask.cancel()
                else:
                    break
    assert emitted == ["up", "seen"]


def test_a_signal_handler_may_look_while_the_worker_waits_for_a_task():

    class Serve:
        def start(self, ctx):
            self.looks = []
            signal.signal(signal.SIGUSR1, lambda *_: self.looks.append(ctx.stopping))

        def task(self, ctx, n):
            return len(self.looks)

    with ir.Crew(Serve, nproc_per_node=1) as crew:
        assert crew.worker(0).ask(0).result(60) == 0
        for _ in range(20):
            assert crew.signal(signal.SIGUSR1, 0) == 1
            crew.worker(0).ask(0).result(60)
        assert 0 < crew.worker(0).ask(0).result(60) <= 20


def test_signal_handler_may_log_while_threads_log_and_worker_sends(tmp_path):
    """The main thread sends what nobody reads, another one logs behind it, and then a signal comes to the first."""
    heard = tmp_path / "heard"

    def serve(ctx, task):
        logger, is_over, main = logging.getLogger("tests.talk"), threading.Event(), threading.main_thread()

        def heed(number, frame):
            is_over.set()
            logger.warning("a signal")
            heard.touch()

        def place_of(thread):
            return sys._current_frames()[thread.ident].f_code.co_name

        def talk():
            while place_of(main) != "_push":  # else this thread may fill the channel, and the main one wait for it
                time.sleep(0.01)
            while not is_over.is_set():
                logger.warning("a line")

        def send_signal(talking):
            while place_of(main) != "_push" or place_of(talking) != "_locked":
                time.sleep(0.01)
            signal.pthread_kill(main.ident, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, heed)
        ctx.emit("first")
        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        threading.Thread(target=send_signal, args=(talking,), daemon=True).start()
        ctx.emit(bytes(1 << 22))

    with ir.Crew(serve, nproc_per_node=1, max_events=1, log_level="WARNING", grace=1) as crew:
        crew.events(0)  # from now on the worker waits for this thread
        ask = crew.worker(0).ask(0)
        try:
            until(heard.exists, LIMIT_S / 4)
        except AssertionError:
            crew.close(drain=False)
            raise
    assert ask.result() is None


def test_what_several_threads_emit_arrives_whole_and_in_the_order_of_each():
    def serve(ctx, count):
        def emit(thread):
            for n in range(count):
                ctx.emit((thread, n, bytes(300_000 if n % 20 == 0 else 1)))
                ctx.progress(n, count)
                ctx.status(f"{thread}: {n}")
                ctx.checkpoint()

        threads = [threading.Thread(target=emit, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    count, emitted = 100, {thread: [] for thread in range(4)}
    with ir.Crew(serve, nproc_per_node=1) as crew:
        ask = crew.ask(count)
        while sum(map(len, emitted.values())) < 4 * count:
            for event in crew.events():
                if event.kind == "emitted":
                    thread, n, data = event.value
                    assert len(data) == (300_000 if n % 20 == 0 else 1)
                    emitted[thread].append(n)
        assert ask.result(60) is None
    assert emitted == {thread: list(range(count)) for thread in range(4)}
