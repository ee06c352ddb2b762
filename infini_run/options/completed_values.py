"""What a shell can complete of our flags: their names, and what their values can be. The scripts of all shells are
made from it."""

from __future__ import annotations

from infini_run.options.grammar import GRAMMAR, Flag, metavar
from infini_run.options.table import FLAGS

_KINDS = {"FILE": "file", "FILE.png": "file", "DIR": "folder", "NAME,...": "variables", "SIGNAL": "signal"}


def values(flag: Flag) -> tuple[str, ...]:
    """The words that a flag's value can be, as far as its metavar names them: `N|auto|gpu|cpu` has three."""
    if flag.choices:
        return flag.choices
    words = [word for word in metavar(flag).split("|") if word.isascii() and word.isalnum() and word.islower()]
    return tuple(words) if len(metavar(flag).split("|")) > 1 else ()


def kind(flag: Flag) -> str:
    """What else its value can be: file, folder, variables, signal, or "" where no shell knows."""
    return _KINDS.get(metavar(flag), "")


def completed_flags() -> list[Flag]:
    """Those that do something."""
    return [flag for flag in (*FLAGS, *GRAMMAR) if not flag.help.startswith(("ignored:", "refused:"))]


def spellings(flag: Flag) -> list[str]:
    """The names of a flag that have more than one letter."""
    return [name for name in (flag.name, *flag.aliases) if len(name) > 1]


def names_with_value() -> list[str]:
    """Every name of a flag after which the next word is its value."""
    return [name for flag in (*FLAGS, *GRAMMAR) if flag.bare is None for name in (flag.name, *flag.aliases)]
