"""Machines of plain files: the parts of /sys and /dev that say where CPUs, memory and GPUs are, below one folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from infini_run.devices.topology import format_list


class Machine:
    """A tree below `root`, made piece by piece, with the names that the real thing has."""

    def __init__(self, root: Path) -> None:
        self.folder = root
        self.root = str(root)

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def core(self, cpus: Sequence[int], socket: int, siblings: str = "thread_siblings_list") -> None:
        """CPUs that share a core. An offline one has no folder of its own and is among nobody's siblings."""
        for cpu in cpus:
            topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
            self.write({f"{topology}/{siblings}": format_list(cpus), f"{topology}/physical_package_id": str(socket)})

    def nodes(self, cpus: Mapping[int, Iterable[int]], memory: Iterable[int] | None = None, remote: int = 21) -> None:
        """node: its CPUs. memory: the nodes that have some (None: all). Further is further away by number."""
        folder = "/sys/devices/system/node"
        for node, its in cpus.items():
            far = [10 if node == other else remote + abs(node - other) for other in sorted(cpus)]
            self.write({f"{folder}/node{node}/cpulist": format_list(its)})
            self.write({f"{folder}/node{node}/distance": " ".join(map(str, far))})
        self.write({f"{folder}/has_memory": format_list(cpus if memory is None else memory)})
        self.write({f"{folder}/online": format_list(cpus)})

    def pci(self, bus_id: str, node: int) -> None:
        self.write({f"/sys/bus/pci/devices/{bus_id}/numa_node": str(node)})

    def amd(self, *nodes: Mapping[str, object], render: bool = True) -> None:
        """KFD's nodes by number; one without drm_render_minor is a CPU. Its gpu_id is 100 and its number."""
        self.write({"/dev/kfd": ""})
        for number, properties in enumerate(nodes):
            is_gpu = "drm_render_minor" in properties
            folder = f"/sys/class/kfd/kfd/topology/nodes/{number}"
            self.write({f"{folder}/gpu_id": str(100 + number if is_gpu else 0)})
            self.write({f"{folder}/properties": "\n".join(f"{name} {value}" for name, value in properties.items())})
            if is_gpu and render:
                self.write({f"/dev/dri/renderD{properties['drm_render_minor']}": ""})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")
