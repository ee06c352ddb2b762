"""Values of the Python API become the words of the command line: one parser, one check, one message for both."""

from __future__ import annotations

import os

from infini_run.errors import UsageError, printable
from infini_run.options.grammar import metavar
from infini_run.options.options import resolve
from infini_run.options.table import TABLE
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import CodeType
    from typing import Any

    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.options.options import Options, Request

_FOR_FLAGS = ("INFINI_RUN_", "PET_", "TORCH_ELASTIC_")
_PATHS = ("DIR", "FILE", "FILE.png")
_COMMAND_ONLY = ("dry_run", "isolate", "report", "verbose", "preload")


def check_names(
    owner: str, flags: Mapping[str, object], table: Mapping[str, object], function: Callable[..., object]
) -> None:
    """Check that each keyword is a flag.

    Args:
        owner: the called function or class, for the message.
        flags: the keywords.
        table: the flags that there are, by name.
        function: the called function, as the user may have meant its own keywords, too.

    Raises:
        TypeError: one is not, as Python itself says it.
    """
    for name in flags:
        if name not in table and name != "nproc":
            from infini_run.options.hints import of_keyword

            code: CodeType = function.__code__
            own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            near = of_keyword(name, [*(word for word in own if word != "self"), *table])
            hint = f"; did you mean {near}?" if near else ""
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")


def make_environment(env: Mapping[str, str] | None, inherit_env: bool) -> dict[str, str]:
    """Return the variables of the ranks: this process's, unless `inherit_env` is false, and `env` over them.

    Raises:
        UsageError: `env` holds what no environment can, see `check_environment`.
    """
    return {**(os.environ if inherit_env else {}), **check_environment(env)}


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


def prepare_environment(cluster: ClusterEnvironment, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the ranks without those that an MPI launcher set for this process alone.

    Warns of what engine="auto" had to guess.

    Raises:
        UsageError: Each task of the scheduler's step is one rank already.
    """
    if cluster.is_task:
        raise UsageError(
            f"engine='auto': needs a launcher above the ranks, but with {cluster.source('tasks_per_node')} each "
            "task is one rank; run one task per node, or use engine='local'"
        )
    from warnings import warn

    from infini_run.environments.launcher_variables import strip_launcher_environment

    if cluster.warning:
        warn(f"engine='auto': {printable(cluster.warning)}", RuntimeWarning, stacklevel=3)
    return strip_launcher_environment(environ, options.export)


def check_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the program and its arguments as text. Raises UsageError: they are no list of texts and paths."""
    if isinstance(command, (str, bytes)) or not hasattr(command, "__len__") or not command:
        raise UsageError(f"command={command!r}: expected a list, the program and its arguments")
    return check_words("command", command)


def read_flags(flags: Mapping[str, object], program: tuple[str, ...], environ: Mapping[str, str]) -> Request:
    """Read the flags of a Python call as the command line would.

    Args:
        flags: The values by name. Lists and dicts become the flag's text.
        program: The program and its arguments.
        environ: The environment. It counts for the variables of an engine, and not for those that stand for a flag.

    Raises:
        UsageError: The request is invalid, or belongs to the command alone.
    """
    flags = {"stdin": "none", **flags}
    if "nproc" in flags:
        alias = flags.pop("nproc")
        flags["nproc_per_node"] = one_of_two(flags.get("nproc_per_node"), alias)[1]
    words = check_words("flags", [word for name, value in flags.items() for word in _words(name, value)])
    around = {
        name: value for name, value in environ.items() if name == MARKER_VARIABLE or not name.startswith(_FOR_FLAGS)
    }
    request = _resolve([*words, "--", *program], around, flags)
    options = request.options
    own = [name for name in _COMMAND_ONLY if name != "preload" or request.node_list is None]
    asked = request.question or next((name for name in own if getattr(options, name)), "")
    if options is None or asked:
        raise UsageError(f"{asked}=: not a keyword of the Python API; use it with the command")
    if request.without_effect and options.engine != "auto":  # where a program finds itself is not its mistake
        raise UsageError(request.without_effect)
    return request


def _resolve(words: list[str], environ: Mapping[str, str], flags: Mapping[str, object]) -> Request:
    """Resolve as `resolve` does; an error begins with the keyword, and not with the flag."""
    try:
        return resolve(words, environ)
    except UsageError as error:
        text = str(error)
        if not any(text.startswith(f"--{name}=") for name in flags):
            raise
        raise type(error)(text.removeprefix("--")) from None


def one_of_two(nproc_per_node: object, nproc: object) -> tuple[str, Any]:
    """Return the name under which the caller gave the number of processes, and the number.

    Raises:
        UsageError: The call has both names.
    """
    if nproc is None:
        return "nproc_per_node", nproc_per_node
    if nproc_per_node is not None:
        raise UsageError(
            f"nproc_per_node={nproc_per_node!r} conflicts with nproc={nproc!r}: both are one flag; drop one of them"
        )
    return "nproc", nproc


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


def _words(name: str, value: object) -> list[str]:
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
