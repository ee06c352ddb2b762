"""The command line of this process as ps(1) and top(1) show it."""

from __future__ import annotations

import os

_START, _END = 45, 46  # arg_start and arg_end in /proc/PID/stat, counted from behind the name (proc(5): 48 and 49)


def set_title(text: str) -> None:
    """Show `text` in place of this process's arguments, as far as these had room. No effect without /proc.

    Its last byte is no NUL: the kernel then shows what comes before the first one (setproctitle(3), and
    get_mm_proctitle in linux/fs/proc/base.c).
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        start, end = int(fields[_START]), int(fields[_END])
        title = os.fsencode(text)[: max(0, end - start - 2)] + b"\0"
        memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            if start > 0 and len(title) > 1:
                os.pwrite(memory, title.ljust(end - start - 1, b"\0") + b"\1", start)
        finally:
            os.close(memory)
    except (OSError, ValueError, IndexError):  # hidden, another kernel, or a process without arguments
        return
