"""LSF (IBM Spectrum LSF, "Environment variables"), and jsrun's tasks in it.

LSB_MCPU_HOSTS is `host n host n`; LSB_HOSTS is not set in large jobs. jsrun (CSM machines: Summit, Sierra) runs
nothing on the first of them, the launch node.
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH, ClusterEnvironment, Variables, derived_port
from infini_run.environments.hostlist import Host
from infini_run.environments.mpi import Words, site_of
from infini_run.errors import UsageError
from infini_run.record import replace
from infini_run.value_types import MAX_INT, number

_HOSTS = "LSB_MCPU_HOSTS"
_JSM = "JSM_NAMESPACE_"


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a job of LSF, or a task of jsrun; None: this process is none.

    Args:
        around: the environment, and the files that it names.

    Raises:
        UsageError: a variable makes no sense; the message shows it.
    """
    if not around.has("LSB_JOBID", _HOSTS):
        return None
    job, hosts = around.text("LSB_JOBID"), _hosts(around)
    if around.has(_JSM + "RANK", _JSM + "SIZE"):
        return _task(around, job, hosts[1:])
    return ClusterEnvironment(
        engine="lsf",
        form=BATCH,
        nnodes=len(hosts),
        node_rank=0,
        hosts=hosts,
        master_addr=hosts[0].name,
        master_port=derived_port(job),
        job_id=job,
        sources=around.sources(
            derived=("LSB_JOBID",),
            nnodes=_HOSTS,
            node_rank=_HOSTS,
            hosts=_HOSTS,
            master_addr=_HOSTS,
            job_id="LSB_JOBID",
        ),
    )


def _task(around: Variables, job: str, hosts: tuple[Host, ...]) -> ClusterEnvironment:
    """A resource set of jsrun may be less than all hosts: only if their number fits are they ours."""
    words = Words(
        rank=_JSM + "RANK",
        size=_JSM + "SIZE",
        local_rank=_JSM + "LOCAL_RANK",
        local_size=_JSM + "LOCAL_SIZE",
        job="LSB_JOBID",
    )
    cluster = site_of("lsf", around, words)
    if len(hosts) != cluster.nnodes:
        return cluster
    sources = cluster.sources + around.sources(hosts=_HOSTS, master_addr=_HOSTS)
    return replace(cluster, hosts=hosts, master_addr=hosts[0].name, sources=sources)


def _hosts(around: Variables) -> tuple[Host, ...]:
    words = around.text(_HOSTS).split()
    names, counts = words[::2], [number(word) for word in words[1::2]]
    if not words or len(names) != len(counts) or not all(count and 1 <= count <= MAX_INT for count in counts):
        raise UsageError(f"{around.setting(_HOSTS)}: hosts, each with a number of slots, are expected")
    return tuple(Host(name=name, slots=count or 0) for name, count in zip(names, counts, strict=True))
