"""The processes of a rank in /proc: its tree, the CPU time it used, what every thread waits in.

Only looks (proc(5)). What is unreadable (gone meanwhile, not permitted) stays empty: a look never fails.
"""

from __future__ import annotations

import os

from infini_run.record import record, replace
from infini_run.system.kernel_wait import wait_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESSES, _THREADS = 16, 96  # of a rank that are described
_FDS = 4096  # of a process that are compared
_MAPS = 1 << 24  # bytes of what a process has mapped: some 100 for each file of each library
_FRAMES = 24  # of a kernel stack


@record
class Process:
    """One process, from one line of /proc/PID/stat.

    Attributes:
        pid, parent, group: of the process, its parent and its process group.
        state: the letter of its state.
        name: the name of its program, at most 15 characters.
        cpu_s: its CPU time in seconds, with that of the children that it has reaped.
        memory: its resident memory in bytes.
    """

    pid: int
    parent: int
    group: int
    state: str
    name: str
    cpu_s: float
    memory: int


@record
class ThreadSnapshot:
    """The state of a thread, and what it waits in.

    Attributes:
        tid, name, state: of the thread.
        wchan: the function of the kernel; empty: it runs, or the kernel does not tell.
        syscall: the number of the system call and its arguments; empty: it runs, or the kernel does not tell.
        stack: the kernel's stack, which only root may read.
        waits_for: `socket`, `pipe`, `lock`, or `poll`; `own pipe`: its other end is the same rank's, so no other rank
            is waited for; empty: something else, or unknown.
    """

    tid: int
    name: str
    state: str
    wchan: str
    syscall: str
    stack: tuple[str, ...]
    waits_for: str = ""


@record
class ProcessSnapshot:
    """A process and its threads, the main one first."""

    pid: int
    name: str
    state: str
    is_python: bool
    threads: tuple[ThreadSnapshot, ...]


class ProcessTable:
    """The processes that existed when it was made. Empty without /proc, or with the /proc of another PID
    namespace."""

    def __init__(self) -> None:
        self._processes = {process.pid: process for process in _scan()}
        self._children: dict[int, list[Process]] = {}
        self._groups: dict[int, list[Process]] = {}
        for process in self._processes.values():
            self._children.setdefault(process.parent, []).append(process)
            self._groups.setdefault(process.group, []).append(process)

    def state(self, pid: int) -> str:
        """Return the state letter of a process (proc_pid_stat(5)), such as `S` or `Z`; empty if it did not exist."""
        return self._processes[pid].state if pid in self._processes else ""

    def tree(self, pid: int) -> list[Process]:
        """Return the process of a rank, the rest of its process group, and the descendants of both; parents come
        first.

        Args:
            pid: of the rank's process, which is also the number of its process group.
        """
        members = [self._processes[pid]] if pid in self._processes else []
        members += [process for process in self._groups.get(pid, ()) if process.pid != pid]
        seen = {process.pid for process in members}
        for process in members:  # grows during this loop
            for child in self._children.get(process.pid, ()):
                if child.pid not in seen:
                    seen.add(child.pid)
                    members.append(child)
        return members

    def cpu_s(self, pid: int) -> float | None:
        """Return the CPU time of a rank's processes (`tree`) in seconds, with that of children that exited. None:
        there are none."""
        members = self.tree(pid)
        return sum(process.cpu_s for process in members) if members else None

    def written(self, pid: int) -> int | None:
        """Return the bytes that a rank's processes (`tree`) wrote to any file, pipe, or terminal, with those of
        children that exited (wchar of proc_pid_io(5)). Only this look reads them. None: unknown."""
        counts = [_written(process.pid) for process in self.tree(pid)]
        return sum(count or 0 for count in counts) if counts and counts[0] is not None else None

    def memory(self, pid: int) -> int | None:
        """Return the resident memory of a rank's processes (`tree`) in bytes; shared pages count once for each.
        None: there are none."""
        members = self.tree(pid)
        return sum(process.memory for process in members) if members else None


