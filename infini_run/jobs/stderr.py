"""Lines for the user on stderr, in the words of infini-job or of the launcher inside a job."""

from __future__ import annotations

import os
import sys

from infini_run.errors import printable


def print_line(text: str) -> None:
    """Print a line of infini-job on this program's sys.stderr.

    Args:
        text: the line, without `infini-job: `. Unprintable characters appear as escapes.
    """
    print(f"infini-job: {printable(text)}", file=sys.stderr, flush=True)


def write_line(text: str, name: str = "infini-job") -> None:
    """Write a line to descriptor 2 of a process whose stderr is a file. On a full disk it is lost.

    Args:
        text: the line, without the name.
        name: the program that the line names.
    """
    write_text(f"{name}: {printable(text)}")


def write_text(text: str) -> None:
    """Write lines as `write_line` does, as they are.

    Args:
        text: the lines, without the last end of line.
    """
    try:
        os.write(2, os.fsencode(text + "\n"))
    except OSError:
        return
