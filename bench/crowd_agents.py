"""Agents without ranks of a job that goes on without some of them: they join, renew their leases, are stopped and
started, go, and come again.

    python bench/crowd_agents.py HOST:PORT        INFINI_RUN_TOKEN is the token

One process, as agents.py is. What happens to them is said on stdin, one line each; what has happened on stdout, with
CLOCK_MONOTONIC in ns:

    join FIRST LAST MS      these dial, evenly within so many ms                 joined NS    when the last has a plan
    lose FIRST LAST         these hang up, and reconnect                          lost NS      when the first hangs up
    expect COUNT            a new attempt                                        launched NS  when so many run ranks
    gaps                    how long the head was silent at most since last      gaps S COUNT
                            asked, for one of those that were there, and how many heard nothing for too long

Who is turned away dials again after 50 ms, 100, ... up to a second, as a launcher does.
"""

from __future__ import annotations

import heapq
import os
import sys
import time
from functools import partial

from agents import report_of
from infini_run.multinode.link import protocol
from infini_run.multinode.link.clock_offset import clock_answer
from infini_run.multinode.link.connection import TOKEN, Connection
from infini_run.multinode.link.handshake import Handshake
from infini_run.multinode.link.lease import Lease
from infini_run.multinode.link.protocol import pack_json, unpack_json
from infini_run.multinode.link.record_codec import to_jsonable
from infini_run.multinode.link.tcp import connect
from infini_run.options.table import HANDED_OUT
from infini_run.system.poller import READ, WRITE, Poller
from infini_run.version import VERSION

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
LATE = 1 / 3 + 1 / 10  # of --node_timeout: heartbeats come every third of it


