"""Slurm: tasks of srun, batch scripts, and the shell of salloc (srun(1), sbatch(1), "OUTPUT ENVIRONMENT VARIABLES").

A step may be smaller than its job, so in a step the step's own variables count. SLURM_LAUNCH_NODE_IPADDR is where
srun ran, which may be no node of the job: never the address where ranks meet.

A heterogeneous job has components with separate nodes and variables (..._HET_GROUP_0 and so on). Its batch script
has the plain variables of component 0 alone, and salloc's shell has none of them. A step of several components
numbers its nodes (SLURM_NODEID) component by component, but sorts SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE
by name (22.05; https://slurm.schedmd.com/heterogeneous_jobs.html).
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH, ClusterEnvironment, Variables
from infini_run.environments.hostlist import quoted
from infini_run.errors import UsageError, counted
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infini_run.environments.environment import Fact
    from infini_run.environments.hostlist import Host

_MOST_DIGITS = 9  # of a number of CPUs
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
    listed = around.hosts("SLURM_STEP_NODELIST")
    hosts = _in_order(around, listed, node_rank)
    at = listed.index(hosts[node_rank]) if 0 <= node_rank < len(hosts) else node_rank
    tasks = counts[at] if 0 <= at < len(counts) else 1
    return around.cluster(
        "slurm",
        hosts=(hosts, "SLURM_STEP_NODELIST"),
        job="SLURM_JOB_ID",
        step="SLURM_STEP_ID",
        nnodes=around.fact("SLURM_STEP_NUM_NODES", 1),
        node_rank=(node_rank, "SLURM_NODEID"),
        gpus=around.fact("SLURM_GPUS_ON_NODE"),
        is_mixed=(_is_mixed(around, hosts), "SLURM_HET_SIZE"),
        tasks_per_node=(tasks, "SLURM_STEP_TASKS_PER_NODE"),
        local_rank=around.fact("SLURM_LOCALID"),
        rank=around.fact("SLURM_PROCID", unset=-1),
        world_size=around.fact("SLURM_STEP_NUM_TASKS", 1),
    )


def explain_binding(environ: Mapping[str, str], cpus: int, online: int) -> str:
    """Return what to do if srun binds this process, and so its ranks, to fewer CPUs than its step has on this node.

    A site's TaskPluginParam=Cores does that, and from 22.05 to 23.02 srun does not read the script's --cpus-per-task
    (srun(1), SRUN_CPUS_PER_TASK).

    Args:
        environ: The environment of this process.
        cpus: How many CPUs it may use.
        online: How many this machine has. Slurm may be configured to count more.

    Returns:
        A sentence. Empty: it has them all, is no task of srun, or shares a node with other tasks, as a rank does.
    """
    here = environ.get("SLURM_CPUS_ON_NODE", "")
    is_task = environ.get("SLURM_STEP_ID", _OWN_STEPS[0]) not in _OWN_STEPS
    is_alone = environ.get("SLURM_STEP_NUM_TASKS") == environ.get("SLURM_STEP_NUM_NODES")
    if not (is_task and is_alone) or not (here.isascii() and here.isdecimal()) or len(here) > _MOST_DIGITS:
        return ""
    most = min(int(here), online)
    if cpus >= most:
        return ""
    return f"srun binds this process to {counted(cpus, 'CPU')} of {most} in its step; add --cpu-bind=none to srun"


def _in_order(around: Variables, listed: tuple[Host, ...], node_rank: int) -> tuple[Host, ...]:
    """Return the hosts of a step as SLURM_NODEID numbers them. Raises UsageError: this one has another number."""
    found = components(around)
    if not found:
        return listed
    names = {host.name for host in listed}
    hosts = tuple(host for component in found for host in component if host.name in names)
    here = around.text("SLURMD_NODENAME")
    if len(hosts) != len(listed) or (here and 0 <= node_rank < len(hosts) and hosts[node_rank].name != here):
        raise UsageError(
            f"{around.setting('SLURM_STEP_NODELIST')}, {around.setting('SLURM_NODEID')}, but "
            f"{around.settings(*_lists(len(found)))}: they contradict each other; use --engine=local to ignore them"
        )
    return hosts


def _is_mixed(around: Variables, hosts: tuple[Host, ...]) -> bool:
    """Return whether these hosts are of several components."""
    names = {host.name for host in hosts}
    return sum(any(host.name in names for host in component) for component in components(around)) > 1


def components(around: Variables) -> tuple[tuple[Host, ...], ...]:
    """Return the hosts of each component of a heterogeneous job, in the order of the components; empty for any other
    job. That may have inherited the variables of a heterogeneous job, whose script has submitted it.

    Args:
        around: The environment.

    Raises:
        UsageError: The variables of a component are missing or invalid, or a node is in two components.
    """
    if not around.has("SLURM_HET_SIZE") or around.text("SLURM_JOB_ID_HET_GROUP_0") != around.text("SLURM_JOB_ID"):
        return ()
    found = []
    names: set[str] = set()
    for name in _lists(around.number("SLURM_HET_SIZE", 1)):
        found.append(around.hosts(name))
        if not found[-1]:
            raise UsageError(
                f"{around.setting('SLURM_HET_SIZE')}, but {name} is not set; use --engine=local to ignore it"
            )
        twice = next((host.name for host in found[-1] if host.name in names), "")
        if twice:
            lists = around.settings(*_lists(len(found)))
            raise UsageError(f"{lists}: {quoted(twice)} is in two components; give each its own nodes")
        names.update(host.name for host in found[-1])
    return tuple(found)


def _lists(size: int) -> Iterator[str]:
    return (f"SLURM_JOB_NODELIST_HET_GROUP_{index}" for index in range(size))


def allocation(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a whole job: a batch script runs on its first node, salloc's shell where it was called."""
    if not around.has("SLURM_JOB_ID"):
        return None
    found = components(around)
    if found:
        return _heterogeneous(around, found)
    hosts = _with_tasks(around, around.hosts("SLURM_JOB_NODELIST"))
    nproc = around.number("SLURM_NTASKS_PER_NODE") or (hosts[0].slots if len(hosts) == 1 else 0)
    return around.cluster(
        "slurm",
        form=BATCH,
        hosts=(hosts, "SLURM_JOB_NODELIST"),
        job="SLURM_JOB_ID",
        nnodes=around.fact("SLURM_JOB_NUM_NODES", 1),
        node_rank=_first(around, hosts),
        nproc=(nproc, around.first("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")),
        gpus=around.fact("SLURM_GPUS_ON_NODE"),
    )


