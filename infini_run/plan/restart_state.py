"""Whether and when the head starts all ranks of all nodes again: the count, the delay, what there is to tell.

The policy is restart_policy.py's, as on one node; this is its memory between two attempts.
"""

from __future__ import annotations

import os
import time

from infini_run.plan.restart_policy import RestartCount, decide, describe
from infini_run.record import replace
from infini_run.report.report import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.options import Options
    from infini_run.report.report import Exit, Report

_KEPT = 100  # first failures, the last of them
_NEVER = float("inf")


class RestartState:
    """`due_s`: when the next attempt begins, by the monotonic clock; infinite: there is none to wait for."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tally = RestartCount()
        self._earlier: list[Exit] = []
        self._why_not = ""
        self._is_cut = False
        self.due_s = _NEVER
        self.heading = ""  # for the logs of the next attempt

    @property
    def total(self) -> int:
        """Restarts so far."""
        return self._tally.total

    @property
    def is_resting(self) -> bool:
        return self.due_s != _NEVER

    def decide(self, report: Report) -> str:
        """What is told of the restart that is to come; "" where there is none."""
        decision = decide(report, self._options, self._tally, os.urandom(1)[0] / 255)
        if not decision.again:
            self._why_not = decision.why
            return ""
        self._tally = decision.tally
        first = report.first_failure
        self._earlier = [*self._earlier, *([] if first is None else [first])][-_KEPT:]
        self.due_s = time.monotonic() + decision.delay_s
        count, what = describe(self._tally, self._options), report.headline()
        self.heading = f"{count}: {what}"
        return f"{count} in {duration_text(decision.delay_s)}: {what}"

    def end_rest(self) -> None:
        """The next attempt begins."""
        self.due_s = _NEVER

    def cut(self) -> None:
        """There will be none: we were told to stop while we waited for it."""
        self.due_s, self._is_cut = _NEVER, True

    def add_to(self, report: Report) -> Report:
        """With all attempts in it."""
        first = None if self._is_cut else report.first_failure
        earlier = tuple(self._earlier)
        return replace(
            report, first_failure=first, restarts=self.total, earlier_failures=earlier, not_restarted=self._why_not
        )
