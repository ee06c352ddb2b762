"""What the kernel knows of processes and descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import struct
import termios
from collections.abc import Container, Iterator

OURS = ("TEST_RUN", os.urandom(6).hex())  # other tests may run on this machine; theirs are not ours to end


GUARD = "irun-guard"  # what the process is called that outlives a launcher, to end what that has left


def lead_group() -> None:
    """Before exec: be a job as a shell's. The kernel stops no process group that has no parent in its session, as all
    of these tests may be (setpgid(2), orphaned process groups)."""
    os.setpgid(0, 0)


def processes() -> dict[int, tuple[int, str, str]]:
    """pid: (parent, state, name) of every process there is."""
    return {pid: _parts(stat) for pid, stat in _each("stat")}


def state_of(pid: int) -> str:
    """The letter that /proc has for it; "" when it is gone."""
    stat = _read(pid, "stat")
    return _parts(stat)[1] if stat else ""


def is_asleep(pid: int) -> bool:
    """Whether each of its threads waits for something, or it is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return True
    stats = [stat for task in tasks if (stat := _read(pid, f"task/{task}/stat"))]
    return all(_parts(stat)[1] == "S" for stat in stats)


def held(pid: int, fd: int) -> int:
    """Bytes that nobody has read yet in the pipe that is this descriptor of a process."""
    end = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, b"\0\0\0\0"))[0]
    finally:
        os.close(end)


def written(pid: int) -> int:
    """Bytes that it has written, to whatever."""
    return int(next(line for line in _read(pid, "io").splitlines() if line.startswith(b"wchar:")).split()[1])


def _parts(stat: bytes) -> tuple[int, str, str]:
    text = stat.decode(errors="replace")
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return int(parent), state, text[text.index("(") + 1 : text.rindex(")")]


def _each(file: str, known: Container[str] = ()) -> Iterator[tuple[int, bytes]]:
    """The pid of every process there is that is not among the known, and what its file in /proc says."""
    for entry in os.listdir("/proc"):
        content = _read(int(entry), file) if entry.isdigit() and entry not in known else b""
        if content:
            yield int(entry), content


def _read(pid: int, file: str) -> bytes:
    """Nothing of a process that has gone. Without pathlib: every test looks at all processes, four times."""
    try:
        with open(f"/proc/{pid}/{file}", "rb", buffering=0) as opened:
            return opened.readall()
    except OSError:
        return b""


def children() -> dict[int, str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # not one: the usual case needs no look at all processes
        return {}
    return {pid: f"{name} {state}" for pid, (parent, state, name) in processes().items() if parent == os.getpid()}


def is_alive(pid: int) -> bool:
    """Also one whose first thread is a zombie, while others are not (proc_pid_stat(5), num_threads)."""
    stat = _read(pid, "stat")
    fields = stat[stat.rindex(b")") + 2 :].split() if stat else [b"X"]
    return fields[0] not in b"ZX" or (fields[0] == b"Z" and int(fields[17]) > 1)


def marked(mark: bytes = b"INFINI_RUN_ID=", known: Container[str] = ()) -> dict[int, str]:
    """Live processes that carry the mark of a launch and that of this test run, without this one and the known."""
    found = carrying("=".join(OURS).encode(), mark, known)
    return {pid: name for pid, name in found.items() if pid != os.getpid()}


def carrying(string: bytes, beginning: bytes = b"", known: Container[str] = ()) -> dict[int, str]:
    """Live processes with this string in their environment, and with one that begins so."""
    words = [b"\0" + string + b"\0", b"\0" + beginning]
    found = [pid for pid, content in _each("environ", known) if all(word in b"\0" + content for word in words)]
    alive = processes() if found else {}
    return {pid: alive[pid][2] for pid in found if pid in alive and alive[pid][1] not in "ZX"}


def thread_names() -> set[str]:
    """Of this process, those of the core included."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            found.add(file.read().rstrip())
    return found


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_full(stream):
    """Whether nothing more fits into a pipe, seen from its reading end."""
    end = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # not by FIONREAD: pages that are not filled count as well (pipe(7))
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)
