"""`Crew.map`: results for many items, of tasks that whichever worker is free does."""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import islice

from infini_run.crews.crew_target import Chunk
from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from infini_run.crews.future import Ask


class MapOptions:
    """How items are mapped: see Crew.map. Raises UsageError: one makes no sense."""

    def __init__(self, timeout_s: float | None, chunksize: int, ordered: bool) -> None:
        if timeout_s is not None and (isinstance(timeout_s, bool) or not timeout_s >= 0):
            raise UsageError(f"timeout_s={timeout_s!r}: give a number of seconds, or None for no limit")
        if type(chunksize) is not int or chunksize < 1:
            raise UsageError(f"chunksize={chunksize!r}: give a whole number from 1 on")
        self.due_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.chunksize = chunksize
        self.ordered = ordered

    def tasks_of(self, iterables: tuple[Iterable[object], ...]) -> Iterator[object]:
        """The tasks: an item of one iterable; a tuple with one item of each of several, as far as the shortest goes;
        Chunks of these."""
        items = iter(iterables[0]) if len(iterables) == 1 else zip(*iterables, strict=False)
        if self.chunksize == 1:
            return iter(items)
        return map(Chunk, iter(lambda: tuple(islice(items, self.chunksize)), ()))


def task_map(
    ask: Callable[[Any], Ask[Any]],
    tasks: Iterator[object],
    ahead: int,
    options: MapOptions,
    on_wait: Callable[[], None],
) -> Iterator[Any]:
    """Yield the result for each item.

    Args:
        ask: submits a task.
        tasks: taken as there is room, so there may be any number.
        ahead: how many tasks are submitted before the oldest of them has ended.
        options: of Crew.map.
        on_wait: called before the current thread waits.

    Raises:
        BaseException: the first failure of any task, as soon as it happens; the others are cancelled.
        TimeoutError: the next result has not come in time; the others are cancelled.
    """
    changed = threading.Condition()
    failed: list[Ask[Any]] = []
    ended: deque[Ask[Any]] = deque()
    asks: dict[int, Ask[Any]] = {}  # by the number of the task, in order

    def on_done(done: Any) -> None:
        with changed:
            if done.has_failed:
                failed.append(done)
            if not options.ordered:  # else nobody takes them, and every result would stay
                ended.append(done)
            changed.notify()

    def fill() -> None:
        for task in islice(tasks, ahead - len(asks)):
            submitted = ask(task)
            asks[submitted.task] = submitted
            submitted.add_done_callback(on_done)

    def next_ended() -> Ask[Any] | None:
        """The ask whose results are next; None: it has not ended."""
        if not options.ordered:
            return ended.popleft() if ended else None
        first = next(iter(asks.values()))
        return first if first.done() else None

    def wait() -> Ask[Any]:
        on_wait()
        with changed:
            while True:
                found = failed[0] if failed else next_ended()
                if found is not None:
                    return found
                left_s = None if options.due_s is None else options.due_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(f"not every result has come within {options.timeout_s:g} s")
                changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))

    try:
        fill()
        while asks:
            done = wait()
            result = done.result()
            del asks[done.task]
            yield from result if options.chunksize > 1 else (result,)
            fill()
    finally:
        for left in asks.values():
            left.cancel()
