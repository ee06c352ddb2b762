"""How fast ranks get further, and which of them the others wait for: from the times of their PROGRESS=. Pure.

Where ranks meet in a collective in each step, their steps take equally long, and a slow one shows in that it reports
after the others. Where they don't meet, its own steps take longer. Decisions 79 and 97 say how to know which it is.
"""

from __future__ import annotations

from _bisect import bisect_left

from infini_run.record import record
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

GAP_S = 0.1  # between two samples of a rank, at least
_WINDOW = 32  # samples of a rank
_LEAST = 16  # samples, below which a rank has no step
_LEAST_LAGS = 12
_MEETS = 0.03  # the least evidence for it, on average over comparisons (decision 97)
_REMEMBERED = 8  # comparisons
_LATE, _OTHERS = 8, 16  # ranks that are compared to find out: those that report last, and others
_LONGER = 1.3  # times the step of the others without waits: it may be slow
_LEAST_WAITS = 3  # that end with the late rank, where ranks meet in some steps only
_WAIT_ERROR = 0.25  # of a step: how exactly they do
_PERIOD_S = 5.0  # between two comparisons, at least
_FACTOR = 1.5  # times the step of the others: slow
_EXTRA_S = 0.01  # a step that takes less longer is not
_EQUAL = 0.1  # of a step: ranks whose steps differ less may meet in each
_SHOWN = 64  # slow ranks in a report
_COSTLY = 0.1  # of the attempt: worth a line at its end


@record
class SlowRank:
    """A rank that was slow for a part of the attempt.

    Attributes:
        rank: Its number.
        step_s: What a step took it, without waiting for others, in seconds: the mean of that part.
        others_s: The same of the other ranks.
        steps: How many steps of it were slow.
        waited_s: How long each of the others waited for it, in seconds. 0: they did not; each has its own pace.
        share: The part of the attempt, from 0 to 1, that this cost: its steps, or the time that the others waited.
    """

    rank: int
    step_s: float
    others_s: float
    steps: int
    waited_s: float
    share: float

    @property
    def is_costly(self) -> bool:
        """Whether the final report names this rank."""
        return self.share >= _COSTLY

    def is_like(self, other: SlowRank) -> bool:
        """Return whether both are slow to nearly the same degree.

        Args:
            other: Another slow rank.
        """
        return abs(self.step_s - other.step_s) < _EQUAL * other.step_s

    def text(self, is_one_of_many: bool = False) -> str:
        """Return what follows its name in a sentence.

        Args:
            is_one_of_many: The name is that of several ranks.
        """
        was, it = ("were", "them") if is_one_of_many else ("was", "it")
        waited = f"; the others waited {duration_text(self.waited_s)} for {it}" if self.waited_s else ""
        return f"{was} slow: {duration_text(self.step_s)} a step, others {duration_text(self.others_s)}{waited}"

    def to_json(self) -> dict[str, float]:
        """Return it as plain types for JSON."""
        return {
            "rank": self.rank,
            "step_s": self.step_s,
            "others_step_s": self.others_s,
            "steps": self.steps,
            "waited_s": self.waited_s,
        }


class _Track:
    """What one rank has reported. Lists end with the latest sample."""

    def __init__(self, value: int, time_s: float) -> None:
        self.value, self.time_s, self.error_s = value, time_s, 0.0  # the latest report
        self.reports = 0  # since the first
        self.values, self.times, self.counts = [value], [time_s], [0]
        self.lags: list[float] = []  # of the samples but the latest: seconds behind the reference
        self.counted = 0  # reports until the last one that was counted as slow

    def add(self, lag_s: float | None) -> None:
        """Keep the latest report as a sample. lag_s: that of the sample before; None: unknown."""
        self.values.append(self.value)
        self.times.append(self.time_s)
        self.counts.append(self.reports)
        if lag_s is not None:
            self.lags.append(lag_s)
        for kept in (self.values, self.times, self.counts, self.lags):
            del kept[:-_WINDOW]

    @property
    def step_s(self) -> float:
        """The mean time between two reports."""
        return (self.times[-1] - self.times[0]) / max(1, self.counts[-1] - self.counts[0])

    @property
    def value_s(self) -> float:
        """The mean time by which the value rises by one."""
        return (self.times[-1] - self.times[0]) / max(1, self.values[-1] - self.values[0])

    @property
    def usual_value_s(self) -> float:
        """The same of a quick step: the lower quartile, which has no wait if half of the steps have none."""
        samples = zip(self.times, self.times[1:], self.values, self.values[1:], strict=False)
        return sorted((end_s - begin_s) / (end - begin) for begin_s, end_s, begin, end in samples)[
            (len(self.times) - 1) // 4
        ]

    def time_at(self, value: int) -> float | None:
        """Return when it reported a value, or would have; None: before its first sample, or far in the future."""
        at = bisect_left(self.values, value)
        if at < len(self.values) and self.values[at] == value:
            return self.times[at]
        if at == 0 or len(self.values) < 2:
            return None
        last = min(at, len(self.values) - 1)
        before = last - 1 if at < len(self.values) else 0
        value_s = (self.times[last] - self.times[before]) / (self.values[last] - self.values[before])
        if value - self.values[last] > self.values[-1] - self.values[0]:
            return None
        return self.times[last] + (value - self.values[last]) * value_s


