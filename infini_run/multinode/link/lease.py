"""A lease: for how long the ranks of a node may live, though its agent hears nothing of the head.

The agent sends the time by its own clock, and the head sends it back. The head has heard what comes back, at that
time or later. So a lease that counts from then ends before the head starts other ranks (FENCE_S of world_changes.py).
That holds whatever either direction of the network drops, delays, or delivers late. Both clocks need the same rate,
not the same time: they are CLOCK_BOOTTIME, which also runs while a machine sleeps.

A request may wait behind much output, and be old when the head hears it. So the head sends a later time when it hears
anything of a node whose lease counts from long ago. It is the earliest one that the agent's clock can show by now, by
the requests before.

While the head reads nothing (its own reader does not read, or Ctrl-Z has suspended it) it gives nobody up, and hears
no requests. Then it sends that time, too.
"""

from __future__ import annotations

import time
from _struct import Struct

from infini_run.errors import LinkError
from infini_run.multinode.link.protocol import LEASE, pack

_TIME = Struct(">q")  # ns
_LIMIT_NS = 2**62
_DRIFT = 0.0005  # by which the rates of two clocks may differ: as much as the kernel corrects one by (adjtimex(2))
LEAST_LEASE = 0.68  # of --node_timeout: a lease lasts at least this long after its last renewal
_OVERDUE = 0.22  # of --node_timeout: a lease that counts from longer ago lacks a request
_REQUESTS = 4.5  # within one lease: a cut of a third of --node_timeout, and TCP's next try after it, cost no rank


class Lease:
    """The lease of one node.

    Args:
        length_s: from the sending of an answered request.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._period_s = length_s / _REQUESTS
        self._due_s = time.monotonic()
        self.since_ns = 0  # it began then, by CLOCK_BOOTTIME: the last request that was answered was sent

    @property
    def left_s(self) -> float:
        """Seconds until its end; negative after it."""
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
        """Extend the lease by the head's answer. Raises LinkError if that is no answer."""
        if len(answer) != _TIME.size:
            raise LinkError("what came over the link is not what infini-run sends: a lease of another length")
        asked_ns = _TIME.unpack(answer)[0]
        self.since_ns = max(self.since_ns, min(asked_ns, _now_ns()))


class AgentTime:
    """What the clock of an agent shows at least, as its requests have told the head, and whether one is overdue."""

    def __init__(self) -> None:
        self._ahead_ns = -_LIMIT_NS  # of this process's own clock
        self._since_ns = 0  # the time of the last request, by the head's clock
        self._granted_ns = 0  # the start of the last answer's lease, by the head's clock

    def note(self, request: bytes) -> bytes:
        """Note a request. Return the frame that answers it. Raises LinkError if it is no request."""
        asked_ns = _TIME.unpack(request)[0] if len(request) == _TIME.size else -1
        if not 0 <= asked_ns < _LIMIT_NS:
            raise LinkError("its messages are not those of infini-run: a request for a lease")
        now_ns = _now_ns()
        known_ns = self._ahead_at(now_ns)
        # a late request shows less than an earlier one
        self._ahead_ns, self._since_ns = max(asked_ns - now_ns, known_ns), now_ns
        self._granted_ns = max(self._granted_ns, asked_ns - self._ahead_ns)  # it was sent then, at the latest
        return pack(LEASE, request)

    def is_request_overdue(self, node_timeout_s: float) -> bool:
        """Return whether the lease counts from so long ago that a newer request should have been read: it waits
        behind output, or is late."""
        return self._since_ns > 0 and _now_ns() - self._granted_ns > _OVERDUE * node_timeout_s * 1e9

    def grant(self) -> bytes:
        """Return the frame for an agent whose requests nobody has read yet: the answer that a request sent at this
        time would get."""
        self._granted_ns = now_ns = _now_ns()
        return pack(LEASE, _TIME.pack(max(0, now_ns + self._ahead_at(now_ns))))

    def _ahead_at(self, now_ns: int) -> int:
        return self._ahead_ns - int(_DRIFT * (now_ns - self._since_ns))


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
