"""The keywords of the Python API as types, out of the tables of flags."""

from __future__ import annotations

from infini_run.jobs.options.table import SUBMIT
from infini_run.options.grammar import Flag
from infini_run.options.table import FLAGS

TYPES = {  # by the metavar of a flag
    "N": "int",
    "PORT": "int",
    "N|auto": 'int | Literal["auto"]',
    "N|auto|gpu|cpu": 'int | Literal["auto", "gpu", "cpu"]',
    "rank0|all|none|N": 'int | Literal["rank0", "all", "none"]',
    "off|warn|refuse": 'bool | Literal["off", "warn", "refuse"]',
    "on|off|auto": 'bool | Literal["on", "off", "auto"]',
    "static|c10d": 'Literal["static", "c10d"]',
    "all|0,4-7": "str | Sequence[int]",
    "0-3|RANK:0-3,...": "int | str | Mapping[int, int]",
    "a,b:4,node[01-16]": "str | Sequence[str]",
    "NAME,...": "str | Sequence[str]",
    "N|MIN:MAX": "int | str | tuple[int, int]",
    "TIME": "float | str",
    "TIME|off": "float | str",
    "SIGNAL": "int | str",
    "DIR": "str | PathLike[str]",
    "FILE|fd:N": "str | PathLike[str]",
    "FILE": "str | PathLike[str]",
    "PATH": "str | PathLike[str]",
    "WORDS": "str | Sequence[str]",
    "COMMAND": "str",
    "LIST[%M]": "str | int | Sequence[int]",
    "[SIGNAL@]TIME": "float | str",
    **dict.fromkeys(("TYPE", "SIZE", "IMAGE", "TEXT"), "str"),
    **dict.fromkeys(("HOST:PORT", "HOST", "ID", "NAME", "ADDR|INTERFACE", "K=V,..."), "str"),
}
COMMAND_ONLY = {
    "dry_run",
    "isolate",
    "report",
    "termination_log",
    "verbose",
    "plot",
    "list",
    "top",
    "follow",
    "tail",
    "stacks",
    "stop",
    "send",
    "bundle",
    "ranks",
    "completion",
    "doctor",
    "program",
    "programs",
    "ends_job",
    "on_nodes",
    "after",
    "ready_port",
}
# A worker that runs Python has this Python as its program, and no input (crews/spawn/placement.py).
PROGRAMS_ONLY = {
    *("module", "no_python", "distributed_args", "stdin", "live", "trace"),
    *("events", "metrics", "metrics_interval", "snapshots"),
    *("token_file", "node_rank", "ready_timeout", "progress_timeout", "one_world", "restart_scope"),
    *("preload", "preload_timeout"),  # a crew and a launch of functions have their own preload=
}
RESTARTS = {
    *("max_restarts", "restart_delay", "restart_window", "keep_going"),
    *("on_join", "max_node_failures", "max_no_progress"),
}

SUBMIT_COMMAND_ONLY = {"env", "cwd", "wait", "print", "check", "json"}
SHAPE = {"nproc_per_node", "hosts", "log_dir"}
CLASSES = {  # name: (where, the flags that are parameters there, or have no effect). Each extends the last.
    "CrewOptions": ("`Crew`", COMMAND_ONLY | SHAPE | PROGRAMS_ONLY | RESTARTS | {"grace"}),
    "FunctionOptions": ("`Launcher` and `Pool`", COMMAND_ONLY | SHAPE | PROGRAMS_ONLY),
    "ProgramOptions": ("`launch_local` and `launch_multi_node`", COMMAND_ONLY | SHAPE),
    "RunOptions": ("`run` and (no `hosts`, `preload`, `preload_timeout`) `ProcessLauncher`", COMMAND_ONLY),
}
HEAD = '''"""The keywords of {what}, for type checkers; written by `make generated` from the table of flags.

Nothing imports it when a program runs.
"""

from __future__ import annotations

from collections.abc import {abcs}
from os import PathLike
from typing import Literal, TypedDict
'''


def keywords() -> str:
    """infini_run/options/keywords.py"""
    text, base, known = HEAD.format(what="the Python API", abcs="Mapping, Sequence"), "TypedDict", set[str]()
    for name, (place, left_out) in CLASSES.items():
        flags = [flag for flag in FLAGS if flag.name not in left_out | known]
        text += _typed_dict(name, base, place, flags)
        base, known = name, known | {flag.name for flag in flags}
    return text


def submit_keywords() -> str:
    """infini_run/jobs/options/keywords.py"""
    flags = [flag for flag in SUBMIT if flag.name not in {*SUBMIT_COMMAND_ONLY, "array"}]  # it has a type per call
    return HEAD.format(what="`submit`", abcs="Sequence") + _typed_dict(
        "SubmitOptions", "TypedDict", "`submit`", flags
    )


def _typed_dict(name: str, base: str, place: str, flags: list[Flag]) -> str:
    types = {flag.name: python_type(flag) for flag in flags if _has_effect(flag)}
    if "nproc_per_node" in types:
        types["nproc"] = types["nproc_per_node"]
    lines = [
        "\n",
        f"class {name}({base}, total=False):",
        f'    """Flags of the command as keywords of {place}."""\n',
        *(f"    {key}: {value} | None" for key, value in types.items()),
    ]
    return "\n".join(lines) + "\n"


def _has_effect(flag: Flag) -> bool:
    return not flag.help.startswith(("ignored", "refused"))


def python_type(flag: Flag) -> str:
    """The type of the keyword in Python that stands for the flag."""
    if flag.choices:
        return f"Literal[{', '.join(f'{chr(34)}{choice}{chr(34)}' for choice in flag.choices)}]"
    return TYPES[flag.metavar] if flag.metavar else "bool"
