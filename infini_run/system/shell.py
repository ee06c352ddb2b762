"""Words as a POSIX shell reads them, and the search of PATH: the parts of shlex and shutil, whose imports take 5 ms
each."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")


def quoted(word: str) -> str:
    """Return text that a POSIX shell reads as the word `word`; in quotes only if it must be."""
    return word if word and _PLAIN.issuperset(word) else enclosed(word)


def enclosed(word: str) -> str:
    """Return text that a POSIX shell reads as the word `word`, always in quotes."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


def joined(words: Iterable[str]) -> str:
    """Return a line that a POSIX shell splits into `words`."""
    return " ".join(map(quoted, words))


def find_program(name: str, path: str) -> str:
    """Return the file of a program, as execvp(3) finds it; empty if there is none.

    Args:
        name: of the program, without a slash.
        path: directories, separated by colons, as in PATH.
    """
    files = (os.path.join(folder, name) for folder in path.split(":"))
    return next((file for file in files if os.path.isfile(file) and os.access(file, os.X_OK)), "")


def missing_text(name: str) -> str:
    """Return why an engine's command cannot be started: `find_program` found none, or its path is not executable."""
    if "/" not in name:
        return f"{name} is not on PATH, and --engine needs it"
    why = "it does not exist" if not os.path.lexists(name) else "this user may not execute it"
    return f"{name} cannot be started: {why}; use another Python (--remote_python, --python of infini-job)"
