"""Descriptors and their handlers, behind one epoll descriptor that others may wait for, too."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ, WRITE, EDGE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLET


def poll_ms(timeout_s: float | None) -> float | None:
    """Return the timeout of poll(2) and epoll_wait(2) in milliseconds, 24 days at most: a longer wait is several
    calls.

    Args:
        timeout_s: in seconds; None or infinity: no limit, which is None in the result too.
    """
    return None if timeout_s is None or timeout_s == float("inf") else min(max(0.0, timeout_s * 1000), 2**31 - 1)


class Poller:
    """An epoll with a handler for each descriptor. A change to the same events costs no system call.

    Call `unwatch` before you close a descriptor: the kernel's set holds files, not numbers (epoll(7), Q6).
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[], None]]] = {}

    def fileno(self) -> int:
        """Return the epoll descriptor, which polls readable when a watched descriptor is ready."""
        return self._epoll.fileno()

    def watch(self, fd: int, events: int, handler: Callable[[], None]) -> None:
        """Call a handler from `poll` whenever a descriptor is ready. Replaces an earlier watch.

        Args:
            fd: the descriptor.
            events: READ, WRITE, or both; 0: stop watching it. With EDGE the handler runs only when the descriptor
                becomes ready again.
            handler: called without arguments.
        """
        before = self._watched[fd][0] if fd in self._watched else 0
        if not events:
            self.unwatch(fd)
            return
        self._watched[fd] = events, handler
        if not before:
            self._epoll.register(fd, events)
        elif events != before:
            self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor. Safe for one that nobody watches."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def poll(self, timeout_s: float | None, on_woken: Callable[[], None] | None = None) -> None:
        """Wait until a watched descriptor is ready, and call the handlers of all that are.

        Args:
            timeout_s: the longest wait in seconds; None: no limit.
            on_woken: called after the wait, before any handler.
        """
        ready = self._epoll.poll(None if (wait_ms := poll_ms(timeout_s)) is None else wait_ms / 1000)
        if on_woken is not None:
            on_woken()
        for fd, _ in ready:
            watched = self._watched.get(fd)  # a handler before this one may have closed it
            if watched is not None:
                watched[1]()

    def close(self) -> None:
        """Close the epoll descriptor. Safe twice."""
        self._watched.clear()
        self._epoll.close()
