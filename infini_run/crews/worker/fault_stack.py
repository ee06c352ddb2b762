"""In a worker: the Python stack of a crash (SIGSEGV, SIGABRT, ...), and of a hang, into a file beside the error file.

The module faulthandler writes it from a signal handler, whatever state the interpreter is in. The launcher reads the
file after a bad end of the process (node/last_output.py).
"""

from __future__ import annotations

import faulthandler
import os

from infini_run.report.error_file import STACK

_fd = -1  # of the file; faulthandler keeps the number


def enable(stop_signal: int) -> None:
    """Have the stack of a crash written, unless the user's faulthandler is on already.

    Args:
        stop_signal: the signal that stops a hung rank, which then writes its stack, too. 0: none.
    """
    global _fd
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file or faulthandler.is_enabled():
        return
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        _fd = os.open(error_file + STACK, flags, 0o600)
    except OSError:
        return  # a read-only container: the error file is a convenience, and so is this
    faulthandler.enable(_fd, all_threads=False)
    if stop_signal:
        faulthandler.register(stop_signal, _fd, all_threads=False, chain=True)


def remove() -> None:
    """Remove the file: the worker ended in order, so there is nothing to report."""
    if _fd >= 0:
        try:
            os.unlink(os.environ.get("TORCHELASTIC_ERROR_FILE", "") + STACK)
        except OSError:
            return  # the folder went first
