"""Every flag of infini-job, verb by verb, in the order of --help: the one place for names, defaults and help texts.

The grammar is infini-run's (options/grammar.py). A variable INFINI_JOB_NAME of the environment stands for the flag
NAME.
"""

from __future__ import annotations

from math import ceil

from infini_run.jobs.request.array import indices, notation
from infini_run.jobs.request.container import RUNTIMES
from infini_run.jobs.request.job_request import CPU, CUDA, DEFAULT, DETERMINED, ROCM
from infini_run.options.grammar import Flag, Prefix, boolean, index, plain, switch
from infini_run.value_types import (
    MAX_INT,
    MAX_LISTED,
    bounded_int,
    duration,
    named_ranks,
    number,
    one_rank,
    stop_signal,
    timeout,
)

PREFIXES = (Prefix(text="INFINI_JOB_"),)
OF_A_RANK = ("INFINI_JOB_ATTEMPT", "INFINI_JOB_TASK")  # what ranks find there is no flag of --attempt and --task
OTHER_VARIABLES = frozenset(  # that begin as those of flags do, and are none
    (*OF_A_RANK, "INFINI_JOB_NAME", "INFINI_JOB_FOLDER", "INFINI_JOB_TASKS", "INFINI_JOB_HEAD_NODE")
)
SCHEDULERS = ("auto", "slurm", "pbs", "local")
SUBMIT_GROUPS = ("slots", "scheduler", "job", "container", "answer")
USR2 = 12
_LONGEST_TITLE = 100  # PBS takes names of 236 characters, with the prefix


def _argv(text: str) -> tuple[str, ...]:
    """Split a text as a shell does."""
    import shlex

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"expected words that a shell can split: {error}") from None


