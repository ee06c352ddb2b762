"""The table of --live: when to draw it, and its rows.

It appears after events, at most five times a second, and once a second in any case: CPU and memory change without an
event. None of this runs without --live.
"""

from __future__ import annotations

import time

from infini_run.display.resource_usage import Usage
from infini_run.display.table_rendering import (
    FAILED,
    HUNG,
    LIVE,
    OVER,
    SLOW,
    Row,
    TableRenderer,
    is_of_interrupt,
    plain,
    up_text,
)
from infini_run.errors import printable
from infini_run.report.text import duration_text, signal_name
from infini_run.system.signal_numbers import SIGCONT, SIGWINCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Protocol

    from infini_run.core.c_structs import Event
    from infini_run.display.terminal import TerminalArea
    from infini_run.plan.model import Plan, Worker
    from infini_run.report.exit import Exit
    from infini_run.report.pace import Pace

    Sampling = Callable[[Mapping[int, tuple[Worker, float]], float], dict[int, Usage]]

    class RankStates(Protocol):
        """The state of the ranks so far."""

        def exits(self) -> tuple[Exit, ...]:
            """Return the state of every rank."""

        @property
        def is_interrupted(self) -> bool:
            """Whether the user ended the only rank by Ctrl-C."""

    class Lines(Protocol):
        """A group, as far as the table reads it: the output of each worker."""

        def line(self, worker: int) -> bytes:
            """Return the last line of the worker's output."""

        def status(self, worker: int) -> bytes:
            """Return the worker's last STATUS=."""


_GAP_S = 0.2  # between two frames
TICK_S = 1.0  # the clock


class LaunchView:
    """A launch on one node, as the table reads it.

    Args:
        plan: The plan of the launch.
        group: The output and signs of life of its ranks.
        outcome: Returns the state of its ranks so far.
        sample: Returns the use of CPU, memory and GPUs by pid, for live ranks with their start (CLOCK_MONOTONIC).
        pace: The progress of the ranks.
        hung_ranks: Returns the ranks that hang or are late now, each with `hung` or `late`.
        host: The node's name, if there are several nodes; else empty.
    """

    def __init__(
        self,
        plan: Plan,
        group: Lines,
        outcome: Callable[[], RankStates],
        sample: Sampling,
        pace: Pace,
        hung_ranks: Callable[[], Mapping[int, str]],
        host: str = "",
    ) -> None:
        self._plan = plan
        self._group = group
        self._outcome = outcome
        self._sample = sample
        self._pace = pace
        self._hung_ranks = hung_ranks
        self._host = host
        self._samples: dict[int, Usage] = {}
        self._sampled_s = 0.0
        self._indexes = {worker.rank: index for index, worker in enumerate(plan.workers)}
        self._lines: dict[int, str] = {}  # by rank: the last that says something
        self._is_stopping = False
        self._lost_s = 0.0
        self._over: set[int] = set()  # ranks that exited
        self.pids: set[int] = set()

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        if event.kind == "started":
            self.pids.add(event.pid)
            self._renew(event.rank)
        elif event.kind == "signalled":
            self.stop()

    def _renew(self, rank: int) -> None:
        """Forget the process of a rank whose program has restarted."""
        self._over.discard(rank)
        self._lines.pop(rank, None)

    def stop(self) -> None:
        """Note the stop of the ranks; their lines before it stay over what the stop makes them print."""
        if not self._is_stopping:
            for rank in self._indexes:
                self._line(rank)
        self._is_stopping = True

    def on_disconnect(self) -> None:
        """Note the loss of the connection to the node: the end of its live ranks is unknown."""
        self._lost_s = time.time()

    def has(self, rank: int) -> bool:
        """Return whether the rank is one of this launch's."""
        return rank in self._indexes

    def rows(self, now_s: float) -> list[Row]:
        """Return the rows of all its ranks.

        Args:
            now_s: CLOCK_MONOTONIC in seconds.
        """
        exits, hung = self._outcome().exits(), self._hung_ranks()
        self._refresh(exits, now_s)
        return [self._row(exit_, now_s, hung.get(exit_.rank, "")) for exit_ in exits]

    def _refresh(self, exits: tuple[Exit, ...], now_s: float) -> None:
        if now_s - self._sampled_s < TICK_S * 0.9:
            return
        self._sampled_s = now_s
        self._samples = self._sample(living(self._plan, exits, now_s), now_s)

    def _row(self, exit_: Exit, now_s: float, hung: str) -> Row:
        is_over = exit_.end_s is not None
        if is_over:
            self._over.add(exit_.rank)
        elif exit_.rank in self._over:  # a view from outside gets no event
            self._renew(exit_.rank)
        is_lost = self._lost_s and not is_over and not exit_.start_failure
        sample = Usage() if is_over or is_lost else self._samples.get(exit_.pid or 0, Usage())
        end_s = exit_.end_s or self._lost_s or time.time()
        if is_lost:
            state, kind = "lost", FAILED
        elif is_over or exit_.start_failure:
            state, kind = _end_state(exit_, self._outcome().is_interrupted)
        else:
            state, kind = self._state(exit_, sample, hung)
        return Row(
            rank=exit_.rank,
            host=self._host,
            state=state,
            kind=kind,
            pid=exit_.pid,
            up_s=None if exit_.start_s is None else end_s - exit_.start_s,
            since_s=exit_.end_s or self._lost_s,
            cpu=sample.cpu,
            memory=sample.memory,
            gpu_memory=sample.gpu_memory,
            gpu=sample.gpu,
            progress=self._pace.value(exit_.rank),
            rate=None if is_over or is_lost else self._pace.rate(exit_.rank, now_s),
            program=exit_.program,
            program_rank=exit_.program_rank,
        )

    def _state(self, exit_: Exit, sample: Usage, hung: str) -> tuple[str, int]:
        """Return the state of a live rank. hung: `hung`, `late`, or empty."""
        if exit_.start_s is None:
            return "waiting", LIVE
        if exit_.stuck:
            return "stuck", HUNG
        if self._is_stopping:
            return "stopping", LIVE
        if hung:
            return hung, HUNG
        if sample.is_suspended:
            return "suspended", HUNG
        if exit_.rank in self._pace.slow:
            return "slow", SLOW
        return ("ready" if exit_.ready_s is not None else "running"), LIVE

    def last_line(self, rank: int) -> str:
        """Return the rank's last STATUS=, and the last line of its output. After the end of a rank the line comes
        first: it may say why."""
        line, status = self._line(rank), plain(self._group.status(self._indexes[rank]))
        both = (line, status) if rank in self._over else (status, line)
        return " | ".join(part for part in both if part)

    def _line(self, rank: int) -> str:
        """Return the last line of its output; for the traceback of a Ctrl-C, the line before it."""
        line = plain(self._group.line(self._indexes[rank]))
        if line and not is_of_interrupt(line) and not line.startswith(" "):  # it may be in a traceback
            self._lines[rank] = line
        return self._lines.get(rank, "") if not line or is_of_interrupt(line) else line


