"""The head's part of membership: what happens to agents becomes events of membership.py, and its actions happen.

Only a job that continues without a node has one (Options.is_elastic). A place of membership.py is the index of an
agent in AgentSet. A lost place gets a fresh RemoteAgent, and the lost one stays in HeadState.world for the report.
"""

from __future__ import annotations

import time

from infini_run.errors import NodeLost, counted
from infini_run.multinode.head import membership
from infini_run.multinode.head.head_report import attempt_report, find_first_failure, losses
from infini_run.multinode.head.membership_transitions import advance, awaits_checks, describe_missing, next_due_s
from infini_run.multinode.head.rendezvous import join_names
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack, pack_json
from infini_run.options.nodes import MANUAL
from infini_run.plan.restart_policy import NOT_ENDED
from infini_run.report.text import signal_name
from infini_run.system.signal_numbers import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_state import HeadState

FENCE_S = 1.0  # beyond --node_timeout: for clocks that differ in rate, and for the guard to end the ranks
_CHECK_SLACK_S = 75.0  # beyond --node_check_timeout: for GPU memory that ranks give back, and to end the check
GUARD_WAIT_S = 1.0  # time for the guard of a dead agent to end its ranks
REDIAL_S = (0.2, 60.0)  # between two commands for a node that was lost; doubled each time
_KEPT_S = 3.0  # for a node that is well and was lost, as all are when the head was stopped: it asks every second
AT_ONCE_S = 2.0  # stop signals at launchers within this time have one reason
_NOTICE_S = 5.0  # between two lines about missing nodes
_NEVER = float("inf")


