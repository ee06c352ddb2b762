"""The output of PBS's commands: jobs of qstat, lists of qmgr, comments, complaints; and what they mean to infini-job.
Pure.

The one rule: an unreadable answer is None, never empty: an empty one would lose a job. Measured on OpenPBS 23.06.06;
names of numbers are those of its sources.
"""

from __future__ import annotations

from infini_run.jobs.request.array import members, split, task_id
from infini_run.jobs.scheduler import (
    CANCELLED,
    COMPLETED,
    FAILED,
    HOPELESS,
    LOST,
    OOM,
    PASSING,
    PRESENT,
    QUEUED,
    RUNNING,
    SUSPENDED,
    TIMEOUT,
    WAITING,
    Kind,
    SchedulerJob,
    pool_of,
)
from infini_run.jobs.schedulers.scheduler_command import MISSING
from infini_run.value_types import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.jobs.scheduler import Queue
    from infini_run.jobs.schedulers.scheduler_command import CommandResult

_FIRST = "Job Id: "
_NUMBERS = ("Exit_status", "substate")
_HELD = {"H": "held", "W": "its start time is in the future"}  # of those of which PBS says nothing
_STATES = {"Q": QUEUED, "H": QUEUED, "W": QUEUED, "T": QUEUED, "M": QUEUED, "R": RUNNING, "E": RUNNING,
           "S": SUSPENDED, "U": SUSPENDED, "B": RUNNING}  # fmt: skip
# substates of a job that is over (pbs_internal.h): with history they say how, Exit_status alone does not
_TERMINATED, _FINISHED = 91, 92
_TIME, _MEMORY = (-28, -29), (-26, -27)  # JOB_EXEC_KILL_CPUT, _WALLTIME, _VMEM, _MEM (job.h)
_UNITS = " kmgtp"
SEPARATOR = "\x1f"  # between two attributes: a value with one has ^_ there
_ADVICE = {
    "Unknown queue": "run infini-job clusters to list the pools",
    "Unknown resource": "the cluster has no such resource",
    "Queue is not enabled": "the queue takes no jobs now; use another --pool",
    "would exceed": "wait until fewer of your jobs are queued there, or use another --pool",
    "Job exceeds": "request less, or use another --pool",
    "Job violates queue": "request less, or use another --pool",
    "invalid option": "run `man qsub` to list its options",
    "Unauthorized": "the server does not permit it; use another --pool or --account",
}


def job_of(job_id: str, job: Mapping[str, Any]) -> SchedulerJob:
    """Return a job as qstat shows it."""
    letter, substate = str(job.get("job_state", "")), job.get("substate")
    comment, nodes = str(job.get("comment", "")), str(job.get("exec_host", ""))
    holds, depends = str(job.get("Hold_Types", "")), str(job.get("depend", ""))
    hosts = ",".join(dict.fromkeys(part.partition("/")[0] for part in nodes.split("+") if part))
    if letter == "X":  # a task that ended before its array: all its other values are the array's
        return SchedulerJob(id=job_id, state=LOST, reason=f"PBS reports only: {comment}")
    if letter == "F":
        state, code = _ended(job.get("Exit_status"), substate)
        return SchedulerJob(id=job_id, state=state, reason=comment, code=code, nodes=hosts)
    state = _STATES.get(letter, RUNNING)
    if state != QUEUED:
        return SchedulerJob(id=job_id, state=state, nodes=hosts)
    if letter == "H" and holds == "s" and depends:  # the one hold that PBS takes away itself
        return SchedulerJob(id=job_id, state=state, reason=f"waits for {depends}", hold=WAITING)
    hold, advice = hold_of(comment, letter, holds)
    return SchedulerJob(id=job_id, state=state, reason=comment or _HELD.get(letter, ""), hold=hold, advice=advice)


def latest(names: Sequence[str], jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, SchedulerJob]:
    """Return the current job of each name, by name."""
    found: dict[str, SchedulerJob] = {}
    for job_id, job in jobs.items():
        ((name, _),), seen = members(str(job.get("Job_Name", "")), job_id), job_of(job_id, job)
        if name in names and (name not in found or rank(seen) > rank(found[name])):
            found[name] = seen
    return found


