"""Every flag of infini-job, verb by verb, in the order of --help: the one place for names, defaults and help texts.

The grammar is infini-run's (options/grammar.py). A variable INFINI_JOB_NAME of the environment stands for the flag
NAME.
"""

from __future__ import annotations

from infini_run.jobs.request.array import indices, notation
from infini_run.jobs.request.container import RUNTIMES
from infini_run.jobs.request.job_request import CPU, CUDA, DEFAULT, DETERMINED, ROCM
from infini_run.options.grammar import Flag, Prefix, boolean, index, plain, switch
from infini_run.value_types import MAX_LISTED, bounded_int, duration, stop_signal, timeout

PREFIXES = (Prefix(text="INFINI_JOB_"),)
OF_A_RANK = ("INFINI_JOB_ATTEMPT", "INFINI_JOB_TASK")  # what ranks find there is no flag of --attempt and --task
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
        raise ValueError(f"words as a shell reads them are allowed: {error}") from None


def _variables(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [word.partition("=") for word in _argv(text)]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ValueError("NAME=VALUE words are allowed, quoted as a shell needs it")
    return tuple((name, value) for name, _, value in pairs)


def _time(text: str) -> int:
    """Read a duration in seconds; or [D-]HH:MM:SS, as schedulers write it."""
    if ":" not in text:
        return int(duration(text))
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in [*parts, days or "0"]):
        raise ValueError("a time is allowed, such as 4h, 90min, 1h30m, 1d or 1-12:00:00")
    hours, minutes, seconds = map(int, parts)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _memory(text: str) -> int:
    """Read an amount of memory in MiB."""
    body, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in "KMGT" and text else (text, "M")
    if not body.isdecimal():
        raise ValueError("a size is allowed, such as 500M, 16G or 1T")
    return max(1, int(body) * {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}[unit] >> 10)


def _title(text: str) -> str:
    if len(text) > _LONGEST_TITLE or not text.isprintable():
        raise ValueError(f"expected at most {_LONGEST_TITLE} printable characters")
    return text


def _warn(text: str) -> tuple[int, int]:
    """Read `5m`, or `USR1@5m`: the signal's number and seconds."""
    name, at, span = text.rpartition("@")
    return (stop_signal(name) if at else USR2), int(timeout(span))


def _flag(name: str, kind: object, default: object, group: str, metavar: str, help: str, **more: object) -> Flag:  # noqa: A002
    return Flag(name=name, kind=kind, default=default, group=group, metavar=metavar, help=help, **more)  # type: ignore[arg-type]


def _support(name: str, help: str) -> Flag:  # noqa: A002
    """Read whether the cluster supports something: on, off, or detected."""
    return Flag(
        name=name, kind=boolean, default=None, group="scheduler", help=help, bare="true", negated="false",
        shown="detected",
    )  # fmt: skip


DIR = _flag("dir", plain, "", "job", "DIR", "where jobs are kept, on storage that the nodes share",
            shown="~/.infini-run/jobs")  # fmt: skip
JSON = switch("json", "answer", "as JSON")
SOCKET = _flag("socket", plain, "", "answer", "PATH", "where to listen, in a directory that nobody else may write",
               shown="none")  # fmt: skip

