"""What a node's clocks show beside ours, estimated over the Link as NTP does: we ask, it answers with its clocks, and
half of the way there and back is the most that it can be off by. Pure: times come in."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from infini_run.report.report import Report

_DRIFT = 2e-4  # seconds a second: how fast two clocks may part, one of them being corrected
_ASKED = 3  # in a row at first: the first answer waits until the agent is through with its start


def ask() -> dict[str, int]:
    """What a heartbeat of the head asks."""
    return {"at_ns": time.monotonic_ns()}


def answer(asked: Mapping[str, Any]) -> dict[str, int]:
    """What the agent says to it."""
    return {"at_ns": int(asked["at_ns"]), "wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}


class ClockOffset:
    """Between a node's clocks and ours: its time less `offset_s` (CLOCK_MONOTONIC: `monotonic_s`) is our time,
    to within `bound_s`. bound_s: infinite as long as nothing is known; the offsets are 0 then."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.monotonic_s = 0.0
        self.bound_s = float("inf")
        self._known_s = 0.0
        self._asked = 1

    @property
    def is_known(self) -> bool:
        return self.bound_s != float("inf")

    def take(self, said: Mapping[str, Any]) -> None:
        """What it has answered."""
        now_ns, wall_ns, asked_ns = time.monotonic_ns(), time.time_ns(), int(said["at_ns"])
        half_ns = (now_ns - asked_ns) // 2
        if half_ns >= 0:
            offset_s = (int(said["wall_ns"]) - (wall_ns - half_ns)) / 1e9
            monotonic_s = (int(said["monotonic_ns"]) - (now_ns - half_ns)) / 1e9
            self.add(offset_s, monotonic_s, half_ns / 1e9, now_ns / 1e9)

    def add(self, offset_s: float, monotonic_s: float, bound_s: float, now_s: float) -> None:
        """One estimate. It is kept where it is as sure as the last one is by now, or says that a clock was set."""
        old_s = self.bound_s + _DRIFT * (now_s - self._known_s)
        if bound_s <= old_s or abs(offset_s - self.offset_s) > bound_s + old_s:
            self.offset_s, self.monotonic_s = offset_s, monotonic_s
            self.bound_s, self._known_s = bound_s, now_s

    def asks_again(self) -> bool:
        """Whether the next question is due with the answer: the first few are."""
        self._asked += 1
        return self._asked <= _ASKED

    def by_ours(self, report: Report) -> Report:
        """With its times by our clock, and by how much they were changed."""
        from infini_run.record import replace
        from infini_run.report.report import Clock

        if not self.is_known:
            return report

        def ours(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - self.offset_s

        exits = {
            exit_.rank: replace(
                exit_, start_s=ours(exit_.start_s), ready_s=ours(exit_.ready_s), end_s=ours(exit_.end_s)
            )
            for exit_ in report.exits
        }
        first = report.first_failure
        return replace(
            report,
            start_s=ours(report.start_s),
            end_s=ours(report.end_s),
            exits=tuple(exits.values()),
            first_failure=None if first is None else exits.get(first.rank, first),
            snapshots=tuple(replace(look, time_s=ours(look.time_s)) for look in report.snapshots),
            clocks=(Clock(host=report.host, offset_s=self.offset_s, bound_s=self.bound_s),),
        )


class Absence:
    """Whether we were away: stopped by a signal, or with a machine that slept (CLOCK_MONOTONIC stands still then,
    CLOCK_BOOTTIME does not). Who was away must not blame others for a silence that was his own.

    limit_s: what is longer than that is remembered: `away_s`, by CLOCK_BOOTTIME.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._there_s = _clocks()
        self._back_s = -float("inf")  # by CLOCK_MONOTONIC
        self.away_s = 0.0

    def note(self, meant_s: float) -> float:
        """Once a turn, after a wait that was to be no longer than that; for how long we were away, by
        CLOCK_MONOTONIC, beyond it."""
        before, now = self._there_s, _clocks()
        self._there_s = now
        away_s = now[1] - before[1] - meant_s
        if away_s > self._limit_s:
            self.away_s, self._back_s = away_s, now[0]
        return max(0.0, now[0] - before[0] - meant_s)

    def excuse(self) -> None:
        """It was known, and cared for, that we were stopped: only a machine that slept meanwhile is an absence."""
        self.note(time.monotonic() - self._there_s[0])

    def was_away(self, since_s: float) -> bool:
        """Whether we came back from an absence no longer ago than that."""
        return time.monotonic() - self._back_s <= since_s


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