def _heterogeneous(around: Variables, found: tuple[tuple[Host, ...], ...]) -> ClusterEnvironment:
    """Return the facts of a job with these components. Its nodes may differ in GPUs and tasks."""
    groups = [_with_tasks(around, component, f"_HET_GROUP_{index}") for index, component in enumerate(found)]
    hosts = tuple(host for component in groups for host in component)
    names = " ".join(_lists(len(found)))
    return around.cluster(
        "slurm", form=BATCH, hosts=(hosts, names), job="SLURM_JOB_ID", node_rank=_first(around, hosts)
    )


def _first(around: Variables, hosts: tuple[Host, ...]) -> Fact:
    """Return node rank 0 if this node is the first, as it is for a batch script; else that it is unknown."""
    is_there = bool(hosts) and around.text("SLURMD_NODENAME") == hosts[0].name
    return (0, "SLURMD_NODENAME") if is_there else (-1, "")


def _with_tasks(around: Variables, hosts: tuple[Host, ...], of_component: str = "") -> tuple[Host, ...]:
    """Return the hosts, with their tasks if the user asked for tasks. Otherwise SLURM_TASKS_PER_NODE counts CPUs."""
    if not around.first(f"SLURM_NTASKS{of_component}", f"SLURM_NTASKS_PER_NODE{of_component}"):
        return hosts
    counts = around.counts(f"SLURM_TASKS_PER_NODE{of_component}")
    if len(counts) != len(hosts) or not all(counts):
        return hosts
    return tuple(replace(host, slots=count) for host, count in zip(hosts, counts, strict=True))
