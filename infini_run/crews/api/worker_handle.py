"""The handle of one worker of a crew: what `Crew.worker` returns."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from infini_run.crews.api.crew_status import CrewStatus, WorkerStatus
    from infini_run.crews.supervision.future import Ask

    T_contra = TypeVar("T_contra", contravariant=True)

    class CrewOfWorker(Protocol[T_contra, R]):
        """What a handle needs of its crew."""

        def _ask(self, task: T_contra, rank: int | None) -> Ask[R]: ...
        def _send(self, task: T_contra, rank: int) -> int: ...
        def _cancel(self, task: int) -> None: ...
        def signal(self, number: int, rank: int | None = None) -> int: ...
        def status(self) -> CrewStatus: ...


class WorkerHandle(Generic[T, R]):
    """One worker of a crew, through all its restarts."""

    def __init__(self, crew: CrewOfWorker[T, R], rank: int) -> None:
        self._crew = crew
        self.rank = rank

    def ask(self, task: T) -> Ask[R]:
        """Submit a task for this worker.

        A task that the worker has fails with the worker (WorkerDied). One that still waits for it during a restart
        goes to the next process.

        Args:
            task: any object that pickles.

        Returns:
            The future of its result.

        Raises:
            BaseException: as Crew.ask.
        """
        return self._crew._ask(task, self.rank)

    def send(self, task: T) -> int:
        """Submit a task for this worker without a future: its result is an event, `done` or `failed`.

        Args:
            task: any object that pickles.

        Returns:
            The task's number, which its events have.

        Raises:
            BaseException: as Crew.ask.
        """
        return self._crew._send(task, self.rank)

    def cancel(self, task: int) -> None:
        """Cancel a sent task: the worker's ctx.checkpoint raises Cancelled, and the event is `cancelled`. (An Ask has
        another `cancel`.)

        Args:
            task: its number.
        """
        self._crew._cancel(task)

    def signal(self, number: int) -> int:
        """Send a signal to its process; return 1, or 0 if that is gone. Raises UsageError without such a signal."""
        return self._crew.signal(number, self.rank)

    def status(self) -> WorkerStatus:
        """Return how it is now."""
        return self._crew.status().workers[self.rank]
