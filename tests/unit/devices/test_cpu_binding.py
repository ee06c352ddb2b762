"""Who gets which CPUs: near the GPU, within what is ours, whole cores, none twice, evenly."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.devices.cpu_binding import CpuBinding, place, plan_bindings
from infini_run.devices.topology import Core, Topology, read_topology
from infini_run.errors import UsageError


def machine_of(*nodes, smt=2, memory=None, sockets=None):
    """A topology whose nodes have so many cores each; siblings have neighbouring numbers."""
    cores, number = [], itertools.count()
    for node, count in enumerate(nodes):
        for _ in range(count):
            cpus = tuple(next(number) for _ in range(smt))
            cores.append(Core(cpus=cpus, socket=sockets[node] if sockets else node, node=node))
    far = {a: {b: 10 if a == b else 20 + abs(a - b) for b in range(len(nodes))} for a in range(len(nodes))}
    having = tuple(range(len(nodes))) if memory is None else memory
    return Topology(cores=tuple(cores), memory=having, distances=far)


def cpus_of(places):
    return [one.cpus for one in places]


# ---- numa and socket


def test_numa_gives_all_of_a_node_to_ranks_that_share_it():
    places = place(machine_of(2, 2), "numa", 4)
    assert cpus_of(places) == [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2
    assert [one.nodes for one in places] == [(0,), (0,), (1,), (1,)]
    assert [one.threads for one in places] == [2] * 4


def test_one_rank_on_a_large_machine_gets_one_node():
    assert len(place(machine_of(4, 4, 4, 4), "numa", 1)[0].cpus) == 8


def test_a_rank_is_beside_its_gpu_whatever_its_number():
    places = place(machine_of(2, 2), "numa", 4, [[1], [1], [0], [0]])
    assert [one.nodes for one in places] == [(1,), (1,), (0,), (0,)]


def test_a_rank_with_gpus_at_two_nodes_gets_both():
    both, one = place(machine_of(1, 1, 1), "numa", 2, [[2, 0, 2], [1]])
    assert (both.cpus, both.nodes) == ((0, 1, 4, 5), (0, 2))
    assert (one.cpus, one.nodes) == ((2, 3), (1,))


def test_a_gpu_at_a_node_without_cpus_for_us_means_the_nearest_that_has_some():
    topology = machine_of(1, 0, 1, 0)
    places = place(topology, "numa", 2, [[3], [1]])
    assert [one.cpus for one in places] == [(2, 3), (0, 1)]


def test_a_gpu_whose_node_nobody_knows_is_as_good_as_none():
    assert place(machine_of(1, 1), "numa", 2, [[], []]) == place(machine_of(1, 1), "numa", 2)
    assert place(machine_of(1, 1), "numa", 2, [[9], [7]]) == place(machine_of(1, 1), "numa", 2)


def test_socket_gives_all_nodes_of_a_socket():
    topology = machine_of(1, 1, 1, 1, sockets=(0, 0, 1, 1))
    first, second = place(topology, "socket", 2)
    assert (first.cpus, first.nodes) == ((0, 1, 2, 3), (0, 1))
    assert (second.cpus, second.nodes) == ((4, 5, 6, 7), (2, 3))
    assert place(topology, "socket", 2, [[3], [1]]) == (second, first)


def test_ranks_go_where_the_cpus_are_when_a_cpuset_left_little_of_a_node():
    places = place(machine_of(1, 7, smt=1), "numa", 8)
    assert [one.nodes for one in places] == [(0,)] + [(1,)] * 7


def test_memory_comes_from_the_nearest_node_that_has_some():
    places = place(machine_of(1, 1, 1, memory=(0, 2)), "numa", 3)
    assert [one.nodes for one in places] == [(0,), (0,), (2,)]
    assert place(machine_of(1, memory=()), "numa", 1)[0].nodes == ()


def test_a_machine_without_nodes_is_one_without_a_say_in_memory():
    topology = Topology(cores=(Core(cpus=(0,), socket=0, node=-1), Core(cpus=(1,), socket=0, node=-1)), memory=(),
                        distances={})  # fmt: skip
    assert place(topology, "numa", 2) == (CpuBinding(cpus=(0, 1), nodes=(), threads=1),) * 2
    assert cpus_of(place(topology, "cores", 2)) == [(0,), (1,)]


# ---- cores


def test_cores_are_divided_side_by_side_with_their_siblings():
    assert cpus_of(place(machine_of(2, 2), "cores", 2)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [len(one.cpus) for one in place(machine_of(3, 4), "cores", 3)] == [4, 4, 6]


def test_cores_beside_the_gpu_are_divided_among_those_whose_gpus_are_there():
    places = place(machine_of(4, 4, smt=1), "cores", 4, [[1], [0], [1], [1]])
    assert cpus_of(places) == [(4,), (0, 1, 2, 3), (5,), (6, 7)]


def test_a_node_with_too_few_cores_for_its_gpus_lends_ranks_to_others():
    places = place(machine_of(1, 3, smt=1), "cores", 3, [[0], [0], [0]])
    assert sorted(cpus_of(places)) == [(0,), (1,), (2, 3)]
    assert places[0].cpus == (0,)


def test_ranks_without_a_known_gpu_get_what_the_others_leave_most_of():
    places = place(machine_of(2, 2, smt=1), "cores", 3, [[0], [], [0]])
    assert cpus_of(places) == [(0,), (2, 3), (1,)]


def test_fewer_cores_than_ranks_is_one_error_that_says_what_to_do():
    with pytest.raises(UsageError) as caught:
        place(machine_of(1, 1), "cores", 3)
    text = str(caught.value)
    assert "3 ranks" in text
    assert "2 can be used here (CPUs 0-3)" in text
    assert "--bind=numa" in text


@st.composite
def machines(draw):
    """Nodes of any size, CPUs of ours anywhere in them, some without memory."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
    smt = draw(st.sampled_from([1, 2, 4]))
    memory = tuple(sorted(draw(st.frozensets(st.integers(0, len(sizes) - 1)))))
    full = machine_of(*sizes, smt=smt, memory=memory, sockets=[node // 2 for node in range(len(sizes))])
    cpus = [cpu for core in full.cores for cpu in core.cpus]
    ours = draw(st.frozensets(st.sampled_from(cpus), min_size=1))
    cores = []
    for core in full.cores:
        left = tuple(cpu for cpu in core.cpus if cpu in ours)
        if left:
            cores.append(Core(cpus=left, socket=core.socket, node=core.node))
    return Topology(cores=tuple(cores), memory=memory, distances=full.distances)


nears = st.lists(st.lists(st.integers(-1, 9), max_size=3), min_size=40, max_size=40)


@given(machines(), st.integers(1, 40), st.none() | nears)
def test_cores_are_whole_ours_and_nobody_elses(topology, nproc, near):
    if nproc > len(topology.cores):
        with pytest.raises(UsageError):
            place(topology, "cores", nproc, near or ())
        return
    places = place(topology, "cores", nproc, near or ())
    given_out = [cpu for one in places for cpu in one.cpus]
    assert len(places) == nproc
    assert len(given_out) == len(set(given_out)), "no CPU twice"
    for one in places:
        whole = [core for core in topology.cores if set(core.cpus) & set(one.cpus)]
        assert one.cpus == tuple(sorted(cpu for core in whole for cpu in core.cpus)), "whole cores"
        assert one.threads == len(one.cpus) > 0
        assert set(one.nodes) <= set(topology.memory)


@given(machines(), st.integers(1, 40))
def test_without_gpus_all_cores_are_given_out_and_nobody_gets_two_more_than_another(topology, nproc):
    if nproc > len(topology.cores):
        return
    places = place(topology, "cores", nproc)
    counts = [sum(set(core.cpus) <= set(one.cpus) for core in topology.cores) for one in places]
    assert sum(counts) == len(topology.cores)
    assert max(counts) - min(counts) <= 1


@given(machines(), st.integers(1, 40), nears)
def test_ranks_whose_gpus_are_at_one_node_share_its_cores_evenly(topology, nproc, near):
    if nproc > len(topology.cores):
        return
    places = place(topology, "cores", nproc, near)
    by_node = {}
    for one in places:
        cores = [core for core in topology.cores if set(core.cpus) <= set(one.cpus)]
        by_node.setdefault(frozenset(core.node for core in cores), []).append(len(cores))
    if all(len(nodes) == 1 for nodes in by_node):
        for counts in by_node.values():
            assert max(counts) - min(counts) <= 1


@given(machines(), st.integers(1, 40), st.sampled_from(["numa", "socket"]), st.none() | nears)
def test_domains_are_whole_and_ours_and_their_threads_are_no_more_than_their_cpus(topology, nproc, mode, near):
    places = place(topology, mode, nproc, near or ())
    domains = {}
    for core in topology.cores:
        domains.setdefault(core.node if mode == "numa" else core.socket, set()).update(core.cpus)
    for one in places:
        assert all(cpus <= set(one.cpus) or cpus.isdisjoint(one.cpus) for cpus in domains.values())
        assert set(one.cpus) <= set().union(*domains.values())
        assert one.cpus
        assert 1 <= one.threads <= len(one.cpus)
    sharers = Counter(cpu for one in places for cpu in one.cpus)
    for one in places:
        assert one.threads <= max(1, sum(1 / sharers[cpu] for cpu in one.cpus) + 1e-6), "no more than its fair share"


# ---- from a tree of files to places


def test_places_follow_from_files_and_bus_ids(machine):
    for cpu in range(4):
        machine.core([cpu, cpu + 4], socket=cpu // 2)
    machine.nodes({0: (0, 1, 4, 5), 1: (2, 3, 6, 7)})
    machine.pci("0000:10:00.0", 1)
    machine.pci("0000:11:00.0", 0)
    topology = read_topology(range(8), None, machine.root)
    assert [core.cpus for core in topology.cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    places = plan_bindings("numa", 2, [["00000000:10:00.0"], ["00000000:11:00.0"]], machine.root, cpus=range(8))
    assert cpus_of(places) == [(2, 3, 6, 7), (0, 1, 4, 5)]
    assert [one.nodes for one in places] == [(1,), (0,)]
    machine.write({"/proc/self/status": "Mems_allowed_list:\t0"})
    places = plan_bindings("cores", 2, [["00000000:10:00.0"], ["00000000:11:00.0"]], machine.root, cpus=range(8))
    assert cpus_of(places) == [(2, 3, 6, 7), (0, 1, 4, 5)]
    assert [one.nodes for one in places] == [(0,), (0,)]


def test_threads_are_no_more_than_a_quota_leaves(machine):
    for cpu in range(8):
        machine.core([cpu], socket=0)
    machine.nodes({0: range(8)})
    buses = [[], []]
    assert [one.threads for one in plan_bindings("numa", 2, buses, machine.root, cpus=range(8))] == [4, 4]
    machine.write({
        "/proc/self/cgroup": "0::/",
        "/proc/self/mountinfo": f"40 24 0:1 / {machine.root}/cg rw - cgroup2 cgroup2 rw",
        "/cg/cpu.max": "500000 100000",
    })  # fmt: skip
    for mode in ("numa", "socket", "cores"):
        places = plan_bindings(mode, 2, buses, machine.root, cpus=range(8))
        assert [one.threads for one in places] == [2, 2]
    assert [one.threads for one in plan_bindings("cores", 8, [[]] * 8, machine.root, cpus=range(8))] == [1] * 8


def test_a_place_is_said_in_words():
    assert str(CpuBinding(cpus=(0, 1, 2, 3, 8), nodes=(0, 1), threads=1)) == "CPUs 0-3,8, memory of nodes 0-1"
    assert str(CpuBinding(cpus=(5,), nodes=(1,), threads=1)) == "CPU 5, memory of node 1"
    assert str(CpuBinding(cpus=(5, 7), nodes=(), threads=1)) == "CPUs 5,7"
