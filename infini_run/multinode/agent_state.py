"""A node as the head sees it: how far it has come, what it has said."""

from __future__ import annotations

import time

from infini_run.multinode import protocol
from infini_run.multinode.clock_offset import ClockOffset
from infini_run.multinode.output import LineBuffer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.connection import Connection
    from infini_run.report.report import Report


STATES = ("starting", "greeted", "joined", "running", "done", "lost")
NEW = ("starting", "greeted")  # not come yet
OVER = ("done", "lost")


class StateCounts:
    """How many peers are in which state: asked at every event, so it must not take longer with many."""

    def __init__(self, count: int) -> None:
        self._counts = dict.fromkeys(STATES, 0)
        self._counts["starting"] = count
        self.total = count

    def move(self, before: str, after: str) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1

    def count(self, *states: str) -> int:
        return sum(self._counts[state] for state in states)


class RemoteAgent:
    """A node, as we see it."""

    def __init__(self, index: int, host: Host) -> None:
        self.index = index
        self.host = host
        self.name = host.name
        self.state = "starting"
        self.wire: Connection | None = None
        self.heard_s = time.monotonic()
        self.clock = ClockOffset()
        self.hello: dict[str, Any] = {}
        self.port = 0
        self.report: Report | None = None
        self.failed_s = float("inf")  # when its first failure was, by our clock
        self.was_running = False
        self.ranks = range(0)  # that it runs, or has run
        self.pids: dict[int, int] = {}  # of those
        self.address = ""  # where it has dialled from
        self.is_silent = False  # lost, for it said nothing
        self.is_ended_by_engine = False
        self.loss = ""  # why it was lost, in a sentence
        self.has_command = False  # a command of ours started it; else it came by itself
        self.is_unexplained = False  # it has gone, and nobody has said yet why
        self.lines = {protocol.OUT: LineBuffer(), protocol.ERR: LineBuffer()}

    @property
    def is_new(self) -> bool:
        """It has not come yet."""
        return self.state in NEW

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def title(self) -> str:
        """As messages call it."""
        return f"node {self.index}{f' ({self.name})' if self.name else ''}"
