"""Slurm: tasks of srun, batch scripts, and the shell of salloc (srun(1), sbatch(1), "OUTPUT ENVIRONMENT VARIABLES").

A step may be smaller than its job, so in a step the step's own variables count. SLURM_LAUNCH_NODE_IPADDR is where
srun ran, which may be no node of the job: never the address where ranks meet.
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH, ClusterEnvironment, Variables
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.environments.hostlist import Host

# slurm/slurm.h: steps that are no srun's. A shell of salloc may be one (LaunchParameters=use_interactive_step).
_OWN_STEPS = ("4294967290", "4294967291", "4294967292", "4294967293")


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a task of srun, a batch script or the shell of salloc; None: this process is none."""
    if not around.has("SLURM_JOB_ID"):
        return None
    if around.has("SLURM_STEP_ID", "SLURM_PROCID") and around.text("SLURM_STEP_ID") not in _OWN_STEPS:
        return _step(around)
    return allocation(around)


def _step(around: Variables) -> ClusterEnvironment:
    counts = around.counts("SLURM_STEP_TASKS_PER_NODE")
    node_rank = around.number("SLURM_NODEID", unset=-1)
    tasks = counts[node_rank] if 0 <= node_rank < len(counts) else 1
    return around.cluster(
        "slurm",
        hosts=(around.hosts("SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST"),
        job="SLURM_JOB_ID",
        step="SLURM_STEP_ID",
        nnodes=around.fact("SLURM_STEP_NUM_NODES", 1),
        node_rank=(node_rank, "SLURM_NODEID"),
        gpus=around.fact("SLURM_GPUS_ON_NODE"),
        tasks_per_node=(tasks, "SLURM_STEP_TASKS_PER_NODE"),
        local_rank=around.fact("SLURM_LOCALID"),
        rank=around.fact("SLURM_PROCID", unset=-1),
        world_size=around.fact("SLURM_STEP_NUM_TASKS", 1),
    )


def allocation(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a whole job: a batch script runs on its first node, salloc's shell where it was called."""
    if not around.has("SLURM_JOB_ID"):
        return None
    hosts = _with_tasks(around, around.hosts("SLURM_JOB_NODELIST"))
    is_there = bool(hosts) and around.text("SLURMD_NODENAME") == hosts[0].name
    nproc = around.number("SLURM_NTASKS_PER_NODE") or (hosts[0].slots if len(hosts) == 1 else 0)
    return around.cluster(
        "slurm",
        form=BATCH,
        hosts=(hosts, "SLURM_JOB_NODELIST"),
        job="SLURM_JOB_ID",
        nnodes=around.fact("SLURM_JOB_NUM_NODES", 1),
        node_rank=(0, "SLURMD_NODENAME") if is_there else (-1, ""),
        nproc=(nproc, around.first("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")),
        gpus=around.fact("SLURM_GPUS_ON_NODE"),
    )


def _with_tasks(around: Variables, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Return the hosts, with their tasks if the user asked for tasks. Otherwise SLURM_TASKS_PER_NODE counts CPUs."""
    if not around.first("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        return hosts
    counts = around.counts("SLURM_TASKS_PER_NODE")
    if len(counts) != len(hosts) or not all(counts):
        return hosts
    return tuple(replace(host, slots=count) for host, count in zip(hosts, counts, strict=True))
