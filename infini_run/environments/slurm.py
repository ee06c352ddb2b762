"""Slurm: tasks of srun, batch scripts, and the shell of salloc (srun(1), sbatch(1), "OUTPUT ENVIRONMENT VARIABLES").

A step may be smaller than its job, so in a step the step's own variables count. SLURM_LAUNCH_NODE_IPADDR is where
srun ran, which may be no node of the job: never the address where ranks meet.
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH, ClusterEnvironment, Variables, derived_port
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.environments.hostlist import Host

# slurm/slurm.h: steps that are no srun's. A shell of salloc may be one (LaunchParameters=use_interactive_step).
_OWN_STEPS = ("4294967290", "4294967291", "4294967292", "4294967293")


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a task of srun, a batch script or the shell of salloc; None: this process is none.

    Args:
        around: the environment, and the files that it names.

    Raises:
        UsageError: a variable makes no sense; the message shows it.
    """
    if not around.has("SLURM_JOB_ID"):
        return None
    if around.has("SLURM_STEP_ID", "SLURM_PROCID") and around.text("SLURM_STEP_ID") not in _OWN_STEPS:
        return _step(around)
    return allocation(around)


def _step(around: Variables) -> ClusterEnvironment:
    job, step = around.text("SLURM_JOB_ID"), around.number("SLURM_STEP_ID")
    hosts = around.hosts("SLURM_STEP_NODELIST")
    counts = around.counts("SLURM_STEP_TASKS_PER_NODE")
    node_rank = around.number("SLURM_NODEID", unset=-1)
    tasks = counts[node_rank] if 0 <= node_rank < len(counts) else 1
    return ClusterEnvironment(
        engine="slurm",
        nnodes=around.number("SLURM_STEP_NUM_NODES", 1) or len(hosts),
        node_rank=node_rank,
        gpus=around.number("SLURM_GPUS_ON_NODE"),
        hosts=hosts,
        master_addr=hosts[0].name if hosts else "",
        master_port=derived_port(job, step),
        job_id=f"{job}.{step}",
        tasks_per_node=tasks,
        local_rank=around.number("SLURM_LOCALID"),
        rank=around.number("SLURM_PROCID", unset=-1),
        world_size=around.number("SLURM_STEP_NUM_TASKS", 1),
        sources=around.sources(
            derived=("SLURM_JOB_ID", "SLURM_STEP_ID"),
            nnodes=around.first("SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"),
            node_rank="SLURM_NODEID",
            gpus="SLURM_GPUS_ON_NODE",
            hosts="SLURM_STEP_NODELIST",
            master_addr="SLURM_STEP_NODELIST",
            job_id="SLURM_JOB_ID",
            tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
            local_rank="SLURM_LOCALID",
            rank="SLURM_PROCID",
            world_size="SLURM_STEP_NUM_TASKS",
        ),
    )


def allocation(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a whole job: a batch script runs on its first node, salloc's shell where it was called.

    Args:
        around: the environment of a job (SLURM_JOB_ID is set).

    Raises:
        UsageError: a variable makes no sense.
    """
    job = around.text("SLURM_JOB_ID")
    if not job:
        return None
    hosts = _with_tasks(around, around.hosts("SLURM_JOB_NODELIST"))
    is_there = bool(hosts) and around.text("SLURMD_NODENAME") == hosts[0].name
    return ClusterEnvironment(
        engine="slurm",
        form=BATCH,
        nnodes=around.number("SLURM_JOB_NUM_NODES", 1) or len(hosts),
        node_rank=0 if is_there else -1,
        nproc=around.number("SLURM_NTASKS_PER_NODE") or (hosts[0].slots if len(hosts) == 1 else 0),
        gpus=around.number("SLURM_GPUS_ON_NODE"),
        hosts=hosts,
        master_addr=hosts[0].name if hosts else "",
        master_port=derived_port(job),
        job_id=job,
        sources=around.sources(
            derived=("SLURM_JOB_ID",),
            nnodes=around.first("SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"),
            node_rank="SLURMD_NODENAME" if is_there else "",
            nproc=around.first("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"),
            gpus="SLURM_GPUS_ON_NODE",
            hosts="SLURM_JOB_NODELIST",
            master_addr="SLURM_JOB_NODELIST",
            job_id="SLURM_JOB_ID",
        ),
    )


def _with_tasks(around: Variables, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """The hosts, each with its tasks, where the user has asked for tasks. Where nobody has, SLURM_TASKS_PER_NODE
    counts CPUs."""
    if not around.first("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        return hosts
    counts = around.counts("SLURM_TASKS_PER_NODE")
    if len(counts) != len(hosts) or not all(counts):
        return hosts
    return tuple(replace(host, slots=count) for host, count in zip(hosts, counts, strict=True))
