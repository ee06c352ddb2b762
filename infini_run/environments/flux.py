"""Flux (flux-environment(7)). The hosts are not in the environment: `flux hostlist local` has them."""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.errors import UsageError


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a task of `flux run` (flux-environment(7)); None: this process is none."""
    if not around.has("FLUX_JOB_ID", "FLUX_TASK_RANK"):
        return None
    rank, size = around.number("FLUX_TASK_RANK"), around.number("FLUX_JOB_SIZE", 1)
    nnodes, local_rank = around.number("FLUX_JOB_NNODES", 1), around.number("FLUX_TASK_LOCAL_ID")
    if nnodes and size % nnodes:
        numbers = f"{around.setting('FLUX_JOB_SIZE')} tasks, {around.setting('FLUX_JOB_NNODES')}"
        raise UsageError(f"{numbers}: expected the same number on each node; run one per node, or as many on all")
    tasks = max(1, size // nnodes) if nnodes else 1
    return around.cluster(
        "flux",
        job="FLUX_JOB_ID",
        nnodes=(nnodes, "FLUX_JOB_NNODES"),
        node_rank=((rank - local_rank) // tasks if rank >= local_rank else rank, "FLUX_TASK_RANK"),
        tasks_per_node=(tasks, "FLUX_JOB_SIZE"),
        local_rank=(local_rank, "FLUX_TASK_LOCAL_ID"),
        rank=(rank, "FLUX_TASK_RANK"),
        world_size=(size, "FLUX_JOB_SIZE"),
    )
