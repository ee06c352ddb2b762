"""The process that starts the tasks of an array on this machine: a limited number at a time, each in its own session.

The one rule: a running task survives a SIGKILL of this process. TERM ends the whole array: the launchers of running
tasks get it too, and give their ranks the grace; waiting tasks never start. No trouble of one task, and no full disk,
ends another.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time

from infini_run.errors import DeviceError, InfiniRunError
from infini_run.jobs.folder.records import JobResult
from infini_run.jobs.folder.task import tasks_of
from infini_run.jobs.lines import write_line  # to the array's job.log
from infini_run.jobs.request.array import parse
from infini_run.jobs.request.job_request import CPU, LOG
from infini_run.jobs.scheduler import CANCELLED, FAILED
from infini_run.jobs.schedulers.local import id_of
from infini_run.system.cgroup import count_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.folder.task import Task
    from infini_run.jobs.request.job_request import JobRequest

_TERM = 128 + signal.SIGTERM
_STOPPED = "SIGTERM ended its array"
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.ENFILE)  # of fork(2) and open(2): another process may end
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # no event reports the end of another user's process (decision 45)


class Devices:
    """The GPUs of this machine in sets of `slots`, one set per running task: ranks of two tasks would both take the
    first GPU. Without GPUs, tasks share the CPUs."""

    def __init__(self, request: JobRequest, environ: Mapping[str, str]) -> None:
        self._variable = ""
        self._sets: list[str] = []
        self._users: list[int] = []
        self.capacity = max(1, count_cpus() // request.slots)  # tasks at a time, where the user has given no %M
        if request.slot_type == CPU:
            return
        from infini_run.devices.visible import find

        try:
            found = find(environ)
        except DeviceError:  # the ranks report what is wrong
            return
        names = [gpu.name for gpu in found.gpus]
        groups = [names[at : at + request.slots] for at in range(0, len(names), request.slots)]
        self._variable = found.variable
        self._sets = [",".join(group) for group in groups if len(group) == request.slots]
        self._users = [0] * len(self._sets)
        self.capacity = max(1, len(self._sets))

    def acquire(self) -> tuple[int, dict[str, str]]:
        """Return the set with the fewest users (-1: none), and the variables that show it."""
        if not self._sets:
            return -1, {}
        index = min(range(len(self._sets)), key=self._users.__getitem__)
        self._users[index] += 1
        return index, {self._variable: self._sets[index]}

    def release(self, index: int) -> None:
        """Give back what `acquire` returned."""
        if index >= 0:
            self._users[index] -= 1


class LocalQueue:
    """The tasks of an array that wait, and those that run.

    Args:
        request: The array's.
        environ: Of the tasks.
        launcher: The words that start a task's launcher, before its folder and index.
        query_end: Asks how a task ended, and records it as lost or canceled if the task left no record. May raise
            InfiniRunError.
    """

    def __init__(
        self,
        folder: JobDir,
        request: JobRequest,
        environ: Mapping[str, str],
        *,
        launcher: Sequence[str],
        query_end: Callable[[Task], object],
    ) -> None:
        self._folder = folder
        self._environ = environ
        self._launcher = launcher
        self._query_end = query_end
        self._waiting = list(tasks_of(folder))
        self._devices = Devices(request, environ)
        self._at_once = parse(request.array).at_once or self._devices.capacity
        self._running: list[tuple[Task, subprocess.Popen[bytes], int]] = []
        self._unwritten: list[Callable[[], object]] = []  # of a full disk: tried again when something happens
        self._pause_s = 0.0
        self._is_stopping = False

    def run(self) -> None:
        """Run the tasks until all of them ended. The end of one is a signal, as is TERM."""
        wake_fd, wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _nothing)
        while self._waiting or self._running:
            self._pause_s = self._start_all()
            if not (self._waiting or self._running):
                break
            if select.select([wake_fd], [], [], self._pause_s or None)[0]:
                if signal.SIGTERM in os.read(wake_fd, 1 << 12):
                    self._stop()
                self._reap()
            self._write_rest()
        self._write_rest()

    def _start_all(self) -> float:
        """Start as many as may run. The seconds after which to try again, where the system has no process or memory
        left for one; 0: there is none to try."""
        while self._waiting and len(self._running) < self._at_once:
            try:
                self._start(self._waiting[0])
            except OSError as error:
                if error.errno in _PASSING:
                    if not self._pause_s:
                        write_line(f"{self._waiting[0].name} cannot start yet: {error.strerror}; retrying")
                    return min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                what = f"{error.filename}: " if error.filename else ""
                self._end(self._waiting[0], FAILED, -1, f"cannot start it: {what}{error.strerror}")
            self._waiting.pop(0)
        return 0.0

    def _start(self, task: Task) -> None:
        """Start a task. Raises OSError if that fails."""
        if task.is_cancelled:
            self._record_end(task)
            return
        devices, variables = self._devices.acquire()
        try:
            with open(task.file(LOG), "ab") as log:
                process = subprocess.Popen(
                    [*self._launcher, self._folder.path, str(task.index)], env={**self._environ, **variables},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                )  # fmt: skip
        except OSError:
            self._devices.release(devices)
            raise
        self._running.append((task, process, devices))
        id_ = id_of(process.pid)
        self._write(lambda: task.write_id(id_))
        if task.is_cancelled:  # by a command that has not seen its id
            process.terminate()

    def _reap(self) -> None:
        for one in list(self._running):
            task, process, devices = one
            if process.poll() is not None:
                self._running.remove(one)
                self._devices.release(devices)
                if self._is_stopping and process.returncode == -signal.SIGTERM:  # before its launcher could listen
                    self._end(task, CANCELLED, _TERM, _STOPPED)
                self._record_end(task)

    def _record_end(self, task: Task) -> None:
        try:
            self._query_end(task)
        except (InfiniRunError, OSError) as error:
            write_line(str(error))

    def _stop(self) -> None:
        for task in self._waiting:
            self._end(task, CANCELLED, -1, "it was canceled" if task.is_cancelled else _STOPPED)
        self._waiting.clear()
        self._is_stopping = True
        for _, process, _ in self._running:
            process.terminate()

    def _end(self, task: Task, state: str, code: int, reason: str) -> None:
        """End a task whose launcher has not begun."""
        result = JobResult(state=state, code=code, reason=reason, end_s=time.time(), attempt=task.attempts() - 1)
        self._write(lambda: task.write_result_if_absent(result))

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            write_line(f"{error.filename or self._folder.path}: {error.strerror}")
            self._unwritten.append(write)

    def _write_rest(self) -> None:
        left, self._unwritten = self._unwritten, []
        for write in left:
            try:
                write()
            except OSError:
                self._unwritten.append(write)


def _nothing(number: int, frame: object) -> None:
    """Handle a signal by nothing: the descriptor shows that it came."""
