"""The JSON frames of the Link: the fields of each kind, and the type and bounds of each field. Pure.

The one rule: code behind `read` can rely on every value. Whatever a node or a head sends raises LinkError here, or
nothing at all.
"""

from __future__ import annotations

import os

from infini_run.errors import LinkError
from infini_run.multinode.protocol import unpack_json
from infini_run.value_types import MAX_INT, MOST_RANKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Schema = dict[str, Callable[[Any], bool]]

_MAX_NS = 2**63 - 1
_FOREVER_S = 1e12


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _text(value: Any) -> bool:
    """A text that can be a variable, an argument or a path: it has no zero byte."""
    return type(value) is str and "\0" not in value and (value.isascii() or _is_a_path(value))


def _is_a_path(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # a surrogate that is no escaped byte
        return False
    return True


def _ticks(value: Any) -> bool:
    """A number of the kernel's, as text."""
    return type(value) is str and value.isascii() and value.isdigit() and len(value) <= 20


def _texts(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


def _flag(value: Any) -> bool:
    return type(value) is bool


def is_seconds(value: Any) -> bool:
    """Whether it is a duration, in seconds."""
    return type(value) in (int, float) and 0 <= value <= _FOREVER_S


def _variables(value: Any) -> bool:
    """An environment."""
    if type(value) is not dict or not _texts(list(value.values())):
        return False
    return all(_text(name) and name and "=" not in name for name in value)


def _record(value: Any) -> bool:
    """A record; record_codec.py checks its fields."""
    return type(value) is dict


def _workers(value: Any) -> bool:
    """What workers need; empty: ranks are the workers."""
    fits = {"gpus_per_proc": _count, "nproc": _nproc, "log_dir": _text, "environ": _variables}
    if type(value) is not dict or value.keys() not in (set(), fits.keys()):
        return False
    return all(fits[name](item) for name, item in value.items())


def _nproc(value: Any) -> bool:
    return value in ("gpu", "cpu", "auto") if type(value) is str else _whole(1, MOST_RANKS)(value)


_port, _rank, _pid = _whole(0, 65535), _whole(-1, MAX_INT), _whole(-1, MAX_INT)
_count, _code, _signal = _whole(0, MAX_INT), _whole(0, 255), _whole(0, 64)


def _ranks(value: Any) -> bool:
    return type(value) is list and all(map(_rank, value))


# head to agent
SPEC: Schema = {
    "version": _text, "is_by_hand": _flag, "silence_s": is_seconds, "cwd": _text, "environ": _variables,
    "options": _record, "has_stream": _flag, "asked": _texts, "observe": _texts,
    "lease_s": is_seconds, "launch_id": _text, "workers": _workers,
}  # fmt: skip
LAUNCH: Schema = {
    "node": _count, "nnodes": _whole(1, MAX_INT), "nproc": _whole(1, MOST_RANKS), "first": _count,
    "world_size": _whole(1, MAX_INT), "most": _whole(1, MOST_RANKS), "host": _text, "master_addr": _text,
    "master_port": _port, "launch_id": _text, "restarts": _count, "heading": _text,
}  # fmt: skip
SIGNAL: Schema = {"signal": _signal}
STOP: Schema = {"signal": _signal, "by_signal": _flag}
USAGE_REQUEST: Schema = {"ranks": _ranks}
GOODBYE: Schema = {"exit_code": _code}
TURNED_AWAY: Schema = {  # a GOODBYE before there was a SPEC
    "error": _text, "may_return": _flag, "launch_id": _text, "timeout_s": is_seconds,
}  # fmt: skip
# agent to head
HELLO: Schema = {
    "version": _text, "host": _text, "pid": _pid, "start_ticks": _ticks, "nproc": _whole(1, MOST_RANKS),
    "port": _port, "address": _text, "facts": _texts, "machine": _text, "is_clear": _flag,
}  # fmt: skip
REFUSAL: Schema = {"error": _text, "exit_code": _code, "kind": _text, "host": _text}
STARTED: Schema = {"started": _rank, "pid": _pid}
READY: Schema = {"ready": _rank, "pid": _pid}
FAILED: Schema = {"failed": _rank, "age_ns": _whole(0, _MAX_NS), "time_ns": _whole(0, _MAX_NS)}
SIGNALLED: Schema = {"signalled": _signal}
PROGRESS: Schema = {"progress": _whole(0, _MAX_NS)}
EVENTS = (STARTED, READY, FAILED, SIGNALLED, PROGRESS)
CHECKED: Schema = {"reason": _text}
DONE: Schema = {"report": _record, "port": _port, "progress": _whole(-1, _MAX_NS)}


def read(payload: bytes, *schemas: Schema) -> dict[str, Any]:
    """Return the fields of a payload that fits one of these schemas. Raises LinkError."""
    content = unpack_json(payload)
    for schema in schemas:
        if type(content) is dict and content.keys() == schema.keys():
            for name, fits in schema.items():
                if not fits(content[name]):
                    why = f"{name} is {_short(content[name])}"
                    raise LinkError(f"what came over the link is not what infini-run sends: {why}")
            return content
    names = _short(" ".join(map(str, content))) if type(content) is dict else _short(content)
    raise LinkError(f"what came over the link is not what infini-run sends: {names}")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
