"""The progress of ranks, from their node to the head: of each rank the latest, and seldom.

A rank may send PROGRESS= a hundred times a second. The head gets one message of all ranks that moved per second and
node; of many nodes each sends less often, so that the messages of all are as few.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from infini_run.core.c_structs import Event
    from infini_run.multinode.link.clock_offset import ClockOffset

_PERIOD_S = 1.0
_NODES = 64  # that send in one period at most


class ProgressSender:
    """The agent's side.

    Args:
        send: Sends a message: for each rank its number, its PROGRESS=, when it came (CLOCK_MONOTONIC, ns), and how
            many it has sent since the last message.
        has_room: Returns whether the connection takes messages that may wait.
        nnodes: The number of nodes of the attempt.
    """

    def __init__(self, send: Callable[[list[list[int]]], None], has_room: Callable[[], bool], nnodes: int) -> None:
        self._send = send
        self._has_room = has_room
        self._period_s = _PERIOD_S * max(1.0, nnodes / _NODES)
        self._latest: dict[int, Event] = {}  # by rank, not sent yet
        self._counts: dict[int, int] = {}  # by rank: the PROGRESS= since the last message
        self._due_s = 0.0

    def note(self, event: Event) -> None:
        """Take in the PROGRESS= of a rank."""
        self._latest[event.rank] = event
        self._counts[event.rank] = self._counts.get(event.rank, 0) + 1

    def drop(self, ranks: Iterable[int]) -> None:
        """Forget what ranks have sent: they restart."""
        for rank in ranks:
            self._latest.pop(rank, None)
            self._counts.pop(rank, None)

    def wait_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        if not self._latest or not self._has_room():  # the wait ends when there is room
            return asked_s
        wait_s = max(0.0, self._due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Send what waits, if that is due."""
        now_s = time.monotonic()
        if self._latest and now_s >= self._due_s and self._has_room():
            self._due_s = now_s + self._period_s
            latest, self._latest = self._latest, {}
            counts, self._counts = self._counts, {}
            self._send([[rank, event.value, event.time_ns, counts[rank]] for rank, event in latest.items()])


class RankProgress:
    """The head's side: of the ranks of one node the highest PROGRESS=, each with its time by the head's clock."""

    def __init__(self) -> None:
        self.latest: dict[int, tuple[int, float]] = {}
        self._news: set[int] = set()  # ranks

    def take_news(self) -> list[tuple[int, tuple[int, float]]]:
        """Return the ranks of the last messages, each with its entry in `latest`, once."""
        news, self._news = sorted(self._news & self.latest.keys()), set()
        return [(rank, self.latest[rank]) for rank in news]

    def in_wall_time(self) -> dict[int, tuple[int, float]]:
        """Return `latest` with times since the epoch."""
        epoch_s = time.time() - time.monotonic()
        return {rank: (value, epoch_s + sent_s) for rank, (value, sent_s) in self.latest.items()}

    def update(
        self, entries: Sequence[Sequence[int]], sent_ns: int, ranks: Container[int], clock: ClockOffset
    ) -> list[tuple[int, int, float, int]]:
        """Use a message, without ranks of other nodes.

        Args:
            entries: What ProgressSender sends.
            sent_ns: When it was sent, by the node's CLOCK_MONOTONIC.
            ranks: The ranks of the node.
            clock: The offset of its clock.

        Returns:
            For each rank its number, its PROGRESS=, when it sent that by the head's clock, and how many it has sent.
        """
        now_s = time.monotonic()
        offset_s = clock.monotonic_s if clock.is_known else sent_ns / 1e9 - now_s
        used = [
            (rank, value, min(now_s, time_ns / 1e9 - offset_s), count)
            for rank, value, time_ns, count in entries
            if rank in ranks
        ]
        self._news.update(rank for rank, *_ in used)
        for rank, value, time_s, _ in used:
            self.latest[rank] = (value, time_s)
        return used
