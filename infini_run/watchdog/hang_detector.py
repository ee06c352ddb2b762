"""When one rank counts as hung, and when to check it next. Pure: times and CPU seconds come in.

A rank that has sent WATCHDOG=1 once hangs if the next one does not come in time, even if it computes: a watchdog also
finds livelocks. Any other rank hangs if it writes nothing and uses no CPU. Where its output does not come to the
launcher, the kernel's count of what it wrote stands for it (decision 0095). A rank that the launcher or a debugger
has suspended does not hang.
"""

from __future__ import annotations

from infini_run.report.hang_snapshot import TRIGGERED
from infini_run.report.text import duration_text

_IDLE = 0.01  # of one CPU: threads of libraries keep using a little in a rank that hangs
_TICK_S = 0.01  # the kernel's unit of CPU time (USER_HZ); one of them may be a rounding


class HangDetector:
    """The signs of life of one rank. Times are seconds of one clock; CPU times count from the rank's start.

    CPU use and the kernel's count are known only between two checks, and a check follows a silence of `timeout_s`.
    So a hang is found between one and two timeouts after it began.

    Args:
        timeout_s: The longest silence in seconds.
        start_s: When the rank started.
    """

    def __init__(self, timeout_s: float, start_s: float) -> None:
        self._timeout_s = timeout_s
        self._silence_since_s = start_s  # or since a later sign of life
        self._next_check_s = start_s + timeout_s  # at the earliest
        self._idle_since_s, self._idle_since_cpu_s = start_s, 0.0  # the check since which it has used almost no CPU
        self._written, self._written_s = 0, 0.0  # the kernel's count, and the check that last saw it changed
        self._skipped_s = 0.0  # until when changes of that count say nothing
        self._reported_s = 0.0  # when it was last reported as hung; 0: it is not

    def deadline_s(self, output_s: float, ping_s: float) -> float:
        """Return the time of the next check if no sign of life comes before.

        Args:
            output_s: The time of its last output or message; 0: there was none.
            ping_s: The time of its last WATCHDOG=1; 0: there was none.
        """
        return max(self._last_sign_s(output_s, ping_s) + self._timeout_s, self._next_check_s)

    def _last_sign_s(self, output_s: float, ping_s: float) -> float:
        return max(self._silence_since_s, ping_s or max(output_s, self._written_s, self._skipped_s))

    def seen_s(self, output_s: float, ping_s: float) -> float:
        """Return the time of the last sign of life, with those that only checks see.

        Args:
            output_s: As for `deadline_s`.
            ping_s: As for `deadline_s`.
        """
        return ping_s or max(output_s, self._written_s, self._idle_since_s)

    @property
    def idle_since_s(self) -> float:
        """When the rank last used CPU, as far as checks have seen; its start: none has."""
        return self._idle_since_s

    @property
    def written_s(self) -> float:
        """When the kernel's count changed last, as far as checks have seen; 0: it did not."""
        return self._written_s

    def note_written(self, now_s: float, written: int | None) -> None:
        """Record what the rank has written. Less than before also counts, as for CPU time. That puts the next check
        off: a look may end just before it, and what was written meanwhile would count as silence.

        Args:
            now_s: The time.
            written: The kernel's count of bytes. None: it is not known.
        """
        if written is not None and written != self._written:
            self._written, self._written_s = written, now_s

    def skip_written(self, now_s: float, written: int | None) -> None:
        """Take the kernel's count as it is now: what the rank wrote until now is not known to be a sign of life, nor
        to be none. If the rank is not reported, its silence counts from now.

        Args:
            now_s: The time.
            written: As for `note_written`.
        """
        self._written = self._written if written is None else written
        self._skipped_s = self._skipped_s if self._reported_s else now_s

    def refresh(self, now_s: float) -> None:
        """Count silence from now: until now every rank was suspended."""
        self._silence_since_s = now_s

    def check(
        self,
        now_s: float,
        output_s: float,
        ping_s: float,
        cpu_s: float | None,
        is_suspended: bool,
        reads_output: bool,
        written: int | None = None,
    ) -> str:
        """Decide whether the rank hangs. Each silence is reported once.

        Args:
            now_s: The time of the check.
            output_s: As for `deadline_s`.
            ping_s: As for `deadline_s`.
            cpu_s: The CPU time that its processes have used, in seconds. None: it is not known.
            is_suspended: The launcher or a debugger has suspended the rank.
            reads_output: All of its output comes to the launcher.
            written: As for `note_written`, if the output does not come to the launcher.

        Returns:
            The reason. Empty: it does not hang, or this silence was reported before.
        """
        self.note_written(now_s, written)
        since_s = self._last_sign_s(output_s, ping_s)
        self._next_check_s = now_s + self._timeout_s
        if since_s > self._reported_s:
            self._reported_s = 0.0
        if is_suspended:
            self._silence_since_s = now_s
            return ""
        if not ping_s:
            if cpu_s is None or self._has_worked(now_s, cpu_s) or self._written_s == now_s:
                return ""
            since_s = max(since_s, self._idle_since_s)
        return self._report(now_s, f"{_missing(ping_s, reads_output, written)} for {duration_text(now_s - since_s)}")

    def _has_worked(self, now_s: float, cpu_s: float) -> bool:
        """Return whether it has used CPU since the last check. Less than before also counts: a child that ended and
        was not waited for takes its CPU time with it."""
        if abs(cpu_s - self._idle_since_cpu_s) <= max(_TICK_S * 1.5, self._timeout_s * _IDLE):
            return False
        self._idle_since_s, self._idle_since_cpu_s, self._reported_s = now_s, cpu_s, 0.0
        return True

    def trigger(self, now_s: float, output_s: float) -> str:
        """Report the rank as hung because it sent WATCHDOG=trigger. Return the reason, as `check` does."""
        if output_s > self._reported_s:
            self._reported_s = 0.0
        return self._report(now_s, TRIGGERED)

    def note_report(self, now_s: float) -> None:
        """Count the silence until now as reported: another node's rank was, and this one was inspected with it."""
        self._reported_s = self._reported_s or now_s

    def _report(self, now_s: float, why: str) -> str:
        if self._reported_s:
            return ""
        self._reported_s = now_s
        return why

    def has_come_back(self, last_sign_s: float) -> bool:
        """Return whether a sign of life was seen since the rank was reported as hung."""
        return max(last_sign_s, self._written_s) > self._reported_s > 0


def _missing(ping_s: float, reads_output: bool, written: int | None) -> str:
    if ping_s or reads_output:
        return "no WATCHDOG=1" if ping_s else "no output and no CPU used"
    return "no CPU used" if written is None else "no writes and no CPU used"
