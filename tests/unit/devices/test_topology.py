"""What /sys says of CPUs, nodes and PCI devices, read from trees of plain files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.devices.topology import Core, format_list, memory_allowed, parse_list, pci_node, read_topology


def shown(topology):
    return [(core.cpus, core.socket, core.node) for core in topology.cores]


def test_one_node_without_smt(machine):
    for cpu in range(4):
        machine.core([cpu], socket=0)
    machine.nodes({0: range(4)})
    topology = read_topology(range(4), None, machine.root)
    assert topology.cores == tuple(Core(cpus=(cpu,), socket=0, node=0) for cpu in range(4))
    assert topology.memory == (0,)


@pytest.mark.parametrize("siblings", ["thread_siblings_list", "core_cpus_list"])
def test_two_sockets_with_smt_siblings_numbered_after_all_cores(machine, siblings):
    for cpu in range(4):
        machine.core([cpu, cpu + 4], socket=cpu // 2, siblings=siblings)
    machine.nodes({0: (0, 1, 4, 5), 1: (2, 3, 6, 7)})
    topology = read_topology(range(8), None, machine.root)
    assert shown(topology) == [((0, 4), 0, 0), ((1, 5), 0, 0), ((2, 6), 1, 1), ((3, 7), 1, 1)]
    assert topology.distances[0] == {0: 10, 1: 22}


def test_cores_are_in_the_order_of_their_nodes_whatever_their_numbers(machine):
    for cpu in range(4):
        machine.core([cpu], socket=cpu % 2)
    machine.nodes({0: (0, 2), 1: (1, 3)})
    assert shown(read_topology(range(4), None, machine.root)) == [
        ((0,), 0, 0),
        ((2,), 0, 0),
        ((1,), 1, 1),
        ((3,), 1, 1),
    ]


def test_eight_nodes_on_two_sockets_with_holes_in_all_numbers(machine):
    nodes = {node: range(node * 8, node * 8 + 4) for node in (0, 1, 3, 4, 8, 9, 11, 12)}
    for node, cpus in nodes.items():
        for cpu in cpus:
            machine.core([cpu, cpu + 200], socket=36 if node < 8 else 40)
    machine.nodes({node: [*cpus, *(cpu + 200 for cpu in cpus)] for node, cpus in nodes.items()})
    everything = [cpu for cpus in nodes.values() for cpu in (*cpus, *(cpu + 200 for cpu in cpus))]
    topology = read_topology(everything, None, machine.root)
    assert len(topology.cores) == 32
    assert {core.node for core in topology.cores} == set(nodes)
    assert {core.socket for core in topology.cores} == {36, 40}
    assert topology.distances[3][8] == 26


def test_only_what_we_may_use_is_there_and_half_a_core_is_a_core(machine):
    for cpu in range(4):
        machine.core([cpu, cpu + 4], socket=0)
    machine.nodes({0: range(8)})
    assert shown(read_topology({0, 1, 5, 7}, None, machine.root)) == [((0,), 0, 0), ((1, 5), 0, 0), ((7,), 0, 0)]


def test_offline_cpus_have_no_topology_and_are_not_among_ours(machine):
    machine.core([0], socket=0)  # its sibling 2 is offline
    machine.core([1, 3], socket=0)
    machine.write({"/sys/devices/system/cpu/cpu2/online": "0"})
    machine.nodes({0: (0, 1, 3)})
    assert shown(read_topology({0, 1, 3}, None, machine.root)) == [((0,), 0, 0), ((1, 3), 0, 0)]


def test_memory_is_where_there_is_some_and_our_cpuset_lets_us(machine):
    for cpu in range(4):
        machine.core([cpu], socket=0)
    machine.nodes({0: (0,), 1: (1,), 2: (2,), 3: (3,), 4: ()}, memory=(0, 2, 4))
    assert read_topology(range(4), None, machine.root).memory == (0, 2, 4)
    assert read_topology(range(4), (1, 2), machine.root).memory == (2,)


def test_the_nearest_node_is_the_closest_then_the_lowest(machine):
    machine.nodes({0: (0,), 1: (), 2: (2,), 5: (5,)})
    topology = read_topology((0, 2, 5), None, machine.root)
    assert topology.nearest(2, (0, 2, 5)) == 2
    assert topology.nearest(1, (0, 2, 5)) == 0
    assert topology.nearest(5, (0, 2)) == 2
    assert topology.nearest(7, (0, 2)) is None
    assert topology.nearest(0, ()) is None


def test_a_machine_that_tells_nothing_has_cpus_all_the_same(machine):
    topology = read_topology({0, 5}, (0,), machine.root)
    assert shown(topology) == [((0,), 0, -1), ((5,), 0, -1)]
    assert (topology.memory, dict(topology.distances)) == ((), {})


def test_no_node_directory_leaves_cores_and_sockets(machine):
    machine.core([0, 1], socket=0)
    machine.core([2, 3], socket=1)
    assert shown(read_topology(range(4), None, machine.root)) == [((0, 1), 0, -1), ((2, 3), 1, -1)]


def test_files_that_make_no_sense_are_not_believed(machine):
    machine.write({
        "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "what-ever,,-3",
        "/sys/devices/system/cpu/cpu0/topology/physical_package_id": "no number",
        "/sys/devices/system/node/node0/cpulist": "\x00",
        "/sys/devices/system/node/node0/distance": "far away",
        "/sys/devices/system/node/nodeX/cpulist": "0",
    })  # fmt: skip
    topology = read_topology({0}, None, machine.root)
    assert shown(topology) == [((0,), 0, -1)]
    assert topology.distances == {0: {}}


def test_more_than_1024_cpus_are_as_good_as_few(machine):
    for cpu in range(0, 2048, 2):
        machine.core([cpu, cpu + 1], socket=cpu // 1024)
    machine.nodes({0: range(1024), 1: range(1024, 2048)})
    topology = read_topology(range(2048), None, machine.root)
    assert len(topology.cores) == 1024
    assert topology.cores[-1] == Core(cpus=(2046, 2047), socket=1, node=1)


# ---- PCI devices


@pytest.mark.parametrize(
    ("asked", "node"),
    [
        ("00000000:3B:00.0", 1),
        ("0000:3b:00.0", 1),
        ("00010000:E1:00.0", 3),
        ("00000000:5E:00.0", None),
        ("00000000:AA:00.0", None),
        ("", None),
        (None, None),
        ("no bus id", None),
    ],
)
def test_the_node_of_a_pci_device_is_found_by_any_spelling_of_its_bus_id(machine, asked, node):
    machine.pci("0000:3b:00.0", 1)
    machine.pci("10000:e1:00.0", 3)
    machine.pci("0000:5e:00.0", -1)
    assert pci_node(asked, machine.root) == node


# ---- lists


@given(st.frozensets(st.integers(0, 5000)))
def test_a_list_is_read_as_it_is_written(numbers):
    assert parse_list(format_list(numbers)) == tuple(sorted(numbers))


def test_lists_are_written_as_the_kernel_writes_them():
    assert format_list([3, 0, 1, 2, 8, 10, 11]) == "0-3,8,10-11"
    assert format_list([]) == ""
    assert parse_list("\n") == ()


def test_our_own_cpus_and_nodes_are_those_that_the_kernel_says():
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    ours = os.sched_getaffinity(0)
    assert format_list(ours) == status["Cpus_allowed_list"]
    topology = read_topology(ours, memory_allowed())
    assert {cpu for core in topology.cores for cpu in core.cpus} == ours
    assert set(topology.memory) <= set(parse_list(status["Mems_allowed_list"]))


def test_a_status_without_the_line_says_nothing(tmp_path):
    (tmp_path / "status").write_text("Name:\tx\n")
    assert memory_allowed(str(tmp_path / "status")) is None
    assert memory_allowed(str(tmp_path / "missing")) is None
