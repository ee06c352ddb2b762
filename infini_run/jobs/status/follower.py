"""What tells who follows jobs that there is news: their directories, the ends of processes, and a schedule.

The one rule: what can be heard of is not asked for. Schedulers are asked after 2 s, then ever more rarely, once in a
minute at last; directories that other machines write are read every 5 s. A follower waits for nothing by itself: the
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
REMOTE_S = 5.0  # between two looks at a directory that says nothing by itself


class Follower:
    """To be closed.

    Attributes:
        changes: The directories.
        processes: Of jobs on this machine, by name, a pidfd each.
        query_at_s: When schedulers are to be asked, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.changes = Changes()
        self.processes: dict[str, int] = {}
        self.query_at_s = NEVER
        self.interval_s = FIRST_S  # between the next two questions

    def ask_now(self) -> None:
        """Something has happened of which a scheduler knows more."""
        self.query_at_s = 0.0

    def start_over(self) -> None:
        """Ask as often as at first."""
        self.interval_s = FIRST_S

    def begin_query(self, now_s: float) -> None:
        """Schedulers are asked now; what happens meanwhile is a reason to ask again."""
        self.query_at_s = now_s + self.interval_s
        self.interval_s = min(self.interval_s * GROWTH, LAST_S)

    def watch_ends(self, jobs: Iterable[Status]) -> list[tuple[str, int]]:
        """Of jobs on this machine the end is an event, whatever ends them. Returns what is new in `processes`."""
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
        """A process has ended."""
        os.close(self.processes.pop(name))
        self.ask_now()

    def close(self) -> None:
        """Safe twice."""
        self.changes.close()
        for name in list(self.processes):
            self.end(name)