def _variables(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [word.partition("=") for word in _argv(text)]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ValueError("expected NAME=VALUE words, quoted as for a shell")
    return tuple((name, value) for name, _, value in pairs)


def _time(text: str) -> int:
    """Read a duration in seconds; or [D-]HH:MM:SS, as schedulers write it."""
    if ":" not in text:
        return ceil(duration(text))  # 0 is no limit
    days, dash, clock = text.rpartition("-")
    parts = [number(part) for part in (days if dash else "0", *clock.split(":"))]
    whole = [part for part in parts if part is not None and part >= 0]
    time_s = sum(part * unit_s for part, unit_s in zip(whole, (86400, 3600, 60, 1), strict=False))
    if len(parts) != 4 or len(whole) != 4 or time_s > MAX_INT:
        raise ValueError("not a time; use 10m, 4h, 1h30m, 1d, or 1-12:00:00")
    return time_s


def _memory(text: str) -> int:
    """Read an amount of memory in MiB."""
    body, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in "KMGT" and text else (text, "M")
    size_kb = (number(body) or 0) * {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}[unit]
    if not 0 < size_kb <= MAX_INT << 10:
        raise ValueError("not a size; use 500M, 16G, or 1T")
    return max(1, size_kb >> 10)


def _title(text: str) -> str:
    if len(text) > _LONGEST_TITLE or not text.isprintable():
        raise ValueError(f"expected at most {_LONGEST_TITLE} printable characters")
    return text


def _warn(text: str) -> tuple[int, int]:
    """Read `5m`, or `USR1@5m`: the signal's number and seconds."""
    name, at, span = text.rpartition("@")
    return (stop_signal(name) if at else USR2), ceil(timeout(span))


def _flag(name: str, kind: object, default: object, group: str, metavar: str, help: str, **more: object) -> Flag:  # noqa: A002
    return Flag(name=name, kind=kind, default=default, group=group, metavar=metavar, help=help, **more)  # type: ignore[arg-type]


def _words(name: str, group: str, help: str) -> Flag:  # noqa: A002
    """Read words as a shell splits them. Repeats add up, as those of --volume and --env of docker do."""
    return _flag(name, _argv, (), group, "WORDS", help, shown="none", adds=True)


def _supports(text: str) -> bool:
    try:
        return boolean(text)
    except ValueError as error:
        raise ValueError(f"{error}; use --slots=N and --slots_per_node=N for GPUs") from None


def _support(name: str, help: str) -> Flag:  # noqa: A002
    """Read whether the cluster supports something: on, off, or detected."""
    return Flag(
        name=name, kind=_supports, default=None, group="scheduler", help=help, bare="true", negated="false",
        shown="detected; on with --layout=determined",
    )  # fmt: skip


_JOBS = "~/.infini-run/jobs"
DIR = _flag("dir", plain, "", "job", "DIR", "look for jobs in DIR", shown=_JOBS)
JSON = switch("json", "answer", "print JSON")
SOCKET = _flag("socket", plain, "", "answer", "PATH", "listen at PATH, in a directory that only you can write",
               shown="none")  # fmt: skip

SUBMIT = (
    _flag("slots", bounded_int(1), 1, "slots", "N", "request N devices (GPUs or CPUs) in all, one rank each"),
    _flag("slots_per_node", bounded_int(1), 0, "slots", "N", "request N slots per node", shown="all of a node"),
    _flag("slot_type", plain, "", "slots", "", "choose what one slot is: a GPU (cuda, rocm) or a CPU",
          choices=(CUDA, ROCM, CPU), shown="detected"),
    _flag("gpu_type", plain, "", "slots", "TYPE", "request GPUs of this type in the pool", shown="any"),
    _flag("cpus_per_slot", bounded_int(1), 0, "slots", "N", "request N CPUs per slot",
          shown="a GPU's share of its node"),
    _flag("mem_per_slot", _memory, 0, "slots", "SIZE", "request SIZE of memory per slot, such as 16G",
          shown="the pool's"),
    switch("single_node", "slots", "put all slots on one node"),
    _flag("spares", bounded_int(0, MAX_LISTED), 0, "slots", "N",
          "allocate N idle nodes; one replaces a lost node, and all ranks restart"),
    switch("round_up", "slots", "round slots up to fill their nodes"),
    _flag("layout", plain, DEFAULT, "slots", "",
          "choose how slots become nodes; determined: by the rules of the platform Determined",
          choices=(DEFAULT, DETERMINED)),
    _flag("scheduler", plain, "auto", "scheduler", "",
          "submit to this scheduler; auto: the first one with commands on PATH that responds", choices=SCHEDULERS),
    _flag("pool", plain, "", "scheduler", "NAME", "submit to this partition or queue", aliases=("partition", "queue"),
          shown="the scheduler's"),
    _flag("account", plain, "", "scheduler", "NAME", "charge this account", shown="the scheduler's"),
    _flag("project", plain, "", "scheduler", "NAME", "set the wckey of Slurm or the project of PBS", shown="none"),
    _flag("time", _time, 0, "scheduler", "TIME",
          "limit the job to TIME, such as 4h, 1h30m, 1d, or 1-12:00:00; a bare number is seconds (sbatch: minutes)",
          shown="the pool's"),
    _words("options", "scheduler", "pass options to sbatch or qsub, quoted as for a shell"),
    _support("gres", "treat GPUs as a resource of the scheduler"),
    _support("tres", "use cons_tres of Slurm"),
    _flag("title", _title, "", "job", "TEXT", "show TEXT before the job's name in squeue, qstat, and infini-job list",
          shown="none"),
    _flag("dir", plain, "", "job", "DIR", "keep jobs in DIR, on storage that the nodes share", shown=_JOBS),
    _flag("cwd", plain, "", "job", "DIR", "start ranks in DIR", shown="the current directory"),
    _flag("env", _variables, (), "job", "NAME=VALUE ...",
          "set variables of the ranks, such as 'A=1 B=2', in addition to your environment", shown="none", adds=True),
    _flag("python", plain, "", "job", "FILE", "run infini-run on the nodes with the Python FILE", shown="this one"),
    _words("run_options", "job", "pass flags to infini-run, such as --hang_timeout=10m"),
    _flag("warn", _warn, (USR2, 0), "job", "[SIGNAL@]TIME",
          "send ranks SIGNAL (by default USR2) TIME before the limit", shown="off"),
    _flag("array", notation, "", "job", "LIST[%M]",
          "run a task per index of 0-9, 1,3,7, or 0-20:5, at most M at a time; INFINI_JOB_TASK is its index",
          shown="none"),
    _flag("restarts", bounded_int(0), 0, "job", "N", "queue the job again after a failure, at most N times"),
    _flag("max_timeouts", bounded_int(0), None, "job", "N",
          "run the job again after exit code 85 at its time limit, at most N times", shown="no limit"),
    _flag("container", plain, "", "container", "IMAGE", "run ranks in IMAGE", shown="none"),
    _flag("runtime", plain, "", "container", "", "use this container runtime", choices=RUNTIMES,
          shown="the one on PATH"),
    _flag("container_python", plain, "python3", "container", "FILE",
          "run infini-run in the container with the image's Python FILE"),
    _words("bind", "container",
           "show paths of the host in the container, HOST[:THERE[:ro]], in addition to the job's directories"),
    _words("container_options", "container", "pass options to the runtime"),
    switch("wait", "answer", "wait until the job finishes, and exit with the code of the first rank to fail"),
    switch("print", "answer", "print the script and submit nothing"),
    switch("check", "answer", "ask the scheduler whether the job can run, and submit nothing"),
    JSON,
)  # fmt: skip

LOGS = (
    switch("follow", "answer", "keep printing until the job finishes", aliases=("f",)),
    _flag("task", indices, (), "answer", "LIST", "print only these tasks of an array: 4, or 0,3-5", shown="all"),
    _flag(
        "rank",
        one_rank,
        -1,
        "answer",
        "R",
        "print only rank R; trainer:0: rank 0 of the program trainer",
        shown="all",
    ),
    _flag("node", plain, "", "answer", "N|HOST", "print only this node", shown="all"),
    _flag(
        "attempt",
        bounded_int(0),
        -1,
        "answer",
        "K",
        "print only run K of the job; 0: the first run",
        shown="all",
    ),
    _flag("tail", bounded_int(0), -1, "answer", "N", "print the last N lines at most; -f: then follow", shown="all"),
    switch("scheduler_log", "answer", "print what the scheduler wrote about the job"),
    DIR,
)

OF_RUNNING = (
    _flag(
        "ranks",
        named_ranks,
        None,
        "answer",
        "all|0,4-7",
        "show only these ranks; trainer:0: rank 0 of the program trainer",
        shown="all",
    ),
    DIR,
)
VERBS: dict[str, tuple[Flag, ...]] = {
    "submit": SUBMIT,
    "status": (JSON, DIR),
    "list": (JSON, DIR),
    "logs": LOGS,
    "top": (DIR,),
    "follow": OF_RUNNING,
    "stacks": OF_RUNNING,
    "cancel": (DIR,),
    "forget": (DIR,),
    "clusters": (JSON, _flag("dir", plain, "", "job", "DIR", "accept DIR, without effect on the list", shown=_JOBS)),
    "serve": (SOCKET, DIR),
}
TABLES = {verb: index(flags) for verb, flags in VERBS.items()}
ALL_FLAGS = {name: entry for table in TABLES.values() for name, entry in table.items()}


def defaults(verb: str) -> dict[str, object]:
    return {flag.name: flag.default for flag in VERBS[verb]}
