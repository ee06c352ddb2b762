"""What a shell can complete of a command: its verbs, the names of their flags, and what follows. The scripts of all
shells use it."""

from __future__ import annotations

from infini_run.options.grammar import GRAMMAR, Flag, metavar
from infini_run.options.table import FLAGS
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_KINDS = {"FILE": "file", "FILE.png": "file", "DIR": "folder", "NAME,...": "variables", "SIGNAL": "signal"}
_KINDS |= {"IMAGE": "file", "PATH": "file"}


@record
class CompletedCommand:
    """A command to complete.

    Attributes:
        name: of the command.
        flags: of each verb.
        verbs: each verb and its text; none: nobody types the one verb that there is.
        words: the verbs whose flags precede a program, and names of jobs.
    """

    name: str
    flags: Mapping[str, tuple[Flag, ...]]
    verbs: Mapping[str, str]
    words: Mapping[str, tuple[str, ...]]

    def fill(self, text: str, *, verb: str, verbs: str, jobs: str, **filled: str) -> str:
        """Return a template with each text in the place of its @NAME@.

        Args:
            verb: where a shell has the typed verb.
            verbs: what completes the verb.
            jobs: what finds the names of jobs.
        """
        filled = {"IF_VERBS": verbs if self.verbs else "", "IF_JOBS": jobs if "jobs" in self.words else ""} | filled
        filled["VERB"] = verb if self.verbs else next(iter(self.flags))
        filled["FIRST"] = "2" if self.verbs else "1"
        filled["PROGRAM"] = " ".join(self.words["program"])
        filled["VALUED"] = " ".join(names_with_value(self))
        filled |= {"COMMAND": self.name, "OWN": "_" + self.name.replace("-", "_")}
        for name, content in filled.items():
            text = text.replace(f"@{name}@", content)
        return text

    def all_flags(self) -> list[Flag]:
        """Return the flags that have an effect, each once."""
        return list({flag.name: flag for verb in self.flags for flag in completed_flags(self, verb)}.values())


RUN = CompletedCommand(name="infini-run", flags={"run": FLAGS}, verbs={}, words={"program": ("run",)})


def values(flag: Flag) -> tuple[str, ...]:
    """Return the words that a flag's value can be, as far as its metavar names them: `N|auto|gpu|cpu` has three."""
    if flag.choices:
        return flag.choices
    words = [word for word in metavar(flag).split("|") if word.isascii() and word.isalnum() and word.islower()]
    return tuple(words) if len(metavar(flag).split("|")) > 1 else ()


def kind(flag: Flag) -> str:
    """Return what else its value can be: file, folder, variables, signal, or "" where no shell knows."""
    return _KINDS.get(metavar(flag), "")


def completed_flags(command: CompletedCommand, verb: str) -> list[Flag]:
    """Return the flags that have an effect."""
    flags = (*command.flags[verb], *GRAMMAR)
    return [flag for flag in flags if not flag.help.startswith(("ignored:", "refused:"))]


def spellings(flag: Flag) -> list[str]:
    """Return the names of a flag that have more than one letter."""
    return [name for name in (flag.name, *flag.aliases) if len(name) > 1]


def names_with_value(command: CompletedCommand) -> list[str]:
    """Return every name of a flag after which the next word is its value."""
    flags = [flag for table in (*command.flags.values(), GRAMMAR) for flag in table if flag.bare is None]
    return list(dict.fromkeys(name for flag in flags for name in (flag.name, *flag.aliases)))
