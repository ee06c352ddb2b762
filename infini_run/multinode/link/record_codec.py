"""Records to JSON and back, for the Link; only the classes of `_RECORDS`."""

from __future__ import annotations

from _functools import partial

from infini_run.errors import LinkError
from infini_run.record import fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias, TypeVar

    T = TypeVar("T")
    Reader: TypeAlias = Callable[[Any], Any]

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
_READERS: dict[str, tuple[Any, dict[str, Reader]]] = {}  # of the records that were read: a head reads many
_KINDS: dict[str, Reader] = {}


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
    found: T = _read_record(cls.__name__, value)
    return found


def _reader_of(kind: str) -> Reader:
    """Return what reads a value of the type that an annotation (PEP 604) names. The value is as deep as the type, and
    no deeper."""
    if kind not in _KINDS:
        _KINDS[kind] = _make_reader(kind)
    return _KINDS[kind]


def _make_reader(kind: str) -> Reader:
    plain = kind.removesuffix(" | None")
    if plain.startswith("tuple["):
        read: Reader = _tuple_reader(plain[len("tuple[") : -1])
    elif plain in _RECORDS:
        read = partial(_read_record, plain)
    else:
        read = partial(_read_plain, plain, frozenset(plain.split(" | ")))
    optional: Reader = partial(_read_optional, read)
    return read if kind == plain else optional


def _read_optional(read: Reader, value: Any) -> Any:
    return None if value is None else read(value)


def _read_plain(kind: str, names: frozenset[str], value: Any) -> Any:
    fits = type(value).__name__ in names or (kind == "float" and type(value) is int)
    if fits and (type(value) is str or abs(value) <= _MOST):  # false for NaN
        return value
    raise LinkError(f"no {kind} came over the link where one was due")


def _tuple_reader(inner: str) -> Reader:
    if inner.endswith(", ..."):
        read: Reader = partial(_read_items, inner, _reader_of(inner.removesuffix(", ...")))
    else:
        read = partial(_read_tuple, inner, [_reader_of(kind) for kind in inner.split(", ")])
    return read


def _read_items(inner: str, read: Reader, value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise LinkError(f"no tuple[{inner}] came over the link where one was due")
    return tuple(map(read, value))


def _read_tuple(inner: str, readers: Sequence[Reader], value: Any) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(readers):
        raise LinkError(f"no tuple[{inner}] came over the link where one was due")
    return tuple(read(item) for read, item in zip(readers, value, strict=True))


def _readers_of(name: str) -> tuple[Any, dict[str, Reader]]:
    """Return the class of a record, and what reads each of its fields."""
    cls: Any = getattr(__import__(_RECORDS[name], fromlist=[name]), name)
    return cls, {field: _reader_of(kind) for field, kind in cls.__annotations__.items()}


def _read_record(name: str, value: Any) -> Any:
    if type(value) is not dict or value.get("record") != name:
        raise LinkError(f"no {name} came over the link where one was due")
    if name not in _READERS:
        _READERS[name] = _readers_of(name)
    cls, readers = _READERS[name]
    content = value.get("fields")
    if type(content) is not dict or content.keys() != readers.keys():
        raise LinkError("a record came over the link that this version does not know")
    values = {field: readers[field](item) for field, item in content.items()}
    for field, most in _BOUNDS.get(name, ()):
        if values[field] is not None and not 0 <= values[field] <= most:
            raise LinkError(f"{field} {values[field]} of {name} came over the link")
    return cls(**values)
