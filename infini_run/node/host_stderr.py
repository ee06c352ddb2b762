"""Lines on the stderr of a host program, which may be anything: a notebook's, a test's, or nothing."""

from __future__ import annotations

import sys

from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S, write_all
from infini_run.core.quiet_write import Quietly
from infini_run.errors import printable
from infini_run.lean_os import encode_text


def has_own_stderr() -> bool:
    """Return whether sys.stderr is this process's stderr, and not a notebook's or a test's."""
    try:
        return sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.fileno() == 2
    except (OSError, ValueError):
        return False


def print_line(text: str, name: str = "infini-run") -> None:
    """Write a line of infini-run to the host program's stderr.

    It bypasses the buffer of sys.stderr: a line that finds no reader must not come up again when the program ends. A
    reader that does not read costs the line, and no more than CONSOLE_WAIT_S: the caller may be about to stop ranks.

    Args:
        text: The line, without the name. Unprintable bytes appear as escapes.
        name: Of the program that says it.
    """
    line = f"{name}: {printable(text)}\n"
    try:
        if sys.stderr is not sys.__stderr__:
            with Quietly():
                print(line, end="", file=sys.stderr or sys.__stderr__, flush=True)
        elif sys.stderr is not None:
            write_all(sys.stderr.fileno(), encode_text(line), CONSOLE_WAIT_S)
    except (OSError, ValueError):
        return  # nobody reads it, or somebody closed it: no reason to end a job
