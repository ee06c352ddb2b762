"""Lines for the user: answers on stdout; on stderr the words of infini-job, or of the launcher inside a job.

The one rule: a reader that has gone (`| head`) changes nothing that a command does, nor its exit code.
"""

from __future__ import annotations

import os
import sys

from infini_run.errors import printable
from infini_run.lean_os import encode_text


def print_answer(text: str, end: str = "\n") -> None:
    """Print a text on this program's sys.stdout.

    Args:
        text: the text, as it is. Characters that the encoding of sys.stdout lacks appear as escapes.
        end: what follows it.
    """
    try:
        try:
            print(text, end=end, flush=True)
        except UnicodeEncodeError:  # nothing of it was written
            encoding = sys.stdout.encoding  # the error's may be "charmap"
            print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except BrokenPipeError:
        drop_stream(1)


def print_text(text: str, end: str = "\n") -> None:
    """Print a text on this program's sys.stderr, as `print_answer` does."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except BrokenPipeError:
        drop_stream(2)


def print_line(text: str) -> None:
    """Print a line of infini-job on this program's sys.stderr.

    Args:
        text: the line, without `infini-job: `. Unprintable characters appear as escapes.
    """
    print_text(f"infini-job: {printable(text)}")


def drop_stream(fd: int) -> None:
    """Drop what is unwritten, and what follows. Else the interpreter tries again at its end, and exits with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


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
        os.write(2, encode_text(text + "\n"))
    except OSError:
        return
