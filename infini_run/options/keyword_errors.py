"""Errors, lines, and reports of the Python API, which name the keyword that the caller has, not the flag behind it.

Every check words its error for the command (`--log_dir=DIR`), and none knows who asked. A block of the API renames
what leaves it (`log_dir=DIR`), and so does a launch for the lines that it prints.
"""

from __future__ import annotations

from infini_run.errors import NodeLost, ProgramError, StartError, UsageError
from infini_run.options.grammar import GRAMMAR_GROUP, boolean, quote
from infini_run.options.table import TABLE
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from infini_run.options.grammar import Entry
    from infini_run.report.report import Report

COMMAND_ONLY = ("dry_run", "isolate", "report", "termination_log", "verbose")
# --name or --name=value, but not the option of another command (srun --export), and no part of another word
_FLAG = r"(?<![\w=-])(?<!infini-run )(?<!infini-job )(?<!srun )--(\w+)(?![\w-])(?:=('[^']*'|[^\s;]*[^\s;:,.)]))?"
_ADVICE = "  next: "  # report/report.py
_BARE_VALUE = r"[-+.0-9]+|[A-Z][A-Z_:|,=.]*|\S*\|\S*"  # a number; NAME, HOST:PORT; a|b


class KeywordErrors:
    """A block whose errors of infini-run name keywords.

    Args:
        given: The keywords of the call, with the values of the caller.
        has_programs: It is about objects of `Program`, whose `name` is --program.
        table: The flags that there are, by name.
        left_out: Names of flags that are no keywords.
        names: Keywords that are not called as their flag, by the flag.
        own: Keywords whose value is options of another command: an error that begins with one of them quotes it.
    """

    __slots__ = ("_given", "_left_out", "_names", "_own", "_table")

    def __init__(
        self,
        given: Mapping[str, object],
        *,
        has_programs: bool = False,
        table: Mapping[str, Entry] = TABLE,
        left_out: tuple[str, ...] = COMMAND_ONLY,
        names: Mapping[str, str] | None = None,
        own: tuple[str, ...] = (),
    ) -> None:
        self._given = {"nproc_per_node" if name == "nproc" else name: value for name, value in given.items()}
        self._names = {**(names or {}), **({"program": "name"} if has_programs else {})}
        if given.get("nproc") is not None:
            self._names["nproc_per_node"] = "nproc"
        self._table = table
        self._left_out = left_out
        self._own = own

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rename_error(error)

    def rename_error(self, error: BaseException | None) -> None:
        """Rename flags in the text of an error of infini-run. Others quote what a rank or another program wrote; that
        of a failed rank has the words of its report."""
        if isinstance(error, (UsageError, ProgramError, StartError, NodeLost)):
            error.args = (self.rename(str(error)), *error.args[1:])

    def rename_report(self, report: Report) -> Report:
        """Return a report with keywords in its sentences and its advice. The rest is what ranks wrote."""
        rename = self.rename
        return replace(
            report,
            notices=tuple(map(rename, report.notices)),
            lost=tuple(map(rename, report.lost)),
            error=rename(report.error),
            not_restarted=rename(report.not_restarted),
            advice=rename(report.find_advice()),
        )

    def rename_lines(self, lines: Sequence[str]) -> list[str]:
        """Return what a launch prints with keywords in the first line and the advice. Others quote what a rank
        wrote."""
        return [self.rename(line) if not at or line.startswith(_ADVICE) else line for at, line in enumerate(lines)]

    def rename(self, text: str) -> str:
        """Return a message with keywords in place of flags."""
        if "--" not in text:
            return text
        import re

        for name, value in self._given.items():
            if isinstance(value, str):  # it may have spaces, and ends where the caller ended it
                there = re.escape(f"--{name}={quote(value)}") + r"(?![^\s:;,)])"
                shown = f"{self._names.get(name, name)}={_literal(value)}"
                text = re.sub(there, lambda _, shown=shown: shown, text)  # type: ignore[misc]
        return re.sub(_FLAG, self._keyword, text)

    def _keyword(self, found: re.Match[str]) -> str:
        import re

        name, value = found[1], found[2]
        entry = self._table.get(name)
        if entry is None or self._is_own(found):
            return found[0]
        flag, _, is_negated = entry
        if (
            flag.name == "program" and "program" not in self._names
        ):  # a command alone, where only a program has such a flag
            return f"Program(..., name={value})"
        is_keyword = flag.group != GRAMMAR_GROUP and flag.has_variable and flag.name not in self._left_out
        if not is_keyword and flag.name not in self._names:
            return found[0]
        shown = self._names.get(flag.name, flag.name if is_negated else name)
        if value is not None:
            is_bare = value[0] in "'\"" or re.fullmatch(_BARE_VALUE, value)
            return f"{shown}={value if is_bare else _literal(value)}"
        return f"{shown}={not is_negated}" if flag.kind is boolean else f"{shown}="

    def _is_own(self, found: re.Match[str]) -> bool:
        if not found.string.startswith(":", found.end()):
            return False
        for value in map(self._given.get, self._own):
            words = value.split() if isinstance(value, str) else value
            if isinstance(words, (list, tuple)) and found[0] in words:
                return True
        return False


def _literal(text: str) -> str:
    """Return a text as Python has it, in the quotes of the documentation."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else repr(text)
