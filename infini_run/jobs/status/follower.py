"""The news for followers of jobs: changes in their directories, the ends of processes, and a schedule.

The one rule: nothing asks for what is an event. Queries of schedulers come after 2 s, then ever more rarely, once in
a minute at last. Reads of directories that other machines write come every 5 s. A follower itself never waits: the
loops are a command's (watch.py) and the service's (serve/job_cache.py).
"""

from __future__ import annotations

import os

from infini_run.jobs.errors import QueryError
from infini_run.jobs.folder.inotify import Changes
from infini_run.jobs.schedulers.local import open_process
from infini_run.jobs.status.status_query import LOCAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from infini_run.jobs.status.job_status import Status

FIRST_S, GROWTH, LAST_S = 2.0, 1.5, 60.0  # between two questions
NEVER = float("inf")
REMOTE_S = 5.0  # between two looks at a directory without events


class Follower:
    """The sources of news about jobs. The caller closes it.

    Attributes:
        changes: The directories.
        processes: Of jobs on this machine, by name, a pidfd each.
        query_at_s: The time of the next query, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.changes = Changes()
        self.processes: dict[str, int] = {}
        self.query_at_s = NEVER
        self.interval_s = FIRST_S  # between the next two questions

    def ask_now(self) -> None:
        """Bring the next query forward: something happened of which a scheduler knows more."""
        self.query_at_s = 0.0

    def start_over(self) -> None:
        """Ask as often as at first."""
        self.interval_s = FIRST_S

    def begin_query(self, now_s: float) -> None:
        """Begin a query; what happens meanwhile is a reason for the next one."""
        self.query_at_s = now_s + self.interval_s
        self.interval_s = min(self.interval_s * GROWTH, LAST_S)

    def watch_ends(self, jobs: Iterable[Status]) -> list[tuple[str, int]]:
        """Watch the ends of jobs on this machine, which are events, whatever ends them. Return what is new in
        `processes`."""
        found = []
        for job in jobs:
            if job.scheduler == LOCAL and job.id and not job.is_final and job.name not in self.processes:
                try:
                    fd = open_process(job.id)
                except QueryError:
                    continue
                if fd >= 0:
                    self.processes[job.name] = fd
                    found.append((job.name, fd))
        return found

    def end(self, name: str) -> None:
        """Note the end of a process."""
        os.close(self.processes.pop(name))
        self.ask_now()

    def close(self) -> None:
        """Close the descriptors. Safe twice."""
        self.changes.close()
        for name in list(self.processes):
            self.end(name)
