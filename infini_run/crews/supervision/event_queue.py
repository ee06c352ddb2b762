"""The events of a crew, in the order in which they came, each for one reader, a thread or a coroutine.

Unread events have a bound, for each worker. Of status and progress the queue keeps the latest. Events that count
(emitted, and the results of `send`) have a limit. At it, nothing reads the worker while the crew has a reader
(event_readers.py). Without a reader, the queue drops the oldest, and an event `dropped` in its place has the number.
So no answer waits for events that nobody reads. The other events are about a worker's processes, of which there may
be any number, too. Of many the queue drops the oldest in the same way.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict, deque
from itertools import count

from infini_run.crews.protocol import NO_TASK, Body, TaskFailed
from infini_run.crews.remote_exception import to_exception
from infini_run.crews.supervision.event_readers import EventReaders
from infini_run.crews.supervision.loop_waiters import LoopWaiters
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from infini_run.report.failures import WorkerDied

_COUNTED = ("emitted", "done", "failed", "cancelled")
_LATEST = ("status", "progress")
_OF_PROCESSES = 1000  # unread events about a worker's processes that are kept


@record
class CrewEvent:
    """Something that a worker did, or that happened to it.

    Attributes:
        kind: what it is. Of a worker: started, ready, status (text), progress (done, of), emitted (value), died
            (error: a WorkerDied), restarting (in delay_s; only the worker that failed has it), and stopped (it ended
            without a failure; if it restarts, started follows). Of a task from `send`, at its end: done (value),
            failed (error), or `cancelled`; an ask has its future instead. Of the queue: dropped (count: how many
            unread events this one replaces).
        task: the number of the task that it belongs to; -1: none.
        restarts: how often this worker restarted before.
        time_s: since the epoch.
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
    count: int = 0
    body: Body = Body()
    problem: TaskFailed | WorkerDied | None = None

    @property
    def value(self) -> Any:
        """The emitted or returned object; None in other events. Each access unpickles it again, and raises what
        unpickling raises."""
        return self.body.load() if self.body else None

    @property
    def error(self) -> BaseException | None:
        """What went wrong, in an event `died` or `failed`; None in other events."""
        problem = self.problem
        return to_exception(problem, self.rank, self.host) if isinstance(problem, TaskFailed) else problem


class EventQueue:
    """The events that nobody has read yet.

    Args:
        limit: of the events that count, for each worker.
        on_room: called when workers at the limit may be read again.
    """

    def __init__(self, limit: int, on_room: Callable[[], None]) -> None:
        self._limit = limit
        self._on_room = on_room
        self._changed = threading.Condition()
        self._waiters = LoopWaiters()
        self._numbers = count()
        self._events: OrderedDict[int, CrewEvent] = OrderedDict()
        self._counted: defaultdict[int, deque[int]] = defaultdict(deque)  # numbers of events that count, by rank
        # numbers of events about processes, by rank
        self._of_processes: defaultdict[int, deque[int]] = defaultdict(deque)
        self._latest: dict[tuple[int, str], int] = {}  # by rank and kind
        self._gaps: dict[int, int] = {}  # the number of the event `dropped`, by rank
        self._full: set[int] = set()  # ranks that were at the limit
        self._unread_drops: defaultdict[int, int] = defaultdict(int)
        self.drops: defaultdict[int, int] = defaultdict(int)  # how many events were dropped, by rank
        self.readers = EventReaders(on_room)
        self.is_over = False

    def is_full(self, rank: int) -> bool:
        """Return whether nothing may read a worker."""
        if len(self._counted[rank]) < self._limit:
            return False
        with self._changed:
            if len(self._counted[rank]) < self._limit or not self.readers:
                return False
            self._full.add(rank)
            return True

    def add(self, event: CrewEvent) -> None:
        with self._changed:
            number = next(self._numbers)
            if event.kind in _LATEST:
                self._events.pop(self._latest.get((event.rank, event.kind), -1), None)
                self._latest[event.rank, event.kind] = number
            self._events[number] = event
            if event.kind in _COUNTED:
                counted = self._counted[event.rank]
                counted.append(number)
                while len(counted) > self._limit and not self.readers:
                    self._drop(event.rank, counted.popleft())
            elif event.kind not in _LATEST:
                others = self._of_processes[event.rank]
                others.append(number)
                if len(others) > _OF_PROCESSES:
                    self._drop(event.rank, others.popleft())
            self._wake()

    def _drop(self, rank: int, number: int) -> None:
        if rank in self._gaps:
            del self._events[number]
        else:
            self._gaps[rank] = number
            event = self._events[number]
            self._events[number] = replace(event, kind="dropped", task=NO_TASK, body=Body(), problem=None)
        self._unread_drops[rank] += 1
        self.drops[rank] += 1

    def end(self) -> None:
        """End the queue: no more events come."""
        with self._changed:
            self.is_over = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        self._waiters.wake()

    def get(self, timeout_s: float | None) -> list[CrewEvent]:
        """Return the events, after a wait of at most `timeout_s` seconds (None: until something comes, or nothing
        more can)."""
        self.readers.enter_thread()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._events and not self.is_over:
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._pop(len(self._events))

    async def get_one(self) -> CrewEvent | None:
        """Return the next event; None: there are no more."""
        self.readers.enter_task()
        while True:
            with self._changed:
                if self._events:
                    return self._pop(1)[0]
                if self.is_over:
                    return None
                future = self._waiters.add()
            await future

    async def wait_over(self) -> None:
        """Wait until no more come."""
        self.readers.leave_task()
        while True:
            with self._changed:
                if self.is_over:
                    return
                future = self._waiters.add()
            await future

    def _pop(self, most: int) -> list[CrewEvent]:
        popped = []
        for _ in range(most):
            _, event = self._events.popitem(last=False)
            if event.kind in _COUNTED:
                self._counted[event.rank].popleft()
            elif event.kind == "dropped":
                del self._gaps[event.rank]
                event = replace(event, count=self._unread_drops.pop(event.rank))
            elif event.kind not in _LATEST:
                self._of_processes[event.rank].popleft()
            popped.append(event)
        has_room = {rank for rank in self._full if len(self._counted[rank]) <= self._limit // 2}
        if has_room:
            self._full -= has_room
            self._on_room()
        return popped