class Agent:
    """One node, over all of its connections."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.wire: Connection | None = None
        self.hand: Handshake | None = None
        self.has_joined = False
        self.lease: Lease | None = None
        self.pause_s = FIRST_PAUSE_S
        self.heard_s = 0.0
        self.gap_s = 0.0


class Crowd:
    def __init__(self, target: str, token: bytes) -> None:
        self.target, self.token = target, token
        self.poller = Poller()
        self.agents: dict[int, Agent] = {}
        self.due: list[tuple[float, int, bool]] = []  # when to dial, or (True) to ask for a longer lease
        self.joining: set[int] = set()
        self.expected, self.launched = 0, 0
        self.late_s = float("inf")
        self.is_over = False
        os.set_blocking(0, False)
        self.poller.watch(0, READ, self.read_words)

    # ---- what is to happen

    def read_words(self) -> None:
        data = os.read(0, 65536)
        self.is_over = not data
        for line in data.decode().splitlines():
            word, *numbers = line.split()
            getattr(self, word)(*map(int, numbers))

    def join(self, first: int, last: int, ms: int) -> None:
        count, now_s = last - first + 1, time.monotonic()
        for number in range(first, last + 1):
            self.agents[number] = Agent(number)
            self.joining.add(number)
            heapq.heappush(self.due, (now_s + ms / 1000 * (number - first) / count, number, False))

    def lose(self, first: int, last: int) -> None:
        say("lost")
        self.launched = 0
        for number in range(first, last + 1):
            self.hang_up(self.agents[number])
            self.joining.add(number)
            heapq.heappush(self.due, (time.monotonic(), number, False))

    def expect(self, count: int) -> None:
        self.expected, self.launched = count, 0

    def gaps(self) -> None:
        now_s = time.monotonic()
        there = [agent for agent in self.agents.values() if agent.has_joined]
        gaps = [max(agent.gap_s, now_s - agent.heard_s) for agent in there]
        late = sum(gap_s > self.late_s for gap_s in gaps)
        print("gaps", f"{max(gaps, default=0.0):.6f}", late, flush=True)
        for agent in there:
            agent.gap_s = 0.0

    # ---- connections

    def dial(self, agent: Agent) -> None:
        agent.wire = wire = connect(self.target)
        agent.hand = Handshake(wire, self.token, is_head=False)
        agent.has_joined, agent.heard_s = False, time.monotonic()
        self.watch(agent)

    def watch(self, agent: Agent) -> None:
        wire = agent.wire
        if wire is not None and not wire.has_ended:
            self.poller.watch(wire.fileno(), READ | (WRITE if wire.wants_write else 0), partial(self.hear, agent))

    def hang_up(self, agent: Agent) -> None:
        if agent.wire is not None:
            self.poller.unwatch(agent.wire.fileno())
            agent.wire.close()
        agent.wire, agent.has_joined, agent.gap_s = None, False, 0.0

    def hear(self, agent: Agent) -> None:
        wire, hand = agent.wire, agent.hand
        if wire is None or hand is None:
            return
        wire.flush()
        for kind, payload in wire.read():
            if not hand.is_done:
                hand.handle_frame(kind, payload)
                if hand.is_done:
                    identity = {"node": HANDED_OUT, "host": f"sim{agent.number}"}
                    wire.send(pack_json(protocol.IDENTITY, identity))
            else:
                self.take(agent, wire, kind, payload)
        if wire.has_ended:
            self.hang_up(agent)
            heapq.heappush(self.due, (time.monotonic() + agent.pause_s, agent.number, False))
            agent.pause_s = min(2 * agent.pause_s, LONGEST_PAUSE_S)
        else:
            self.watch(agent)

    def take(self, agent: Agent, wire: Connection, kind: bytes, payload: bytes) -> None:
        now_s = time.monotonic()
        if agent.has_joined:
            agent.gap_s = max(agent.gap_s, now_s - agent.heard_s)
        agent.heard_s = now_s
        if kind == protocol.SPEC:
            self.on_spec(agent, wire, unpack_json(payload))
        elif kind == protocol.LAUNCH:
            self.launched += 1
            if self.launched == self.expected:
                say("launched")
        elif kind == protocol.HEARTBEAT:
            wire.send(clock_answer(payload))
        elif kind == protocol.LEASE and agent.lease is not None:
            agent.lease.extend(payload)
        elif kind in (protocol.STOP, protocol.KILL):
            done = {"report": to_jsonable(report_of(agent.number)), "ports": [1], "progress": -1}
            wire.send(pack_json(protocol.DONE, done))

    def on_spec(self, agent: Agent, wire: Connection, spec: dict[str, object]) -> None:
        self.late_s = float(str(spec["silence_s"])) * LATE
        words = {
            "version": VERSION,
            "host": f"sim{agent.number}",
            "pid": 1,
            "start_ticks": "1",
            "nproc": 1,
            "counts": [],
            "ports": [1],
            "address": "",
            "facts": [],
            "machine": f"boot{agent.number} 1",
            "is_clear": True,
        }
        if agent.lease is None:
            agent.lease = Lease(float(str(spec["lease_s"])))
            heapq.heappush(self.due, (time.monotonic() + agent.lease.due_in_s, agent.number, True))
        wire.send(agent.lease.request())
        wire.send(pack_json(protocol.HELLO, words))
        agent.has_joined, agent.pause_s = True, FIRST_PAUSE_S
        self.joining.discard(agent.number)
        if not self.joining:
            say("joined")

    def ask(self, agent: Agent) -> None:
        """For a longer lease, and again in time."""
        lease = agent.lease
        if lease is not None:
            if agent.wire is not None and agent.has_joined:
                agent.wire.send(lease.request())
            heapq.heappush(self.due, (time.monotonic() + lease.due_in_s, agent.number, True))

    def run(self) -> None:
        while not self.is_over:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if self.due else None
            self.poller.poll(wait_s)
            while self.due and self.due[0][0] <= time.monotonic():
                _, number, asks = heapq.heappop(self.due)
                (self.ask if asks else self.dial)(self.agents[number])
                self.poller.poll(0)


def say(word: str) -> None:
    print(word, time.monotonic_ns(), flush=True)


if __name__ == "__main__":
    Crowd(sys.argv[1], os.environ[TOKEN].encode()).run()
