"""Nodes that are each for themselves: the loss of one ends nothing on the others.

world_changes.py is for a job, this for a crew, which starts and moves workers itself. Each node that is ready, and
has passed its check, runs one process with a byte stream to the head. The processes of a lost node may start
somewhere else after `RemoteAgent.fence_s`: by then none of them lives (docs/decisions/0052).
"""

from __future__ import annotations

import time

from infini_run.errors import NodeLost
from infini_run.multinode.head.head_report import attempt_report
from infini_run.multinode.head.membership_transitions import CHECK_OUT_S
from infini_run.multinode.head.world_changes import (
    AT_ONCE_S,
    FENCE_S,
    GUARD_WAIT_S,
    REDIAL_S,
    proves_nothing_old_lives,
)
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack, pack_json
from infini_run.report.exit import name_processes
from infini_run.report.text import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_state import HeadState

_NEVER = float("inf")


class IndependentNodes:
    """The starter of each node's process, and of a new agent on a lost node.

    Args:
        start_ranks: starts the process of these agents' nodes.
        reach: starts an agent on the node of that index once more, not before that time (monotonic).
        free_place: frees the place of an agent that has gone, or was dismissed.
        let_others_start: called when something starts: commands for lost nodes may start although others wait.
    """

    is_running = False  # no node is part of something that ends as a whole

    def __init__(
        self,
        state: HeadState,
        *,
        start_ranks: Callable[[Sequence[RemoteAgent]], None],
        reach: Callable[[int, float], None],
        free_place: Callable[[RemoteAgent], None],
        let_others_start: Callable[[], None],
    ) -> None:
        self._state = state
        self._start_ranks = start_ranks
        self._reach = reach
        self._free_place = free_place
        self._let_others_start = let_others_start
        self._start_due_s: dict[RemoteAgent, float] = {}  # when its process starts
        self._check_due_s: dict[RemoteAgent, float] = {}  # when its node is checked again
        self._something_old_lives: set[RemoteAgent] = set()  # something there did not end by SIGKILL
        self._redial_s = dict.fromkeys(range(len(state.agents.all)), REDIAL_S[0])
        self._started_s: dict[int, float] = {}  # when the process of a node has started last
        self._lost: dict[int, RemoteAgent] = {}  # the last one of each node
        self._refusals: dict[int, str] = {}
        self._stop_signals_s: dict[int, float] = {}  # when launchers on nodes were told to stop, by node
        self.has_started = False

    @property
    def next_deadline_s(self) -> float:
        return min([*self._start_due_s.values(), *self._check_due_s.values()], default=_NEVER)

    def begin(self) -> None:
        """Note that the head begins to reach the first nodes."""

    def run_due(self, now_s: float) -> None:
        """Start the processes and the checks that are due."""
        for agent in self._state.agents.all:
            if agent.state == "done" and agent not in self._start_due_s and agent not in self._something_old_lives:
                self._on_done(agent)
        if self._state.is_stopping:
            self._start_due_s.clear()
            self._check_due_s.clear()
        for agent in [agent for agent, due_s in self._start_due_s.items() if now_s >= due_s]:
            self._start(agent)
        for agent in [agent for agent, due_s in self._check_due_s.items() if now_s >= due_s]:
            del self._check_due_s[agent]
            self._state.agents.send(agent, pack(protocol.CHECK))

    def postpone(self, by_s: float) -> None:
        """Move no limit by a suspension of this process: nodes have none."""

    def _start(self, agent: RemoteAgent) -> None:
        del self._start_due_s[agent]
        agent.fence_s = _NEVER
        self.has_started = True
        self._let_others_start()
        self._started_s[agent.index] = time.monotonic()
        self._refusals.pop(agent.index, None)
        # each start has a new number, and so a new id: a guard may still look for processes of the last one
        self._state.restarts.go_on(attempt_report(self._state).first_failure, f"{agent.name} runs workers")
        self._start_ranks([agent])

    def _on_done(self, agent: RemoteAgent) -> None:
        """Note the end of its process, with all that it had started, unless SIGKILL did not end something."""
        stuck = () if agent.report is None else agent.report.stuck
        if stuck:
            self._something_old_lives.add(agent)
            text = f"{agent.title}: SIGKILL did not end process {name_processes(stuck)}"
            self._state.notice(f"{text}; its workers start nowhere until it is gone")
            return
        self._on_nothing_old_lives(agent)

    def _on_nothing_old_lives(self, agent: RemoteAgent) -> None:
        agent.fence_s = -_NEVER
        if not agent.is_leaving:
            self._start_due_s[agent] = time.monotonic() + self._back_off(agent.index)
        elif not self._state.is_stopping:
            self._let_go(agent)

    def _let_go(self, agent: RemoteAgent) -> None:
        """Dismiss an agent that was asked to stop."""
        agents = self._state.agents
        agents.send(agent, pack_json(protocol.GOODBYE, {"exit_code": 1}))
        agents.disconnect(agent)
        agents.set_state(agent, "lost")
        self._drop_plans(agent)
        self._redial_s[agent.index] = REDIAL_S[1]  # somebody there wants it to be gone
        self._free_place(agent)

    def _back_off(self, index: int) -> float:
        """Return how long to wait before the next try there, in seconds. Each wait is twice as long as the last one,
        unless all went well for twice as long as that."""
        now_s = time.monotonic()
        if now_s - self._started_s.pop(index, now_s) > 2 * self._redial_s[index]:
            self._redial_s[index] = REDIAL_S[0]
        wait_s = self._redial_s[index]
        self._redial_s[index] = min(2 * wait_s, REDIAL_S[1])
        return wait_s

    def _drop_plans(self, agent: RemoteAgent) -> None:
        self._start_due_s.pop(agent, None)
        self._check_due_s.pop(agent, None)
        self._something_old_lives.discard(agent)

    # ---- what happens to agents

    def on_ready(self, agent: RemoteAgent) -> None:
        """Act on the HELLO of an agent."""
        now_s, lost = time.monotonic(), self._lost.pop(agent.index, None)
        if lost is not None and lost.fence_s > now_s and proves_nothing_old_lives(agent, lost, is_by_hand=False):
            lost.fence_s = now_s
        if lost is not None or agent.index in self._refusals:
            self._state.notice(f"{agent.name} joined")
        if self._state.has_check:
            self._check_due_s[agent] = now_s
        else:
            self._start_due_s[agent] = now_s

    def on_checked(self, agent: RemoteAgent, reason: str) -> None:
        """Act on the end of its node's check. reason: why it failed, or ""."""
        if reason:
            self.refuse(agent, f"excluded {agent.name}: {reason}")
            self._check_due_s[agent] = time.monotonic() + CHECK_OUT_S
        else:
            self._start_due_s[agent] = time.monotonic()

    def on_failed(self, agent: RemoteAgent) -> None:
        """Note that its process failed; its end follows."""

    def on_stop_signal(self, agent: RemoteAgent, number: int) -> bool:
        """Act on a signal at the launcher of a node that asks for the end. If most nodes get one at once, all of them
        are meant; else only that node."""
        state, now_s = self._state, time.monotonic()
        self._stop_signals_s[agent.index] = now_s
        recent_s = [at_s for at_s in self._stop_signals_s.values() if now_s - at_s <= AT_ONCE_S]
        if 2 * len(recent_s) > state.agents.counts.count("ready", "running", "done"):
            return False
        agent.is_leaving, agent.loss = True, f"{agent.title}: got {signal_name(number)} there, and leaves"
        state.notice(agent.loss)
        if agent.state == "running":
            state.agents.send(agent, pack_json(protocol.STOP, {"signal": 0, "by_signal": True, "after_s": 0}))
        else:
            self._let_go(agent)
        return True

    def on_allocation_over(self, text: str, *, was_cancelled: bool) -> None:
        """Note that no node is reachable any more."""
        self._state.fail(NodeLost(f"the allocation ended: {text}", "", -1))

    def on_lost(self, agent: RemoteAgent, text: str) -> None:
        """Act on the loss of an agent that was ready. Its processes may live until the end of its lease."""
        self._drop_plans(agent)
        self._lost[agent.index] = agent
        agent.loss = agent.loss or text
        if agent.was_running:
            agent.fence_s = agent.last_received_s + self._state.options.node_timeout_s + FENCE_S
        if agent.has_last_word:
            agent.fence_s = time.monotonic()
        self._state.notice(text)

    def on_ended(self, agent: RemoteAgent) -> None:
        """Note the proof that the process of a lost agent is gone."""
        if agent is self._lost.get(agent.index):
            agent.fence_s = min(agent.fence_s, time.monotonic() + GUARD_WAIT_S)

    @property
    def lost_agents(self) -> Iterable[RemoteAgent]:
        """The lost agents whose processes may live."""
        return self._lost.values()

    def on_last_word(self, agent: RemoteAgent) -> None:
        """Note the proof that nothing lives any more of what a lost agent started."""
        if agent is self._lost.get(agent.index):
            agent.fence_s = min(agent.fence_s, time.monotonic())

    def on_earlier_job(self, node_timeout_s: float) -> None:
        """Ignore an earlier job: no manual launch joins such a job."""

    def on_nothing_old_lives(self, agent: RemoteAgent) -> None:
        """Note that what SIGKILL did not end there is gone."""
        if agent in self._something_old_lives:
            self._something_old_lives.discard(agent)
            self._on_nothing_old_lives(agent)

    def on_refused(self, agent: RemoteAgent, text: str) -> None:
        """Note that an agent could not start its process: nothing lives there, and a new agent retries."""
        agent.fence_s = -_NEVER

    def refuse(self, agent: RemoteAgent, text: str) -> None:
        """Report that a node is unreachable, or refuses, once for each reason."""
        if self._refusals.get(agent.index) != text:
            self._refusals[agent.index] = text
            self._state.notice(text)

    def reach_again(self, agent: RemoteAgent) -> None:
        """Reach a node again after a while: the place of its last agent is free."""
        if not self._state.is_stopping:
            self._state.agents.renew(agent.index)
            self._reach(agent.index, time.monotonic() + self._back_off(agent.index))

    def is_over(self) -> bool:
        """Return whether nothing is left on any node, and no restart follows."""
        return self._state.is_stopping and not self._state.agents.counts.count("running")
