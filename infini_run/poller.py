"""What to wait for, said anew before each wait; the kernel's set is changed by the difference. One descriptor for all
of it, which somebody else may wait for."""

from __future__ import annotations

import select

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Poller:
    """An epoll whose set is given whole. Descriptors that were closed meanwhile have left it by themselves, and their
    numbers may stand for others now (epoll(7), Q6)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wanted: dict[int, int] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def want(self, wanted: dict[int, int]) -> None:
        """Wait for these and for no others."""
        for fd in self._wanted.keys() - wanted.keys():
            try:
                self._epoll.unregister(fd)
            except OSError:
                continue
        for fd, events in wanted.items():
            if self._wanted.get(fd) != events:
                self._add(fd, events)
        self._wanted = wanted

    def _add(self, fd: int, events: int) -> None:
        try:
            self._epoll.register(fd, events)
        except FileExistsError:
            self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """It is closed now: should its number come again, it is another file."""
        self._wanted.pop(fd, None)

    def poll(self, timeout_s: float | None) -> list[int]:
        """The descriptors that are ready, waiting for the first of them at most so long (None: for ever)."""
        return [fd for fd, _ in self._epoll.poll(-1 if timeout_s is None else timeout_s)]

    def close(self) -> None:
        """Safe twice."""
        self._epoll.close()
