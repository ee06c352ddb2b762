"""The span of all ranks as a Chrome trace: plan, spawn, ready, output, exit, stop, sweep. Written once, at the end.

Format: "Trace Event Format" (Google, 2016), the JSON that ui.perfetto.dev, chrome://tracing and torch.profiler share:
slices (ph X), instants (i), counters (C), names (M); times are microseconds of the epoch, so that the traces of
several nodes lie side by side. A process of the trace is a process: pids are the kernel's, but of several nodes in
one trace, where two may have the same: there they are numbers of the trace's own.

No clock runs for it: what ranks have written is looked at when something has happened, at most ten times a second,
and once more after the last thing that happened.
"""

from __future__ import annotations

import os
import time

from infini_run.errors import printable
from infini_run.record import record
from infini_run.report.report import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from infini_run.core.group import Event
    from infini_run.plan.model import Plan, Worker

    class Volumes(Protocol):
        """What a group knows of how much its workers have written, by index."""

        def volume(self, worker: int) -> tuple[int, int]:
            """Bytes of stdout and of stderr."""


_GAP_NS = 100_000_000  # at least, between two looks at what ranks have written
MOST_SAMPLES = 200_000  # kept of all ranks; past that every second one goes, and looks become half as frequent
_INSTANTS = 10_000  # kept of what may come without end, such as signals passed on
_BAD, _GOOD, _OTHER = "terrible", "good", "grey"  # of the format's reserved colour names


@record
class Home:
    """Which launcher's ranks a trace is of, where it is not our own: a node's. host: its name. pid: its number in the
    trace. order: where the viewer puts it. number: gives the numbers of its ranks. begin_ns: when it began. facts: of
    its launcher."""

    host: str
    pid: int
    order: int
    number: Callable[[], int]
    begin_ns: int
    facts: dict[str, Any]


class _RankSpan:
    """One rank of one attempt."""

    def __init__(self, index: int, worker: Worker, event: Event, attempt: int, home: Home | None) -> None:
        self.index = index
        self.worker = worker
        self.attempt = attempt
        self.name = f"rank {worker.rank}, attempt {attempt}" if attempt else f"rank {worker.rank}"
        self.facts: dict[str, Any] = {}
        self.pid = event.pid
        if home is not None:
            self.name += f" on {home.host}"
            self.facts = {"host": home.host, "pid": event.pid}
            self.pid = home.number()
        self.start_ns = event.time_ns
        self.lost_ns = 0  # 0: it was not
        self.ready_ns = self.stop_ns = 0  # 0: never
        self.end: Event | None = None
        self.samples: list[tuple[int, int, int]] = []  # when, bytes of stdout, of stderr

    def add(self, time_ns: int, volume: tuple[int, int]) -> bool:
        if (self.samples[-1][1:] if self.samples else (0, 0)) == volume:
            return False
        self.samples.append((max(time_ns, self.start_ns), *volume))
        return True


