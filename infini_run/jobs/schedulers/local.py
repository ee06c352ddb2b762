"""This machine as a scheduler: a job's script in its own session, at once. It survives the process that submitted it.

The one rule: a process is its number and its start time (proc_pid_stat(5)), so a later process with the same number
is another one. Its id is PID.START@HOST, for other machines may see the directory, too.
"""

from __future__ import annotations

import _signal as signal
import os

from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.folder.task import Task, open_folder
from infini_run.jobs.request.job_request import LOG
from infini_run.jobs.scheduler import (
    QUEUED,
    REFUSED,
    RUNNING,
    WAITING,
    Facts,
    Queue,
    SchedulerJob,
    strip_scheduler_environment,
)
from infini_run.jobs.schedulers.scheduler_command import run_command
from infini_run.value_types import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.jobs.folder.job_dir import JobDir

_START = 'cd /; setsid sh "$0" </dev/null >>"$1" 2>&1 & echo $!'


class Local:
    """This machine as a scheduler.

    Args:
        above: the directory of all jobs.
        environ: this process's environment.
    """

    name = "local"
    has_accounting = False

    def __init__(self, above: str, environ: Mapping[str, str]) -> None:
        self._above = above
        self._environ = strip_scheduler_environment(environ)

    def facts(self) -> Facts:
        """Return this machine, as one node of one pool."""
        from infini_run.devices.visible import find, may_have_gpus
        from infini_run.errors import DeviceError
        from infini_run.version import VERSION

        try:
            gpus = len(find(self._environ).gpus) if may_have_gpus() else 0  # pynvml takes 20 ms to answer
        except DeviceError:
            gpus = 0
        memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        here = Queue(
            name="here",
            nodes=1,
            gpus_per_node=gpus,
            cpus_per_node=len(os.sched_getaffinity(0)),
            mem_mb_per_node=memory_mb,
            is_default=True,
        )
        return Facts(scheduler=self.name, version=VERSION, has_gres=gpus > 0, pools=(here,))

    def check(self, script_path: str) -> str:
        """Accept any job: nothing queues here."""
        return ""

    def submit(self, script_path: str, name: str) -> str:
        """Start the script; it is nobody's child, and inherits no descriptor of this process."""
        log = os.path.join(os.path.dirname(script_path), LOG)
        made = run_command(["sh", "-c", _START, script_path, log], self._environ)
        pid = made.out.strip()
        if not pid.isdecimal():
            raise SubmitError(REFUSED, made.error.strip() or "the shell did not start it")
        return id_of(int(pid))

    def find(self, name: str) -> str | None:
        """Return the id of a live job, which exists as soon as it has an id; else None."""
        id_ = open_folder(self._above, name).id
        return id_ if id_ and _pid(id_) else None

    def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, SchedulerJob]:
        """Return the jobs that run, and the tasks of arrays that wait, by name.

        A job that ended is not among them: only its directory has its end.
        """
        found = {}
        are_started: dict[str, bool] = {}  # by array: by a process that is there
        for name in names:
            try:
                state = self._state_of(open_folder(self._above, name), are_started)
            except QueryError as error:  # it says nothing of the others
                state = SchedulerJob(id="", state="", reason=str(error))
            if state is not None:
                found[name] = state
        return found

    def _state_of(self, folder: JobDir, are_started: dict[str, bool]) -> SchedulerJob | None:
        """Return the state of a job, or None after its end. are_started: the known states of arrays. Raises
        QueryError."""
        id_ = folder.id
        if id_ and _pid(id_):
            return SchedulerJob(id=id_, state=RUNNING)
        if not isinstance(folder, Task) or id_ or folder.is_cancelled:
            return None
        path = folder.array.path
        if path not in are_started:
            are_started[path] = bool(folder.array.id and _pid(folder.array.id))
        return SchedulerJob(id="", state=QUEUED, hold=WAITING) if are_started[path] else None

    def cancel(self, *ids: str, again: bool = False) -> None:
        """Send TERM, as a scheduler does: the ranks have their grace."""
        for id_ in ids:
            self._end(id_)

    def _end(self, id: str) -> None:  # noqa: A002
        try:
            fd = open_process(id)
        except QueryError:
            fd = -1
            if pid := _pid(id):  # by the number, which was looked at just now
                _signal(os.kill, pid)
        if fd >= 0:
            _signal(signal.pidfd_send_signal, fd)
            os.close(fd)

    def requeue(self, id: str) -> bool:  # noqa: A002
        """Let the script begin again: it needs nobody else."""
        return False


def id_of(pid: int) -> str:
    return f"{pid}.{_start_of(pid)}@{os.uname().nodename}"


def _signal(send: Callable[[int, int], None], whom: int) -> None:
    try:
        send(whom, signal.SIGTERM)
    except ProcessLookupError:
        return


def open_process(id_: str) -> int:
    """Return a pidfd of it, which becomes readable when it ends; -1 if it already ended. Raises QueryError if it runs
    on another machine, or there are no pidfds (before Linux 5.3, or forbidden)."""
    pid = _pid(id_)
    if not pid:
        return -1
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    except OSError as error:
        raise QueryError(f"process {pid}: pidfd_open: {error.strerror}") from None
    if _pid(id_) != pid:  # it ended before the pidfd, and somebody else has its number
        os.close(fd)
        return -1
    return fd


def _pid(id_: str) -> int:
    """Return its number; 0 after its end. Raises QueryError."""
    process, _, host = id_.partition("@")
    if host != os.uname().nodename:
        raise QueryError(f"it runs on {host}; run infini-job there")
    pid, start = map(number, process.partition(".")[::2])
    if pid is None or start is None:
        raise QueryError(f"{id_[:80]!a} not a process; check who changed its id")
    return pid if start and _start_of(pid) == start else 0


def _start_of(pid: int) -> int:
    """Return its start, in ticks since the boot; 0 after its end."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if words[0] in (b"Z", b"X") else int(words[19])
