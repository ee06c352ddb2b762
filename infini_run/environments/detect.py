"""The search for the scheduler or launcher under which this process runs. The first detector that recognizes its
variables wins.

The order is from the inside out: under mpirun in a Slurm job both have set variables, and the tasks are mpirun's.
Schedulers whose job script runs one process come after everything that may run inside of one, and containers last.
"""

from __future__ import annotations

from infini_run.environments import (
    flux,
    gridengine,
    hydra,
    kubernetes,
    lsf,
    lws,
    openmpi,
    pals,
    pbs,
    pmix,
    pod_variables,
    sagemaker,
    slurm,
)
from infini_run.environments.environment import BATCH, STEP, ClusterEnvironment, Variables, checked
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.environments.environment import Reader

    # The facts, or None: this process is none of its kind. Raises UsageError: a variable is invalid.
    Detector = Callable[[Variables], ClusterEnvironment | None]

DETECTORS: tuple[Detector, ...] = (
    openmpi.detect,
    hydra.detect,
    flux.detect,
    slurm.detect,
    pals.detect,
    pmix.detect,
    pbs.detect,
    lsf.detect,
    gridengine.detect,
    lws.detect,
    pod_variables.detect,
    kubernetes.detect,
    sagemaker.detect,
)
_ALLOCATIONS: tuple[Detector, ...] = (slurm.allocation, pbs.detect, lsf.detect, gridengine.detect)


def detect(environ: Mapping[str, str], read: Reader) -> ClusterEnvironment | None:
    """Return the facts that the environment holds; None if there are none.

    Args:
        read: returns the text of a file, or raises OSError.

    Raises:
        UsageError: variables contradict each other, or have impossible values. Nothing else is raised.
    """
    around = Variables(environ, read)
    for detector in DETECTORS:
        cluster = detector(around)
        if cluster is not None:
            return _within(checked(cluster), around)
    return None


def _within(cluster: ClusterEnvironment, around: Variables) -> ClusterEnvironment:
    """Add the hosts of the allocation that an MPI launcher fills: it does not name them itself, but uses their
    order."""
    if cluster.form != STEP or cluster.master_addr or cluster.nnodes < 2:
        return cluster
    for allocation in _ALLOCATIONS:
        outer = allocation(around)
        if outer is not None and outer.form == BATCH and len(outer.hosts) == cluster.nnodes:
            source = outer.source("hosts")
            sources = (*cluster.sources, ("hosts", source), ("master_addr", source))
            if not cluster.master_port:
                sources += (("master_port", outer.source("master_port")),)
            return replace(
                cluster,
                hosts=outer.hosts,
                master_addr=outer.hosts[0].name,
                master_port=cluster.master_port or outer.master_port,
                sources=sources,
            )
    return cluster
