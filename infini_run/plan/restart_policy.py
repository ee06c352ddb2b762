"""Whether a launch that failed is started again, when, and with what plan. Pure: a report in, a decision out.

The one rule: nothing here knows how ranks are started or stopped. `decide` is the same for one node and for whoever
has the report of several.
"""

from __future__ import annotations

from infini_run.plan.model import MARK, notify_address
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan, Worker
    from infini_run.report.report import Report

MOST_DELAY_S = 300.0  # the delay doubles up to this; one that was asked for beyond it stays as it is
JITTER = 0.25  # of a delay that several nodes wait for: up to so much less, that not all come back in one moment
_DOUBLINGS = 60  # more are beyond any delay
_CANNOT_RUN = {126: "the program cannot be executed", 127: "the program is not there"}


@record
class RestartCount:
    """Restarts so far: `spent` of the budget since it was last whole, `total` of the launch."""

    spent: int = 0
    total: int = 0


@record
class Decision:
    """`again`: all ranks are started once more, `delay_s` from now, and `tally` counts it. Else `why` it is not so,
    or "" where that is plain: nothing failed, or the budget is used up."""

    again: bool
    tally: RestartCount
    delay_s: float = 0.0
    why: str = ""


def decide(report: Report, options: Options, tally: RestartCount, chance: float = 0.0) -> Decision:
    """Whether the job whose end `report` tells is started again. chance: from 0 to 1, each node's own."""
    first = report.first_failure
    if first is None or report.told or report.quiet:  # quiet: Ctrl-C was the lone rank's own
        return Decision(again=False, tally=tally)
    if first.shell_code - 128 in report.passed:  # killed by it, or says so
        from infini_run.report.report import signal_name

        return Decision(again=False, tally=tally, why=f"{signal_name(first.shell_code - 128)} was sent to the job")
    if first.shell_code in _CANNOT_RUN:
        return Decision(again=False, tally=tally, why=_CANNOT_RUN[first.shell_code])
    if report.stuck:
        return Decision(again=False, tally=tally, why="not all of it could be ended")
    return spend(options, tally, good_s(report, options), chance)


def spend(options: Options, tally: RestartCount, good_s: float, chance: float = 0.0) -> Decision:
    """One restart of the budget, which is whole again after a good run that was long enough."""
    spent = 0 if 0 < options.restart_window_s <= good_s else tally.spent
    if spent >= options.max_restarts:
        return Decision(again=False, tally=tally)
    jitter = JITTER * chance if options.nnodes > 1 else 0.0
    delay_s = delay_of(options.restart_delay_s, spent + 1) * (1 - jitter)
    return Decision(again=True, tally=RestartCount(spent=spent + 1, total=tally.total + 1), delay_s=delay_s)


def delay_of(first_s: float, number: int) -> float:
    """The delay before restart `number`, from 1: the first one, doubled each time."""
    return min(first_s * 2.0 ** min(number - 1, _DOUBLINGS), max(first_s, MOST_DELAY_S))


def good_s(report: Report, options: Options) -> float:
    """How long all ranks were up and well before the first failure: from their start, or where they are asked for
    it from the last READY=1, and without the time in which one hung before we saw it and stopped it."""
    first = report.first_failure
    if first is None:
        return report.end_s - report.start_s
    begin_s = report.start_s
    if options.ready_timeout_s:
        ready = [e.ready_s for e in report.exits if e.ready_s is not None]
        if len(ready) < len(report.exits):
            return 0.0
        begin_s = max(ready)
    ill_s = 2 * options.hang_timeout_s + options.grace_s if first.verdict else 0.0
    return max(0.0, (first.end_s or report.end_s) - ill_s - begin_s)


def describe(tally: RestartCount, options: Options) -> str:
    """`restart 1 of 3`; in all there may have been more, before the budget was whole again."""
    more = f" ({tally.total} in all)" if tally.total > tally.spent else ""
    return f"restart {tally.spent} of {options.max_restarts}{more}"


def with_new_launch_id(plan: Plan, *, launch_id: str, master_port: int, restarts: int) -> Plan:
    """The same plan for the next attempt: with a mark, and so with addresses, of its own."""
    new = {MARK: launch_id, "MASTER_PORT": str(master_port), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    workers = []
    for worker in plan.workers:
        notify = notify_address(launch_id, worker.rank)
        log, error_log, error_file = _files(worker, restarts)
        changed = {"NOTIFY_SOCKET": notify, "TORCHELASTIC_ERROR_FILE": error_file}
        env = tuple((name, changed.get(name, value)) for name, value in worker.env)
        workers.append(replace(worker, env=env, notify=notify, log=log, error_log=error_log, error_file=error_file))
    return replace(
        plan,
        launch_id=launch_id,
        master_port=master_port,
        env=tuple((name, new.get(name, value)) for name, value in plan.env),
        workers=tuple(workers),
    )


def _files(worker: Worker, restarts: int) -> tuple[str, str, str]:
    """Its log, stderr's own log, its error file: the same ones, but for torchrun's layout (--log_layout)."""
    files = worker.log, worker.error_log, worker.error_file
    if not worker.error_log:
        return files
    from infini_run.options.torchrun import in_attempt

    return in_attempt(files[0], restarts), in_attempt(files[1], restarts), in_attempt(files[2], restarts)
