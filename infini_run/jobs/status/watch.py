"""A job that a command follows: its directory reports at once, its scheduler answers now and then (follower.py), only
while somebody waits."""

from __future__ import annotations

import os
import select
import time

from infini_run.jobs.scheduler import LOST
from infini_run.jobs.status.follower import NEVER, REMOTE_S, Follower
from infini_run.jobs.status.job_status import whole
from infini_run.jobs.status.status_query import is_lost_for_good, query_status, read_status
from infini_run.record import replace
from infini_run.system.file_systems import is_remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.status.job_status import Status


def latest(known: Status, found: Status) -> Status:
    """Return the later of two statuses.

    Args:
        known: By the directory and the scheduler.
        found: By the directory alone, which may be less.
    """
    if found.tasks:
        return whole(found, [latest(*pair) for pair in zip(known.tasks, found.tasks, strict=True)])
    if found.is_final or found.attempt > known.attempt:
        return found
    is_news = not found.scheduler_ended_it and found.state != known.state and found.since_s > known.since_s
    return found if is_news else known


def answered(known: Status, answer: Status) -> Status:
    """Return the status after an answer; one that did not come changes `query_error` alone."""
    if answer.tasks:
        return whole(answer, [answered(*pair) for pair in zip(known.tasks, answer.tasks, strict=True)])
    return replace(known, query_error=answer.query_error) if answer.query_error else answer


def _runs_ended_by_scheduler(found: Status) -> set[tuple[str, int]]:
    """Return the runs that the scheduler ended, by name and number, and of which it may know why."""
    return {(one.name, one.attempt) for one in found.tasks or (found,) if one.scheduler_ended_it and not one.is_final}


class JobWatcher:
    """The status of a job, followed: `status` is the latest; `poll` waits for another. The caller closes it."""

    def __init__(self, folder: JobDir, scheduler: Scheduler) -> None:
        self._folder = folder
        self._scheduler = scheduler
        self._follower = Follower()
        self._watched: set[str] = set()
        self.is_interrupted = False  # by another descriptor, in the latest `poll`
        try:
            self._watch(folder.path)
            self._read_interval_s = REMOTE_S if is_remote(folder.path) else NEVER
            self._read_at_s = NEVER
            self._missing_s = NEVER  # since when the scheduler does not know it
            self.status = read_status(folder)
            self._ended_runs = _runs_ended_by_scheduler(self.status)
            self._watch_attempts()
            if not self.status.is_final:
                self.status = self._query()
                self._follow_attempts()
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to come. A job that no scheduler knows has a minute to appear."""
        return self.status.is_final or is_lost_for_good(self.status, self._missing_s, time.monotonic())

    def fileno(self) -> int:
        """Return the descriptor that is readable after a change of its directory."""
        return self._follower.changes.fileno()

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> bool:
        """Wait for a change, the next query, or a descriptor.

        Args:
            timeout_s: Seconds to wait at most; None: until the next query.
            also: Descriptors that end the wait when they are readable: `is_interrupted`.

        Returns:
            Whether `status` is another than before.

        Raises:
            InfiniRunError: The directory is gone.
        """
        before = self.status
        now_s = time.monotonic()
        due_s = min(self._follower.query_at_s, self._read_at_s) - now_s
        wait_s = max(0.0, due_s if timeout_s is None else min(due_s, timeout_s))
        has_changed = self._wait(wait_s, also)
        if self.is_interrupted:
            return False
        if has_changed:
            self._follower.changes.clear()
            self._read()
        now_s = time.monotonic()
        if now_s >= self._follower.query_at_s:
            self.status = self._query()
        elif now_s >= self._read_at_s:
            self._read()
        self._follow_attempts()
        return self.status != before

    def _wait(self, wait_s: float, also: Sequence[int]) -> bool:
        """Wait. Return whether something of the job's has happened."""
        poll = select.poll()
        processes = dict(self._follower.processes)
        ours = [self._follower.changes.fileno(), *processes.values()]
        for fd in (*ours, *also):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(wait_s * 1000 + 1)]
        self.is_interrupted = any(fd in ready for fd in also)
        for name, fd in processes.items():
            if fd in ready:
                self._follower.end(name)
        return any(fd in ready for fd in ours)

    def _read(self) -> None:
        """Return the status from the directory alone; where that leaves a question, the scheduler is next."""
        self._folder.require()
        self._read_at_s = time.monotonic() + self._read_interval_s
        found = read_status(self._folder, self.status)
        self.status = latest(self.status, found)
        ended = _runs_ended_by_scheduler(found)
        if ended - self._ended_runs:
            self._follower.ask_now()
        self._ended_runs = ended

    def _query(self) -> Status:
        self._folder.require()
        now_s = time.monotonic()
        self._follower.begin_query(now_s)
        status = query_status([self._folder], lambda _: self._scheduler)[0]
        is_missing = status.state == LOST
        self._missing_s = (
            min(self._missing_s, now_s) if is_missing else self._missing_s if status.query_error else NEVER
        )
        status = answered(self.status, status)
        self._read_at_s = now_s + self._read_interval_s
        self._follower.watch_ends([status])
        return status

    def _follow_attempts(self) -> None:
        """Follow the runs, as `_watch_attempts` does, and read what a directory had before the watch."""
        while self._watch_attempts():
            self._read()

    def _watch_attempts(self) -> bool:
        """Watch the directories of the job and its latest run, or of each task. Whether one of them is new."""
        count = len(self._watched)
        for one in self.status.tasks or (self.status,):
            if not (one.is_final and self.status.tasks):
                self._watch(one.folder)
                if one.attempt >= 0:
                    self._watch(os.path.join(one.folder, str(one.attempt)))
        return len(self._watched) > count

    def _watch(self, path: str) -> None:
        if path not in self._watched and os.path.isdir(path):  # a task's may have been removed
            self._follower.changes.add(path)
            self._watched.add(path)

    def close(self) -> None:
        """Close the descriptors. Safe twice."""
        self._follower.close()
