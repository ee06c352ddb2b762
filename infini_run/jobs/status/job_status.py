"""The known state of a job: one frozen record, and that of an array out of those of its tasks. Pure.

The one rule: an array has nothing that does not follow from its tasks.
"""

from __future__ import annotations

from infini_run.jobs.scheduler import (
    CANCELLED,
    COMPLETED,
    LIVE,
    LOST,
    QUEUED,
    RUNNING,
    STARTING,
    STATES,
    SUSPENDED,
    WARNED,
)
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


COMMON = ("command", "scheduler", "submitted_s", "tasks", "title")  # of an array
_FURTHEST = (RUNNING, WARNED, STARTING, SUSPENDED, QUEUED)


@record
class Status:
    """The known state of a job.

    Args:
        name: Of the job, or NAME.K of a task.
        state: QUEUED, STARTING, RUNNING, WARNED, SUSPENDED, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OOM,
            PREEMPTED, or LOST.
        scheduler: slurm, pbs or local.
        id: The scheduler's; "": not known (yet).
        shape: Its size, for people: `2 nodes x 8 gpus`.
        command: What each rank runs.
        folder: Its directory.
        submitted_s: When, in seconds since the epoch.
        since_s: Since when it is in this state, in seconds since the epoch.
        is_final: Whether the state can no longer change.
        code: The exit code; -1: none.
        node: Host of the first failure; "": no rank has failed.
        rank: Rank of the first failure; -1: no rank has failed.
        program: Of a job of several programs, that of the first failure; "": one program, or no rank has failed.
        program_rank: Rank of the first failure in that program; -1: one program, or no rank has failed.
        reason: Why it waits, or how it ended, in a sentence.
        hold: Why it waits: `waiting` for its turn, `passing`, for a reason that ends soon, or `hopeless`; "": it does
            not wait.
        advice: What to change, if `hold` is `hopeless`.
        attempt: Its latest run, counted from 0; -1: it has not begun.
        nodes: Its hosts, in the order of their ranks.
        spares: Hosts of it that run nothing, and may replace a lost one.
        lost: Hosts of it that were lost, or excluded.
        query_error: Why the scheduler did not answer; "": it did, or no query was needed.
        scheduler_ended_it: Whether its scheduler ended it. The scheduler may then have the reason, or run it again.
        task: Of a task its index; of an array that of its first task to fail; -1: none.
        tasks: Of an array, in the order of their indices.
        title: What the user calls it; "": nothing.
    """

    name: str
    state: str
    scheduler: str
    id: str
    shape: str
    command: tuple[str, ...]
    folder: str
    submitted_s: float
    since_s: float
    is_final: bool = False
    code: int = -1
    node: str = ""
    rank: int = -1
    program: str = ""
    program_rank: int = -1
    reason: str = ""
    hold: str = ""
    advice: str = ""
    attempt: int = -1
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    query_error: str = ""
    scheduler_ended_it: bool = False
    task: int = -1
    tasks: tuple[Status, ...] = ()
    title: str = ""

    @property
    def headline(self) -> str:
        """Return `FAILED exit 7 on node2, rank 5` or `QUEUED Priority`; of an array also the number of tasks in each
        state."""
        each = [task.state for task in self.tasks]
        counts = [f"{each.count(state)} {state}" for state in dict.fromkeys((*STATES, *each)) if state in each]
        return f"{self._head}: {', '.join(counts)}" if len(counts) > 1 else self._head

    @property
    def _head(self) -> str:
        if self.state in LIVE or not self.is_final:
            return self.state if self.state != QUEUED or not self.reason else f"{self.state} {self.reason}"
        words = [self.state]
        if self.state not in (COMPLETED, CANCELLED, LOST) and self.code >= 0:
            words.append(f"exit {self.code}")
        words += [f"on {self.node}"] if self.node else []
        parts = [" ".join(words)]
        if self.rank >= 0:
            parts.append(f"{self.program} {self.program_rank}" if self.program else f"rank {self.rank}")
        parts += [f"task {self.task}"] if self.tasks and self.task >= 0 else []
        return ", ".join(parts)

    @property
    def exit_code(self) -> int | None:
        """The code of the first rank to fail; 1 if the job ended badly and no code is known. None until its end; a
        LOST job is finished once `is_final` is true."""
        if not self.is_final:
            return None
        if self.state == COMPLETED:
            return 0
        return self.code if self.code > 0 else 1

    def to_json(self) -> dict[str, Any]:
        """Return plain types by the same names; of tasks without what they have in common (`COMMON`)."""
        tasks = [{name: item for name, item in task.to_json().items() if name not in COMMON} for task in self.tasks]
        plain = {"command": list(self.command), "nodes": list(self.nodes), "tasks": tasks}
        plain |= {"spares": list(self.spares), "lost": list(self.lost)}
        return {**vars(self), "headline": self.headline, **plain}


def whole(about: Status, tasks: Sequence[Status]) -> Status:
    """Return the status of an array.

    Until every task ended, it is that of the task that is furthest. Then it is that of the first task that failed, in
    time, with canceled ones behind all others.

    Args:
        about: The array's own name, id, shape and directory.
        tasks: Of the array, all of them.
    """
    live = [task for task in tasks if not task.is_final]
    bad = [task for task in tasks if task.state != COMPLETED and not live]
    if live:
        places = {state: place for place, state in enumerate(_FURTHEST)}
        one = min(live, key=lambda task: (places.get(task.state, len(places)), task.since_s))
    elif bad:
        one = min(bad, key=lambda task: (task.state == CANCELLED, task.since_s))
    else:
        one = max(tasks, key=lambda task: task.since_s)
    failed_task = one.task if bad and one.state != CANCELLED else -1
    reason = f"task {failed_task}: {one.reason}" if failed_task >= 0 and one.reason else one.reason
    return replace(
        one, name=about.name, id=about.id, shape=about.shape, folder=about.folder, nodes=(), spares=(), lost=(),
        task=failed_task, tasks=tuple(tasks), reason=reason,
        attempt=max(task.attempt for task in tasks), scheduler_ended_it=any(task.scheduler_ended_it for task in live),
        query_error=next((task.query_error for task in tasks if task.query_error), ""),
    )  # fmt: skip
