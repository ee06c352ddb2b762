"""The report of a launch on many nodes, made from those of its nodes. Pure but for the clocks and this host's
name."""

from __future__ import annotations

import os
import time

from infini_run.errors import NodeLost
from infini_run.record import replace
from infini_run.report.merge import lost_report, merge_reports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report

_MOST_LOSSES = 100  # sentences in a report


def is_node_failure(state: HeadState) -> bool:
    """Return whether the job ended because a node was lost or would not start; not because of a rank or a signal.

    A node counts as lost from the last moment at which it was certainly alive: a rank elsewhere may fail because of
    the loss long before anybody notices it. The first failure of a rank asks all nodes for a sign of life
    (liveness.py).
    """
    agents = state.world
    lost_s = min((agent.alive_s for agent in agents if agent.state == "lost"), default=float("inf"))
    failed_s = min((agent.first_failure_s for agent in agents if agent.state != "lost"), default=float("inf"))
    return state.error is not None and (not isinstance(state.error, NodeLost) or lost_s <= failed_s)


def attempt_report(state: HeadState) -> Report:
    """Return the report of the last attempt."""
    error = state.error if is_node_failure(state) else None
    reports = []
    for agent in state.world:
        if agent.loss and agent.ranks:
            is_first = isinstance(error, NodeLost) and error.node == agent.node_rank and not state.stop_signal
            report = lost_report(
                agent.name,
                _places(state, agent),
                agent.rank_pids,
                agent.progress.in_wall_time(),
                last_received_s=agent.last_received_wall_s,
                is_first_failure=is_first,
            )
            reports.append((report, agent.alive_s))
        elif agent.report is not None:
            reports.append((agent.report, agent.first_failure_s))
    return merge_reports(
        reports,
        launch_id=state.launch_id,
        run_id=state.options.run_id,
        host=os.uname().nodename,
        world_size=state.world_size or _planned_size(state),
        start_s=state.start_s,
        end_s=time.time(),
        received_signal=state.stop_signal,
        forwarded_signals=state.forwarded_signals,
        silent=len(state.world) - len(reports),
        notices=(*state.notices, *([str(state.error)] if state.error is not None else [])),
        error=error,
        lost=losses(state),
        slow=state.pace.slow_ranks(),
        ended_by=state.ender,
        unanswered=state.unanswered,
    )


def launch_report(state: HeadState) -> Report:
    """Return the report of the whole launch: the last attempt, and what failed before it."""
    report = state.restarts.add_to(attempt_report(state))
    report = report if state.programs is None else state.programs.add_to(report)
    return report if state.keywords is None else state.keywords.rename_report(report)


def _places(state: HeadState, agent: RemoteAgent) -> dict[int, tuple[int, str, int]]:
    """Return the ranks of a node, each with its local rank, its program, and its number there."""
    places, before = {}, 0
    for span in agent.ranks.spans:
        for at, rank in enumerate(span):
            places[rank] = (before + at, *state.numbers.place(rank))
        before += len(span) if state.options.one_world else 0
    return places


def losses(state: HeadState) -> tuple[str, ...]:
    """Return the lost nodes, a sentence each: those of the last attempt, then earlier ones, the latest first."""
    return (*(agent.loss for agent in state.world if agent.loss), *state.losses)[:_MOST_LOSSES]


def find_first_failure(state: HeadState, report: Report) -> Exit | None:
    """Return what failed first in an attempt that another one follows: a rank, or the first rank of a node that was
    lost before that (`is_node_failure`).

    Args:
        state: The head's, still with that attempt.
        report: Of the attempt.
    """
    lost = min((agent for agent in state.world if agent.loss), key=lambda agent: agent.alive_s, default=None)
    failed_s = min((agent.first_failure_s for agent in state.world if not agent.loss), default=float("inf"))
    if lost is None or lost.alive_s > failed_s:
        return report.first_failure
    first = next((exit_ for exit_ in report.exits if exit_.lost and exit_.rank in lost.ranks), None)
    return report.first_failure if first is None else replace(first, stopped=False)


def _planned_size(state: HeadState) -> int:
    """Return the number of ranks that were to start; 0 if only a missing node knows its share."""
    asked = state.options.nproc_per_node
    if state.options.programs and not all(agent.hello for agent in state.world):
        return 0
    agents = state.world[: state.options.nnodes]
    counts = state.node_list.counts or [agent.hello.get("nproc", asked) for agent in agents]
    return sum(map(int, counts)) if all(isinstance(count, int) for count in counts) else 0
