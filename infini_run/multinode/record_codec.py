"""Records to JSON and back, for the Link; only the classes of `_RECORDS`."""

from __future__ import annotations

from infini_run.errors import LinkError
from infini_run.record import fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

_BOUNDS = {  # fields that become an exit code, or an index of a table
    "Exit": (("code", 255), ("signal", 64), ("start_errno", 4095)),
    "Report": (("received_signal", 64), ("port_in_use", 65535), ("error_code", 255)),
}
_MOST = 2**63  # no count and no time is larger
_RECORDS = {  # and their modules: imported when one is read, for an agent needs few of them
    "Clock": "infini_run.report.report",
    "CollectiveRecord": "infini_run.report.torch_records",
    "Exit": "infini_run.report.exit",
    "HangSnapshot": "infini_run.report.hang_snapshot",
    "LeftoverProcess": "infini_run.report.exit",
    "Options": "infini_run.options.launch_options",
    "PreloadUse": "infini_run.report.report",
    "OneProgram": "infini_run.options.launch_options",
    "ProcessSnapshot": "infini_run.system.procfs",
    "RankStreams": "infini_run.value_types",
    "Report": "infini_run.report.report",
    "SlowRank": "infini_run.report.pace",
    "ThreadSnapshot": "infini_run.system.procfs",
}


def to_jsonable(value: Any) -> Any:
    """Return lists, dictionaries, texts and numbers; a record becomes a dictionary with the name of its class."""
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    name = type(value).__name__
    if name in _RECORDS:
        return {"record": name, "fields": {field: to_jsonable(getattr(value, field)) for field in fields(value)}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name} does not go over the link")


def decode_record(cls: type[T], value: Any) -> T:
    """Return the record of that class from which `to_jsonable` made the value. Raises LinkError: it is something
    else."""
    found: T = _read(cls.__name__, value)
    return found


def _read(kind: str, value: Any) -> Any:
    """Return a value of the type that an annotation (PEP 604) names. It is as deep as the type, and no deeper."""
    kind, is_optional = kind.removesuffix(" | None"), kind.endswith(" | None")
    if is_optional and value is None:
        return None
    if kind.startswith("tuple["):
        return _read_tuple(kind[len("tuple[") : -1], value)
    if kind in _RECORDS:
        return _read_record(kind, value)
    fits = type(value).__name__ in kind.split(" | ") or (kind == "float" and type(value) is int)
    if fits and (type(value) is str or abs(value) <= _MOST):  # false for NaN
        return value
    raise LinkError(f"no {kind} came over the link where one was due")


def _read_tuple(inner: str, value: Any) -> tuple[Any, ...]:
    if type(value) is list and inner.endswith(", ..."):
        kind = inner.removesuffix(", ...")
        return tuple(_read(kind, item) for item in value)
    kinds = inner.split(", ")
    if type(value) is list and len(value) == len(kinds):
        return tuple(_read(kind, item) for kind, item in zip(kinds, value, strict=True))
    raise LinkError(f"no tuple[{inner}] came over the link where one was due")


def _read_record(name: str, value: Any) -> Any:
    if type(value) is not dict or value.get("record") != name:
        raise LinkError(f"no {name} came over the link where one was due")
    cls: Any = getattr(__import__(_RECORDS[name], fromlist=[name]), name)
    content = value.get("fields")
    if type(content) is not dict or content.keys() != cls._names:
        raise LinkError("a record came over the link that this version does not know")
    kinds = cls.__annotations__
    values = {field: _read(kinds[field], item) for field, item in content.items()}
    for field, most in _BOUNDS.get(name, ()):
        if values[field] is not None and not 0 <= values[field] <= most:
            raise LinkError(f"{field} {values[field]} of {name} came over the link")
    return cls(**values)
