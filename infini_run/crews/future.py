"""What was asked of a worker: a future, for threads and for asyncio.

The answer is unpickled where it is asked for, not where it came in: an import that a result needs must not happen in
the supervisor's thread, while the main thread may hold that module's lock.
"""

from __future__ import annotations

from _thread import RLock
from concurrent.futures import Future, InvalidStateError

from infini_run.crews.capture import capture_exception
from infini_run.crews.protocol import Done, Failed
from infini_run.crews.remote_exception import to_exception
from infini_run.errors import RemoteError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    Answer = tuple[Done | Failed, int, str]  # whose: rank and host


class Ask(Future):  # type: ignore[type-arg]
    """As concurrent.futures.Future; `await` it as well. task: its number, which events about it have."""

    def __init__(self, task: int, on_cancel: Callable[[int], None]) -> None:
        super().__init__()
        self.task = task
        self._on_cancel = on_cancel
        self._opening = RLock()
        self._opened: tuple[object, BaseException | None] | None = None

    def result(self, timeout: float | None = None) -> Any:
        """What the worker returned for it. Raises what it raised there; WorkerDied: it died before; CrewFailed;
        CancelledError; TimeoutError: not within `timeout` seconds."""
        value, error = self._open(super().result(timeout))
        if error is not None:
            raise error
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` raises, or None."""
        error = super().exception(timeout)
        return error if error is not None else self._open(super().result(timeout))[1]

    @property
    def has_failed(self) -> bool:
        """It is done, and `result` raises."""
        if not self.done() or self.cancelled():
            return False
        return super().exception() is not None or isinstance(super().result()[0], Failed)

    def cancel(self) -> bool:
        """Nobody wants it any more: at once here; the worker, if it has begun with it, is told. False: it is done."""
        with self._opening:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # it is: who waits for several of them is told by this
        self._on_cancel(self.task)
        return True

    def settle(self, answer: Answer | BaseException) -> None:
        """For the supervisor: how it ended. Nothing where it was cancelled meanwhile."""
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
    value, cause = capture_exception(message.body.load)
    if cause is None:
        return value, None
    kind = type(cause).__name__
    text = f"the result of rank {rank} on {host} cannot be unpickled here: {kind}: {cause}"
    error = RemoteError(text, kind=kind, rank=rank, host=host)
    error.__cause__ = cause
    return None, error
