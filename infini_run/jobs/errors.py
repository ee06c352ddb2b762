"""What a batch scheduler did not do."""

from __future__ import annotations

from infini_run.errors import InfiniRunError


class SubmitError(InfiniRunError):
    """A batch scheduler did not confirm a job. `kind`: `refused`: it rejected the job; `timed_out`: it did not
    respond in time, and may have the job; `unreachable`: it does not have the job. `text` is the scheduler's own
    text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.text)


class QueryError(InfiniRunError):
    """A batch scheduler did not respond, or infini-run cannot understand its answer. The state of jobs is unknown."""


class JobFailed(InfiniRunError):
    """The job of a function ended without a result, and without an exception of a rank: it was canceled, reached its
    limit, lost a node, or a rank exited or was killed. `name` is that of the job or task, `state` the last state."""

    def __init__(self, message: str, name: str, state: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.name = name
        self.state = state
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.name, self.state, self.exit_code)
