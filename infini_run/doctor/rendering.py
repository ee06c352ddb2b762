"""The doctor's answer for people, a screen for each machine, and for programs."""

from __future__ import annotations

import os
import textwrap

from infini_run.doctor.finding import NOTE, OK, PROBLEM
from infini_run.errors import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.doctor.machines import Machine

FORMAT = 1
_WHOLE = 4  # machines that are shown with all that is well
_NARROWEST, _WIDEST = 60, 118


def render_text(machines: Sequence[Machine]) -> str:
    """Render for people: every finding of a few machines; of many only what is not ok.

    Args:
        machines: that were looked at, the launcher's first.
    """
    lines: list[str] = []
    width = min(max(_columns(), _NARROWEST), _WIDEST)
    for machine in machines:
        host = str(machine.facts.get("host", ""))
        name = f"{machine.label} ({host})" if host and host != machine.label else machine.label
        lines += ["", f"{printable(name)}: {_summary([machine])}"]
        is_whole = len(machines) <= _WHOLE
        shown = [finding for finding in machine.findings if is_whole or finding.grade != OK]
        longest = max((len(finding.name) for finding in shown), default=0)
        for finding in shown:
            head = f"  {finding.grade.ljust(len(PROBLEM))}  {finding.name.ljust(longest)}  "
            lines += textwrap.wrap(
                head + printable(finding.text),
                width,
                subsequent_indent=" " * len(head),
                break_long_words=False,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
    if len(machines) > 1:
        lines += ["", f"{len(machines)} machines: {_summary(machines)}"]
    return "\n".join(lines[1:])


def render_json(machines: Sequence[Machine]) -> str:
    """Render for programs. machines: as for `render_text`."""
    import json

    answer = {
        "format": FORMAT,
        "problems": _count(machines, PROBLEM),
        "notes": _count(machines, NOTE),
        "machines": [
            {
                "name": machine.label,
                "facts": machine.facts,
                "clock_ahead_s": round(machine.clock_s, 3),
                "findings": [
                    {"name": finding.name, "grade": finding.grade, "text": finding.text}
                    for finding in machine.findings
                ],
            }
            for machine in machines
        ],
    }
    return json.dumps(answer, indent=1)


def _count(machines: Sequence[Machine], grade: str) -> int:
    return sum(finding.grade == grade for machine in machines for finding in machine.findings)


def _summary(machines: Sequence[Machine]) -> str:
    counts = [(_count(machines, PROBLEM), "problem"), (_count(machines, NOTE), "note")]
    words = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts if count]
    return ", ".join(words) if words else "a launch finds all that it needs"


def _columns() -> int:
    """Return the width of the terminal; 100 if there is none."""
    try:
        return os.get_terminal_size(1).columns
    except OSError:
        return 100
