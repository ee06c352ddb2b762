"""What a supervisor's poller waits for on behalf of one group of processes."""

from __future__ import annotations

import os
from _functools import partial

from infini_run.core.group import forking
from infini_run.system.fork_hooks import call_in_forked_children, close_fd
from infini_run.system.poller import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from infini_run.system.poller import Poller

    class WatchedWorker(Protocol):
        """A worker whose process is of the group."""

        def check_process(self) -> None: ...

    class WatchedGroup(Protocol):
        """The part of a ProcessGroup (spawner.py) that a watch needs."""

        def fds(self) -> Sequence[int]: ...
        def next_deadline_s(self) -> float | None: ...
        def poll(self) -> None: ...


class ProcessWatch:
    """A watch of a group's descriptors, which reports the ends of processes to their workers. `workers` are those
    whose process is of this group and not released yet."""

    def __init__(self, group: WatchedGroup, poller: Poller) -> None:
        self.group = group
        self.workers: list[WatchedWorker] = []
        self._poller = poller
        self._watched: set[int] = set()
        self._copies: dict[int, int] = {}
        call_in_forked_children(self)

    def update(self) -> None:
        """Give the poller what to wait for. All but the first descriptor come and go while a hang is under
        examination, and others close them at any time. So this watches copies of them (epoll(7), Q6)."""
        first, *more = self.group.fds() or (-1,)
        wanted = {first} if first >= 0 else set()
        if more or self._copies:
            wanted.update(self._copy(more))
        for fd in self._watched - wanted:
            self._poller.unwatch(fd)
        for fd in wanted - self._watched:
            self._poller.watch(fd, READ, self.poll)
        self._watched = wanted

    def _copy(self, fds: Sequence[int]) -> list[int]:
        for fd in self._copies.keys() - set(fds):
            copy = self._copies[fd]
            self._watched.discard(copy)
            self._poller.unwatch(copy)
            close_fd(copy, partial(self._copies.pop, fd))
        for fd in set(fds) - self._copies.keys():
            with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
                self._copies[fd] = os.dup(fd)
        return list(self._copies.values())

    def poll(self) -> None:
        """Take in what happened to the group, and let each of its workers act on its own part."""
        self.group.poll()
        for worker in list(self.workers):
            worker.check_process()

    def close(self) -> None:
        """Watch nothing any more."""
        self._copy(())
        while self._watched:
            self._poller.unwatch(self._watched.pop())

    def after_fork_in_child(self) -> None:
        """Close only the copies of descriptors, in a forked child."""
        while self._copies:
            os.close(self._copies.popitem()[1])
