"""Several programs in one job: the parts of a command line between `:`, or the tables of a file, as flags of each.

The one rule: flags of the whole job are given once, and are the same for every program.
"""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.errors import UsageError
from infini_run.options.grammar import COMMAND_LINE, Setting, parse, quote
from infini_run.options.table import PREFIXES, TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.options.grammar import Given

    Part = tuple[Given, tuple[str, ...]]

SEPARATOR = ":"
OF_ONE = frozenset(  # what each program has for itself; cwd, env, and logs are no flags of the command line
    ("program", "on_nodes", "after", "ready_port", "ends_job", "nproc_per_node", "module", "no_python",
     "distributed_args", "gpus_per_proc", "omp_num_threads", "max_restarts", "cwd", "env", "logs")
)  # fmt: skip
_ALL_NODES = "several programs need all of their nodes"
_REFUSED = {  # what cannot be with several programs, and why
    "spares": _ALL_NODES,
    "role": "the name of a program is its role",
    "preload": "the process that imports holds one program",
    "virtual_local_rank": "each program counts its own local ranks",
    "log_layout": "torchrun's folders have no place for a program",
}
_MOST_BYTES = 1 << 20  # of a file of programs


def read_parts(job: Given, words: tuple[str, ...], environ: Mapping[str, str]) -> list[Part]:
    """Return the flags and the words of each program of a command line with --program or --programs.

    Args:
        job: What somebody gave in the first part.
        words: The words after its flags.
        environ: The environment.

    Raises:
        UsageError: One line with what was given and what is allowed.
    """
    file = job.pop("programs", None)
    if file is not None:
        return check_parts(job, _read_file(job, file, words, environ), file.origin)
    first, *others = _split(words)
    parts = [(job, first), *(_read_part(part, environ) for part in others)]
    return check_parts(job, parts, job["program"].origin)


def check_parts(job: Given, parts: Sequence[Part], named: str) -> list[Part]:
    """Return the flags and the words of each program, those of the job included.

    Args:
        job: The flags of the job.
        parts: What each program has for itself. Other flags in it do not count.
        named: How somebody has asked for several programs.

    Raises:
        UsageError: As read_parts.
    """
    _check_job(job, named)
    _check_names(parts)
    whole = {name: setting for name, setting in job.items() if name not in OF_ONE}
    own = [{name: setting for name, setting in given.items() if name in OF_ONE} for given, _ in parts]
    _settle_restarts(job, own)
    return [(whole | its, words) for its, (_, words) in zip(own, parts, strict=True)]


def _settle_restarts(job: Given, own: Sequence[Given]) -> None:
    """Give the programs without their own --max_restarts that of the job."""
    whole, scope = job.get("max_restarts"), job.get("restart_scope")
    for its in own:
        given = its.get("max_restarts")
        if given is None or given is whole or (whole is not None and whole.precedence < given.precedence):
            if whole is not None:
                its["max_restarts"] = whole
        elif given.precedence == COMMAND_LINE and (scope is None or scope.value != "program"):
            raise UsageError(
                f"{given.origin}: cannot hold for one of several programs; add --restart_scope=program, or move it "
                "to the job's flags"
            )


