"""Slurm's commands: what is asked, and what the answers mean. sbatch.py has what a script says to it.

The one rule: fixed text formats only. JSON has another layout every year, and `squeue --json` ignores its filters.
Measured on 22.05.8; names of states and reasons are those of 20.11 to 25.11 (squeue(1), "JOB REASON CODES").
"""

from __future__ import annotations

import os

from infini_run.errors import QueryError, SubmitError
from infini_run.jobs.command import MISSING, ask
from infini_run.jobs.scheduler import (
    CANCELLED, COMPLETED, FAILED, HOPELESS, NODE_FAIL, OOM, PASSING, PREEMPTED, QUEUED, REFUSED, RUNNING, STARTING,
    TIMED_OUT, TIMEOUT, UNREACHABLE, WAITING, Facts, Kind, Seen, clean, pool_of,
)  # fmt: skip
from infini_run.kind import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from infini_run.jobs.command import Said
    from infini_run.jobs.scheduler import Pool

_STATES = {
    "PENDING": QUEUED, "REQUEUED": QUEUED, "REQUEUE_FED": QUEUED, "REQUEUE_HOLD": QUEUED, "SPECIAL_EXIT": QUEUED,
    "RESV_DEL_HOLD": QUEUED, "CONFIGURING": STARTING, "POWER_UP_NODE": STARTING, "RUNNING": RUNNING,
    "COMPLETING": RUNNING, "SUSPENDED": RUNNING, "STOPPED": RUNNING, "SIGNALING": RUNNING, "STAGE_OUT": RUNNING,
    "RESIZING": RUNNING, "EXPEDITING": QUEUED, "UPDATE_DB": RUNNING, "COMPLETED": COMPLETED, "FAILED": FAILED,
    "LAUNCH_FAILED": FAILED, "RECONFIG_FAIL": FAILED, "CANCELLED": CANCELLED, "REVOKED": CANCELLED,
    "TIMEOUT": TIMEOUT, "DEADLINE": TIMEOUT, "NODE_FAIL": NODE_FAIL, "BOOT_FAIL": NODE_FAIL, "OUT_OF_MEMORY": OOM,
    "PREEMPTED": PREEMPTED,
}  # fmt: skip
_PRESENT = (QUEUED, STARTING, RUNNING)

# what no waiting helps against, and what to do about it
_HOPELESS = {
    "PartitionNodeLimit": "ask for fewer nodes, or for another --pool: this one has or allows fewer",
    "PartitionTimeLimit": "ask for less --time, or for another --pool",
    "PartitionConfig": "ask for less, or for another --pool",
    "BadConstraints": "no node has what --constraint and the like ask for",
    "InvalidAccount": "give another --account: `sacctmgr show assoc user=$USER` lists yours",
    "AccountNotAllowed": "give another --account, or another --pool: this one does not take it",
    "InvalidQOS": "give another --qos: `sacctmgr show assoc user=$USER` lists yours",
    "QOSNotAllowed": "give another --qos, or another --pool: this one does not take it",
    "JobHeldAdmin": "an administrator holds it: ask him",
    "DependencyNeverSatisfied": "what it waits for has ended otherwise: cancel it",
    "MaxMemPerLimit": "ask for less --mem_per_slot",
    "ReservationDeleted": "its --reservation is gone: submit it without",
    "DeadLine": "it cannot end before its --deadline",
    "QOSTimeLimit": "ask for less --time: the QOS allows less",
    "AssociationTimeLimit": "ask for less --time: the account allows less",
    "JobHoldMaxRequeue": "it was run again as often as the cluster allows",
    "launch_failed_requeued_held": "its nodes could not start it: cancel it, or `scontrol release` it",
}
_OVER_A_LIMIT = "ask for less: its QOS or account allows less in one job"
_PASSING = (
    "None", "Prolog", "Cleaning", "WaitingForScheduling", "BeginTime", "NodeDown", "FrontEndDown", "PartitionDown",
    "PartitionInactive", "SystemFailure", "JobLaunchFailure", "NonZeroExitCode", "BurstBufferStageIn",
    "BurstBufferResources", "Reserved", "InactiveLimit",
)  # fmt: skip

