"""A hang on many nodes: all look at their ranks when one notices it, and the head reports whom the others wait for.

The node that notices a hang has ranks that wait; the rank that they wait for is often elsewhere. So no node decides
alone: the head asks all, folds their snapshots, and then stops the job, if --on_hang=stop.
"""

from __future__ import annotations

import time

from infini_run.multinode import message_schema, protocol
from infini_run.multinode.protocol import pack, pack_json
from infini_run.multinode.record_codec import decode_record, to_jsonable
from infini_run.record import replace
from infini_run.report.hang_groups import analyze_hang, hang_text, with_exited
from infini_run.report.hang_snapshot import NO_PROGRESS, HangSnapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.multinode.head_state import HeadState

LIMIT_S = 15.0  # for all nodes: two looks and py-spy's limit, and a slow link


def pack_snapshots(snapshots: Sequence[HangSnapshot], ranks_to_stop: Sequence[int]) -> bytes:
    """Return the frame of a node's snapshots. The report has all of them: here only one has its processes."""
    hung = next((snapshot for snapshot in snapshots if snapshot.kind), None)
    short = [snapshot if snapshot is hung else replace(snapshot, processes=(), python=()) for snapshot in snapshots]
    return pack_json(protocol.SNAPSHOTS, {"snapshots": to_jsonable(short), "ranks": list(ranks_to_stop)})


class HangPhase:
    """The head's side of one hang at a time."""

    def __init__(self, state: HeadState) -> None:
        self._state = state
        self._snapshots: list[HangSnapshot] = []
        self._ranks_to_stop: list[int] = []
        self._waiting: list[RemoteAgent] = []  # nodes that have not answered
        self.next_deadline_s = float("inf")

    def on_snapshots(self, agent: RemoteAgent, payload: bytes) -> None:
        """Use the snapshots of a node. The first ones make all other nodes look. Raises LinkError: they are none."""
        content = message_schema.read(payload, message_schema.SNAPSHOTS)
        found = [decode_record(HangSnapshot, snapshot) for snapshot in content["snapshots"]]
        if self._state.is_stopping or any(snapshot.rank not in agent.ranks for snapshot in found):
            return
        if self.next_deadline_s == float("inf"):
            if not any(snapshot.kind for snapshot in found) or self._has_progress(found):
                return  # it has answered too late, or ranks elsewhere make progress
            self.next_deadline_s = time.monotonic() + LIMIT_S
            self._waiting = [other for other in self._state.world if other.state == "running"]
            for other in self._waiting:
                if other is not agent:
                    self._state.agents.send(other, pack(protocol.SNAPSHOT_REQUEST))
        self._snapshots += found
        self._ranks_to_stop += content["ranks"]
        self._waiting = [other for other in self._waiting if other is not agent]

    def _has_progress(self, found: Sequence[HangSnapshot]) -> bool:
        """Whether a node reports that its ranks make no progress, and those of another node do."""
        if not all(snapshot.why.startswith(NO_PROGRESS) for snapshot in found if snapshot.kind):
            return False
        sent = [sent_s for agent in self._state.world for _, sent_s in agent.progress.latest.values()]
        return time.monotonic() - max(sent, default=0.0) < self._state.options.progress_timeout_s

    def run_due(self, now_s: float) -> None:
        """Report the hang once all nodes that run have answered, or the time for that is over."""
        if self.next_deadline_s == float("inf"):
            return
        self._waiting = [other for other in self._waiting if other.state == "running"]
        if self._waiting and now_s < self.next_deadline_s:
            return
        snapshots, self._snapshots = self._snapshots, []
        ranks, self._ranks_to_stop = self._ranks_to_stop, []
        unanswered = [agent.name for agent in self._waiting]
        self._waiting, self.next_deadline_s = [], float("inf")
        if not self._state.is_stopping:
            self._report(snapshots, ranks, unanswered)

    def _report(self, snapshots: Sequence[HangSnapshot], ranks: Sequence[int], unanswered: Sequence[str]) -> None:
        over = [agent.report for agent in self._state.world if agent.report is not None]
        snapshots = with_exited(snapshots, [exit_ for report in over for exit_ in report.exits])
        hang = analyze_hang(snapshots, unanswered)
        head, details = hang_text(snapshots, {}, unanswered)
        if not ranks:
            self._state.print(head, *details)
            return
        self._state.print(f"{head}: stopping")
        cause = (hang.stopped_for if hang else ()) or tuple(ranks[:1])
        self._state.agents.send_all(pack_json(protocol.CAUSE, {"ranks": list(cause)}), "running")
        self._state.stop()
