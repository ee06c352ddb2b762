"""The JSON frames of the Link: the fields of each kind, and the type and bounds of each field. Pure.

The one rule: code behind `read` can rely on every value. Whatever a node or a head sends raises LinkError here, or
nothing at all.
"""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.errors import LinkError
from infini_run.multinode.link.protocol import unpack_json
from infini_run.value_types import MAX_INT, MOST_RANKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Schema = dict[str, Callable[[Any], bool]]

_MAX_NS = 2**63 - 1
_FOREVER_S = 1e12


def whole_number(low: int, high: int) -> Callable[[Any], bool]:
    """Return the check of a field that is a whole number from `low` to `high`."""
    return lambda value: type(value) is int and low <= value <= high


def is_text(value: Any) -> bool:
    """Return whether it is a text for a variable, an argument, or a path: it has no zero byte."""
    return type(value) is str and "\0" not in value and (value.isascii() or _is_a_path(value))


def _is_a_path(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # a surrogate that is no escaped byte
        return False
    return True


def _ticks(value: Any) -> bool:
    """Return whether it is a number of the kernel's, as text."""
    return type(value) is str and value.isascii() and value.isdigit() and len(value) <= 20


def are_texts(value: Any) -> bool:
    """Return whether it is a list of texts."""
    return type(value) is list and all(map(is_text, value))


def is_flag(value: Any) -> bool:
    """Return whether it is true or false."""
    return type(value) is bool


def is_seconds(value: Any) -> bool:
    """Return whether it is a duration, in seconds."""
    return type(value) in (int, float) and 0 <= value <= _FOREVER_S


def are_variables(value: Any) -> bool:
    """Return whether it is an environment."""
    if type(value) is not dict or not are_texts(list(value.values())):
        return False
    return all(is_text(name) and name and "=" not in name for name in value)


def is_record(value: Any) -> bool:
    """Return whether it may be a record; record_codec.py checks its fields."""
    return type(value) is dict


def _workers(value: Any) -> bool:
    """Return whether it is what workers need; empty: ranks are the workers."""
    fits = {"gpus_per_proc": is_count, "nproc": is_nproc, "log_dir": is_text, "environ": are_variables}
    if type(value) is not dict or value.keys() not in (set(), fits.keys()):
        return False
    return all(fits[name](item) for name, item in value.items())


def is_nproc(value: Any) -> bool:
    """Return whether it is how many ranks a node has: a number, or what counts them there."""
    return value in ("gpu", "cpu", "auto") if type(value) is str else whole_number(1, MOST_RANKS)(value)


def _counts(value: Any) -> bool:
    """Return whether it is how many ranks each of several programs has; empty: there is one program."""
    return type(value) is list and all(map(whole_number(0, MOST_RANKS), value))


def _ports(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(is_port, value))


def _programs(value: Any) -> bool:
    """Return whether it is where several programs run; empty: there is one program."""
    fits: Schema = {
        "first": is_count, "size": whole_number(1, MAX_INT), "most": whole_number(1, MOST_RANKS),
        "node": is_count, "nnodes": whole_number(1, MAX_INT), "addr": is_text, "port": is_port, "hosts": are_texts,
    }  # fmt: skip
    return type(value) is list and all(
        type(each) is dict and each.keys() == fits.keys() and all(fits[name](item) for name, item in each.items())
        for each in value
    )


is_port, _rank, is_pid = whole_number(0, 65535), whole_number(-1, MAX_INT), whole_number(-1, MAX_INT)
is_count, _code, is_signal = whole_number(0, MAX_INT), whole_number(0, 255), whole_number(0, 64)


def _ranks(value: Any) -> bool:
    return type(value) is list and all(map(_rank, value))


def _records(value: Any) -> bool:
    """Records; record_codec.py checks their fields."""
    return type(value) is list and len(value) <= MOST_RANKS


def _progresses(value: Any) -> bool:
    """Check, for each rank, its number, its PROGRESS=, the time of that in nanoseconds, and how many it has sent."""
    if type(value) is not list or len(value) > MOST_RANKS or any(type(entry) is not list for entry in value):
        return False
    fits = whole_number(0, _MAX_NS)
    return all(len(entry) == 4 and all(map(fits, entry)) for entry in value)


# head to agent
SPEC: Schema = {
    "version": is_text, "is_by_hand": is_flag, "silence_s": is_seconds, "cwd": is_text, "environ": are_variables,
    "options": is_record, "has_stream": is_flag, "asked": are_texts, "observe": are_texts,
    "lease_s": is_seconds, "launch_id": is_text, "workers": _workers, "names_keywords": is_flag,
}  # fmt: skip
LAUNCH: Schema = {
    "node": is_count, "nnodes": whole_number(1, MAX_INT), "nproc": whole_number(1, MOST_RANKS), "first": is_count,
    "world_size": whole_number(1, MAX_INT), "most": whole_number(1, MOST_RANKS), "host": is_text,
    "master_addr": is_text, "master_port": is_port, "launch_id": is_text, "restarts": is_count, "heading": is_text,
    "programs": _programs,
}  # fmt: skip
SIGNAL: Schema = {"signal": is_signal, "ranks": _ranks, "by": is_text}
STOP: Schema = {"signal": is_signal, "by_signal": is_flag, "after_s": is_seconds}
STOP_PROGRAM: Schema = {"program": is_text, "with_snapshot": is_flag}  # which is to restart alone
USAGE_REQUEST: Schema = {"ranks": _ranks}
CAUSE: Schema = {"ranks": _ranks}
START: Schema = {"programs": are_texts}
RESTART: Schema = {"program": is_text, "restarts": is_count, "heading": is_text}  # of one program alone
SNAPSHOT_REQUEST: Schema = {"is_before_stop": is_flag}
QUESTION: Schema = {"number": is_count, "request": is_record}
GOODBYE: Schema = {"exit_code": _code}
TURNED_AWAY: Schema = {  # a GOODBYE before there was a SPEC
    "error": is_text, "may_return": is_flag, "launch_id": is_text, "timeout_s": is_seconds,
}  # fmt: skip
# agent to head
HELLO: Schema = {
    "version": is_text, "host": is_text, "pid": is_pid, "start_ticks": _ticks, "nproc": whole_number(1, MOST_RANKS),
    "counts": _counts, "ports": _ports, "address": is_text, "facts": are_texts, "machine": is_text,
    "is_clear": is_flag,
}  # fmt: skip
REFUSAL: Schema = {"error": is_text, "exit_code": _code, "kind": is_text, "host": is_text}
STARTED: Schema = {"started": _rank, "pid": is_pid}
READY: Schema = {"ready": _rank, "pid": is_pid}
FAILED: Schema = {
    "failed": _rank, "age_ns": whole_number(0, _MAX_NS), "time_ns": whole_number(0, _MAX_NS), "asks_again": is_flag,
}  # fmt: skip
EXITED: Schema = {"exited": _ranks, "failed_ranks": _ranks}
SIGNALLED: Schema = {"signalled": is_signal}
PROGRESS: Schema = {"progress": _progresses, "time_ns": whole_number(0, _MAX_NS)}
SUSPECTS: Schema = {"suspects": is_flag}
FINISHED: Schema = {"finished": is_text}  # a program with --ends_job, on this node
UP: Schema = {"up": is_text}  # a program that others wait for, on this node
NOT_STARTED: Schema = {"not_started": is_text, "problem": is_text, "is_final": is_flag}  # a program, after RESTART
EVENTS = (STARTED, READY, EXITED, FAILED, SIGNALLED, PROGRESS, SUSPECTS, FINISHED, UP, NOT_STARTED)
CHECKED: Schema = {"reason": is_text}
SNAPSHOTS: Schema = {"snapshots": _records, "ranks": _ranks}
ANSWERED: Schema = {"number": is_count, "answer": is_record}
DONE: Schema = {"report": is_record, "ports": _ports, "progress": whole_number(-1, _MAX_NS)}
PROGRAM_DONE: Schema = {  # after STOP_PROGRAM
    "program": is_text, "report": is_record, "progress": whole_number(-1, _MAX_NS), "has_ended": is_flag,
}  # fmt: skip


def read(payload: bytes, *schemas: Schema) -> dict[str, Any]:
    """Return the fields of a payload that fits one of these schemas. Raises LinkError."""
    return fitting(unpack_json(payload), *schemas)


def fitting(content: Any, *schemas: Schema) -> dict[str, Any]:
    """Return the fields of a JSON object that fits one of these schemas. Raises LinkError."""
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