class Pace:
    """The progress of the ranks of one attempt. Times are seconds of one clock.

    Attributes:
        slow: The ranks that are slow at present.
    """

    def __init__(self) -> None:
        self.slow: frozenset[int] = frozenset()
        self._tracks: dict[int, _Track] = {}
        self._reference = -1  # the rank to which the others are compared
        self._evidence, self._comparisons = 0.0, 0  # for ranks that meet in each step: the mean of comparisons
        self._unsure: set[int] = set()  # ranks that were slow, if they do
        self._due_s = 0.0
        self._begin_s = self._last_s = 0.0
        self._found: dict[int, list[float]] = {}  # by rank: steps, their time, that of others, what was waited, time

    def note(self, rank: int, value: int, time_s: float, *, reports: int = 1, error_s: float = 0.0) -> bool:
        """Take in the PROGRESS= of a rank. Return whether `slow` is new.

        Args:
            rank: The rank.
            value: Its value. One that is not higher than the last is ignored.
            time_s: When it was sent.
            reports: How many values this is the last of.
            error_s: By how much the time may be wrong, compared with those of other ranks.
        """
        track = self._tracks.get(rank)
        if track is None:
            self._tracks[rank] = _Track(value, time_s)
            self._begin_s = min(self._begin_s or time_s, time_s)
            return False
        if value <= track.value or time_s < track.time_s:
            return False
        track.value, track.time_s, track.error_s = value, time_s, error_s
        track.reports += reports
        if time_s - track.times[-1] < GAP_S:
            return False
        track.add(self._lag_s(rank, track))
        if time_s < self._due_s:
            return False
        before = self.slow
        self.compare(time_s)
        return self.slow != before

    def _lag_s(self, rank: int, track: _Track) -> float | None:
        """Return how long after the reference a rank has sent its last sample. By now the reference has sent it, too,
        unless it is slower."""
        reference = self._tracks.get(self._reference)
        if reference is None or rank == self._reference:
            return None
        sent_s = reference.time_at(track.values[-1])
        return None if sent_s is None else track.times[-1] - sent_s

    def drop(self, ranks: Iterable[int]) -> None:
        """Forget what ranks have reported: they restart."""
        for rank in ranks:
            self._tracks.pop(rank, None)
        self.slow -= frozenset(ranks)

    def latest(self) -> dict[int, tuple[int, float]]:
        """Return the highest PROGRESS= of each rank, and when it was sent."""
        return {rank: (track.value, track.time_s) for rank, track in self._tracks.items()}

    def value(self, rank: int) -> int | None:
        """Return the highest PROGRESS= of a rank; None: it has sent none."""
        track = self._tracks.get(rank)
        return None if track is None else track.value

    def rate(self, rank: int, now_s: float) -> float | None:
        """Return by how much the PROGRESS= of a rank rises in a second; None: it has sent it once, or never."""
        track = self._tracks.get(rank)
        if track is None or track.value == track.values[0]:
            return None
        idle_s = now_s - track.time_s
        end_s = now_s if idle_s > 2 * max(track.step_s, GAP_S) else track.time_s
        return (track.value - track.values[0]) / max(end_s - track.times[0], 1e-6)

    # ---- slow ranks

    def compare(self, now_s: float) -> None:
        """Find out which ranks are slow now."""
        self._due_s, self._last_s = now_s + _PERIOD_S, now_s
        paces = {rank: track.step_s for rank, track in self._tracks.items() if len(track.times) >= _LEAST}
        waits = self._waits(paces)
        own = {rank: step_s - waits.get(rank, 0.0) for rank, step_s in paces.items()}
        typical_s = _middle(own.values()) if len(own) > 1 else float("inf")
        error_s = max((self._tracks[rank].error_s for rank in own), default=0.0)
        least_s = max(_FACTOR * typical_s, typical_s + max(_EXTRA_S, 2 * error_s))
        self.slow = frozenset(rank for rank, step_s in own.items() if step_s > least_s)
        for rank in self.slow:
            track = self._tracks[rank]
            steps = track.reports - max(track.counted, track.counts[0])  # those that this comparison is of
            track.counted = track.reports
            waited_s = steps * (own[rank] - typical_s) if rank in waits else 0.0
            more = (steps, steps * own[rank], steps * typical_s, waited_s)
            self._found[rank] = [a + b for a, b in zip(self._found.get(rank, (0.0,) * 4), more, strict=True)]
        self._choose_reference(now_s)

    def _choose_reference(self, now_s: float) -> None:
        """Compare with the lowest rank, unless that has stopped reporting."""
        reports = [r for r, t in self._tracks.items() if now_s - t.time_s < _PERIOD_S + 3 * t.step_s]
        chosen = self._reference if self._reference in reports else min(reports, default=-1)
        if chosen != self._reference:
            self._reference = chosen
            for track in self._tracks.values():
                track.lags.clear()

    def _waits(self, paces: Mapping[int, float]) -> dict[int, float]:
        """Return how long each rank waits for others in a step, of ranks that meet.

        Args:
            paces: The mean step of each rank.
        """
        typical_s = _middle(paces.values()) if paces else 0.0
        rare = self._rare_waits({rank: step_s for rank, step_s in paces.items() if step_s < 2 * typical_s})
        if rare:
            return rare
        equal = [rank for rank, step_s in paces.items() if abs(step_s - typical_s) < _EQUAL * typical_s]
        usual = self._usual_lags(equal)
        if len(usual) < 2:
            return {}
        center_s = _middle(usual.values())
        near = {rank: lag_s for rank, lag_s in usual.items() if abs(lag_s - center_s) < typical_s}
        last_s = max(near.values())
        if last_s - center_s < _EQUAL * typical_s:
            return {}  # nobody is late
        late = [rank for rank, lag_s in near.items() if lag_s > last_s - _EQUAL * typical_s]
        self._weigh(late, [rank for rank in near if rank not in late])
        if not self._meet_in_each:
            return {}
        self._unsure.update(late)
        return {rank: last_s - near.get(rank, center_s) for rank in usual}  # others than near ones are not judged

    def _usual_lags(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return by how many seconds ranks report after the reference, as a median, if known."""
        lags = {rank: self._tracks[rank].lags for rank in ranks}
        usual = {rank: _middle(found) for rank, found in lags.items() if len(found) >= _LEAST_LAGS}
        return usual | {rank: 0.0 for rank in lags if rank == self._reference}

    def _weigh(self, late: Sequence[int], others: Sequence[int]) -> None:
        """Take in what speaks for it that ranks wait in each step until the late ones have reported the last one."""
        found = [self._errors(rank, late[:_LATE]) for rank in others[:_OTHERS]]
        from math import log

        now = [log((alone_s + 1e-9) / (waiting_s + 1e-9)) for alone_s, waiting_s in filter(None, found)]
        self._comparisons = min(self._comparisons + 1, _REMEMBERED)
        self._evidence += (sum(now) / max(1, len(found)) - self._evidence) / self._comparisons
        if self._evidence < -_MEETS:
            for rank in self._unsure:
                self._found.pop(rank, None)
            self._unsure.clear()

    @property
    def _meet_in_each(self) -> bool:
        """Whether the ranks meet in each step, as far as known."""
        return self._evidence > _MEETS

    def _errors(self, rank: int, late: Sequence[int]) -> tuple[float, float] | None:
        """Return how far the reports of a rank are from what two models say, in seconds: that it waits for nobody,
        and that it waits for late ranks first. None: too few are known, or it reports after them too often."""
        track = self._tracks[rank]
        values, times = track.values, track.times
        value_s = (times[-1] - times[0]) / (values[-1] - values[0])
        alone, waiting, after = [], [], 0
        for at in range(1, len(times)):
            ends = self._times_at(late, values[at - 1])
            if ends:
                more_s = times[at] - times[at - 1] - value_s * (values[at] - values[at - 1])
                alone.append(more_s)
                waiting.append(more_s - max(0.0, max(ends) - times[at - 1]))
                after += max(ends) < times[at - 1]
        if len(alone) < _LEAST_LAGS or after > len(alone) // 4:
            return None
        return _unexplained(alone), _unexplained(waiting)

    def _times_at(self, ranks: Sequence[int], value: int) -> list[float]:
        """Return when ranks have reported a value, as far as known."""
        found = (self._tracks[rank].time_at(value) for rank in ranks)
        return [time_s for time_s in found if time_s is not None]

    def _rare_waits(self, paces: Mapping[int, float]) -> dict[int, float]:
        """Return how long each rank waits in a step on average, of ranks that meet in half of the steps at most.

        Steps without a wait show who is slow there. A longer one has to end when the slow rank reports.
        """
        usual = self._usual_lags(paces)
        if len(usual) < 2:
            return {}
        alone = {rank: self._tracks[rank].usual_value_s for rank in usual}
        usual_s, center_s = _middle(alone.values()), _middle(usual.values())
        last = max(usual, key=lambda rank: usual[rank])
        if alone[last] < _LONGER * usual_s:
            return {}
        late = [rank for rank, lag_s in usual.items() if lag_s > (usual[last] + center_s) / 2]
        others = [rank for rank in usual if rank not in late]
        errors = [error for rank in others[:_OTHERS] for error in self._wait_errors(rank, alone[rank], late[:_LATE])]
        if len(errors) < _LEAST_WAITS or _middle(errors) > _WAIT_ERROR:
            return {}
        return {
            rank: max(0.0, paces[rank] - paces[rank] * min(alone[rank], usual_s) / self._tracks[rank].value_s)
            if rank in others else 0.0
            for rank in usual
        }  # fmt: skip

    def _wait_errors(self, rank: int, alone_s: float, late: Sequence[int]) -> list[float]:
        """Return for each long step of a rank how far from the late ranks' report its wait ends, in its own steps.

        Args:
            rank: The rank.
            alone_s: Its time for a value without waits.
            late: The late ranks.
        """
        track, errors = self._tracks[rank], []
        for at in range(1, len(track.times)):
            value, end_s = track.values[at], track.times[at]
            steps = value - track.values[at - 1]
            wait_s = end_s - track.times[at - 1] - alone_s * steps
            if wait_s < alone_s / 2 or steps > 2:
                continue
            ends = [self._times_at(late, value - back) for back in range(1, steps + 1)]
            off = [abs(end_s - back * alone_s - max(at_s)) for back, at_s in enumerate(ends, 1) if at_s]
            errors += [min(off) / alone_s] if off else []
        return errors

    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """Return the ranks that were slow in the attempt, the worst first, a few at most."""
        self.compare(max((track.time_s for track in self._tracks.values()), default=0.0))
        whole_s = max(self._last_s - self._begin_s, 1e-6)
        found = [
            SlowRank(
                rank=rank, step_s=own_s / steps, others_s=others_s / steps, steps=int(steps), waited_s=waited_s,
                share=min(1.0, (waited_s or own_s) / whole_s),
            )
            for rank, (steps, own_s, others_s, waited_s) in self._found.items() if steps
        ]  # fmt: skip
        return tuple(
            sorted(found, key=lambda slow: (-slow.steps * (slow.step_s - slow.others_s), slow.rank))[:_SHOWN]
        )


def _middle(values: Iterable[float]) -> float:
    """Return the median; of two, the lower one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _unexplained(errors: Sequence[float]) -> float:
    """Return the mean size of errors, less what each has in common with the one before: slow drifts say nothing."""
    mean = sum(errors) / len(errors)
    rest = [each - mean for each in errors]
    spread = sum(each**2 for each in rest[:-1])
    slope = sum(rest[at - 1] * rest[at] for at in range(1, len(rest))) / spread if spread else 0.0
    return sum(abs(rest[at] - (slope * rest[at - 1] if at else 0.0)) for at in range(len(rest))) / len(rest)
