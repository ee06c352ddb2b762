"""Flux (flux-environment(7)). The hosts are not in the environment: `flux hostlist local` has them."""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables, derived_port
from infini_run.errors import UsageError


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a task of `flux run` (flux-environment(7)); None: this process is none.

    Args:
        around: the environment, and the files that it names.

    Raises:
        UsageError: a variable makes no sense; the message shows it.
    """
    if not around.has("FLUX_JOB_ID", "FLUX_TASK_RANK"):
        return None
    rank, size = around.number("FLUX_TASK_RANK"), around.number("FLUX_JOB_SIZE", 1)
    nnodes, local_rank = around.number("FLUX_JOB_NNODES", 1), around.number("FLUX_TASK_LOCAL_ID")
    if nnodes and size % nnodes:
        numbers = f"{around.setting('FLUX_JOB_SIZE')} tasks, {around.setting('FLUX_JOB_NNODES')}"
        raise UsageError(f"{numbers}: start one for each node, or the same number on all")
    tasks = max(1, size // nnodes) if nnodes else 1
    return ClusterEnvironment(
        engine="flux",
        nnodes=nnodes,
        node_rank=(rank - local_rank) // tasks if rank >= local_rank else rank,
        master_port=derived_port(around.text("FLUX_JOB_ID")),
        job_id=around.text("FLUX_JOB_ID"),
        tasks_per_node=tasks,
        local_rank=local_rank,
        rank=rank,
        world_size=size,
        sources=around.sources(
            derived=("FLUX_JOB_ID",),
            nnodes="FLUX_JOB_NNODES",
            node_rank="FLUX_TASK_RANK",
            job_id="FLUX_JOB_ID",
            tasks_per_node="FLUX_JOB_SIZE",
            local_rank="FLUX_TASK_LOCAL_ID",
            rank="FLUX_TASK_RANK",
            world_size="FLUX_JOB_SIZE",
        ),
    )
