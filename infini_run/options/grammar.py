"""The gflags grammar, driven by a table: words in, settings out. It knows no flag of infini-run.

The one rule: `--` or the first word that is not a flag ends the options, and nothing looks at what follows. Grammar:
https://gflags.github.io/gflags/ with `-` and `_` the same in a name, one dash or two. A kind turns text into a value,
or raises ValueError with what it expects; this module adds who said it.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    Entry: TypeAlias = "tuple[Flag, str | None, bool]"  # flag, what it means without a value, negated
    Chain: TypeAlias = tuple[str, ...]  # the flag files being read, outermost first
    Given: TypeAlias = "dict[str, Setting]"  # the flags that somebody gave, by name
    Values: TypeAlias = dict[str, Any]  # of all flags, by name

GRAMMAR_GROUP = "flags"
COMMAND_LINE = 0


@record
class Flag:
    """One row of a table. `default` is a value of its kind.

    `bare` and `negated` are what `--name` and `--noname` stand for; `shown` is how help puts the default. Without
    `has_variable`, only words of the command line, of flag files, and of --fromenv set it. With `adds`, values are
    tuples, and each further one of the command line adds to those before.
    """

    name: str
    kind: Callable[[str], object]
    default: object
    group: str
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    bare: str | None = None
    negated: str | None = None
    shown: str = ""
    has_variable: bool = True
    adds: bool = False


@record
class Prefix:
    """Variables of the environment that set flags: `text` followed by the flag's name in capitals. names: of these
    flags only; empty: of all."""

    text: str
    names: tuple[str, ...] = ()
    is_binary: bool = False  # booleans are 0 or 1 and nothing else


@record
class Setting:
    """A value that somebody gave. `origin` quotes them; `precedence`: 0 the command line, n the n-th prefix."""

    value: Any
    origin: str
    precedence: int


@record
class Parsed:
    """The meaning of the words.

    Attributes:
        question: The flag that asks for information: help, helpfull, version; empty: none.
        settings: The values by flag.
        program: The words after the flags.
        subject: The flag that --help=FLAG names; empty: none.
    """

    question: str
    settings: dict[str, Setting]
    program: tuple[str, ...]
    subject: str = ""


def plain(text: str) -> str:
    return text


def boolean(text: str) -> bool:
    lower = text.lower()
    if lower in ("true", "t", "1", "yes", "y"):
        return True
    if lower in ("false", "f", "0", "no", "n"):
        return False
    raise ValueError("expected true or false")


def switch(name: str, group: str, help: str, default: bool = False, aliases: tuple[str, ...] = ()) -> Flag:  # noqa: A002
    """Return a boolean row: `--name`, `--noname`, `--name=true|false`."""
    return Flag(
        name=name, kind=boolean, default=default, group=group, help=help, aliases=aliases,
        bare="true", negated="false", shown="on" if default else "off",
    )  # fmt: skip


def without_variable(flag: Flag) -> Flag:
    """Return the flag as one that no variable sets."""
    return replace(flag, has_variable=False)


def _own(name: str, metavar: str, help: str) -> Flag:  # noqa: A002
    return Flag(name=name, kind=plain, default="", group=GRAMMAR_GROUP, metavar=metavar, help=help)


def _subject(text: str) -> bool | str:
    """Return whether the user asks for help, or the flag that the question is about."""
    try:
        return boolean(text)
    except ValueError:
        return text


_MOST_BYTES = 1 << 20  # of a file of flags, as characters
_GRAMMAR = (
    _own("flagfile", "FILE", "read flags from FILE: one per line, # comments, further flag files"),
    _own("fromenv", "a,b", "read flags a and b from the variables FLAGS_a and FLAGS_b"),
    _own("tryfromenv", "a,b", "do the same as --fromenv, if the variables are set"),
    _own("undefok", "a,b", "accept unknown flags a and b (write them --a=value)"),
    Flag(name="help", kind=_subject, default="", group=GRAMMAR_GROUP, metavar="FLAG", aliases=("h",), bare="true",
         negated="false", help="show the flags on one screen; --help FLAG, --help=FLAG: show that flag"),
    switch("helpfull", GRAMMAR_GROUP, "show every flag, its values, and its default"),
    switch("version", GRAMMAR_GROUP, "print the version"),
)  # fmt: skip
GRAMMAR = tuple(map(without_variable, _GRAMMAR))


def index(flags: Iterable[Flag]) -> dict[str, Entry]:
    """Return every spelling of every flag, those of the grammar included."""
    table: dict[str, Entry] = {}
    for flag in (*flags, *GRAMMAR):
        for name in (flag.name, *flag.aliases):
            table[name] = (flag, flag.bare, False)
            if flag.negated is not None and len(name) > 1:
                table["no" + name] = (flag, flag.negated, True)
    return table


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    table: Mapping[str, Entry],
    prefixes: Sequence[Prefix] = (),
    hint: Callable[[str], str] | None = None,
) -> Parsed:
    """Read the flags at the front of `argv`, the files they name, and the prefixed variables of `environ`.

    Later beats earlier, the command line the environment, an earlier prefix a later one; empty is unset. `hint`
    returns what to use in place of an unknown flag, or "". Raises UsageError, one line: what was given, and where.
    """
    scan = _FlagScan(table, environ)
    try:
        read = _read_words(scan, argv)
    except UsageError:
        _refuse_unknown(scan, hint)
        raise
    _refuse_unknown(scan, hint)
    settings: dict[str, Setting] = {}
    if not scan.question:
        for flag, text, origin in scan.given:
            setting = _convert(flag, text, origin, COMMAND_LINE)
            if flag.adds and flag.name in settings:
                whole = (*settings[flag.name].value, *setting.value)
                setting = Setting(value=whole, origin=origin, precedence=COMMAND_LINE)
            settings[flag.name] = setting
        _read_prefixed(scan, prefixes, settings)
    return Parsed(question=scan.question, settings=settings, program=tuple(argv[read:]), subject=scan.subject)


class _FlagScan:
    """The state of the reading."""

    __slots__ = ("environ", "given", "question", "subject", "table", "undefok", "unknown")

    def __init__(self, table: Mapping[str, Entry], environ: Mapping[str, str]) -> None:
        self.table = table
        self.environ = environ
        self.given: list[tuple[Flag, str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.undefok: set[str] = set()
        self.question = self.subject = ""


def _read_words(scan: _FlagScan, words: Sequence[str]) -> int:
    """Take the flags at the front of `words`; returns how many words they and their values were."""
    at, end = 0, len(words)
    while at < end and not scan.question:
        word = words[at]
        if word == "--":
            return at + 1
        if not _is_flag(word):
            break
        at += 1
        spelling, equals, text = word.partition("=")
        if equals:
            _read_flag(scan, spelling, text)
        elif not _needs_value(scan, spelling):
            _read_flag(scan, spelling, None)
        elif at == end or words[at] == "--":
            raise UsageError(_missing(scan, spelling))
        elif _is_flag(words[at]) and _name(words[at].partition("=")[0]) in scan.table:
            raise UsageError(f"{_missing(scan, spelling)} ({quote(words[at])} is a flag)")
        else:
            _read_flag(scan, spelling, words[at])
            at += 1
    return at


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-"


def _name(spelling: str) -> str:
    return spelling[2 if spelling.startswith("--") else 1 :].replace("-", "_")


def _needs_value(scan: _FlagScan, spelling: str) -> bool:
    entry = scan.table.get(_name(spelling))
    return entry is not None and entry[1] is None


def _missing(scan: _FlagScan, spelling: str) -> str:
    return f"{spelling}: needs a value; use {spelling}={metavar(scan.table[_name(spelling)][0])}"


def metavar(flag: Flag) -> str:
    """Return a flag's value as --help and the errors write it."""
    return flag.metavar or "|".join(flag.choices) or "VALUE"


