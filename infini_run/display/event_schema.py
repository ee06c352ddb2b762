"""The lines of --events: the kind of each and its fields. Pure.

A kind is one of `Event.kind`, but for `launched` and `node_lost`, of which a launch on one machine has no event. A
rank's fields have the names of those of `Exit`, or else of `Event`; docs/reference/events.md has the differences.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fact = dict[str, Any]

SCHEMA = 1  # of the lines; a new kind or field does not change it
# Of several programs, a kind with a rank has these, too. `restarting` has the first one, if that program restarts
# alone; `launched` has `programs`: how many ranks each has.
OF_PROGRAMS = ("program", "program_rank")
KINDS: dict[str, tuple[str, ...]] = {
    "launched": ("launch_id", "run_id", "program", "host", "pid", "nodes", "ranks", "restarts"),
    "started": ("rank", "host", "pid"),
    "ready": ("rank", "host"),
    "progress": ("rank", "host", "value"),
    "exited": ("rank", "host", "pid", "code", "signal", "stopped"),
    "late": ("rank", "host"),
    "hung": ("rank", "host"),
    "signalled": ("signal", "host"),
    "node_lost": ("node", "host", "ranks", "reason"),
    "restarting": ("restarts",),
    "ended": ("code", "signal", "reason"),
}
_TEXT = 300  # characters of one that a user or another program chose


def make_fact(kind: str, time_s: float, *values: object) -> Fact:
    """Return a fact about a launch.

    Args:
        kind: One of KINDS.
        time_s: When it happened, since the epoch.
        values: Of the kind's fields, in their order.
    """
    return {"kind": kind, "time_s": round(time_s, 6), **dict(zip(KINDS[kind], values, strict=True))}


def encode_fact(fact: Fact) -> bytes:
    """Return the line of a fact: JSON in ASCII, without a newline in it."""
    short = {name: value[:_TEXT] if isinstance(value, str) else value for name, value in fact.items()}
    return json.dumps(short, separators=(",", ":")).encode("ascii") + b"\n"
