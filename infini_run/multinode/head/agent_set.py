"""All agents and their connections: frames to them, frames from them, and the number of agents in each state. What a
frame means is the head's business."""

from __future__ import annotations

import time
from _functools import partial

from infini_run.errors import LinkError
from infini_run.multinode.head.agent_state import NOT_READY, RemoteAgent, StateCounts
from infini_run.multinode.head.output import is_readable
from infini_run.multinode.link.lease import AgentTime
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.environments.hostlist import Host
    from infini_run.multinode.link.connection import Connection
    from infini_run.system.poller import Poller


class AgentSet:
    """The agents of a launch, in the order of their nodes.

    Args:
        on_frame: called with an agent, and kind and payload of a frame from it.
        on_lost: called with an agent whose connection ended or carries nonsense, and the reason as far as it is
            known.
        on_reached: called with the index of a node that is ready, or will never be.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        poller: Poller,
        *,
        on_frame: Callable[[RemoteAgent, bytes, bytes], None],
        on_lost: Callable[[RemoteAgent, str], None],
        on_reached: Callable[[int], None],
    ) -> None:
        self.all = [RemoteAgent(index, host) for index, host in enumerate(hosts)]
        self.counts = StateCounts(len(self.all))
        self._poller = poller
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._on_reached = on_reached
        self._is_paused = False

    def set_state(self, agent: RemoteAgent, state: str) -> None:
        self.counts.change(agent.state, state)
        agent.state = state
        if state not in NOT_READY:
            self._on_reached(agent.index)

    def renew(self, index: int) -> RemoteAgent:
        """Free the place of a node whose agent has gone: another one may join there."""
        old = self.all[index]
        self.counts.change(old.state, "connecting")
        self.all[index] = new = RemoteAgent(index, old.host)
        new.name, new.node_rank = old.name, -1
        return new

    def attach(self, agent: RemoteAgent, connection: Connection) -> None:
        """Give the agent its connection."""
        agent.connection = connection
        agent.last_received_s = agent.alive_s = time.monotonic()
        agent.time = AgentTime()  # another machine may answer to the name now
        self._watch(agent, connection)
        self.set_state(agent, "connected")

    def disconnect(self, agent: RemoteAgent) -> None:
        """Close its connection, if it has one."""
        if agent.connection is not None:
            self._poller.unwatch(agent.connection.fileno())
            agent.connection.close()

    def send(self, agent: RemoteAgent, frame: bytes) -> None:
        """Send a frame, or keep it until there is room; an agent without a connection gets nothing."""
        if agent.connection is not None:
            agent.connection.send(frame)
            if agent.connection.wants_write:
                self._watch(agent, agent.connection)

    def send_all(self, frame: bytes, *states: str) -> None:
        """Send a frame to every agent, or to those in these states."""
        for agent in self.all:
            if not states or agent.state in states:
                self.send(agent, frame)

    def pause_reading(self, is_paused: bool) -> None:
        """Read from no agent, or from all again."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            for agent in self.all:
                if agent.connection is not None:
                    self._watch(agent, agent.connection)

    def _watch(self, agent: RemoteAgent, connection: Connection) -> None:
        if not connection.has_ended:
            events = (0 if self._is_paused else READ) | (WRITE if connection.wants_write else 0)
            self._poller.watch(connection.fileno(), events, partial(self.read_one, agent))

    def read_one(self, agent: RemoteAgent) -> None:
        """Read once from an agent, and act on the frames."""
        connection = agent.connection
        if connection is None or connection.has_ended:
            return
        had_pending = connection.wants_write
        connection.flush()
        try:
            for kind, payload in connection.read():
                agent.last_received_s = time.monotonic()
                self._on_frame(agent, kind, payload)
        except LinkError as error:
            self._on_lost(agent, str(error))
            return
        except (KeyError, TypeError, ValueError) as error:  # a frame of the right form with impossible content
            self._on_lost(agent, f"its messages are not those of infini-run ({type(error).__name__}: {error})")
            return
        if not connection.has_ended:
            if had_pending:
                self._watch(agent, connection)
            return
        self._poller.unwatch(connection.fileno())
        # its command may still run, and its end will explain why the agent never became ready
        if agent.state in ("ready", "running", "done") or (agent.state == "connected" and not agent.has_command):
            self._on_lost(agent, "")

    def read_to_end(self, agent: RemoteAgent) -> None:
        """Read all that it has sent. Its command is gone, so no more comes. But a process that the command left
        behind (ControlPersist) may keep the connection open, so there may be no end to wait for."""
        while (connection := agent.connection) is not None and not connection.has_ended:
            if not is_readable(connection.fileno()):
                return
            self.read_one(agent)

    def close(self) -> None:
        """Close every connection, which kills what still runs on the nodes. Safe twice."""
        for agent in self.all:
            self.disconnect(agent)
