"""Slurm's commands: the questions, and what the answers mean. slurm_script.py has the script for Slurm.

The one rule: fixed text formats only. JSON has another layout every year, and `squeue --json` ignores its filters.
Measured on 22.05.8. slurm_output.py says what the words of an answer mean.
"""

from __future__ import annotations

import os

from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.request.array import members, split, task_id, whole_id
from infini_run.jobs.scheduler import (
    CANCELLED,
    COMPLETED,
    FAILED,
    PRESENT,
    QUEUED,
    REFUSED,
    RUNNING,
    STARTING,
    SUSPENDED,
    TIMED_OUT,
    UNREACHABLE,
    Facts,
    Kind,
    SchedulerJob,
    pool_of,
    strip_scheduler_environment,
)
from infini_run.jobs.schedulers.scheduler_command import run_command
from infini_run.jobs.schedulers.slurm_output import (
    GONE,
    advised,
    failure_text,
    hold_of,
    is_away,
    is_queued,
    is_unsure,
    state_of,
)
from infini_run.record import replace
from infini_run.value_types import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from infini_run.jobs.scheduler import Queue

_LONG = {"SLURM_BITSTR_LEN": "0"}  # the tasks of an array that wait, all of them: else 64 characters
_REQUEUES = 3  # scontrol gives up after 10 s, and KillWait is 30 s by default


class Slurm:
    """The Slurm whose commands are on PATH.

    Args:
        environ: this process's environment, from which the options for Slurm's commands are dropped.
    """

    name = "slurm"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = strip_scheduler_environment(os.environ if environ is None else environ) | _LONG
        self._has_accounting: bool | None = None

    @property
    def has_accounting(self) -> bool:
        """Return whether sacct has answered, or Slurm's configuration says that it does."""
        return self._has_accounting is True

    def facts(self) -> Facts:
        """Raises QueryError."""
        config = _config(self._output("scontrol", "show", "config"))
        pools = _pools(self._output("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%l|%G"))
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
            pools=pools,
        )

    def check(self, script_path: str) -> str:
        """Ask `sbatch --test-only`. Raises QueryError where nobody answers."""
        result = run_command(["sbatch", "--test-only", script_path], self._environ)
        if result.code == 0:
            return ""
        if is_unsure(result) or is_away(result):
            raise QueryError(failure_text("sbatch --test-only", result))
        return advised(result)

    def submit(self, script_path: str, name: str) -> str:
        """Submit once. Raises SubmitError; after `timed_out` Slurm may have the job all the same: `find` it. name:
        NAME.K: of that array this task alone, once more."""
        base, index = split(name)
        only = [f"--array={index}"] if index >= 0 else []
        result = run_command(["sbatch", "--parsable", f"--job-name={base}", *only, script_path], self._environ)
        job_id = result.out.strip().partition(";")[0]
        if result.code == 0 and number(job_id) is not None:
            return task_id(job_id, index) if only else job_id
        if result.code == 0 or is_unsure(result):
            raise SubmitError(TIMED_OUT, failure_text("sbatch", result))
        if is_away(result):
            raise SubmitError(UNREACHABLE, failure_text("sbatch", result))
        raise SubmitError(REFUSED, advised(result))

    def find(self, name: str) -> str | None:
        """Return the id of a job that Slurm has taken. A refused submission may leave a record under its name:
        FAILED, BadConstraints. A job may also fail, or be canceled, before anybody looks: Slurm has taken it all the
        same."""
        seen = self.query([name]).get(name)
        if seen is not None and not seen.state:
            raise QueryError(seen.reason)
        return None if seen is None or (seen.state == FAILED and seen.reason == "BadConstraints") else seen.id

    def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, SchedulerJob]:
        """Query squeue, and sacct for those that it forgot, where there is accounting: by their ids, else by their
        names. Without an answer of sacct, squeue's answer holds, and the forgotten ones remain unknown."""
        if not names:
            return {}
        # not --array, which has one line for each task: 22.05 leaves out the last one of 0-20:2
        text = self._output("squeue", "--noheader", "--me", "--states=all", f"--name={','.join(_jobs(names))}",
                          "--format=%j|%i|%T|%r|%N")  # fmt: skip
        found = _best(pair for line in text.splitlines() for pair in _queue_line(line))
        missing = [name for name in names if name not in found]
        if missing and self._has_accounting is not False:
            # sacct refuses all of them for one that is no number
            known = {name: ids[name] for name in missing if ids and number(whole_id(ids.get(name, ""))) is not None}
            try:
                found |= self._accounted(missing, known)
            except QueryError as error:
                found |= {name: SchedulerJob(id=known.get(name, ""), state="", reason=str(error)) for name in missing}
        return found

    def cancel(self, *ids: str, again: bool = False) -> None:
        """Send TERM to all of them, and KILL after KillWait."""
        result = run_command(["scancel", *ids], self._environ)
        if failed := result.failure(*GONE):
            raise QueryError(failure_text("scancel", failed))

    def requeue(self, id: str) -> bool:  # noqa: A002
        """Have Slurm queue the job again, which starts two minutes later (BeginTime). The second time Slurm says that
        the job is pending, as it does for one that it queued without a request (PreemptMode=REQUEUE). So after a lost
        answer this asks once more. Raises QueryError."""
        for _ in range(_REQUEUES):
            result = run_command(["scontrol", "requeue", id], self._environ)
            if result.code == 0 or is_queued(result):
                return True
            if not is_unsure(result) and not is_away(result):
                return False
        raise QueryError(failure_text("scontrol requeue", result))

    def number_of(self, id: str) -> str:  # noqa: A002
        """Return the number of a job; of a task of an array its own, for srun takes no 12_3. Raises QueryError."""
        if number(id) is not None:
            return id
        found = self._output("squeue", "--noheader", f"--jobs={id}", "--format=%A").strip()
        if number(found) is None:
            raise QueryError(f"squeue: cannot understand its answer: {found[:80]!r}")
        return found

    def _output(self, *argv: str) -> str:
        result = run_command(argv, self._environ)
        if result.code:
            raise QueryError(failure_text(argv[0], result))
        return result.out

    def _accounted(self, names: Sequence[str], ids: Mapping[str, str]) -> dict[str, SchedulerJob]:
        """Return what the accounting knows of these jobs. Raises QueryError."""
        found = self._records(f"--jobs={','.join(_jobs(map(whole_id, ids.values())))}") if ids else {}
        found = {name: seen for name, seen in found.items() if name in names}
        missing = [name for name in names if name not in found]
        if missing and self._has_accounting is not False:
            # by name sacct lists only those that were eligible after the start
            found |= self._records(f"--name={','.join(_jobs(missing))}", "--starttime=now-30days")
        return found

    def _records(self, *which: str) -> dict[str, SchedulerJob]:
        """Return sacct's records. Without accounting sacct reports that, and this asks no more. Raises QueryError."""
        result = run_command(
            ["sacct", "--allocations", "--parsable2", "--noheader", *which,
             "--format=JobName,JobID,State,ExitCode,NodeList"], self._environ,
        )  # fmt: skip
        if result.code and "disabled" in result.error:
            self._has_accounting = False
            return {}
        if result.code:
            raise QueryError(failure_text("sacct", result))
        self._has_accounting = True
        return _best(pair for line in result.out.splitlines() for pair in _account_line(line))


