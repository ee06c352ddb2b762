"""What a job's script runs on its first node: the runs of one allocation (job_run.py has a single one).

    python -m infini_run.jobs.allocation_main FOLDER [K]        K: of an array the task

The one rule: only this module decides whether the job runs again, and what its recorded end is.
"""

from __future__ import annotations

import _signal as signal
import os
import sys
import time

from infini_run.core.signal_pipe import SignalPipe
from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.allocation.job_run import JobRun, print_line, try_write, with_programs
from infini_run.jobs.allocation.result import (
    AGAIN,
    check_cancelled,
    check_timeouts,
    is_restart,
    restart_reason,
)
from infini_run.jobs.allocation.time_limit import slurm_id
from infini_run.jobs.errors import QueryError
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.records import REQUEUED, JobResult
from infini_run.jobs.folder.task import Task, task_of
from infini_run.jobs.request.array import whole_id
from infini_run.jobs.request.launch_words import ENGINES
from infini_run.jobs.scheduler import CANCELLED, NODE_FAIL, PREEMPTED
from infini_run.lean_os import drop_coerced_locale
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def run(folder: JobDir, environ: Mapping[str, str]) -> int:
    """Run the job once; on this machine without a scheduler, as often as it has to run. Return the exit code. Raises
    UsageError: this is not the job's allocation."""
    job = folder.read_submission()
    signals = SignalPipe()
    if job.request.scheduler in ENGINES:
        _write_id(folder, _own_id(folder, job.request.scheduler, environ))
    while True:
        number = folder.begin()
        failures = _failures(folder, number)
        if folder.is_cancelled:  # before its scheduler had it
            cancelled = JobResult(
                state=CANCELLED,
                code=128 + signal.SIGTERM,
                reason="it was canceled",
                attempt=number,
                end_s=time.time(),
            )
            return _end(folder, cancelled)
        if number > 0 and failures > job.request.restarts:
            return _end(folder, _unwanted(folder, number))
        ended = JobRun(folder, job, number, signals, environ).run()
        ending = check_timeouts(ended, timeouts=_timeouts(folder, number), most=job.request.max_timeouts)
        if ending != ended:
            print_line(ending.reason)
        why = restart_reason(ending, failures=failures, restarts=job.request.restarts)
        is_cancelled = folder.is_cancelled  # perhaps after the end of the run
        if is_cancelled:
            ending = check_cancelled(ending)
        if not why or is_cancelled:
            if ending.state == PREEMPTED and job.request.restarts:
                from infini_run.jobs.allocation.requeue import keep_out

                keep_out(folder, job, with_programs(environ), print_line=print_line)
            return _end(folder, ending)
        if not ending.reason.startswith(why.rstrip(")")):  # else the report has it, with pid and time
            print_line(why)
        _note_requeue(folder, ending, why)
        if job.request.scheduler in ENGINES:
            from infini_run.jobs.allocation.requeue import requeue

            problem = requeue(folder, job, with_programs(environ), print_line=print_line)
            return ending.code if problem is None else _end(folder, _with(ending, problem))


def _own_id(folder: JobDir, scheduler: str, environ: Mapping[str, str]) -> str:
    """Return the scheduler's id of this allocation. A user may run the script, too: by then, the job has another id,
    and its name shows a later run of the job. Raises UsageError: this is not the job's allocation."""
    is_slurm = scheduler == "slurm"
    found = slurm_id(environ) if is_slurm else environ.get("PBS_JOBID", "")
    name = environ.get("SLURM_JOB_NAME" if is_slurm else "PBS_JOBNAME", "")
    names = ["", folder.queue_name, *([folder.array.queue_name] if isinstance(folder, Task) else [])]
    if not found or (found != folder.id and name not in names):
        raise UsageError(
            f"{scheduler}: not in the allocation of {folder.name}; only its scheduler can run the script of a job"
        )
    return found


def _write_id(folder: JobDir, own_id: str) -> None:
    """Record the scheduler's id if the directory has another: the submission had no answer, or this is a later
    run."""
    if isinstance(folder, Task) and not folder.array.id:
        folder.array.write_id(whole_id(own_id))
    if own_id != folder.id:
        folder.write_id(own_id)


def _end(folder: JobDir, ending: JobResult) -> int:
    try_write("how it ended", lambda: folder.write_result(ending))
    return ending.code


def _with(ending: JobResult, problem: InfiniRunError) -> JobResult:
    """Return the ending with the problem of queueing it again. After no answer the job may be queued; its scheduler
    knows."""
    text = f"cannot queue it again: {problem}"
    print_line(text)
    return replace(
        ending,
        reason=f"{ending.reason}; {text}",
        scheduler_ended_it=ending.scheduler_ended_it or isinstance(problem, QueryError),
    )


def _note_requeue(folder: JobDir, ending: JobResult, why: str) -> None:
    phase = folder.phase(ending.attempt)
    assert phase is not None
    at_limit = ending.code == AGAIN and ending.at_limit
    requeued = replace(phase, state=REQUEUED, since_s=time.time(), reason=why, at_limit=at_limit)
    try_write("its phase", lambda: folder.write_phase(ending.attempt, requeued))


def _failures(folder: JobDir, number: int) -> int:
    """Return how often the job ran again after a failure. A failure is one of its ranks', a preemption, or one
    without a record (a node died under the script itself)."""
    return sum(_failed(folder, earlier) for earlier in range(number))


def _failed(folder: JobDir, attempt: int) -> bool:
    phase = folder.phase(attempt)
    if phase is not None and phase.state == REQUEUED:
        return is_restart(phase.reason)
    earlier = folder.result(attempt)
    return earlier is None or earlier.state == PREEMPTED


def _timeouts(folder: JobDir, number: int) -> int:
    """Return how often the job ran again after its time limit."""
    phases = (folder.phase(earlier) for earlier in range(number))
    return sum(phase is not None and phase.at_limit for phase in phases)


def _unwanted(folder: JobDir, number: int) -> JobResult:
    """Return the ending of a run that the scheduler began beyond the requested restarts."""
    reason = "the scheduler stopped and restarted it; add --restarts=N to permit that"
    earlier = folder.result(number - 1)
    state = PREEMPTED if earlier is not None and earlier.state == PREEMPTED else NODE_FAIL
    return JobResult(state=state, code=1, reason=reason, attempt=number, end_s=time.time())


def main() -> None:
    """Run as the job's script. A signal before the handlers exist ends the process, as for any program."""
    if len(sys.argv) not in (2, 3) or not os.path.isdir(sys.argv[1]):
        sys.exit(
            f"infini-job: {' '.join(sys.argv[1:])}: missing on {os.uname().nodename}; "
            "use a --dir that the nodes share"
        )
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    drop_coerced_locale()
    folder = JobDir(os.path.abspath(sys.argv[1]))
    try:
        code = run(task_of(folder, int(sys.argv[2])) if sys.argv[2:] else folder, dict(os.environ))
    except InfiniRunError as error:
        print_line(str(error))
        code = error.exit_code
    except OSError as error:  # of the job's directory
        print_line(f"{error.filename or folder.path}: {error.strerror}")
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main()
