"""What torch's Flight Recorder says of a hang: in each process group, who did not enter the next collective. Pure."""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from infini_run.report.hang_snapshot import HangSnapshot

_LINES = 2  # process groups that are shown
_MOST_NUMBER = 2**53


@record
class CollectiveRecord:
    """The last collectives of a rank in one process group of torch.

    Attributes:
        group: The name of the process group.
        about: Its description, such as default_pg.
        members: The ranks that it has. Empty: unknown.
        number: The number of the last collective that the rank entered. They count alike on all members.
        is_pending: It has not ended.
        names: The names of the last few, as torch has them (`nccl:all_gather`), that of `number` last.
    """

    group: str
    about: str
    members: tuple[int, ...]
    number: int
    is_pending: bool
    names: tuple[str, ...]

    def text(self, number: int) -> str:
        """Return `NCCL all_gather #288686`, or `#288686` if its name is not known.

        Args:
            number: The number of the collective.
        """
        at = len(self.names) - 1 - (self.number - number)
        return f"{_readable(self.names[at])} #{number}" if 0 <= at < len(self.names) else f"#{number}"


@record
class CollectiveGap:
    """A process group in which some ranks did not enter what others did.

    Attributes:
        group: The name of the process group.
        missing: The ranks that did not.
        waiting: The ranks that did.
        text: What they entered: `NCCL all_gather #288686`.
        last: The number of the last collective that all have entered.
        is_whole: All its members sent a record.
    """

    group: str
    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str
    last: int
    is_whole: bool


def _readable(name: str) -> str:
    backend, colon, operation = name.partition(":")
    if not colon:
        return name
    return f"{backend.upper() if len(backend) < 5 and backend != 'gloo' else backend.title()} {operation.lstrip('_')}"


def decode_records(content: Any) -> dict[int, tuple[CollectiveRecord, ...]]:
    """Return the records of each rank, from what torch_dumps.py prints. Whatever does not fit is dropped."""
    if type(content) is not dict:
        return {}
    return {
        int(rank): tuple(_decode(group) for group in groups)
        for rank, groups in content.items()
        if rank.isdecimal() and len(rank) < 10 and type(groups) is list and all(map(_fits, groups))
    }


def _fits(group: Any) -> bool:
    if type(group) is not list or [type(field) for field in group] != [str, str, list, int, bool, list]:
        return False
    is_counted = all(type(rank) is int and 0 <= rank <= _MOST_NUMBER for rank in (*group[2], group[3]))
    return is_counted and all(type(name) is str for name in group[5])


def _decode(group: list[Any]) -> CollectiveRecord:
    name, about, members, number, is_pending, names = group
    return CollectiveRecord(
        group=name,
        about=about,
        members=tuple(members),
        number=number,
        is_pending=is_pending,
        names=tuple(names),
    )


def pending_text(members: Sequence[HangSnapshot]) -> str:
    """Return the collective in which all these ranks are. Empty: there is none, or it is not known of one."""
    pending = [
        {(each.group, each.number): each.text(each.number) for each in snapshot.records if each.is_pending}
        for snapshot in members
    ]
    shared = set.intersection(*map(set, pending))
    return next((text for key, text in pending[0].items() if key in shared), "")


def find_gaps(snapshots: Iterable[HangSnapshot]) -> list[CollectiveGap]:
    """Return the process groups in which some ranks wait for others, that of most ranks first."""
    by_rank = {snapshot.rank: {each.group: each for each in snapshot.records} for snapshot in snapshots}
    gaps = []
    for group in dict.fromkeys(group for records in by_rank.values() for group in records):
        own = {rank: records[group] for rank, records in by_rank.items() if group in records}
        last, most = min(each.number for each in own.values()), max(each.number for each in own.values())
        waiting = [rank for rank, each in own.items() if each.number > last]
        if last == most or not any(own[rank].is_pending for rank in waiting):
            continue
        ahead = min((own[rank] for rank in waiting), key=lambda each: each.number)
        known = set(next((each.members for each in own.values() if each.members), ()))
        gaps.append(
            CollectiveGap(
                group=f"{ahead.group} ({ahead.about})" if ahead.about else ahead.group,
                missing=tuple(sorted(rank for rank, each in own.items() if each.number == last)),
                waiting=tuple(sorted(waiting)),
                text=ahead.text(last + 1),
                last=last,
                is_whole=known <= own.keys() if known else all(by_rank.values()),
            )
        )
    return sorted(gaps, key=lambda gap: -len(gap.missing) - len(gap.waiting))


def culprits(snapshots: Sequence[HangSnapshot]) -> tuple[tuple[int, ...], int]:
    """Return the ranks that others wait for in a collective while they wait in none, and how many others wait.

    Empty, and 0: there is no such rank, or the records of a member are missing.
    """
    gaps = find_gaps(snapshots)
    if not gaps or not all(gap.is_whole for gap in gaps):
        return (), 0
    pending = {snapshot.rank for snapshot in snapshots if any(each.is_pending for each in snapshot.records)}
    missing = sorted({rank for gap in gaps for rank in gap.missing} - pending)
    waiting = {rank for gap in gaps for rank in gap.waiting} - set(missing)
    return (tuple(missing), len(waiting)) if 0 < len(missing) <= len(waiting) else ((), 0)


def gap_lines(snapshots: Iterable[HangSnapshot], ranks_text: Any) -> list[str]:
    """Return a line for each process group with a gap, for two at most.

    Args:
        snapshots: Those of a hang.
        ranks_text: The function that writes a list of ranks.
    """
    return [
        f"  process group {gap.group}: {ranks_text(gap.missing)} did not enter {gap.text}; all entered #{gap.last}"
        for gap in find_gaps(snapshots)[:_LINES]
    ]
