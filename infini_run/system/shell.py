"""Words as a POSIX shell reads them, and the search of PATH: the parts of shlex and shutil, whose imports take 5 ms
each."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")


def quoted(word: str) -> str:
    """Return text that a shell reads as this word."""
    return word if word and _PLAIN.issuperset(word) else enclosed(word)


def enclosed(word: str) -> str:
    """Return the same, always in quotes."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


def joined(words: Iterable[str]) -> str:
    """Return a line that a shell splits into these words."""
    return " ".join(map(quoted, words))


def find_program(name: str, path: str) -> str:
    """Return the program's file, as execvp(3) finds it; empty if there is none."""
    files = (os.path.join(folder, name) for folder in path.split(":"))
    return next((file for file in files if os.path.isfile(file) and os.access(file, os.X_OK)), "")
