"""What a program left in TORCHELASTIC_ERROR_FILE: torch's `record` writes JSON there, others write text.

Read and never trusted: any bytes give a message or none, and the exit code stays the kernel's.
"""

from __future__ import annotations

import os
import stat

_MOST = 1 << 20  # bytes that are read
_SHOWN = 500  # characters that are shown


def read_error_file(path: str) -> str:
    """The message in one line, or "" where there is none.

    Format: torch/distributed/elastic/multiprocessing/errors/error_handler.py, torch 2.13.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        if not _is_plain(os.fstat(fd)):
            return ""
        text = os.read(fd, _MOST).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
    return _one_line(_message(text))


def _is_plain(found: os.stat_result) -> bool:
    """A file with one name: a hard link may be to what the rank itself must not read."""
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
