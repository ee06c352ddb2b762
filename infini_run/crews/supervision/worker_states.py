"""The states of a worker, seen from its supervisor, and its reaction to every event in each of them.

Pure, and the only place that decides this. The table has no blank cell. An event that cannot happen in a state is
IMPOSSIBLE there, and raises: it is a bug. One that changes nothing stays in the state. docs/architecture/crews.md
draws the table.
"""

from __future__ import annotations

STATES = ("stopped", "starting", "ready", "busy", "stopping", "failed")
EVENTS = {
    "start": "the spawner made a process for the worker",
    "ready": "the worker takes tasks",
    "hand": "the crew sent the worker a task",
    "idle": "the worker's last task ended",
    "drain": "the worker gets no more tasks: it finishes those that it has, then ends",
    "stop": "the worker must end now, its tasks undone: another worker failed, or nothing waits for the tasks",
    "deadline": "a deadline passed: for ready, a sign of life, or the end",
    "channel_end": "the channel ended with END",
    "channel_broken": "the channel ended without END, or with bytes that are no message",
    "exit": "the process ended",
    "reaped": "nothing is left of the process and of what it started, or SIGKILL did not end that",
}

# Actions, done when the next state is entered:
NOTHING = ""
BEGIN = "begin"  # set the deadline of ready
SERVE = "serve"  # hand it tasks that were kept for it
SHUT_DOWN = "shut_down"  # send Shutdown and END; set the deadline of its end
STOP = "stop"  # stop signal, SIGKILL after the grace
AWAIT_EXIT = "await_exit"  # set the deadline of its exit
STOP_LATE = "stop_late"  # stop signal, at which its Python stack is written; then as AWAIT_EXIT
FAIL = "fail"  # once: fail its tasks, and let the restart policy decide; then STOP
RELEASE = "release"  # close what is held for its process
IMPOSSIBLE = "impossible"

_NO = (IMPOSSIBLE, IMPOSSIBLE)

TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "stopped": {
        "start": ("starting", BEGIN),
        "ready": _NO,
        "hand": _NO,
        "idle": _NO,
        "drain": ("stopped", NOTHING),
        "stop": ("stopped", NOTHING),
        "deadline": _NO,
        "channel_end": _NO,
        "channel_broken": _NO,
        "exit": _NO,
        "reaped": _NO,
    },
    "starting": {
        "start": _NO,
        "ready": ("ready", SERVE),
        "hand": _NO,
        "idle": _NO,
        "drain": ("stopping", SHUT_DOWN),
        "stop": ("stopping", STOP),
        "deadline": ("failed", STOP_LATE),
        "channel_end": ("failed", AWAIT_EXIT),
        "channel_broken": ("failed", AWAIT_EXIT),
        "exit": ("failed", FAIL),
        "reaped": _NO,
    },
    "ready": {
        "start": _NO,
        "ready": ("ready", NOTHING),
        "hand": ("busy", NOTHING),
        "idle": _NO,
        "drain": ("stopping", SHUT_DOWN),
        "stop": ("stopping", STOP),
        "deadline": _NO,
        "channel_end": ("failed", AWAIT_EXIT),
        "channel_broken": ("failed", AWAIT_EXIT),
        "exit": ("failed", FAIL),
        "reaped": _NO,
    },
    "busy": {
        "start": _NO,
        "ready": ("busy", NOTHING),
        "hand": ("busy", NOTHING),
        "idle": ("ready", SERVE),
        "drain": ("stopping", SHUT_DOWN),
        "stop": ("stopping", STOP),
        "deadline": ("failed", STOP_LATE),
        "channel_end": ("failed", AWAIT_EXIT),
        "channel_broken": ("failed", AWAIT_EXIT),
        "exit": ("failed", FAIL),
        "reaped": _NO,
    },
    "stopping": {
        "start": _NO,
        "ready": ("stopping", NOTHING),
        "hand": _NO,
        "idle": ("stopping", NOTHING),
        "drain": ("stopping", NOTHING),
        "stop": ("stopping", STOP),
        "deadline": ("stopping", STOP),
        "channel_end": ("stopping", NOTHING),
        "channel_broken": ("stopping", STOP),
        "exit": ("stopping", STOP),
        "reaped": ("stopped", RELEASE),
    },
    "failed": {
        "start": ("starting", BEGIN),
        "ready": ("failed", NOTHING),
        "hand": _NO,
        "idle": ("failed", NOTHING),
        "drain": ("failed", NOTHING),
        "stop": ("failed", STOP),
        "deadline": ("failed", FAIL),
        "channel_end": ("failed", NOTHING),
        "channel_broken": ("failed", NOTHING),
        "exit": ("failed", FAIL),
        "reaped": ("failed", RELEASE),
    },
}


def transition(state: str, event: str) -> tuple[str, str]:
    """Return the next state and the action. AssertionError: that cannot happen."""
    after, action = TABLE[state][event]
    assert action != IMPOSSIBLE, f"a worker that is {state} cannot have a {event!r}"
    return after, action


def draw() -> str:
    """Return the table as Markdown: a row for each event, a column for each state."""
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
