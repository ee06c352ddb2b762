"""How a run ended, and whether another follows. Pure: the observations are arguments."""

from __future__ import annotations

from infini_run.errors import NodeLost
from infini_run.jobs.folder.records import JobResult
from infini_run.jobs.scheduler import (
    CANCELLED,
    COMPLETED,
    END_REASONS,
    FAILED,
    NODE_FAIL,
    OOM,
    PREEMPTED,
    TIMEOUT,
)
from infini_run.jobs.schedulers.slurm_output import is_out_of_memory
from infini_run.report.text import signal_name
from infini_run.system.signal_numbers import SIGKILL, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.errors import InfiniRunError
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report

AGAIN = 85  # what a rank exits with that wants to be run again: it has saved what it needs


def classify(
    report: Report,
    error: InfiniRunError | None,
    *,
    is_node_failure: bool,
    is_cancelled: bool,
    is_late: bool,
    is_preempted: bool = False,
    is_warned: bool = False,
    attempt: int,
) -> JobResult:
    """Decide how a run ended. Pure.

    Args:
        report: The launch's.
        error: Why the launch ended, if no rank was the reason; None: a rank was, or it ended well.
        is_node_failure: Whether `error` came before any rank failed.
        is_cancelled: Whether the user has asked for the end, which goes before all else.
        is_late: Whether the job is at its time limit.
        is_preempted: Whether the scheduler has given the nodes to another job.
        is_warned: Whether the ranks had the warning before the time limit.
        attempt: Number of the run.

    Returns:
        The record for `exit`.
    """
    first = report.first_failure
    end = JobResult(
        state=COMPLETED,
        code=report.exit_code,
        attempt=attempt,
        end_s=report.end_s,
        at_limit=is_late or is_warned,
    )
    is_known = is_cancelled or is_preempted
    # scancel and qdel are the user's decision; a time limit or a preemption is not.
    may_ask = (is_late or is_preempted) and not is_cancelled
    # TERM ends what was canceled, and this launcher may be the last to receive it
    stop_signal = report.received_signal or (SIGTERM if is_known and (first is not None or error is not None) else 0)
    if error is not None and is_node_failure:
        end = _of_error(error, end)
        if not stop_signal or end.state != NODE_FAIL:
            return end
        # who ends a job ends what reaches its nodes, too (PBS: pbs_tmrsh), and that may be seen first
        if is_known or is_late:
            return _of_signal(stop_signal, end, is_cancelled, is_preempted, is_late)
        return _changed(end, NODE_FAIL, end.reason, scheduler_ended_it=True)
    # Slurm without cgroups signals every process: ranks that save nothing die before the one that saves.
    asked = next((each for each in report.exits if each.code == AGAIN), None) if stop_signal and may_ask else None
    if asked is not None and (first is None or first.shell_code == 128 + stop_signal):
        reason = f"{asked.name} on {asked.host} exited with {AGAIN}"
        return _changed(end, FAILED, reason, code=AGAIN, **_place(asked))
    if stop_signal and (
        first is None or first.shell_code == 128 + stop_signal or (first.code == AGAIN and not may_ask)
    ):
        return _of_signal(stop_signal, end, is_cancelled, is_preempted, is_late)
    if first is not None and first.signal == SIGTERM:  # no process of this run: the scheduler may say whose it was
        return _changed(end, FAILED, report.headline(), **_place(first), scheduler_ended_it=True)
    if first is not None:
        state = OOM if first.out_of_memory else FAILED
        place = _place(first) if report.is_caused_by_rank else {}
        return _changed(end, state, report.headline(), **place)
    if end.code:
        return _changed(end, FAILED, "some of its processes did not end")
    return end


def _place(exit_: Exit) -> dict[str, object]:
    """Return the fields of a result that name a rank."""
    program = {"program": exit_.program, "program_rank": exit_.program_rank} if exit_.program else {}
    return {"node": exit_.host, "rank": exit_.rank, **program}


def _of_signal(stop_signal: int, end: JobResult, is_cancelled: bool, is_preempted: bool, is_late: bool) -> JobResult:
    """Return the result after a signal from outside. Where Slurm signals every process (linuxproc), a rank may die of
    it before the launcher receives it."""
    end = _changed(end, end.state, "", code=128 + stop_signal, node="")
    if is_cancelled:
        return _changed(end, CANCELLED, END_REASONS[CANCELLED])
    if is_preempted:
        return _changed(end, PREEMPTED, END_REASONS[PREEMPTED])
    if is_late:
        return _changed(end, TIMEOUT, END_REASONS[TIMEOUT], scheduler_ended_it=True)
    return _changed(end, CANCELLED, f"it was asked to stop ({signal_name(stop_signal)})", scheduler_ended_it=True)


def _of_error(error: InfiniRunError, end: JobResult) -> JobResult:
    if isinstance(error, NodeLost) and is_out_of_memory(str(error)):  # Slurm ends all of a step for one process
        return _changed(end, OOM, str(error), code=128 + SIGKILL)
    if isinstance(error, NodeLost):
        return _changed(end, NODE_FAIL, str(error), code=error.exit_code, node=error.host)
    return _changed(end, FAILED, str(error), code=error.exit_code)


def _changed(end: JobResult, state: str, reason: str, **changes: object) -> JobResult:
    return JobResult(**{**vars(end), "state": state, "reason": reason, **changes})


def check_timeouts(ending: JobResult, *, timeouts: int, most: int | None) -> JobResult:
    """Return the ending: TIMEOUT where a rank asks for one run too many after the time limit. Pure.

    Args:
        ending: How the run ended.
        timeouts: How often the job ran again after its time limit.
        most: How often it may; None: any number of times.
    """
    if ending.code != AGAIN or ending.state != FAILED or not ending.at_limit or most is None or timeouts < most:
        return ending
    return _changed(ending, TIMEOUT, f"{ending.reason}; --max_timeouts={most} permits no further run")


def check_cancelled(ending: JobResult) -> JobResult:
    """Return the ending of a run after which the user canceled the job: CANCELLED where a rank asks for another one.
    Pure."""
    if ending.code != AGAIN or ending.state != FAILED:
        return ending
    return _changed(ending, CANCELLED, END_REASONS[CANCELLED], code=128 + SIGTERM, node="", rank=-1)


def restart_reason(ending: JobResult, *, failures: int, restarts: int) -> str:
    """Decide whether a job runs again. Pure.

    Args:
        ending: How its run ended.
        failures: How often it ran again after a failure.
        restarts: How often it may.

    Returns:
        Why it is to run again; "": it is not.
    """
    if ending.state in (COMPLETED, CANCELLED, TIMEOUT):
        return ""
    if ending.code == AGAIN:
        return f"{ending.rank_name} on {ending.node} asked to run again (exit code {AGAIN})"
    if failures < restarts:
        return f"restart {failures + 1} of {restarts}: {ending.reason}"
    return ""


def is_restart(reason: str) -> bool:
    """Return whether `restart_reason` gave this reason after a failure. A program may be called `restart`."""
    return reason.startswith("restart ") and reason.split(" ", 3)[2:3] == ["of"]
