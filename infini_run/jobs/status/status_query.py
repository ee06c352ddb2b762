"""How jobs are: their own word, else what their scheduler says, by one query for all of them.

The one rule: a job that is not in the answer is not finished, and no answer changes nothing. Whoever sees what a
scheduler will forget writes it down.
"""

from __future__ import annotations

import contextlib
import time

from infini_run.errors import UsageError
from infini_run.jobs.errors import QueryError
from infini_run.jobs.folder.records import REQUEUED, JobResult
from infini_run.jobs.folder.task import Task, tasks_of
from infini_run.jobs.scheduler import (
    CANCELLED,
    COMPLETED,
    END_REASONS,
    FAILED,
    LIVE,
    LOST,
    OOM,
    QUEUED,
    STARTING,
    SUSPENDED,
)
from infini_run.jobs.schedulers.slurm_output import is_out_of_memory
from infini_run.jobs.status.each_job import for_each, kept, note_progress
from infini_run.jobs.status.job_status import Status, whole
from infini_run.record import replace
from infini_run.system.secure_files import read_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.folder.records import Phase, Submission
    from infini_run.jobs.scheduler import Scheduler, SchedulerJob

LOCAL = "local"
_LEFT_OUT = "its array has no such task: it was canceled while it waited"
_LEFT_OUT_OR_FORGOTTEN = f"{_LEFT_OUT}, or ended before it started, and without accounting the scheduler forgot it"
_LINES = 5  # of the scheduler's: earlier ones may be of an earlier run
_END_BYTES = 1 << 16  # bytes of it that are read
_KNOWN_S = 60.0  # a file server may hide a new file for this long (nfs(5), acdirmax)


def query_status(
    folders: Sequence[JobDir], scheduler_of: Callable[[Submission], Scheduler], now_s: float | None = None
) -> list[Status]:
    """Return the statuses of jobs, by one query of each scheduler; finished jobs need none.

    Args:
        folders: Of jobs, arrays or tasks.
        scheduler_of: Gives the scheduler of a submission; UsageError and QueryError from it become `query_error`.
        now_s: Seconds since the epoch; None: now.

    Returns:
        One status per directory, in their order. It also records what a scheduler might forget.

    Raises:
        UsageError: One is no job's directory.
        InfiniRunError: A file of one is not readable, or infini-job did not write it.
    """
    reads = [_Reading(folder) for folder in folders]
    _ask(reads, scheduler_of)
    return [read.status(now_s) for read in reads]


def query_each(
    folders: Sequence[JobDir],
    scheduler_of: Callable[[Submission], Scheduler],
    problem: Callable[[str], None] | None,
) -> list[Status]:
    """Return the statuses of jobs as `query_status` does, each alone.

    Args:
        folders: Of jobs, arrays or tasks.
        scheduler_of: Gives the scheduler of a submission, as for `query_status`.
        problem: Gets a line per job that is unreadable, or does not answer (`each_job.HUNG_S`); None: raise it.

    Returns:
        The statuses of the others, in their order.

    Raises:
        InfiniRunError: One is unreadable, and `problem` is None.
    """
    reads = kept(for_each(folders, _Reading, lambda folder: folder.path), problem)
    _ask(reads, scheduler_of)
    return kept(for_each(reads, lambda read: read.status(), lambda read: read.folder.path), problem)


