"""The threads and coroutines that read a crew's events: while there is one, workers wait for it and the queue drops
no event.

A thread, or a task of asyncio, is a reader from the first event that it asks for until its end. It is none while it
waits for an answer. It cannot read meanwhile, and the answer may come after more events than the queue keeps.
"""

from __future__ import annotations

from threading import local
from weakref import WeakKeyDictionary, ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import Any


class _Reader:
    """An object whose end is that of a reader: a thread's own variables go when it ends."""

    __slots__ = ("__weakref__",)


class EventReaders:
    """The readers of one crew. on_leave: called when there is one less."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave = on_leave
        self._present: set[ref[_Reader]] = set()
        self._of_thread = local()
        self._of_task: WeakKeyDictionary[asyncio.Task[Any], _Reader] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._present)

    def enter_thread(self) -> None:
        """Note that the current thread reads."""
        if "reader" not in self._of_thread.__dict__:
            self._of_thread.reader = self._make()

    def leave_thread(self) -> None:
        """Note that the current thread reads no more, until it enters again."""
        self._of_thread.__dict__.pop("reader", None)

    def enter_task(self) -> None:
        """Note that the current task of asyncio reads."""
        from asyncio import current_task

        task = current_task()
        if task is not None and task not in self._of_task:
            self._of_task[task] = self._make()
            task.add_done_callback(self._drop)

    def leave_task(self) -> None:
        """Note that the current task of asyncio reads no more, until it enters again."""
        from asyncio import current_task

        self._drop(current_task())

    def _drop(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._of_task.pop(task, None)

    def _make(self) -> _Reader:
        reader = _Reader()
        self._present.add(ref(reader, self._leave))
        return reader

    def _leave(self, reader: ref[_Reader]) -> None:
        self._present.discard(reader)
        self._on_leave()