def quote(text: str) -> str:
    """Return text as an error shows it: always one printable line."""
    return text if text.isprintable() else ascii(text)


def _read_flag(scan: _FlagScan, spelling: str, text: str | None, where: str = "", chain: Chain = ()) -> None:
    """Read one flag and its value, whoever gave it. A flag without value must have a meaning without one."""
    name = _name(spelling)
    entry = scan.table.get(name)
    if entry is None:
        scan.unknown.append((name, quote(spelling) + where))
        return
    flag, implied, is_negated = entry
    origin = spelling + where if text is None else f"{spelling}={quote(text)}{where}"
    if text is None:
        assert implied is not None
        text = implied
    elif is_negated:
        raise UsageError(f"{origin}: cannot take a value; use --{flag.name}={quote(text)}")
    if flag.group == GRAMMAR_GROUP:
        _apply_grammar_flag(scan, flag, text, origin, chain)
    else:
        scan.given.append((flag, text, origin))


def _apply_grammar_flag(scan: _FlagScan, flag: Flag, text: str, origin: str, chain: Chain) -> None:
    if flag.name == "flagfile":
        _read_file(scan, text, origin, chain)
    elif flag.name == "undefok":
        scan.undefok.update(_split(text))
    elif flag.name in ("fromenv", "tryfromenv"):
        _read_named(scan, flag, text, origin, chain)
    elif value := _convert(flag, text, origin, COMMAND_LINE).value:
        scan.question, scan.subject = flag.name, value if isinstance(value, str) else ""


def _split(names: str) -> list[str]:
    return [name.strip().replace("-", "_") for name in names.split(",") if name.strip()]


