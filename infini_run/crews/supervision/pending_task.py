"""A task of a worker on its way, and how long its worker may take."""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.crews.protocol import Body
    from infini_run.crews.supervision.future import Ask


@record
class WorkerDeadlines:
    """The time limits of a worker, in seconds; 0: no limit.

    Args:
        ready_timeout_s: from a start to Ready.
        watchdog_s: without a sign of life in a task.
        drain_s: for the accepted tasks at the close of the crew; inf: no limit.
        exit_s: from the end of a channel to the exit of its process; an interpreter may be slow.
    """

    ready_timeout_s: float = 0.0
    watchdog_s: float = 0.0
    drain_s: float = float("inf")
    exit_s: float = 2.0


class PendingTask:
    """An unfinished task.

    Args:
        ask: its future; None: nothing waits for its result.
        shared: any worker may do it.
        started: a worker has begun with it.
    """

    __slots__ = ("ask", "body", "shared", "started", "task")

    def __init__(self, task: int, body: Body, ask: Ask[Any] | None, *, shared: bool) -> None:
        self.task = task
        self.body = body
        self.ask = ask
        self.shared = shared
        self.started = False

    @property
    def is_cancelled(self) -> bool:
        """Its caller does not want it any more."""
        return self.ask is not None and self.ask.cancelled()

    def claim(self) -> bool:
        """Note that a worker gets it; return False if its caller does not want it any more."""
        return self.ask is None or self.ask.claim()

    def begin(self) -> None:
        """Note that a worker has begun with it."""
        self.started = True
        if self.ask is not None:
            self.ask.begin()
