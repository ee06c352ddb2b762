"""Whether a failed launch restarts, and when. The plan of the next attempt: plan/next_attempt.py.

The functions are pure: a report in, a decision out. They do not know how ranks start or stop, and are the same for
one node and for the head of many. RestartState is the memory between two attempts.
"""

from __future__ import annotations

import os
import time

from infini_run.record import record, replace
from infini_run.report.text import duration_text, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.options.launch_options import Options
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report

MOST_DELAY_S = 300.0  # the delay doubles up to this; one that was asked for beyond it stays as it is
JITTER = 0.25  # of a delay that several nodes wait for: up to so much less, that not all come back in one moment
_DOUBLINGS = 60  # more are beyond any delay
_CANNOT_RUN = {
    126: "exit code 126 means that a program cannot be executed",
    127: "exit code 127 means that a program does not exist",
}
_MOST_EARLIER = 100  # first failures kept, the last of them: a window may allow restarts without end
NOT_ENDED = "some processes did not end"
_NEVER = float("inf")


@record
class RestartCount:
    """Restarts so far.

    Attributes:
        spent: Restarts since the budget (`--max_restarts`) was last whole.
        total: Restarts of the launch.
        progress: The highest PROGRESS= of a rank in the attempts so far; -1: none has sent it.
        fruitless: Attempts since then of which none has exceeded it.
    """

    spent: int = 0
    total: int = 0
    progress: int = -1
    fruitless: int = 0


@record
class Decision:
    """The decision whether all ranks restart.

    Attributes:
        again: They are, `delay_s` seconds from now.
        count: The restarts so far, with this one.
        why: The reason if there is no restart. Empty if it is plain: nothing failed, or the budget is spent.
    """

    again: bool
    count: RestartCount
    delay_s: float = 0.0
    why: str = ""


