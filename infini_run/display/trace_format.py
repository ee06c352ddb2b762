"""The "Trace Event Format" (Google, 2016): the JSON that ui.perfetto.dev, chrome://tracing and torch.profiler share.

Slices (ph X), instants (i), counters (C), names (M). Times are microseconds since the epoch, so that the traces of
several nodes lie side by side.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

IMPORTS = "preload"  # the span of the imports of --preload
COUNT_GAP_NS = 100_000_000  # the least time between two counts of the output


def slice_event(name: str, pid: int, start_us: int, end_us: int) -> Json:
    """Return a slice; one that would end before its start has no length."""
    return {"name": name, "ph": "X", "ts": start_us, "dur": max(0, end_us - start_us), "pid": pid, "tid": pid}


def process_names(pid: int, name: str, order: int) -> list[Json]:
    """Return the events that name a process and place it among the others.

    Args:
        pid: Its number in the trace.
        name: Its name in the viewer.
        order: The viewer sorts processes by this number.
    """
    facts = {
        "process_name": {"name": name},
        "process_sort_index": {"sort_index": order},
        "thread_name": {"name": name},
    }
    return [{"name": fact, "ph": "M", "ts": 0, "pid": pid, "tid": pid, "args": args} for fact, args in facts.items()]


def trace_content(names: list[Json], events: list[Json], other: Json) -> Json:
    """Return the content of a trace, its events in the order of time."""
    events = sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(path: str, content: Json) -> str:
    """Write the file, whole or not at all. Return the reason if that was not possible, else an empty text."""
    import json

    from infini_run.system.secure_files import write_atomic

    try:
        write_atomic(path, json.dumps(content, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        return f"the trace {path} cannot be written: {error.strerror}"
    return ""
