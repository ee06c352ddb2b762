"""Open MPI's mpirun and prterun (docs.open-mpi.org, "Environment variables set for processes").

OMPI_COMM_WORLD_NODE_RANK is not the node's rank. Where rank 0 is, mpirun does not say: the address in
OMPI_MCA_orte_hnp_uri is its own, and it need not run on any node of the job.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.environments.mpi import Words, site_of


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a process of Open MPI's mpirun; None: this process is none."""
    if not around.has("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        return None
    world = "OMPI_COMM_WORLD_"
    words = Words(
        rank=world + "RANK",
        size=world + "SIZE",
        local_rank=world + "LOCAL_RANK",
        local_size=world + "LOCAL_SIZE",
        job=around.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        most_nodes="OMPI_MCA_orte_num_nodes",
    )
    return site_of("openmpi", around, words)
