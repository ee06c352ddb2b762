"""The observers of a launch: the table of --live and the trace of --trace. NodeLaunch gives them its events.

Their import comes with one of the two flags. This module rejects a flag that has no effect, before any rank starts.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.core.group import Event, Group
    from infini_run.display.chrome_trace import ChromeTrace
    from infini_run.display.live_table import LaunchView, LiveTable, RankStates
    from infini_run.display.resource_usage import Sampler
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan

_EXTRA = "--live: needs rich; run pip install 'infini-run[live]'"
_NO_TERMINAL = "--live: stderr is not a terminal; continuing without the table"


class Observers:
    """The observers of one launch, for all its attempts. Any thread may call, one at a time.

    Args:
        trace: The trace. None: not asked for.
        display: The live table. None: not asked for.
    """

    def __init__(self, trace: ChromeTrace | None, display: LiveTable | None) -> None:
        self._trace = trace
        self._display = display
        self._sampler: Sampler | None = None

    def begin(self, plan: Plan, group: Group, outcome: Callable[[], RankStates]) -> None:
        """Begin an attempt, before its ranks start.

        Args:
            plan: The plan of the attempt.
            group: Its processes.
            outcome: Returns the state of its ranks so far.
        """
        if self._trace is not None:
            self._trace.begin(plan, group)
        if self._display is not None:
            self._display.begin(self._launch_view(plan, group, outcome))

    def _launch_view(self, plan: Plan, group: Group, outcome: Callable[[], RankStates]) -> LaunchView:
        from infini_run.display.live_table import LaunchView
        from infini_run.display.resource_usage import Sampler

        self._sampler = self._sampler or Sampler()
        return LaunchView(plan, group, outcome, self._sampler.sample)

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        if self._trace is not None:
            self._trace.on_event(event)
        if self._display is not None:
            self._display.on_event(event)

    def add_span(self, name: str, start_ns: int, end_ns: int, text: str = "") -> None:
        """Add a span of the launcher's own work to the trace.

        Args:
            name: What was done.
            start_ns: When it began, in CLOCK_MONOTONIC's nanoseconds.
            end_ns: When it ended.
            text: More about it.
        """
        if self._trace is not None:
            self._trace.add_span(name, start_ns, end_ns, text)

    def stop(self) -> None:
        """Note the stop of the ranks."""
        if self._trace is not None:
            self._trace.stop()
        if self._display is not None:
            self._display.stop()

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the next frame or count, at most `asked_s`. None: there is no limit."""
        if self._trace is not None:
            asked_s = self._trace.timeout_s(asked_s)
        return asked_s if self._display is None else self._display.timeout_s(asked_s)

    def run_due(self) -> None:
        """Draw the table and count output, if that is due. Call it after events and timeouts."""
        if self._trace is not None:
            self._trace.run_due()
        if self._display is not None:
            self._display.run_due()

    def print_above(self, text: str) -> bool:
        """Print a line above the table. Return False if there is no table."""
        return self._display is not None and self._display.print_above(text)

    def end(self) -> None:
        """End the attempt, before its group closes. Another attempt may follow."""
        if self._trace is not None:
            self._trace.end()
        if self._display is not None:
            self._display.end()

    def close(self) -> str:
        """End the launch and write the trace. Return the reason if that was not possible, else "". Safe twice."""
        if self._display is not None:
            self._display.close()
        if self._sampler is not None:
            self._sampler.close()
        return "" if self._trace is None else self._trace.write()


def open_observers(
    options: Options, environ: Mapping[str, str], *, print_line: Callable[[str], None] | None
) -> tuple[Observers | None, Options]:
    """Open the table and the trace, if the options ask for them.

    Args:
        options: What the user asked for.
        environ: The launcher's environment.
        print_line: Gets a sentence if there is no terminal for the table. None: nothing is said.

    Returns:
        The observers, None if there are none; and the options with `live` "on" or "off".

    Raises:
        UsageError: rich is missing, or the trace is not writable.
    """
    check_names(options)
    trace = None
    if options.trace:
        from infini_run.display.chrome_trace import ChromeTrace
        from infini_run.plan.program import absolute_flag_path
        from infini_run.system.secure_files import check_writable

        trace = ChromeTrace(absolute_flag_path("trace", options.trace))
        check_writable("trace", options.trace, options.log_dir)
    display = open_display(options, environ, print_line)
    options = replace(options, live="off" if display is None else "on")
    return (None if trace is None and display is None else Observers(trace, display)), options


def check_names(options: Options) -> None:
    """Check that the trace and the report are two files. Raises UsageError: they are one."""
    if options.trace and options.report and _target("trace", options.trace) == _target("report", options.report):
        raise UsageError(
            f"--trace={options.trace} conflicts with --report={options.report}: both are one file; use two names"
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
        import rich  # noqa: F401  light by itself; its parts are imported when the ranks run
    except ImportError:
        if is_asked:
            raise UsageError(_EXTRA) from None
        return None
    from infini_run.display.live_table import LiveTable
    from infini_run.display.terminal import TerminalArea

    return LiveTable(TerminalArea(2), environ, footer)


def _is_screen(environ: Mapping[str, str]) -> bool:
    return os.isatty(2) and environ.get("TERM", "") not in ("", "dumb")
