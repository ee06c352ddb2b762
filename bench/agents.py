"""Agents without ranks: N nodes that join a head, answer its heartbeats and are done when they are told to stop.

    python bench/agents.py HOST:PORT FIRST LAST        INFINI_RUN_TOKEN is the token

One process, for the head's sake: on a small machine a thousand interpreters would measure themselves. Says
`joined NS` (CLOCK_MONOTONIC) on stdout when the last has been told to go. They speak the Link by the package's code.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

from infini_run.multinode.link import protocol
from infini_run.multinode.link.clock_offset import clock_answer
from infini_run.multinode.link.connection import TOKEN, Connection
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.protocol import pack_json, unpack_json
from infini_run.multinode.link.record_codec import to_jsonable
from infini_run.multinode.link.tcp import connect
from infini_run.report.exit import Exit
from infini_run.report.report import Report
from infini_run.system.poller import READ, Poller
from infini_run.version import VERSION


class Agents:
    def __init__(self, target: str, nodes: range, token: bytes) -> None:
        self.poller = Poller()
        self.left = len(nodes)
        self.gone = 0
        for node in nodes:
            wire = connect(target)
            hand = Handshake(wire, token, is_head=False)
            self.poller.watch(wire.fileno(), READ, partial(self.hear, node, wire, hand))
            self.poller.poll(0)

    def hear(self, node: int, wire: Connection, hand: Handshake) -> None:
        for kind, payload in wire.read():
            if not hand.is_done:
                hand.handle_frame(kind, payload)
                if hand.is_done:
                    wire.send(pack_json(protocol.IDENTITY, {"node": node}))
            else:
                self.take(node, wire, kind, payload)
        if wire.has_ended:
            self.poller.unwatch(wire.fileno())
            wire.close()
            self.left -= 1

    def take(self, node: int, wire: Connection, kind: bytes, payload: bytes) -> None:
        if kind == protocol.SPEC:
            words = {
                "version": VERSION,
                "host": f"sim{node}",
                "pid": 1,
                "start_ticks": "1",
                "nproc": 1,
                "counts": [],
                "ports": [1],
                "address": "",
                "facts": [],
                "machine": "",
                "is_clear": False,
            }
            wire.send(pack_json(protocol.HELLO, words))
        elif kind == protocol.LAUNCH:
            self.gone += 1
            if self.gone == self.left:
                print("joined", time.monotonic_ns(), flush=True)
        elif kind == protocol.HEARTBEAT:
            wire.send(clock_answer(payload))
        elif kind in (protocol.STOP, protocol.KILL):
            done = {"report": to_jsonable(report_of(node)), "ports": [1], "progress": -1}
            wire.send(pack_json(protocol.DONE, done))
        elif kind == protocol.GOODBYE:
            unpack_json(payload)


def report_of(node: int) -> Report:
    exits = (Exit(rank=node, local_rank=0, host=f"sim{node}", pid=1, signal=15, stopped=True),)
    return Report(
        launch_id="", run_id="", host=f"sim{node}", world_size=1, start_s=0.0, end_s=0.0, exits=exits,
        first_failure=None,
    )  # fmt: skip


def main() -> None:
    target, first, last = sys.argv[1:4]
    agents = Agents(target, range(int(first), int(last) + 1), os.environ[TOKEN].encode())
    while agents.left:
        agents.poller.poll(None)


if __name__ == "__main__":
    main()
