"""The agent's side of --live, --trace, --events, and --metrics: it sends events and counts to the head in frames.

To NodeLaunch it looks like Observers. Its import comes with a request of the head.

It sends events at once. For a trace, it counts output after events, at most ten times a second. It reads CPU and
memory only when the head asks. That is once a second, while its table is visible, and after the answer to the last
request. Times are this node's CLOCK_MONOTONIC, in nanoseconds.
"""

from __future__ import annotations

import time

from infini_run.display.trace_format import COUNT_GAP_NS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from infini_run.core.c_structs import Event
    from infini_run.core.group import Group
    from infini_run.display.live_table import RankStates
    from infini_run.display.resource_usage import GpuReader, Sampler
    from infini_run.plan.model import Plan
    from infini_run.report.pace import Pace

_LINE = 1000  # bytes of a last line
MOST_LINES = 500  # that one answer has


class ObserverRelay:
    """The observers of a launch whose head is elsewhere.

    Args:
        send: Sends a message of plain types to the head.
        has_room: Returns whether the connection takes messages that may be dropped.
        counts: The head asks for the counts of the output.
        signs_s: The seconds between two messages about signs of life of the ranks. 0: the head asks for none.
    """

    def __init__(
        self,
        send: Callable[[list[Any]], None],
        has_room: Callable[[], bool],
        *,
        counts: bool,
        signs_s: float = 0.0,
    ) -> None:
        self._send = send
        self._has_room = has_room
        self._counts = counts
        self._signs_s = signs_s
        self._signs: dict[int, int] = {}  # as they were sent last
        self._next_signs_s = time.monotonic() + signs_s
        self._begin_ns = time.monotonic_ns()
        self._pending: list[Any] = []
        self._plan: Plan | None = None
        self._group: Group | None = None
        self._outcome: Callable[[], RankStates] | None = None
        self._hung_ranks: Callable[[], Mapping[int, str]] = dict
        self._gpu_cards: Callable[[], GpuReader] | None = None
        self._sampler: Sampler | None = None
        self._live: set[int] = set()  # indices of workers
        self._volumes: dict[int, tuple[int, int]] = {}  # as they were sent last
        self._progress: dict[int, Event] = {}  # of the ranks that live, by index
        self._next_ns = 0
        self._is_behind = False

    # ---- as Observers

    def begin(
        self,
        plan: Plan,
        group: Group,
        outcome: Callable[[], RankStates],
        pace: Pace,
        hung_ranks: Callable[[], Mapping[int, str]],
        gpu_cards: Callable[[], GpuReader],
    ) -> None:
        """Begin an attempt, before its ranks start.

        Args:
            plan: The plan of the attempt.
            group: Its processes.
            outcome: Returns the state of its ranks so far.
            pace: Their progress, of which the head knows without the relay.
            hung_ranks, gpu_cards: As of Observers.
        """
        self._plan, self._group, self._outcome, self._hung_ranks = plan, group, outcome, hung_ranks
        self._gpu_cards = gpu_cards
        self._live.clear()
        self._volumes.clear()
        self._signs.clear()
        self._progress.clear()
        ranks = [
            [worker.rank, worker.local_rank, list(worker.devices), worker.stdout.piped + worker.stderr.piped]
            for worker in plan.workers
        ]
        self._queue("begin", self._begin_ns, time.monotonic_ns(), plan.workers[0].file, ranks)
        self._flush()

    def on_event(self, event: Event) -> None:
        """Send one event of the group to the head."""
        if event.kind == "started":
            self._live.add(event.worker)
        elif event.kind == "exited":
            self._count(event.time_ns, {event.worker} & self._live)
            self._live.discard(event.worker)
            if event.worker in self._progress:
                last = self._progress.pop(event.worker)
                self._queue("progress", last.worker, last.value, last.time_ns)
        flags = event.dumped_core | event.after_stop << 1 | event.status_lost << 2
        numbers = [event.worker, event.pid, event.code, event.signal, flags, event.time_ns]
        self._queue("event", event.kind, *numbers, event.user_us, event.system_us, event.max_rss_kib, event.name)

    def on_progress(self, event: Event) -> None:
        """Keep the progress of a rank. The head gets it seldom (multinode/link/progress_messages.py), and the last
        value here, before the exit of the rank."""
        self._progress[event.worker] = event

    def note_slow(self, time_ns: int) -> None:
        """Do nothing: the head compares the ranks of all nodes."""

    def add_span(self, name: str, start_ns: int, end_ns: int, text: str = "") -> None:
        """Send a span of this node's own work to the head, once the attempt has begun. As of Observers."""
        self._queue("span", name, start_ns, end_ns, text)

    def stop(self) -> None:
        """Note the stop of the ranks."""
        self._queue("stop", time.monotonic_ns())

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the next count of the output, or the next signs of life, at most `asked_s`. None:
        there is no limit."""
        if self._signs_s and self._group is not None:
            wait_s = max(0.0, self._next_signs_s - time.monotonic())
            asked_s = wait_s if asked_s is None else min(wait_s, asked_s)
        if not self._is_behind:
            return asked_s
        wait_s = max(0.0, (self._next_ns - time.monotonic_ns()) / 1e9)
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Count the output, if that is due, and send what waits. Call it after events and timeouts."""
        now_ns = time.monotonic_ns()
        self._is_behind = self._counts and self._group is not None and now_ns < self._next_ns
        if self._counts and not self._is_behind and self._has_room():
            self._next_ns = now_ns + COUNT_GAP_NS
            self._count(now_ns, self._live)
        if self._signs_s and now_ns / 1e9 >= self._next_signs_s:
            self._next_signs_s = now_ns / 1e9 + self._signs_s
            self._send_signs()
        self._flush()

    def print_above(self, text: str) -> bool:
        """Return False: there is no table here, so lines for the user go to the head as any output."""
        return False

    def end(self) -> None:
        """End the attempt, before the group closes."""
        if self._group is None:
            return
        now_ns = time.monotonic_ns()
        self._count(now_ns, self._live)
        self._queue("end", now_ns)
        self._flush()
        self._group, self._is_behind = None, False
        self._close_sampler()

    def after_fork_in_child(self) -> None:
        """Do nothing: the connection is another part's."""

    def trace_so_far(self) -> None:
        """Return None: the head has the trace."""

    def close(self) -> str:
        """Release what the samples needed. Safe twice. Returns an empty text: there is never a problem."""
        self._close_sampler()
        return ""

    def _close_sampler(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()

    # ---- what the head asks

    def sample(self, asked: list[int]) -> None:
        """Send the head what ranks use now, and the last lines of some of them.

        Args:
            asked: The ranks whose last lines the table shows; this skips those of other nodes.
        """
        plan, group, outcome = self._plan, self._group, self._outcome
        if plan is None or group is None or outcome is None:
            self._queue("usage", [], [])
            self._flush()
            return
        from infini_run.display.live_table import living
        from infini_run.display.resource_usage import Sampler

        now_s = time.monotonic()
        self._sampler = self._sampler or Sampler(None if self._gpu_cards is None else self._gpu_cards())
        ranks = living(plan, outcome().exits(), now_s)
        indexes = {worker.rank: index for index, worker in enumerate(plan.workers)}
        rows, hung = [], self._hung_ranks()
        for pid, s in self._sampler.sample(ranks, now_s).items():
            rank = ranks[pid][0].rank
            usage = [s.cpu, s.memory, s.gpu_memory, s.gpu, s.is_suspended]
            rows.append([indexes[rank], pid, *usage, hung.get(rank, "")])
        here = [indexes[rank] for rank in asked[:MOST_LINES] if rank in indexes]
        self._queue("usage", rows, [[at, _text(group.line(at)), _text(group.status(at))] for at in here])
        self._flush()

    # ---- telling

    def _count(self, now_ns: int, workers: set[int]) -> None:
        group = self._group
        if group is None or not self._counts:
            return
        volumes = {index: group.volume(index) for index in workers}
        changed = {index: volume for index, volume in volumes.items() if volume != self._volumes.get(index, (0, 0))}
        if changed:
            self._volumes |= changed
            self._queue("written", now_ns, [[index, *volume] for index, volume in changed.items()])

    def _send_signs(self) -> None:
        """Send the last sign of life of each rank that has given a later one, unless the connection is full."""
        if self._group is None or not self._has_room():
            return
        signs = {at: self._group.activity(at)[0] for at in self._live}
        later = {at: sign_ns for at, sign_ns in signs.items() if sign_ns > self._signs.get(at, 0)}
        if later:
            self._signs |= later
            self._queue("signs", [[at, sign_ns] for at, sign_ns in later.items()])

    def _queue(self, *what: Any) -> None:
        self._pending.append(what)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._send(pending)


def _text(line: bytes) -> str:
    """Return the end of a text: a longer one keeps its last part."""
    return line[-_LINE:].decode("utf-8", "surrogateescape")
