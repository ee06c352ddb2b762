"""One rank of one attempt in a trace: its process from start to end, and the counts of its output."""

from __future__ import annotations

from infini_run.display.trace_format import slice_event
from infini_run.record import record
from infini_run.report.text import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from infini_run.core.c_structs import Event
    from infini_run.plan.model import Worker

_BAD, _GOOD, _OTHER = "terrible", "good", "grey"  # of the format's reserved color names


@record
class TracedNode:
    """The node whose ranks a trace shows, if it is not this one.

    Attributes:
        host: Its name.
        pid: The number of its launcher in the trace.
        order: The viewer sorts processes by this number.
        number: Returns a new number for one of its ranks.
        begin_ns: When its launcher began: CLOCK_MONOTONIC of this node.
        facts: Shown with its launcher's slices.
    """

    host: str
    pid: int
    order: int
    number: Callable[[], int]
    begin_ns: int
    facts: dict[str, Any]


class RankSpan:
    """One rank of one attempt. Times are CLOCK_MONOTONIC's nanoseconds; 0: that has not happened.

    Args:
        index: The rank's index in the plan.
        worker: The rank in the plan.
        started: The event of its start.
        attempt: The number of the attempt; 0: the first.
        node: The rank's node, if it is not this one.
    """

    def __init__(self, index: int, worker: Worker, started: Event, attempt: int, node: TracedNode | None) -> None:
        self.index = index
        self.worker = worker
        self.name = f"{worker.name}, attempt {attempt}" if attempt else worker.name
        self.pid = started.pid
        self.start_ns = started.time_ns
        self.lost_ns = self.ready_ns = self.stop_ns = 0
        self.end: Event | None = None
        self.samples: list[tuple[int, int, int]] = []  # time, bytes of stdout, bytes of stderr
        self.progress: list[tuple[int, int]] = []  # time, PROGRESS=
        self.is_slow = False
        self._attempt = attempt
        self._facts: dict[str, Any] = {}
        if node is not None:
            self.name += f" on {node.host}"
            self.pid = node.number()
            self._facts = {"host": node.host, "pid": started.pid}

    @property
    def has_pipe(self) -> bool:
        """Whether the launcher reads any of its output, and so can count it."""
        return self.worker.stdout.piped or self.worker.stderr.piped

    def add_sample(self, time_ns: int, volume: tuple[int, int]) -> bool:
        """Add the bytes of stdout and stderr so far. Return whether there were new ones."""
        if (self.samples[-1][1:] if self.samples else (0, 0)) == volume:
            return False
        self.samples.append((max(time_ns, self.start_ns), *volume))
        return True

    def add_progress(self, time_ns: int, value: int, gap_ns: int) -> bool:
        """Add a PROGRESS=. Return whether it was kept: the last one is at least a gap before it."""
        if self.progress and time_ns - self.progress[-1][0] < gap_ns:
            return False
        self.progress.append((max(time_ns, self.start_ns), value))
        return True

    def events(self, now_ns: int, us: Callable[[int], int]) -> list[dict[str, Any]]:
        """Return the events of the trace that show it.

        Args:
            now_ns: The end of a rank that still runs.
            `us`: Turns a time into microseconds of the trace.
        """
        end_ns = self.end.time_ns if self.end else self.lost_ns or now_ns
        stop_ns = min(self.stop_ns or end_ns, end_ns)
        whole = slice_event(self.name, self.pid, us(self.start_ns), us(end_ns))
        events = [{**whole, "cat": "rank", "cname": self._colour(), "args": self._args()}]
        if self.stop_ns:
            events.append({**slice_event("stopping", self.pid, us(stop_ns), us(end_ns)), "cat": "rank"})
        if self.ready_ns:
            ready_ns = min(self.ready_ns, stop_ns)
            events.append({**slice_event("starting", self.pid, us(self.start_ns), us(ready_ns)), "cat": "rank"})
            events.append(self._instant("ready", us(min(self.ready_ns, end_ns))))
        if self.end is not None:
            events.append(self._instant(f"exit: {_end_text(self.end)}", us(end_ns)))
        for time_ns, out, err in self.samples:
            at = {"ph": "C", "ts": us(min(time_ns, end_ns)), "pid": self.pid, "tid": self.pid}
            events.append({"name": "output (bytes)", "cat": "output", **at, "args": {"stdout": out, "stderr": err}})
        for time_ns, value in self.progress:
            at = {"ph": "C", "ts": us(min(time_ns, end_ns)), "pid": self.pid, "tid": self.pid}
            events.append({"name": "progress", "cat": "progress", **at, "args": {"PROGRESS": value}})
        return events

    def _instant(self, name: str, time_us: int) -> dict[str, Any]:
        return {"name": name, "cat": "rank", "ph": "i", "s": "t", "ts": time_us, "pid": self.pid, "tid": self.pid}

    def _colour(self) -> str:
        if self.lost_ns:
            return _BAD
        if self.end is None or self.end.after_stop:
            return _OTHER
        return _BAD if self.end.is_failure else _GOOD

    def _args(self) -> dict[str, Any]:
        args: dict[str, Any] = {
            "rank": self.worker.rank,
            "local_rank": self.worker.local_rank,
            "attempt": self._attempt,
            **self._facts,
        }
        if self.worker.program:
            args |= {"program": self.worker.program, "program_rank": self.worker.program_rank}
        if self.worker.devices:
            args["devices"] = ",".join(self.worker.devices)
        if self.lost_ns:
            args["exit"] = "its node was lost"
        if self.end is not None:
            args |= {
                "exit": _end_text(self.end),
                "failed": self.end.is_failure,
                "stopped": self.end.after_stop,
                "user_s": self.end.user_us / 1e6,
                "system_s": self.end.system_us / 1e6,
                "max_rss_kib": self.end.max_rss_kib,
            }
        return args


def _end_text(end: Event) -> str:
    if end.status_lost:
        return "unknown"
    return signal_name(end.signal) if end.signal else f"code {end.code}"