SUBMIT = (
    _flag("slots", bounded_int(1), 1, "slots", "N", "devices (GPUs, or CPUs) in all: one rank each"),
    _flag("slots_per_node", bounded_int(1), 0, "slots", "N", "slots of each node", shown="as many as a node has"),
    _flag("slot_type", plain, "", "slots", "", "what a slot is", choices=(CUDA, ROCM, CPU), shown="detected"),
    _flag("gpu_type", plain, "", "slots", "TYPE", "which of a pool's GPUs", shown="any"),
    _flag("cpus_per_slot", bounded_int(1), 0, "slots", "N", "CPUs for each slot", shown="a GPU's share of its node"),
    _flag("mem_per_slot", _memory, 0, "slots", "SIZE", "memory for each slot, such as 16G", shown="the pool's"),
    switch("single_node", "slots", "all slots on one node"),
    _flag("spares", bounded_int(0, MAX_LISTED), 0, "slots", "N",
          "more nodes, which run nothing; one takes the place of a node that is lost, and all ranks start again"),
    switch("round_up", "slots", "take more slots where those asked for do not fill their nodes"),
    _flag("layout", plain, DEFAULT, "slots", "", "how slots become nodes; determined: as Determined's tables have it",
          choices=(DEFAULT, DETERMINED)),
    _flag("scheduler", plain, "auto", "scheduler", "", "who runs it; auto: the one whose commands are on PATH",
          choices=SCHEDULERS),
    _flag("pool", plain, "", "scheduler", "NAME", "the partition or queue", aliases=("partition", "queue"),
          shown="the scheduler's"),
    _flag("account", plain, "", "scheduler", "NAME", "whom to charge", shown="the scheduler's"),
    _flag("project", plain, "", "scheduler", "NAME", "Slurm's wckey, PBS's project", shown="none"),
    _flag("time", _time, 0, "scheduler", "TIME", "the limit, such as 4h, 1h30m, 1d or 1-12:00:00; a bare number is "
          "seconds (sbatch: minutes)",
          shown="the pool's"),
    _flag("options", _argv, (), "scheduler", "WORDS", "further options for sbatch or qsub, quoted as in a shell",
          shown="none"),
    _support("gres", "the scheduler knows GPUs as a resource"),
    _support("tres", "Slurm has cons_tres"),
    _flag("title", _title, "", "job", "TEXT", "show TEXT before its name in squeue, qstat, and infini-job list",
          shown="none"),
    DIR,
    _flag("cwd", plain, "", "job", "DIR", "where the ranks start", shown="here"),
    _flag("env", _variables, (), "job", "NAME=VALUE ...", "variables for the ranks, beside all of ours",
          shown="none"),
    _flag("python", plain, "", "job", "FILE", "the Python of the nodes, which has infini-run", shown="this one"),
    _flag("run_options", _argv, (), "job", "WORDS", "flags for infini-run itself, such as --hang_timeout=10m",
          shown="none"),
    _flag("warn", _warn, (USR2, 0), "job", "[SIGNAL@]TIME", "tell the ranks so long before the limit", shown="off"),
    _flag("array", notation, "", "job", "LIST[%M]",
          "a task for each index of 0-9, 1,3,7 or 0-20:5, at most M at a time; INFINI_JOB_TASK is its index",
          shown="none"),
    _flag("restarts", bounded_int(0), 0, "job", "N", "run it again so often after a failure, through the queue"),
    _flag("container", plain, "", "container", "IMAGE", "run in this image", shown="none"),
    _flag("runtime", plain, "", "container", "", "by which program", choices=RUNTIMES, shown="the one that is there"),
    _flag("container_python", plain, "python3", "container", "FILE", "the image's Python, which has infini-run"),
    _flag("bind", _argv, (), "container", "WORDS", "HOST[:THERE[:ro]] words, beside the job's directories",
          shown="none"),
    _flag("container_options", _argv, (), "container", "WORDS", "further options for the runtime", shown="none"),
    switch("wait", "answer", "stay until it has ended; our exit code is that of the first rank to fail"),
    switch("print", "answer", "show the script, and submit nothing"),
    switch("check", "answer", "ask the scheduler whether it could ever run, and submit nothing"),
    JSON,
)  # fmt: skip

LOGS = (
    switch("follow", "answer", "go on until the job has ended", aliases=("f",)),
    _flag("task", indices, (), "answer", "LIST", "of these tasks of an array only: 4, or 0,3-5", shown="all"),
    _flag("rank", bounded_int(0), -1, "answer", "R", "of this rank only", shown="all"),
    _flag("node", plain, "", "answer", "N|HOST", "of this node only", shown="all"),
    _flag("attempt", bounded_int(0), -1, "answer", "K", "of this run only, counted from 0", shown="all"),
    _flag("tail", bounded_int(0), -1, "answer", "N", "print at most the last N lines, then follow", shown="all"),
    switch("scheduler_log", "answer", "what its scheduler has said"),
    DIR,
)

VERBS: dict[str, tuple[Flag, ...]] = {
    "submit": SUBMIT,
    "status": (JSON, DIR),
    "list": (JSON, DIR),
    "logs": LOGS,
    "cancel": (DIR,),
    "forget": (DIR,),
    "clusters": (JSON, DIR),
    "serve": (SOCKET, DIR),
}
TABLES = {verb: index(flags) for verb, flags in VERBS.items()}


def defaults(verb: str) -> dict[str, object]:
    return {flag.name: flag.default for flag in VERBS[verb]}
