"""Variables of torch that are set for a whole pod: PyTorchJob v1, Alibaba's DLC, Volcano, Azure ML, Lightning.

Here WORLD_SIZE and RANK count pods, while in a rank they count ranks. A rank has LOCAL_RANK beside them, so without
LOCAL_RANK they are taken to count pods. That is a guess, so it is always printed.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables
from infini_run.record import replace

_NODES = ("NNODES", "NUM_NODES", "AZUREML_NODE_COUNT")


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a pod with MASTER_ADDR and its node's index in variables (Kubeflow, Azure ML); None: this
    process is none."""
    if not around.has("MASTER_ADDR") or around.first("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        return None
    if around.has("NODE_RANK"):
        return _site(around, around.first(*_NODES), "NODE_RANK")
    if around.has("WORLD_SIZE", "RANK"):
        return _site(around, "WORLD_SIZE", "RANK")
    return None


def _site(around: Variables, size: str, rank: str) -> ClusterEnvironment:
    counted = f"{around.setting(size)} and {around.setting(rank)}" if size else around.setting(rank)
    cluster = around.cluster(
        "pod_variables",
        nnodes=around.fact(size, 1) if size else (0, ""),
        node_rank=around.fact(rank, unset=-1),
        nproc=around.fact("NPROC_PER_NODE", 1),
        master_addr=(around.text("MASTER_ADDR"), "MASTER_ADDR"),
        master_port=around.fact("MASTER_PORT", 1),
    )
    return replace(cluster, warning=f"{counted} are taken to count nodes, not ranks (there is no LOCAL_RANK)")
