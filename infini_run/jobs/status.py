"""What is known of a job: one frozen record, and that of an array out of those of its tasks. Pure.

The one rule: of an array nothing is kept that does not follow from its tasks.
"""

from __future__ import annotations

from infini_run.jobs.schedulers.scheduler import (
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


COMMON = ("command", "scheduler", "submitted_s", "tasks")  # of an array
_FURTHEST = (RUNNING, WARNED, STARTING, SUSPENDED, QUEUED)


@record
class Status:
    """A job as far as it is known.

    state: a word of `scheduler.STATES`. code: its exit code, -1: none. node, rank: whose failure was the first; ""
    and -1: nobody's. reason: why it waits, or how it ended, in a sentence. hold, advice: of one that waits, as
    `SchedulerJob` has them. attempt: of its runs the latest, -1: it has not begun. nodes: its hosts, in the order of
    their ranks. since_s: since when it is so. is_final: it will not change any more. news: why the scheduler said
    nothing, or "". is_told: the scheduler ended it, which may know why, or run it again. tasks: of an array, which
    itself is as `whole` has it. task: of a task its index; of an array that of the first one to fail, -1: none has.
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
    reason: str = ""
    hold: str = ""
    advice: str = ""
    attempt: int = -1
    nodes: tuple[str, ...] = ()
    news: str = ""
    is_told: bool = False
    task: int = -1
    tasks: tuple[Status, ...] = ()

    @property
    def headline(self) -> str:
        """`FAILED 7 node2 rank 5`; `QUEUED Priority`; of an array also how many of its tasks are how."""
        each = [task.state for task in self.tasks]
        counts = [f"{each.count(state)} {state}" for state in dict.fromkeys((*STATES, *each)) if state in each]
        return f"{self._head}: {', '.join(counts)}" if len(counts) > 1 else self._head

    @property
    def _head(self) -> str:
        if self.state in LIVE or not self.is_final:
            return self.state if self.state != QUEUED or not self.reason else f"{self.state} {self.reason}"
        words = [self.state]
        if self.state not in (COMPLETED, CANCELLED, LOST) and self.code >= 0:
            words.append(str(self.code))
        words += [self.node] if self.node else []
        words += [f"rank {self.rank}"] if self.rank >= 0 else []
        words += [f"task {self.task}"] if self.tasks and self.task >= 0 else []
        return " ".join(words)

    @property
    def exit_code(self) -> int:
        """That of the first rank to fail; 1 where a job ended badly and nobody knows a code."""
        if self.state == COMPLETED:
            return 0
        return self.code if self.code > 0 else 1

    def to_json(self) -> dict[str, Any]:
        """Plain types, by the same names. What all tasks of an array have in common is not said again of each."""
        tasks = [{name: item for name, item in task.to_json().items() if name not in COMMON} for task in self.tasks]
        plain = {"command": list(self.command), "nodes": list(self.nodes), "tasks": tasks}
        return {**vars(self), "headline": self.headline, **plain}


def whole(about: Status, tasks: Sequence[Status]) -> Status:
    """An array. about: whose it is. As long as a task has not ended it is as the one that is furthest; then as the
    first one that failed, in time, was; cancelled ones are behind all others."""
    live = [task for task in tasks if not task.is_final]
    bad = [task for task in tasks if task.state != COMPLETED and not live]
    if live:
        places = {state: place for place, state in enumerate(_FURTHEST)}
        one = min(live, key=lambda task: (places.get(task.state, len(places)), task.since_s))
    elif bad:
        one = min(bad, key=lambda task: (task.state == CANCELLED, task.since_s))
    else:
        one = max(tasks, key=lambda task: task.since_s)
    blamed = one.task if bad and one.state != CANCELLED else -1
    return replace(
        one, name=about.name, id=about.id, shape=about.shape, folder=about.folder, nodes=(), task=blamed,
        tasks=tuple(tasks), reason=f"task {blamed}: {one.reason}" if blamed >= 0 and one.reason else one.reason,
        attempt=max(task.attempt for task in tasks), is_told=any(task.is_told for task in live),
        news=next((task.news for task in tasks if task.news), ""),
    )  # fmt: skip
