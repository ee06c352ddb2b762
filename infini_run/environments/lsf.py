"""LSF (IBM Spectrum LSF, "Environment variables"), and jsrun's tasks in it.

LSB_MCPU_HOSTS is `host n host n`; LSB_HOSTS is not set in large jobs. jsrun (CSM machines: Summit, Sierra) runs
nothing on the first of them, the launch node.
"""

from __future__ import annotations

from infini_run.environments.environment import BATCH, ClusterEnvironment, Variables
from infini_run.environments.hostlist import Host
from infini_run.environments.mpi import Words, site_of
from infini_run.errors import UsageError
from infini_run.value_types import MAX_INT, number

_HOSTS = "LSB_MCPU_HOSTS"
_JSM = "JSM_NAMESPACE_"
_WORDS = Words(
    rank=_JSM + "RANK",
    size=_JSM + "SIZE",
    local_rank=_JSM + "LOCAL_RANK",
    local_size=_JSM + "LOCAL_SIZE",
    job="LSB_JOBID",
)


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a job of LSF, or a task of jsrun; None: this process is none."""
    if not around.has("LSB_JOBID", _HOSTS):
        return None
    hosts = _hosts(around)
    if around.has(_WORDS.rank, _WORDS.size):
        return site_of("lsf", around, _WORDS, (hosts[1:], _HOSTS))
    return around.cluster("lsf", form=BATCH, hosts=(hosts, _HOSTS), job="LSB_JOBID", node_rank=(0, _HOSTS))


def _hosts(around: Variables) -> tuple[Host, ...]:
    words = around.text(_HOSTS).split()
    names, counts = words[::2], [number(word) for word in words[1::2]]
    if not words or len(names) != len(counts) or not all(count and 1 <= count <= MAX_INT for count in counts):
        raise UsageError(f"{around.setting(_HOSTS)}: expected hosts, each with a number of slots")
    return tuple(Host(name=name, slots=count or 0) for name, count in zip(names, counts, strict=True))