def living(plan: Plan, exits: Sequence[Exit], now_s: float) -> dict[int, tuple[Worker, float]]:
    """Return, for the pid of each live rank, its worker and its start (CLOCK_MONOTONIC in seconds)."""
    epoch_s, workers = time.time() - now_s, {worker.rank: worker for worker in plan.workers}
    return {
        e.pid: (workers[e.rank], e.start_s - epoch_s)
        for e in exits
        if e.pid is not None and e.start_s is not None and e.end_s is None
    }


class LiveTable:
    """The table on one terminal, of the ranks of one or several nodes.

    Args:
        screen: The terminal.
        environ: The launcher's environment, for the colors.
        footer: Returns a line for below the ranks.
        begin_s: When the launch began, since the epoch. None: now.
    """

    def __init__(
        self,
        screen: TerminalArea,
        environ: Mapping[str, str],
        footer: Callable[[], str] = str,
        begin_s: float | None = None,
    ) -> None:
        self._screen = screen
        self._painter = TableRenderer(environ)
        self._footer = footer
        self._imports: dict[int, tuple[str, int]] = {}  # by node: the last ones of --preload, and their time
        self._launches: dict[int, LaunchView] = {}  # by node
        self._begin_s = time.time() if begin_s is None else begin_s
        self._drawn_s = self._due_s = self._sampled_s = 0.0
        self._is_hidden = False  # another job, or a rank that asks, has the terminal
        self.shown: set[int] = set()  # ranks that have a line now

    # ---- the launch

    def begin(self, launch_view: LaunchView, node: int = 0) -> None:
        """Begin to show a launch, in place of an earlier one on that node.

        Args:
            launch_view: The launch.
            node: The index of its node.
        """
        self._launches[node] = launch_view
        self._due_s = 0.0

    def on_event(self, event: Event, node: int = 0) -> None:
        """Record one event of a node."""
        if node in self._launches:
            self._launches[node].on_event(event)
        if event.kind == "forwarded":
            self.note_signal(event.signal)
        if event.kind == "asks_terminal":
            self._screen.leave_in_place()  # the rank writes its question below it

    def note_signal(self, number: int) -> None:
        """Draw again after a signal that the launcher got: a shell or a resize may have changed the screen."""
        if number == SIGCONT:
            self._screen.leave_in_place()  # the shell wrote below it meanwhile
        if number in (SIGCONT, SIGWINCH):  # the screen has changed under the table
            self._due_s = 0.0

    def note_imports(self, names: str, time_ns: int, node: int = 0) -> None:
        """Note the imports of --preload on a node, for the last line of the table.

        Args:
            names: The modules.
            time_ns: How long they took.
            node: The index of the node.
        """
        self._imports[node] = names, time_ns
        self._due_s = 0.0

    def _last_row(self) -> str:
        """Return what the table says below the ranks. Of several nodes, the slowest imports count."""
        texts = [self._footer()]
        if self._imports:
            names, time_ns = max(self._imports.values(), key=lambda imports: imports[1])
            texts.append(f"preloaded {printable(names)} in {duration_text(time_ns / 1e9)}")
        return "; ".join(filter(None, texts))

    def stop(self, node: int | None = None) -> None:
        """Note the stop of the ranks of a node. None: those of all nodes."""
        for at, launch_view in self._launches.items():
            if node in (None, at):
                launch_view.stop()

    def on_disconnect(self, node: int) -> None:
        """Note the loss of the connection to a node."""
        if node in self._launches:
            self._launches[node].on_disconnect()

    def drop(self, nodes: Iterable[int]) -> None:
        """Show nothing of these nodes any more: they run no ranks in the attempt that begins."""
        for node in nodes:
            self._launches.pop(node, None)

    def print_above(self, text: str) -> bool:
        """Print text above the table. Return False if there is no table, or if it is invisible at present."""
        if not self.is_seen:
            return False
        self._screen.print_above(text)
        self._due_s = 0.0
        return True

    @property
    def is_seen(self) -> bool:
        """Whether there is a table, on a terminal whose foreground is the launcher or its only rank."""
        return bool(self._launches) and not self._screen.is_gone and self._screen.is_ours(self._pids())

    def _pids(self) -> set[int]:
        """Return the process group that may have the foreground beside the launcher's. One of several ranks has it to
        ask."""
        pids = self._launches[0].pids if len(self._launches) == 1 and 0 in self._launches else set()
        return pids if len(pids) == 1 else set()

    # ---- when

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the next frame, at most `asked_s`. None: there is no limit."""
        if not self._launches or self._screen.is_gone:
            return asked_s
        wait_s = max(0.0, self._due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Draw the table if that is due. Call it after events and timeouts."""
        now_s = time.monotonic()
        self._due_s = min(self._due_s, self._drawn_s + _GAP_S)
        if self._launches and not self._screen.is_gone and now_s >= self._due_s:
            self._draw(now_s)

    def is_usage_due(self) -> bool:
        """Return whether it is time to ask other nodes what their ranks use: once a second, while the table is
        visible."""
        now_s = time.monotonic()
        is_due = now_s - self._sampled_s >= TICK_S * 0.9 and self.is_seen
        self._sampled_s = now_s if is_due else self._sampled_s
        return is_due

    def end(self) -> None:
        """Draw the last frame, which stays on the screen, before the group closes."""
        if any(launch_view.pids for launch_view in self._launches.values()) and not self._screen.is_gone:
            self._draw(time.monotonic())
        self._launches.clear()
        self._screen.leave_in_place()

    def close(self) -> None:
        """Draw the last frame, and nothing after it. Safe twice."""
        self._screen.close()

    # ---- drawing

    def _draw(self, now_s: float) -> None:
        self._drawn_s, self._due_s = now_s, now_s + TICK_S
        was_hidden, self._is_hidden = self._is_hidden, not self._screen.is_ours(self._pids())
        if self._is_hidden:
            return
        if was_hidden:
            self._screen.leave_in_place()  # what was written meanwhile stays above
        columns, lines = self._screen.size()
        width = columns - 1  # in the last column a terminal may wrap already
        rows = [row for launch_view in self._launches.values() for row in launch_view.rows(now_s)]
        title = self.title(len(rows), len(self._launches), time.time() - self._begin_s)
        self.shown.clear()
        frame = self._painter.frame(rows, title, (width, lines - 1), self._last_line, self._last_row())
        if not self._screen.draw(frame, width):
            self._due_s = now_s + _GAP_S

    @staticmethod
    def title(ranks: int, nodes: int, up_s: float) -> str:
        """Return the start of the first line: how many ranks on how many nodes run for how long."""
        where = f" on {nodes} nodes" if nodes > 1 else ""
        return f"infini-run, {ranks} rank{'s' if ranks != 1 else ''}{where}, {up_text(up_s)}"

    def _last_line(self, rank: int) -> str:
        self.shown.add(rank)
        return next(launch_view for launch_view in self._launches.values() if launch_view.has(rank)).last_line(rank)


def _end_state(exit_: Exit, is_interrupted: bool) -> tuple[str, int]:
    """Return the state of a rank that exited, and its kind. is_interrupted: the user ended it by Ctrl-C."""
    if is_interrupted:
        return "interrupted", OVER
    if exit_.start_failure:
        return "not started", FAILED
    if exit_.watchdog_reason:
        return "was " + ("hung" if exit_.watchdog_reason.startswith("hung") else "late"), FAILED
    if exit_.is_failure:
        return (signal_name(exit_.signal) if exit_.signal else f"exit {exit_.code}"), FAILED
    return ("stopped" if exit_.stopped else "done"), OVER