# ---- what the answers mean


def _jobs(names: Iterable[str]) -> list[str]:
    """Return the jobs, each once; that of a task is its array's."""
    return list(dict.fromkeys(split(name)[0] for name in names))


def _queue_line(line: str) -> list[tuple[str, SchedulerJob]]:
    fields = line.split("|")
    if len(fields) != 5 or not fields[1]:
        raise QueryError(f"squeue: cannot understand its answer: {line[:80]!r}")
    name, job_id, word, reason, nodes = (field.strip() for field in fields)
    state = state_of(word)
    hold, advice = hold_of(reason) if state == QUEUED else ("", "")
    # one that was canceled while it waited has the reason for that still (22.05: CANCELLED, BeginTime)
    if state in (STARTING, RUNNING, SUSPENDED, CANCELLED) or reason == "None":
        reason = ""
    return [
        (one, SchedulerJob(id=id_, state=state, reason=reason, hold=hold, advice=advice, nodes=nodes))
        for one, id_ in _members(name, job_id)
    ]


def _members(name: str, job_id: str) -> list[tuple[str, str]]:
    try:
        return members(name, job_id)
    except ValueError:
        raise QueryError(f"{job_id[:80]}: cannot understand these tasks of an array") from None


def _account_line(line: str) -> list[tuple[str, SchedulerJob]]:
    fields = line.split("|")
    if len(fields) != 5 or not fields[1]:
        raise QueryError(f"sacct: cannot understand its answer: {line[:80]!r}")
    name, job_id, word, code, nodes = (field.strip() for field in fields)
    status, _, by_signal = code.partition(":")
    ended = number(by_signal or "0") or 0
    value = 128 + ended if ended else number(status)
    seen = SchedulerJob(
        id=job_id, state=state_of(word), reason=word if " " in word else "", code=-1 if value is None else value,
        nodes="" if nodes == "None assigned" else nodes,
    )  # fmt: skip
    return [(one, replace(seen, id=id_)) for one, id_ in _members(name, job_id)]


def _best(lines: Iterable[tuple[str, SchedulerJob]]) -> dict[str, SchedulerJob]:
    """Return one of several jobs of one name: a live one; else the one that ended well; else the last."""

    def rank(seen: SchedulerJob) -> tuple[bool, bool, int]:
        return seen.state in PRESENT, seen.state == COMPLETED, number(whole_id(seen.id)) or 0

    found: dict[str, SchedulerJob] = {}
    for name, seen in lines:
        if name not in found or rank(seen) > rank(found[name]):
            found[name] = seen
    return found


def _config(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if "SLURM_VERSION" not in found:
        raise QueryError("scontrol show config: cannot understand its answer")
    return found


def _pools(text: str) -> tuple[Queue, ...]:
    """Return the pools: sinfo has one line for each kind of node in each partition."""
    kinds: dict[str, list[Kind]] = {}
    limits: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6:
            raise QueryError(f"sinfo: cannot understand its answer: {line[:80]!r}")
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
    """Read `gpu:a100:4(S:0-1),gpu:2,nvme:1`, which has 4 of a100 and 2 without a type."""
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
    """Read Slurm's `days-hours:minutes:seconds`, in seconds; 0: no limit."""
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
