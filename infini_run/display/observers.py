"""What watches a launch for people: the table of --live and the trace of --trace, told what happens by NodeLaunch.

Not imported where neither was asked for. What cannot be had is refused here, before anything starts.
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
    from infini_run.display.live_table import LaunchView, LiveTable, Outcome
    from infini_run.display.resource_usage import Sampler
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan

_EXTRA = "--live needs rich, which is not installed: pip install 'infini-run[live]'"
_NO_TERMINAL = "--live: our stderr is no terminal that a table could be drawn on; going on without it"


class Observers:
    """Of one launch, all its attempts. Usable from several threads if the caller serialises the calls."""

    def __init__(self, trace: ChromeTrace | None, display: LiveTable | None) -> None:
        self._trace = trace
        self._display = display
        self._sampler: Sampler | None = None

    def begin(self, plan: Plan, group: Group, outcome: Callable[[], Outcome]) -> None:
        """The ranks are about to be started. outcome: what became of them so far."""
        if self._trace is not None:
            self._trace.begin(plan, group)
        if self._display is not None:
            self._display.begin(self._launch_view(plan, group, outcome))

    def _launch_view(self, plan: Plan, group: Group, outcome: Callable[[], Outcome]) -> LaunchView:
        from infini_run.display.live_table import LaunchView
        from infini_run.display.resource_usage import Sampler

        self._sampler = self._sampler or Sampler()
        return LaunchView(plan, group, outcome, self._sampler.sample)

    def on_event(self, event: Event) -> None:
        if self._trace is not None:
            self._trace.on_event(event)
        if self._display is not None:
            self._display.on_event(event)

    def stop(self) -> None:
        """The ranks are being stopped."""
        if self._trace is not None:
            self._trace.stop()
        if self._display is not None:
            self._display.stop()

    def timeout_s(self, asked_s: float | None) -> float | None:
        """How long to wait at most. Only a table needs a clock."""
        if self._trace is not None:
            asked_s = self._trace.timeout_s(asked_s)
        return asked_s if self._display is None else self._display.timeout_s(asked_s)

    def run_due(self) -> None:
        """Something has happened, or the time is up."""
        if self._trace is not None:
            self._trace.run_due()
        if self._display is not None:
            self._display.run_due()

    def print_above(self, text: str) -> bool:
        """A line for the user above the table; False: there is none."""
        return self._display is not None and self._display.print_above(text)

    def end(self) -> None:
        """The group is about to be closed. Another attempt may follow."""
        if self._trace is not None:
            self._trace.end()
        if self._display is not None:
            self._display.end()

    def close(self) -> str:
        """The launch is over: write the trace. Safe twice. Why that was not possible, or ""."""
        if self._display is not None:
            self._display.close()
        if self._sampler is not None:
            self._sampler.close()
        return "" if self._trace is None else self._trace.write()


def open_observers(
    options: Options, environ: Mapping[str, str], *, print_line: Callable[[str], None] | None
) -> tuple[Observers | None, Options]:
    """Open the table and the trace that were asked for.

    Args:
        options: What the user asked for.
        environ: The launcher's environment.
        print_line: Gets a sentence if there is no terminal for the table. None: nothing is said.

    Returns:
        The observers, None if there are none; and the options with `live` "on" or "off".

    Raises:
        UsageError: rich is missing, or the trace cannot be written.
    """
    check_names(options)
    trace = None
    if options.trace:
        from infini_run.display.chrome_trace import ChromeTrace
        from infini_run.plan.program import absolute
        from infini_run.system.secure_files import check_writable

        trace = ChromeTrace(absolute("trace", options.trace))
        check_writable("trace", options.trace, options.log_dir)
    display = open_display(options, environ, print_line)
    options = replace(options, live="off" if display is None else "on")
    return (None if trace is None and display is None else Observers(trace, display)), options


def check_names(options: Options) -> None:
    """Raises UsageError: trace and report are one file."""
    if options.trace and options.report and _target("trace", options.trace) == _target("report", options.report):
        raise UsageError(f"--trace={options.trace} and --report={options.report} are one file: give two names")


def _target(flag: str, path: str) -> tuple[str, str]:
    """The folder and the name that a file is renamed to: links lead to a folder, a link itself is replaced."""
    from infini_run.plan.program import absolute

    folder, name = os.path.split(absolute(flag, path))
    return os.path.realpath(folder), name


def open_display(
    options: Options,
    environ: Mapping[str, str],
    print_line: Callable[[str], None] | None,
    footer: Callable[[], str] = str,
) -> LiveTable | None:
    """`auto` is silent about what it does without."""
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
