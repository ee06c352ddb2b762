"""The choice of a scheduler: the user's, or of those with commands on PATH the first one that answers.

The one rule: the trouble of one scheduler is not another's. Commands on PATH do not make a scheduler: Debian's
slurm-client without a configuration is no Slurm.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.jobs.errors import QueryError
from infini_run.jobs.scheduler import Facts
from infini_run.system.shell import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from infini_run.jobs.folder.records import Submission
    from infini_run.jobs.scheduler import Scheduler

_COMMANDS = {"slurm": "sbatch", "pbs": "qsub"}
_HERE = "use --scheduler=local to run it on this machine"


def find_scheduler(name: str, above: str, environ: Mapping[str, str]) -> Scheduler:
    """Return the scheduler of that name.

    Args:
        name: slurm, pbs or local.
        above: The directory of all jobs.
        environ: The caller's.

    Raises:
        UsageError: Its command is not on PATH.
    """
    if name == "local":
        from infini_run.jobs.schedulers.local import Local

        return Local(above, environ)
    command = _COMMANDS[name]
    if not find_program(command, environ.get("PATH", os.defpath)):
        raise UsageError(
            f"--scheduler={name}: {command} is not on PATH; use --scheduler=local to run a job on this machine"
        )
    if name == "slurm":
        from infini_run.jobs.schedulers.slurm import Slurm

        return Slurm(environ)
    from infini_run.jobs.schedulers.pbs import Pbs

    return Pbs(environ)


class Absent:
    """A scheduler that is not here, of a job whose directory names it: each question raises that."""

    has_accounting = False

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self._problem = problem

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(self._problem)

    facts = check = submit = find = query = cancel = requeue = refuse


def scheduler_of(order: Submission, above: str, environ: Mapping[str, str]) -> Scheduler:
    """Return the scheduler of a job; one that is not here is `Absent`, since what the directory knows needs no
    scheduler.

    Args:
        order: The submission.
        above: The directory of all jobs.
        environ: The caller's.
    """
    try:
        return find_scheduler(order.request.scheduler, above, environ)
    except UsageError as error:
        return Absent(order.request.scheduler, str(error))


def choose(
    name: str, above: str, environ: Mapping[str, str], *, print_line: Callable[[str], None]
) -> tuple[Scheduler, Facts]:
    """Return the scheduler to submit to, and what it has.

    Args:
        name: slurm, pbs, local; auto: the first one that answers.
        above: The directory of all jobs.
        environ: The caller's.
        print_line: Gets the words of those that do not answer.

    Raises:
        UsageError: It is not here; with auto, none is.
        QueryError: It does not answer; with auto, none does.
    """
    if name != "auto":
        scheduler = find_scheduler(name, above, environ)
        return scheduler, scheduler.facts()
    troubles: list[Facts] = []
    for found in _found(environ):
        scheduler = find_scheduler(found, above, environ)
        facts = facts_of(scheduler)
        if not facts.query_error:
            for trouble in troubles:
                print_line(f"{trouble.scheduler} does not respond: {trouble.query_error}; using {found}, which does")
            return scheduler, facts
        troubles.append(facts)
    reasons = "; ".join(f"{trouble.scheduler}: {trouble.query_error}" for trouble in troubles)
    raise QueryError(f"no scheduler responds: {reasons}; {_HERE}")


def facts_of(scheduler: Scheduler) -> Facts:
    """Return what a scheduler has; of one that does not answer, `query_error` says why."""
    try:
        return scheduler.facts()
    except QueryError as error:
        return Facts(scheduler=scheduler.name, query_error=str(error))


def find_schedulers(above: str, environ: Mapping[str, str]) -> list[Scheduler]:
    """Return all schedulers that are here, whether or not they answer; this machine is always one."""
    try:
        names = _found(environ)
    except UsageError:
        names = []
    return [find_scheduler(name, above, environ) for name in [*names, "local"]]


def _found(environ: Mapping[str, str]) -> list[str]:
    """Return the schedulers whose commands are on PATH. Grid Engine has a qsub too (Debian's gridengine-client), so
    that alone proves nothing. Raises UsageError if there are none."""
    path = environ.get("PATH", os.defpath)
    names = [name for name, command in _COMMANDS.items() if find_program(command, path)]
    if "pbs" in names:
        from infini_run.jobs.schedulers.pbs import is_pbs

        if not is_pbs(environ):
            names.remove("pbs")
            if not names:
                raise UsageError(
                    f"{find_program('qsub', path)} is not from PBS (Grid Engine?), and sbatch is not on PATH; "
                    "use --scheduler=local to run a job on this machine"
                )
    if not names:
        raise UsageError(
            "no scheduler found: neither sbatch (Slurm) nor qsub (PBS) is on PATH; run infini-job where jobs are "
            f"submitted, or {_HERE}"
        )
    return names