def _read_named(scan: _FlagScan, flag: Flag, names: str, origin: str, chain: Chain) -> None:
    for name in _split(names):
        text = scan.environ.get("FLAGS_" + name)
        if name in ("fromenv", "tryfromenv"):
            raise UsageError(f"{origin}: {name} cannot come from the environment; use it on the command line")
        if text is not None:
            _read_flag(scan, "--" + name, text, f" (from FLAGS_{quote(name)})", chain)
        elif flag.name == "fromenv":
            raise UsageError(f"{origin}: missing FLAGS_{quote(name)}; set it, or use --tryfromenv")


def _read_file(scan: _FlagScan, text: str, origin: str, chain: Chain) -> None:
    from os.path import dirname, join, realpath

    path = join(dirname(chain[-1]), text) if chain else text
    lines = _lines(path, origin)
    inner = (*chain, path)
    if realpath(path) in [realpath(seen) for seen in chain]:
        raise UsageError(f"{origin}: cannot be read: flag files include each other: {quote(' -> '.join(inner))}")
    for number, line in enumerate(lines, 1):
        if line and line[0] != "#":
            _read_line(scan, line, f" ({quote(path)}:{number})", inner)
        if scan.question:
            return


def _lines(path: str, origin: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"{origin}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(text) > _MOST_BYTES:
        raise UsageError(f"{origin}: expected at most {_MOST_BYTES} bytes")
    return [line.strip() for line in text.split("\n")]


def _read_line(scan: _FlagScan, line: str, where: str, chain: Chain) -> None:
    """Read `--name`, `--name=value`, or `--name value`; the value is the rest of the line, spaces and all."""
    spelling = line.split(None, 1)[0].partition("=")[0]
    rest = line[len(spelling) :].lstrip()
    if not _is_flag(line) or spelling == "--":
        raise UsageError(f"{quote(line)}{where}: expected a flag; use one line per flag")
    if rest.startswith("="):
        _read_flag(scan, spelling, rest[1:], where, chain)
    elif not rest and _needs_value(scan, spelling):
        raise UsageError(_missing(scan, spelling) + where)
    elif rest and _name(spelling) in scan.table and not _needs_value(scan, spelling):
        raise UsageError(f"{quote(line)}{where}: cannot take the value from the next word; use {spelling}=VALUE")
    else:
        _read_flag(scan, spelling, rest or None, where, chain)


def _read_prefixed(scan: _FlagScan, prefixes: Sequence[Prefix], settings: dict[str, Setting]) -> None:
    """Read the variables for what the command line left open. A flag's own name beats its aliases."""
    starts = tuple(prefix.text for prefix in prefixes)
    keys = [key for key in scan.environ if key.startswith(starts)]
    for precedence, prefix in enumerate(prefixes if keys else (), COMMAND_LINE + 1):
        found = [(flag, key) for key in sorted(keys) if (flag := _prefixed(scan, key, prefix))]
        for flag, key in sorted(found, key=lambda pair: pair[1] != prefix.text + pair[0].name.upper()):
            if flag.name not in settings:
                settings[flag.name] = _read_variable(scan, flag, key, prefix, precedence)


def _read_variable(scan: _FlagScan, flag: Flag, key: str, prefix: Prefix, precedence: int) -> Setting:
    text = scan.environ[key]
    origin = f"{key}={quote(text)}"
    if prefix.is_binary and flag.kind is boolean and text not in ("0", "1"):
        raise UsageError(f"{origin}: expected 0 or 1")
    return _convert(flag, text, origin, precedence)


def _prefixed(scan: _FlagScan, key: str, prefix: Prefix) -> Flag | None:
    """Return the flag that a variable sets, or None: another prefix, no such flag, one letter, empty."""
    name = key[len(prefix.text) :].lower()
    if prefix.names and name not in prefix.names:
        return None
    entry = scan.table.get(name)
    if entry is None or len(name) == 1 or not scan.environ[key] or key != prefix.text + name.upper():
        return None
    flag, _, is_negated = entry
    return None if is_negated or not flag.has_variable else flag


def _convert(flag: Flag, text: str, origin: str, precedence: int) -> Setting:
    if flag.choices and text not in flag.choices:
        from infini_run.options.hints import nearest

        near = nearest(text, flag.choices)
        hint = f"; did you mean {near}?" if near else ""
        raise UsageError(f"{origin}: expected {_either(flag.choices)}{hint}")
    try:
        return Setting(value=flag.kind(text), origin=origin, precedence=precedence)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from None


def _either(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)}{',' * (len(others) > 1)} or {last}" if others else last


def _refuse_unknown(scan: _FlagScan, hint: Callable[[str], str] | None) -> None:
    for name, written in scan.unknown:
        if name in scan.undefok or (name.startswith("no") and name[2:] in scan.undefok):
            continue
        from infini_run.options.hints import nearest

        near = nearest(name, scan.table) if len(name) > 1 else ""  # one letter is near to any other
        text = (hint(name) if hint is not None else "") or (f"did you mean --{near}?" if near else "")
        raise UsageError(f"unknown flag {written}; {text or 'run --help for the list'}")
