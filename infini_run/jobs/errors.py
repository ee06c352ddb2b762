"""What a batch scheduler did not do."""

from __future__ import annotations

from infini_run.errors import InfiniRunError


class SubmitError(InfiniRunError):
    """A batch scheduler did not take a job. `kind`: `refused`; `timed_out`, and the job may be there all the same;
    `unreachable`, and it is not. `text`: the scheduler's own words."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.text)


class QueryError(InfiniRunError):
    """A batch scheduler did not answer, or nothing that can be understood: no news of any job."""


class JobFailed(InfiniRunError):
    """A function's job that ended without a result, and no rank has written an exception. `name`: of the job or the
    task; `state`: how it ended."""

    def __init__(self, message: str, name: str, state: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.name = name
        self.state = state
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.name, self.state, self.exit_code)
