"""stdin, stdout, and stderr that the caller closed."""

from __future__ import annotations

import os

from infini_run.errors import StartError


def fill_stdio() -> None:
    """Open /dev/null in place of a closed stdin, stdout, or stderr: no other file gets its number.

    Raises:
        StartError: It cannot be opened.
    """
    try:
        while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < 3:
            pass
    except OSError as error:
        text = f"/dev/null cannot be opened: {error.strerror}"
        raise StartError(text, "opening /dev/null", error.errno or 0) from None
    os.close(fd)


def above_stdio(fd: int) -> int:
    """Return a new descriptor, moved if its number is one of stdio's: the core puts the stdio of a process there.

    Raises:
        OSError: It cannot be moved, and is closed.
    """
    if fd > 2:
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)
