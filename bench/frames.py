"""Frames of 64 KiB through a link over loopback, sealed and not, and the hash alone, in turns: `frames.py ROUNDS`.

Prints JSON: for each, ns of processor time for a frame. Both ends of the link are this one process, which sends a
frame and reads it, so that nothing overlaps and the times can be added. Run by bench/link.py in the venv that is
measured.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from _blake2 import blake2b

from infini_run.multinode.link import protocol
from infini_run.multinode.link.connection import Connection, from_socket
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.protocol import pack
from infini_run.system.frames import TAG

FRAMES = 200  # of one sample
PAYLOAD = os.urandom(1 << 16)
KEY = os.urandom(32)


def wires() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    for one in (ours, theirs):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return from_socket(ours), from_socket(theirs)


def let_in(ours: Connection, theirs: Connection) -> None:
    """As a head and an agent do: from here on frames are sealed."""
    hands = {ours: Handshake(ours, KEY, is_head=True), theirs: Handshake(theirs, KEY, is_head=False)}
    while not all(hand.is_done for hand in hands.values()):
        for wire, hand in hands.items():
            for kind, payload in wire.read():
                hand.handle_frame(kind, payload)


def carry(ours: Connection, theirs: Connection) -> None:
    """Frames, one after the other, each to its end."""
    packed = pack(protocol.OUT, PAYLOAD)
    for _ in range(FRAMES):
        ours.send(packed)
        came = 0
        while not came:
            ours.flush()
            came = sum(len(payload) for _, payload in theirs.read())


def hash_alone() -> None:
    """What both ends cannot but do: a keyed hash of each payload."""
    for _ in range(2 * FRAMES):
        blake2b(PAYLOAD, key=KEY, digest_size=TAG).digest()


def main() -> None:
    bare, sealed = wires(), wires()
    let_in(*sealed)
    runs = {"bare": lambda: carry(*bare), "sealed": lambda: carry(*sealed), "hash": hash_alone}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(int(sys.argv[1]) + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            begin = time.process_time_ns()
            runs[name]()
            if number:  # the first round warms up
                samples[name].append((time.process_time_ns() - begin) / FRAMES)
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
