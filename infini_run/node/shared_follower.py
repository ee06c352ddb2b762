"""One launch for several threads: each may wait for its events, its end or its readiness."""

from __future__ import annotations

import select  # noqa: F401  a later import may find no descriptor
import time
from _thread import RLock

from infini_run.node.readiness import all_ready
from infini_run.system.wakeup import Wakeup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.core.c_structs import Event
    from infini_run.node.launch import NodeLaunch
    from infini_run.node.restarting_launch import RestartingLaunch


class SharedFollower:
    """A launch that keeps its events until `events` returns them, whichever thread has read them.

    Args:
        run: The launch, started.
    """

    def __init__(self, run: NodeLaunch | RestartingLaunch) -> None:
        self.run = run
        self._pending: list[Event] = []  # read by another method than `events`, or by another thread
        self._lock = RLock()
        self._wakers: list[Wakeup] = []  # of threads that wait for an event: another thread may read it
        self._idle: list[Wakeup] = []  # of those that have waited
        self._is_closed = False

    def events(self, timeout_s: float | None) -> list[Event]:
        """Return the events since the last call, waiting for the first one.

        Args:
            timeout_s: Seconds to wait at most. None: until there is an event.

        Returns:
            The events in order, as ProcessLauncher.events. Empty: the time is up, or everything exited.
        """
        deadline = _deadline(timeout_s)
        try:
            waker = self._add_waker()
        except OSError:  # no descriptor is left: what another thread takes comes with the next event
            waker = None
        also = () if waker is None else (waker.fileno(),)
        try:
            while not self._pending and self.poll(deadline, also) and not _is_past(deadline):
                if waker is not None:
                    waker.clear()
        finally:
            if waker is not None:
                self._remove_waker(waker)
        with self._lock:
            events, self._pending = self._pending, []
        return events

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until every rank exited and nothing of it is left.

        Args:
            timeout_s: Seconds to wait at most. None: for ever.

        Returns:
            False if the time was up first.
        """
        deadline = _deadline(timeout_s)
        while self.poll(deadline):
            if _is_past(deadline):
                return False
        return True

    def wait_ready(self, timeout_s: float | None, *, may_restart: bool) -> bool:
        """Wait until every rank is ready. See ProcessLauncher.wait_ready.

        Args:
            timeout_s: Seconds to wait at most. None: for ever.
            may_restart: A rank that has failed may come back.
        """
        deadline = _deadline(timeout_s)
        waker = self._add_waker()
        try:
            while True:
                waker.clear()  # first: what wakes from here on may not be in the exits below
                answer = all_ready(self.run.outcome.exits(), may_restart=may_restart)
                if answer is not None or self.run.ended or _is_past(deadline):
                    return bool(answer)
                self.poll(deadline, also=(waker.fileno(),))
        finally:
            self._remove_waker(waker)

    def _add_waker(self) -> Wakeup:
        with self._lock:
            waker = self._idle.pop() if self._idle else Wakeup()
            self._wakers.append(waker)
        return waker

    def _remove_waker(self, waker: Wakeup) -> None:
        """Keep it for the next wait: an interrupt in the finalizer of each of them would be lost. Once the launch is
        closed there is none."""
        with self._lock:
            self._wakers.remove(waker)
            if self._is_closed:
                waker.close()
            else:
                waker.clear()
                self._idle.append(waker)

    def poll(self, deadline: float | None, also: Sequence[int] = ()) -> bool:
        """Read the next events of the launch.

        Args:
            deadline: When to return without one: time.monotonic(). None: never.
            also: Descriptors that end the wait, too.

        Returns:
            Whether anything of the launch is left.
        """
        if not self._read() and not self.run.ended and not _is_past(deadline):
            self.run.wait(None if deadline is None else max(0.0, deadline - time.monotonic()), also)
            self._read()
        return not self.run.ended

    def _read(self) -> bool:
        """Read the events that there are. Return whether there were any.

        Another thread that finds the launch at its end, or reads later events, waits here until these are kept. The
        launch's lock comes first: a signal's handler may read in a thread that has it.
        """
        with self.run.lock, self._lock:
            events = [] if self.run.ended else self.run.poll(0.0)
            if events:
                self._drop_outdated(events)
                self._pending += events
                self._wake()
        return bool(events)

    def _drop_outdated(self, events: Sequence[Event]) -> None:
        """Drop outdated progress. Of a rank's unread progress the highest stays: it may come without end."""
        ranks = {event.rank for event in events if event.kind == "progress"}
        if ranks:
            self._pending = [e for e in self._pending if e.kind != "progress" or e.rank not in ranks]

    def close(self) -> None:
        """Close the launch, which kills its remaining processes, and wake every thread that waits."""
        self.run.close()
        with self._lock:
            self._is_closed = True
            self._wake()
            while self._idle:
                self._idle.pop().close()

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.wake()


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