class RestartState:
    """The restarts of one launch, which learns of each failure: how many there were, when the next one begins, and
    what failed before.

    Attributes:
        begun: Restarts that have begun; a decided one may never begin.
        not_restarted: Why no attempt followed the last one. Empty: that is plain, or one did.
        due_s: When the next attempt begins, by the monotonic clock; infinite: none is due.
        heading: The line that the logs of the next attempt begin with.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count = RestartCount()
        self.begun = 0
        self._progress = -1  # of the attempt that runs
        self._earlier: tuple[Exit, ...] = ()
        self._before_decision: tuple[RestartCount, tuple[Exit, ...]] = (self._count, self._earlier)
        self.not_restarted = ""
        self._is_cancelled = self._is_given_up = False
        self._received_signal = 0
        self.due_s = _NEVER
        self.heading = ""

    @property
    def total(self) -> int:
        """Restarts that have begun, and one that is decided and has not begun."""
        return self._count.total

    @property
    def earlier(self) -> tuple[Exit, ...]:
        """The first failures of the attempts before."""
        return self._earlier

    @property
    def is_possible(self) -> bool:
        """Whether another attempt may follow a failure."""
        return self._options.max_restarts > 0

    @property
    def is_spent(self) -> bool:
        """Whether no restart can follow, however the attempt that runs ends."""
        options, count = self._options, self._count
        if self._is_given_up or not options.max_restarts:
            return True
        renews = options.restart_window_s > 0 or max(count.progress, self._progress) >= 0
        return count.spent >= options.max_restarts and not renews

    @property
    def is_waiting(self) -> bool:
        """Whether the delay before the next attempt is running."""
        return self.due_s != _NEVER

    @property
    def restart_s(self) -> float:
        """When the next attempt begins, since the epoch. 0: none is due."""
        return time.time() + self.due_s - time.monotonic() if self.is_waiting else 0.0

    def note_progress(self, value: int) -> None:
        """Take in the PROGRESS= of a rank in the attempt that runs. The highest counts; -1: none."""
        self._progress = max(self._progress, value)

    def decide(self, report: Report) -> str:
        """Decide what follows the attempt that `report` describes.

        Returns:
            One line that announces the restart; empty if there is none.
        """
        decision = decide(report, self._options, self._count_attempt(), _random_fraction())
        failure = "; ".join(filter(None, (report.headline(), report.left_behind())))
        return self._apply(decision, report.first_failure, failure)

    def fail(self, failure: str, healthy_s: float) -> str:
        """Decide what follows an attempt that has failed, and of which there is no report.

        Args:
            failure: What failed first, in a sentence.
            healthy_s: How long all ranks were well before, in seconds.

        Returns:
            As `decide`.
        """
        if self._is_given_up:
            return ""
        decision = spend(self._options, self._count_attempt(), healthy_s, _random_fraction())
        return self._apply(decision, None, failure)

    def go_on(self, first: Exit | None, reason: str) -> bool:
        """Count an attempt that follows because a node came or went: it costs nothing of the budget.

        Args:
            first: What failed first in the last attempt. None: nothing, or what is no process.
            reason: Why there is another one, in a sentence.

        Returns:
            False if there is none: too many attempts in a row made no progress.
        """
        if self._is_given_up:
            return False
        count = self._count_attempt()
        self.not_restarted = explain_no_progress(self._options, count)
        if self.not_restarted:
            return False
        self._before_decision = self._count, self._earlier
        self._count = replace(count, total=count.total + 1)
        self._note_failure(first)
        self.heading = f"attempt {self._count.total + 1}: {reason}"
        return True

    def start_failed(self, reason: str) -> str:
        """Count an attempt without ranks, because of a StartError, as one that failed.

        Args:
            reason: Why they could not, in a sentence.

        Returns:
            As `decide`.
        """
        line = self.fail(reason, 0.0)
        if not line:
            self.not_restarted = "; ".join(filter(None, (reason, self.not_restarted)))
        return line

    def _count_attempt(self) -> RestartCount:
        """Return the count after the attempt has failed, which its progress may have renewed."""
        count, self._progress = count_attempt(self._count, self._progress), -1
        return count

    def _apply(self, decision: Decision, first: Exit | None, failure: str) -> str:
        if not decision.again:
            self.not_restarted = decision.why
            return ""
        self._before_decision = self._count, self._earlier
        self._count = decision.count
        self._note_failure(first)
        self.due_s = time.monotonic() + decision.delay_s
        count = describe(self._count, self._options)
        self.heading = f"{count}: {failure}"
        return f"{count} in {duration_text(decision.delay_s)}: {failure}"

    def _note_failure(self, first: Exit | None) -> None:
        if first is not None:
            self._earlier = (*self._earlier, first)[-_MOST_EARLIER:]

    def begin(self) -> None:
        """Begin the decided attempt."""
        self.begun = self._count.total
        self.end_wait()

    def end_wait(self) -> None:
        """End the delay: it has passed, or somebody else waits for the next attempt, or the launch stops."""
        self.due_s = _NEVER

    def cancel(self, received_signal: int = 0) -> None:
        """End the delay without another attempt: then no failure ended the launch, but a request to stop.

        Args:
            received_signal: The signal from outside that asked for it; 0: the caller reports it.
        """
        self._is_cancelled, self._received_signal = True, received_signal
        self.end_wait()

    def revoke(self, reason: str) -> None:
        """Take back the last decision to restart: its delay cannot begin, for this reason."""
        self._count, self._earlier = self._before_decision
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Give up all attempts after the running one, even a decided one, for this reason."""
        self.not_restarted, self._is_given_up = reason, True
        self.end_wait()

    def add_to(self, report: Report) -> Report:
        """Return the report of the last attempt with what became of those before it. If no other one has begun after
        it, its failure is not an earlier one, unless the launch was stopped meanwhile."""
        is_last = self.begun < self.total and not self._is_cancelled
        return replace(
            report,
            first_failure=None if self._is_cancelled else report.first_failure,
            received_signal=self._received_signal or report.received_signal,
            restarts=self.begun,
            earlier_failures=self._before_decision[1] if is_last else self._earlier,
            not_restarted=self.not_restarted,
        )


def restart_states(options: Options) -> dict[str, RestartState]:
    """Return the restarts of each program, where they restart alone (`--restart_scope=program`)."""
    return {each.name: RestartState(replace(options, max_restarts=each.max_restarts)) for each in options.programs}


def _random_fraction() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32


