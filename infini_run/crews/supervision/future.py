"""The future of a task, for threads and for asyncio.

The thread that asks for a result or an exception unpickles it, not the one that received it. An import that it needs
must not happen in the supervisor's thread while the main thread may hold that module's lock. The kind of a message
shows whether a task failed, before anything is unpickled. So `set_exception` sets a failure, with an exception in
place of the real one, and `wait`, `as_completed`, and callbacks see it as concurrent.futures does. `exception` and
`result` make the task's own exception when they run.
"""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures._base import CANCELLED
from functools import partial
from threading import current_thread, main_thread

from infini_run.crews.capture import capture_foreign
from infini_run.crews.errors import AskTimeout
from infini_run.crews.protocol import TaskDone, TaskFailed
from infini_run.crews.remote_exception import to_exception, unreadable_result
from infini_run.crews.supervision.loop_waiters import resolve
from infini_run.number_arguments import read_wait
from infini_run.public_names import public_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import Any, Protocol, TypeVar

    R = TypeVar("R")

    Answer = tuple[TaskDone | TaskFailed, int, str]  # whose: rank and host

    class TaskOwner(Protocol):
        """What an Ask needs of the supervisor that has its task."""

        def cancel_task(self, task: int) -> None:
            """Cancel the task: nobody wants the result any more."""

        def on_thread_waits(self) -> None:
            """Note that the current thread is about to wait for the result. Raises InfiniRunError if it would wait
            for ever."""

        def on_coroutine_waits(self) -> None:
            """Note that the current asyncio task is about to wait for the result. Raises InfiniRunError, too."""


# what only the supervisor calls, and the standard library
_NOT_ITS_USERS = {"begin", "claim", "prepare_wait", "set_answer", "set_exception", "set_result"}
_NOT_ITS_USERS.add("set_running_or_notify_cancel")

if not TYPE_CHECKING:
    R = object  # `typing` is not loaded for its sake


