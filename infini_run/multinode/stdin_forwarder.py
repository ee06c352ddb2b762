"""Our stdin, to the ranks that read it: read as fast as the slowest of their nodes takes it."""

from __future__ import annotations

from bisect import bisect_right

from infini_run.multinode import protocol
from infini_run.multinode.output import StdinReader
from infini_run.multinode.protocol import pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.agent_set import AgentSet
    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.system.poller import Poller

_HELD = 1 << 20  # bytes that a node has not taken: then nothing more is read


class StdinForwarder:
    """reader: all, none, or the rank that reads. firsts: the first rank of each node, as soon as they are known."""

    def __init__(self, reader: int | str, fleet: AgentSet, poller: Poller) -> None:
        self._reader = reader
        self._fleet = fleet
        self._poller = poller
        self._source = StdinReader(0, wanted=reader != "none")
        self.firsts: Sequence[int] = ()

    @property
    def is_due(self) -> bool:
        """There is something to read, and no descriptor that says so."""
        return self._source.never_waits and bool(self._readers())

    def turn(self) -> None:
        """Read a piece of a file; of a pipe, when there is one."""
        readers = self._readers()
        if self._source.never_waits:
            self._read(readers)
        elif self._source.fileno() >= 0:
            self._poller.watch(self._source.fileno(), self._source.events if readers else 0, self._hear)

    def _hear(self) -> None:
        """One piece, which is told of again; of a terminal all that there is."""
        while self._read(self._readers()) and self._source.is_terminal:
            pass

    def resume(self) -> None:
        """We were stopped, and go on: what was typed meanwhile was told of to nobody."""
        self._poller.unwatch(self._source.fileno())

    def close(self) -> None:
        """Safe twice."""
        self._poller.unwatch(self._source.fileno())
        self._source.close()

    def _readers(self) -> list[RemoteAgent]:
        """The nodes whose ranks read; none as long as one of them is behind."""
        if self._source.has_ended or not self.firsts:
            return []
        peers = self._fleet.peers
        if self._reader != "all":
            peers = [peers[bisect_right(self.firsts, int(self._reader)) - 1]]
        peers = [peer for peer in peers if peer.state == "running"]
        is_behind = any(peer.wire is not None and peer.wire.waiting > _HELD for peer in peers)
        return [] if is_behind else peers

    def _read(self, readers: list[RemoteAgent]) -> bool:
        """Whether there was something, and more may come."""
        data = self._source.read() if readers else None
        if data is not None:
            for peer in readers:
                self._fleet.send(peer, pack(protocol.INPUT, data))
        return bool(data)
