"""Which scheduler: the one that was asked for, or whose commands are there."""

from __future__ import annotations

import contextlib
import shutil

from infini_run.errors import UsageError
from infini_run.jobs.local import Local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.jobs.scheduler import Scheduler

_COMMANDS = {"slurm": "sbatch", "pbs": "qsub"}


def find_scheduler(name: str, above: str, environ: Mapping[str, str]) -> Scheduler:
    """above: where jobs are. Raises UsageError: it is not here, or with auto none is."""
    if name == "auto":
        name = _detect(environ)
    if name == "local":
        return Local(above, environ)
    command = _COMMANDS[name]
    if shutil.which(command, path=environ.get("PATH")) is None:
        raise UsageError(
            f"--scheduler={name}: {command} is not on PATH; --scheduler=local runs a job on this machine"
        )
    if name == "slurm":
        from infini_run.jobs.slurm import Slurm

        return Slurm(environ)
    from infini_run.jobs.pbs import Pbs

    return Pbs(environ)


def _detect(environ: Mapping[str, str]) -> str:
    """Grid Engine has a qsub too (Debian's gridengine-client), so that alone says nothing."""
    path = environ.get("PATH")
    if shutil.which("sbatch", path=path):
        return "slurm"
    if shutil.which("qsub", path=path):
        from infini_run.jobs.pbs import is_pbs

        if is_pbs(environ):
            return "pbs"
        raise UsageError(
            f"{shutil.which('qsub', path=path)} is not PBS's (Grid Engine?), and sbatch is not on PATH; "
            "--scheduler=local runs a job on this machine"
        )
    raise UsageError(
        "no scheduler is here: neither sbatch (Slurm) nor qsub (PBS) is on PATH; log in where jobs are submitted, or "
        "--scheduler=local runs it on this machine"
    )


def find_schedulers(above: str, environ: Mapping[str, str]) -> list[Scheduler]:
    """All that are here; this machine is always one."""
    found = []
    with contextlib.suppress(UsageError):
        found.append(find_scheduler("auto", above, environ))
    return [*found, Local(above, environ)]
