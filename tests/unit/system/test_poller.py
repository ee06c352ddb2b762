"""The poller: handlers are called for what is ready, and for nothing that was forgotten."""

from __future__ import annotations

import os
import select

import pytest

from infini_run.system.poller import READ, WRITE, Poller, poll_ms


@pytest.fixture
def poller():
    poller = Poller()
    yield poller
    poller.close()
    poller.close()


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for fd in ends:
        os.close(fd)


def test_a_handler_is_called_when_its_descriptor_is_ready(poller, pipe):
    called = []
    poller.watch(pipe[0], READ, lambda: called.append("read"))
    poller.poll(0)
    assert called == []
    os.write(pipe[1], b"x")
    poller.poll(None)
    assert called == ["read"]


@pytest.mark.parametrize("timeout_s", [25 * 86400, 1e9, 1e300, float("inf")])
def test_a_wait_may_be_as_long_as_anybody_says(poller, pipe, timeout_s):
    """poll(2) and epoll_wait(2) take 24 days and refuse more."""
    called = []
    poller.watch(pipe[0], READ, lambda: called.append("read"))
    os.write(pipe[1], b"x")
    poller.poll(timeout_s)
    assert called == ["read"]
    ready = select.poll()
    ready.register(pipe[0], select.POLLIN)
    assert ready.poll(poll_ms(timeout_s)) == [(pipe[0], select.POLLIN)]


def test_nothing_is_called_for_no_events_a_hang_up_included(poller):
    reader, writer = os.pipe()
    called = []
    poller.watch(writer, WRITE, lambda: called.append(1))
    poller.watch(writer, 0, lambda: called.append(2))
    os.close(reader)
    poller.poll(0)
    assert called == []
    poller.watch(writer, WRITE, lambda: called.append(3))
    poller.poll(0)
    assert called == [3]
    poller.unwatch(writer)
    os.close(writer)


def test_a_number_that_comes_again_is_another_file(poller):
    called = []
    for name in "ab":
        reader, writer = os.pipe()
        os.write(writer, b"x")
        poller.watch(reader, READ, lambda name=name: called.append(name))
        poller.poll(0)
        poller.unwatch(reader)
        poller.unwatch(reader)
        os.close(reader)
        os.close(writer)
    assert called == ["a", "b"]


def test_a_handler_may_unwatch_another_that_is_ready_too(poller):
    (one, one_end), (two, two_end) = os.pipe(), os.pipe()
    called = []

    def handler(other):
        called.append(other)
        poller.unwatch(other)

    poller.watch(one, READ, lambda: handler(two))
    poller.watch(two, READ, lambda: handler(one))
    os.write(one_end, b"x")
    os.write(two_end, b"x")
    poller.poll(0)
    assert len(called) == 1
    for fd in (one, one_end, two, two_end):
        os.close(fd)


def test_the_last_handler_given_is_called(poller, pipe):
    called = []
    poller.watch(pipe[0], READ, lambda: called.append(1))
    poller.watch(pipe[0], READ, lambda: called.append(2))
    os.write(pipe[1], b"x")
    poller.poll(0)
    assert called == [2]


def test_it_is_one_descriptor_that_others_can_wait_for(poller, pipe):
    import select

    poller.watch(pipe[0], READ, lambda: None)
    assert select.select([poller.fileno()], [], [], 0)[0] == []
    os.write(pipe[1], b"x")
    assert select.select([poller.fileno()], [], [], 0)[0] == [poller.fileno()]