def shows_own_namespace() -> bool:
    """Return whether the numbers in /proc are those of this process's PID namespace.

    False without /proc. In the /proc of another namespace a process may have the same number by chance. NSpid,
    however, has one number per namespace from that of /proc down to its own (proc_pid_status(5), Linux 4.1).
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return False
    except OSError:
        return False
    numbers = _read("/proc/self/status").partition("NSpid:")[2].partition("\n")[0]
    return len(numbers.split()) < 2


def _scan() -> list[Process]:
    try:
        if not shows_own_namespace():
            return []
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    found = (_process(pid, _read(f"/proc/{pid}/stat")) for pid in pids)
    return [process for process in found if process is not None]


def _written(pid: int) -> int | None:
    """Return the bytes that one process wrote. None: it may not be read, or the kernel does not count."""
    count = _read(f"/proc/{pid}/io").partition("wchar: ")[2].partition("\n")[0]
    return int(count) if count.isdecimal() else None


def _process(pid: int, stat: str) -> Process | None:
    """Return a process from a line of proc_pid_stat(5); its name is in parentheses and may itself contain any."""
    head, _, tail = stat.rpartition(")")
    words = tail.split()
    if len(words) < 22:
        return None
    return Process(
        pid=pid,
        parent=int(words[1]),
        group=int(words[2]),
        state=words[0],
        name=head.partition("(")[2],
        cpu_s=sum(map(int, words[11:15])) * _TICK_S,
        memory=int(words[21]) * _PAGE,
    )


def snapshot_processes(members: Sequence[Process]) -> tuple[ProcessSnapshot, ...]:
    """Return what processes and their threads wait in, for the first 16 processes and 96 threads.

    Args:
        members: the processes of a rank, as `ProcessTable.tree` gives them.
    """
    found, threads = [], 0
    for process in members[:_PROCESSES]:
        if process.state not in "ZX" and threads < _THREADS:
            found.append(_picture(process, _THREADS - threads))
            threads += len(found[-1].threads)
    return tuple(_with_own_pipes(found))


def _with_own_pipes(found: Sequence[ProcessSnapshot]) -> Sequence[ProcessSnapshot]:
    """Return the processes of a rank with `own pipe` where one waits for another of them, as `| tee` does."""
    waits = {
        thread.tid: _pipe_end(f"/proc/{process.pid}/fd/{int(call[1], 16)}")
        for process in found
        for thread in process.threads
        if thread.waits_for == "pipe" and len(call := thread.syscall.split()) > 1
    }
    if not any(link for link, _ in waits.values()):
        return found
    ends = {end for process in found for end in _pipe_ends(process.pid)}
    own = {tid for tid, (link, is_write) in waits.items() if link and (link, not is_write) in ends}
    return [
        replace(
            process,
            threads=tuple(replace(t, waits_for="own pipe") if t.tid in own else t for t in process.threads),
        )
        for process in found
    ]


def _pipe_ends(pid: int) -> list[tuple[str, bool]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")[:_FDS]
    except OSError:
        return []
    return [end for name in names if (end := _pipe_end(f"/proc/{pid}/fd/{name}"))[0]]


def _pipe_end(path: str) -> tuple[str, bool]:
    """Return the pipe of a descriptor, and whether it is the end to write to (proc_pid_fd(5)). Empty: it is none."""
    link = _link(path)
    try:
        return (link, bool(os.lstat(path).st_mode & 0o200)) if link.startswith("pipe:[") else ("", False)
    except OSError:
        return "", False


def _picture(process: Process, most: int) -> ProcessSnapshot:
    folder = f"/proc/{process.pid}/task"
    try:
        tids = sorted(map(int, os.listdir(folder)), key=lambda tid: (tid != process.pid, tid))[:most]
    except OSError:
        tids = []
    threads = tuple(_thread(tid, f"{folder}/{tid}") for tid in tids)
    return ProcessSnapshot(
        pid=process.pid,
        name=process.name,
        state=process.state,
        is_python=_is_python(process.pid, process.name, may_wait=any(thread.state == "D" for thread in threads)),
        threads=threads,
    )


def _thread(tid: int, folder: str) -> ThreadSnapshot:
    stat = _process(tid, _read(f"{folder}/stat"))
    wchan = _read(f"{folder}/wchan").removeprefix("0")
    syscall = _read(f"{folder}/syscall").strip()
    stack = _read(f"{folder}/stack").splitlines()
    return ThreadSnapshot(
        tid=tid,
        name=stat.name if stat else "",
        state=stat.state if stat else "",
        wchan=wchan,
        syscall=syscall,
        stack=tuple(line.partition("] ")[2] or line for line in stack[:_FRAMES]),
        waits_for=wait_kind(wchan, syscall, lambda fd: _link(f"{folder}/fd/{fd}")),
    )


def _is_python(pid: int, name: str, *, may_wait: bool) -> bool:
    """Return whether the process is a Python: by its program, or by a libpython among its mappings.

    Args:
        pid: of the process.
        name: of the process, which counts if this user may not know its program.
        may_wait: one of its threads is in state D, perhaps with the lock of the mappings (mmap_lock): who reads them
            would wait, too. Only the program counts.
    """
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except PermissionError:
        program = name
    except OSError:
        program = ""
    if program.startswith("python") or may_wait:
        return program.startswith("python")
    return "/libpython" in _read(f"/proc/{pid}/maps", _MAPS)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str, most: int = 8192) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    text = b""
    try:
        while len(text) < most and (chunk := os.read(fd, most - len(text))):
            text += chunk
    except OSError:
        return ""
    finally:
        os.close(fd)
    return text.decode("utf-8", "replace")
