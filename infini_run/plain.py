"""Records as plain types and back, for the Link: what JSON can say, and only the records that are named here."""

from __future__ import annotations

from infini_run.errors import LinkError
from infini_run.kind import StreamMap
from infini_run.look import Look
from infini_run.options import Options
from infini_run.process import Picture, Thread
from infini_run.record import fields
from infini_run.report import Clock, Exit, Report, Stray

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

_RECORDS = {cls.__name__: cls for cls in (Clock, Exit, Look, Options, Picture, Report, Stray, StreamMap, Thread)}


def to_plain(value: Any) -> Any:
    """Lists, dictionaries, texts and numbers; a record is a dictionary with its class's name."""
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    name = type(value).__name__
    if name in _RECORDS:
        return {"record": name, "fields": {field: to_plain(getattr(value, field)) for field in fields(value)}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name} does not go over the link")


def from_plain(value: Any) -> Any:
    """What `to_plain` was given, lists as tuples. Raises LinkError: it is something else."""
    if isinstance(value, list):
        return tuple(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    try:
        cls: Any = _RECORDS[value["record"]]
        return cls(**{str(name): from_plain(item) for name, item in value["fields"].items()})
    except (KeyError, TypeError, AttributeError):
        raise LinkError("a record came over the link that this version does not know") from None


def record_of(cls: type[T], value: Any) -> T:
    """A record of that class, or LinkError."""
    found = from_plain(value)
    if not isinstance(found, cls):
        raise LinkError(f"no {cls.__name__} came over the link where one was due")
    return found
