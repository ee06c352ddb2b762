"""`Crew.map`: results for many items, of tasks that whichever worker is free does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sized
from itertools import islice
from warnings import warn

from infini_run.crews.errors import AskTimeout
from infini_run.crews.supervision.progress import ProgressDisplay
from infini_run.crews.worker.crew_target import Chunk
from infini_run.number_arguments import read_count, read_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    from infini_run.crews.supervision.future import Ask

_SHOWN_EVERY_S = 0.1
_AHEAD = 64  # tasks of a map that are submitted at a time, for each worker


class ReadResults:
    """Shows how many results were read, at most ten times a second.

    Args:
        display: where.
        iterables: the items; how many there are is known if all of them have a length.
    """

    def __init__(self, display: ProgressDisplay, iterables: Sequence[Iterable[object]]) -> None:
        self._display = display
        self._is_shown = type(display) is not ProgressDisplay
        sizes = [len(items) for items in iterables if isinstance(items, Sized)]
        self._of = min(sizes, default=0) if len(sizes) == len(iterables) else 0
        self._done = 0
        self._shown_s = 0.0

    def add(self) -> None:
        """Note that one more was read."""
        if self._is_shown:
            self._done += 1
            if time.monotonic() - self._shown_s >= _SHOWN_EVERY_S:
                self._show()

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        if self._of:
            self._display.progress(0, self._done, self._of)
        else:
            self._display.status(0, f"{self._done} results")

    def close(self) -> None:
        """Show the last state, and end the drawing. Safe twice."""
        if self._is_shown:
            self._is_shown = False
            self._show()
            self._display.close()


class MapOptions:
    """The options of a map: see Crew.map. Raises UsageError for an invalid one."""

    def __init__(
        self,
        timeout_s: float | None,
        chunksize: int,
        buffersize: int | None,
        ordered: bool,
        nproc: int,
        read: ReadResults | None = None,
    ) -> None:
        self.read = ReadResults(ProgressDisplay(), ()) if read is None else read
        self.timeout_s = None if timeout_s is None else read_seconds("timeout_s", timeout_s)
        self.due_s = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        self.chunksize = read_count("chunksize", chunksize)
        self.buffersize = _AHEAD * nproc if buffersize is None else read_count("buffersize", buffersize)
        self.step = max(1, self.buffersize // 8)  # that are submitted together
        self.ordered = ordered

    def tasks_of(self, iterables: tuple[Iterable[object], ...]) -> Iterator[object]:
        """Yield the tasks: an item of one iterable, or a tuple with one item of each of several, as far as the
        shortest goes. Or yield Chunks of these."""
        items = iter(iterables[0]) if len(iterables) == 1 else zip(*iterables, strict=False)
        if self.chunksize == 1:
            return iter(items)
        return map(Chunk, iter(lambda: tuple(islice(items, self.chunksize)), ()))


class _Endings:
    """The finished tasks of a map. Callbacks of asks refer to this, and not to the map, so the caller can drop the
    map."""

    def __init__(self, *, ordered: bool) -> None:
        self.changed = threading.Condition()
        self.failed: list[Ask[Any]] = []
        self.awaited: Ask[Any] | None = None  # whose end the reader waits for, if the order matters
        self.unread: deque[Ask[Any]] = deque()  # if the order does not matter; else every result would stay
        self._ordered = ordered

    def add(self, ask: Any) -> None:
        """Note the end of a task, in any thread."""
        with self.changed:
            if ask.has_failed:
                self.failed.append(ask)
            if not self._ordered:
                self.unread.append(ask)
            if not self._ordered or ask is self.awaited or self.failed:
                self.changed.notify()


class TaskMap:
    """The results for each item, as an iterator. It submits the first tasks at once, and more as the caller reads
    results.

    Args:
        ask: submits a task.
        tasks: taken as there is room, so there may be any number.
        options: of Crew.map.
        on_wait: called before the current thread waits.
    """

    def __init__(
        self,
        ask: Callable[[Any], Ask[Any]],
        tasks: Iterator[object],
        options: MapOptions,
        on_wait: Callable[[], None],
    ) -> None:
        self._ask = ask
        self._tasks = tasks
        self._options = options
        self._on_wait = on_wait
        self._endings = _Endings(ordered=options.ordered)
        self._asks: dict[int, Ask[Any]] = {}  # by the number of the task, in order
        self._results: list[Any] = []  # that are next, the last one first
        self._may_have_more = True  # tasks that were not taken
        self._was_read = False
        try:
            self._submit()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next result.

        Raises:
            BaseException: the first failure of any task, after all results before it; this cancels the other tasks.
            TimeoutError: the next result has not come in time; this cancels the other tasks.
        """
        self._was_read = True
        try:
            if not self._results:
                self._submit()
                if self._asks:
                    self._results = self._read()
        except StopIteration as error:  # of a task: it is not the end of the results
            self.close()
            raise RuntimeError("a task raised StopIteration") from error
        except BaseException:
            self.close()
            raise
        if not self._results:
            self._options.read.close()
            raise StopIteration
        self._options.read.add()
        return self._results.pop()

    def close(self) -> None:
        """Cancel the tasks with unread results. Safe twice."""
        self._was_read, self._may_have_more, self._results = True, False, []
        self._options.read.close()
        self._endings.awaited = None
        while self._asks:
            self._asks.popitem()[1].cancel()

    def __del__(self) -> None:
        """Let submitted tasks run though nobody reads a result, and warn about the others."""
        if self._was_read:
            self.close()
        elif self._may_have_more:
            text = f"a map was dropped before its first result; tasks after the first {len(self._asks)} are not done"
            warn(text, ResourceWarning, stacklevel=2)

    def _submit(self) -> None:
        """Submit as many tasks as there is room for."""
        room = self._options.buffersize - len(self._asks)
        if not self._may_have_more or room < self._options.step:
            return
        for task in islice(self._tasks, room):
            ask = self._ask(task)
            self._asks[ask.task] = ask
            ask.add_done_callback(self._endings.add)
        self._may_have_more = len(self._asks) == self._options.buffersize

    def _read(self) -> list[Any]:
        """Wait for the ask whose results are next, and return them."""
        ask = self._wait()
        result: Any = ask.result()
        del self._asks[ask.task]
        return [result] if self._options.chunksize == 1 else result[::-1]

    def _wait(self) -> Ask[Any]:
        due_s, endings = self._options.due_s, self._endings
        with endings.changed:
            found = self._found()
        if found is not None:
            return found
        self._on_wait()
        with endings.changed:
            while True:
                found = self._found()
                if found is not None:
                    return found
                left_s = None if due_s is None else due_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise AskTimeout(f"not all results arrived within {self._options.timeout_s:g} s")
                endings.changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))

    def _found(self) -> Ask[Any] | None:
        """Return the ask whose results are next, or the first that failed; None while there is none."""
        return self._next_ended() or (self._endings.failed[0] if self._endings.failed else None)

    def _next_ended(self) -> Ask[Any] | None:
        """Return the ask whose results are next; None before its end."""
        if not self._options.ordered:
            return self._endings.unread.popleft() if self._endings.unread else None
        first = next(iter(self._asks.values()))
        is_done = first.done()
        self._endings.awaited = None if is_done else first
        return first if is_done else None
