"""Whether a command is a Python that --preload can hold before its script. Imported only with the flag."""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.plan.program import first_line, names_python, shebang_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.plan.model import Command

_NAMES = ("python", "pypy", "graalpy")
_WITH_VALUE = "WX"  # one-letter flags of python(1) that take the rest of the word, or the next one


def check_held(command: Command, environ: Mapping[str, str], flag: str) -> None:
    """Check that a command is a Python that imports sitecustomize from PYTHONPATH, and runs a file or a module.

    Args:
        command: The command of every rank.
        environ: Its environment.
        flag: The flag as the user gave it.

    Raises:
        UsageError: It is not.
    """
    found = python_words(command)
    if found is None:
        raise UsageError(f"{flag}: needs a Python program, and {command.argv[0]} is not one; drop --preload")
    flags, program, _ = split_words(found[1])
    ignoring = next((letter for letter in flags if letter in "IES"), "")
    if ignoring:
        raise UsageError(f"{flag}: conflicts with python -{ignoring}, which ignores the hook in PYTHONPATH; drop one")
    if "i" in flags or environ.get("PYTHONINSPECT"):
        raise UsageError(f"{flag}: conflicts with an interactive Python (-i, PYTHONINSPECT); drop one")
    if program in ("", "-"):
        raise UsageError(
            f"{flag}: needs a script or a module, and this Python reads its program from stdin; give a file"
        )


def python_words(command: Command) -> tuple[list[str], list[str]] | None:
    """Return the words that start a command's Python, and those behind them. None if it is no Python's."""
    if os.path.basename(command.file).startswith(_NAMES):
        return [command.file], [*command.argv[1:]]
    first = first_line(command.file)
    if not shebang_words(first) or not names_python(first):
        return None
    words = [os.fsdecode(word) for word in shebang_words(first)]
    at = next((at for at, word in enumerate(words) if os.path.basename(word).startswith(_NAMES)), len(words) - 1)
    return words[: at + 1], [*words[at + 1 :], command.file, *command.argv[1:]]


def split_words(words: Sequence[str]) -> tuple[str, str, str]:
    """Return the letters of python's flags before its program, the program ("" without one), and the letter before
    the program: `m`, `c`, or ""."""
    letters, rest = "", list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            return letters, word, ""
        if word.startswith("--"):
            del rest[: word == "--check-hash-based-pycs"]
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "cm":
                return letters, word[at:] or (rest[0] if rest else ""), letter
            letters += letter
            if letter in _WITH_VALUE:
                del rest[: not word[at:]]
                break
    return letters, "", ""
