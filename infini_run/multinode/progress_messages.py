"""The progress of ranks, from their node to the head: of each rank the latest, and seldom.

A rank may send PROGRESS= a hundred times a second. The head gets one message of all ranks that moved per second and
node; of many nodes each sends less often, so that the messages of all are as few.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.core.group import Event

_PERIOD_S = 1.0
_NODES = 64  # that send in one period at most


class ProgressSender:
    """The agent's side.

    Args:
        send: Sends a message: for each rank its number, its PROGRESS=, and the age of that in nanoseconds.
        has_room: Returns whether the connection takes messages that may wait.
        nnodes: The number of nodes of the attempt.
    """

    def __init__(self, send: Callable[[list[list[int]]], None], has_room: Callable[[], bool], nnodes: int) -> None:
        self._send = send
        self._has_room = has_room
        self._period_s = _PERIOD_S * max(1.0, nnodes / _NODES)
        self._latest: dict[int, Event] = {}  # by rank, not sent yet
        self._due_s = 0.0

    def note(self, event: Event) -> None:
        """Take in the PROGRESS= of a rank."""
        self._latest[event.rank] = event

    def wait_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        if not self._latest or not self._has_room():  # the wait ends when there is room
            return asked_s
        wait_s = max(0.0, self._due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Send what waits, if that is due."""
        now_ns = time.monotonic_ns()
        if self._latest and now_ns / 1e9 >= self._due_s and self._has_room():
            self._due_s = now_ns / 1e9 + self._period_s
            latest, self._latest = self._latest, {}
            self._send([[rank, event.value, max(0, now_ns - event.time_ns)] for rank, event in latest.items()])


class RankProgress:
    """The head's side: of the ranks of one node the highest PROGRESS=, each with its time by the head's clock."""

    def __init__(self) -> None:
        self.latest: dict[int, tuple[int, float]] = {}

    def in_wall_time(self) -> dict[int, tuple[int, float]]:
        """Return `latest` with times since the epoch."""
        epoch_s = time.time() - time.monotonic()
        return {rank: (value, epoch_s + sent_s) for rank, (value, sent_s) in self.latest.items()}

    def update(self, entries: Sequence[Sequence[int]], ranks: range) -> int:
        """Use a message, without ranks of other nodes. Return the highest PROGRESS= in it; -1: there is none."""
        now_s = time.monotonic()
        entries = [entry for entry in entries if entry[0] in ranks]
        for rank, value, age_ns in entries:
            self.latest[rank] = (value, now_s - age_ns / 1e9)
        return max((value for _, value, _ in entries), default=-1)
