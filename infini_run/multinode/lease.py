"""An agent's lease: for how long the ranks of its node may live, though nothing is heard of the head.

The agent sends the time by its own clock, and the head sends it back. The head has heard what comes back, at that
time or later. So a lease that is counted from then is over before the head starts other ranks (FENCE_S of
world_changes.py), whatever either direction of the network drops, delays or delivers late. Both clocks need the same
rate, not the same time: they are CLOCK_BOOTTIME, which goes on while a machine sleeps.
"""

from __future__ import annotations

import time
from struct import Struct

from infini_run.errors import LinkError
from infini_run.multinode.protocol import LEASE, pack

_TIME = Struct(">q")  # ns
_REQUESTS = 4.5  # within one lease: a cut of a third of --node_timeout, and TCP's next try after it, cost no rank


class Lease:
    """The lease of one node.

    Args:
        length_s: from the sending of a request that was answered.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._period_s = length_s / _REQUESTS
        self._due_s = time.monotonic()
        self.since_ns = 0  # it began then, by CLOCK_BOOTTIME: the last request that was answered was sent

    @property
    def left_s(self) -> float:
        """Seconds until it is over; negative: it is."""
        return self.length_s - (_now_ns() - self.since_ns) / 1e9

    @property
    def due_in_s(self) -> float:
        """Seconds until the next request."""
        return max(0.0, self._due_s - time.monotonic())

    def request(self) -> bytes:
        """Return the frame that asks for a longer lease."""
        self._due_s = time.monotonic() + self._period_s
        return pack(LEASE, _TIME.pack(_now_ns()))

    def extend(self, answer: bytes) -> None:
        """The head has answered. Raises LinkError: it has not."""
        if len(answer) != _TIME.size:
            raise LinkError("what came over the link is not what infini-run sends: a lease of another length")
        asked_ns = _TIME.unpack(answer)[0]
        if asked_ns > _now_ns():
            raise LinkError("what came over the link is not what infini-run sends: a lease of the future")
        self.since_ns = max(self.since_ns, asked_ns)


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
