"""Every job's status, kept as it is now while somebody looks, and pushed to who does.

The one rule: it looks when something happens (status/follower.py), once for all readers. While nobody reads, nothing
runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat

from infini_run.errors import InfiniRunError
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.job_store import all_names, begun_ns
from infini_run.jobs.schedulers.detect_scheduler import scheduler_of
from infini_run.jobs.status.each_job import for_each, kept, note_progress
from infini_run.jobs.status.follower import REMOTE_S, Follower
from infini_run.jobs.status.status_query import query_each, read_status
from infini_run.jobs.status.watch import answered, latest
from infini_run.system.file_systems import is_remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
    from typing import Any

    from infini_run.jobs.folder.records import Submission
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.status.job_status import Status

_LAST_LOOK_S = 5.0


class JobCache:
    """jobs: by name, the latest last. problem: why what it shows may be old, or ""."""

    def __init__(
        self, above: str, environ: Mapping[str, str], do: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        """Prepare a cache that follows nothing yet.

        Args:
            above: where jobs are.
            environ: the environment of the commands of schedulers.
            do: runs what may block, elsewhere.
        """
        self.jobs: dict[str, Status] = {}
        self.problem = ""
        self._above = above
        self._environ = environ
        self._do = do
        self._watchers: set[asyncio.Event] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._follower: Follower | None = None
        self._begun_ns: dict[str, int] = {}  # when each was submitted, by name
        self._is_filled = False
        self._is_over = False

    async def changes(self) -> AsyncIterator[tuple[dict[str, Status], str]]:
        """Yield all jobs and the problem, at once and after each change; it ends with the service."""
        mine = asyncio.Event()
        self._watchers.add(mine)
        if self._follower is not None:
            self._follower.start_over()
        self._changed.set()
        try:
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run())
            elif self._is_filled:
                mine.set()
            while True:
                await mine.wait()
                mine.clear()
                if self._is_over:
                    return
                yield dict(self.jobs), self.problem
        finally:
            self._watchers.discard(mine)
            self._changed.set()

    def end(self) -> None:
        """End: readers have had their last change."""
        self._is_over = True
        self._notify()
        self._changed.set()

    async def close(self) -> None:
        """Wait for the last look, for `_LAST_LOOK_S` seconds at most."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST_LOOK_S)

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def _run(self) -> None:
        """Follow the jobs while somebody reads."""
        loop = asyncio.get_running_loop()
        try:
            self._follower = follower = Follower()
        except InfiniRunError as error:
            self.problem, self._task = str(error), None
            self._notify()
            return
        watch = _DirectoryWatch(self._above, self._changed, follower)
        follower.ask_now()
        try:
            while self._watchers and not self._is_over:
                self._changed.clear()
                is_due = loop.time() >= follower.query_at_s
                if is_due:
                    follower.begin_query(loop.time())
                before = (self.jobs, self.problem)
                await self._do(lambda: self._refresh(watch, is_due))  # noqa: B023
                watch.watch_ends(self.jobs.values())
                if self._is_filled and self.jobs.keys() != before[0].keys():
                    follower.start_over()
                if not self._is_filled or (self.jobs, self.problem) != before:
                    self._is_filled = True
                    self._notify()
                await self._wait(watch, follower.query_at_s - loop.time())
        finally:
            watch.close()
            self._task = self._follower = None
            self._is_filled = False

    async def _wait(self, watch: _DirectoryWatch, due_s: float) -> None:
        is_live = any(not status.is_final for status in self.jobs.values())
        waits = [due_s] if is_live or self.problem else []
        waits += [REMOTE_S] if watch.is_remote else []
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(waits) if waits else None)

    def _refresh(self, watch: _DirectoryWatch, is_due: bool) -> None:
        """Look again, in a thread, at all jobs but those that ended."""
        problems: list[str] = []
        try:
            watch.add_home()  # before it is listed, so a job that comes in between is an event
            names = all_names(self._above)
            paths = [os.path.join(self._above, name) for name in names if not self._has_ended(name)]
            read = kept(for_each(paths, lambda path: self._read_job(watch, path), lambda path: path), problems.append)
            found = {status.name: status for status in self._statuses([s for s in read if s], is_due, problems)}
        except (InfiniRunError, OSError) as error:
            self.problem = str(error)
            return
        self.problem = "\n".join(problems)
        known = {**{name: self.jobs[name] for name in names if self._has_ended(name)}, **found}
        self.jobs = {name: known[name] for name in sorted(known, key=lambda name: (self._begun_ns[name], name))}

    def _read_job(self, watch: _DirectoryWatch, path: str) -> Status | None:
        """Return a job from its directory, or None if it is no job of infini-job (yet). Raises InfiniRunError."""
        folder = JobDir(path)
        with contextlib.suppress(FileNotFoundError):
            at = os.lstat(path)
            if stat.S_ISDIR(at.st_mode) and at.st_uid == os.geteuid():
                watch.add(folder)
        begun = begun_ns(path)
        if begun < 0:
            return None
        self._begun_ns[folder.name] = begun
        return read_status(folder, self.jobs.get(folder.name))

    def _has_ended(self, name: str) -> bool:
        return name in self.jobs and self.jobs[name].is_final

    def _statuses(self, seen: list[Status], is_due: bool, problems: list[str]) -> list[Status]:
        """Return the statuses of jobs. is_due: query the schedulers. problems: of the last look."""
        found = [latest(self.jobs[status.name], status) if status.name in self.jobs else status for status in seen]
        is_new = any(status.scheduler_ended_it or status.name not in self.jobs for status in seen)
        if not (is_due or is_new or (self.problem and not problems)):
            return found
        live = [JobDir(status.folder) for status in found if not status.is_final]
        answers = {status.name: status for status in query_each(live, self._scheduler, problems.append)}
        return [answered(status, answers.get(status.name, status)) for status in found]

    def _scheduler(self, order: Submission) -> Scheduler:
        return scheduler_of(order, self._above, self._environ)


