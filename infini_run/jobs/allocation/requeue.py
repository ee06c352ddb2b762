"""A job that runs has itself queued again, or kept from it. Of an array that is one task.

The one rule: the TERM that Slurm sends this process then must not end the command that asks: the result would be
unknown.
"""

from __future__ import annotations

import _signal as signal

from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.folder.task import Task
from infini_run.jobs.scheduler import TIMED_OUT
from infini_run.jobs.schedulers.detect_scheduler import find_scheduler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.folder.records import Submission
    from infini_run.jobs.scheduler import Scheduler


def keep_out(
    folder: JobDir, job: Submission, environ: Mapping[str, str], *, print_line: Callable[[str], None]
) -> None:
    """Keep Slurm from queueing a preempted job once more than `--restarts` allows."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        find_scheduler(job.request.scheduler, folder.home, environ).cancel(folder.id)
    except (UsageError, QueryError) as error:
        print_line(f"it may run again: {error}")  # then it ends when it begins


def requeue(
    folder: JobDir, job: Submission, environ: Mapping[str, str], *, print_line: Callable[[str], None]
) -> InfiniRunError | None:
    """Have the scheduler run this job again: by its id, or as a new job of the same name.

    Args:
        folder: Of the job, or of a task.
        job: The submission.
        environ: That of the allocation.
        print_line: Gets what goes wrong, and ends nothing.

    Returns:
        Why it does not run again; None: it does, or its scheduler will tell.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        scheduler = find_scheduler(job.request.scheduler, folder.home, environ)
        if not scheduler.requeue(folder.id):
            folder.write_id(_hand_over(folder, scheduler, print_line))
    except SubmitError as error:
        if error.kind != TIMED_OUT:
            return error
        print_line(f"it may run again: {error}")  # the scheduler knows, and who asks for its state asks that one
    except (UsageError, QueryError) as error:
        return error
    return None


def _hand_over(folder: JobDir, scheduler: Scheduler, print_line: Callable[[str], None]) -> str:
    """Submit the job as a new one. Raises SubmitError."""
    from infini_run.jobs.request.script import render_task
    from infini_run.jobs.submit import hand_over

    if scheduler.name == "pbs" and isinstance(folder, Task):
        folder.write_script(render_task(folder.read_script(), folder.index))
    name = folder.queue_name
    return hand_over(scheduler, folder.script, name, print_line=print_line, folder=folder, before=folder.id)
