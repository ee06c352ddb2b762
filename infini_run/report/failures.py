"""The errors that carry the report of what failed; errors.py has all others, and the tree of them."""

from __future__ import annotations

from infini_run.errors import InfiniRunError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report


class WorkerError(InfiniRunError):
    """A worker failed. `report` is the whole story, `rank` and `exit_code` those of the first failure."""

    report: Report | None
    rank: int | None

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report
        self.rank = report.first_failure.rank if report.first_failure else None
        self.exit_code = report.exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.report,)


class WorkerDied(WorkerError):
    """A worker ended, or was ended, before it had done what it was asked for. `exit`: how its process ended, as far
    as that is known (with pid, log and the rest); `rank`, `host`, `exit_code` (as a shell says it), `signal` (its
    number, or 0) and `last_lines` (of its stderr) are those. `report`: of what was started with it, or None."""

    def __init__(self, message: str, exit_: Exit, report: Report | None = None) -> None:
        InfiniRunError.__init__(self, message)
        self.report = report
        self.exit = exit_
        self.rank = exit_.rank
        self.host = exit_.host
        self.exit_code = exit_.shell_code
        self.signal = exit_.signal
        self.last_lines = exit_.last_lines

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.exit, self.report)


class CrewFailed(WorkerError):
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
