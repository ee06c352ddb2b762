"""What goes wrong, as application/problem+json (RFC 9457): the sentences are those of the command."""

from __future__ import annotations

import http
import json

from starlette.responses import Response

from infini_run.errors import InfiniRunError, UsageError, printable
from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.scheduler import REFUSED, TIMED_OUT
from infini_run.jobs.status.each_job import JobHung

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROBLEM = "application/problem+json"


class NotThere(InfiniRunError):
    """A thing that does not exist, or is another user's; `status` says which."""

    exit_code = 2

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Busy(InfiniRunError):
    """More requests at once than the service takes."""


class Answer(Response):
    """JSON of any text that Python has: bytes of a name that are no UTF-8 are lone surrogates, as --json has them."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def problem(status: int, detail: str, **more: object) -> Response:
    """Return a problem (RFC 9457). detail: one line or several."""
    content = {"type": "about:blank", "title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    return Answer({**content, **more}, status_code=status, media_type=PROBLEM)


def problem_of(error: InfiniRunError) -> Response:
    """Return the problem of an error. exit_code: the command's for the same. kind: of a submission, as SubmitError
    has it."""
    detail = "\n".join(printable(line) for line in str(error).splitlines())
    more = {"kind": error.kind} if isinstance(error, SubmitError) else {}
    return problem(_status(error), detail, exit_code=error.exit_code, **more)


def _status(error: InfiniRunError) -> int:
    if isinstance(error, NotThere):
        return error.status
    if isinstance(error, UsageError):
        return 400
    if isinstance(error, SubmitError):
        return {REFUSED: 422, TIMED_OUT: 504}.get(error.kind, 503)
    return 503 if isinstance(error, (QueryError, Busy, JobHung)) else 500
