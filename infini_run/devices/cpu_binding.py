"""Which CPUs and whose memory each rank gets: --bind. Pure, but for `plan_bindings`.

The rules: a rank is beside its GPU where that is known; `numa` and `socket` bind to all of a domain, which ranks may
share; `cores` gives whole cores and gives none twice. No rank gets a CPU that this process may not use.
"""

from __future__ import annotations

import os

from infini_run.devices.topology import format_list, memory_allowed, pci_node, read_topology
from infini_run.errors import UsageError, counted
from infini_run.record import record, replace
from infini_run.system.cgroup import count_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infini_run.devices.topology import Core, Topology


@record
class CpuBinding:
    """Where one rank runs.

    Attributes:
        cpus: the CPUs that it may use.
        nodes: the NUMA nodes whose memory it prefers; none: not known.
        threads: its fair share of these CPUs, and of what a cgroup's quota leaves; at least 1.
    """

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    threads: int

    def __str__(self) -> str:
        cpus = f"CPU{'s' if len(self.cpus) > 1 else ''} {format_list(self.cpus)}"
        nodes = f", memory of node{'s' if len(self.nodes) > 1 else ''} {format_list(self.nodes)}"
        return cpus + nodes if self.nodes else cpus


def plan_bindings(
    mode: str, nproc: int, bus_ids: Sequence[Sequence[str | None]], root: str = "", cpus: Iterable[int] = ()
) -> tuple[CpuBinding, ...]:
    """Return what each local rank of this machine is bound to.

    Args:
        mode: numa, socket or cores, as for --bind.
        nproc: the number of local ranks.
        bus_ids: PCI bus ids of each rank's GPUs; empty: not known.
        root: is put before /sys and /proc.
        cpus: those that this process may use; empty: its affinity.

    Raises:
        UsageError: there are fewer cores than ranks.
    """
    ours = frozenset(cpus) or frozenset(os.sched_getaffinity(0))
    near = [[node for bus in buses if (node := pci_node(bus, root)) is not None] for buses in bus_ids]
    places = place(read_topology(ours, memory_allowed(f"{root}/proc/self/status"), root), mode, nproc, near)
    quota = count_cpus(len(ours), f"{root}/proc/self/cgroup", f"{root}/proc/self/mountinfo")
    if quota == len(ours):
        return places
    return tuple(replace(one, threads=min(one.threads, max(1, quota // nproc))) for one in places)


def place(topology: Topology, mode: str, nproc: int, near: Sequence[Sequence[int]] = ()) -> tuple[CpuBinding, ...]:
    """Divide the machine among local ranks.

    Args:
        topology: the CPUs to divide.
        mode: numa, socket or cores.
        nproc: the number of local ranks.
        near: NUMA nodes of each rank's GPUs, none if they are not known; empty: known of no rank.

    Raises:
        UsageError: there are fewer cores than ranks.
    """
    homes = [_homes(topology, near[rank]) if near else () for rank in range(nproc)]
    if mode == "cores":
        shares = _divide(topology, nproc, [nodes[0] if nodes else None for nodes in homes])
    else:
        shares = _join(topology, mode, homes)
    sharers: dict[int, int] = {}
    for share in shares:
        for core in share:
            sharers[core.cpus[0]] = sharers.get(core.cpus[0], 0) + 1
    return tuple(_place(topology, share, sharers) for share in shares)


def _place(topology: Topology, cores: Sequence[Core], sharers: dict[int, int]) -> CpuBinding:
    nodes = {topology.nearest(node, topology.memory) for node in sorted({core.node for core in cores})}
    fair = sum(len(core.cpus) / sharers[core.cpus[0]] for core in cores)
    return CpuBinding(
        cpus=tuple(sorted(cpu for core in cores for cpu in core.cpus)),
        nodes=tuple(sorted(node for node in nodes if node is not None)),
        threads=max(1, int(fair + 1e-9)),
    )


def _homes(topology: Topology, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes with usable CPUs that are closest to a rank's GPUs, each once, in the order of the GPUs."""
    having = {core.node for core in topology.cores}
    found = [topology.nearest(node, having) for node in nodes]
    return tuple(dict.fromkeys(node for node in found if node is not None))


# ---- numa and socket: all of a domain


def _join(topology: Topology, mode: str, homes: Sequence[tuple[int, ...]]) -> list[list[Core]]:
    domains: dict[int, list[Core]] = {}
    for core in topology.cores:
        domains.setdefault(core.node if mode == "numa" else core.socket, []).append(core)
    shares = []
    for rank, nodes in enumerate(homes):
        beside = [cores for cores in domains.values() if any(core.node in nodes for core in cores)]
        whole = [core for cores in beside for core in cores]
        shares.append(whole or _nth_domain(list(domains.values()), rank, len(homes)))
    return shares


def _nth_domain(domains: list[list[Core]], rank: int, nproc: int) -> list[Core]:
    """Ranks side by side, and as many in a domain as it has of the CPUs: the one with the CPU in the middle of the
    rank's even share of all."""
    sizes = [sum(len(core.cpus) for core in cores) for cores in domains]
    middle = (2 * rank + 1) * sum(sizes)
    for cores, size in zip(domains[:-1], sizes, strict=False):
        middle -= 2 * nproc * size
        if middle < 0:
            return cores
    return domains[-1]


# ---- cores: none twice


def _divide(topology: Topology, nproc: int, homes: Sequence[int | None]) -> list[list[Core]]:
    cores = list(topology.cores)
    if len(cores) < nproc:
        cpus = format_list(cpu for core in cores for cpu in core.cpus)
        raise UsageError(
            f"--bind=cores: needs whole cores for {counted(nproc, 'rank')}, and {len(cores)} can be used here (CPUs "
            f"{cpus}); start fewer ranks, or use --bind=numa, where ranks share"
        )
    if all(home is None for home in homes):
        return _split(cores, nproc)
    of_node: dict[int, list[Core]] = {}
    for core in cores:
        of_node.setdefault(core.node, []).append(core)
    shares: list[list[Core]] = [[] for _ in range(nproc)]
    for node, ranks in _assign_nodes(homes, {node: len(its) for node, its in of_node.items()}).items():
        for rank, share in zip(ranks, _split(of_node[node], len(ranks)), strict=True):
            shares[rank] = share
    return shares


def _assign_nodes(homes: Sequence[int | None], room: dict[int, int]) -> dict[int, list[int]]:
    """Return the ranks of each NUMA node: its own while it has a core per rank, then those of others where most is
    left."""
    ranks_of: dict[int, list[int]] = {node: [] for node in room}
    homeless = []
    for rank, home in enumerate(homes):
        if home is not None and len(ranks_of[home]) < room[home]:
            ranks_of[home].append(rank)
        else:
            homeless.append(rank)
    for rank in homeless:
        emptiest = max(room, key=lambda node: (room[node] / (len(ranks_of[node]) + 1), -node))
        ranks_of[emptiest].append(rank)
    return {node: sorted(ranks) for node, ranks in ranks_of.items() if ranks}


def _split(cores: list[Core], parts: int) -> list[list[Core]]:
    """Side by side, and none has more than one core more than another."""
    bounds = [part * len(cores) // parts for part in range(parts + 1)]
    return [cores[bounds[part] : bounds[part + 1]] for part in range(parts)]