def _split(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words between the separators."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    if len(parts) > 1 and not parts[-1]:
        raise UsageError("':' at the end: missing program; add --program=NAME and a program, or drop ':'")
    if not all(parts[1:]):
        raise UsageError("':' ':': missing program; add --program=NAME and a program between them, or drop one")
    return [tuple(part) for part in parts]


def _read_part(words: Sequence[str], environ: Mapping[str, str]) -> Part:
    """Read the flags of a later part."""
    given, rest = _parse(words, environ)
    if "program" not in given:
        raise UsageError(f"':' {quote(words[0])}: missing --program=NAME; use : --program=NAME {quote(words[0])}")
    return given, rest


def _parse(words: Sequence[str], environ: Mapping[str, str]) -> Part:
    """Read flags of one program."""
    parsed = parse(words, environ, TABLE, PREFIXES, _hint_of_flag)
    if parsed.question:
        raise UsageError(f"--{parsed.question}: cannot be asked of one program; use it alone")
    folder = parsed.settings.get("log_dir")
    if folder is not None and folder.precedence == COMMAND_LINE:
        parsed.settings["logs"] = parsed.settings.pop("log_dir")
    for name, setting in parsed.settings.items():
        if name not in OF_ONE and setting.precedence == COMMAND_LINE:
            raise UsageError(f"{setting.origin}: cannot hold for one of several programs; move it to the job's flags")
    return parsed.settings, parsed.program


def _hint_of_flag(name: str) -> str:
    from infini_run.options.hints import of_flag

    return of_flag(name)


def _check_job(job: Given, named: str) -> None:
    for name, why in _REFUSED.items():
        setting = job.get(name)
        if setting is not None and setting.value != TABLE[name][0].default:
            raise UsageError(f"{setting.origin}: conflicts with {named}: {why}; drop one of them")
    nnodes = job.get("nnodes")
    if nnodes is not None and isinstance(nnodes.value, tuple):
        raise UsageError(f"{nnodes.origin}: conflicts with {named}: {_ALL_NODES}; use --nnodes={nnodes.value[1]}")
    console = job.get("console")
    if console is not None and console.value == "fold":
        raise UsageError(
            f"{console.origin}: conflicts with {named}: equal lines of several programs are not folded; use "
            "--console=prefix"
        )


def _check_names(parts: Sequence[Part]) -> None:
    names: set[str] = set()
    folders: set[str] = set()
    for given, words in parts:
        if "logs" in given:
            folder = os.abspath(given["logs"].value)
            if folder in folders:
                raise UsageError(f"{given['logs'].origin}: already the folder of another program; use another one")
            folders.add(folder)
        name, origin = given["program"].value, given["program"].origin
        if name in names:
            raise UsageError(f"{origin}: already the name of another program; use another one")
        names.add(name)
        if not words:
            raise UsageError(f"{origin}: missing program; use {origin} [flags] program [args...]")


# ---- nodes


def read_places(parts: Sequence[Part], nnodes: int) -> list[tuple[int, ...] | None]:
    """Return the nodes of each program, None for all of them.

    Args:
        parts: The flags and the words of each program.
        nnodes: How many nodes there are.

    Raises:
        UsageError: There is no such node, or one runs no program.
    """
    settings = [given.get("on_nodes") for given, _ in parts]
    listed: set[int] = set()
    for setting in settings:
        if setting is not None and isinstance(setting.value, tuple):
            if setting.value[-1] >= nnodes:
                nodes = f"nodes 0 to {nnodes - 1}" if nnodes > 1 else "node 0"
                raise UsageError(f"{setting.origin}: unknown node {setting.value[-1]}; use {nodes}")
            listed.update(setting.value)
    rest = tuple(node for node in range(nnodes) if node not in listed)
    places: list[tuple[int, ...] | None] = []
    for setting in settings:
        if setting is None or not isinstance(setting.value, str):
            places.append(None if setting is None else setting.value)
        elif rest:
            places.append(rest)
        else:
            raise UsageError(f"{setting.origin}: cannot be: the other programs list all nodes; list fewer")
    idle = [] if None in places or rest in places else rest
    if idle:
        flags = ", ".join(setting.origin for setting in settings if setting is not None)
        raise UsageError(f"{flags}: node {idle[0]} runs no program; add it to one, or use --on_nodes=rest")
    return places


# ---- order


def find_cycle(after: Mapping[str, Sequence[str]]) -> list[str]:
    """Return programs each of which waits for the next one, and the last for the first. Empty: there are none."""
    waits = dict(after)
    while free := [name for name, others in waits.items() if waits.keys().isdisjoint(others)]:
        for name in free:
            del waits[name]
    path: list[str] = []
    name = next(iter(waits), "")
    while name and name not in path:
        path.append(name)
        name = next(other for other in waits[name] if other in waits)
    return path[path.index(name) :] if path else []


# ---- programs of a file, and of a Python program


def part_of(
    name: object,
    command: Sequence[str],
    flags: Mapping[str, object],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    environ: Mapping[str, str],
) -> Part:
    """Return the flags and the words of a program that is no part of a command line.

    Args:
        name: Its name.
        command: The program and its arguments.
        flags: Its flags, by their names.
        env: Variables that are added to the environment of its ranks.
        cwd: Where they start. None: where the others do.
        environ: The environment.

    Raises:
        UsageError: One of them is not allowed.
    """
    from infini_run.options.python_values import check_environment, flag_words

    words = [word for flag, value in flags.items() for word in flag_words(flag, value)]
    given, program = _parse([f"--program={name}", *words, "--", *command], environ)
    pairs = tuple(check_environment(env).items())
    given["env"] = Setting(value=pairs, origin="env", precedence=COMMAND_LINE)
    if cwd is not None:
        if not os.isdir(cwd):
            raise UsageError(f"cwd={cwd} is not a directory")
        given["cwd"] = Setting(value=os.abspath(cwd), origin=f"cwd={cwd}", precedence=COMMAND_LINE)
    return given, program


def _read_file(job: Given, file: Setting, words: Sequence[str], environ: Mapping[str, str]) -> list[Part]:
    for name, setting in job.items():
        if name in OF_ONE and name != "max_restarts" and setting.precedence == COMMAND_LINE:
            raise UsageError(f"{setting.origin}: conflicts with {file.origin}: it is one program's; write it there")
    if words:
        raise UsageError(f"{file.origin}: conflicts with the program {quote(words[0])}; drop one of them")
    parts = []
    for number, table in enumerate(_tables(file), 1):
        try:
            parts.append(_read_table(table, environ))
        except UsageError as error:
            raise UsageError(f"{file.origin}: program {number}: {error}") from None
    return parts


def _tables(file: Setting) -> list[dict[str, Any]]:
    """Return the tables of a file, none of them read."""
    try:
        with open(file.value, "rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"{file.origin}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{file.origin}: expected at most {_MOST_BYTES} bytes")
    try:
        content = _loads(file)(data.decode())
    except (ValueError, RecursionError) as error:  # of UTF-8, and of TOML
        raise UsageError(f"{file.origin}: not TOML: {quote(str(error))}") from None
    tables = content.pop("program", [])
    if content:
        raise UsageError(f"{file.origin}: unknown key {quote(next(iter(content)))}; use [[program]] tables")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{file.origin}: missing [[program]] table; use one per program")
    return tables


def _loads(file: Setting) -> Any:
    from importlib import import_module

    for name in ("tomllib", "tomli"):  # tomllib: from Python 3.11 on
        try:
            return import_module(name).loads
        except ModuleNotFoundError:
            continue
    raise UsageError(f"{file.origin}: needs tomli; run pip install 'infini-run[programs]'")


def _read_table(table: Mapping[str, Any], environ: Mapping[str, str]) -> Part:
    flags = dict(table)
    name, command = flags.pop("name", None), flags.pop("command", None)
    env, cwd = flags.pop("env", None), flags.pop("cwd", None)
    if not isinstance(name, str):
        raise UsageError('missing name; add name = "NAME"')
    if cwd is not None and not isinstance(cwd, str):
        raise UsageError(f"cwd = {cwd!r}: expected a path, as text")
    return part_of(name, _read_command(command), flags, env=env, cwd=cwd, environ=environ)


def _read_command(command: object) -> Sequence[str]:
    """Return the words of a command, which may be a text as a shell reads it."""
    from infini_run.options.python_values import check_words

    if isinstance(command, str):
        import shlex

        try:
            return shlex.split(command)
        except ValueError:
            raise UsageError("command: expected a command with matching quotes") from None
    if not isinstance(command, list):
        raise UsageError('missing command; add command = ["program", "argument"]')
    return check_words("command", command)
