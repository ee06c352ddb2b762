"""Heartbeats between the head and its agents: a node that sends nothing for --node_timeout is lost."""

from __future__ import annotations

import time

from infini_run.multinode.head.head_state import HEARTBEATS
from infini_run.multinode.link.clock_offset import clock_question

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.multinode.head.node_losses import NodeLosses

_AWAY = 10  # a gap of at least this part of --node_timeout was the head's own absence; any machine has shorter ones


class Liveness:
    """Heartbeats, each with a question about the agent's clocks. It also keeps the leases of nodes whose requests the
    head does not read in time, and gives up nodes that do not answer."""

    def __init__(self, state: HeadState, losses: NodeLosses) -> None:
        self._state = state
        self._losses = losses
        self.next_deadline_s = time.monotonic()

    def run_due(self, now_s: float) -> None:
        """Send the heartbeats, if they are due."""
        if now_s < self.next_deadline_s:
            return
        state = self._state
        timeout_s, is_paused = state.options.node_timeout_s, state.console.is_backlogged
        self.next_deadline_s = now_s + timeout_s / HEARTBEATS
        state.absence.on_heartbeat()
        for agent in state.agents.all:
            if agent.state == "connected" and state.options.is_elastic and not is_paused:
                self._check_joining(agent, now_s)
            if agent.state not in ("ready", "running", "done"):  # one that is done waits for GOODBYE, and listens
                continue
            if is_paused:  # the head reads from nobody: what it has sent is on its way
                agent.last_received_s = now_s
                if state.options.is_elastic:
                    self._grant(agent)
            elif now_s - agent.last_received_s > timeout_s:
                agent.is_silent = True
                is_over = state.engine.ENDS_STOPPED or state.options.is_elastic  # its lease killed its ranks by then
                hint = "" if is_over else "; if its agent is only suspended, its ranks stay"
                self._losses.on_lost(agent, f"no message from it for {timeout_s:g} s (--node_timeout){hint}")
                continue
            state.agents.send(agent, clock_question())

    def keep_lease(self, agent: RemoteAgent) -> None:
        """Keep the lease of an agent with a fresh frame, however much output precedes its requests."""
        options = self._state.options
        if options.is_elastic and agent.time.is_request_overdue(options.node_timeout_s):
            self._grant(agent)

    def _grant(self, agent: RemoteAgent) -> None:
        grant = agent.time.grant()
        agent.last_received_s = time.monotonic()  # not before: the fence must not count from before the lease
        self._state.agents.send(agent, grant)

    def _check_joining(self, agent: RemoteAgent, now_s: float) -> None:
        """Give up a node that has connected and says nothing: nobody else can have its place."""
        limit_s = self._state.options.join_timeout_s
        if now_s - agent.last_received_s > limit_s:
            agent.is_silent = True
            self._losses.on_lost(agent, f"it did not describe itself within {limit_s:g} s (--join_timeout)")

    def ask_running(self) -> None:
        """Ask all nodes for a sign of life now: a rank has failed, and a node that does not answer may be the
        reason."""
        for agent in self._state.agents.all:
            if agent.state == "running":
                self._state.agents.send(agent, clock_question())

    def was_away(self, away_s: float) -> bool:
        """Note a suspension of this process, if it is long enough to matter: the nodes were not silent meanwhile."""
        if away_s < self._state.options.node_timeout_s / _AWAY:
            return False
        now_s = time.monotonic()
        for agent in self._state.agents.all:
            agent.last_received_s = min(now_s, agent.last_received_s + away_s)
        self.next_deadline_s = now_s
        return True

    def suspend(self) -> float:
        """Suspend this process until SIGCONT, while a fork of it sends the heartbeats.

        Returns:
            How long that was, in seconds; 0 if there could be no fork, so the nodes were without heartbeats.
        """
        from infini_run.core.signal_pipe import stop_self
        from infini_run.multinode.link.heartbeat_process import HeartbeatProcess, no_frame

        state, start_s = self._state, time.monotonic()
        state.absence.notice()
        targets = {
            agent.connection: agent.time.grant if state.options.is_elastic else no_frame
            for agent in state.agents.all
            if agent.connection is not None and not agent.connection.has_ended
        }
        timeout_s = state.options.node_timeout_s
        try:
            substitute = HeartbeatProcess(targets, timeout_s / HEARTBEATS)
        except OSError as error:
            limit = f"{timeout_s:g} s (--node_timeout)"
            state.notice(f"the nodes will get no messages from this head, and give up in {limit}: {error.strerror}")
            stop_self()
            return 0.0
        stop_self()
        substitute.end()
        state.absence.excuse()
        if state.options.is_elastic:  # the leases that were granted until now count from now
            for agent in state.agents.all:
                agent.last_received_s = time.monotonic()
        return time.monotonic() - start_s
