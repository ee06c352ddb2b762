"""The errors that only crews raise; errors.py has the tree of all.

Where the standard library's executors raise one of their own for the same, these are of that type, too.
"""

from __future__ import annotations

from concurrent.futures import BrokenExecutor

from infini_run.errors import InfiniRunError
from infini_run.report.failures import WorkerDied, WorkerError


class CrewFailed(WorkerError, BrokenExecutor):
    """A crew has stopped all its workers, because they failed more often than its restart policy allows. `causes`:
    what failed, in time; `rank` and `exit_code` are those of the first that has them."""

    def __init__(self, message: str, causes: tuple[BaseException, ...] = ()) -> None:
        InfiniRunError.__init__(self, message)
        self.report = None
        self.causes = causes
        self.rank = next((cause.rank for cause in causes if isinstance(cause, WorkerDied)), None)
        self.exit_code = next((cause.exit_code for cause in causes if isinstance(cause, WorkerDied)), 1) or 1

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.causes)


class CrewClosed(InfiniRunError, RuntimeError):
    """A crew was closed: it takes no more tasks, or one that it had accepted was not to be done any more."""


class DrainTimeout(InfiniRunError, TimeoutError):
    """Tasks that a crew had accepted were not done within its drain_s. `tasks`: how many; `ranks`: the workers that
    had some of them."""

    def __init__(self, message: str, tasks: int = 0, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.tasks, self.ranks)
