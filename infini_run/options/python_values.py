"""Values of Python and TOML: as the words of the command line that mean the same, and as what a process may get."""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.options.grammar import metavar
from infini_run.options.table import TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PATHS = ("DIR", "FILE", "FILE.png", "FILE|fd:N")


def check_words(what: str, words: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return texts and paths as text.

    Raises:
        UsageError: They are one text, and no list. Or one is no text, or has no bytes in the encoding of file names.
            Or one has a NUL character, at which execve(2) would end it in silence.
    """
    if isinstance(words, (str, bytes)):  # its characters are no arguments
        raise UsageError(f"{what}={words!r}: expected a list of texts")
    texts = tuple(os.fspath(word) if isinstance(word, os.PathLike) else word for word in words)
    for text in texts:
        if not isinstance(text, str):
            call = "os.fsdecode" if isinstance(text, bytes) else "str"
            raise UsageError(f"{what}: {text!r}: expected text; did you mean {call}({text!r})?")
        if "\0" in text:
            raise UsageError(f"{what}: {text!r}: cannot pass a NUL character in an argument or a variable")
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            raise UsageError(f"{what}: {text!a}: cannot be encoded in an argument or a variable") from None
    return texts


def check_path(what: str, path: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text, or None. Raises UsageError: as check_words."""
    return None if path is None else check_words(what, (path,))[0]


def check_environment(env: Mapping[str, str | os.PathLike[str]] | None) -> dict[str, str]:
    """Return a caller's variables as text; a path is text, too. None: there are none.

    Raises:
        UsageError: It is no mapping. A name is empty or has a `=`; a name or a value is no text, or has a NUL
            character (environ(7)).
    """
    if env is None:
        return {}
    if not hasattr(env, "keys"):
        raise UsageError(f"env={env!r}: expected a dict of variables, such as {{'NAME': 'value'}}")
    checked = {}
    for name in env:
        if not isinstance(name, str) or not name or "=" in name:
            raise UsageError(f"env: {name!r}: not a variable name; use non-empty text without =")
        checked[name] = check_words(f"env[{name!r}]", (name, env[name]))[1]
    return checked


def flag_words(name: str, value: object) -> list[str]:
    """Return the words of the command line for a flag's value; None: none.

    Raises:
        UsageError: The value is of a type that the flag does not have.
    """
    if value is None:
        return []
    entry = TABLE.get(name)
    flag = None if entry is None else entry[0]
    if flag is not None and (value is True or value is False) and (flag.bare if value else flag.negated) is None:
        raise UsageError(f"{name}={value!r}: expected {metavar(flag)}")
    if flag is not None and flag.metavar in _PATHS and not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name}={value!r}: expected a path, as text or a pathlib.Path")
    if value is True or value is False:
        return [f"--{name}" if value else f"--no{name}"]
    if isinstance(value, dict):  # redirects={0: 3}
        value = [f"{key}:{item}" for key, item in value.items()]
    if name == "nnodes" and isinstance(value, tuple):  # (3, 4)
        value = ":".join(str(item) for item in value)
    if isinstance(value, (list, tuple, range)):
        value = ",".join(str(item) for item in value)
    return [f"--{name}={os.fspath(value) if isinstance(value, os.PathLike) else value}"]
