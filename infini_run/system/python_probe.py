"""Whether a file is a Python that infini-run may start: it has to answer once within a time limit.

For what `interpreter.find_python` cannot see: a wrapper, a shim, a program that embeds Python, the Python that a
caller named. The probed process has PROBE_VARIABLE in its environment, so a program that launches on its start ends
there.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from infini_run.errors import UsageError, printable
from infini_run.value_types import PROBE_VARIABLE
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIMIT_S = 20.0  # a cold start from a file server takes seconds
_MOST = 1 << 12  # bytes to read of its output
_SHOWN = 120  # characters of other output to quote
_TAG = "str(sys.implementation.cache_tag) + getattr(sys, 'abiflags', '')"
_answers: dict[tuple[str, bool, int, int], str] = {}  # by path, need, inode and time of change: its problem


def find_answering(executable: str, foreign_words: Callable[[str], list[str]], *, is_frozen: bool) -> str:
    """Return the path of a Python of this version: the one named to multiprocessing, or `executable`.

    Args:
        executable: `sys.executable`; it may be empty.
        foreign_words: returns the arguments that run a line of code in a Python that has infini-run installed.
        is_frozen: this program has its modules within it, so the Python must have infini-run.

    Raises:
        UsageError: it is no Python, or lacks infini-run.
    """
    named = _named(executable)
    path = named or executable
    given = f"multiprocessing.set_executable({named!r})" if named else f"sys.executable={executable!r}"
    problem = _problem(path, foreign_words if is_frozen or named else None, is_frozen=is_frozen)
    if problem:
        version = ".".join(map(str, sys.version_info[:2]))
        raise UsageError(
            f"{given}: {problem}; use multiprocessing.set_executable(PATH) with a Python {version} that has "
            f"infini-run {VERSION}"
        )
    return path


def _named(executable: str) -> str:
    """Return the argument of multiprocessing.set_executable; "" if nobody called it."""
    spawn = sys.modules.get("multiprocessing.spawn")
    named = spawn.get_executable() if spawn is not None else None
    text = os.fsdecode(named) if named else ""
    return os.path.abspath(text) if text not in ("", executable) and not _is_this_program(text) else ""


def _is_this_program(path: str) -> bool:
    with suppress(OSError, ValueError):
        return os.path.samefile(path, "/proc/self/exe")
    return False


def _is_embedded() -> bool:
    """Return whether the program kept its arguments from Python, or gave it all of them. A Python's own main takes
    those before the script (sys.orig_argv; Py_BytesMain)."""
    return not sys.orig_argv or sys.argv == sys.orig_argv


def _problem(path: str, foreign_words: Callable[[str], list[str]] | None, *, is_frozen: bool) -> str:
    """Return why that is no usable Python; "": it is one."""
    if not path:
        return "not a Python"
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return f"not a Python: {getattr(error, 'strerror', None) or error}"
    if os.path.isdir(path) or not os.access(path, os.X_OK, effective_ids=True):
        return "not a Python: cannot be executed"
    if (is_frozen or _is_embedded()) and _is_this_program(path):
        what = "this frozen program" if is_frozen else "this program, which embeds Python"
        return f"not a Python but {what}, and would start it again"
    key = (path, foreign_words is not None, status.st_ino, status.st_mtime_ns)
    if key not in _answers:
        _answers[key] = _ask(path, foreign_words)
    return _answers[key]


def _ask(path: str, foreign_words: Callable[[str], list[str]] | None) -> str:
    """Return what is wrong with its answer; "": nothing. `foreign_words` is None if the Python need not have
    infini-run."""
    start = f"infini {os.urandom(8).hex()} "  # no echo of the code has it
    code = f"print(*{start.split()}, {_TAG}, VERSION, flush=True)"
    if foreign_words is not None:
        words = foreign_words(f"import sys; from infini_run.version import VERSION; {code}")
    else:
        words = ["-I", "-c", f"import sys; VERSION = {VERSION!r}; {code}"]
    answer, instead = ask_once([path, *words], start, os.environ)
    if not answer and foreign_words is not None and "No module named 'infini_run'" in instead:
        return "infini-run missing there"
    if not answer:
        return f"not a Python: {instead}"
    ours = str(sys.implementation.cache_tag) + getattr(sys, "abiflags", "")
    tag, _, version = answer.strip().partition(" ")
    if tag != ours:
        return f"not a Python of this version: {tag}, expected {ours}"
    return "" if version == VERSION else f"infini-run {version} there, {VERSION} here"


def ask_once(argv: list[str], start: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return what follows `start` in a line of a command's output; or None, and what it did instead."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, PROBE_VARIABLE: "1"},
            start_new_session=True,  # end all of it; it has no terminal
        )
    except OSError as error:
        return "", f"{error.strerror}"
    try:
        output, is_late = _read(process, start)
    finally:
        end_session(process)
    text = output.decode("utf-8", "replace")
    answer = text.partition(start)[2].partition("\n")[0] if start in text else None
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    how = f"no answer within {LIMIT_S:g} s" if is_late else "no answer to -c"
    return answer, how + (f": {printable(last.strip())[:_SHOWN]}" if last else "")


def _read(process: subprocess.Popen[bytes], start: str) -> tuple[bytes, bool]:
    """Return its output up to its answer, its end, or a limit; and whether none of these came in time."""
    assert process.stdout is not None
    fd, output, end_s = process.stdout.fileno(), b"", time.monotonic() + LIMIT_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(output) < _MOST and b"\n" not in output.partition(start.encode())[2]:
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000 + 1):
            return output, start.encode() not in output
        piece = os.read(fd, _MOST)
        if not piece:
            break
        output += piece
    return output, False


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of a process that leads its session, and reap it."""
    assert process.stdout is not None
    process.stdout.close()
    with suppress(OSError):  # this program ignores SIGCHLD, or waits for every child: the number may be another's
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError, AttributeError):  # Linux 5.3; without it Popen.wait looks again and again
        _wait(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_S)


def _wait(pid: int) -> None:
    """Wait for its end. Raises OSError without pidfds in the kernel, or without such a process."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(LIMIT_S * 1000)
    finally:
        os.close(fd)
