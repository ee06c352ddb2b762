"""The environment of workers: this process's, or what of it matches; a file of variables; variables by name.

Pure but for reading the file. What comes later wins.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What another machine gets of this process's environment by default.
COPIED = (
    *("PATH", "LD_LIBRARY*", "LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA*"),
    *("CUDA*", "TORCH*", "PYTORCH*", "NCCL*", "GLOO*", "OMP_*", "HF_*"),
)


def patterns_of(inherit_env: bool, hosts: Sequence[str]) -> Sequence[str] | None:
    """Return the patterns of the variables that workers have of this process's, unless the caller names them. None:
    all of them. `hosts`: where the workers are; none: on this machine."""
    if not inherit_env:
        return ()
    return COPIED if hosts else None


def make_environ(
    ours: Mapping[str, str],
    copy_env: Sequence[str] | None,
    env_file: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the environment of workers, from `ours`, this process's. Raises UsageError.

    Args:
        copy_env: patterns (fnmatch) of the names to take from it; None: all.
        env_file: lines NAME=value.
        env: more variables.
    """
    if isinstance(copy_env, str):
        raise UsageError(f"copy_env={copy_env!r}: expected a list of patterns")
    patterns = ("*",) if copy_env is None else tuple(copy_env)
    environ = {name: value for name, value in ours.items() if any(fnmatchcase(name, each) for each in patterns)}
    if env_file is not None:
        environ |= read_env_file(os.fspath(env_file))
    for name, value in (env or {}).items():
        _check(name, value)
        environ[name] = value
    return environ


def _check(name: object, value: object) -> None:
    if not isinstance(name, str) or not isinstance(value, str):
        raise UsageError(f"env: {name!r}: {value!r}: expected strings as names and values")
    if not name or "=" in name or "\0" in name + value:
        raise UsageError(f"env: {name!r}={value!r} is not a variable")


def read_env_file(path: str) -> dict[str, str]:
    """Return the variables of a .env file: NAME=value, with or without `export`.

    A value in quotes is what is between them; double ones may have \\n, \\t, \\", \\\\, and \\$. Any other value ends
    at ` #`. This executes and expands nothing. Raises UsageError.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"env_file={path} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"env_file={path}, line {number}: {line.strip()!r} is not NAME=value")
        found[name.strip()] = _value(value.strip(), path, number)
    return found


def _value(text: str, path: str, number: int) -> str:
    if text[:1] not in ("'", '"'):
        return "" if text.startswith("#") else text.split(" #")[0].rstrip()
    quote, value, at = text[0], "", 1
    while at < len(text) and text[at] != quote:
        if text[at] == "\\" and quote == '"' and at + 1 < len(text):
            at += 1
            value += {"n": "\n", "t": "\t"}.get(text[at], text[at])
        else:
            value += text[at]
        at += 1
    rest = text[at + 1 :].strip()
    if at >= len(text) or (rest and not rest.startswith("#")):
        raise UsageError(f"env_file={path}, line {number}: missing {quote} at the end of the value")
    return value
