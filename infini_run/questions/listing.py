"""The launches of this machine as a table and as JSON. Pure, but for the names of users."""

from __future__ import annotations

import os
import time

from infini_run.control.launch_facts import STATES
from infini_run.questions.running import describe_launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.control.launch_facts import LaunchFacts
    from infini_run.control.launches import FoundLaunch

_PROGRAM = 40  # characters of a command line
_HEADINGS = ("ID", "AGE", "PID", "RANKS", "PROGRESS", "NODES", "GPUS", "JOB", "PROGRAM")


def render_text(found: Sequence[FoundLaunch]) -> str:
    """Return a table with a line for each launch."""
    if not found:
        return "no launches"
    user = os.geteuid()
    has_users = any(each.uid != user for each in found)
    rows = [_HEADINGS, *(_row(each) for each in found)]
    if has_users:
        users = ["USER", *(user_name(each.uid) for each in found)]
        rows = [(row[0], user, *row[1:]) for row, user in zip(rows, users, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(launch: FoundLaunch) -> tuple[str, ...]:
    facts, pid = launch.facts, str(launch.pid or "-")
    if facts is None:
        return launch.launch_id, "-", pid, launch.problem, "-", "-", "-", "-", "-"
    return (
        launch.launch_id,
        _age(time.time() - facts.start_s),
        pid,
        _ranks(facts),
        "-" if facts.progress is None else str(facts.progress),
        _nodes(facts),
        ",".join(facts.devices) or "-",
        facts.job.partition("=")[2] or "-",
        facts.program if len(facts.program) <= _PROGRAM else f"{facts.program[: _PROGRAM - 3]}...",
    )


def _ranks(facts: LaunchFacts) -> str:
    if facts.restart_s is not None:
        return f"restarting in {max(0.0, facts.restart_s - time.time()):.0f} s"
    counts = ", ".join(f"{count} {state}" for state in STATES if (count := facts.counts[state]))
    return counts or f"{facts.world} waiting"


def _nodes(facts: LaunchFacts) -> str:
    """`4`, seen from the head; on one of the nodes `node 2 of 4, ranks 8-15`."""
    if facts.nodes == 1 or facts.node < 0:
        return str(facts.nodes)
    first, _, last = facts.ranks.partition("-")
    return f"node {facts.node} of {facts.nodes}, {f'rank {first}' if first == last else f'ranks {facts.ranks}'}"


def _age(seconds: float) -> str:
    for unit, each_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= each_s:
            return f"{seconds / each_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def render_json(found: Sequence[FoundLaunch]) -> str:
    """Return the launches as one JSON text."""
    import json

    return json.dumps({"launches": [describe_launch(each).to_json() for each in found]}, indent=1)
