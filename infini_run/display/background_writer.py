"""A thread that writes for a launch, so that neither a slow reader nor a hung file server delays the job.

Its import comes with --events or --metrics.
"""

from __future__ import annotations

from collections import deque
from threading import Condition

from infini_run.system.joinable_thread import JoinableThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CLOSE_S = 1.0  # at the end of a launch, for what is still to write


class BackgroundWriter:
    """Calls a function with one item after the other, in a thread that begins with the first one.

    Args:
        write: Gets each item. It raises nothing.
        most: Items that wait for it at most.
        name: Of the thread.
    """

    def __init__(self, write: Callable[[Any], None], most: int, name: str) -> None:
        self._write = write
        self._most = most
        self._items: deque[Any] = deque()
        self._changed = Condition()
        self._is_over = False
        self._thread = JoinableThread(self._run, name)

    def put(self, item: Any, *, is_newest: bool = False) -> bool:
        """Give an item to the thread. Return False, and drop it, if too many wait; if it `is_newest`, drop those
        instead. Raises StartError if there can be no thread."""
        with self._changed:
            if is_newest:
                self._items.clear()
            if len(self._items) >= self._most:
                return False
            self._items.append(item)
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()
        return True

    def close(self, wait_s: float) -> bool:
        """Take no more. Return whether all items were written, after at most `wait_s` seconds; else the thread drops
        those that it has not begun, and ends as soon as its write returns. Safe twice."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(wait_s)
        with self._changed:
            self._items.clear()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._is_over:
                    self._changed.wait()
                if not self._items:
                    return
                item = self._items.popleft()
            self._write(item)
