"""A worker of a crew, seen from its supervisor: six states, and what each does with everything that can happen.

Pure, and the only place that knows. The table has no blank cell: what cannot happen in a state says so (IMPOSSIBLE is
a mistake of ours, and raises), what changes nothing there says that too. docs/crews.md draws it.
"""

from __future__ import annotations

STATES = ("stopped", "starting", "ready", "busy", "stopping", "failed")
EVENTS = {
    "start": "a process was made for it",
    "ready": "it says that it takes tasks",
    "hand": "a task was sent to it",
    "idle": "the last task that it had has ended",
    "tell": "the crew ends: it is to do what it has, and end",
    "stop": "it is to end now, whatever it does: for another worker's sake, or because nobody waits any more",
    "late": "what was to happen by now has not: ready, a sign of life, its end",
    "end": "its channel has ended with END",
    "break": "its channel has ended without END, or with what is no message",
    "exit": "its process has ended",
    "gone": "nothing is left of it, nor of what it had started",
}

# What is done, beside going into the next state:
NOTHING = ""
BEGIN = "begin"  # count from here on how long it takes to be ready
SERVE = "serve"  # hand it what was kept for it
TELL = "tell"  # Shutdown and END down its channel; count how long it takes
STOP = "stop"  # stop signal, SIGKILL after the grace
AWAIT = "await"  # its exit is there in a moment; count
BLAME = "blame"  # it failed: its tasks fail with it, then STOP
SETTLE = "settle"  # close what is ours of it, and let the policy decide
IMPOSSIBLE = "impossible"

_NO = (IMPOSSIBLE, IMPOSSIBLE)

TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "stopped": {
        "start": ("starting", BEGIN),
        "ready": _NO,
        "hand": _NO,
        "idle": _NO,
        "tell": ("stopped", NOTHING),
        "stop": ("stopped", NOTHING),
        "late": _NO,
        "end": _NO,
        "break": _NO,
        "exit": _NO,
        "gone": _NO,
    },
    "starting": {
        "start": _NO,
        "ready": ("ready", SERVE),
        "hand": _NO,
        "idle": _NO,
        "tell": ("stopping", TELL),
        "stop": ("stopping", STOP),
        "late": ("failed", BLAME),
        "end": ("failed", AWAIT),
        "break": ("failed", AWAIT),
        "exit": ("failed", BLAME),
        "gone": _NO,
    },
    "ready": {
        "start": _NO,
        "ready": ("ready", NOTHING),
        "hand": ("busy", NOTHING),
        "idle": _NO,
        "tell": ("stopping", TELL),
        "stop": ("stopping", STOP),
        "late": _NO,
        "end": ("failed", AWAIT),
        "break": ("failed", AWAIT),
        "exit": ("failed", BLAME),
        "gone": _NO,
    },
    "busy": {
        "start": _NO,
        "ready": ("busy", NOTHING),
        "hand": ("busy", NOTHING),
        "idle": ("ready", SERVE),
        "tell": ("stopping", TELL),
        "stop": ("stopping", STOP),
        "late": ("failed", BLAME),
        "end": ("failed", AWAIT),
        "break": ("failed", AWAIT),
        "exit": ("failed", BLAME),
        "gone": _NO,
    },
    "stopping": {
        "start": _NO,
        "ready": ("stopping", NOTHING),
        "hand": _NO,
        "idle": ("stopping", NOTHING),
        "tell": ("stopping", NOTHING),
        "stop": ("stopping", STOP),
        "late": ("stopping", STOP),
        "end": ("stopping", NOTHING),
        "break": ("stopping", STOP),
        "exit": ("stopping", STOP),
        "gone": ("stopped", SETTLE),
    },
    "failed": {
        "start": ("starting", BEGIN),
        "ready": ("failed", NOTHING),
        "hand": _NO,
        "idle": ("failed", NOTHING),
        "tell": ("failed", NOTHING),
        "stop": ("failed", STOP),
        "late": ("failed", BLAME),
        "end": ("failed", NOTHING),
        "break": ("failed", NOTHING),
        "exit": ("failed", BLAME),
        "gone": ("failed", SETTLE),
    },
}


def step(state: str, event: str) -> tuple[str, str]:
    """The next state, and what is to be done."""
    after, action = TABLE[state][event]
    assert action != IMPOSSIBLE, f"a worker that is {state} cannot have a {event!r}"
    return after, action


def draw() -> str:
    """The table as Markdown: a row for each event, a column for each state."""
    rows = ["| | " + " | ".join(STATES) + " |", "|---" * (len(STATES) + 1) + "|"]
    for event in EVENTS:
        rows.append("| " + " | ".join([f"**{event}**", *(_cell(state, event) for state in STATES)]) + " |")
    return "\n".join(rows)


def _cell(state: str, event: str) -> str:
    after, action = TABLE[state][event]
    if action == IMPOSSIBLE:
        return "impossible"
    to = "stays" if after == state else f"→ {after}"
    return f"{to}, {action}" if action else to
