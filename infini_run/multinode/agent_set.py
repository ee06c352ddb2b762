"""The peers and their wires: frames to them, frames from them, how many are how far. What a frame means, and what
follows from it, is the head's affair."""

from __future__ import annotations

import time
from _functools import partial

from infini_run.errors import LinkError
from infini_run.multinode.agent_state import NEW, RemoteAgent, StateCounts
from infini_run.multinode.output import is_readable
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.connection import Connection
    from infini_run.system.poller import Poller


class AgentSet:
    """take: gets what a peer says. lose: gets one that has gone, or says nonsense, and why, as far as is known.
    heard: gets the index of a node that is new no longer."""

    def __init__(
        self,
        hosts: Sequence[Host],
        poller: Poller,
        *,
        take: Callable[[RemoteAgent, bytes, bytes], None],
        lose: Callable[[RemoteAgent, str], None],
        heard: Callable[[int], None],
    ) -> None:
        self.peers = [RemoteAgent(index, host) for index, host in enumerate(hosts)]
        self.census = StateCounts(len(self.peers))
        self._poller = poller
        self._take = take
        self._lose = lose
        self._heard = heard
        self._held = False

    def move(self, peer: RemoteAgent, state: str) -> None:
        """It is that far now."""
        self.census.move(peer.state, state)
        peer.state = state
        if state not in NEW:
            self._heard(peer.index)

    def adopt(self, peer: RemoteAgent, wire: Connection) -> None:
        """This wire is that peer's."""
        peer.wire, peer.heard_s = wire, time.monotonic()
        self.move(peer, "greeted")

    def part(self, peer: RemoteAgent) -> None:
        """Close its wire. Safe where there is none."""
        if peer.wire is not None:
            self._poller.unwatch(peer.wire.fileno())
            peer.wire.close()

    def send(self, peer: RemoteAgent, data: bytes) -> None:
        """Send a frame, now or when there is room; one that is not connected gets nothing."""
        if peer.wire is not None:
            peer.wire.send(data)
            self._watch(peer)

    def send_all(self, data: bytes, *states: str) -> None:
        """Send a frame to all, or to those in these states."""
        for peer in self.peers:
            if not states or peer.state in states:
                self.send(peer, data)

    def hold(self, held: bool) -> None:
        """Listen to nobody, or to all again."""
        if held != self._held:
            self._held = held
            for peer in self.peers:
                self._watch(peer)

    def _watch(self, peer: RemoteAgent) -> None:
        wire = peer.wire
        if wire is not None and not wire.has_ended:
            events = (0 if self._held else READ) | (WRITE if wire.wants_write else 0)
            self._poller.watch(wire.fileno(), events, partial(self.hear, peer))

    def hear(self, peer: RemoteAgent) -> None:
        """One read of what it says."""
        wire = peer.wire
        if wire is None or wire.has_ended:
            return
        wire.flush()
        try:
            for kind, payload in wire.read():
                peer.heard_s = time.monotonic()
                self._take(peer, kind, payload)
        except LinkError as error:
            self._lose(peer, str(error))
            return
        except (KeyError, TypeError, ValueError) as error:  # frames of ours, whose words are not
            self._lose(peer, f"what it says is not what infini-run says ({type(error).__name__}: {error})")
            return
        if not wire.has_ended:
            self._watch(peer)
            return
        self._poller.unwatch(wire.fileno())
        if peer.state in ("joined", "running") or (peer.state == "greeted" and not peer.has_command):
            self._lose(peer, "")  # one that never came to speak is told of when its command ends, which knows why

    def hear_out(self, peer: RemoteAgent) -> None:
        """All that it has said. Its command has ended, so no more comes; but what that has left behind
        (ControlPersist) may have the other end open, and then there is no end to wait for."""
        while peer.wire is not None and not peer.wire.has_ended and is_readable(peer.wire.fileno()):
            self.hear(peer)

    def close(self) -> None:
        """Cut every wire, which kills what still runs there. Safe twice."""
        for peer in self.peers:
            self.part(peer)
