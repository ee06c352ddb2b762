"""What /sys says of this machine's CPUs: cores, sockets, NUMA nodes, and which node a PCI device is at.

The rule: only usable CPUs count (the affinity and the nodes of the cpuset), and what the kernel does not tell
is not guessed: a CPU without siblings is a core, a machine without nodes is one node without a number for memory.
Source: the kernel's Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node, cpuset(7).
"""

from __future__ import annotations

import os

from infini_run.record import record
from infini_run.system.cgroup import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"


@record
class Core:
    """The CPUs of one core (SMT siblings) that this process may use.

    Attributes:
        cpus: their numbers.
        socket: the number of the package.
        node: the NUMA node; -1: the kernel does not tell.
    """

    cpus: tuple[int, ...]
    socket: int
    node: int


@record
class Topology:
    """The part of a machine that this process may use.

    Attributes:
        cores: by node, socket and number.
        memory: the NUMA nodes whose memory it may use.
        distances: between each two NUMA nodes, as the kernel gives them.
    """

    cores: tuple[Core, ...]
    memory: tuple[int, ...]
    distances: Mapping[int, Mapping[int, int]]

    def nearest(self, node: int, among: Iterable[int]) -> int | None:
        """Return the closest of some NUMA nodes; None if no distance is known.

        Args:
            node: from which the distances count. If it is among the others, it is the closest.
            among: the nodes to choose from.
        """
        candidates = frozenset(among)
        if node in candidates:
            return node
        known = [(far, other) for other, far in self.distances.get(node, {}).items() if other in candidates]
        return min(known)[1] if known else None


def read_topology(cpus: Iterable[int], memory: Iterable[int] | None = None, root: str = "") -> Topology:
    """Read the part of the machine that some CPUs are.

    Args:
        cpus: those that this process may use.
        memory: the NUMA nodes whose memory this process may use; None: no cpuset limits them.
        root: is put before /sys.
    """
    numbers = _node_numbers(root)
    node_of = {cpu: node for node in numbers for cpu in parse_list(read_text(f"{root}{_NODE}/node{node}/cpulist"))}
    cores = tuple(
        sorted(_cores(frozenset(cpus), node_of, root), key=lambda core: (core.node, core.socket, core.cpus))
    )
    return Topology(
        cores=cores,
        memory=_memory(numbers, memory, root),
        distances={node: _distances(node, numbers, root) for node in numbers},
    )


def _node_numbers(root: str) -> tuple[int, ...]:
    try:
        names = os.listdir(root + _NODE)
    except OSError:  # a kernel without NUMA, or a container without /sys
        return ()
    return tuple(sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal()))


def _cores(cpus: frozenset[int], node_of: Mapping[int, int], root: str) -> list[Core]:
    cores: list[Core] = []
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu in seen:
            continue
        siblings = (cpus & set(_siblings(cpu, root))) - seen | {cpu}
        seen |= siblings
        socket = read_text(f"{root}{_CPU}/cpu{cpu}/topology/physical_package_id").strip()
        number = int(socket) if socket.removeprefix("-").isdecimal() else 0
        cores.append(Core(cpus=tuple(sorted(siblings)), socket=number, node=node_of.get(cpu, -1)))
    return cores


def _siblings(cpu: int, root: str) -> tuple[int, ...]:
    for name in ("core_cpus_list", "thread_siblings_list"):  # the first from Linux 5.1 on
        text = read_text(f"{root}{_CPU}/cpu{cpu}/topology/{name}")
        if text:
            return parse_list(text)
    return ()


def _memory(numbers: Sequence[int], allowed: Iterable[int] | None, root: str) -> tuple[int, ...]:
    text = read_text(f"{root}{_NODE}/has_memory")
    having = frozenset(parse_list(text) if text else numbers)
    ours = having if allowed is None else having & frozenset(allowed)
    return tuple(node for node in numbers if node in ours)


def _distances(node: int, numbers: Sequence[int], root: str) -> dict[int, int]:
    """Return the distances from a node, one per node that is online, in the order of their numbers."""
    words = read_text(f"{root}{_NODE}/node{node}/distance").split()
    return {other: int(word) for other, word in zip(numbers, words, strict=False) if word.isdecimal()}


def memory_allowed(status_file: str = "/proc/self/status") -> tuple[int, ...] | None:
    """Return the NUMA nodes whose memory the cpuset of this process allows; None if the kernel does not tell.

    Args:
        status_file: the file with Mems_allowed_list (cpuset(7)).
    """
    for line in read_text(status_file).split("\n"):
        if line.startswith("Mems_allowed_list:"):
            return parse_list(line.partition(":")[2])
    return None


def pci_node(bus_id: str | None, root: str = "") -> int | None:
    """Return the NUMA node of a PCI device; None if the firmware does not tell.

    Args:
        bus_id: as NVML writes it (00000000:3B:00.0) or as /sys does (0000:3b:00.0); None: not known.
        root: is put before /sys.
    """
    domain, _, rest = (bus_id or "").lower().partition(":")
    try:
        text = read_text(f"{root}/sys/bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node").strip()
    except ValueError:
        return None
    return int(text) if text.isdecimal() else None  # -1: not known


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list of CPUs or nodes as the kernel writes it, such as `0-3,8,10-11`. Text that is no
    list gives none."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and (high or low).isdecimal():
            numbers += range(int(low), int(high or low) + 1)
    return tuple(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Return numbers as the kernel writes lists of CPUs and nodes, such as `0-3,8,10-11`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
