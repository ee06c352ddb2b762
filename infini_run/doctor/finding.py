"""What a check found out: a name, a grade, and a sentence that says what it means for a launch."""

from __future__ import annotations

from infini_run.record import record

OK, NOTE, PROBLEM = "ok", "note", "problem"


@record
class Finding:
    """One line of the doctor's answer.

    Args:
        name: what was looked at.
        grade: ok; note: a launch works, but differently or with less than it could; problem: a launch fails, or
            training is likely to.
        text: the state, and what it means for a launch.
    """

    name: str
    grade: str
    text: str


def ok(name: str, text: str) -> Finding:
    """Return a finding without advice."""
    return Finding(name=name, grade=OK, text=text)


def note(name: str, text: str) -> Finding:
    """Return a finding that a user should know of."""
    return Finding(name=name, grade=NOTE, text=text)


def failing(name: str, text: str) -> Finding:
    """Return a finding that makes a launch fail."""
    return Finding(name=name, grade=PROBLEM, text=text)