# what the commands say of a controller that did not answer; after the first the job may be there all the same
_UNSURE = ("timed out", "Zero Bytes were transmitted", "Unexpected message", "reset by peer", "Broken pipe")
_AWAY = ("Unable to contact", "Connection refused", "connect failure", "No route", "Unable to establish", "munge",
         "Munge", "authentication", "Could not establish a configuration", "slurm.conf")  # fmt: skip
_GONE = ("Invalid job id", "already completing or completed", "Job/step already")
_ADVICE = {
    "nvalid partition": "infini-job clusters lists the pools",
    "Invalid account": "`sacctmgr show assoc user=$USER` lists the accounts",
    "Invalid qos": "`sacctmgr show assoc user=$USER` lists the QOS",
    "Requested node configuration is not available": "no nodes of the pool have what each was asked for",
    "CPU count per node": "no node of the pool has so many CPUs",
    "Invalid generic resource": "infini-job clusters lists the GPUs; the cluster has no other resource of that name",
    "Requested time limit is invalid": "ask for less --time, or for another --pool",
    "Memory specification": "no node of the pool has so much memory",
    "Node count specification": "ask for fewer nodes, or for another --pool",
    "unrecognized option": "`sbatch --help` lists its options",
}


class Slurm:
    """The Slurm whose commands are on PATH. environ: ours; its options for Slurm's commands are left out."""

    name = "slurm"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = clean(os.environ if environ is None else environ)
        self._has_accounting: bool | None = None

    def facts(self) -> Facts:
        """Raises QueryError."""
        config = _config(self._told("scontrol", "show", "config"))
        pools = _pools(self._told("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%l|%G"))
        select = config.get("SelectType", "").rpartition("/")[2]
        has_gres = "gpu" in config.get("GresTypes", "").split(",")
        self._has_accounting = config.get("AccountingStorageType", "").endswith("slurmdbd")
        return Facts(
            scheduler=self.name,
            version=config.get("SLURM_VERSION", ""),
            select=select,
            has_tres=select == "cons_tres",
            has_gres=has_gres,
            has_accounting=self._has_accounting,
            binds=any(name in config.get("TaskPlugin", "") for name in ("affinity", "cgroup")),
            gone_after_s=_first_number(config.get("MinJobAge", "")),
            pools=pools,
        )

    def check(self, script_path: str) -> str:
        """Ask `sbatch --test-only`. Raises QueryError where nobody answers."""
        said = ask(["sbatch", "--test-only", script_path], self._environ)
        if said.code == 0:
            return ""
        if said.timed_out or _is_any(said.error, (*_UNSURE, *_AWAY)) or said.code == MISSING:
            raise QueryError(_complaint("sbatch --test-only", said))
        return _advised(said)

    def submit(self, script_path: str, name: str) -> str:
        """Once. Raises SubmitError; after `timed_out` the job may be there all the same: `find` it."""
        said = ask(["sbatch", "--parsable", f"--job-name={name}", script_path], self._environ)
        job_id = said.out.strip().partition(";")[0]
        if said.code == 0 and number(job_id) is not None:
            return job_id
        if said.code == MISSING:
            raise SubmitError(UNREACHABLE, said.error)
        if said.timed_out or said.code == 0 or _is_any(said.error, _UNSURE):
            raise SubmitError(TIMED_OUT, _complaint("sbatch", said))
        if _is_any(said.error, _AWAY):
            raise SubmitError(UNREACHABLE, _complaint("sbatch", said))
        raise SubmitError(REFUSED, _advised(said))

    def find(self, name: str) -> str | None:
        """A submission that was refused may leave a record under its name: FAILED, BadConstraints."""
        seen = self.query([name]).get(name)
        return seen.id if seen is not None and (seen.state in _PRESENT or seen.state == COMPLETED) else None

    def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, Seen]:
        """squeue, and sacct for those that it has forgotten, where there is accounting."""
        if not names:
            return {}
        text = self._told("squeue", "--noheader", "--me", "--states=all", f"--name={','.join(names)}",
                          "--format=%j|%i|%T|%r|%N")  # fmt: skip
        found = _best(_queue_line(line) for line in text.splitlines())
        missing = [name for name in names if name not in found]
        if missing and self._has_accounting is not False:
            found |= self._accounted(missing)
        return found

    def cancel(self, id: str) -> None:  # noqa: A002
        """TERM to all of the job, KILL after KillWait."""
        said = ask(["scancel", id], self._environ)
        if said.code and not _is_any(said.error, _GONE):
            raise QueryError(_complaint("scancel", said))

    def requeue(self, id: str) -> bool:  # noqa: A002
        """Slurm waits two minutes before it starts a job again (BeginTime). Raises QueryError."""
        said = ask(["scontrol", "requeue", id], self._environ)
        if said.timed_out or _is_any(said.error, (*_UNSURE, *_AWAY)):
            raise QueryError(_complaint("scontrol requeue", said))
        return said.code == 0

    def _told(self, *argv: str) -> str:
        said = ask(argv, self._environ)
        if said.code:
            raise QueryError(_complaint(argv[0], said))
        return said.out

    def _accounted(self, names: Sequence[str]) -> dict[str, Seen]:
        """What the accounting knows. Where there is none we are told so, and ask no more."""
        said = ask(
            ["sacct", "--allocations", "--parsable2", "--noheader", f"--name={','.join(names)}", "--starttime=now-30days",
             "--format=JobName,JobIDRaw,State,ExitCode,NodeList"], self._environ,
        )  # fmt: skip
        if said.code and "disabled" in said.error:
            self._has_accounting = False
            return {}
        if said.code:
            raise QueryError(_complaint("sacct", said))
        return _best(_account_line(line) for line in said.out.splitlines())