class _PickledError(Exception):
    """Stands for the exception of a task until somebody asks for that."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Ask(Future[R]):
    """The result of a task, as a concurrent.futures.Future that asyncio can await.

    It differs from other futures in three things. First, you can cancel a running task: the future is canceled at
    once, and the task's next ctx.checkpoint raises Cancelled. Second, if a result does not unpickle here, `result`
    and `exception` have a RemoteError, but `concurrent.futures.wait` counts the ask as successful. Third, a task that
    does not pickle has no future: `Crew.ask` itself raises.

    Args:
        task: the task's number, which its events also have.
        owner: the supervisor of the task; infini-run sets it.
    """

    _opened: tuple[object, BaseException | None] | None = None  # what its answer unpickles to, once somebody asks

    def __init__(self, task: int, owner: TaskOwner | None = None) -> None:
        super().__init__()
        self.task = task
        self._owner = owner  # until the end: a future that is kept does not keep its crew
        self._has_begun = False

    def __repr__(self) -> str:
        """Return a text as a Future's, with the task's number. It leaves out the result, which may still be
        pickled."""
        return f"<Ask of task {self.task}: {self._how()}>"

    def _how(self) -> str:
        if not self.done():
            return "running" if self.running() else "pending"
        return "cancelled" if self.cancelled() else "failed" if self.has_failed else "done"

    def _repr_html_(self) -> str:
        """Return how it is as a table, for a notebook."""
        return table_of_asks(repr(self)[1:-1], (self,))

    def _row(self) -> tuple[object, ...]:
        """Return its number, how it is, the rank and host of the answer, and its result. That is empty until somebody
        asks for it, because it may still be pickled."""
        failure = self._exception
        answer: Any = failure.answer if isinstance(failure, _PickledError) else self._result
        rank, host = answer[1:] if answer is not None else ("", "")
        shown = ""
        if self._opened is not None:
            value, failure = self._opened
            shown = repr(value)
        if failure is not None and not isinstance(failure, _PickledError):
            shown = f"{type(failure).__name__}: {failure}"
        return self.task, self._how(), rank, host, shown

    def __dir__(self) -> list[str]:
        return public_names(self, _NOT_ITS_USERS)

    def result(self, timeout: float | None = None) -> R:
        """Return what the worker returned.

        Args:
            timeout: how long to wait, in seconds; None: no limit.

        Raises:
            BaseException: what the task raised.
            WorkerDied: its worker died first.
            CrewFailed, CrewClosed: the crew failed, or closed, first; or this is a forked child.
            RemoteError: the result does not unpickle here.
            CancelledError: somebody canceled it.
            TimeoutError: the time is up.
        """
        error = None
        try:
            value: R
            value, error = self._outcome(timeout)
            if error is not None:
                raise error
            return value
        finally:
            del self, error  # the traceback has this frame: as a cycle, it would stay until the next collection

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `result` raises, or None.

        Args:
            timeout: how long to wait, in seconds; None: no limit.

        Raises:
            CancelledError: somebody canceled it.
            TimeoutError: the time is up.
        """
        return self._outcome(timeout)[1]

    def _outcome(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        """Wait as `exception` does, and return the result and the exception."""
        limit_s = read_wait("timeout", timeout)
        if limit_s != 0:
            self.prepare_wait()
        try:
            error = super().exception(limit_s)
        except FutureTimeout:
            raise AskTimeout from None
        if error is not None:
            return self._open(error.answer) if isinstance(error, _PickledError) else (None, error)
        answer: Any = super().result()
        return self._open(answer)

    def prepare_wait(self) -> None:
        """Note that the current thread is about to wait for the end. Raises InfiniRunError if it would wait for
        ever."""
        owner = self._owner
        if owner is not None and not self.done():
            owner.on_thread_waits()

    def _get_snapshot(self) -> tuple[bool, bool, R | None, BaseException | None]:
        """Return (done, canceled, result, exception), which asyncio.wrap_future reads from Python 3.14 on."""
        if not self.done():
            return False, False, None, None
        if self.cancelled():
            return True, True, None, None
        error = self.exception()
        return True, False, None if error is not None else self.result(), error

    @property
    def has_failed(self) -> bool:
        """Whether its task has failed."""
        return self._exception is not None

    @property
    def has_begun(self) -> bool:
        """Whether a worker has begun with the task. If it has not, a failure of the worker lost no work."""
        return self._has_begun

    def running(self) -> bool:
        """Return whether a worker has begun with the task, and it has not ended."""
        return self._has_begun and not self.done()

    def cancel(self) -> bool:
        """Cancel it: at once here, and also at the worker if the task has begun there. Return False if it already
        ended."""
        owner = None
        try:
            return super().cancel()  # it runs callbacks: no lock may be held, as they may wait for any thread
        finally:  # also if a callback has raised
            try:
                with self._condition:
                    if self._state == CANCELLED:  # no other call was here before
                        owner, self._owner = self._owner, None
                        self.set_running_or_notify_cancel()  # this wakes threads that wait for several futures
            finally:
                if owner is not None:
                    owner.cancel_task(self.task)

    def add_done_callback(self, fn: Callable[[Future[R]], object]) -> None:
        """Call `fn(self)` when the task ends: in the thread that delivers answers, or in that of `cancel`. Call it at
        once if the task already ended.

        Args:
            fn: called with this future. The logger gets what it raises; also SystemExit and the like, outside of the
                main thread.
        """
        super().add_done_callback(partial(_call_back, fn))

    def claim(self) -> bool:
        """Note that a worker gets the task, for the supervisor. Return False after a cancellation."""
        return not self.cancelled()

    def begin(self) -> None:
        """Note that a worker has begun with the task, for the supervisor."""
        self._has_begun = True

    def set_answer(self, answer: Answer | BaseException) -> None:
        """Set how it ended, for the supervisor. No effect after a cancellation."""
        self._owner = None
        try:
            if isinstance(answer, BaseException):
                self.set_exception(answer)
            elif isinstance(answer[0], TaskFailed):
                self.set_exception(_PickledError(answer))
            else:
                packed: Any = answer  # it is opened by the thread that asks
                self.set_result(packed)
        except InvalidStateError:
            return

    def _open(self, answer: Answer) -> tuple[Any, BaseException | None]:
        if self._opened is None:  # no lock: it may import, and wait for a thread that imports and asks for it, too
            message, rank, host = answer
            vars(self).setdefault("_opened", _opened(message, rank, host))  # all threads get the first one's
        return self._opened  # type: ignore[return-value]

    def __await__(self) -> Generator[Any, None, R]:
        return self._await_result().__await__()

    async def _await_result(self) -> R:
        """Await as `await asyncio.wrap_future(self)` does: a coroutine that is canceled cancels the task. But a
        StopIteration of the task is a RuntimeError (PEP 479). The futures of asyncio in Python 3.10 and 3.11 take no
        StopIteration, and a coroutine that awaited one would wait for ever (gh-112182)."""
        from asyncio import CancelledError, get_running_loop

        if not self.done():
            owner = self._owner
            if owner is not None:
                owner.on_coroutine_waits()
            loop = get_running_loop()
            ended = loop.create_future()
            self.add_done_callback(lambda _: resolve(loop, ended))
            try:
                await ended
            except CancelledError:
                self.cancel()
                raise
        if self.cancelled():
            raise CancelledError
        return self.result()


def table_of_asks(title: str, asks: Iterable[Ask[Any]]) -> str:
    """Return how each ask is as a table in HTML."""
    from infini_run.crews.html_table import html_table

    return html_table(title, ("task", "state", "rank", "host", "result"), [ask._row() for ask in asks])


def _call_back(fn: Callable[[Future[Any]], object], ask: Future[Any]) -> None:
    """Call back. Future logs an Exception of a callback. Another one would end the supervisor's thread, and with it
    the crew."""
    try:
        fn(ask)
    except BaseException as error:
        if isinstance(error, Exception) or current_thread() is main_thread():
            raise
        kind = type(error).__name__
        raise RuntimeError(f"a callback raised {kind}; this thread continues") from error


def _opened(message: TaskDone | TaskFailed, rank: int, host: str) -> tuple[object, BaseException | None]:
    if isinstance(message, TaskFailed):
        return None, to_exception(message, rank, host)
    value, cause = capture_foreign(message.body.load)
    if cause is None:
        return value, None
    return None, unreadable_result(cause, rank, host)
