"""What a crew tells: events in the order in which they came, each to one reader, a thread or a coroutine.

Nothing is dropped. What workers say for the sake of saying it (emitted, and the results of what was sent and not
asked) counts against a limit: beyond it they are not listened to until somebody has read.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from infini_run.crews.protocol import NO_TASK, Body, Failed
from infini_run.crews.remote_exception import to_exception
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from asyncio import Future as AsyncFuture
    from collections.abc import Callable
    from typing import Any

    from infini_run.report.failures import WorkerDied

_COUNTED = ("emitted", "done", "failed")


@record
class CrewEvent:
    """Something that a worker did, or that happened to it.

    kind: started, ready, status (text), progress (done, of), emitted (value), done (value), failed (error) and
    cancelled of what was sent and not asked; died (error: a WorkerDied), restarting (in delay_s), stopped. task: the
    number of the one that it belongs to; -1: none. restarts: how often this worker was started again so far. time_s:
    since the epoch.
    """

    kind: str
    rank: int
    host: str = ""
    time_s: float = 0.0
    pid: int = 0
    task: int = NO_TASK
    restarts: int = 0
    text: str = ""
    done: float = 0.0
    of: float = 0.0
    delay_s: float = 0.0
    body: Body = Body()
    problem: Failed | WorkerDied | None = None

    @property
    def value(self) -> Any:
        """What was emitted, or returned; unpickled each time it is asked for. Raises what that raises."""
        return self.body.load() if self.body else None

    @property
    def error(self) -> BaseException | None:
        """What went wrong, of a died and a failed."""
        return to_exception(self.problem, self.rank, self.host) if isinstance(self.problem, Failed) else self.problem


class EventQueue:
    """The events that nobody has read yet. limit: of those that count. on_room: called when there is room again."""

    def __init__(self, limit: int, on_room: Callable[[], None]) -> None:
        self._limit = limit
        self._on_room = on_room
        self._changed = threading.Condition()
        self._events: deque[CrewEvent] = deque()
        self._counted = 0
        self._waiting: list[tuple[AbstractEventLoop, AsyncFuture[None]]] = []
        self._was_full = False
        self.is_over = False

    @property
    def is_full(self) -> bool:
        """Whether workers are not to be listened to."""
        full = self._counted >= self._limit
        self._was_full = self._was_full or full
        return full

    def add(self, event: CrewEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._counted += event.kind in _COUNTED
            self._wake()

    def end(self) -> None:
        """No more come."""
        with self._changed:
            self.is_over = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                continue  # that loop has been closed, and who waited there with it

    def get(self, timeout_s: float | None, most: int | None = None) -> list[CrewEvent]:
        """What has come, waiting for it at most so long (None: until something comes, or nothing more can)."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._events and not self.is_over:
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._pop(most)

    async def get_one(self) -> CrewEvent | None:
        """The next one; None: there are no more."""
        while True:
            with self._changed:
                if self._events:
                    return self._pop(1)[0]
                if self.is_over:
                    return None
                future = self._make_waiter()
            await future

    async def wait_over(self) -> None:
        """Until no more come."""
        while True:
            with self._changed:
                if self.is_over:
                    return
                future = self._make_waiter()
            await future

    def _make_waiter(self) -> AsyncFuture[None]:
        from asyncio import get_running_loop

        loop = get_running_loop()
        future: AsyncFuture[None] = loop.create_future()
        self._waiting.append((loop, future))
        return future

    def _pop(self, most: int | None) -> list[CrewEvent]:
        count = len(self._events) if most is None else min(most, len(self._events))
        taken = [self._events.popleft() for _ in range(count)]
        self._counted -= sum(event.kind in _COUNTED for event in taken)
        if self._was_full and self._counted <= self._limit // 2:
            self._was_full = False
            self._on_room()
        return taken


def _resolve(future: AsyncFuture[None]) -> None:
    if not future.done():
        future.set_result(None)
