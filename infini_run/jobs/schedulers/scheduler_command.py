"""One command of a scheduler: run, with a limit in time, and what it said.

The one rule: a command that does not end in time is killed with all that it has started, and that is an answer too.
What it says goes into memory files, not pipes: what it may leave behind cannot hold us. So does its exit code, which
a shell writes: a host program may ignore SIGCHLD, or reap every child of the process. Variables with names that a
shell drops (bash's functions) go around it by env(1).

Without `subprocess`, whose import takes longer than most commands: posix_spawn(3).
"""

from __future__ import annotations

import _signal as signal
import errno
import os
import select

from infini_run.record import record, replace
from infini_run.system.shell import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT_S = 60.0  # sbatch and qsub give up by themselves before that
MISSING = 127
_LIMIT = 1 << 26  # bytes of an answer
_SHELL = 'exec 4>&2 2>/dev/null; (exec "$@" 2>&4 3>&- 4>&-); echo $? >&3'  # itself it says nothing, such as "Killed"
IGNORE_TERM = "trap '' TERM; "  # the beginning of a shell's script; what the shell starts ignores it, too


@record
class CommandResult:
    """How a command ended. code: its exit code, 128 + signal, MISSING where there is no such program; timed_out: it
    was killed for being slow."""

    code: int
    out: str
    error: str
    timed_out: bool = False

    @property
    def last_line(self) -> str:
        """Its last line on stderr that says something, else on stdout."""
        lines = [line.strip() for line in (self.error or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def failure(self, *harmless: str) -> CommandResult | None:
        """The same without the lines on stderr that have one of these parts: what is said of one job hides nothing
        of another. None: it has not failed, or every line has such a part."""
        lines = [line for line in self.error.splitlines() if line.strip()]
        left = [line for line in lines if not any(part in line for part in harmless)]
        if not self.code or (lines and not left and not self.timed_out):
            return None
        return replace(self, error="\n".join(left))


def run_command(
    argv: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float = LIMIT_S,
    *,
    given: str = "",
    ignores_term: bool = False,
) -> CommandResult:
    """Run a command and wait for it.

    Args:
        argv: Its words.
        environ: Its environment, in which it is looked for on PATH.
        limit_s: Seconds after which it is killed, with its process group.
        given: Its stdin.
        ignores_term: SIGTERM does not end it: a scheduler that ends a job signals every process of the job.

    Returns:
        How it ended; a command that is not there, or was too slow, is an answer too.
    """
    stdio = [above_stdio(os.memfd_create(name)) for name in ("in", "out", "error", "code")]
    source, out, error, exit_code = stdio
    try:
        os.pwrite(source, given.encode(), 0)
        try:
            words = (*_around_the_shell(environ), _path_of(argv[0], environ), *argv[1:])
            shell = IGNORE_TERM + _SHELL if ignores_term else _SHELL
            pid = start(("/bin/sh", "-c", shell, "sh", *words), environ, stdio, blocks_term=ignores_term)
        except OSError as problem:
            return CommandResult(code=MISSING, out="", error=f"{argv[0]}: {problem.strerror}")
        in_time = _wait(pid, limit_s)
        code = _text(exit_code) or 128 + signal.SIGKILL  # the shell was killed too
        return CommandResult(code=int(code), out=_text(out), error=_text(error), timed_out=not in_time)
    finally:
        for fd in stdio:
            os.close(fd)


def _around_the_shell(environ: Mapping[str, str]) -> tuple[str, ...]:
    odd = [f"{name}={value}" for name, value in environ.items() if not (name.isascii() and name.isidentifier())]
    return ("/usr/bin/env", *odd) if odd else ()


def _path_of(program: str, environ: Mapping[str, str]) -> str:
    """Where a program is. Raises OSError: nowhere."""
    path = program if "/" in program else find_program(program, environ.get("PATH", os.defpath))
    if not path or not os.path.exists(path):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    return path


def start(argv: Sequence[str], environ: Mapping[str, str], stdio: Sequence[int], *, blocks_term: bool = False) -> int:
    """Start a command in a session of its own.

    Args:
        argv: Its words.
        environ: Its environment, in which it is looked for on PATH.
        stdio: The descriptors that become 0, 1, 2 and on; it gets no others. Each is its own number, or above all of
            these.
        blocks_term: SIGTERM is blocked in it from its first moment. It is for a shell that begins with `IGNORE_TERM`,
            which drops one that has come: dash unblocks signals when it waits for a child.

    Returns:
        Its pid.

    Raises:
        OSError: It was not started.
    """
    path = _path_of(argv[0], environ)
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
    actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inherited() if fd >= len(stdio)]
    blocked = (signal.SIGTERM,) if blocks_term else ()
    default = (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
    rest = {"file_actions": actions, "setsigmask": blocked, "setsigdef": default}
    try:
        return os.posix_spawn(path, list(argv), dict(environ), **rest, setsid=True)  # type: ignore[arg-type]
    except NotImplementedError:  # glibc before 2.26
        return os.posix_spawn(path, list(argv), dict(environ), **rest, setpgroup=0)  # type: ignore[arg-type]


def above_stdio(fd: int) -> int:
    """The same file, as none of the first four descriptors: where our own are closed, one would stand in the way of
    another."""
    if fd > 3:
        return fd
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    other = fcntl(fd, F_DUPFD_CLOEXEC, 4)
    os.close(fd)
    return other


def _inherited() -> list[int]:
    """What our caller has left open for what it starts, and is nobody's business: qsub may leave a daemon behind."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 256)):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue  # it was the directory itself, or another thread's
    return found


def _wait(pid: int, limit_s: float) -> bool:
    """Whether it ended in time. It is reaped in any case."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # before Linux 5.3, or forbidden, or reaped by another part of this process
        pidfd = -1
    is_over = False
    try:
        is_over = _ends_within(pid, pidfd, limit_s)
    finally:
        if not is_over:
            kill_group(pid)
        reap(pid, pidfd)
        if pidfd >= 0:
            os.close(pidfd)
    return is_over


def reap(pid: int, pidfd: int = -1) -> None:
    """Wait for the end of a child, unless another part of this process has reaped it.

    Args:
        pid: Of the child.
        pidfd: Its pidfd, if there is one: the number alone may be another child's by now.
    """
    try:
        os.waitid(*((os.P_PIDFD, pidfd) if pidfd >= 0 else (os.P_PID, pid)), os.WEXITED)
    except ChildProcessError:
        return
    except OSError:
        if pidfd < 0:
            raise
        reap(pid)  # Linux 5.3 has pidfds, and no P_PIDFD


def _ends_within(pid: int, pidfd: int, limit_s: float) -> bool:
    """It is not reaped."""
    if pidfd >= 0:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))
    from threading import Thread

    waiting = Thread(target=_wait_unreaped, args=(pid,), daemon=True)
    waiting.start()
    waiting.join(limit_s)
    return not waiting.is_alive()


def _wait_unreaped(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # it was too slow, killed, and reaped before we looked
        return


def kill_group(pid: int) -> None:
    """SIGKILL to all of the group that it leads, as long as the number is its own: until somebody reaps it, as the
    kernel does where SIGCHLD is ignored."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    os.killpg(pid, signal.SIGKILL)


def _text(fd: int) -> str:
    return os.pread(fd, _LIMIT, 0).decode(errors="replace")
