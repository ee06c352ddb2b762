"""Restarts of a launch of a function: whether all ranks are started again after a failure, and when.

The budget, the bound of restarts without progress, and the delay are the command's (plan/restart_policy.py). Pure,
except for the random number.
"""

from __future__ import annotations

from infini_run.errors import LaunchTimeout, NodeLost
from infini_run.plan.restart_policy import RestartCount, count_attempt, describe, explain_no_progress, spend
from infini_run.record import replace
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.options import Options


class LaunchRestarts:
    """The restarts of one launch of a function.

    Args:
        options: The command's options. `max_restarts`, `restart_delay_s`, `restart_window_s` and `max_no_progress`
            are read.

    Attributes:
        begun: Restarts so far, without one that was decided and has not begun.
        not_restarted: Why no attempt followed the last one, unless that is plain.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count = RestartCount()
        self._progress = -1  # of the attempt that runs
        self._why_over = ""
        self.begun = 0
        self.not_restarted = ""

    @property
    def is_possible(self) -> bool:
        """There may be one."""
        return self._options.max_restarts > 0

    @property
    def total(self) -> int:
        """Restarts so far, with one that was decided and has not begun."""
        return self._count.total

    def give_up(self, why: str) -> None:
        """There is no attempt after the one that runs, for this reason."""
        self._why_over = self._why_over or why

    def begin(self) -> None:
        """The attempt that was decided begins."""
        self.begun = self._count.total

    def note_progress(self, value: int) -> None:
        """Take in how far a rank of the attempt that runs has come. The highest number counts."""
        self._progress = max(self._progress, value)

    def next_delay_s(self, rank: int, error: object, healthy_s: float, *, may_move: bool = False) -> float | None:
        """Take one restart; return how long to wait before it, in seconds. None: there is none.

        Args:
            rank: of the first failure; -1: of no rank, so that a restart would not help.
            error: that failure.
            healthy_s: how long all ranks were well before it, in seconds.
            may_move: ranks can be started on other nodes, so that the loss of a node is a failure like any other.
        """
        if rank < 0 or isinstance(error, LaunchTimeout) or (isinstance(error, NodeLost) and not may_move):
            return None
        if self._why_over:
            self.not_restarted = self._why_over if self.is_possible else ""
            return None
        decision = spend(self._options, self._count_attempt(), healthy_s)
        self._count, self.not_restarted = decision.count, decision.why
        return decision.delay_s if decision.again else None

    def go_on(self) -> bool:
        """Count an attempt that follows because a node came or went: it costs nothing of the budget. False: there is
        none, because too many attempts in a row made no progress."""
        count = self._count_attempt()
        self.not_restarted = self._why_over or explain_no_progress(self._options, count)
        if not self.not_restarted:
            self._count = replace(count, total=count.total + 1)
        return not self.not_restarted

    def _count_attempt(self) -> RestartCount:
        count, self._progress = count_attempt(self._count, self._progress), -1
        return count

    def heading(self, delay_s: float, failure: str) -> str:
        """The line that announces a restart."""
        return f"{describe(self._count, self._options)} in {duration_text(delay_s)}: {failure}"
