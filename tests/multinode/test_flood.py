"""Whoever may dial the link's port changes nothing by it: nodes join, heartbeats go, the job ends as it would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.multinode.test_by_hand import no_agent_left, node, port, ring, told  # noqa: F401

FLOOD = """
import _socket, collections, struct, sys, time
end = time.monotonic() + 30
held = collections.deque(maxlen=500)
said = bytes.fromhex(sys.argv[2])
while True:
    one = _socket.socket()
    one.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, struct.pack("ii", 1, 0))  # no port stays taken after it
    try:
        one.bind((sys.argv[3], 0))
        one.connect(("127.0.0.1", int(sys.argv[1])))
        one.send(said)
    except OSError:
        if not held and time.monotonic() > end:
            sys.exit("nobody listens there")
        continue
    held.append(one)
    if len(held) == 1:
        print("one", flush=True)
"""
CHALLENGE = b"C\0\0\0@" + bytes(range(64))


@contextmanager
def flood(target, said=b"", count=3, source="127.9.0.1"):
    """So many processes that dial as fast as they can, say so much, and hold what they have."""
    words = [sys.executable, "-ISc", FLOOD, str(target), said.hex(), source]
    those = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for one in those:
            assert one.stdout.readline() == b"one\n"
        yield
    finally:
        for one in those:
            one.kill()
            one.communicate()


@pytest.mark.parametrize("said", [b"", CHALLENGE], ids=["silent", "half-a-handshake"])
def test_a_flood_after_the_join_harms_no_heartbeat(node, bell, port, said, tmp_path):  # noqa: F811
    flags = ("--node_timeout=1", "--verbose")
    gates = [tmp_path / f"gate{rank}" for rank in range(4)]
    for gate in gates:
        os.mkfifo(gate)
    commands = [node(rank, *ring(bell, f"exec cat {tmp_path}/gate$RANK"), flags=flags) for rank in range(2)]
    bell.hear(4)
    with flood(port + 1, said):
        time.sleep(2)  # twice what a head or a node may be silent
        for gate in gates:
            gate.write_bytes(b"")
        assert [command.wait() for command in commands] == [0, 0], told(*commands)
    lines = told(*commands)
    assert not [line for line in lines if "lost" in line or "rejected" in line]
    (counted,) = [line for line in lines if "unauthenticated connections to the link's port" in line]
    assert int(counted.split()[2]) > 50


@pytest.mark.parametrize("source", ["127.9.0.1", "127.0.0.1"], ids=["from-elsewhere", "from-where-the-node-is"])
@pytest.mark.parametrize("said", [b"", CHALLENGE], ids=["silent", "half-a-handshake"])
def test_a_node_joins_during_a_flood(node, port, said, source):  # noqa: F811
    first = node(0, "true")
    with flood(port + 1, said, source=source):
        commands = [first, node(1, "true")]
        assert [command.wait() for command in commands] == [0, 0], told(*commands)
