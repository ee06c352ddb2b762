"""PBS: OpenPBS, PBS Professional, Torque (qsub(1B), "ENVIRONMENT VARIABLES"; OpenPBS 23.06).

The job script is task 1 of the job. What pbsdsh and pbs_tmrsh start has another environment; on the first node
(the mother superior) without PBS_NODEFILE, so there the server's copy is read.
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH, STEP, ClusterEnvironment, Variables
from infini_run.environments.hostlist import Host, machines, quoted
from infini_run.errors import UsageError

_AUX = "/var/spool/pbs/aux/"


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a job script of PBS or Torque, or a task of pbsdsh; None: this process is none."""
    if not around.has("PBS_JOBID") or not around.first("PBS_NODEFILE", "PBS_ENVIRONMENT", "PBS_NODENUM"):
        return None
    path = around.text("PBS_NODEFILE")
    hosts = _hosts(around, path or _AUX + around.text("PBS_JOBID"))
    is_script = _task(around) == 1
    counts = [host.slots for host in hosts]
    is_even = len(set(counts)) == 1
    node_rank = 0 if is_script else around.number("PBS_NODENUM", unset=-1)
    file = "PBS_NODEFILE" if path else "PBS_JOBID"
    nproc = counts[0 if is_even else node_rank] if counts and (is_even or 0 <= node_rank < len(counts)) else 0
    return around.cluster(
        "pbs",
        form=BATCH if is_script else STEP,
        hosts=(hosts, file),
        job="PBS_JOBID",
        node_rank=(node_rank, "PBS_TASKNUM" if is_script else "PBS_NODENUM"),
        nproc=(nproc, file),
        counts=(() if is_even else tuple(counts), ""),
    )


def _hosts(around: Variables, path: str) -> tuple[Host, ...]:
    """Return the hosts in the order in which they first come. The file has a line per process (mpiprocs)."""
    names = around.file(path).split()
    for name in names:
        if not name.isascii() or not name.isprintable() or name.startswith("-"):
            raise UsageError(f"{quoted(path)}: {quoted(name)}: not a host name")
    return machines(names)


def _task(around: Variables) -> int:
    """PBS_TASKNUM is hexadecimal in OpenPBS: 08000001 is the first task on the second node."""
    text = around.text("PBS_TASKNUM") or "1"
    try:
        return int(text, 16) if text.isalnum() and text.isascii() else -1
    except ValueError:
        return -1
