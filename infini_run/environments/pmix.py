"""PMIx alone (prterun without an MPI, `srun --mpi=pmix` is Slurm's): a rank, and neither sizes nor hosts.

Only a PMIx client can ask the server for the rest, and this process is none, so the flags must say how many nodes
there are.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a process of any launcher that speaks PMIx and that no other detector knows; None: this
    process is none."""
    if not around.has("PMIX_RANK", "PMIX_NAMESPACE"):
        return None
    return around.cluster("pmix", job="PMIX_NAMESPACE", node_rank=around.fact("PMIX_RANK"))