class WorldChanges:
    """The decision when which nodes run ranks, for a job that continues after the loss of one.

    Args:
        start_ranks: starts the ranks of these agents, in the order of their node ranks.
        reach: starts an agent on the node of that index once more, not before that time (monotonic).
        free_place: frees the place of an agent that has gone, or was dismissed.
        let_others_start: called when a world starts: commands for lost nodes may start although others wait.
    """

    def __init__(
        self,
        state: HeadState,
        *,
        start_ranks: Callable[[Sequence[RemoteAgent]], None],
        reach: Callable[[int, float], None],
        free_place: Callable[[RemoteAgent], None],
        let_others_start: Callable[[], None],
    ) -> None:
        options, agents = state.options, state.agents.all
        self._state = state
        self._start_ranks = start_ranks
        self._reach = reach
        self._free_place = free_place
        self._let_others_start = let_others_start
        self._rules = membership.Rules(
            least=options.least_nodes,
            most=options.nnodes,
            window_s=options.join_window_s,
            join_s=options.join_timeout_s,
            max_failures=options.max_node_failures,
            grows=options.on_join == "restart",
            check_s=options.node_check_timeout_s + _CHECK_SLACK_S,
            has_check=state.has_check,
        )
        self._is_by_hand = state.node_list.engine == MANUAL
        self._membership = membership.begin([agent.name for agent in agents], needed=0 if self._is_by_hand else -1)
        self._due_s = _NEVER
        self._notice_s = time.monotonic() + _NOTICE_S
        self._redial_s = dict.fromkeys(range(len(agents)), REDIAL_S[0])
        self._stop_signals_s: dict[int, float] = {}  # when launchers on nodes were told to stop, by place
        self._exit_codes: dict[int, int] = {}  # of launchers that leave
        self._refusals: dict[int, str] = {}  # why a place is empty, if a line has said it
        self._fenced: dict[int, RemoteAgent] = {}  # the last agent of a place that was lost while it ran ranks
        self._newcomers: list[int] = []  # places whose agents have become ready in this turn of the loop
        self._cleared: list[int] = []  # those where nothing old lives
        self._last_end = (-1, "")
        self._begin_s = time.monotonic()
        self._restart_due_s: float | None = None  # a worker has failed, and its owner wants the next world

    # ---- the loop

    @property
    def next_deadline_s(self) -> float:
        notice_s = self._notice_s if self._is_waiting else _NEVER
        return min(self._due_s, notice_s)

    @property
    def _is_waiting(self) -> bool:
        return self._membership.phase == "gathering" and not self._state.is_stopping

    @property
    def has_started(self) -> bool:
        """Whether there was a first attempt."""
        return self._membership.world >= 0

    @property
    def is_running(self) -> bool:
        """Whether an attempt runs, or is about to stop."""
        return self._membership.phase in ("running", "stopping")

    @property
    def world(self) -> tuple[int, Sequence[RemoteAgent]]:
        """The number of the last world, -1 if there was none, and its agents by node rank."""
        return self._membership.world, self._state.world if self.has_started else ()

    @property
    def world_end(self) -> tuple[int, str]:
        """The latest world that ended or is about to end without a `restart`; and why."""
        m = self._membership
        return (m.world, m.reason) if m.reason else self._last_end

    def restart(self, world: int, place_index: int, due_s: float) -> None:
        """End a world, because a worker of the program that owns this launch has failed; the next one follows.

        Args:
            world: its number; nothing happens after its end.
            place_index: of the node whose worker was the first to fail.
            due_s: the next one starts not before (monotonic).
        """
        if world == self._membership.world and self.is_running and not self._state.is_unwanted:
            self._restart_due_s = due_s
            self._handle(membership.Failed(place_index=place_index))
            self._state.stop()

    def begin(self) -> None:
        """Note that the head begins to reach the first nodes."""
        self._handle(membership.Began())

    def run_due(self, now_s: float) -> None:
        """Let newcomers join, end what has waited long enough, and report who is waited for."""
        self._admit()
        if now_s >= self._due_s and not self._state.is_stopping:
            self._handle(membership.TimePassed())
        if now_s >= self._notice_s:
            self._notice_s = now_s + _NOTICE_S
            if self._is_waiting:
                self._print_missing(now_s)

    def _handle(self, event: object) -> None:
        self._admit()
        self._advance(event)

    def _admit(self) -> None:
        """Let those join that have become ready, with one event: each event looks at all places."""
        agents, places, self._newcomers = self._state.agents.all, self._newcomers, []
        cleared, self._cleared = tuple(self._cleared), []
        if cleared:
            self._advance(membership.Gone(places=cleared, fence_s=time.monotonic()))
        if ready := tuple(at for at in places if agents[at].state == "ready"):
            self._advance(membership.Joined(places=ready))

    def _advance(self, event: object) -> None:
        state = self._state
        if state.is_unwanted or (state.is_stopping and not self.is_running):
            return  # no world starts any more
        now_s = time.monotonic()
        self._membership, actions = advance(self._membership, event, now_s, self._rules)
        self._due_s = next_due_s(self._membership, now_s, self._rules)
        for action in actions:
            _ACTIONS[type(action)](self, action)

    def _print_missing(self, now_s: float) -> None:
        m = self._membership
        fenced = max(place.fence_s for place in m.places)
        earlier_s = m.due_s if not self.has_started and m.wait_end_s == _NEVER else -_NEVER
        if max(fenced, earlier_s) > now_s + 0.05:
            left_s = max(fenced, earlier_s) - now_s
            whose = "a lost node" if fenced >= earlier_s else "an earlier head's job"
            self._state.print(f"waiting up to {left_s:.1f} s until the ranks of {whose} are gone")
            return
        checking = [place.name for place in m.places if place.state == "checking"]
        if checking and (awaits_checks(m, self._rules) or not m.having("absent")):
            self._state.print(f"waiting for the check of {', '.join(checking[:8])}")
        elif now_s + 0.5 < m.wait_end_s < _NEVER:
            left_s = max(0.0, m.wait_end_s - now_s)
            self._state.print(f"{describe_missing(m, self._rules)}; waiting {left_s:.0f} s more")
        elif now_s + 0.5 < m.window_end_s < _NEVER:
            here = len(m.having("spare", "joined", "checking"))
            left_s = m.window_end_s - now_s
            nodes = "node" if here == 1 else "nodes"
            self._state.print(
                f"{here} {nodes} joined, {self._rules.least} needed; waiting {left_s:.0f} s more for others "
                "(--join_window)"
            )

    def postpone(self, by_s: float) -> None:
        """Move the limits by a suspension of this process. What was due in it stays due: a restart, say."""
        self._membership = membership.postpone(self._membership, by_s)

    # ---- what happens to agents

    def on_ready(self, agent: RemoteAgent) -> None:
        """Act on the HELLO of an agent."""
        at = agent.index
        place = self._membership.places[at]
        order = (at > 0, *membership.natural_key(agent.name)) if self._is_by_hand else (at,)
        if (place.name, place.order) != (agent.name, order):
            self._membership = membership.rename(self._membership, at, agent.name, order)
        lost = self._fenced.get(at)
        if lost is not None and proves_nothing_old_lives(agent, lost, is_by_hand=self._is_by_hand):
            del self._fenced[at]
            self._cleared.append(at)
        self._newcomers.append(at)

    def on_earlier_job(self, node_timeout_s: float) -> None:
        """Act on a launcher that met another head's job. That head had gone at this start, for its port was free.
        Nodes that cannot come here may run its ranks until the end of their leases."""
        now_s, end_s = time.monotonic(), self._begin_s + node_timeout_s + FENCE_S
        if self._is_waiting and not self.has_started and end_s > max(now_s, self._membership.due_s):
            self._state.print(
                "an earlier head is gone, and nodes without connection may still run its ranks; the first attempt "
                f"starts in {end_s - now_s:.1f} s or later"
            )
            self._membership = membership.delay(self._membership, end_s)
            self._handle(membership.TimePassed())

    def on_checked(self, agent: RemoteAgent, reason: str) -> None:
        """Act on the end of its node's check. reason: why it failed, or ""."""
        self._handle(membership.Checked(place_index=agent.index, reason=reason))

    def on_failed(self, agent: RemoteAgent) -> None:
        """Note that a rank there was the first to fail."""
        self._handle(membership.Failed(place_index=agent.index))

    def on_stop_signal(self, agent: RemoteAgent, number: int) -> bool:
        """Act on a signal at the launcher of a node that asks for the end. If most nodes get one at once, the job is
        meant; else only that node."""
        now_s = time.monotonic()
        self._stop_signals_s[agent.index] = now_s
        signalled = {place for place, at_s in self._stop_signals_s.items() if now_s - at_s <= AT_ONCE_S}
        here = {other.index for other in self._state.world}
        here |= {other.index for other in self._state.agents.all if other.is_spare}
        if 2 * len(signalled) > len(here | signalled):  # some of which have left meanwhile
            return False
        text = f"{agent.title}: got {signal_name(number)} there, and leaves"
        self._exit_codes[agent.index] = 128 + number
        agent.is_leaving = True
        if agent.state == "done" and self._membership.places[agent.index].state == "active":
            # its ranks exited, and its launcher with them; others may keep running
            self._state.notice(text)
        else:
            self._handle(membership.Leaving(place_index=agent.index, reason=text))
        return True

    def on_lost(self, agent: RemoteAgent, text: str) -> None:
        """Act on the loss of an agent that was ready; `text` is a line about it. Its ranks may live until the end of
        its lease."""
        if agent.index in self._newcomers:
            self._newcomers.remove(agent.index)
            self._state.notice(f"{text}; no rank ran there")
            return
        fence_s = agent.last_received_s + self._state.options.node_timeout_s + FENCE_S
        if agent.has_last_word:
            fence_s = time.monotonic()
        elif self._membership.places[agent.index].state == "active":
            self._fenced[agent.index] = agent
        self._handle(membership.Lost(place_index=agent.index, fence_s=fence_s, reason=text))

    def on_ended(self, agent: RemoteAgent) -> None:
        """Note the proof that the process of a lost agent is gone. A newcomer's end proves nothing about the ranks of
        the agent before."""
        if self._fenced.get(agent.index) is agent:
            del self._fenced[agent.index]
            self._handle(membership.Gone(places=(agent.index,), fence_s=time.monotonic() + GUARD_WAIT_S))

    @property
    def lost_agents(self) -> Iterable[RemoteAgent]:
        """The lost agents whose ranks may live."""
        return self._fenced.values()

    def on_last_word(self, agent: RemoteAgent) -> None:
        """Note the proof that nothing lives any more of what a lost agent started."""
        if self._fenced.get(agent.index) is agent:
            del self._fenced[agent.index]
            self._handle(membership.Gone(places=(agent.index,), fence_s=time.monotonic()))

    def on_nothing_old_lives(self, agent: RemoteAgent) -> None:
        """Note that what SIGKILL did not end there is gone; the job ended for that reason."""

    def on_refused(self, agent: RemoteAgent, text: str) -> None:
        """Note that an agent cannot run ranks, and has gone."""
        self._handle(membership.Refused(place_index=agent.index, reason=text))

    def refuse(self, agent: RemoteAgent, text: str) -> None:
        """Report that a node is unreachable, or refuses, once for each reason."""
        if self._refusals.get(agent.index) != text:
            self._refusals[agent.index] = text
            self._state.notice(text)

    def reach_again(self, agent: RemoteAgent) -> None:
        """Free a place: somebody may join there, or the head reaches it again after a while."""
        at = agent.index
        if self._state.is_stopping and (self._membership.phase == "ended" or self._state.is_unwanted):
            return
        kept_end_s = min(self._membership.places[at].fence_s, time.monotonic() + _KEPT_S)
        self._state.agents.renew(at).kept_end_s = kept_end_s
        self._reach(at, time.monotonic() + self._redial_s[at])
        self._redial_s[at] = min(2 * self._redial_s[at], REDIAL_S[1])

    def on_allocation_over(self, text: str, *, was_cancelled: bool) -> None:
        """Note that no node is reachable any more. If somebody asked for that, a signal stopped the job, although
        perhaps no launcher had the time to report it before its SIGKILL."""
        state = self._state
        if state.stop_signal:
            return
        if was_cancelled:
            state.notice(f"{signal_name(SIGTERM)} reached all nodes: their allocation ended")
            state.stop_signal = SIGTERM
            state.stop(by_signal=True)
        else:
            state.fail(NodeLost(f"the allocation ended: {text}", "", -1))

    # ---- the end of a world

    def is_over(self) -> bool:
        """Return whether nothing of the job is left on any node, and no restart follows."""
        state = self._state
        if state.agents.counts.count("running"):
            return False
        if not self.is_running:
            return state.is_stopping
        return not self._goes_on()

    def _goes_on(self) -> bool:
        """Return whether another world follows the finished one."""
        state, m = self._state, self._membership
        if state.stop_signal or state.error is not None or state.is_unwanted:
            return False
        report = attempt_report(state)
        if report.first_failure is not None and report.first_failure.asked_again:
            return False
        asked_s, self._restart_due_s = self._restart_due_s, None
        failed = -1
        if m.reason or asked_s is not None:
            if report.stuck:
                state.restarts.give_up(NOT_ENDED)
                return False
            if not state.restarts.go_on(find_first_failure(state, report), m.reason or "a worker failed"):
                state.error = NodeLost(m.reason, "", -1)
                return False
            due_s = -_NEVER if m.reason or asked_s is None else asked_s
            self._last_end = (m.world, m.reason)
        else:
            line = state.restarts.decide(report)
            if not line:
                return False
            state.print(line)
            due_s = state.restarts.due_s
            failed = min(state.world, key=lambda agent: agent.first_failure_s).index
            state.restarts.end_wait()
            self._last_end = (m.world, line)
        state.is_stopping, state.stop_end_s = False, _NEVER
        for agent in state.agents.all:
            agent.first_failure_s = _NEVER
        if state.observers is not None:
            state.observers.rest()
        for agent in [agent for agent in state.agents.all if agent.state == "done"]:
            if agent.connection is None or agent.connection.has_ended:  # it went after its ranks exited
                reason = "" if agent.is_leaving else f"{agent.title} is gone"
                self._handle(membership.Lost(place_index=agent.index, fence_s=-_NEVER, reason=reason))
                state.agents.set_state(agent, "lost")
                self._free_place(agent)
        self._handle(membership.Over(due_s=due_s, failed=failed))
        return True

    # ---- actions

    def _start(self, action: membership.Start) -> None:
        state = self._state
        agents = [state.agents.all[at] for at in action.places]
        changes = self._describe(agents) if action.world else ""
        state.losses = losses(state)
        state.world = agents
        for rank, agent in enumerate(agents):
            agent.node_rank = rank
            self._redial_s[agent.index] = REDIAL_S[0]
            self._refusals.pop(agent.index, None)
        places = self._membership.places
        chosen = set(action.places)
        others = [agent for agent in state.agents.all if agent.index not in chosen]
        for agent in others:
            agent.node_rank = -1
        spares = [agent for agent in others if places[agent.index].state in ("spare", "joined", "checking")]
        if changes:
            state.notice(f"attempt {action.world + 1}: {changes}")
        elif spares and not action.world:
            state.print(f"running on {counted(len(agents), 'node')}; spares: {join_names(spares)}")
        self._let_others_start()
        self._start_ranks(agents)

    def _describe(self, agents: list[RemoteAgent]) -> str:
        """Return what is new in the next world, and why it is without a node of the last one."""
        before, count, places = self._state.world, len(agents), self._membership.places
        if count != len(before):
            how = "smaller" if count < len(before) else "larger"
            names = ", ".join(agent.name for agent in agents[:8])
            staying = {(agent.index, agent.name) for agent in agents}
            gone = [old for old in before if (old.index, old.name) not in staying]
            why = ", ".join(f"{old.name} {places[old.index].gone}" for old in gone[:8])
            text = f"{how}: {count} node{'s' * (count > 1)} instead of {len(before)}: {names}"
            return text + (f" ({why})" if why else "")
        new = [
            f"{agent.name} replaces {old.name} as node {rank} ({old.name} {places[old.index].gone})"
            for rank, (old, agent) in enumerate(zip(before, agents, strict=True))
            if old.index != agent.index or old.name != agent.name
        ]
        return "; ".join(new) or f"the same {count} node{'s' * (count > 1)}"

    def _stop(self, action: membership.Stop) -> None:
        self._state.notice(f"{action.reason}; restarting all ranks")
        self._state.stop()

    def _check(self, action: membership.Check) -> None:
        self._state.agents.send(self._state.agents.all[action.place_index], pack(protocol.CHECK))

    def _dismiss(self, action: membership.Dismiss) -> None:
        agent = self._state.agents.all[action.place_index]
        exit_code = self._exit_codes.pop(action.place_index, 1)
        self._state.agents.send(agent, pack_json(protocol.GOODBYE, {"exit_code": exit_code}))
        self._state.agents.disconnect(agent)
        self._state.agents.set_state(agent, "lost")
        self._redial_s[agent.index] = REDIAL_S[1]  # somebody there wants it to be gone
        self._free_place(agent)

    def _print_notice(self, action: membership.Notice) -> None:
        self._state.notice(action.text)

    def _end(self, action: membership.End) -> None:
        why = "; ".join(dict.fromkeys(self._refusals.values()))
        self._state.fail(NodeLost(action.reason + (f"; {why}" if why else ""), "", -1))


def proves_nothing_old_lives(agent: RemoteAgent, lost: RemoteAgent, *, is_by_hand: bool) -> bool:
    """Return whether the new agent of a place proves that no rank of the lost one lives. It sees the same processes
    and finds none; or the engine reaches that host by its name, and it has booted since."""
    boot, _, namespace = str(lost.hello["machine"]).partition(" ")
    new_boot, _, new_namespace = str(agent.hello["machine"]).partition(" ")
    if not boot:
        return False
    if boot == new_boot:
        return namespace == new_namespace and bool(agent.hello["is_clear"])
    return bool(new_boot) and not is_by_hand


_ACTIONS: dict[type, Callable[[WorldChanges, Any], None]] = {
    membership.Start: WorldChanges._start,
    membership.Stop: WorldChanges._stop,
    membership.Check: WorldChanges._check,
    membership.Dismiss: WorldChanges._dismiss,
    membership.Notice: WorldChanges._print_notice,
    membership.End: WorldChanges._end,
}
