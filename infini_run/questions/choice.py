"""Which launch a question is about: its id, a unique beginning of it, the pid of one of its processes, or its job.

Ids and jobs are names that another user's launch can have, too: the user's own launch is meant then.
"""

from __future__ import annotations

import os

from infini_run.control.launches import LOST, SUSPENDED
from infini_run.errors import UsageError
from infini_run.plan.model import JOB_NAME, without_attempt
from infini_run.value_types import ISOLATED, MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.control.launches import FoundLaunch

_NAMED = 4  # launches that an error names


def choose_launch(found: Sequence[FoundLaunch], origin: str, word: str) -> FoundLaunch:
    """Return the launch that a question is about.

    Args:
        found: The launches of this machine.
        origin: The question, as it was given.
        word: The launch, as it was given. Empty: the only one.

    Raises:
        UsageError: There is none, there are several, or it cannot be asked.
    """
    if not word:
        fitting = [each for each in found if each.problem != LOST]
    else:
        fitting = _by_pid(found, int(word)) if word.isascii() and word.isdecimal() else _by_id(found, word)
    asked = f"{origin} {word}" if word else origin
    if not fitting and word and (in_job := _in_scheduler_job(found, word)):
        raise UsageError(f"{asked}: not a launch, but the job in which one runs; use {_names(in_job)}")
    if not fitting:
        what = "not a launch that runs here" if word else "no launch runs here"
        raise UsageError(f"{asked}: {what}; run infini-run --list")
    if len(fitting) > 1:
        raise UsageError(f"{asked}: {len(fitting)} launches run here ({_names(fitting)}); add the id of one")
    if fitting[0].facts is None:
        problem = f"is {LOST}" if fitting[0].problem == LOST else fitting[0].problem
        if problem == SUSPENDED:
            raise UsageError(f"{asked}: {fitting[0].launch_id} {problem}; run kill -CONT {fitting[0].pid}")
        raise UsageError(f"{asked}: {fitting[0].launch_id} {problem}; run infini-run --list")
    return fitting[0]


def _names(found: Sequence[FoundLaunch]) -> str:
    names = ", ".join(each.launch_id for each in found[:_NAMED])
    return names + (f", and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _in_scheduler_job(found: Sequence[FoundLaunch], word: str) -> list[FoundLaunch]:
    """The launches in a job of Slurm or PBS, whose number is no name of them: another machine's may be the same, and
    so may a pid."""
    jobs = ((each, each.facts.job.partition("=")[2]) for each in found if each.facts is not None)
    return [each for each, job in jobs if word in (job, job.partition(".")[0])]


def _by_id(found: Sequence[FoundLaunch], word: str) -> list[FoundLaunch]:
    same = [each for each in found if each.launch_id == without_attempt(word)] or _by_job(found, word)
    return _of_user(same, os.geteuid()) or [each for each in found if each.launch_id.startswith(word)]


def _of_user(found: list[FoundLaunch], uid: int) -> list[FoundLaunch]:
    """Return the launches of a user; if there are none, all."""
    return [each for each in found if each.uid == uid] or found


def _by_job(found: Sequence[FoundLaunch], name: str) -> list[FoundLaunch]:
    """The launch of a job of infini-job: its head, for its ranks may have started other launches."""
    of_job = [each for each in found if each.facts is not None and each.facts.job == f"{JOB_NAME}={name}"]
    of_job = _of_user(of_job, os.geteuid())
    return [each for each in of_job if each.facts is not None and each.facts.node < 0] or of_job


def _by_pid(found: Sequence[FoundLaunch], pid: int) -> list[FoundLaunch]:
    """The launch of a launcher, of a process with the mark of a rank, or of a launcher's guard, which has none."""
    mark, parent = without_attempt(_mark(pid)), _parent(pid)
    fitting = (
        [each for each in found if each.pid == pid]
        or [each for each in found if mark and each.launch_id == mark]
        or [each for each in found if parent and each.pid == parent]
        or [each for each in found if _outer_launcher(each.pid) in (pid, parent)]
    )
    return fitting if len(fitting) < 2 else _of_user(fitting, _user(pid))


def _user(pid: int) -> int:
    """Return the user of a process; -1 if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _outer_launcher(pid: int) -> int:
    """Return the pid of the launcher outside of --isolate, whose child is the one that has the socket. -1: none."""
    return _parent(pid) or -1 if pid and _variable(pid, ISOLATED) else -1


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()  # a name may have spaces
    except OSError:
        return 0
    return int(words[1]) if len(words) > 1 else 0


def _mark(pid: int) -> str:
    """Return the id of the launch whose process it is; empty if unknown."""
    return _variable(pid, MARKER_VARIABLE)


def _variable(pid: int, name: str) -> str:
    """Return a variable that a process has had since its start; empty if unknown."""
    start = f"{name}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return ""
    return next((each[len(start) :].decode("utf-8", "replace") for each in variables if each.startswith(start)), "")