class _Reading:
    """What the directory of a job says of itself or of its tasks, and what its scheduler has answered then."""

    def __init__(self, folder: JobDir) -> None:
        self.folder = folder
        self.submission = folder.read_submission()
        self._tasks = tasks_of(folder)
        self._found = [(one, _read(one)) for one in self._tasks or (folder,)]
        self.asked = [one for one, status in self._found if not status.is_final]
        self.ids = {one.queue_name: id_ for one in self.asked if (id_ := one.id)}
        self._submitted = {one.name for one in self.asked if _is_submitted(one)}
        self.query_error = ""
        self.seen: Mapping[str, SchedulerJob] = {}
        self.has_accounting = False

    def status(self, now_s: float | None = None) -> Status:
        """Return the status with the answer. Raises InfiniRunError, as its beginning."""
        now_s = time.time() if now_s is None else now_s
        found = [status if status.is_final else self._answered(one, status, now_s) for one, status in self._found]
        return whole(_read(self.folder), found) if self._tasks else found[0]

    def _answered(self, one: JobDir, status: Status, now_s: float) -> Status:
        if self.query_error:
            return replace(status, query_error=self.query_error)
        return _combine(
            one,
            self.ids.get(one.queue_name, ""),
            self.seen,
            now_s,
            was_submitted=one.name in self._submitted,
            has_accounting=self.has_accounting,
        )


def _ask(reads: Sequence[_Reading], scheduler_of: Callable[[Submission], Scheduler]) -> None:
    """Query each scheduler once."""
    groups: dict[str, list[_Reading]] = {}
    for read in reads:
        if read.asked:
            groups.setdefault(read.submission.request.scheduler, []).append(read)
    for group in groups.values():
        try:
            scheduler = scheduler_of(group[0].submission)
            ids = {name: id_ for read in group for name, id_ in read.ids.items()}
            seen = scheduler.query([one.queue_name for read in group for one in read.asked], ids)
        except (QueryError, UsageError) as error:  # it does not answer, or is not here: no news
            for read in group:
                read.query_error = str(error)
            continue
        for read in group:
            read.seen, read.has_accounting = seen, scheduler.has_accounting


def read_status(folder: JobDir, known: Status | None = None) -> Status:
    """Return what the directory alone says.

    Args:
        folder: Of a job, an array or a task.
        known: An earlier status of an array: its finished tasks are not read again; None: read all.

    Raises:
        UsageError: It is no job's directory.
        InfiniRunError: A file in it is not what infini-job has written.
    """
    tasks = tasks_of(folder)
    if not tasks:
        return _read(folder)
    ended = {task.name: task for task in known.tasks if task.is_final} if known else {}
    return whole(_read(folder), [ended.get(task.name) or _read(task) for task in tasks])


def _read(folder: JobDir) -> Status:
    note_progress()
    job = folder.read_submission()
    attempts = folder.attempts()
    phase = folder.phase(attempts - 1) if attempts else None
    ending = folder.result()
    status = Status(
        name=folder.name,
        state=STARTING if attempts else QUEUED,
        scheduler=job.request.scheduler,
        id=folder.id,
        shape=job.shape if folder.index >= 0 else job.whole_shape,
        command=job.request.command,
        folder=folder.path,
        submitted_s=job.submitted_s,
        since_s=job.submitted_s,
        attempt=attempts - 1,
        task=folder.index,
        title=job.request.title,
    )
    if phase is not None:
        status = _in_phase(status, phase)
    if ending is not None and ending.attempt >= attempts - 1:  # else of a run before: somebody wrote it late
        status = _ended(status, ending)
    return status


def _in_phase(status: Status, phase: Phase) -> Status:
    state = QUEUED if phase.state == REQUEUED else phase.state
    hosts = {"nodes": phase.nodes, "spares": phase.spares, "lost": phase.lost}
    return replace(status, state=state, since_s=phase.since_s, reason=phase.reason, **hosts)


def _ended(status: Status, ending: JobResult) -> Status:
    """Return the status of a job that the scheduler ended, and may run again: it answers once more, while it knows
    the job."""
    return replace(
        status,
        state=ending.state,
        code=ending.code,
        node=ending.node,
        rank=ending.rank,
        program=ending.program,
        program_rank=ending.program_rank,
        reason=ending.reason,
        since_s=ending.end_s,
        attempt=max(status.attempt, ending.attempt),
        is_final=not ending.scheduler_ended_it,
        scheduler_ended_it=ending.scheduler_ended_it,
    )


