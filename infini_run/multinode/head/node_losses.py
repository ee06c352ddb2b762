"""Nodes that are unreachable, refuse, or are lost: the reason, and what follows for the job."""

from __future__ import annotations

import time

from infini_run.errors import InfiniRunError, NodeLost
from infini_run.multinode.head.head_state import HEARTBEATS
from infini_run.multinode.head.rendezvous import explain_missed, join_names
from infini_run.multinode.link.lease import LEAST_LEASE
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.engine_processes import EngineExit, EngineProcesses
    from infini_run.multinode.head.head_state import HeadState, NodeChanges

_OTHERS_S = 2.0  # after the first node that cannot be reached, for others that cannot be reached either
_NEVER = float("inf")
_ENDED = "its connection closed"  # all that the head knows of a manual launcher
_CANCELLED_S = 60.0  # from the end of its steps to that of an allocation: twice Slurm's KillWait


class NodeLosses:
    def __init__(self, state: HeadState, processes: EngineProcesses) -> None:
        self._state = state
        self._processes = processes
        self._missed: list[tuple[RemoteAgent, InfiniRunError]] = []  # nodes that cannot be reached, or refuse
        self._missed_end_s = _NEVER
        self._cancelled_s = -_NEVER  # when the engine has last said so (monotonic)
        self._engine_exit: EngineExit | None = None  # of one command for all nodes, before they were over
        self._stops_for_engine = False
        self._reported_absence_s = 0.0  # the time of the last own absence that a line reported

    @property
    def next_deadline_s(self) -> float:
        return self._missed_end_s if self._state.is_joining else _NEVER

    @property
    def awaits_others(self) -> bool:
        """Whether some nodes are known to be missing, and others may follow soon."""
        return bool(self._missed) and not self._state.is_stopping

    @property
    def is_engine_ending(self) -> bool:
        """Whether an engine that has lost a node may be ending all that it has started."""
        is_unexplained = any(agent.is_unexplained for agent in self._state.agents.all)
        return (self._stops_for_engine or is_unexplained) and not self._state.engine.USES_STDIO

    # ---- before the ranks start

    def on_refusal(self, agent: RemoteAgent, error: InfiniRunError) -> None:
        """Act on a node's refusal. Before the first attempt that ends the job, because the others would refuse, too;
        later the head excludes the node, and retries."""
        changes = self._state.changes
        if changes is None:
            self.on_missed(agent, error)
            return
        if not changes.has_started:
            self._state.fail(error)
            return
        self._state.agents.disconnect(agent)
        changes.refuse(agent, str(error))
        changes.on_refused(agent, f"{agent.title} cannot run its ranks")
        self.free_place(agent)

    def on_missed(self, agent: RemoteAgent, error: InfiniRunError) -> None:
        """Act on a node that is unreachable, or refuses. If each node has a separate command, others may be missing
        too, and one report names all."""
        if self._state.engine.MAX_CONCURRENT == 1 or self._state.is_stopping:
            self._state.fail(error)
            return
        self._missed.append((agent, error))
        self._missed_end_s = min(self._missed_end_s, time.monotonic() + _OTHERS_S)

    def fail_if_due(self, now_s: float) -> bool:
        """End the job for the missing nodes, as soon as no others are waited for. Return whether it ended."""
        is_due = self.awaits_others and (not self._state.is_joining or now_s >= self._missed_end_s)
        if is_due:
            self._state.fail(explain_missed(self._missed, self._state.agents.all))
        return is_due

    # ---- at any time

    def on_lost(self, agent: RemoteAgent, reason: str, *, was_reached: bool = False) -> None:
        """Act on an agent that has gone, or that the head gave up: its ranks are lost, and so is the job.

        Args:
            agent: the agent.
            reason: why; "" if unknown.
            was_reached: its command ended, and not because there is no way to its node.
        """
        state = self._state
        state.agents.disconnect(agent)
        if not reason and not agent.has_command:
            reason = _ENDED
        if state.is_over and state.changes is not None:
            return
        changes = state.changes if not state.stop_signal and state.error is None else None
        is_in_attempt = changes is None or (changes.is_running and agent.node_rank >= 0)
        if agent.state == "done" and not state.restarts.is_waiting and is_in_attempt:
            return  # its report is here
        if changes is not None:
            self._lose_place(changes, agent, reason, was_reached=was_reached)
            return
        was_running = agent.state in ("running", "done") or agent.was_running
        was_not_ready = agent.is_not_ready
        agent.was_running = was_running
        missed = "did not join" if was_reached else "could not be reached"
        what = f"lost {agent.title}" if was_running else f"{agent.title} {missed}"
        text = what + (reason and f": {reason}")
        error = self._own_absence() if was_running else None
        error = error or NodeLost(text, agent.name, agent.node_rank)
        agent.is_unexplained = reason in ("", _ENDED)
        state.agents.set_state(agent, "lost")
        agent.first_failure_s = min(agent.first_failure_s, time.monotonic())
        agent.loss = text if was_running else ""
        if state.observers is not None:
            state.observers.on_node_lost(agent, text)
        if was_not_ready:
            self.on_missed(agent, error)
            return
        if isinstance(state.error, NodeLost) and 0 <= agent.node_rank == state.error.node:
            state.error = error  # the same loss, with its reason
        state.fail(error)

    def _lose_place(self, changes: NodeChanges, agent: RemoteAgent, reason: str, *, was_reached: bool) -> None:
        """Lose the place: the job continues without this node."""
        state = self._state
        if agent.state == "lost":
            return
        absence = self._own_absence()
        if absence is not None and state.absence.since_s != self._reported_absence_s:
            self._reported_absence_s = state.absence.since_s
            state.notice(str(absence))
        was_running, was_not_ready = agent.state == "running", agent.is_not_ready
        was_before = absence is not None and agent.alive_s < state.absence.noticed_s
        has_given_up = was_before and not agent.is_silent
        how = f"lost {agent.title}"
        if was_not_ready or has_given_up:
            missed = "did not join" if was_reached else "could not be reached"
            how = f"{agent.title} {missed if was_not_ready else 'gave up this head'}"
        text = how + (f": {reason}" if reason else "")
        agent.was_running, agent.is_unexplained = was_running, reason in ("", _ENDED)
        state.agents.set_state(agent, "lost")
        if was_not_ready:
            changes.refuse(agent, text)
        else:
            agent.first_failure_s = min(agent.first_failure_s, time.monotonic())
            agent.loss = text if was_running else ""
            if state.observers is not None:
                state.observers.on_node_lost(agent, text)
            changes.on_lost(agent, text)
        self.free_place(agent)

    def free_place(self, agent: RemoteAgent) -> None:
        """Free the place of an agent that has gone, or was dismissed: another may join there. If the node has a
        separate command, its end comes first, with the reason. If its agent is silent, that has to end, too."""
        state, changes = self._state, self._state.changes
        if changes is None:
            return
        if self._processes.has_own_command(agent.index):
            if agent.is_silent:
                self._processes.kill({agent.index})
                known = [(agent.host, agent.index, agent.hello)]
                for command in state.engine.cleanup_commands(known, state.options):
                    if problem := self._processes.start_cleanup(command, [agent]):
                        state.notice(problem)
            return
        changes.reach_again(agent)

    def _own_absence(self) -> InfiniRunError | None:
        """Return the error of a suspension of this process that was so long that the nodes gave it up; else None."""
        limit_s = self._state.options.node_timeout_s
        # a longer ago one has done its harm; silence since then is noticed with the heartbeat after --node_timeout
        if not self._state.absence.is_recent(limit_s * (1 + 2 / HEARTBEATS)):
            return None
        is_elastic = self._state.options.is_elastic
        after = f"{duration_text(LEAST_LEASE * limit_s)} or more" if is_elastic else f"{limit_s:g} s"
        return InfiniRunError(
            "infini-run was suspended, or its machine slept: it sent no heartbeat for "
            f"{duration_text(self._state.absence.away_s)}, and nodes end their ranks after {after} without one "
            "(--node_timeout)"
        )

    def on_engine_exit(self, ended: EngineExit) -> None:
        """Act on the end of a command of the engine. Its nodes are lost, unless they finished or the head repeats the
        command. One command for all nodes ends when any node is lost; the connections show which one that is."""
        state = self._state
        agents = [state.agents.all[node] for node in ended.command.nodes or range(state.agents.counts.total)]
        if state.engine.USES_STDIO:
            for agent in agents:
                state.agents.read_to_end(agent)
        if state.is_over and state.changes is not None:
            return
        if state.changes is not None and not state.stop_signal and state.error is None:
            self._on_command_end(state.changes, ended, agents)
            return
        for agent in agents:
            if agent.state == "done" or (agent.state == "lost" and not agent.is_unexplained):
                continue
            if len(agents) > 1 and not agent.is_not_ready:
                self._engine_exit = ended
                continue
            if agent.is_not_ready and not state.is_stopping and self._processes.retry(ended):
                state.agents.disconnect(agent)
                state.agents.set_state(agent, "connecting")
                continue
            if agent.is_not_ready and state.is_stopping:  # the head killed its command, or does not need it any more
                state.agents.set_state(agent, "lost")
                continue
            preamble = "" if agent.connection is None else agent.connection.preamble
            # without the node's name the engine prefers the last line of its agent
            name = "" if agent.is_not_ready and not state.engine.USES_STDIO else agent.name
            reason = state.engine.explain_exit(name, ended.code, f"{preamble}\n{ended.stderr}")
            self.on_lost(agent, reason, was_reached=state.engine.has_reached(ended.code))
        if self._engine_exit is not None and not state.is_stopping:
            self._stops_for_engine = True
            state.stop()
        self.add_engine_reason()

    def _on_command_end(self, changes: NodeChanges, ended: EngineExit, agents: Sequence[RemoteAgent]) -> None:
        """Act on the end of a command as on_engine_exit does, for a job that continues."""
        state = self._state
        now_s = time.monotonic()
        if state.engine.was_cancelled(ended.stderr):
            self._cancelled_s = now_s
        if state.engine.is_allocation_over(ended.stderr):
            text = state.engine.explain_exit("", ended.code, ended.stderr)
            # the command that saw the cancellation may still run
            is_cancelled = state.engine.was_cancelled(self._processes.stderr())
            changes.on_allocation_over(text, was_cancelled=is_cancelled or now_s - self._cancelled_s < _CANCELLED_S)
        for agent in agents:
            if not ended.command.nodes and self._processes.has_own_command(agent.index):
                continue  # the agent before was the one that it had started
            preamble = "" if agent.connection is None else agent.connection.preamble
            reason = state.engine.explain_exit(agent.name, ended.code, f"{preamble}\n{ended.stderr}")
            has_ended = not ended.is_signalled and state.engine.has_agent_ended(ended.code)
            if agent.state == "lost":
                if has_ended:
                    changes.on_ended(agent)
                if ended.command.nodes:
                    changes.reach_again(agent)
            elif ended.command.nodes or agent.is_not_ready:
                if agent.is_not_ready and self._processes.retry(ended):
                    state.agents.disconnect(agent)
                    state.agents.set_state(agent, "connecting")
                    continue
                self.on_lost(agent, reason, was_reached=state.engine.has_reached(ended.code))
                if has_ended:
                    changes.on_ended(agent)
                if ended.command.nodes and agent.state == "lost" and state.agents.all[agent.index] is agent:
                    changes.reach_again(agent)

    def add_engine_reason(self) -> None:
        """Add the last output of the engine's one command to the reasons of the connections. One report has the nodes
        that went at once: the engine ends all of them, and may be faster than the message about the first."""
        state = self._state
        if self._engine_exit is None or state.stop_signal:
            return
        lost = sorted(
            (agent for agent in state.agents.all if agent.is_unexplained), key=lambda agent: agent.first_failure_s
        )
        host = lost[0].name if len(lost) == 1 and lost[0].was_running else ""
        reason = state.engine.explain_exit(host, self._engine_exit.code, self._engine_exit.stderr)
        if lost and isinstance(state.error, NodeLost) and state.error.node == lost[0].node_rank:
            others = f", and with it {join_names(lost[1:])}" if lost[1:] else ""
            lost[0].loss = f"lost {lost[0].title}{others}: {reason}"
            state.error = NodeLost(lost[0].loss, lost[0].name, lost[0].node_rank)
        elif (
            self._stops_for_engine and state.error is None and not lost and state.agents.counts.count("running") == 0
        ):
            state.error = InfiniRunError(reason)
