"""The observers of a launch: the table of --live, the trace of --trace, and what --events and --metrics write.
NodeLaunch gives them its events.

Their import comes with one of these flags. This module rejects a flag that has no effect, before any rank starts.
"""

from __future__ import annotations

import os

from infini_run.display.trace_format import IMPORTS
from infini_run.errors import UsageError
from infini_run.plan.model import reads_output
from infini_run.record import replace
from infini_run.report.program_pace import make_pace
from infini_run.value_types import DESCRIPTOR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from infini_run.core.c_structs import Event
    from infini_run.core.group import Group
    from infini_run.display.chrome_trace import ChromeTrace
    from infini_run.display.launch_feed import LaunchFeed
    from infini_run.display.live_table import LiveTable, RankStates
    from infini_run.display.resource_usage import GpuReader, Sampler
    from infini_run.errors import InfiniRunError
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.pace import Pace
    from infini_run.report.report import Report

_EXTRA = "--live: needs rich; run pip install 'infini-run[live]'"
_NO_TERMINAL = "--live: stderr is not a terminal; continuing without the table"


class Observers:
    """The observers of one launch, for all its attempts. Any thread may call, one at a time.

    Args:
        trace: The trace. None: not asked for.
        display: The live table. None: not asked for.
        feed: The events and metrics. None: not asked for.
    """

    def __init__(self, trace: ChromeTrace | None, display: LiveTable | None, feed: LaunchFeed | None) -> None:
        self._trace = trace
        self._display = display
        self._feed = feed
        self._sampler: Sampler | None = None
        self._has_group = False  # an attempt runs; between two, only the feed has something to do
        self._pace = make_pace({}, one_world=True)  # its module is imported while there are descriptors

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
            pace: Their progress.
            hung_ranks: Returns those that hang or are late now, each with `hung` or `late`.
            gpu_cards: Returns what reads the GPUs of this node.
        """
        self._has_group, self._pace = True, pace
        if self._trace is not None:
            self._trace.begin(plan, group)
        if self._display is not None:
            from infini_run.display.live_table import LaunchView
            from infini_run.display.resource_usage import Sampler

            self._sampler = Sampler(gpu_cards())
            self._display.begin(LaunchView(plan, group, outcome, self._sampler.sample, pace, hung_ranks))
        if self._feed is not None:
            read = {worker.rank: index for index, worker in enumerate(plan.workers) if reads_output(worker)}
            self._feed.launched(
                plan.launch_id,
                nodes=plan.nnodes,
                ranks=len(plan.workers),
                last_sign_ns=lambda rank: group.activity(read[rank])[0] if rank in read else None,
                place={worker.rank: (worker.program, worker.program_rank) for worker in plan.workers}.__getitem__,
            )

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        if self._feed is not None:
            self._feed.on_event(event)
        if self._trace is not None:
            self._trace.on_event(event)
        if self._display is not None:
            self._display.on_event(event)

    def on_progress(self, event: Event) -> None:
        """Record the PROGRESS= of a rank, which is no news for the table."""
        if self._trace is not None:
            self._trace.note_progress(event.worker, event.value, event.time_ns)
        if self._feed is not None:
            self._feed.on_event(event)

    def note_slow(self, time_ns: int) -> None:
        """Record that other ranks than before are slow since a time (CLOCK_MONOTONIC)."""
        if self._trace is not None:
            self._trace.note_slow(self._pace.slow, time_ns)

    def add_span(self, name: str, start_ns: int, end_ns: int, text: str = "") -> None:
        """Add a span of the launcher's own work to the trace; the table shows that of the imports.

        Args:
            name: What was done.
            start_ns: When it began, in CLOCK_MONOTONIC's nanoseconds.
            end_ns: When it ended.
            text: More about it.
        """
        if self._trace is not None:
            self._trace.add_span(name, start_ns, end_ns, text)
        if self._display is not None and name == IMPORTS:
            self._display.note_imports(text, end_ns - start_ns)

    def stop(self) -> None:
        """Note the stop of the ranks."""
        if self._trace is not None:
            self._trace.stop()
        if self._display is not None:
            self._display.stop()
        if self._feed is not None:
            self._feed.stop()

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the next frame, count, or write, at most `asked_s`. None: there is no limit."""
        if self._feed is not None:
            asked_s = self._feed.timeout_s(asked_s)
        if self._trace is not None and self._has_group:
            asked_s = self._trace.timeout_s(asked_s)
        return self._display.timeout_s(asked_s) if self._display is not None and self._has_group else asked_s

    def run_due(self) -> None:
        """Draw the table, count output, and write, if that is due. Call it after events and timeouts."""
        if self._trace is not None and self._has_group:
            self._trace.run_due()
        if self._display is not None and self._has_group:
            self._display.run_due()
        if self._feed is not None:
            self._feed.run_due()

    def print_above(self, text: str) -> bool:
        """Print a line above the table. Return False if there is no table."""
        return self._display is not None and self._display.print_above(text)

    def end(self) -> None:
        """End the attempt, before its group closes. Another attempt may follow."""
        self._has_group = False
        if self._trace is not None:
            self._trace.end()
        if self._display is not None:
            self._display.end()
        self._close_sampler()

    def finish(self, end: Report | InfiniRunError, *, stopper: str = "") -> None:
        """Note how the launch ended, before `close`: its report, or why it did not start. The first call counts.
        stopper: as for LaunchFeed.finish."""
        if self._feed is not None:
            self._feed.finish(end, stopper=stopper)

    def trace_so_far(self) -> dict[str, Any] | None:
        """Return the trace as it would be written now. None: there is none."""
        return None if self._trace is None else self._trace.content()

    def close(self) -> str:
        """End the launch and write the trace. Return the reason if that was not possible, else "". Safe twice."""
        if self._display is not None:
            self._display.close()
        self._close_sampler()
        problem = "" if self._trace is None else self._trace.write()
        return "; ".join(filter(None, (problem, "" if self._feed is None else self._feed.close())))

    def _close_sampler(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child."""
        if self._feed is not None:
            self._feed.after_fork_in_child()


def open_observers(
    options: Options, environ: Mapping[str, str], *, print_line: Callable[[str], None] | None
) -> tuple[Observers | None, Options]:
    """Open the table and the trace, if the options ask for them.

    Args:
        options: What the user asked for.
        environ: The launcher's environment.
        print_line: Gets a sentence if there is no terminal for the table. None: nothing is said, and the process is a
            host program's.

    Returns:
        The observers, None if there are none; and the options with `live` "on" or "off".

    Raises:
        UsageError: rich is missing, or a file is not writable.
    """
    check_names(options)
    trace = feed = None
    if options.trace:
        from infini_run.display.chrome_trace import ChromeTrace
        from infini_run.plan.program import absolute_flag_path
        from infini_run.system.secure_files import check_writable

        trace = ChromeTrace(absolute_flag_path("trace", options.trace))
        check_writable("trace", options.trace, options.log_dir)
    display = open_display(options, environ, print_line)
    if options.events or options.metrics:
        from infini_run.display.launch_feed import open_feed

        try:
            feed = open_feed(options, owns_process=print_line is not None)
        except BaseException:
            if display is not None:
                display.close()
            raise
    options = replace(options, live="off" if display is None else "on")
    is_any = trace is not None or display is not None or feed is not None
    return (Observers(trace, display, feed) if is_any else None), options


def check_names(options: Options) -> None:
    """Check that flags that write a file have one each. Raises UsageError: two have the same."""
    found: dict[tuple[str, str], str] = {}
    for flag in ("report", "trace", "metrics", "events"):
        path = getattr(options, flag)
        if path and not path.startswith(DESCRIPTOR):
            other = found.setdefault(_target(flag, path), flag)
            if other != flag:
                raise UsageError(
                    f"--{flag}={path} conflicts with --{other}={getattr(options, other)}: both are one file; use two "
                    "names"
                )


def _target(flag: str, path: str) -> tuple[str, str]:
    """Return the folder, with its links followed, and the name that a file gets in the end."""
    from infini_run.plan.program import absolute_flag_path

    folder, name = os.path.split(absolute_flag_path(flag, path))
    return os.path.realpath(folder), name


def open_display(
    options: Options,
    environ: Mapping[str, str],
    print_line: Callable[[str], None] | None,
    footer: Callable[[], str] = str,
) -> LiveTable | None:
    """Open the live table, if the options ask for it and it is possible. Only live="on" gives the reason if it is
    not."""
    if options.live == "off":
        return None
    is_asked = options.live == "on"
    if not _is_screen(environ):
        if is_asked and print_line is not None:
            print_line(f"infini-run: {_NO_TERMINAL}")
        return None
    try:
        import rich  # noqa: F401  a light module; its parts are imported when the ranks run
    except ImportError:
        if is_asked:
            raise UsageError(_EXTRA) from None
        return None
    from infini_run.display.live_table import LiveTable
    from infini_run.display.terminal import TerminalArea

    return LiveTable(TerminalArea(2), environ, footer)


def _is_screen(environ: Mapping[str, str]) -> bool:
    return os.isatty(2) and environ.get("TERM", "") not in ("", "dumb")
