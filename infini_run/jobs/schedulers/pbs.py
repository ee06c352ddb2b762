"""PBS's commands: the questions, and how to ask them. pbs_output.py has what the answers mean, pbs_script.py the
script for PBS.

The one rule: what an answer says of a job counts, whatever the exit code. A job that the answer leaves out is not
unknown: PBS says "Unknown Job Id". A qstat that knows only some of the jobs exits with 153 and lists those all the
same. Without a history `-x` knows none, and exits with 0. All of this was measured on OpenPBS 23.06.06.
"""

from __future__ import annotations

import os
import time

from infini_run.jobs.errors import QueryError, SubmitError
from infini_run.jobs.request.array import split
from infini_run.jobs.scheduler import (
    PRESENT,
    REFUSED,
    TIMED_OUT,
    UNREACHABLE,
    Facts,
    SchedulerJob,
    strip_scheduler_environment,
)
from infini_run.jobs.schedulers.pbs_output import (
    SEPARATOR,
    advised,
    failure_text,
    hosts_of,
    is_id,
    latest,
    number_of,
    pools_of,
    rank,
    read_jobs,
    read_objects,
    resources_of,
    task_ids,
)
from infini_run.jobs.schedulers.scheduler_command import MISSING, run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


_LISTS = "list server\nlist queue @default\nlist node @default\n"  # @default: all of the default server's
_ASK_S = 10.0
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # for the server to learn that a job has begun, without an event
_NO_HISTORY = "not configured to maintain job history"
_NEVER_WAS, _IS_OVER = "Unknown Job Id", "has finished"
_UNKNOWN = (_NEVER_WAS, _IS_OVER, "invalid for finished array subjob")
_ENDS = ("E", "X", "F")  # states in which qdel says that its request is invalid, or that the job finished
_NOT_NOW = "invalid for state"  # of a job that does not run (yet)
_AWAY = ("cannot connect to server", "Connection refused", "No default server", "Unknown Host", "could not resolve",
         "unable to read qmaster name")  # fmt: skip
_UNSURE = ("timed out", "timeout", "Communication failure", "End of File", "reset by peer", "Broken pipe",
           "Protocol (ASN.1)", "Premature end of message")  # fmt: skip


