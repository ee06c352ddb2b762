"""The command `infini-run`: words in, an exit code out. Owns its process from the first line on."""

from __future__ import annotations

import _signal
import gc
import os
import sys

from infini_run.errors import InfiniRunError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.group import Entry
    from infini_run.options import Options
    from infini_run.plan import Plan

ISOLATED = "INFINI_RUN_ISOLATED"  # set by ourselves, for ourselves, one level down: the signal mask we found


def main() -> None:
    """Run, and leave at once: the interpreter's own end costs 2 ms and has nothing to do here.

    All signals are blocked first and stay so: they are read, not handled, and as process 1 a signal that
    is neither blocked nor handled is dropped by the kernel.
    """
    gc.disable()  # we make few objects and no cycles; looking for them costs start-up
    everything = _signal.valid_signals()
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, everything)
    try:
        code = _run(sys.argv[1:], before)
    except InfiniRunError as error:
        _print(2, f"infini-run: {error}")
        code = error.exit_code
    os._exit(code)


def _run(argv: list[str], before: set[int]) -> int:
    from infini_run.options import resolve

    environ = dict(os.environ)
    request = resolve(argv, environ)
    if request.options is None:
        return _answer(request.question, before)
    options = request.options
    found = environ.pop(ISOLATED, "")
    is_inside = found.isdecimal() and os.getpid() == 1
    if is_inside:
        before = {number for number in range(1, 65) if int(found) >> (number - 1) & 1}
    if options.dry_run:
        return _show(_make_plan(options, environ), options, before)
    if options.isolate and not is_inside:
        return _run_isolated(options, environ, _take_entry(before))
    return _launch(options, environ, before)


def _take_entry(before: set[int]) -> Entry:
    from infini_run.group import take_entry

    return take_entry(sum(1 << (number - 1) for number in before))


def _make_plan(options: Options, environ: dict[str, str]) -> Plan:
    from infini_run.plan import make_plan
    from infini_run.program import find_command
    from infini_run.survey import error_folder, free_port, new_launch_id, survey

    command = find_command(options.program, environ, module=options.module, no_python=options.no_python)
    launch_id = new_launch_id()
    return make_plan(
        options,
        command,
        [survey(options, environ)],
        launch_id=launch_id,
        master_port=options.master_port or free_port(),
        environ=environ,
        error_dir=error_folder(options, launch_id, environ),
        stdin_is_terminal=options.stdin != "none" and os.isatty(0),
    )


def _launch(options: Options, environ: dict[str, str], before: set[int]) -> int:
    from infini_run.group import settle_entry
    from infini_run.node import NodeRun
    from infini_run.survey import absolute

    entry = _take_entry(before)
    plan = _make_plan(options, environ)
    report_path = absolute("report", options.report) if options.report else ""
    run = NodeRun(plan, options, environ=environ, entry=entry, say=lambda text: _print(2, text))
    run.start()
    settle_entry()
    while not run.ended:
        run.poll()
    run.close()
    if run.went_well and not report_path:
        return 0
    report = run.outcome.report()
    text = report.text()
    if text:
        _print(2, text)
    if report_path:
        _write_report(report_path, report.to_json())
    return report.exit_code


def _write_report(path: str, content: dict[str, object]) -> None:
    from infini_run.files import write_report

    try:
        write_report(path, content)
    except OSError as error:
        _print(2, f"infini-run: the report {path} cannot be written: {error.strerror}")


def _run_isolated(options: Options, environ: dict[str, str], entry: Entry) -> int:
    """Run this same command as process 1 of a new PID namespace: when it ends, the kernel ends all in it.

    It stops its ranks itself, within its own grace; ours is only for the case that it does not.
    """
    from infini_run.isolate import run_isolated

    environ[ISOLATED] = str(entry.blocked)
    command = [sys.executable, *sys.orig_argv[1:]]
    return run_isolated(command, environ, entry, grace_s=options.grace_s, say=lambda text: _print(2, text))


def _answer(question: str, before: set[int]) -> int:
    _signal.pthread_sigmask(_signal.SIG_SETMASK, before)  # a pager may have gone, or nobody may read
    if question == "version":
        from importlib.metadata import version

        _print(1, f"infini-run {version('infini-run')}")
    else:
        from infini_run.manual import help_text

        _print(1, help_text(full=question == "helpfull"))
    return 0


def _show(plan: Plan, options: Options, before: set[int]) -> int:
    from infini_run.dry_run import render_json, render_text

    _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
    _print(1, render_json(plan) if options.dry_run == "json" else render_text(plan))
    return 0


def _print(fd: int, text: str) -> None:
    """A console that is gone is nobody's failure."""
    data = os.fsencode(text + "\n")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return
