"""The handle of one worker of a crew: what `Crew.worker` returns."""

from __future__ import annotations

from typing import Generic, TypeVar

from infini_run.crews.api.crew_status import table_of_workers
from infini_run.public_names import public_names

T = TypeVar("T")
R = TypeVar("R")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from infini_run.crews.api.crew_status import CrewStatus, WorkerStatus
    from infini_run.crews.supervision.future import Ask

    T_contra = TypeVar("T_contra", contravariant=True)

    class CrewOfWorker(Protocol[T_contra, R]):
        """What a handle needs of its crew."""

        def _ask(self, task: T_contra, rank: int | None) -> Ask[R]: ...
        def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int | None) -> Ask[Any]: ...
        def _send(self, task: T_contra, rank: int) -> int: ...
        def _cancel(self, task: int) -> None: ...
        def signal(self, number: int, rank: int | None = None) -> int: ...
        def status(self) -> CrewStatus: ...


class MethodCalls:
    """What a crew and the handle of one of its workers have in common."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Ask[Any]:
        """Call a method of the target's object, as a task: in a crew at whichever worker is free first.

        Args:
            method: its name; the target is a class, or an object. The method gets no ctx: `this_worker()` has it.
            args, kwargs: its arguments; they pickle.

        Returns:
            The future of what it returns.

        Raises:
            UsageError: the target has no such method.
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self._call(method, args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ask[Any]:
        raise NotImplementedError


class WorkerHandle(MethodCalls, Generic[T, R]):
    """One worker of a crew, through all its restarts."""

    def __init__(self, crew: CrewOfWorker[T, R], rank: int) -> None:
        self._crew = crew
        self.rank = rank

    def __dir__(self) -> list[str]:
        return public_names(self)

    def __repr__(self) -> str:
        return f"<WorkerHandle of rank {self.rank}: {self.status().state}>"

    def _repr_html_(self) -> str:
        """Return the worker's state as a table, for a notebook."""
        return table_of_workers(repr(self)[1:-1], [self.status()])

    def ask(self, task: T) -> Ask[R]:
        """Submit a task for this worker.

        If the worker fails, tasks that were already sent to it fail with WorkerDied. All other tasks wait for the
        worker's next process.

        Args:
            task: any object that pickles.

        Returns:
            The future of its result.

        Raises:
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self._crew._ask(task, self.rank)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ask[Any]:
        return self._crew._call(method, args, kwargs, self.rank)

    def send(self, task: T) -> int:
        """Submit a task for this worker without a future: its result is an event, `done` or `failed`.

        Args:
            task: any object that pickles.

        Returns:
            The task's number, which its events have.

        Raises:
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self._crew._send(task, self.rank)

    def cancel(self, task: int) -> None:
        """Cancel a task of `send`: the worker's ctx.checkpoint raises Cancelled, and an event `cancelled` follows. To
        cancel an Ask, call its own `cancel`.

        Args:
            task: its number.
        """
        self._crew._cancel(task)

    def signal(self, number: int) -> int:
        """Send a signal to the worker's process. Return 1, or 0 if the process is gone.

        Args:
            number: the signal's number.

        Raises:
            UsageError: there is no such signal.
        """
        return self._crew.signal(number, self.rank)

    def status(self) -> WorkerStatus:
        """Return the present state of the worker."""
        return self._crew.status().workers[self.rank]