class Pbs:
    """The PBS whose commands are on PATH.

    Args:
        environ: this process's environment, from which the options for PBS's commands are dropped.
    """

    name = "pbs"
    has_accounting = False

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = strip_scheduler_environment(os.environ if environ is None else environ)

    def facts(self) -> Facts:
        """Return the facts by one command: a second qstat within a second sleeps for 0.2 s (its delay_query), and
        each connects and authenticates anew. Raises QueryError."""
        result = run_command(["qmgr"], self._environ, given=_LISTS)
        found = read_objects(result.out)
        if result.timed_out or not found["Server"] or (result.code and not found["Queue"]):
            raise QueryError(failure_text("qmgr -c 'list server'", result, is_garbage=result.code == 0))
        queues, nodes = found["Queue"], found["Node"]
        first = next(iter(found["Server"].values()))
        kinds = hosts_of(nodes)
        return Facts(
            scheduler=self.name,
            version=str(first.get("pbs_version", "")),
            has_gres=any("ngpus" in resources_of(node) for node in nodes.values()),
            has_history=str(first.get("job_history_enable", "")).lower() == "true",
            pools=pools_of(queues, kinds, first),
        )

    def check(self, script_path: str) -> str:
        """Accept any job: PBS takes what can never run, and reports so in the waiting job; nothing asks it
        beforehand."""
        return ""

    def submit(self, script_path: str, name: str) -> str:
        """Submit once. Raises SubmitError; after `timed_out` PBS may have the job all the same: `find` it."""
        result = run_command(["qsub", "-N", name, script_path], self._environ)
        job_id = result.out.strip()
        if result.code == 0 and is_id(job_id):
            return job_id
        if result.code == MISSING:
            raise SubmitError(UNREACHABLE, result.error)
        is_unsure = result.timed_out or result.code == 0 or any(part in result.error for part in _UNSURE)
        if (
            is_unsure or not result.error.strip()
        ):  # one that a signal ends says nothing; its exit code may be one of PBS's
            raise SubmitError(TIMED_OUT, failure_text("qsub", result))
        if any(part in result.error for part in _AWAY):
            raise SubmitError(UNREACHABLE, failure_text("qsub", result))
        raise SubmitError(REFUSED, advised(result))

    def find(self, name: str) -> str | None:
        """Return the id of a job in any state: PBS has taken it."""
        seen = self.query([name]).get(name)
        return None if seen is None else seen.id

    def query(self, names: Sequence[str], ids: Mapping[str, str] | None = None) -> dict[str, SchedulerJob]:
        """Query all ids by one qstat, which knows no names. Where an id is missing, unknown, or of a finished job
        (one that PBS queued again has another), qselect lists jobs first."""
        known = {
            name: id_ for name, id_ in (ids or {}).items() if is_id(id_)
        }  # else no answer of qstat is understood
        found = latest(names, self._jobs([known[name] for name in names if known.get(name)]))
        asked = {seen.id for seen in found.values()}
        unsure = [name for name in names if name not in found or found[name].state not in PRESENT]
        if unsure:
            others = self._jobs([job_id for job_id in self._listed(unsure) if job_id not in asked])
            others |= self._jobs(task_ids(unsure, others))
            for name, seen in latest(unsure, others).items():
                if name not in found or rank(seen) > rank(found[name]):
                    found[name] = seen
        return found

    def cancel(self, *ids: str, again: bool = False) -> None:
        """Send URG to a running job, which its launcher takes for TERM: only the launcher ends it, and its ranks have
        their grace. TERM itself would end the user's shell above the script, and all with it (qsig), or leave
        kill_delay (qdel: 10 s). The second request is a qdel. Raises QueryError."""
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
        """Signal jobs. Return those that do not run (yet). Raises QueryError."""
        result = run_command(["qsig", "-s", "URG", *ids], self._environ)
        refused = [line.split() for line in result.error.splitlines() if _NOT_NOW in line]
        if failed := result.failure(_NOT_NOW, *_UNKNOWN):
            raise QueryError(failure_text("qsig", failed))
        return [job_id for job_id in ids if any(job_id in words for words in refused)]

    def _split(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the jobs that wait, or are unknown, and those that run; drop those that end. The ranks of a running
        job may exist before the server knows, and then it lets nobody signal them."""
        letters = {number_of(job_id): job.get("job_state") for job_id, job in self._jobs(ids).items()}
        live = [job_id for job_id in ids if letters.get(number_of(job_id)) not in _ENDS]
        running = [job_id for job_id in live if letters.get(number_of(job_id)) == "R"]
        return [job_id for job_id in live if job_id not in running], running

    def _delete(self, ids: Sequence[str]) -> None:
        result = run_command(["qdel", *ids], self._environ) if ids else None
        if result is not None and (failed := result.failure(*_UNKNOWN)):
            raise QueryError(failure_text("qdel", failed))

    def requeue(self, id: str) -> bool:  # noqa: A002
        """Submit the job anew: qrerun is an operator's."""
        return False

    def _listed(self, names: Sequence[str]) -> list[str]:
        """Return the jobs of a name, or all of this user; with those that ended, where there is a history."""
        which = ["-N", names[0]] if len(names) == 1 and split(names[0])[1] < 0 else ["-u", _user()]
        result = run_command(["qselect", "-x", *which], self._environ)
        if _NO_HISTORY in result.error:  # with exit code 0
            result = run_command(["qselect", *which], self._environ)
        if result.code or result.timed_out:
            raise QueryError(failure_text("qselect", result))
        lines = result.out.split()
        if not all(is_id(line) for line in lines):
            raise QueryError(f"qselect: cannot understand its answer: {result.out[:80]!r}")
        return lines

    def _jobs(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return what PBS knows of these, by id. Finished ones are in the history."""
        found = self._express(ids) if len(ids) > 1 else {}
        numbers = {number_of(job_id) for job_id in found}
        left = [job_id for job_id in ids if number_of(job_id) not in numbers]
        if left:
            others, over = self._query_some(left, "-f")
            found |= others
            found |= self._query_some(over, "-x", "-f")[0] if over else {}
        return found

    def _express(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the live jobs, by one request. Without -E qstat connects anew for each job: 1 s for 100 of them, and
        12 to 25 s after many repetitions. The answer to -E has live jobs only. Raises QueryError."""
        result = run_command(["qstat", "-E", "-f", "-F", "dsv", "-D", SEPARATOR, *ids], self._environ)
        found = read_jobs(result.out)
        if found is None or result.timed_out:
            raise QueryError(failure_text("qstat -E -f", result, is_garbage=not result.timed_out))
        return found

    def _query_some(self, ids: Sequence[str], *flags: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Return what one qstat lists, and which jobs it calls finished. Another query follows for those that it
        leaves out. Not in JSON: of several jobs OpenPBS prints the first alone since it has cJSON (December 2023).
        Raises QueryError."""
        result = run_command(["qstat", *flags, "-F", "dsv", "-D", SEPARATOR, *ids], self._environ)
        found = read_jobs(result.out)
        if found is None or result.timed_out:
            raise QueryError(failure_text("qstat -f", result, is_garbage=not result.timed_out))
        numbers = {number_of(job_id) for job_id in found}
        over: list[str] = []
        silent: list[str] = []
        for job_id in ids:
            about = next((line for line in result.error.splitlines() if job_id in line.split()), "")
            if number_of(job_id) in numbers or _NEVER_WAS in about or _NO_HISTORY in about:
                continue
            (over if _IS_OVER in about else silent).append(job_id)
        if silent and (len(ids) == 1 or not found):
            if result.code:
                raise QueryError(failure_text("qstat -f", result))
            raise QueryError(f"qstat -f shows nothing of job {silent[0]}")
        for job_id in silent:
            one, is_over = self._query_some([job_id], *flags)
            found |= one
            over += is_over
        return found, over


def is_pbs(environ: Mapping[str, str]) -> bool:
    """Return whether the qstat on PATH is PBS's. Grid Engine and Torque have commands of the same names; only PBS
    prints `pbs_version = 23.06.06`."""
    result = run_command(["qstat", "--version"], strip_scheduler_environment(environ), _ASK_S)
    return "pbs_version" in result.out + result.error


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
