"""Ports for rank 0: free, nobody's by chance, and no two launches' at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import infini_run as ir
from infini_run.node import ports as ports
from infini_run.node.ports import free_port, let_go

TAKE = "from infini_run.node.ports import free_port as take; print(*(take() for _ in range(25)), flush=True); input()"


@pytest.fixture
def taken():
    """A port of ours, which is given back."""
    port = free_port()
    yield port
    let_go(port)


@pytest.mark.parametrize("reuse", [0, 1])
def test_a_free_port_can_be_listened_on(taken, reuse):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        server.bind(("", taken))
        server.listen()


def test_a_connection_that_goes_out_never_has_it(taken):
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        low, high = map(int, file.read().split())
    assert not low <= taken <= high


def test_many_launches_at_once_have_ports_of_their_own():
    """1000 of 13000: by chance alone some forty would be chosen twice."""
    processes = [
        subprocess.Popen([sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(40)
    ]
    found = [port for process in processes for port in process.stdout.readline().split()]
    for process in processes:
        process.communicate("\n")
    assert len(found) == len(set(found)) == 1000


def test_a_port_that_was_let_go_of_may_be_taken_again(monkeypatch):
    monkeypatch.setattr(ports, "_choices", lambda *_: [11923])
    first = free_port()
    other = free_port()
    assert (first, other != first) == (11923, True)
    let_go(first)
    assert free_port() == 11923
    for port in (first, other):
        let_go(port)


def test_a_port_that_somebody_has_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = server.getsockname()[1]
        monkeypatch.setattr(ports, "_choices", lambda *_: [theirs, 11924])
        monkeypatch.setattr(ports, "_rotated", iter)
        port = free_port()
    let_go(port)
    assert port == 11924


@pytest.mark.parametrize(
    ("ephemeral", "reserved", "count", "low", "high"),
    [
        ("32768 60999", "", 13116, 16384, 29499),
        ("20000 60999", "", 3616, 16384, 19999),
        ("32768 60999", "16384-16390,29499", 13108, 16391, 29498),
        ("1024 65535", "", 0, 0, 0),  # all is the kernel's: so it chooses
    ],
)
def test_ports_are_from_outside_of_what_the_kernel_gives(ephemeral, reserved, count, low, high):
    choices = ports._choices(ephemeral, reserved)
    assert (len(choices), min(choices, default=0), max(choices, default=0)) == (count, low, high)


def test_where_all_ports_are_the_kernels_it_chooses(monkeypatch):
    monkeypatch.setattr(ports, "_choices", lambda *_: [])
    port = free_port()
    assert port in ports._locks
    let_go(port)


def test_where_all_locks_are_somebody_elses_a_port_is_given_without(monkeypatch):
    """No process of ours takes so many: it is a neighbour's play, and must not end a launch."""
    theirs = subprocess.Popen([sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    locked = [int(word) for word in theirs.stdout.readline().split()]
    monkeypatch.setattr(ports, "_choices", lambda *_: locked)
    monkeypatch.setattr(ports, "_of_the_kernel", lambda: locked[0])
    assert free_port() == locked[0]
    assert ports._locks == {}
    theirs.communicate("\n")


def test_a_process_holds_so_many_and_then_lets_the_first_go():
    taken = [free_port() for _ in range(70)]
    assert len(ports._locks) == 64
    assert taken[0] not in ports._locks
    for port in taken:
        let_go(port)


def test_a_forked_child_holds_none_of_its_parents(taken):
    child = os.fork()
    if not child:
        os._exit(len(ports._locks))
    assert os.waitpid(child, 0)[1] == 0


def test_launches_in_python_let_their_ports_go():
    with ir.ProcessLauncher(["true"], standalone=True) as launcher:
        for _ in range(3):
            launcher.launch()
            launcher.wait()
        assert len(ports._locks) == 1
    ir.Launcher(nproc_per_node=2).run(os.getpid)
    assert ports._locks == {}
