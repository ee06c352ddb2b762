"""A hang on many nodes: all look at their ranks when one notices it, and the head reports whom the others wait for.

The node that notices a hang has ranks that wait; the rank that they wait for is often elsewhere. So no node decides
alone: the head asks all, folds their snapshots, and then stops the job, if --on_hang=stop.

With --snapshots=failure, all look before the job is stopped for a failure, too. Their reports have those snapshots.
"""

from __future__ import annotations

import time

from infini_run.multinode.link import message_schema, protocol
from infini_run.multinode.link.clock_offset import clock_question
from infini_run.multinode.link.protocol import pack_json
from infini_run.multinode.link.record_codec import decode_record
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.report.hang_snapshot import HangSnapshot

LIMIT_S = 15.0  # for all nodes: two looks and py-spy's limit, and a slow link
_SLOW_LINK_S = 0.2  # there and back, and _SLOW_LINK times the median: worth a word
_SLOW_LINK = 10


class HangPhase:
    """The head's side of one hang at a time."""

    def __init__(self, state: HeadState) -> None:
        self._state = state
        self._snapshots: list[HangSnapshot] = []
        self._ranks_to_stop: list[int] = []
        self._waiting: list[RemoteAgent] = []  # nodes that have not answered
        self._is_before_stop = False
        self._beginner: RemoteAgent | None = None  # whose look it is, until that has its result
        self._late: list[RemoteAgent] = []  # nodes that had not answered when a hang was reported
        self._reported: list[HangSnapshot] = []  # what was known then
        self.next_deadline_s = float("inf")

    def on_look(self, agent: RemoteAgent) -> None:
        """Let all other nodes look while this one does, for a rank there seems to hang."""
        if not self._state.is_stopping and self.next_deadline_s == float("inf"):
            self._ask_others(agent, LIMIT_S)
            self._beginner = agent

    def on_snapshots(self, agent: RemoteAgent, payload: bytes) -> None:
        """Use the snapshots of a node. The first ones make all other nodes look. Raises LinkError: they are none."""
        from infini_run.report.hang_groups import count_back
        from infini_run.report.hang_snapshot import HangSnapshot

        content = message_schema.read(payload, message_schema.SNAPSHOTS)
        found = [decode_record(HangSnapshot, snapshot) for snapshot in content["snapshots"]]
        if self._state.is_stopping or any(snapshot.rank not in agent.ranks for snapshot in found):
            return
        if self._is_before_stop:
            self._waiting = [other for other in self._waiting if other is not agent]
            return
        is_first = self.next_deadline_s == float("inf")
        if is_first or self._beginner is agent:
            self._beginner = None
            is_known = any(snapshot.kind for snapshot in self._snapshots)  # of another node: its hang stands
            if not is_known and (not any(snapshot.kind for snapshot in found) or self._has_progress(found)):
                is_late = is_first and agent in self._late
                self._drop()
                if is_late:
                    self._look_again()
                return  # it has answered too late, or ranks elsewhere make progress
        if is_first:
            self._ask_others(agent, LIMIT_S)
        self._snapshots += count_back(found)
        self._ranks_to_stop += content["ranks"]
        self._waiting = [other for other in self._waiting if other is not agent]

    def _look_again(self) -> None:
        """Let all nodes look once more: one that had not answered does now, and the hang may last."""
        self._late = []
        self._ask_others(None, LIMIT_S)

    def _ask_others(self, agent: RemoteAgent | None, limit_s: float) -> None:
        """Ask all nodes that run for snapshots, but for this one, which sends them unasked. None: there is none."""
        self.next_deadline_s = time.monotonic() + limit_s
        self._waiting = [other for other in self._state.world if other.state == "running"]
        if self._state.options.snapshots == "off" and agent is not None:
            self._waiting = [agent]
        request = pack_json(protocol.SNAPSHOT_REQUEST, {"is_before_stop": self._is_before_stop})
        for other in self._waiting:
            self._state.agents.send(other, clock_question())
            if other is not agent:
                self._state.agents.send(other, request)

    def stop_after_failure(self, agent: RemoteAgent | None) -> None:
        """Stop the job because a rank of this node failed; with --snapshots=failure after a look at all others. None:
        no node looks unasked."""
        from infini_run.report.hang_snapshot import STOP_S

        if self._state.options.snapshots != "failure" or self._state.is_stopping or self._waiting:
            if not self._is_before_stop:
                self._state.stop()
            return
        self._is_before_stop = True
        self._ask_others(agent, STOP_S)

    def _drop(self) -> None:
        self._snapshots, self._ranks_to_stop, self._waiting = [], [], []
        self._beginner, self.next_deadline_s = None, float("inf")

    def _has_progress(self, found: Sequence[HangSnapshot]) -> bool:
        """Return whether a node reports ranks without progress while those of another node make progress."""
        from infini_run.report.hang_snapshot import NO_PROGRESS

        if not all(snapshot.why.startswith(NO_PROGRESS) for snapshot in found if snapshot.kind):
            return False
        sent = [sent_s for agent in self._state.world for _, sent_s in agent.progress.latest.values()]
        return time.monotonic() - max(sent, default=0.0) < self._state.options.progress_timeout_s

    def run_due(self, now_s: float) -> None:
        """Report the hang once all nodes that run have answered, or at the deadline for that."""
        if self.next_deadline_s == float("inf"):
            return
        self._waiting = [other for other in self._waiting if other.state == "running"]
        if self._waiting and now_s < self.next_deadline_s:
            return
        snapshots, ranks = self._snapshots, self._ranks_to_stop
        unanswered = [agent.name for agent in self._waiting]
        is_before_stop, self._is_before_stop = self._is_before_stop, False
        self._drop()
        if not is_before_stop and not unanswered and not any(snapshot.kind for snapshot in snapshots):
            from infini_run.report.hang_groups import still_hung

            snapshots = still_hung(snapshots, self._reported)
        if is_before_stop:
            self._state.stop()
        elif not self._state.is_stopping and any(snapshot.kind for snapshot in snapshots):
            self._report(snapshots, ranks, unanswered)

    def _report(self, snapshots: Sequence[HangSnapshot], ranks: Sequence[int], unanswered: Sequence[str]) -> None:
        from infini_run.report.hang_groups import analyze_hang, hang_text, with_exited

        if self._state.observers is not None:
            self._state.observers.on_hang(snapshots)
        over = [agent.report for agent in self._state.world if agent.report is not None]
        snapshots = with_exited(snapshots, [exit_ for report in over for exit_ in report.exits])
        self._state.unanswered = tuple(unanswered)
        self._late = [agent for agent in self._state.world if agent.name in unanswered]
        self._reported = list(snapshots) if unanswered else []
        hang = analyze_hang(snapshots, unanswered)
        head, details = hang_text(snapshots, {}, unanswered)
        links = _slow_links(self._state.world)
        if links and (hang is None or not hang.waited_for):
            head += f"; {links}"
            self._state.notices.append(head)
        if not ranks:
            self._state.print(head, *details)
            return
        self._state.print(f"{head}: stopping")
        cause = hang.cause(ranks) if hang else tuple(ranks[:1])
        self._state.agents.send_all(pack_json(protocol.CAUSE, {"ranks": list(cause)}), "running")
        if self._state.programs is not None:
            self._late, self._reported = [], []  # the next attempt of a program is no part of this hang
            self._state.programs.on_hang(cause)
        else:
            self._state.stop()


def _slow_links(agents: Sequence[RemoteAgent]) -> str:
    """Return a text about the nodes to which the Link is much slower than to the others; empty: none."""
    trips = {agent.name: agent.clock.round_trip_s for agent in agents if agent.state == "running"}
    usual_s = sorted(trips.values())[(len(trips) - 1) // 2] if len(trips) > 2 else float("inf")
    slow = {name: trip_s for name, trip_s in trips.items() if trip_s > max(_SLOW_LINK_S, _SLOW_LINK * usual_s)}
    if not slow:
        return ""
    from infini_run.report.hang_groups import hosts_text

    links = "link to" if len(slow) == 1 else "links to"
    verb = "is" if len(slow) == 1 else "are"
    worst_s = duration_text(max(slow.values()))
    return (
        f"the {links} {hosts_text(list(slow))} {verb} slow: {worst_s} there and back, others {duration_text(usual_s)}"
    )
