"""One command of a scheduler: run, with a limit in time, and what it said.

The one rule: a command that does not end in time is killed with all that it has started, and that is an answer too.
What it says goes into memory files, not pipes: what it may leave behind cannot hold us.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT_S = 60.0  # sbatch and qsub give up by themselves before that
MISSING = 127
_LIMIT = 1 << 26  # bytes of an answer


@record
class Said:
    """How a command ended. code: its exit code, 128 + signal, MISSING where there is no such program; timed_out: it
    was killed for being slow."""

    code: int
    out: str
    error: str
    timed_out: bool = False

    @property
    def last_words(self) -> str:
        """Its last line on stderr that says something, else on stdout."""
        lines = [line.strip() for line in (self.error or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else ""


def ask(argv: Sequence[str], environ: Mapping[str, str], limit_s: float = LIMIT_S) -> Said:
    """Run it without stdin and wait, at most `limit_s` seconds."""
    out, error = os.memfd_create("out"), os.memfd_create("error")
    try:
        process = subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True
        )
    except OSError as problem:
        os.close(out)
        os.close(error)
        return Said(code=MISSING, out="", error=f"{argv[0]}: {problem.strerror}")
    try:
        in_time = _wait(process, limit_s)
        return Said(code=_code(process.returncode), out=_text(out), error=_text(error), timed_out=not in_time)
    finally:
        os.close(out)
        os.close(error)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether it ended in time. It is reaped in any case."""
    is_over = False
    try:
        is_over = _ends_within(process.pid, limit_s)
    finally:
        if not is_over:
            kill_group(process)
        process.wait()
    return is_over


def _ends_within(pid: int, limit_s: float) -> bool:
    """It is not reaped."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # before Linux 5.3, or forbidden: a thread waits
        from threading import Thread

        waiting = Thread(target=_wait_unreaped, args=(pid,), daemon=True)
        waiting.start()
        waiting.join(limit_s)
        return not waiting.is_alive()
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))
    finally:
        os.close(pidfd)


def _wait_unreaped(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # it was too slow, killed, and reaped before we looked
        return


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all of the group that it leads, as long as the number is its own: until somebody reaps it, as the
    kernel does where SIGCHLD is ignored."""
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    os.killpg(process.pid, signal.SIGKILL)


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _text(fd: int) -> str:
    return os.pread(fd, _LIMIT, 0).decode(errors="replace")
