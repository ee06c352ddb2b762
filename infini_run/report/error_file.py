"""What a program left in TORCHELASTIC_ERROR_FILE: torch's `record` writes JSON there, others write text.

Read and never trusted: any bytes give a message or none, and the exit code stays the kernel's.
"""

from __future__ import annotations

import os
import stat

_MOST = 1 << 20  # bytes that are read
_SHOWN = 500  # characters that are shown
STACK = ".stack"  # after an error file's name: what faulthandler(3) wrote in a worker that runs Python functions
_FRAMES = 20  # of a stack, the innermost


def read_error_file(path: str) -> str:
    """Return the message in one line, or "" if there is none.

    Format: torch/distributed/elastic/multiprocessing/errors/error_handler.py, torch 2.13.
    """
    return _one_line(_message(_read(path)))


def take_stack(error_file: str) -> tuple[str, ...]:
    """Return the frames of the stack beside an error file, and remove that file. The innermost comes first, those of
    this package are absent, and without a stack there are none."""
    text = _read(error_file + STACK)
    try:
        os.unlink(error_file + STACK)
    except OSError:
        return ()
    frames = [line.strip() for line in text.splitlines() if line.startswith('  File "')]
    return tuple(frame for frame in frames if "/infini_run/crews/" not in frame and '"<string>"' not in frame)[
        :_FRAMES
    ]


def _read(path: str) -> str:
    """Return the text of a file that a rank wrote; empty if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        if not _is_plain(os.fstat(fd)):
            return ""
        return os.read(fd, _MOST).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _is_plain(found: os.stat_result) -> bool:
    """Return whether a file has one name. A hard link may lead to what the rank itself must not read."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def _message(text: str) -> str:
    import json

    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for _ in range(2):  # {"message": {"message": ...}}, or {"message": ...}
        if isinstance(found, dict):
            found = found.get("message", "")
    return found if isinstance(found, str) else text


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."
