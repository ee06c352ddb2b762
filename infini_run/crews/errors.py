"""The errors that only crews raise; errors.py has the tree of all.

Where the standard library's executors raise a type for the same, these are of that type, too.
"""

from __future__ import annotations

import sys
from concurrent.futures import BrokenExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from infini_run.errors import InfiniRunError, counted
from infini_run.report.failures import WorkerDied, WorkerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMED = 8  # workers that an error names
_CAUSES = 3  # the last ones, which an error shows
_LINES = 9  # of them


class CrewFailed(WorkerError, BrokenExecutor):
    """A crew failed and stopped all its workers: a worker failed, and its restart policy allows no further restart.
    `causes` are the failures in the order of time; `rank` and `exit_code` are those of the first cause that has
    them."""

    def __init__(self, message: str, causes: tuple[BaseException, ...] = ()) -> None:
        InfiniRunError.__init__(self, message)
        self.report = None
        self.causes = causes
        self.rank = next((cause.rank for cause in causes if isinstance(cause, WorkerDied)), None)
        self.exit_code = next((cause.exit_code for cause in causes if isinstance(cause, WorkerDied)), 1) or 1

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.causes)


class CrewClosed(InfiniRunError, RuntimeError):
    """A crew was closed: it takes no more tasks, or dropped an accepted task."""


class DrainTimeout(InfiniRunError, TimeoutError):
    """A crew did not finish its accepted tasks within its `drain_s`. `tasks` is the number of unfinished tasks,
    `ranks` the workers that had some of them."""

    def __init__(self, message: str, tasks: int = 0, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.tasks, self.ranks)


if sys.version_info >= (3, 11):  # they are one
    AskTimeout = TimeoutError
else:

    class AskTimeout(FutureTimeout, TimeoutError):
        """A result has not come in time."""


def crew_failed(causes: Sequence[BaseException], max_restarts: int, within_s: float) -> CrewFailed:
    """Return the error of a crew that these failures ended, with a policy of `max_restarts` within `within_s`
    seconds."""
    count = sum(isinstance(cause, WorkerDied) for cause in causes)
    if count and max_restarts:
        limit = f"{counted(max_restarts, 'restart')} within {within_s:g} s"
        head = f"the crew failed: {counted(count, 'failure')}, with at most {limit}"
    else:
        head = "the crew failed"
    lines = [line for cause in causes[-_CAUSES:] for line in (str(cause) or repr(cause)).split("\n")][:_LINES]
    if len(causes) > _CAUSES:
        lines.append(f"... and {len(causes) - _CAUSES} earlier; `causes` has all {len(causes)}")
    return CrewFailed("\n".join([head, *(f"  {line}" for line in lines)]), tuple(causes))


def drain_timeout(undone: Mapping[int | None, int], drain_s: float) -> DrainTimeout:
    """Return the error of a crew that did not finish its tasks in time. `undone`: how many, by the rank of the worker
    that had them; None: no worker had begun."""
    ranks = sorted(rank for rank in undone if rank is not None)
    parts = [f"{counted(undone[rank], 'task')} of rank {rank}" for rank in ranks[:_NAMED]]
    if len(ranks) > _NAMED:
        parts.append(f"others of {counted(len(ranks) - _NAMED, 'more rank')}")
    if None in undone:
        parts.append(f"{counted(undone[None], 'task')} that no worker had started")
    count, where = sum(undone.values()), ", ".join(parts)
    tasks = counted(count, "accepted task")
    text = f"the crew was closed, and drain_s={drain_s:g} passed with {tasks} undone: {where}"
    return DrainTimeout(text, count, tuple(ranks))
