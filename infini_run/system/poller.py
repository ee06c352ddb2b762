"""What to wait for, and what to call then. One descriptor for all of it, which somebody else may wait for."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ, WRITE, EDGE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLET


def poll_ms(timeout_s: float | None) -> float | None:
    """For poll(2) and epoll_wait(2), which take 24 days at most: who waits for longer looks and waits again."""
    return None if timeout_s is None or timeout_s == float("inf") else min(max(0.0, timeout_s * 1000), 2**31 - 1)


class Poller:
    """An epoll with a handler for each descriptor. What is the same as before costs no system call.

    Call `unwatch` before a descriptor is closed: the kernel's set holds files, not numbers (epoll(7), Q6).
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[], None]]] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, fd: int, events: int, handler: Callable[[], None]) -> None:
        """Call `handler` when it is ready: READ, WRITE, both, or 0 for neither, a hang-up included. EDGE: only when
        it has become so once more."""
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
        """Safe for one that is not watched."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def poll(self, timeout_s: float | None) -> None:
        """Wait until something is ready, at most so long (None: for ever), and call its handlers."""
        for fd, _ in self._epoll.poll(None if (wait_ms := poll_ms(timeout_s)) is None else wait_ms / 1000):
            watched = self._watched.get(fd)  # a handler before this one may have closed it
            if watched is not None:
                watched[1]()

    def close(self) -> None:
        """Safe twice."""
        self._watched.clear()
        self._epoll.close()
