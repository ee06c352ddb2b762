"""When a rank counts as hung, and when to look at it next. Pure: times and CPU seconds come in.

A rank that ever said WATCHDOG=1 hangs when it does not say it again in time, whatever it computes: a livelock is
what a watchdog is for. Any other rank hangs when it says nothing and uses no CPU. A stopped one does not hang.
"""

from __future__ import annotations

from infini_run.report.text import duration_text

_IDLE = 0.01  # of one CPU: libraries' own threads tick on in a rank that hangs
_TICK_S = 0.01  # what the kernel counts in, mostly: one of it may be a rounding


class HangDetector:
    """One rank's signs of life. Times are seconds of one clock, CPU times are since the rank's start.

    The use of the CPU is known only between two looks, and a look is taken when a silence has lasted `timeout_s`,
    so a hang is seen between one and two timeouts after its begin.
    """

    def __init__(self, timeout_s: float, start_s: float) -> None:
        self._timeout_s = timeout_s
        self._fresh_s = start_s  # silence counts from here at the earliest
        self._floor_s = start_s + timeout_s  # no look before
        self._base_s, self._base_cpu_s = start_s, 0.0  # the look since which it used no CPU worth the name
        self._told_s = 0.0  # when it was last said to hang; 0: it does not

    def deadline_s(self, said_s: float, pinged_s: float) -> float:
        """When to look, if nothing is said until then. said_s, pinged_s: the last sign of each kind; 0: none."""
        return max(self._since_s(said_s, pinged_s) + self._timeout_s, self._floor_s)

    def _since_s(self, said_s: float, pinged_s: float) -> float:
        return max(self._fresh_s, pinged_s or said_s)

    def refresh(self, now_s: float) -> None:
        """Nobody can have given a sign until now: everything was stopped."""
        self._fresh_s = now_s

    def judge(
        self, now_s: float, said_s: float, pinged_s: float, cpu_s: float | None, is_stopped: bool, carries: bool
    ) -> str:
        """Why it hangs, once for each silence; "" where it does not, or that was said already.

        cpu_s: what its processes have used; None: unknown. carries: whether all of its output comes to us.
        """
        since_s = self._since_s(said_s, pinged_s)
        self._floor_s = now_s + self._timeout_s
        if since_s > self._told_s:
            self._told_s = 0.0
        if is_stopped:
            self._fresh_s = now_s
            return ""
        if not pinged_s:
            if cpu_s is None or self._has_worked(now_s, cpu_s):
                return ""
            since_s = max(since_s, self._base_s)
        return self._tell(now_s, _reason(now_s - since_s, bool(pinged_s), carries))

    def _has_worked(self, now_s: float, cpu_s: float) -> bool:
        """Less than before is a change too: a child ended, and nobody took its account."""
        if abs(cpu_s - self._base_cpu_s) <= max(_TICK_S * 1.5, self._timeout_s * _IDLE):
            return False
        self._base_s, self._base_cpu_s, self._told_s = now_s, cpu_s, 0.0
        return True

    def trigger(self, now_s: float, said_s: float) -> str:
        """It said so itself."""
        if said_s > self._told_s:
            self._told_s = 0.0
        return self._tell(now_s, "it said WATCHDOG=trigger")

    def _tell(self, now_s: float, why: str) -> str:
        if self._told_s:
            return ""
        self._told_s = now_s
        return why

    def has_come_back(self, said_s: float) -> bool:
        """Whether it has said anything since it was said to hang."""
        return said_s > self._told_s > 0


def _reason(silent_s: float, pings: bool, carries: bool) -> str:
    what = "no WATCHDOG=1" if pings else "no output and no CPU used" if carries else "no CPU used"
    return f"{what} for {duration_text(silent_s)}"