# ---- what the answers mean


def hold_of(reason: str) -> tuple[str, str]:
    """Of a job that waits: WAITING, PASSING or HOPELESS by Slurm's reason, and what to change in a hopeless one."""
    word = reason.strip("()").partition(",")[0].strip()
    if word in _HOPELESS:
        return HOPELESS, _HOPELESS[word]
    if word.startswith("ReqNodeNotAvail"):
        if "Unavailable" in reason:
            return HOPELESS, "nodes that it needs are down: ask for others, or wait for an administrator"
        return PASSING, ""
    if word.startswith(("QOSMax", "AssocMax", "QOSMin")) and ("Per" not in word or word.endswith(_PER_JOB)):
        is_one_job = word.startswith("QOSMin") or "PerJob" in word or "PerNode" in word
        return (HOPELESS, _OVER_A_LIMIT) if is_one_job else (WAITING, "")
    return (PASSING, "") if word in _PASSING or not word else (WAITING, "")


_PER_JOB = ("PerJob", "PerJobLimit", "PerNode")


def state_of(word: str) -> str:
    """`CANCELLED by 1000` and `CANCELLED+` are sacct's. A word that we do not know is of a job that is there."""
    return _STATES.get(word.split()[0].rstrip("+") if word.split() else "", RUNNING)


def _queue_line(line: str) -> tuple[str, Seen]:
    fields = line.split("|")
    if len(fields) != 5 or not fields[1]:
        raise QueryError(f"squeue: an answer that cannot be understood: {line[:80]!r}")
    name, job_id, word, reason, nodes = (field.strip() for field in fields)
    state = state_of(word)
    hold, advice = hold_of(reason) if state == QUEUED else ("", "")
    if word == "SUSPENDED":
        reason = "suspended"
    elif state in (STARTING, RUNNING) or reason == "None":
        reason = ""
    return name, Seen(id=job_id, state=state, reason=reason, hold=hold, advice=advice, nodes=nodes)


def _account_line(line: str) -> tuple[str, Seen]:
    fields = line.split("|")
    if len(fields) != 5 or not fields[1]:
        raise QueryError(f"sacct: an answer that cannot be understood: {line[:80]!r}")
    name, job_id, word, code, nodes = (field.strip() for field in fields)
    status, _, by_signal = code.partition(":")
    ended = number(by_signal or "0") or 0
    value = 128 + ended if ended else number(status)
    return name, Seen(
        id=job_id, state=state_of(word), reason=word if " " in word else "", code=-1 if value is None else value,
        nodes="" if nodes == "None assigned" else nodes,
    )  # fmt: skip


