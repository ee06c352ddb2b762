"""What --events and --metrics have of a launch: its events become facts, on one node and at the head of many.

Its import comes with one of the two flags.
"""

from __future__ import annotations

import os
import time

from infini_run.display.event_schema import make_fact
from infini_run.errors import InfiniRunError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.core.c_structs import Event
    from infini_run.display.event_stream import EventStream
    from infini_run.display.metrics import MetricsFile
    from infini_run.options.launch_options import Options
    from infini_run.report.report import Report


class LaunchFeed:
    """The facts of one launch, for all its attempts. Any thread may call, one at a time.

    Args:
        options: What the user asked for.
        stream: Gets every fact as a line. None: not asked for.
        metrics: Counts them. None: not asked for.
    """

    def __init__(self, options: Options, stream: EventStream | None, metrics: MetricsFile | None) -> None:
        self._options = options
        self._stream = stream
        self._metrics = metrics
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._host = os.uname().nodename
        self._launch_id = ""
        self._progress: dict[int, int] = {}  # by rank, in the attempt
        self._restarts = 0
        self._has_ended = False
        self._place: Callable[[int], tuple[str, int]] = lambda rank: ("", rank)

    def launched(
        self,
        launch_id: str,
        *,
        nodes: int,
        ranks: int,
        restarts: int = -1,
        last_sign_ns: Callable[[int], int | None],
        place: Callable[[int], tuple[str, int]],
    ) -> None:
        """Note the begin of an attempt, before its ranks start.

        Args:
            launch_id: The id of the attempt; that of the first one is the launch's.
            nodes: On which its ranks run.
            ranks: How many of them the facts are about.
            restarts: How many restarts came before. -1: as many as `restarting` has noted.
            last_sign_ns: Returns when a rank gave its last sign of life, by CLOCK_MONOTONIC; 0: it gave none. None:
                it may write where the launcher does not read.
            place: Returns the program of a rank, if it has a name, and its number there.
        """
        self._place = place
        self._launch_id = self._launch_id or launch_id
        self._restarts = self._restarts if restarts < 0 else restarts
        self._progress.clear()
        if self._metrics is not None:
            self._metrics.last_sign_ns = last_sign_ns
        programs = self._options.programs or (self._options,)
        program = " : ".join(os.path.basename(each.program[0]) for each in programs)
        facts = (self._launch_id, self._options.run_id, program, self._host, os.getpid())
        more = {}
        if self._options.programs:
            names = [place(rank)[0] for rank in range(ranks)]
            more["programs"] = {each.name: names.count(each.name) for each in self._options.programs}
        self._add("launched", 0, *facts, nodes, ranks, self._restarts, **more)

    def on_event(self, event: Event, host: str = "") -> None:
        """Note an event of the core.

        Args:
            event: The event, with its time by this machine's CLOCK_MONOTONIC.
            host: The name of its node. Empty: this one.
        """
        kind, rank, host = event.kind, event.rank, host or self._host
        if kind == "started":
            self._progress.pop(rank, None)  # of the attempt before
            self._add(kind, event.time_ns, rank, host, event.pid)
        elif kind in ("ready", "hung", "late"):
            self._add(kind, event.time_ns, rank, host)
        elif kind == "progress":
            if event.value > self._progress.get(rank, -1):  # the last one of a rank elsewhere may come twice
                self._progress[rank] = event.value
                self._add(kind, event.time_ns, rank, host, event.value)
        elif kind == "exited":
            code = None if event.signal or event.status_lost else event.code
            self._add(kind, event.time_ns, rank, host, event.pid, code, event.signal, event.after_stop)
        elif kind == "signalled":
            self.signalled(event.signal, host, event.time_ns)
        elif kind == "restarting":
            self.restarting(event.code, event.name)

    def signalled(self, number: int, host: str = "", time_ns: int = 0) -> None:
        """Note a signal that asks for the end of the launch."""
        self._add("signalled", time_ns, number, host or self._host)

    def restarting(self, restarts: int, program: str = "") -> None:
        """Note that another attempt follows; `restarts` with it. program: it is that of one program alone."""
        if not program:
            self._restarts = restarts
        self._add("restarting", 0, restarts, **({"program": program} if program else {}))

    def node_lost(self, node: int, host: str, ranks: Sequence[int], reason: str) -> None:
        """Note the loss of a node, and of its ranks."""
        self._add("node_lost", 0, node, host, list(ranks), reason)

    def stop(self) -> None:
        """Note that the ranks are being stopped."""
        if self._metrics is not None:
            self._metrics.stop()

    def finish(self, end: Report | InfiniRunError, *, stopper: str = "") -> None:
        """Note the end of the launch: its report, or why it did not start. Only the first one counts.

        Args:
            end: The report, or the error.
            stopper: Who stopped the ranks, if no signal, failure, or end of a program did.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if isinstance(end, InfiniRunError):
            self._add("ended", 0, end.exit_code, 0, str(end))
        else:
            from infini_run.report.text import ASKED_TO_STOP

            reason = end.headline()
            has_cause = bool(reason or end.error or end.received_signal or end.ended_by)
            if stopper and not has_cause and any(exit_.stopped for exit_ in end.exits):
                asked = (notice for notice in end.notices if notice.endswith(ASKED_TO_STOP))
                reason = next(asked, f"{stopper} stopped the launch")
            reason = reason or end.text().partition("\n")[0]
            self._add("ended", 0, end.exit_code, end.received_signal, reason)

    def _add(self, kind: str, time_ns: int, *values: object, **more: object) -> None:
        fact = make_fact(kind, (self._epoch_ns + (time_ns or time.monotonic_ns())) / 1e9, *values) | more
        if self._options.programs and "rank" in fact:
            fact["program"], fact["program_rank"] = self._place(fact["rank"])
        for sink in (self._stream, self._metrics):
            if sink is not None:
                sink.add(fact)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until something is due, at most `asked_s`. None: there is no limit."""
        for sink in (self._stream, self._metrics):
            if sink is not None:
                asked_s = sink.timeout_s(asked_s)
        return asked_s

    def run_due(self) -> None:
        """Write what is due. Call it after events and timeouts."""
        for sink in (self._stream, self._metrics):
            if sink is not None:
                sink.run_due()

    def close(self) -> str:
        """Write the rest. Return a sentence about what could not be written, else "". Safe twice."""
        return "; ".join(filter(None, [sink.close() for sink in (self._stream, self._metrics) if sink is not None]))

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child."""
        if self._stream is not None:
            self._stream.after_fork_in_child()


def open_feed(options: Options, *, owns_process: bool) -> LaunchFeed | None:
    """Open what the options ask for; None: neither.

    Args:
        options: What the user asked for.
        owns_process: The descriptors of this process are the launcher's.

    Raises:
        UsageError: A file cannot be written.
    """
    stream = metrics = None
    if options.metrics:
        from infini_run.display.metrics import open_metrics

        metrics = open_metrics(options)
    if options.events:
        from infini_run.display.event_stream import open_events

        stream = open_events(options.events, owns_process=owns_process)
    return LaunchFeed(options, stream, metrics) if options.metrics or options.events else None
