"""The pace of several programs: the steps of one say nothing about those of another. Pure."""

from __future__ import annotations

from infini_run.report.pace import Pace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from infini_run.report.pace import SlowRank


def make_pace(programs: Mapping[int, str], *, one_world: bool) -> Pace:
    """Return the pace of an attempt.

    Args:
        programs: The program of each rank.
        one_world: The ranks of all programs are in one world, and may wait for each other.
    """
    return Pace() if one_world or len(set(programs.values())) < 2 else ProgramPace(programs)


class ProgramPace(Pace):
    """The progress of the ranks of several programs, each compared with the others of its program.

    Args:
        programs: The program of each rank.
    """

    def __init__(self, programs: Mapping[int, str]) -> None:
        super().__init__()
        paces = {name: Pace() for name in programs.values()}
        self._paces = list(paces.values())
        self._of = {rank: paces[name] for rank, name in programs.items()}

    def note(self, rank: int, value: int, time_s: float, *, reports: int = 1, error_s: float = 0.0) -> bool:
        is_news = self._of[rank].note(rank, value, time_s, reports=reports, error_s=error_s)
        if is_news:
            self._gather()
        return is_news

    def drop(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._of[rank].drop((rank,))
        self._gather()

    def _gather(self) -> None:
        self.slow = frozenset[int]().union(*(pace.slow for pace in self._paces))

    def latest(self) -> dict[int, tuple[int, float]]:
        return {rank: sent for pace in self._paces for rank, sent in pace.latest().items()}

    def value(self, rank: int) -> int | None:
        return self._of[rank].value(rank)

    def rate(self, rank: int, now_s: float) -> float | None:
        return self._of[rank].rate(rank, now_s)

    def compare(self, now_s: float) -> None:
        for pace in self._paces:
            pace.compare(now_s)
        self._gather()

    def slow_ranks(self) -> tuple[SlowRank, ...]:
        return tuple(
            sorted((slow for pace in self._paces for slow in pace.slow_ranks()), key=lambda slow: -slow.share)
        )
