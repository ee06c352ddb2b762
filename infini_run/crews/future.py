"""The future of a task, for threads and for asyncio.

The result is unpickled by the thread that asks for it, not by the one that received it: an import that a result needs
must not happen in the supervisor's thread while the main thread may hold that module's lock.
"""

from __future__ import annotations

from _thread import RLock
from concurrent.futures import Future, InvalidStateError

from infini_run.crews.capture import capture_foreign
from infini_run.crews.protocol import Done, Failed
from infini_run.crews.remote_exception import to_exception
from infini_run.errors import RemoteError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    Answer = tuple[Done | Failed, int, str]  # whose: rank and host


class Ask(Future):  # type: ignore[type-arg]
    """The result of a task, as a concurrent.futures.Future that can be awaited. task: the task's number, which events
    about it have."""

    def __init__(self, task: int, on_cancel: Callable[[int], None]) -> None:
        super().__init__()
        self.task = task
        self._on_cancel = on_cancel
        self._opening = RLock()
        self._opened: tuple[object, BaseException | None] | None = None

    def __repr__(self) -> str:
        """As a Future's, with the task's number. It says nothing of the result, which may not be unpickled yet."""
        if not self.done():
            how = "running" if self.running() else "pending"
        else:
            how = "cancelled" if self.cancelled() else "failed" if self.has_failed else "done"
        return f"<Ask of task {self.task}: {how}>"

    def result(self, timeout: float | None = None) -> Any:
        """Return what the worker returned.

        Args:
            timeout: how long to wait, in seconds; None: no limit.

        Raises:
            BaseException: what the task raised.
            WorkerDied: its worker died first.
            CrewFailed, InfiniRunError: the crew failed, or was closed, first.
            RemoteError: the result cannot be unpickled here.
            CancelledError: it was cancelled.
            TimeoutError: the time is up.
        """
        value, error = self._open(super().result(timeout))
        if error is not None:
            raise error
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `result` raises, or None. timeout: as for `result`. Raises CancelledError, TimeoutError."""
        error = super().exception(timeout)
        return error if error is not None else self._open(super().result(timeout))[1]

    @property
    def has_failed(self) -> bool:
        """It is done, and `result` raises."""
        if not self.done() or self.cancelled():
            return False
        return super().exception() is not None or isinstance(super().result()[0], Failed)

    def cancel(self) -> bool:
        """Cancel it: at once here, and the worker is told if it has begun. Return False if it has ended before."""
        with self._opening:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # it is: who waits for several of them is told by this
        self._on_cancel(self.task)
        return True

    def settle(self, answer: Answer | BaseException) -> None:
        """Set how it ended, for the supervisor. No effect if it was cancelled meanwhile."""
        try:
            if isinstance(answer, BaseException):
                self.set_exception(answer)
            else:
                self.set_result(answer)
        except InvalidStateError:
            return

    def _open(self, answer: Answer) -> tuple[object, BaseException | None]:
        with self._opening:
            if self._opened is None:
                message, rank, host = answer
                self._opened = _opened(message, rank, host)
            return self._opened

    def __await__(self) -> Generator[Any, None, Any]:
        from asyncio import wrap_future

        return wrap_future(self).__await__()


def _opened(message: Done | Failed, rank: int, host: str) -> tuple[object, BaseException | None]:
    if isinstance(message, Failed):
        return None, to_exception(message, rank, host)
    value, cause = capture_foreign(message.body.load)
    if cause is None:
        return value, None
    kind = type(cause).__name__
    text = f"the result of rank {rank} on {host} cannot be unpickled here: {kind}: {cause}"
    error = RemoteError(text, kind=kind, rank=rank, host=host)
    error.__cause__ = cause
    return None, error