def _combine(
    folder: JobDir,
    asked_id: str,
    seen: Mapping[str, SchedulerJob],
    now_s: float,
    *,
    was_submitted: bool,
    has_accounting: bool,
) -> Status:
    """Return the status with the scheduler's answer. was_submitted: it had the job at the time of the query. This
    reads the directory anew. Meanwhile the job may be finished, or in the queue again under another id, which the
    answer leaves out."""
    status = read_status(folder)
    if status.is_final or (asked_id and status.id != asked_id):
        return status
    answer = seen.get(folder.queue_name)
    if answer is None:
        is_left_out = isinstance(folder, Task) and status.attempt < 0 and _knows_array(folder, seen)
        return _missing(
            folder, status, now_s, is_left_out, was_submitted=was_submitted, has_accounting=has_accounting
        )
    if not answer.state:
        return replace(status, query_error=answer.reason)
    status = replace(status, id=answer.id)
    if answer.state in LIVE:
        return _alive(folder, status, answer)
    return _gone(folder, status, answer, now_s)


def _is_submitted(folder: JobDir) -> bool:
    """Return whether the scheduler gave an id: to a task, that of its array."""
    return bool(folder.array.id if isinstance(folder, Task) else folder.id)


def _knows_array(task: Task, seen: Mapping[str, SchedulerJob]) -> bool:
    """Return whether the answer has the array itself: another id under its name is that of a task that runs again."""
    name = task.array.queue_name
    return name in seen and seen[name].id == task.array.id


def _alive(folder: JobDir, status: Status, answer: SchedulerJob) -> Status:
    """Return the status of a job that waits, or runs: its own phase has its progress, unless that is an earlier
    run's."""
    phase = folder.phase(status.attempt) if status.attempt >= 0 else None
    base = replace(status, code=-1, node="", rank=-1, is_final=False, scheduler_ended_it=False)
    if answer.state == QUEUED:
        return replace(
            base, state=QUEUED, reason=answer.reason, hold=answer.hold, advice=answer.advice,
            since_s=phase.since_s if phase else status.submitted_s,
        )  # fmt: skip
    if answer.state == SUSPENDED:
        return replace(base, state=SUSPENDED, reason="")
    if phase is None or phase.state == REQUEUED:
        return replace(base, state=STARTING, reason="")
    return replace(base, state=phase.state, since_s=phase.since_s, reason="")


def _gone(folder: JobDir, status: Status, answer: SchedulerJob, now_s: float) -> Status:
    """Return the status of a job that ended without its own record, or with one that the scheduler knows better."""
    if status.scheduler_ended_it:
        state = status.state if answer.state in (COMPLETED, FAILED, LOST) else answer.state
        reason = status.reason if state == status.state else END_REASONS.get(state, status.reason)
        return _record_end(folder, replace(status, state=state, reason=reason), now_s, replaces=True)
    reason, last_line = answer.reason, _out_of_memory(folder)
    if last_line and answer.state in (FAILED, CANCELLED, OOM):
        return _record_end(folder, replace(status, state=OOM, code=answer.code, reason=last_line), now_s)
    state = CANCELLED if folder.is_cancelled and answer.state in (FAILED, LOST) else answer.state
    if state == CANCELLED and status.attempt < 0:
        reason = END_REASONS[state] if state != answer.state else reason or END_REASONS[state]
    elif status.attempt < 0 and state in (FAILED, COMPLETED):
        why = (
            _last_line(folder)
            or f"it started nothing; check that its nodes share {folder.path}, or set another --dir"
        )
        reason = f"{reason}: {why}" if reason else why
    elif status.attempt >= 0 and not reason:
        reason = END_REASONS.get(state) or f"reason unknown; run infini-job logs {folder.name}"
    return _record_end(folder, replace(status, state=state, code=answer.code, reason=reason), now_s)


