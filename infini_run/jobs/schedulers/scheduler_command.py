"""One command of a scheduler: run, with a limit in time, and what it said.

The one rule: a command that does not end in time dies by SIGKILL with all that it started, and that is an answer too.
Its output goes into memory files, not pipes: processes that it leaves behind hold nothing up. So does its exit code,
which a shell writes: a host program may ignore SIGCHLD, or reap every child of the process. Variables with names that
a shell drops (bash's functions) go around it by env(1).

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

LIMIT_S = 60.0  # sbatch and qsub give up before that
MISSING = 127
_LIMIT = 1 << 26  # bytes of an answer
_SHELL = 'exec 4>&2 2>/dev/null; (exec "$@" 2>&4 3>&- 4>&-); echo $? >&3'  # itself it says nothing, such as "Killed"
IGNORE_TERM = "trap '' TERM; "  # the beginning of a shell's script; what the shell starts ignores it, too


@record
class CommandResult:
    """The result of a command.

    Args:
        code: its exit code, 128 + signal, MISSING without such a program.
        timed_out: SIGKILL ended it, for being slow.
    """

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
        """Return the result without the lines on stderr that contain one of these parts: a complaint about one job
        hides nothing of another. Return None if it did not fail, or every line has such a part."""
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
        environ: Its environment, whose PATH finds it.
        limit_s: Seconds until SIGKILL, with its process group.
        given: Its stdin.
        ignores_term: SIGTERM does not end it: a scheduler that ends a job signals every process of the job.

    Returns:
        How it ended; a command that is not there, or was too slow, is an answer too.
    """
    stdio: list[int] = []
    try:
        try:
            for name in ("in", "out", "error", "code"):
                stdio.append(above_stdio(os.memfd_create(name)))
            source, out, error, exit_code = stdio
            os.pwrite(source, given.encode(), 0)
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
    """Return where a program is. Raises OSError if nowhere."""
    path = program if "/" in program else find_program(program, environ.get("PATH", os.defpath))
    if not path or not os.path.exists(path):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    return path


def start(argv: Sequence[str], environ: Mapping[str, str], stdio: Sequence[int], *, blocks_term: bool = False) -> int:
    """Start a command in its own session.

    Args:
        argv: Its words.
        environ: Its environment, whose PATH finds it.
        stdio: The descriptors that become 0, 1, 2 and on; it gets no others. Each is its own number, or above all of
            these.
        blocks_term: Block SIGTERM in it from its first moment. For a shell that begins with `IGNORE_TERM`, which
            drops a pending one: dash unblocks signals when it waits for a child.

    Returns:
        Its pid.

    Raises:
        OSError: It did not start.
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
    """Move a file above the first four descriptors, and return its number. Where the caller closed its own, one would
    be in the way of another."""
    if fd > 3:
        return fd
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    try:
        return fcntl(fd, F_DUPFD_CLOEXEC, 4)
    finally:
        os.close(fd)


def _inherited() -> list[int]:
    """Return what the caller left open for its children, which this command must not have: qsub may leave a daemon
    behind."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 256)):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue  # it was the directory itself, or another thread's
    return found


def _wait(pid: int, limit_s: float) -> bool:
    """Reap it. Return whether it ended in time."""
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
    """Return whether it ends in time, and do not reap it."""
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
    except ChildProcessError:  # it was slow, and dead and reaped before this look
        return


def kill_group(pid: int) -> None:
    """Send SIGKILL to all of the group that it leads, as long as the number is its own. The kernel frees the number
    when somebody reaps it, or at once where SIGCHLD is ignored."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    os.killpg(pid, signal.SIGKILL)


def _text(fd: int) -> str:
    return os.pread(fd, _LIMIT, 0).decode(errors="replace")
