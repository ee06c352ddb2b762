"""The options that a user has for sbatch or qsub: words in, options out. It knows no option itself.

The one rule: read them as the scheduler's own command does (getopt_long(3)), short ones joined and long ones
abbreviated. So no spelling hides an option that infini-job sets. The error reports all that is wrong at once.
"""

from __future__ import annotations

from infini_run.options.grammar import quote
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NONE, VALUE, MAYBE = 0, 1, 2  # what follows an option: nothing, its value, a value that is glued to it or nothing


@record
class Table:
    """A command's options. longs: without dashes; shorts: the letter's long name, or the letter. Each says what
    follows. words: those that are no options, and why they are refused."""

    longs: Mapping[str, int]
    shorts: Mapping[str, tuple[str, int]]
    words: Mapping[str, str]

    @property
    def has_longs(self) -> bool:
        return bool(self.longs)


@record
class Option:
    """One option.

    Args:
        name: the long one if it has one, without dashes.
        value: None without a value.
        text: the user's text.
        argv: the same, for the script.
        is_known: the table has it.
    """

    name: str
    value: str | None
    text: str
    argv: tuple[str, ...]
    is_known: bool = True


@record
class Read:
    """What the words meant, and what is wrong with them, one line each."""

    options: tuple[Option, ...]
    problems: tuple[str, ...]

    def values(self, name: str) -> list[str]:
        """Return the values of an option, one per use."""
        return [option.value or "" for option in self.options if option.name == name]

    def without(self, *names: str) -> list[Option]:
        """Return the other options, each once."""
        found: list[Option] = []
        for option in self.options:
            if option.name not in names and all(option.argv != other.argv for other in found):
                found.append(option)
        return found


def read(words: Iterable[str], table: Table) -> Read:
    """Read a user's options as the scheduler's command reads them (getopt_long(3)).

    Args:
        words: Each a word of a command line (`--comment=my job`, `-C`, `a100`), or a line in which the first blank
            ends an option's name (`-C a100`).
        table: The command's options.

    Returns:
        What they mean, and what is wrong with them.
    """
    problems: list[str] = []
    kept = []
    for word in words:
        if word.isprintable():
            kept.append(word)
        else:
            problems.append(f"{quote(word)}: expected one line of printable text")
    scan = _Scan(kept, table, problems)
    while scan.at < len(scan.words):
        scan.read_next()
    return Read(options=tuple(scan.found), problems=tuple(problems))


def refusals(options: Iterable[Option], reasons: Mapping[str, str]) -> list[str]:
    """Return one line for each option that is not the user's to set."""
    return [f"{option.text}: {reasons[option.name]}" for option in options if option.name in reasons]


class _Scan:
    """The place in the words, and the options before it."""

    def __init__(self, words: list[str], table: Table, problems: list[str]) -> None:
        self.words = words
        self.table = table
        self.problems = problems
        self.found: list[Option] = []
        self.at = 0

    def read_next(self) -> None:
        self.words[self.at : self.at + 1] = self._pieces(self.words[self.at])
        word = self.words[self.at]
        self.at += 1
        if word.startswith("--") and len(word) > 2 and self.table.has_longs:
            self._long(word)
        elif len(word) > 1 and word[0] == "-" and word != "--" and not word.startswith("--"):
            self._shorts(word)
        else:
            hint = "" if word.startswith("-") else "; use quotes around a value with blanks"
            problem = f"{quote(word)}: {self.table.words.get(word, f'not an option{hint}')}"
            self.problems += [problem] if problem not in self.problems else []

    def _pieces(self, text: str) -> list[str]:
        """Split a line as a shell does."""
        name, *rest = text.split(maxsplit=1)[:2] if text.startswith("-") and text.strip() else [text]
        if not rest or "=" in name:
            return [text]
        import shlex

        try:
            return shlex.split(text)
        except ValueError as wrong:
            self.problems.append(f"{quote(text)}: a shell cannot read it: {str(wrong).lower()}")
            return [name]

    def _long(self, word: str) -> None:
        spelled, equals, text = word[2:].partition("=")
        names = [spelled] if spelled in self.table.longs else [n for n in self.table.longs if n.startswith(spelled)]
        if len(names) > 1:
            shown = ", ".join(f"--{name}" for name in sorted(names))
            self.problems.append(f"{quote(word)}: ambiguous; use one of {shown}")
            return
        follows = self.table.longs[names[0]] if names else MAYBE
        if follows == NONE and equals:
            self.problems.append(f"{quote(word)}: --{names[0]} takes no value")
        elif follows == VALUE and not equals:
            self._with_next(names[0], word)
        elif not names and not equals and self._next_is_value():
            self._add(spelled, self.words[self.at], word, self.words[self.at], is_known=False)
            self.at += 1
        else:
            self._add(names[0] if names else spelled, text if equals else None, word, is_known=bool(names))

    def _shorts(self, word: str) -> None:
        """Read joined letters; the first one that takes a value takes the rest of the word as that."""
        for place in range(1, len(word)):
            letter, rest = word[place], word[place + 1 :]
            name, follows = self.table.shorts.get(letter, (letter, MAYBE))
            if follows == VALUE and not rest:
                self._with_next(name, f"-{letter}")
                return
            is_known = letter in self.table.shorts
            if follows == NONE or not rest:
                self._add(name, None, f"-{letter}", is_known=is_known)
            else:
                self._add(name, rest, f"-{letter}{rest}", is_known=is_known)
                return

    def _with_next(self, name: str, origin: str) -> None:
        """Take the next word as its value, whatever it looks like (getopt(3))."""
        if self.at == len(self.words):
            self.problems.append(f"{quote(origin)}: missing value")
            return
        self._add(name, self.words[self.at], origin, self.words[self.at])
        self.at += 1

    def _next_is_value(self) -> bool:
        return self.at < len(self.words) and not self.words[self.at].startswith("-")

    def _add(self, name: str, value: str | None, *words: str, is_known: bool = True) -> None:
        origin = quote(" ".join(words))
        self.found.append(Option(name=name, value=value, text=origin, argv=words, is_known=is_known))
