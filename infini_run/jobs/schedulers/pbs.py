"""PBS's commands: what is asked, and what the answers mean. pbs_script.py has what a script says to it.

The one rule: what an answer says of a job counts, whatever the exit code, and a job of which it says nothing is not
unknown: PBS says "Unknown Job Id". A qstat that knows some of the jobs and others not exits with 153 and tells of
those all the same; without a history `-x` knows none, and exits with 0. All of this was measured on OpenPBS 23.06.06.
"""

from __future__ import annotations

import os
import time

from infini_run.errors import QueryError, SubmitError
from infini_run.jobs.array import members, split, task_id
from infini_run.jobs.scheduler_command import MISSING, run_command
from infini_run.jobs.schedulers.scheduler import (
    CANCELLED,
    COMPLETED,
    FAILED,
    HOPELESS,
    LOST,
    OOM,
    PASSING,
    QUEUED,
    REFUSED,
    RUNNING,
    STARTING,
    SUSPENDED,
    TIMED_OUT,
    TIMEOUT,
    UNREACHABLE,
    WAITING,
    Facts,
    Kind,
    SchedulerJob,
    pool_of,
    strip_scheduler_environment,
)
from infini_run.value_types import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.jobs.scheduler_command import CommandResult
    from infini_run.jobs.schedulers.scheduler import Queue

_FIRST = "Job Id: "
_NUMBERS = ("Exit_status", "substate")
_HELD = {"H": "held", "W": "its time has not come"}  # of those of which PBS says nothing
_LISTS = "list server\nlist queue @default\nlist node @default\n"  # @default: all of the default server's
_PRESENT = (QUEUED, STARTING, RUNNING, SUSPENDED)
_STATES = {"Q": QUEUED, "H": QUEUED, "W": QUEUED, "T": QUEUED, "M": QUEUED, "R": RUNNING, "E": RUNNING,
           "S": SUSPENDED, "U": SUSPENDED, "B": RUNNING}  # fmt: skip
# substates of a job that is over (pbs_internal.h): with history they say how, Exit_status alone does not
_TERMINATED, _FINISHED = 91, 92
_TIME, _MEMORY = (-28, -29), (-26, -27)  # JOB_EXEC_KILL_CPUT, _WALLTIME, _VMEM, _MEM (job.h)
_ASK_S = 10.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # for the server to hear that a job has begun, of which nothing tells us
_NO_HISTORY = "not configured to maintain job history"
_NEVER_WAS, _IS_OVER = "Unknown Job Id", "has finished"
_UNKNOWN = (_NEVER_WAS, _IS_OVER, "invalid for finished array subjob")
_ENDS = ("E", "X", "F")  # states of which qdel says that its request is invalid, or that it is over
_NOT_NOW = "invalid for state"  # of a job that does not run (yet)
_UNITS = " kmgtp"
_END = "\x1f"  # between two attributes: a value with one has ^_ there
_AWAY = ("cannot connect to server", "Connection refused", "No default server", "Unknown Host", "could not resolve",
         "unable to read qmaster name")  # fmt: skip
_UNSURE = ("timed out", "timeout", "Communication failure", "End of File", "reset by peer", "Broken pipe",
           "Protocol (ASN.1)", "Premature end of message")  # fmt: skip
_ADVICE = {
    "Unknown queue": "infini-job clusters lists the pools",
    "Unknown resource": "the cluster has no resource of that name",
    "Queue is not enabled": "the queue takes no jobs now: give another --pool",
    "would exceed": "wait until fewer of yours are queued there, or give another --pool",
    "Job exceeds": "ask for less, or for another --pool",
    "Job violates queue": "ask for less, or for another --pool",
    "invalid option": "`man qsub` lists its options",
    "Unauthorized": "the server does not let you: give another --pool or --account",
}