def _best(lines: Iterable[tuple[str, Seen]]) -> dict[str, Seen]:
    """Of several of one name the one that is there; else the one that ended well; else the last."""

    def rank(seen: Seen) -> tuple[bool, bool, int]:
        return seen.state in _PRESENT, seen.state == COMPLETED, number(seen.id) or 0

    found: dict[str, Seen] = {}
    for name, seen in lines:
        if name not in found or rank(seen) > rank(found[name]):
            found[name] = seen
    return found


def _config(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if "SLURM_VERSION" not in found:
        raise QueryError("scontrol show config: an answer that cannot be understood")
    return found


def _pools(text: str) -> tuple[Pool, ...]:
    """sinfo has one line for each kind of node in each partition."""
    kinds: dict[str, list[Kind]] = {}
    limits: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6:
            raise QueryError(f"sinfo: an answer that cannot be understood: {line[:80]!r}")
        name, nodes, cpus, mem, limit, gres = (field.strip() for field in fields)
        gpu_types = _gpus(gres)
        kind = Kind(
            nodes=_first_number(nodes), cpus=_first_number(cpus), mem_mb=_first_number(mem),
            gpus=sum(count for _, count in gpu_types), gpu_types=tuple(pair for pair in gpu_types if pair[0]),
        )  # fmt: skip
        kinds.setdefault(name, []).append(kind)
        limits[name] = span_s(limit)
    return tuple(
        pool_of(name.rstrip("*"), [kind for kind in each if kind.nodes], limits[name], name.endswith("*"))
        for name, each in kinds.items()
    )


def _gpus(gres: str) -> list[tuple[str, int]]:
    """`gpu:a100:4(S:0-1),gpu:2,nvme:1` has 4 of a100 and 2 without a type."""
    counts: dict[str, int] = {}
    depth, items = 0, [""]
    for char in gres:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    for item in items:
        name, *rest = item.partition("(")[0].split(":")
        if name == "gpu":
            *types, count = rest or ["1"]
            label = ":".join(types)
            counts[label] = counts.get(label, 0) + (_first_number(count) if count[:1].isdigit() else 1)
    return list(counts.items())


def span_s(text: str) -> int:
    """Slurm's `days-hours:minutes:seconds`, in seconds; 0: no limit."""
    days, dash, clock = text.rpartition("-")
    parts = [number(part) for part in clock.split(":")]
    if not text or any(part is None for part in parts) or (dash and number(days) is None):
        return 0
    values = [part or 0 for part in parts]
    if dash:
        values += [0] * (3 - len(values))
    elif len(values) == 1:
        values = [0, values[0], 0]
    while len(values) < 3:
        values.insert(0, 0)
    return ((number(days) or 0) * 24 + values[0]) * 3600 + values[1] * 60 + values[2]


def _first_number(text: str) -> int:
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits) if digits and len(digits) <= 18 else 0


def _is_any(text: str, parts: Iterable[str]) -> bool:
    return any(part in text for part in parts)


def _advised(said: Said) -> str:
    """Slurm's own words, without the command's name, and what to do."""
    lines = [line.strip() for line in (said.error or said.out).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Try ")]
    text = lines[-1] if lines else f"sbatch ended with {said.code} and said nothing"
    for prefix in ("sbatch: error: ", "sbatch: fatal: ", "sbatch: ", "allocation failure: "):
        text = text.removeprefix(prefix)
    advice = next((advice for part, advice in _ADVICE.items() if any(part in line for line in lines)), "")
    return f"{text}; {advice}" if advice else text


def _complaint(what: str, said: Said) -> str:
    if said.timed_out:
        return f"{what}: no answer in time; the controller may be down or busy"
    if said.code == MISSING:
        return said.error
    words = said.last_words
    return f"{what} ended with {said.code}: {words}" if words else f"{what} ended with {said.code} and said nothing"
