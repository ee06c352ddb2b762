"""Kubernetes, a LeaderWorkerSet (sigs.k8s.io/lws, since 0.6): one group of pods, the leader first.

Each pod has its own network, so the port is the default one.
"""

from __future__ import annotations

from infini_run.environments.environment import ClusterEnvironment, Variables


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a pod of a LeaderWorkerSet; None: this process is none."""
    if not around.has("LWS_LEADER_ADDRESS"):
        return None
    return around.cluster(
        "lws",
        nnodes=around.fact("LWS_GROUP_SIZE", 1),
        node_rank=around.fact("LWS_WORKER_INDEX", unset=-1),
        master_addr=(around.text("LWS_LEADER_ADDRESS"), "LWS_LEADER_ADDRESS"),
    )
