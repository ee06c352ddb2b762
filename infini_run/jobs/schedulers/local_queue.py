"""What starts the tasks of an array on this machine: so many at a time, each in a session of its own.

    python -m infini_run.jobs.schedulers.local_queue FOLDER

The one rule: a task is its own, as a job is: it lives on when this process is killed. Told to end (TERM), this
process starts no more of them, and waits for those that run; whoever cancels the array tells those himself.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from infini_run.jobs.array import parse
from infini_run.jobs.job_dir import JobDir, JobResult
from infini_run.jobs.request import LOG
from infini_run.jobs.schedulers.local import Local, id_of
from infini_run.jobs.schedulers.scheduler import CANCELLED, FAILED
from infini_run.jobs.script import inside_of
from infini_run.jobs.status import query_status
from infini_run.jobs.task import tasks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.jobs.task import Task

_TERM = 128 + signal.SIGTERM


class Queue:
    """The tasks that wait, and those that run."""

    def __init__(self, folder: JobDir) -> None:
        request = folder.read_order().request
        self._folder = folder
        self._words = inside_of(request.python)
        self._waiting = list(tasks_of(folder))
        self._at_once = parse(request.array).at_once or len(self._waiting)
        self._running: list[tuple[Task, subprocess.Popen[bytes]]] = []
        self._scheduler = Local(folder.home, os.environ)

    def run(self) -> None:
        """Until all of them have ended. The end of one is a signal, as is being told to end."""
        wake_fd, wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _nothing)
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._at_once:
                self._start(self._waiting.pop(0))
            if self._running:
                select.select([wake_fd], [], [])
                if signal.SIGTERM in os.read(wake_fd, 1 << 12):
                    self._end_waiting()
                self._reap()

    def _start(self, task: Task) -> None:
        if task.is_cancelled:
            self._settle(task)
            return
        try:
            with open(task.file(LOG), "ab") as log:
                process = subprocess.Popen(
                    [*self._words, self._folder.path, str(task.index)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                )  # fmt: skip
        except OSError as error:  # the other tasks may have more luck
            what = f"{error.filename}: " if error.filename else ""
            reason = f"it cannot be started: {what}{error.strerror}"
            task.propose_ending(JobResult(state=FAILED, code=-1, reason=reason, end_s=time.time(), attempt=-1))
            return
        task.write_id(id_of(process.pid))
        self._running.append((task, process))
        if task.is_cancelled:  # by who has not seen its id
            process.terminate()

    def _reap(self) -> None:
        for pair in list(self._running):
            if pair[1].poll() is not None:
                self._running.remove(pair)
                self._settle(pair[0])

    def _settle(self, task: Task) -> None:
        """What has not said how it ended is written down as lost, or cancelled."""
        query_status([task], lambda _: self._scheduler)

    def _end_waiting(self) -> None:
        for task in self._waiting:
            reason = "it was cancelled" if task.is_cancelled else "it was told to stop (SIGTERM)"
            task.propose_ending(JobResult(state=CANCELLED, code=_TERM, reason=reason, end_s=time.time(), attempt=-1))
        self._waiting.clear()


def _nothing(number: int, frame: object) -> None:
    """That it came is seen at the descriptor."""


def main() -> None:
    Queue(JobDir(os.path.abspath(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