def _tasks_made(folder: JobDir) -> list[JobDir]:
    """Return the tasks that have a directory: request.json may name more during the submission of an array, or be
    unreadable."""
    try:
        return [JobDir(folder.file(f"task/{index}")) for index in os.listdir(folder.file("task"))]
    except OSError:  # there are none, or who reads the job says why
        return []


class _DirectoryWatch:
    """What stirs the board: a follower's descriptors, in the loop."""

    def __init__(self, above: str, changed: asyncio.Event, follower: Follower) -> None:
        self.is_remote = False
        self._follower = follower
        self._above = above
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(follower.changes.fileno(), self._on_change)

    def _on_change(self) -> None:
        self._follower.changes.clear()
        self._changed.set()

    def add_home(self) -> None:
        """Watch the directory of all jobs. In a thread. Raises OSError: it is not there."""
        os.stat(self._above)
        self.is_remote = is_remote(self._above)
        self._follower.changes.add(self._above, names_only=True)

    def add(self, folder: JobDir) -> None:
        """Watch a directory, in a thread, before the first look, so nothing is missed; a directory in creation is no
        job yet. Raises InfiniRunError if the kernel does not watch it."""
        self._add_directory(folder.path)
        for one in _tasks_made(folder) or (folder,):
            note_progress()
            self._add_directory(one.path)
            if count := one.attempts():
                self._add_directory(one.file(str(count - 1)))

    def _add_directory(self, path: str) -> None:
        try:
            self._follower.changes.add(path, names_only=True)
        except InfiniRunError as error:
            if os.path.isdir(path):  # else it is being removed
                raise InfiniRunError(f"{path}: {error}") from None

    def watch_ends(self, jobs: Iterable[Status]) -> None:
        for name, fd in self._follower.watch_ends(jobs):
            self._loop.add_reader(fd, self._on_process_end, name)

    def _on_process_end(self, name: str) -> None:
        self._loop.remove_reader(self._follower.processes[name])
        self._follower.end(name)
        self._changed.set()

    def close(self) -> None:
        for fd in (self._follower.changes.fileno(), *self._follower.processes.values()):
            self._loop.remove_reader(fd)
        self._follower.close()
