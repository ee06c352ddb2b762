"""One end of one direction of a channel: who may use it, how to wait for it, and how to release it.

Threads take turns by a lock. A thread that blocks in the kernel keeps it: nobody else could do anything meanwhile. A
coroutine never waits for the lock: it tries, then waits for the socket or for the release of the lock.
"""

from __future__ import annotations

import _thread
import select
import time
from _thread import get_ident
from _weakrefset import WeakSet
from functools import partial

from infini_run.channel.errors import ChannelClosed, ChannelError
from infini_run.number_arguments import LONGEST_S, read_wait
from infini_run.system.fork_hooks import call_for_module, close_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable
    from typing import Any
    from weakref import WeakKeyDictionary

    from infini_run.system.wakeup import Wakeup

    _Act = Callable[[Any, float | None], Any]

_MOST_MS = 2**31 - 1  # poll(2): who waits for longer waits again
LIMIT = 1 << 34  # bytes of one message, by default


class SharedSocket:
    """A socket that two endpoints share; the second release closes it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = _thread.allocate_lock()
        self._holders = 0

    def hold(self) -> None:
        with self.lock:
            self._holders += 1

    def let_go(self) -> None:
        with self.lock:
            self._holders -= 1
            if not self._holders:
                close_link(self.sock)


class Endpoint:
    """The common part of a Sender and a Receiver."""

    _too_late = ""
    _queues: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]  # with the first coroutine

    def __init__(self, line: SharedSocket, limit: int) -> None:
        self._line = line
        self._fd = line.sock.fileno()
        self._limit = limit
        self._lock = _thread.allocate_lock()
        self._owner = 0  # the thread that has it: its own signal handler must not wait for it
        self._closed = False
        self._is_finished = False  # and what was under way then is gone, too
        self._afterwards: set[Callable[[], object]] = set()  # to call at each release of the lock
        line.hold()
        _endpoints.add(self)

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on; -1 once closed. Both endpoints of this side have the same
        one."""
        return -1 if self._closed else self._fd

    @property
    def closed(self) -> bool:
        """Whether this process closed it (`close`, `close_copy`)."""
        return self._closed

    @property
    def limit(self) -> int:
        """The most bytes that one message may have."""
        return self._limit

    def close_copy(self) -> None:
        """Close this process's copy of the socket without END: another process has the endpoint now. Safe twice."""
        if self._begin_to_close():
            self._is_finished = True
            self._drop()

    def _finish(self) -> None:
        """Release the socket once nobody uses it; who does was woken. An interrupt of its user leaves the release to
        that user."""
        self._is_finished = True
        if self._owner == get_ident():
            self._afterwards.add(self._drop)
            return
        with self._lock:
            self._drop()
        self._call_afterwards()  # who found the lock taken by this call

    def _drop(self) -> None:
        self._afterwards.discard(self._drop)
        self._line.let_go()
        self._call_afterwards()

    def _begin_to_close(self) -> bool:
        """Return whether this call has to close it."""
        with self._line.lock:
            was_closed, self._closed = self._closed, True
        return not was_closed

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"this {type(self).__name__} is closed")

    def _after_fork(self) -> None:
        """Renew the state in a forked child, where threads that no longer exist may hold locks."""
        self._closed = True
        self._lock, self._line.lock = _thread.allocate_lock(), _thread.allocate_lock()
        self._owner = 0
        self._afterwards.clear()
        self._line.sock.close()

    def _locked(self, timeout_s: float | None, act: _Act, thing: object) -> Any:
        """Call `act(thing, deadline on the monotonic clock)` while holding the lock. Raises TimeoutError."""
        ident = get_ident()
        if self._owner == ident:
            raise ChannelError(f"this {type(self).__name__} is in use by the code that this call interrupts")
        if timeout_s is not None:
            if type(timeout_s) is not float or not timeout_s < LONGEST_S:
                timeout_s = read_wait("timeout_s", timeout_s)
            if timeout_s is not None:
                return self._locked_by(time.monotonic() + timeout_s, act, thing)
        try:
            with self._lock:  # no interrupt finds a place between this and what follows
                self._owner = ident
                try:
                    return act(thing, None)
                finally:
                    self._owner = 0
        finally:
            if self._afterwards:
                self._call_afterwards()

    def _locked_by(self, end_s: float, act: _Act, thing: object) -> Any:
        taken: list[bool] = []
        try:
            taken.extend(map(self._lock.acquire, (True,), (max(0.0, end_s - time.monotonic()),)))
            if not taken[0]:
                raise TimeoutError(self._too_late)
            self._owner = get_ident()
            return act(thing, end_s)
        finally:
            if any(taken):
                self._leave()

    def _leave(self) -> None:
        """Release the lock, and wake coroutines."""
        self._owner = 0
        self._lock.release()
        if self._afterwards:
            self._call_afterwards()

    def _wait(self, events: int, end_s: float | None, wakeup: Wakeup | None = None) -> None:
        """Wait for the socket, or for `wakeup`. Raises TimeoutError; at once, if `end_s` is 0."""
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError(self._too_late)
        poller = select.poll()
        poller.register(self._fd, events)
        if wakeup is not None and wakeup.fileno() >= 0:
            poller.register(wakeup.fileno(), select.POLLIN)
        while not poller.poll(None if left_s is None else min(left_s * 1000, _MOST_MS)):
            if end_s is None or (left_s := end_s - time.monotonic()) <= 0:
                raise TimeoutError(self._too_late)

    def _queue_for(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """Wait for this coroutine's turn in its loop: first come, first served."""
        import asyncio
        from weakref import WeakKeyDictionary

        # one step: with a second dictionary of another thread's loop, two coroutines of this loop had their turn at
        # once, and add_reader forgets the first of them
        vars(self).setdefault("_queues", WeakKeyDictionary())
        return self._queues.setdefault(loop, asyncio.Lock())

    async def _until_free(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the lock, which a thread may hold."""
        while not self._lock.acquire(False):
            future = loop.create_future()
            wake = partial(_wake_from_thread, loop, future)
            self._afterwards.add(wake)
            try:
                if self._lock.acquire(False):  # its release came before this waiter was on the list
                    break
                await future
            finally:
                self._afterwards.discard(wake)
        self._owner = get_ident()

    async def _until_ready(
        self,
        loop: asyncio.AbstractEventLoop,
        watch: Callable[..., Any],
        unwatch: Callable[[int], Any],
        is_due: Callable[[], bool],
    ) -> None:
        """Wait for the socket, for a release of the lock, or for a close. No wait if `is_due`: what another thread
        did came before this waiter was on the list."""
        future = loop.create_future()
        wake = partial(_wake_from_thread, loop, future)
        self._line.hold()  # the number is not to be another descriptor's before it is unwatched
        self._afterwards.add(wake)
        try:
            if not self._is_finished and not is_due():
                watch(self._fd, _wake, future)
                await future
        finally:
            self._afterwards.discard(wake)
            unwatch(self._fd)
            self._line.let_go()

    def _call_afterwards(self) -> None:
        for act in list(self._afterwards):
            act()

    def __dir__(self) -> list[str]:
        from infini_run.public_names import public_names

        return public_names(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self._closed else f'fd {self._fd}'}>"


def _wake_from_thread(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_endpoints: WeakSet[Endpoint] = WeakSet()


def _after_fork_in_child() -> None:
    """Close the copies of all ends in a forked child: the parent owns them. With a copy in each child of a worker,
    its other side would not see the worker die."""
    for endpoint in list(_endpoints):
        endpoint._after_fork()


call_for_module(_after_fork_in_child)
