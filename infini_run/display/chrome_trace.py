"""A trace of the launch: plan, spawn, ready, output, exit, stop, sweep. Written once, at the end.

Each process of the trace is a process of the launch. Its number there is its pid. In a trace of many nodes, two nodes
may have the same pid, so the trace has its numbers instead.

No timer runs for the trace. It counts the output of ranks after an event, at most ten times a second, and once more
after the last event.
"""

from __future__ import annotations

import os
import time

from infini_run.core.c_structs import Event
from infini_run.display.rank_span import RankSpan
from infini_run.display.trace_format import COUNT_GAP_NS, process_names, slice_event, trace_content, write_trace
from infini_run.errors import printable
from infini_run.report.text import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, Protocol

    from infini_run.display.rank_span import TracedNode
    from infini_run.plan.model import Plan

    class Volumes(Protocol):
        """A group, as far as a trace reads it: how much each worker has written."""

        def volume(self, worker: int) -> tuple[int, int]:
            """Return the bytes of stdout and of stderr so far."""


MAX_SAMPLES = 200_000  # kept of all ranks; past that every second one goes, and counts become half as frequent
_MAX_INSTANTS = 10_000  # events without a bound on their number, such as signals that are forwarded


class ChromeTrace:
    """The trace of the ranks of one node. Times are CLOCK_MONOTONIC's nanoseconds.

    Args:
        path: The absolute path of the file that `write` makes.
        gap_ns: The least time between two counts of the output.
        max_samples: How many counts to keep of all ranks.
        node: The node of the ranks. None: this one.
    """

    def __init__(
        self, path: str, *, gap_ns: int = COUNT_GAP_NS, max_samples: int = MAX_SAMPLES, node: TracedNode | None = None
    ) -> None:
        self.path = path
        self._node = node
        self._pid = os.getpid() if node is None else node.pid
        self._gap_ns = gap_ns
        self._max_samples = max_samples
        self._count = 0
        self._next_ns = 0
        self._is_behind = False  # an event came since the last count
        self._has_pipes = False
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._begin_ns = time.monotonic_ns() if node is None else node.begin_ns
        self._plan: Plan | None = None
        self._group: Volumes | None = None
        self._live: dict[int, RankSpan] = {}  # by index
        self._spans: list[RankSpan] = []  # of all attempts
        self._attempt = 0  # as TORCHELASTIC_RESTART_COUNT
        self._attempts: dict[str, int] = {}  # of programs that restart alone
        self._restarting: set[str] = set()  # those whose ranks are stopped for that, while the others run
        self._known_by = ""  # the program whose exit has shown the stop: it may restart alone
        self._instant_count = 0
        self._events: list[dict[str, Any]] = []
        self._spawn_ns = self._spawned_ns = self._stop_ns = self._last_exit_ns = 0
        self._written = False

    # ---- the launch

    def begin(self, plan: Plan, group: Volumes, *, now_ns: int = 0) -> None:
        """Begin an attempt, before its ranks start.

        Args:
            plan: The plan of the attempt.
            group: Counts the output of the ranks.
            now_ns: When the attempt began; 0: now.
        """
        now_ns = now_ns or time.monotonic_ns()
        if self._plan is None:
            self._slice("plan", self._begin_ns, now_ns, {"world_size": plan.world_size, "file": plan.workers[0].file})
        self._plan, self._group = plan, group
        self._has_pipes = any(worker.stdout.piped or worker.stderr.piped for worker in plan.workers)
        self._spawn_ns = self._spawned_ns = now_ns
        self._stop_ns = self._last_exit_ns = 0

    def add_span(self, name: str, start_ns: int, end_ns: int, text: str = "") -> None:
        """Add a span of the launcher's own work. The text stands beside it."""
        self._instant_count += 1
        if self._instant_count <= _MAX_INSTANTS:
            self._slice(name, start_ns, end_ns, {"text": text} if text else None)

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        getattr(self, f"_on_{event.kind}", self._on_other)(event)

    def renew(self, attempt: int) -> None:
        """Set the number of the next attempt."""
        self._attempt = attempt

    def stop(self, now_ns: int = 0) -> None:
        """Record the stop of the ranks. now_ns: when; 0: now."""
        self._stop(now_ns or time.monotonic_ns())

    def _stop(self, time_ns: int, known_by: str = "") -> None:
        """Record a stop. known_by: the program whose exit shows it, and which may restart alone. Empty: none."""
        self._known_by = known_by if not self._stop_ns or known_by == self._known_by else ""
        if self._stop_ns:
            return
        self._stop_ns = time_ns
        for span in self._live.values():
            span.stop_ns = max(time_ns, span.start_ns)

    def _stop_program(self, name: str, time_ns: int) -> None:
        if self._stop_ns and self._known_by == name:  # a head says it after the exits
            self._stop_ns, self._known_by = 0, ""
            for span in self._live.values():
                span.stop_ns = 0
        for span in self._live.values():
            if span.worker.program == name:
                span.stop_ns = max(time_ns, span.start_ns)

    def run_due(self, *, at_once: bool = False) -> None:
        """Count the output if the last count is long enough ago, or `at_once`."""
        now_ns = time.monotonic_ns()
        if self._group is None or not self._has_pipes:
            return
        self._is_behind = now_ns < self._next_ns and not at_once
        if self._is_behind:
            return
        self.sample(now_ns)

    def sample(self, now_ns: int) -> None:
        """Count the output, unless a long job's longer gap since the last count has not passed."""
        if now_ns < self._next_ns - COUNT_GAP_NS:
            return
        self._next_ns = now_ns + self._gap_ns
        for span in self._live.values():
            self._sample(span, now_ns)
        if self._count > self._max_samples:
            self._thin()

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the next count, at most `asked_s`. None: there is no limit."""
        if not self._is_behind:
            return asked_s
        wait_s = max(0.0, (self._next_ns - time.monotonic_ns()) / 1e9)
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def on_disconnect(self, now_ns: int) -> None:
        """Record the loss of the connection to the node: the end of its live ranks is unknown."""
        for span in self._live.values():
            span.lost_ns = max(now_ns, span.start_ns)
        self.end(now_ns)

    def end(self, now_ns: int = 0) -> None:
        """End the attempt, before the group closes. now_ns: when; 0: now."""
        if self._live and not now_ns:
            self.run_due(at_once=True)
        now_ns = now_ns or time.monotonic_ns()
        self._live.clear()
        self._group, self._is_behind = None, False
        if self._spawn_ns:
            self._close_attempt(now_ns)

    # ---- events

    def _on_started(self, event: Event) -> None:
        assert self._plan is not None
        worker = self._plan.workers[event.worker]
        again = self._attempts.get(worker.program, 0)
        self._restarting.discard(worker.program)
        span = RankSpan(event.worker, worker, event, again or self._attempt, self._node)
        self._live[event.worker] = span
        self._spans.append(span)
        if not again:
            self._spawned_ns = max(self._spawned_ns, event.time_ns)

    def _on_ready(self, event: Event) -> None:
        if event.worker in self._live:
            self._live[event.worker].ready_ns = event.time_ns

    def _on_exited(self, event: Event) -> None:
        span = self._live.get(event.worker)
        stops_alone = span is not None and span.worker.program in self._restarting
        if event.after_stop and not stops_alone:  # the core may have stopped all before anybody else knew
            known_by = "" if span is None else span.worker.program
            self._stop(min(self._last_exit_ns or event.time_ns, event.time_ns), known_by)
        self._live.pop(event.worker, None)
        if span is None:
            return
        span.end = event
        span.stop_ns = span.stop_ns if event.after_stop else 0  # else the others were stopped because of it
        self._sample(span, event.time_ns)
        self._last_exit_ns = max(self._last_exit_ns, event.time_ns)

    def _on_signalled(self, event: Event) -> None:
        self._stop(event.time_ns)
        self._instant(f"signalled {signal_name(event.signal)}", event)

    def _on_forwarded(self, event: Event) -> None:
        self._instant(f"passed {signal_name(event.signal)} on", event)

    def _on_restarting(self, event: Event) -> None:
        if event.name:
            self._attempts[event.name] = event.code
            self._restarting.add(event.name)
            self._stop_program(event.name, event.time_ns)
        else:
            self._attempt = event.code
        self._instant(f"restart {event.code}{' of ' * bool(event.name)}{event.name}", event)

    def _on_leftover(self, event: Event) -> None:
        self._instant(f"left behind: {printable(event.name)}", event, {"pid": event.pid})

    def _on_stuck(self, event: Event) -> None:
        self._instant(f"stuck: {printable(event.name)}", event, {"pid": event.pid, "state": chr(event.code)})

    def _on_ended(self, event: Event) -> None:
        self._close_attempt(event.time_ns)

    def _on_other(self, event: Event) -> None:
        self._instant(event.kind.replace("_", " "), event)

    # ---- progress

    def note_progress(self, index: int, value: int, time_ns: int) -> None:
        """Record the PROGRESS= of a rank, as often as its output at most."""
        span = self._live.get(index)
        if span is not None and span.add_progress(time_ns, value, self._gap_ns):
            self._count += 1
            if self._count > self._max_samples:
                self._thin()

    def note_slow(self, ranks: Collection[int], time_ns: int) -> None:
        """Record which ranks are slow from a time on."""
        for span in self._live.values():
            is_slow = span.worker.rank in ranks
            if is_slow != span.is_slow:
                span.is_slow = is_slow
                name = "slow" if is_slow else "no longer slow"
                self._instant(name, Event(kind="slow", worker=span.index, time_ns=time_ns))

    # ---- output

    def _sample(self, span: RankSpan, time_ns: int) -> None:
        if self._group is not None and span.has_pipe:
            self._count += span.add_sample(time_ns, self._group.volume(span.index))

    def _thin(self) -> None:
        """Drop every second sample, so that a viewer can still open the trace of a job of weeks."""
        self._gap_ns *= 2
        for span in self._spans:
            span.samples[:-1] = span.samples[:-1:2]
            span.progress[:-1] = span.progress[:-1:2]
        self._count = sum(len(span.samples) + len(span.progress) for span in self._spans)

    # ---- the trace

    def _close_attempt(self, end_ns: int) -> None:
        """Add the launcher's own slices. They follow each other and never overlap."""
        last_ns = self._last_exit_ns or end_ns
        stop_ns = max(self._spawned_ns, min(self._stop_ns or last_ns, last_ns))
        self._slice("spawn", self._spawn_ns, self._spawned_ns)
        self._slice("run", self._spawned_ns, stop_ns)
        if self._stop_ns:
            self._slice("stop", stop_ns, last_ns)
        self._slice("sweep", max(stop_ns, last_ns), end_ns)
        self._spawn_ns = 0

    def _us(self, time_ns: int) -> int:
        return (self._epoch_ns + time_ns) // 1000

    def _slice(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None) -> None:
        facts = {} if self._node is None else self._node.facts
        event = slice_event(name, self._pid, self._us(start_ns), self._us(end_ns))
        self._events.append({**event, "cat": "launcher", "args": {**facts, **(args or {})}})

    def _instant(self, name: str, event: Event, args: dict[str, Any] | None = None) -> None:
        self._instant_count += 1
        if self._instant_count > _MAX_INSTANTS:
            return
        span = self._live.get(event.worker)
        pid = self._pid if span is None else span.pid
        where = {"pid": pid, "tid": pid, "s": "g" if span is None else "p", "ts": self._us(event.time_ns)}
        self._events.append({"name": name, "ph": "i", "cat": "event", **where, "args": args or {}})

    def content(self) -> dict[str, Any]:
        """Return the trace so far, its events in the order of time."""
        plan = self._plan
        other = {} if plan is None else {"launch_id": plan.launch_id, "world_size": plan.world_size}
        return trace_content(*self.parts(), other)

    def parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the names of the processes, and the events so far."""
        now_ns = time.monotonic_ns()
        host, order = (os.uname().nodename, -1) if self._node is None else (self._node.host, self._node.order)
        names = process_names(self._pid, f"infini-run on {host}", order)
        events = list(self._events)
        for span in self._spans:
            names += process_names(span.pid, span.name, span.worker.rank)
            events += span.events(now_ns, self._us)
        return names, events

    def write(self) -> str:
        """Write the file, whole or not at all. Writes nothing before an attempt began, nor twice.

        Returns:
            The reason if that was not possible, else an empty text.
        """
        if self._written or self._plan is None:
            return ""
        self._written = True
        return write_trace(self.path, self.content())