class Pbs:
    """The PBS whose commands are on PATH. environ: ours; its options for PBS's commands are left out."""

    name = "pbs"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = strip_scheduler_environment(os.environ if environ is None else environ)

    def facts(self) -> Facts:
        """By one command: a second qstat within a second sleeps for 0.2 s (its delay_query), and each connects and
        proves who we are anew. Raises QueryError."""
        said = run_command(["qmgr"], self._environ, given=_LISTS)
        found = _objects(said.out)
        if said.timed_out or not found["Server"] or (said.code and not found["Queue"]):
            raise QueryError(_complaint("qmgr -c 'list server'", said, is_garbage=said.code == 0))
        queues, nodes = found["Queue"], found["Node"]
        first = next(iter(found["Server"].values()))
        kinds = _hosts(nodes)
        return Facts(
            scheduler=self.name,
            version=str(first.get("pbs_version", "")),
            has_gres=any("ngpus" in _resources(node) for node in nodes.values()),
            has_history=str(first.get("job_history_enable", "")).lower() == "true",
            pools=_pools(queues, kinds, first),
        )

    def check(self, script_path: str) -> str:
        """PBS takes what can never run, and says so of the job that waits; nothing asks it beforehand."""
        return ""

    def submit(self, script_path: str, name: str) -> str:
        """Once. Raises SubmitError; after `timed_out` the job may be there all the same: `find` it."""
        said = run_command(["qsub", "-N", name, script_path], self._environ)
        job_id = said.out.strip()
        if said.code == 0 and is_id(job_id):
            return job_id
        if said.code == MISSING:
            raise SubmitError(UNREACHABLE, said.error)
        is_unsure = said.timed_out or said.code == 0 or any(part in said.error for part in _UNSURE)
        if (
            is_unsure or not said.error.strip()
        ):  # one that a signal ends says nothing; its exit code may be one of PBS's
            raise SubmitError(TIMED_OUT, _complaint("qsub", said))
        if any(part in said.error for part in _AWAY):
            raise SubmitError(UNREACHABLE, _complaint("qsub", said))
        raise SubmitError(REFUSED, _advised(said))

    def find(self, name: str) -> str | None:
        """In whatever state: it was taken."""
        seen = self.query([name]).get(name)
        return None if seen is None else seen.id

    def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, SchedulerJob]:
        """One qstat with all ids. qstat knows no names: where an id is missing, unknown or of a job that is over (one
        that was queued again has another), qselect lists jobs first."""
        known = ids or {}
        found = _latest(names, self._jobs([known[name] for name in names if known.get(name)]))
        asked = {seen.id for seen in found.values()}
        unsure = [name for name in names if name not in found or found[name].state not in _PRESENT]
        if unsure:
            others = self._jobs([job_id for job_id in self._listed(unsure) if job_id not in asked])
            others |= self._jobs(_tasks(unsure, others))
            for name, seen in _latest(unsure, others).items():
                if name not in found or _rank(seen) > _rank(found[name]):
                    found[name] = seen
        return found

    def cancel(self, *ids: str, again: bool = False) -> None:
        """URG to a job that runs, which its launcher takes for TERM: nobody but that one ends it, and its ranks have
        their grace. TERM itself would end the user's shell above the script, and all with it (qsig), or leave
        kill_delay (qdel: 10 s). Asked again: qdel. Raises QueryError."""
        left = list(ids)
        for pause_s in () if again else (0.0, *_PAUSES_S):
            time.sleep(pause_s)
            waiting, left = self._split(self._signal(left))
            self._delete(waiting)
            if not left:
                return
        waiting, running = self._split(left)
        self._delete([*waiting, *running])

    def _signal(self, ids: Sequence[str]) -> list[str]:
        """Those that do not run (yet). Raises QueryError."""
        said = run_command(["qsig", "-s", "URG", *ids], self._environ)
        refused = [line.split() for line in said.error.splitlines() if _NOT_NOW in line]
        if failed := said.failure(_NOT_NOW, *_UNKNOWN):
            raise QueryError(_complaint("qsig", failed))
        return [job_id for job_id in ids if any(job_id in words for words in refused)]

    def _split(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those that wait, or are unknown, and those that run; without those that end. The ranks of one that runs may
        be there before the server has heard so, and then it lets nobody signal them."""
        letters = {_number(job_id): job.get("job_state") for job_id, job in self._jobs(ids).items()}
        live = [job_id for job_id in ids if letters.get(_number(job_id)) not in _ENDS]
        running = [job_id for job_id in live if letters.get(_number(job_id)) == "R"]
        return [job_id for job_id in live if job_id not in running], running

    def _delete(self, ids: Sequence[str]) -> None:
        said = run_command(["qdel", *ids], self._environ) if ids else None
        if said is not None and (failed := said.failure(*_UNKNOWN)):
            raise QueryError(_complaint("qdel", failed))

    def requeue(self, id: str) -> bool:  # noqa: A002
        """qrerun is an operator's: submit anew."""
        return False

    def _listed(self, names: Sequence[str]) -> list[str]:
        """The jobs of a name, or all of ours; those that have ended too, where there is a history."""
        which = ["-N", names[0]] if len(names) == 1 and split(names[0])[1] < 0 else ["-u", _user()]
        said = run_command(["qselect", "-x", *which], self._environ)
        if _NO_HISTORY in said.error:  # with exit code 0
            said = run_command(["qselect", *which], self._environ)
        if said.code or said.timed_out:
            raise QueryError(_complaint("qselect", said))
        lines = said.out.split()
        if not all(is_id(line) for line in lines):
            raise QueryError(f"qselect: an answer that cannot be understood: {said.out[:80]!r}")
        return lines

    def _jobs(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What is known of these, by id. Those that are over are asked for in the history."""
        found = self._express(ids) if len(ids) > 1 else {}
        numbers = {_number(job_id) for job_id in found}
        left = [job_id for job_id in ids if _number(job_id) not in numbers]
        if left:
            others, over = self._ask_of(left, "-f")
            found |= others
            found |= self._ask_of(over, "-x", "-f")[0] if over else {}
        return found

    def _express(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those that are live, by one request. Without -E qstat connects anew for each job: 1 s for 100 of them, and
        12 to 25 s when it is done again and again. Of those that are not live -E says nothing. Raises QueryError."""
        said = run_command(["qstat", "-E", "-f", "-F", "dsv", "-D", _END, *ids], self._environ)
        found = _read_jobs(said.out)
        if found is None or said.timed_out:
            raise QueryError(_complaint("qstat -E -f", said, is_garbage=not said.timed_out))
        return found

    def _ask_of(self, ids: Sequence[str], *flags: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """What one qstat tells, and which jobs it says are over. Those of which it says nothing are asked for by
        themselves. Not in JSON: of several jobs OpenPBS prints the first alone since it has cJSON (December 2023).
        Raises QueryError."""
        said = run_command(["qstat", *flags, "-F", "dsv", "-D", _END, *ids], self._environ)
        found = _read_jobs(said.out)
        if found is None or said.timed_out:
            raise QueryError(_complaint("qstat -f", said, is_garbage=not said.timed_out))
        numbers = {_number(job_id) for job_id in found}
        over: list[str] = []
        silent: list[str] = []
        for job_id in ids:
            about = next((line for line in said.error.splitlines() if job_id in line.split()), "")
            if _number(job_id) in numbers or _NEVER_WAS in about or _NO_HISTORY in about:
                continue
            (over if _IS_OVER in about else silent).append(job_id)
        if silent and (len(ids) == 1 or not found):
            if said.code:
                raise QueryError(_complaint("qstat -f", said))
            raise QueryError(f"qstat -f says nothing of job {silent[0]}")
        for job_id in silent:
            one, is_over = self._ask_of([job_id], *flags)
            found |= one
            over += is_over
        return found, over


def is_pbs(environ: Mapping[str, str]) -> bool:
    """Whether the qstat on PATH is PBS's. Grid Engine and Torque have commands of the same names; PBS alone says
    `pbs_version = 23.06.06`."""
    said = run_command(["qstat", "--version"], strip_scheduler_environment(environ), _ASK_S)
    return "pbs_version" in said.out + said.error


# ---- what the answers mean


def _seen(job_id: str, job: Mapping[str, Any]) -> SchedulerJob:
    letter, substate = str(job.get("job_state", "")), job.get("substate")
    comment, nodes = str(job.get("comment", "")), str(job.get("exec_host", ""))
    holds, depends = str(job.get("Hold_Types", "")), str(job.get("depend", ""))
    hosts = ",".join(dict.fromkeys(part.partition("/")[0] for part in nodes.split("+") if part))
    if letter == "X":  # a task that has ended before its array: all else that is told of it is the array's
        return SchedulerJob(id=job_id, state=LOST, reason=f"PBS says no more of it than: {comment}")
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


def _latest(names: Sequence[str], jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, SchedulerJob]:
    """By name the job that is meant."""
    found: dict[str, SchedulerJob] = {}
    for job_id, job in jobs.items():
        ((name, _),), seen = members(str(job.get("Job_Name", "")), job_id), _seen(job_id, job)
        if name in names and (name not in found or _rank(seen) > _rank(found[name])):
            found[name] = seen
    return found


def _tasks(names: Sequence[str], jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The ids of those of these names whose arrays are there: qselect lists no tasks."""
    arrays = {str(job.get("Job_Name", "")): job_id for job_id, job in jobs.items() if "[]" in job_id}
    return [task_id(arrays[base], index) for base, index in map(split, names) if index >= 0 and base in arrays]


def _read_jobs(text: str) -> dict[str, dict[str, Any]] | None:
    """What `qstat -f -F dsv -D _END` prints: a job a line. None: it is something else."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.split("\n"):
        first, *attributes = line.split(_END)
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
    """A number, as JSON has those two."""
    return int(text) if number(text.removeprefix("-")) is not None else text


def is_id(text: str) -> bool:
    """Whether PBS calls a job so: `12.server`; an array `12[].server`, one of its jobs `12[3].server`."""
    job, dot, server = text.partition(".")
    digits, bracket, index = job.partition("[")
    if number(digits) is None or (bracket and (index[-1:] != "]" or number(index[:-1] or "0") is None)):
        return False
    return not dot or (bool(server) and all(c.isalnum() or c in "._-" for c in server) and server.isascii())


def _objects(text: str) -> dict[str, dict[str, dict[str, Any]]]:
    """What qmgr's `list` prints: by kind (Server, Queue, Node) and name its attributes, those of a resource below the
    attribute. A value of many words goes on behind a tab on the next line (display, qmgr.c)."""
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
    """A job that was cancelled may have Exit_status 0: only substate 92 is a success."""
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
    """Of a job that waits: WAITING, PASSING or HOPELESS by PBS's comment, and what to change in a hopeless one. That
    there are not enough nodes in all is not told from that they are busy."""
    if comment.startswith("Can Never Run"):
        what, _, rest = comment.partition("resource: ")[2].partition(" (")
        asked, differs, _ = rest.partition(" != ")
        if what in ("host", "vnode") and differs:
            return HOPELESS, f"no node of the queue has {what}={asked}: pbsnodes -a lists them"
        return HOPELESS, "ask for less, or for another --pool: no nodes have what is asked for"
    if "too many failed attempts" in comment:
        return HOPELESS, "PBS gave up starting it: cancel it, and ask an administrator about its nodes"
    if letter == "H" and any(kind in holds for kind in "so"):
        return HOPELESS, "an administrator holds it: ask him"
    if letter == "H" and "p" in holds:
        return HOPELESS, "PBS has no valid password for it"
    if letter == "H":
        return WAITING, "you hold it: qrls lets it go"
    if any(part in comment for part in ("not started", "not running", "down", "dedicated time", "Draining")):
        return PASSING, ""
    return (WAITING, "") if comment or letter in "HW" else (PASSING, "")


def _rank(seen: SchedulerJob) -> tuple[bool, bool, int]:
    """A job that is there before one that ended well before the last one."""
    return seen.state in _PRESENT, seen.state == COMPLETED, number(_number(seen.id).partition("[")[0]) or 0


def _number(job_id: str) -> str:
    """Without the name of the server."""
    return job_id.partition(".")[0]


def _resources(node: Mapping[str, Any]) -> Mapping[str, Any]:
    found = node.get("resources_available")
    return found if isinstance(found, dict) else {}


def _hosts(nodes: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Kind]]:
    """(queue, kind) of each host: its vnodes together. queue: "" where it is for all of them."""
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for name, node in nodes.items():
        hosts.setdefault(str(_resources(node).get("host", name)), []).append(node)
    found = []
    for vnodes in hosts.values():
        each = [_resources(node) for node in vnodes]
        gpus = sum(_whole(one.get("ngpus")) for one in each)
        models = {str(one["accelerator_model"]) for one in each if one.get("accelerator_model")}
        kind = Kind(
            nodes=1,
            cpus=sum(_whole(one.get("ncpus")) for one in each),
            mem_mb=sum(_size_mb(str(one.get("mem", ""))) for one in each),
            gpus=gpus,
            gpu_types=((models.pop(), gpus),) if len(models) == 1 and gpus else (),
        )
        found.append((next((str(node["queue"]) for node in vnodes if node.get("queue")), ""), kind))
    return found


def _pools(
    queues: Mapping[str, Mapping[str, Any]], hosts: list[tuple[str, Kind]], server: Mapping[str, Any]
) -> tuple[Queue, ...]:
    """Queues that run jobs, or pass them on. A host that is bound to a queue is for that one only."""
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
    """[[hours:]minutes:]seconds, in seconds; 0 where it is none."""
    parts = [number(part.partition(".")[0]) for part in text.split(":")]
    if any(part is None for part in parts) or len(parts) > 3:
        return 0
    total = 0
    for part in parts:
        total = total * 60 + (part or 0)
    return total


def _size_mb(text: str) -> int:
    """`1056270208kb` in MB; a number alone is bytes."""
    body = text.lower()
    is_words, body = body.endswith("w"), body.rstrip("bw")
    unit = body[-1:] if body[-1:] in _UNITS[1:] else ""
    size = number(body.removesuffix(unit))
    if size is None:
        return 0
    return (size * (8 if is_words else 1) << 10 * _UNITS.index(unit or " ")) >> 20


def _whole(value: object) -> int:
    return value if isinstance(value, int) else number(str(value)) or 0


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _advised(said: CommandResult) -> str:
    lines = [line.strip() for line in (said.error or said.out).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("usage:", "[-", "qsub --version"))]
    lines.sort(key=lambda line: not line.startswith("qsub: "))  # its own before a library's
    text = (lines[0] if lines else f"qsub ended with {said.code} and said nothing").removeprefix("qsub: ")
    advice = next((advice for part, advice in _ADVICE.items() if part in text), "")
    return f"{text}; {advice}" if advice else text


def _complaint(what: str, said: CommandResult, is_garbage: bool = False) -> str:
    if said.timed_out:
        return f"{what}: no answer in time; the server may be down or busy"
    if said.code == MISSING:
        return said.error
    if is_garbage:
        return f"{what}: an answer that cannot be understood: {said.out[:80]!r}"
    words = said.last_words
    return f"{what} ended with {said.code}: {words}" if words else f"{what} ended with {said.code} and said nothing"
