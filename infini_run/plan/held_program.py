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
    name = os.path.basename(command.file)
    words = [*command.argv[1:]] if name.startswith(_NAMES) else _shebang_words(command)
    if words is None:
        raise UsageError(f"{flag}: needs a Python program, and {command.argv[0]} is not one; drop --preload")
    flags, program = _split(words)
    ignoring = next((letter for letter in flags if letter in "IES"), "")
    if ignoring:
        raise UsageError(f"{flag}: conflicts with python -{ignoring}, which ignores the hook in PYTHONPATH; drop one")
    if "i" in flags or environ.get("PYTHONINSPECT"):
        raise UsageError(f"{flag}: conflicts with an interactive Python (-i, PYTHONINSPECT); drop one")
    if program in ("", "-"):
        raise UsageError(
            f"{flag}: needs a script or a module, and this Python reads its program from stdin; give a file"
        )


def _shebang_words(command: Command) -> list[str] | None:
    """Return the words behind the Python of a script that the kernel starts; None if it is no script of Python's."""
    first = first_line(command.file)
    if not shebang_words(first) or not names_python(first):
        return None
    words = [os.fsdecode(word) for word in shebang_words(first)]
    at = next((at for at, word in enumerate(words) if os.path.basename(word).startswith(_NAMES)), len(words) - 1)
    return [*words[at + 1 :], command.file, *command.argv[1:]]


def _split(words: Sequence[str]) -> tuple[str, str]:
    """Return the letters of python's flags before its program, and the program; "" without one."""
    letters, rest = "", list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            return letters, word
        if word.startswith("--"):
            del rest[: word == "--check-hash-based-pycs"]
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "cm":
                return letters, word[at:] or (rest[0] if rest else "")
            letters += letter
            if letter in _WITH_VALUE:
                del rest[: not word[at:]]
                break
    return letters, ""
