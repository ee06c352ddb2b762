"""Grid Engine and its descendants (sge_pe(5)): PE_HOSTFILE has lines `host slots queue range`, this host first."""

from __future__ import annotations

from infini_run.environments.environment import BATCH, ClusterEnvironment, Variables
from infini_run.environments.hostlist import Host, quoted
from infini_run.errors import UsageError
from infini_run.value_types import MAX_INT, number


def detect(around: Variables) -> ClusterEnvironment | None:
    """Return the facts of a parallel job of Grid Engine (sge_pe(5), PE_HOSTFILE); None: this process is none."""
    if not around.has("PE_HOSTFILE", "JOB_ID"):
        return None
    hosts = _hosts(around)
    if not hosts:
        raise UsageError(f"{around.setting('PE_HOSTFILE')}: no host in it, or it cannot be read")
    file = "PE_HOSTFILE"
    return around.cluster("gridengine", form=BATCH, hosts=(hosts, file), job="JOB_ID", node_rank=(0, file))


def _hosts(around: Variables) -> tuple[Host, ...]:
    """Return the hosts with their slots. A host that two queues give has two lines."""
    slots: dict[str, int] = {}
    path = around.text("PE_HOSTFILE")
    for line in around.file(path).splitlines():
        words = line.split()
        count = number(words[1]) if len(words) > 1 else None
        if words and (count is None or not 1 <= count <= MAX_INT):
            raise UsageError(f"{quoted(path)}: {quoted(line)}: expected a host and its slots")
        if words:
            slots[words[0]] = slots.get(words[0], 0) + (count or 0)
    return tuple(Host(name=name, slots=count) for name, count in slots.items())
