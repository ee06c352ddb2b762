"""The head's stdin, to the ranks that read it, at the speed of the slowest of their nodes."""

from __future__ import annotations

from infini_run.multinode.head.output import StdinReader
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.head.agent_set import AgentSet
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.system.poller import Poller


class StdinForwarder:
    """Sends stdin to the nodes whose ranks read it.

    Args:
        agents: of all nodes.
        is_wanted: a rank reads stdin.
    """

    def __init__(self, agents: AgentSet, poller: Poller, *, is_wanted: bool) -> None:
        self._agents = agents
        self._poller = poller
        self._stdin = StdinReader(0, wanted=is_wanted)
        self._nodes: Sequence[RemoteAgent] = ()

    @property
    def is_due(self) -> bool:
        """Whether there is something to read, and no descriptor to wait for."""
        return self._stdin.never_waits and bool(self._readers())

    def begin(self, nodes: Sequence[RemoteAgent]) -> None:
        """Send stdin to the nodes that read it in an attempt. After its end they get that: some may be new."""
        self._nodes = nodes
        if self._stdin.has_ended:
            for agent in nodes:
                self._agents.send(agent, pack(protocol.INPUT, b""))

    def forward(self) -> None:
        """Read and send one piece of a file; of a pipe or a terminal, as soon as there is one."""
        readers = self._readers()
        if self._stdin.never_waits:
            self._forward_to(readers)
        elif self._stdin.fileno() >= 0:
            self._poller.watch(self._stdin.fileno(), self._stdin.events if readers else 0, self._on_readable)

    def _on_readable(self) -> None:
        """Send one piece; of a terminal everything, because the poller reports it once."""
        while self._forward_to(self._readers()) and self._stdin.is_terminal:
            pass

    def resume(self) -> None:
        """Have the poller look again after a suspension, for lines typed meanwhile."""
        self._poller.unwatch(self._stdin.fileno())

    def close(self) -> None:
        """Close stdin. Safe twice."""
        self._poller.unwatch(self._stdin.fileno())
        self._stdin.close()

    def _readers(self) -> list[RemoteAgent]:
        """Return the agents whose ranks read; none while one of them is behind."""
        if self._stdin.has_ended:
            return []
        readers = [agent for agent in self._nodes if agent.state == "running"]
        has_room = all(agent.connection is None or agent.connection.has_room for agent in readers)
        return readers if has_room else []

    def _forward_to(self, readers: list[RemoteAgent]) -> bool:
        """Read one piece and send it; whether there was one."""
        data = self._stdin.read() if readers else None
        if data is not None:
            for agent in readers:
                self._agents.send(agent, pack(protocol.INPUT, data))
        return bool(data)