class ChromeTrace:
    """Tell it what happens, then `write`. `path` is absolute. Times come in as CLOCK_MONOTONIC's nanoseconds."""

    def __init__(
        self, path: str, *, gap_ns: int = _GAP_NS, most_samples: int = MOST_SAMPLES, home: Home | None = None
    ) -> None:
        self.path = path
        self._home = home
        self._pid = os.getpid() if home is None else home.pid
        self._gap_ns = gap_ns
        self._most_samples = most_samples
        self._count = 0
        self._next_ns = 0
        self._is_behind = False  # something has happened since the last look
        self._carries = False  # any output
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._begin_ns = time.monotonic_ns() if home is None else home.begin_ns
        self._plan: Plan | None = None
        self._group: Volumes | None = None
        self._live: dict[int, _RankSpan] = {}  # by index
        self._spans: list[_RankSpan] = []  # of all attempts
        self._attempt = 0  # as TORCHELASTIC_RESTART_COUNT
        self._instant_count = 0  # instants
        self._events: list[dict[str, Any]] = []
        self._spawn_ns = self._spawned_ns = self._stop_ns = self._last_exit_ns = 0
        self._written = False

    # ---- what happens

    def begin(self, plan: Plan, group: Volumes, *, now_ns: int = 0) -> None:
        """The ranks are about to be started; again for each attempt. now_ns: when, where that was not now."""
        now_ns = now_ns or time.monotonic_ns()
        if self._plan is None:
            self._slice("plan", self._begin_ns, now_ns, {"world_size": plan.world_size, "file": plan.file})
        self._plan, self._group = plan, group
        self._carries = any(worker.stdout.piped or worker.stderr.piped for worker in plan.workers)
        self._spawn_ns = self._spawned_ns = now_ns
        self._stop_ns = self._last_exit_ns = 0

    def on_event(self, event: Event) -> None:
        """Take one event of the group in."""
        getattr(self, f"_on_{event.kind}", self._on_other)(event)

    def renew(self, attempt: int) -> None:
        """What begins next is that restart."""
        self._attempt = attempt

    def stop(self, now_ns: int = 0) -> None:
        """The ranks are being stopped, by us or by whoever told us."""
        self._stop(now_ns or time.monotonic_ns())

    def _stop(self, time_ns: int) -> None:
        if self._stop_ns:
            return
        self._stop_ns = time_ns
        for span in self._live.values():
            span.stop_ns = max(time_ns, span.start_ns)

    def run_due(self, *, at_once: bool = False) -> None:
        """See what ranks have written, if the last look was long enough ago."""
        now_ns = time.monotonic_ns()
        if self._group is None or not self._carries:
            return
        self._is_behind = now_ns < self._next_ns and not at_once
        if self._is_behind:
            return
        self.sample(now_ns)

    def sample(self, now_ns: int) -> None:
        """See what ranks have written, unless the last look was too short ago for a long job's trace."""
        if now_ns < self._next_ns - _GAP_NS:
            return
        self._next_ns = now_ns + self._gap_ns
        for span in self._live.values():
            self._sample(span, now_ns)
        if self._count > self._most_samples:
            self._thin()

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Until the look that is still to come, or what was asked for; None: for ever."""
        if not self._is_behind:
            return asked_s
        wait_s = max(0.0, (self._next_ns - time.monotonic_ns()) / 1e9)
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def on_disconnect(self, now_ns: int) -> None:
        """Its node has gone: nobody knows what became of its ranks after that."""
        for span in self._live.values():
            span.lost_ns = max(now_ns, span.start_ns)
        self.end(now_ns)

    def end(self, now_ns: int = 0) -> None:
        """The group is about to be closed."""
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
        span = _RankSpan(event.worker, self._plan.workers[event.worker], event, self._attempt, self._home)
        self._live[event.worker] = span
        self._spans.append(span)
        self._spawned_ns = max(self._spawned_ns, event.time_ns)

    def _on_ready(self, event: Event) -> None:
        if event.worker in self._live:
            self._live[event.worker].ready_ns = event.time_ns

    def _on_exited(self, event: Event) -> None:
        span = self._live.pop(event.worker, None)
        if span is None:
            return
        span.end = event
        span.stop_ns = span.stop_ns if event.after_stop else 0  # else it is why the others were stopped
        self._sample(span, event.time_ns)
        self._last_exit_ns = max(self._last_exit_ns, event.time_ns)

    def _on_signalled(self, event: Event) -> None:
        self._stop(event.time_ns)
        self._instant(f"signalled {signal_name(event.signal)}", event)

    def _on_forwarded(self, event: Event) -> None:
        self._instant(f"passed {signal_name(event.signal)} on", event)

    def _on_restarting(self, event: Event) -> None:
        self._attempt = event.code
        self._instant(f"restart {event.code}", event)

    def _on_leftover(self, event: Event) -> None:
        self._instant(f"left behind: {printable(event.name)}", event, {"pid": event.pid})

    def _on_stuck(self, event: Event) -> None:
        self._instant(f"stuck: {printable(event.name)}", event, {"pid": event.pid, "state": chr(event.code)})

    def _on_ended(self, event: Event) -> None:
        self._close_attempt(event.time_ns)

    def _on_other(self, event: Event) -> None:
        self._instant(event.kind.replace("_", " "), event)

    # ---- output

    def _sample(self, span: _RankSpan, time_ns: int) -> None:
        if self._group is not None and (span.worker.stdout.piped or span.worker.stderr.piped):
            self._count += span.add(time_ns, self._group.volume(span.index))

    def _thin(self) -> None:
        """A job may run for weeks: the trace of it is to stay one that can be opened."""
        self._gap_ns *= 2
        for span in self._spans:
            span.samples[:-1] = span.samples[:-1:2]
        self._count = sum(len(span.samples) for span in self._spans)

    # ---- the trace

    def _close_attempt(self, end_ns: int) -> None:
        """The launcher's own slices, once it is known when all was over: one after the other, never across."""
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

    def _span(self, name: str, pid: int, start_ns: int, end_ns: int) -> dict[str, Any]:
        start_us, end_us = self._us(start_ns), self._us(max(start_ns, end_ns))
        return {"name": name, "ph": "X", "ts": start_us, "dur": end_us - start_us, "pid": pid, "tid": pid}

    def _slice(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None) -> None:
        facts = {} if self._home is None else self._home.facts
        self._events.append(
            {**self._span(name, self._pid, start_ns, end_ns), "cat": "launcher", "args": {**facts, **(args or {})}}
        )

    def _instant(self, name: str, event: Event, args: dict[str, Any] | None = None) -> None:
        self._instant_count += 1
        if self._instant_count > _INSTANTS:
            return
        span = self._live.get(event.worker)
        pid = self._pid if span is None else span.pid
        where = {"pid": pid, "tid": pid, "s": "g" if span is None else "p", "ts": self._us(event.time_ns)}
        self._events.append({"name": name, "ph": "i", "cat": "event", **where, "args": args or {}})

    def content(self) -> dict[str, Any]:
        """The whole trace so far, in the order of time."""
        plan = self._plan
        other = {} if plan is None else {"launch_id": plan.launch_id, "world_size": plan.world_size}
        return whole(*self.parts(), other)

    def parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The names of its processes, and what happened so far."""
        now_ns = time.monotonic_ns()
        home = self._home
        names = process_names(
            self._pid, f"infini-run on {home.host}" if home else _own_name(), home.order if home else -1
        )
        events = list(self._events)
        for span in self._spans:
            names += process_names(span.pid, span.name, span.worker.rank)
            events += self._rank_events(span, now_ns)
        return names, events

    def _rank_events(self, span: _RankSpan, now_ns: int) -> list[dict[str, Any]]:
        end_ns = span.end.time_ns if span.end else span.lost_ns or now_ns
        whole = self._span(span.name, span.pid, span.start_ns, end_ns)
        colour = _BAD if span.lost_ns else _colour(span.end)
        events = [{**whole, "cat": "rank", "cname": colour, "args": _args(span)}]
        stop_ns = min(span.stop_ns or end_ns, end_ns)
        if span.stop_ns:
            events.append({**self._span("stopping", span.pid, stop_ns, end_ns), "cat": "rank"})
        if span.ready_ns:
            ready_ns = min(span.ready_ns, stop_ns)
            events.append({**self._span("starting", span.pid, span.start_ns, ready_ns), "cat": "rank"})
            at = {"ph": "i", "s": "t", "ts": self._us(min(span.ready_ns, end_ns)), "pid": span.pid, "tid": span.pid}
            events.append({"name": "ready", "cat": "rank", **at})
        if span.end is not None:
            at = {"ph": "i", "s": "t", "ts": self._us(end_ns), "pid": span.pid, "tid": span.pid}
            events.append({"name": f"exit: {_end_text(span.end)}", "cat": "rank", **at})
        for time_ns, out, err in span.samples:
            at = {"ph": "C", "ts": self._us(min(time_ns, end_ns)), "pid": span.pid, "tid": span.pid}
            events.append({"name": "output (bytes)", "cat": "output", **at, "args": {"stdout": out, "stderr": err}})
        return events

    def write(self) -> str:
        """Once, where anything was started: the file, whole or not at all. Why that was not possible, or ""."""
        if self._written or self._plan is None:
            return ""
        self._written = True
        return write_trace(self.path, self.content())


def whole(names: list[dict[str, Any]], events: list[dict[str, Any]], other: dict[str, Any]) -> dict[str, Any]:
    """The content of a trace, its events in the order of time."""
    events = sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(path: str, content: dict[str, Any]) -> str:
    """The file, whole or not at all. Why that was not possible, or ""."""
    import json

    from infini_run.system.secure_files import write_atomic

    try:
        write_atomic(path, json.dumps(content, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        return f"the trace {path} cannot be written: {error.strerror}"
    return ""


def _own_name() -> str:
    return f"infini-run on {os.uname().nodename}"


def process_names(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    """How the viewer calls a process, and where it puts it: ourselves first, then by rank."""
    facts = {
        "process_name": {"name": name},
        "process_sort_index": {"sort_index": order},
        "thread_name": {"name": name},
    }
    return [{"name": fact, "ph": "M", "ts": 0, "pid": pid, "tid": pid, "args": args} for fact, args in facts.items()]


def _colour(end: Event | None) -> str:
    if end is None or end.after_stop:
        return _OTHER
    return _BAD if end.is_failure else _GOOD


def _end_text(end: Event) -> str:
    if end.status_lost:
        return "unknown"
    return signal_name(end.signal) if end.signal else f"code {end.code}"


def _args(span: _RankSpan) -> dict[str, Any]:
    args: dict[str, Any] = {
        "rank": span.worker.rank,
        "local_rank": span.worker.local_rank,
        "attempt": span.attempt,
        **span.facts,
    }
    if span.worker.devices:
        args["devices"] = ",".join(span.worker.devices)
    if span.lost_ns:
        args["exit"] = "its node was lost"
    if span.end is not None:
        args |= {
            "exit": _end_text(span.end),
            "failed": span.end.is_failure,
            "stopped": span.end.after_stop,
            "user_s": span.end.user_us / 1e6,
            "system_s": span.end.system_us / 1e6,
            "max_rss_kib": span.end.max_rss_kib,
        }
    return args
