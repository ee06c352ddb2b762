"""PMIx alone (prterun without an MPI, `srun --mpi=pmix` is Slurm's): a rank, and neither sizes nor hosts.

What it knows, its server tells to a PMIx client; we are none, so the flags must say how many nodes there are.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables, derived_port


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a process of any launcher that speaks PMIx and that no other detector knows; None: this
    process is none.

    Args:
        around: the environment, and the files that it names.

    Raises:
        UsageError: a variable makes no sense; the message shows it.
    """
    if not around.has("PMIX_RANK", "PMIX_NAMESPACE"):
        return None
    return ClusterEnvironment(
        engine="pmix",
        node_rank=around.number("PMIX_RANK"),
        master_port=derived_port(around.text("PMIX_NAMESPACE")),
        job_id=around.text("PMIX_NAMESPACE"),
        sources=around.sources(derived=("PMIX_NAMESPACE",), node_rank="PMIX_RANK", job_id="PMIX_NAMESPACE"),
    )
