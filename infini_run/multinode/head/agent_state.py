"""One node as the head sees it: its state, its connection and what its agent has sent."""

from __future__ import annotations

import time

from infini_run.multinode.head.output import LineBuffer
from infini_run.multinode.link import protocol
from infini_run.multinode.link.clock_offset import ClockOffset
from infini_run.multinode.link.lease import AgentTime
from infini_run.multinode.link.progress_messages import RankProgress
from infini_run.plan.rank_numbers import NodeRanks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.link.connection import Connection
    from infini_run.report.report import Report


STATES = ("connecting", "connected", "ready", "running", "done", "lost")  # docs/architecture/nodes.md has the table
NOT_READY = ("connecting", "connected")
OVER = ("done", "lost")


class StateCounts:
    """The number of agents in each state. Every event asks for it, so its cost must not grow with the nodes."""

    def __init__(self, count: int) -> None:
        self._counts = dict.fromkeys(STATES, 0)
        self._counts["connecting"] = count
        self.total = count

    def change(self, before: str, after: str) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1

    def count(self, *states: str) -> int:
        return sum(self._counts[state] for state in states)


class RemoteAgent:
    """The agent on one node, and the node itself."""

    def __init__(self, index: int, host: Host) -> None:
        self.index = index  # among all agents
        self.node_rank = index  # in the attempt that runs; -1: it runs no ranks
        self.host = host
        self.name = host.name  # "" until the agent of a manual launch sends it
        self.state = "connecting"
        self.connection: Connection | None = None
        self.address = ""  # it has connected from there
        self.kept_end_s = float("-inf")  # until then (monotonic) the place is kept for the node that was lost there
        self.has_command = False  # a command of the engine starts it; else it connects unasked
        self.last_received_s = time.monotonic()  # when its last frame was read here, or a lease was granted
        self.alive_s = self.last_received_s  # it was alive then, or later
        self.clock = ClockOffset()
        self.time = AgentTime()
        self.hello: dict[str, Any] = {}
        self.free_ports: Sequence[int] = ()  # a port per program
        self.line_buffers = {protocol.OUT: LineBuffer(), protocol.ERR: LineBuffer()}
        self.ranks = NodeRanks()  # that it runs, or ran last
        self.rank_pids: dict[int, int] = {}
        self.ready_ranks: set[int] = set()  # that have sent READY=1
        self.exited_ranks: set[int] = set()  # while others of this node run
        self.failed_ranks: set[int] = set()  # of those
        self.progress = RankProgress()
        self.was_running = False
        self.first_failure_s = float("inf")  # by the head's monotonic clock
        self.report: Report | None = None
        self.loss = ""  # why it was lost, as a sentence
        self.is_silent = False  # it was lost because it sent nothing
        self.is_unexplained = False  # it was lost, and the reason is not known yet
        self.is_ended_by_engine = False  # the engine was asked to end it
        self.is_leaving = False  # it was asked to stop, and the others continue
        self.last_word_hash = b""  # of what its guard sends when its ranks are dead; b"": it has no ranks, or said it
        self.last_word_s = float("-inf")  # when that came (monotonic)
        self.fence_s = float("-inf")  # until then its processes may live (monotonic), for independent_nodes.py

    def on_answer(self, payload: bytes) -> None:
        """Note an answer to a clock_question. The agent was alive at the time of that question, however late the head
        reads the answer. A busy or suspended head may read an answer, or any frame, long after it was sent."""
        self.alive_s = max(self.alive_s, self.clock.add_answer(payload))

    @property
    def has_last_word(self) -> bool:
        """Whether its guard has proved that its ranks are dead, and it has sent nothing since then."""
        return self.last_word_s > self.last_received_s

    @property
    def last_received_wall_s(self) -> float:
        """The time of its last frame, in seconds since the epoch."""
        return _wall_s(self.last_received_s)

    @property
    def alive_wall_s(self) -> float:
        """When it was alive for certain, since the epoch."""
        return _wall_s(self.alive_s)

    @property
    def is_not_ready(self) -> bool:
        """Whether its HELLO has not come yet."""
        return self.state in NOT_READY

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def is_spare(self) -> bool:
        """Whether it is here and runs no ranks of the attempt."""
        return self.node_rank < 0 and self.state in ("ready", "done")

    @property
    def title(self) -> str:
        """Its name in messages."""
        if self.node_rank < 0 and self.name:
            return self.name
        return f"node {self.index if self.node_rank < 0 else self.node_rank}{f' ({self.name})' if self.name else ''}"


def _wall_s(monotonic_s: float) -> float:
    return monotonic_s + time.time() - time.monotonic()