def _missing(
    folder: JobDir, status: Status, now_s: float, is_left_out: bool, *, was_submitted: bool, has_accounting: bool
) -> Status:
    """Return the status of a job that the scheduler does not know (any more). is_left_out: it knows the array of this
    task, which never began. Slurm drops a task canceled in its queue, even from its accounting. Without accounting
    it forgets one that ended, too (MinJobAge)."""
    if status.state not in LIVE:  # scheduler_ended_it, and forgotten: its own word is all that there is
        return _record_end(folder, status, now_s, replaces=True)
    if folder.is_cancelled:
        return _record_end(folder, replace(status, state=CANCELLED, code=-1, reason=END_REASONS[CANCELLED]), now_s)
    if is_left_out and has_accounting:
        return _record_end(folder, replace(status, state=CANCELLED, code=-1, reason=_LEFT_OUT), now_s)
    if is_left_out:
        return replace(status, state=LOST, reason=_LEFT_OUT_OR_FORGOTTEN)
    if not was_submitted and (_is_submitted(folder) or now_s - status.submitted_s < _KNOWN_S):
        return status  # it is being submitted, or was while the scheduler was asked
    if not was_submitted:
        return replace(status, state=LOST, reason="it was never submitted: only its directory exists")
    if status.scheduler == LOCAL:  # this user sees everything here
        who = "its process" if folder.id else "the process that starts the tasks of its array"
        last_line = _last_line(folder)
        if isinstance(folder, Task) and not folder.id:
            last_line = last_line or _last_line(folder.array)
        reason = last_line or f"{who} is gone and left no reason (SIGKILL?)"
        return _record_end(folder, replace(status, state=LOST, reason=reason), now_s)
    reason = f"{status.scheduler} no longer knows it, and it did not record how it ended"
    last_line = _last_line(folder)
    return replace(status, state=LOST, reason=f"{reason}: {last_line}" if last_line else reason)


def _last_line(folder: JobDir) -> str:
    return "".join(script_and_scheduler_lines(folder)[-1:])


def _out_of_memory(folder: JobDir) -> str:
    """Return what Slurm said of its memory; "" without a word."""
    return next(filter(is_out_of_memory, script_and_scheduler_lines(folder)[-_LINES:]), "")


def script_and_scheduler_lines(folder: JobDir) -> list[str]:
    """Return the last lines of the job's script and of its scheduler, the script's last."""
    found: list[str] = []
    for path in reversed(folder.scheduler_logs):  # what the script has said is the latest
        with contextlib.suppress(OSError):
            text = read_end(path, _END_BYTES).decode("utf-8", "replace")
            found += [line.strip() for line in text.split("\n") if line.strip()]
    return found


def _record_end(folder: JobDir, status: Status, now_s: float, replaces: bool = False) -> Status:
    """Write it down, for a scheduler forgets. Never over the job's own word, unless that asked for it."""
    ending = JobResult(
        state=status.state,
        code=status.code,
        node=status.node,
        rank=status.rank,
        program=status.program,
        program_rank=status.program_rank,
        reason=status.reason,
        attempt=status.attempt,
        end_s=status.since_s if replaces else now_s,
    )
    earlier = folder.result()
    try:
        if replaces or (earlier is not None and earlier.attempt < status.attempt):
            folder.write_result(ending)
        elif not folder.write_result_if_absent(ending):
            return read_status(folder)
    except OSError:  # a full disk, print_line: it is so all the same, and a later read writes it down
        pass
    return replace(status, is_final=True, since_s=ending.end_s)


def is_lost_for_good(status: Status, missing_since_s: float, now_s: float) -> bool:
    """Return whether a command that waits may stop: it would see a file with the end of the job by now (nfs(5),
    acdirmax).

    Args:
        status: The latest.
        missing_since_s: Since when the scheduler does not know the job.
        now_s: By the same clock.
    """
    return status.state == LOST and now_s - missing_since_s >= _KNOWN_S
