"""A task of an array: a job's directory in the array's own, task/K/. The request is the array's.

The one rule: whoever looks at a job can look at a task: it has the name NAME.K, and all that a directory has.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.request.array import own_name, split, task_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.jobs.folder.records import Submission


class Task(JobDir):
    """One of them."""

    def __init__(self, array: JobDir, index: int) -> None:
        super().__init__(array.file(f"task/{index}"))
        self.name = f"{array.name}.{index}"
        self.index = index
        self.array = array

    @property
    def home(self) -> str:
        return self.array.home

    @property
    def queue_name(self) -> str:
        return f"{self.array.queue_name}.{self.index}"

    @property
    def script(self) -> str:
        """Its own script, if it was submitted once more, alone."""
        own = self.file("job.sh")
        return own if os.path.exists(own) else self.array.script

    def program(self, name: str) -> str:
        return self.array.program(name)

    @property
    def function(self) -> str:
        return self.array.function

    def read_submission(self) -> Submission:
        return self.array.read_submission()

    def read_env(self) -> dict[str, str]:
        return self.array.read_env()

    @property
    def id(self) -> str:
        return self.own_id or task_id(self.array.id, self.index)

    @property
    def own_id(self) -> str:
        """That which it has written down; "": it follows from the array's."""
        return super().id

    @property
    def is_cancelled(self) -> bool:
        return super().is_cancelled or self.array.is_cancelled

    @property
    def scheduler_was_asked(self) -> bool:
        return super().scheduler_was_asked or self.array.scheduler_was_asked


def tasks_of(folder: JobDir, chosen: Sequence[int] = ()) -> tuple[Task, ...]:
    """Return the tasks of an array; of a job, or a task: none.

    Args:
        folder: Of the array.
        chosen: Indices: return only their tasks; empty: all.

    Raises:
        UsageError: It is no job's directory, or there is no such task.
    """
    if chosen:
        return tuple(task_of(folder, index) for index in chosen)
    return () if isinstance(folder, Task) else tuple(Task(folder, index) for index in folder.read_submission().tasks)


def task_of(folder: JobDir, index: int) -> Task:
    """Return the task of that index. Raises UsageError: there is none, or the directory is no array's."""
    order = folder.read_submission()
    if isinstance(folder, Task):
        raise UsageError(f"{folder.name}: a task has no tasks; use {folder.array.name}, the array")
    if not order.tasks:
        raise UsageError(f"{folder.name}: not an array, so it has no task {index}")
    if index not in order.tasks:
        raise UsageError(f"job {folder.name}: no task {index}; its tasks are {order.request.array}")
    return Task(folder, index)


def make_tasks(folder: JobDir) -> None:
    """Make a directory for each task: Slurm opens a log in there before infini-run starts. Raises OSError."""
    for task in tasks_of(folder):
        os.makedirs(task.path, mode=0o700)


def open_folder(above: str, name: str) -> JobDir:
    """Return the directory of that name, a job's or a task's, infini-job's or a scheduler's, without a look whether
    it exists."""
    base, index = split(own_name(name))
    folder = JobDir(os.path.join(above, base))
    return folder if index < 0 else Task(folder, index)
