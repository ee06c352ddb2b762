"""The shapes of requests and answers, for the OpenAPI document: of the records themselves, and of the table of flags.

The one rule: nothing has two definitions. A field of a record is a field of its answer.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from infini_run.display.timeline import Bar
from infini_run.jobs.options.table import VERBS
from infini_run.jobs.scheduler import Facts
from infini_run.jobs.serve.job_timeline import RunTimeline
from infini_run.jobs.status.job_status import COMMON, Status
from infini_run.record import fields

THE_COMMANDS_OWN = ("dir", "wait", "print", "check", "json", "flagfile", "fromenv", "tryfromenv", "undefok")
Value = bool | int | float | str | list[str] | None


def _model(record: type, /, skip: tuple[str, ...] = (), title: str = "", **more: Any) -> type[BaseModel]:
    """Return the JSON model of a record. title: another name than the record's."""
    hints = get_type_hints(record)
    found: dict[str, Any] = {name: (_jsonable(hints[name]), ...) for name in fields(record) if name not in skip}
    return create_model(title or record.__name__, __doc__=record.__doc__, **found, **more)


def _jsonable(hint: Any) -> Any:
    """Return plain data: tuples become lists, records become models."""
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        item = _jsonable(inner[0]) if inner[-1] is Ellipsis else str | int  # a pair
        return list[item]  # type: ignore[valid-type]
    return _model(hint) if hasattr(hint, "_fields") else hint


TASK: Any = _model(Status, title="Task", skip=COMMON, headline=(str, ...))
STATUS: Any = _model(Status, skip=("tasks",), headline=(str, ...), tasks=(list[TASK], ...))
RANK: Any = _model(Bar)
TIMELINE: Any = _model(RunTimeline, skip=("bars",), ranks=(list[RANK], ...))
FACTS: Any = _model(Facts)


def _flag_schema() -> dict[str, Any]:
    """Return the schema of every flag of submit that applies here."""
    found = {}
    for flag in VERBS["submit"]:
        if flag.name in THE_COMMANDS_OWN:
            continue
        about = f"{flag.help} (default: {flag.shown or flag.default})" if flag.shown or flag.default else flag.help
        found[flag.name] = {"description": about, **({"enum": list(flag.choices)} if flag.choices else {})}
    return {"properties": found}


class SubmissionBody(BaseModel):
    """A job to submit."""

    model_config = ConfigDict(extra="forbid")
    command: list[str] = Field(min_length=1, description="what each rank runs")
    flags: dict[str, Value] = Field(
        default={},
        description="flags of infini-job submit by their names; words and NAME=VALUE flags as lists",
        json_schema_extra=_flag_schema(),
    )
    env: dict[str, str] | None = Field(
        default=None,
        description="the whole environment of the ranks; null: that of the service, without what belongs to a shell",
    )
    cwd: str = Field(default="", description="the directory of the ranks; empty: that of the service")


class Submitted(BaseModel):
    """A submitted job. id: the scheduler's. slots_per_node, nodes: 0: the scheduler decides. array: the indices of
    its tasks, or "" without an array. remark: a note on its layout."""

    name: str
    scheduler: str
    id: str
    folder: str
    nodes: int
    slots_per_node: int
    array: str
    pool: str
    remark: str


class Script(BaseModel):
    """The script of a submission. script: the batch script. array: as of a submitted job. remark: a note on its
    layout."""

    scheduler: str
    script: str
    nodes: int
    slots_per_node: int
    array: str
    pool: str
    remark: str


class Problem(BaseModel):
    """RFC 9457. detail: what is wrong and what to do, one line each, in the command's own words. exit_code: the
    command's. kind: of a failed submission: refused, timed_out, unreachable."""

    type: str
    title: str
    status: int
    detail: str
    exit_code: int | None = None
    kind: str | None = None
