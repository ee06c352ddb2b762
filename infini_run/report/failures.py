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
    """A worker's process ended, or infini-run stopped it, before the worker finished its work. `exit` is an Exit: how
    the process ended, with its pid and log. `rank`, `host`, `exit_code` (128 + the signal, as in a shell), `signal`
    (its number, or 0), and `last_lines` (of its stderr) are taken from there. `report` has the whole launch, or is
    None."""

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