def decide(report: Report, options: Options, count: RestartCount, random_fraction: float = 0.0) -> Decision:
    """Decide whether a job restarts.

    Args:
        report: How its last attempt ended.
        options: What the user asked for.
        count: The restarts so far.
        random_fraction: From 0 to 1, each node's own: spreads the restarts of several nodes over a time.
    """
    first = report.first_failure
    if first is None or report.received_signal or report.user_interrupted:
        return Decision(again=False, count=count)
    if first.asked_again:  # its job runs again, and not these ranks
        return Decision(again=False, count=count)
    if first.shell_code - 128 in report.forwarded_signals:  # killed by it, or with its code
        return Decision(again=False, count=count, why=f"{signal_name(first.shell_code - 128)} was sent to the job")
    if first.shell_code in _CANNOT_RUN:
        return Decision(again=False, count=count, why=_CANNOT_RUN[first.shell_code])
    if report.stuck:
        return Decision(again=False, count=count, why=NOT_ENDED)
    return spend(options, count, healthy_s(report, options), random_fraction)


def count_attempt(count: RestartCount, progress: int) -> RestartCount:
    """Return the count after an attempt that failed. If it got further than all before it, the budget is whole again.

    Args:
        count: The restarts before.
        progress: The highest PROGRESS= of its ranks; -1: none has sent it.
    """
    if progress > count.progress:
        return replace(count, spent=0, progress=progress, fruitless=0)
    return replace(count, fruitless=count.fruitless + 1) if count.progress >= 0 else count


def explain_no_progress(options: Options, count: RestartCount) -> str:
    """Say that too many attempts in a row made no progress (`--max_no_progress`); "" if that is not so."""
    if not 0 < options.max_no_progress <= count.fruitless:
        return ""
    times = "1 attempt" if count.fruitless == 1 else f"{count.fruitless} attempts in a row"
    return f"{times} without exceeding PROGRESS={count.progress}"


def spend(options: Options, count: RestartCount, healthy_s: float, random_fraction: float = 0.0) -> Decision:
    """Take one restart from the budget, if there is one left.

    Args:
        options: What the user asked for.
        count: The restarts so far.
        healthy_s: Seconds in which all ranks were well. After `--restart_window` of them the budget is whole again.
        random_fraction: As for `decide`.
    """
    why = explain_no_progress(options, count)
    if why:
        return Decision(again=False, count=count, why=why)
    spent = 0 if 0 < options.restart_window_s <= healthy_s else count.spent
    if spent >= options.max_restarts:
        return Decision(again=False, count=count)
    jitter = JITTER * random_fraction if options.nnodes > 1 else 0.0
    delay_s = delay_of(options.restart_delay_s, spent + 1) * (1 - jitter)
    return Decision(again=True, count=replace(count, spent=spent + 1, total=count.total + 1), delay_s=delay_s)


def delay_of(first_s: float, number: int, most_s: float | None = None) -> float:
    """Return the delay before a restart, in seconds: `first_s`, doubled for each further restart.

    Args:
        first_s: the delay before the first restart, in seconds.
        number: the restart, from 1.
        most_s: the longest delay; None: 300 s, or `first_s` if that is longer.
    """
    limit_s = max(first_s, MOST_DELAY_S) if most_s is None else most_s
    return min(first_s * 2.0 ** min(number - 1, _DOUBLINGS), limit_s)


def healthy_s(report: Report, options: Options) -> float:
    """Return how many seconds all ranks were up and well before the first failure.

    They count from the last start, or with `--ready_timeout` from the last READY=1. They exclude the time for which a
    rank hung before the watchdog saw it.
    """
    first = report.first_failure
    if first is None:
        return report.end_s - report.start_s
    begin_s = report.start_s
    if options.ready_timeout_s:
        ready = [e.ready_s for e in report.exits if e.ready_s is not None]
        if len(ready) < len(report.exits):
            return 0.0
        begin_s = max(ready)
    ill_s = (
        max(2 * options.hang_timeout_s, options.progress_timeout_s) + options.grace_s
        if first.watchdog_reason
        else 0.0
    )
    return max(0.0, (first.end_s or report.end_s) - ill_s - begin_s)


def describe(count: RestartCount, options: Options) -> str:
    """Return `restart 1 of 3`. Since the start there may have been more, before the budget was whole again."""
    more = f" ({count.total} since the start)" if count.total > count.spent else ""
    return f"restart {count.spent} of {options.max_restarts}{more}"
