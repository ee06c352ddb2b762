"""The calls that other threads ask of a loop, and the descriptor that wakes it."""

from __future__ import annotations

import os
import select
import threading

import pytest

from infini_run.system.call_loop import CallLoop
from infini_run.system.wakeup import Wakeup


@pytest.fixture
def wakeup():
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()
    wakeup.close()


@pytest.fixture
def loop():
    loop = CallLoop()
    yield loop
    loop.close()
    loop.close()


def is_readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_a_wakeup_is_readable_until_it_is_cleared(wakeup):
    assert not is_readable(wakeup.fileno())
    assert wakeup.wake()
    assert wakeup.wake()
    assert is_readable(wakeup.fileno())
    assert wakeup.clear()
    assert not wakeup.clear()
    assert not is_readable(wakeup.fileno())


def test_a_closed_wakeup_wakes_nobody(wakeup):
    wakeup.close()
    assert wakeup.fileno() == -1
    assert not wakeup.wake()
    assert not wakeup.clear()


def test_a_dropped_wakeup_leaves_no_descriptor():
    wakeup = Wakeup()
    fd = wakeup.fileno()
    del wakeup
    assert not os.path.exists(f"/proc/self/fd/{fd}")


def test_a_loop_does_the_calls_of_another_thread_in_order(loop):
    done = []

    def first():
        done.append("first")
        loop.call(lambda: done.append("third"))

    thread = threading.Thread(target=lambda: (loop.call(first), loop.call(lambda: done.append("second"))))
    thread.start()
    loop.poller.poll(None)
    thread.join()
    loop.run_calls()
    assert done == ["first", "second", "third"]


def test_a_loop_is_woken_when_the_call_is_there_to_be_done():
    class Watched(CallLoop):
        def wake(self):
            there.append(list(self.calls))
            return super().wake()

    there = []
    loop = Watched()
    loop.call(loop.clear)
    loop.close()
    assert there == [[loop.clear]]


def test_a_closed_loop_refuses_calls_and_keeps_those_that_are_left(loop):
    assert loop.call(loop.clear)
    loop.close()
    assert not loop.call(loop.clear)
    assert list(loop.calls) == [loop.clear]


def test_a_forked_child_closes_its_copy_though_a_thread_of_the_parent_has_the_lock(loop):
    has_lock, may_end = threading.Event(), threading.Event()

    def hold():
        with loop._lock:
            has_lock.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_lock.wait()
    pid = os.fork()
    if not pid:
        fds = [loop.fileno(), loop.poller.fileno()]
        loop.after_fork_in_child()
        os._exit(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds))
    may_end.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert loop.wake()