def task_ids(names: Sequence[str], jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the ids of those of these names whose arrays exist: qselect lists no tasks."""
    arrays = {str(job.get("Job_Name", "")): job_id for job_id, job in jobs.items() if "[]" in job_id}
    return [task_id(arrays[base], index) for base, index in map(split, names) if index >= 0 and base in arrays]


def read_jobs(text: str) -> dict[str, dict[str, Any]] | None:
    """Read the output of `qstat -f -F dsv -D SEPARATOR`: a job a line. Return None for anything else."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.split("\n"):
        first, *attributes = line.split(SEPARATOR)
        if not line:
            continue
        if not first.startswith(_FIRST):
            return None
        job: dict[str, Any] = {}
        for attribute in attributes:
            name, _, value = attribute.partition("=")
            job.setdefault(name, _integer(value) if name in _NUMBERS else value)
        found[first.removeprefix(_FIRST)] = job
    return found


def _integer(text: str) -> int | str:
    """Read a number, as JSON has those two."""
    return int(text) if number(text.removeprefix("-")) is not None else text


def is_id(text: str) -> bool:
    """Return whether a text is PBS's id of a job: `12.server`; of an array `12[].server`, of one of its jobs
    `12[3].server`."""
    job, dot, server = text.partition(".")
    digits, bracket, index = job.partition("[")
    if number(digits) is None or (bracket and (index[-1:] != "]" or number(index[:-1] or "0") is None)):
        return False
    return not dot or (bool(server) and all(c.isalnum() or c in "._-" for c in server) and server.isascii())


def read_objects(text: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Read the output of qmgr's `list`: by kind (Server, Queue, Node) and name its attributes, those of a resource
    below the attribute. A value of many words continues behind a tab on the next line (display, qmgr.c)."""
    found: dict[str, dict[str, dict[str, Any]]] = {"Server": {}, "Queue": {}, "Node": {}}
    attributes: dict[str, Any] = {}
    last: tuple[dict[str, Any], str] | None = None
    for line in text.split("\n"):
        kind, _, name = line.partition(" ")
        if kind in found and name:
            attributes = found[kind].setdefault(name, {})
            last = None
        elif line.startswith("\t") and last is not None:
            where, name = last
            where[name] += line.strip()
        elif line.startswith("    ") and " = " in line:
            name, _, value = line.strip(" ").partition(" = ")
            name, dot, resource = name.partition(".")
            last = (attributes.setdefault(name, {}), resource) if dot else (attributes, name)
            last[0][last[1]] = value
    return found


def _ended(status: object, substate: object) -> tuple[str, int]:
    """Return how a job ended. A canceled job may have Exit_status 0: only substate 92 is a success."""
    code = status if isinstance(status, int) else -1
    if code in _TIME:
        return TIMEOUT, -1
    if code in _MEMORY:
        return OOM, -1
    if substate == _TERMINATED:
        return CANCELLED, -1
    if substate == _FINISHED and code == 0:
        return COMPLETED, 0
    return FAILED, code - 128 if code > 256 else code  # 256 + signal


def hold_of(comment: str, letter: str = "Q", holds: str = "n") -> tuple[str, str]:
    """Return why a job waits: WAITING, PASSING, or HOPELESS by PBS's comment, and what to change in a hopeless one.
    The comment does not separate too few nodes in all from busy ones."""
    if comment.startswith("Can Never Run"):
        what, _, rest = comment.partition("resource: ")[2].partition(" (")
        asked, differs, _ = rest.partition(" != ")
        if what in ("host", "vnode") and differs:
            return HOPELESS, f"no node of the queue has {what}={asked}; run pbsnodes -a to list them"
        return HOPELESS, "no nodes have what the job requests; request less, or use another --pool"
    if "too many failed attempts" in comment:
        return HOPELESS, "PBS gave up starting it; cancel it, and ask an administrator about its nodes"
    if letter == "H" and any(kind in holds for kind in "so"):
        return HOPELESS, "an administrator holds it; ask them"
    if letter == "H" and "p" in holds:
        return HOPELESS, "PBS has no valid password for it"
    if letter == "H":
        return WAITING, "you hold it; run qrls to release it"
    if any(part in comment for part in ("not started", "not running", "down", "dedicated time", "Draining")):
        return PASSING, ""
    return (WAITING, "") if comment or letter in "HW" else (PASSING, "")


def rank(seen: SchedulerJob) -> tuple[bool, bool, int]:
    """Return a sort key: a live job is above one that ended well, which is above the latest one."""
    return seen.state in PRESENT, seen.state == COMPLETED, number(number_of(seen.id).partition("[")[0]) or 0


def number_of(job_id: str) -> str:
    """Return an id without the name of the server."""
    return job_id.partition(".")[0]


def resources_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a node has (`resources_available`)."""
    found = node.get("resources_available")
    return found if isinstance(found, dict) else {}


def hosts_of(nodes: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Kind]]:
    """Return (queue, kind) of each host, with its vnodes together. queue: "" where it is for all of them."""
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for name, node in nodes.items():
        hosts.setdefault(str(resources_of(node).get("host", name)), []).append(node)
    found = []
    for vnodes in hosts.values():
        each = [resources_of(node) for node in vnodes]
        gpus = sum(_whole(one.get("ngpus")) for one in each)
        models = {str(one["accelerator_model"]) for one in each if one.get("accelerator_model")}
        kind = Kind(
            nodes=1,
            cpus=sum(_whole(one.get("ncpus")) for one in each),
            mem_mb=sum(size_mb(str(one.get("mem", ""))) for one in each),
            gpus=gpus,
            gpu_types=((models.pop(), gpus),) if len(models) == 1 and gpus else (),
        )
        found.append((next((str(node["queue"]) for node in vnodes if node.get("queue")), ""), kind))
    return found


def pools_of(
    queues: Mapping[str, Mapping[str, Any]], hosts: list[tuple[str, Kind]], server: Mapping[str, Any]
) -> tuple[Queue, ...]:
    """Return queues that run jobs, or pass them on. A host with a queue serves that one only."""
    bound = {queue for queue, _ in hosts if queue}
    found = []
    for name, queue in queues.items():
        kinds: dict[Kind, int] = {}
        for of, kind in hosts:
            if of == (name if name in bound else ""):
                kinds[kind] = kinds.get(kind, 0) + 1
        alike = [
            Kind(nodes=count, cpus=kind.cpus, mem_mb=kind.mem_mb, gpus=kind.gpus, gpu_types=kind.gpu_types)
            for kind, count in kinds.items()
        ]
        # in this order PBS gives one to a job without (set_resc_deflt, svr_jobfunc.c)
        limits = [_walltime(each, of) for of in ("resources_default", "resources_max") for each in (queue, server)]
        default_s = next(filter(None, limits), 0)
        found.append(pool_of(name, alike, limits[2], name == str(server.get("default_queue", "")), default_s))
    return tuple(found)


def _walltime(attributes: Mapping[str, Any], name: str) -> int:
    found = attributes.get(name)
    return span_s(str(found.get("walltime", ""))) if isinstance(found, dict) else 0


def span_s(text: str) -> int:
    """Read [[hours:]minutes:]seconds, in seconds; 0 where it is none."""
    parts = [number(part.partition(".")[0]) for part in text.split(":")]
    if any(part is None for part in parts) or len(parts) > 3:
        return 0
    total = 0
    for part in parts:
        total = total * 60 + (part or 0)
    return total


def size_mb(text: str) -> int:
    """Read `1056270208kb` in MB; a number alone is bytes."""
    body = text.lower()
    is_words, body = body.endswith("w"), body.rstrip("bw")
    unit = body[-1:] if body[-1:] in _UNITS[1:] else ""
    size = number(body.removesuffix(unit))
    if size is None:
        return 0
    return (size * (8 if is_words else 1) << 10 * _UNITS.index(unit or " ")) >> 20


def _whole(value: object) -> int:
    return value if isinstance(value, int) else number(str(value)) or 0


def advised(result: CommandResult) -> str:
    """Return qsub's own words for a refusal, and what to do."""
    lines = [line.strip() for line in (result.error or result.out).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("usage:", "[-", "qsub --version"))]
    lines.sort(key=lambda line: not line.startswith("qsub: "))  # its own before a library's
    text = (lines[0] if lines else f"qsub exited with {result.code} and no message").removeprefix("qsub: ")
    advice = next((advice for part, advice in _ADVICE.items() if part in text), "")
    return f"{text}; {advice}" if advice else text


def failure_text(what: str, result: CommandResult, is_garbage: bool = False) -> str:
    """Return what went wrong with a command, in one line."""
    if result.timed_out:
        return f"{what}: no response in time; the server may be down or busy"
    if result.code == MISSING:
        return result.error
    if is_garbage:
        return f"{what}: cannot understand its answer: {result.out[:80]!r}"
    words = result.last_line
    return (
        f"{what} exited with {result.code}: {words}" if words else f"{what} exited with {result.code} and no message"
    )
