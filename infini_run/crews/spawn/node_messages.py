"""The control messages between a caller and the spawn server of a node: each kind, its fields, their bounds. Pure.

Each is a JSON object of one key, the kind, beside the streams (stream_multiplexer.py). A worker's number is its
identity on both sides. The one rule: code behind `read` can rely on every value.
"""

from __future__ import annotations

from infini_run.crews.spawn.mux_stream import nonsense
from infini_run.multinode.link.message_schema import (
    are_texts,
    are_variables,
    fitting,
    is_count,
    is_flag,
    is_nproc,
    is_pid,
    is_port,
    is_record,
    is_seconds,
    is_signal,
    is_text,
    whole_number,
)
from infini_run.value_types import MAX_INT, MOST_RANKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from infini_run.multinode.link.message_schema import Schema

_is_number = whole_number(1, MAX_INT)  # of a worker, or of a question
_is_size = whole_number(1, MAX_INT)


def _is_string(value: Any) -> bool:
    return type(value) is str


def _are_strings(value: Any) -> bool:
    return type(value) is list and all(map(_is_string, value))


def _are_nprocs(value: Any) -> bool:
    return type(value) is list and all(map(is_nproc, value))


def _are_numbered_ranks(value: Any) -> bool:
    """Return whether these are pairs of a worker's number and its rank."""
    if type(value) is not list or not all(type(pair) is list and len(pair) == 2 for pair in value):
        return False
    return all(_is_number(number) and is_count(rank) for number, rank in value)


def _is_error(value: Any) -> bool:
    """Return whether this is the error of a node."""
    return type(value) is dict and value.keys() == _ERROR.keys() and all(_ERROR[name](value[name]) for name in _ERROR)


_ERROR: Schema = {
    "is_usage": is_flag, "text": _is_string, "step": _is_string, "errno": is_count,
    "rank": lambda value: value is None or is_count(value),
}  # fmt: skip
_WORKER: Schema = {"worker": _is_number}

# caller to spawn server
DOWN: dict[str, Schema] = {
    "setup": {
        "path": _are_strings, "argv": _are_strings, "env": are_variables, "nproc": _are_nprocs, "preload": are_texts,
        "is_silent": is_flag, "start_timeout_s": lambda value: value is None or is_seconds(value),
        "flags": is_record, "node": is_count,
    },
    "start": {
        "id": _is_number, "workers": _are_numbered_ranks, "restarts": is_count, "apart": is_flag, "node": is_count,
        "nnodes": _is_size, "first": is_count, "world_size": _is_size, "host": is_text, "address": is_text,
        "port": is_port,
    },
    "signal": {**_WORKER, "number": is_signal},
    "stop": {**_WORKER, "number": is_signal},
    "kill": _WORKER,
    "close": _WORKER,
}  # fmt: skip
# spawn server to caller
UP: dict[str, Schema] = {
    "up": {"nproc": whole_number(1, MOST_RANKS), "port": is_port, "notices": _are_strings},
    "refused": {"error": _is_error},
    "answer": {"id": _is_number, "port": is_port, "error": lambda value: value is None or _is_error(value)},
    "pid": {**_WORKER, "value": is_pid},
    "pinged": _WORKER,
    "exit": {**_WORKER, "value": is_record},  # an Exit: record_codec.py
    "ended": {**_WORKER, "value": _is_string},  # the stuck processes, in words
    "gone": {**_WORKER, "value": is_flag},  # what was stuck; whether that is known
}


def read(message: Mapping[str, Any], table: Mapping[str, Schema]) -> tuple[str, dict[str, Any]]:
    """Return the kind of a message and its fields. Raises LinkError: the table has no such message."""
    kind = next(iter(message), "")
    if len(message) != 1 or kind not in table:
        raise nonsense(ascii(kind)[:40])
    return kind, fitting(message[kind], table[kind])
