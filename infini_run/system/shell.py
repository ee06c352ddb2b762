"""Words as a POSIX shell reads them, and where it finds a program: as shlex and shutil, whose imports cost 5 ms each,
have them."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")


def quoted(word: str) -> str:
    """One that a shell reads as that word, whatever is in it."""
    return word if word and _PLAIN.issuperset(word) else enclosed(word)


def enclosed(word: str) -> str:
    """The same, in quotes even where none are needed."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


def joined(words: Iterable[str]) -> str:
    """A line that a shell splits into those words."""
    return " ".join(map(quoted, words))


def find_program(name: str, path: str) -> str:
    """The program's file, as execvp(3) finds it; "" where there is none."""
    files = (os.path.join(folder, name) for folder in path.split(":"))
    return next((file for file in files if os.path.isfile(file) and os.access(file, os.X_OK)), "")
