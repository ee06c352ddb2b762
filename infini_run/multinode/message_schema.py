"""What the frames of a link may say: of each kind its fields, of each field the type and the bounds. Pure.

The one rule: behind this every value is what it is said to be. Nothing that a node or a head says can raise more than
LinkError here, or anything later.
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

    Form = dict[str, Callable[[Any], bool]]

_MAX_NS = 2**63 - 1
_FOREVER_S = 1e12


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _text(value: Any) -> bool:
    """Also for a variable, an argument or a path: none of them can have a zero byte."""
    return type(value) is str and "\0" not in value and (value.isascii() or _is_a_path(value))


def _is_a_path(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return False
    return True


def _ticks(value: Any) -> bool:
    """A number that is passed on as text."""
    return type(value) is str and value.isascii() and value.isdigit() and len(value) <= 20


def _texts(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


def _flag(value: Any) -> bool:
    return type(value) is bool


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _FOREVER_S


def _variables(value: Any) -> bool:
    """Of an environment."""
    if type(value) is not dict or not _texts(list(value.values())):
        return False
    return all(_text(name) and name and "=" not in name for name in value)


def _record(value: Any) -> bool:
    """Looked into by who knows which one is due (record_codec.py)."""
    return type(value) is dict


_port, _rank, _pid, _ns = _whole(0, 65535), _whole(-1, MAX_INT), _whole(-1, MAX_INT), _whole(-_MAX_NS, _MAX_NS)
_count, _code, _signal = _whole(0, MAX_INT), _whole(0, 255), _whole(0, 64)


def _ranks(value: Any) -> bool:
    return type(value) is list and all(map(_rank, value))


# head to agent
SPEC: Form = {
    "version": _text, "is_by_hand": _flag, "silence_s": _seconds, "cwd": _text, "environ": _variables,
    "options": _record, "has_stream": _flag, "asked": _texts, "watch": _texts,
}  # fmt: skip
GO: Form = {
    "node": _count, "nnodes": _whole(1, MAX_INT), "nproc": _whole(1, MOST_RANKS), "first": _count,
    "world_size": _whole(1, MAX_INT), "most": _whole(1, MOST_RANKS), "host": _text, "master_addr": _text,
    "master_port": _port, "launch_id": _text, "restarts": _count, "heading": _text,
}  # fmt: skip
SIGNAL: Form = {"signal": _signal}
STOP: Form = {"signal": _signal, "is_told": _flag}
LOOK: Form = {"ranks": _ranks}
BYE: Form = {"exit_code": _code}
TURNED_AWAY: Form = {"error": _text}  # a BYE before there was a SPEC
ASK: Form = {"at_ns": _ns}
# agent to head
HELLO: Form = {
    "version": _text, "host": _text, "pid": _pid, "begun": _ticks, "nproc": _whole(1, MOST_RANKS), "port": _port,
    "address": _text, "told": _texts,
}  # fmt: skip
REFUSAL: Form = {"error": _text, "exit_code": _code, "kind": _text, "host": _text}
STARTED: Form = {"started": _rank, "pid": _pid}
READY: Form = {"ready": _rank, "pid": _pid}
FAILED: Form = {"failed": _rank, "age_ns": _whole(0, _MAX_NS)}
TOLD: Form = {"told": _signal}
ANSWER: Form = {"at_ns": _ns, "wall_ns": _ns, "monotonic_ns": _ns}
DONE: Form = {"report": _record, "port": _port}


def read(payload: bytes, *forms: Form) -> dict[str, Any]:
    """The words of a frame that has one of these forms. Raises LinkError."""
    said = unpack_json(payload)
    for form in forms:
        if type(said) is dict and said.keys() == form.keys():
            for name, fits in form.items():
                if not fits(said[name]):
                    why = f"{name} is {_short(said[name])}"
                    raise LinkError(f"what came over the link is not what infini-run sends: {why}")
            return said
    names = _short(" ".join(map(str, said))) if type(said) is dict else _short(said)
    raise LinkError(f"what came over the link is not what infini-run sends: {names}")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
