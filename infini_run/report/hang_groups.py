"""Whom a hanging job waits for: snapshots of ranks, folded into groups that are in the same place. Pure.

In a hang nearly all ranks wait in a collective for those that did not enter it. So the ranks that hang first say
little, and the group that differs says it all. Nobody is named without two looks that agree, or if no group is odd.
"""

from __future__ import annotations

from infini_run.record import record
from infini_run.report.hang_snapshot import HangSnapshot, without_line
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from infini_run.report.exit import Exit

_COLLECTIVES = (  # in lower case and without underscores
    *("allreduce", "allgather", "allgatherintotensor", "allgatherobject", "reducescatter", "reducescattertensor"),
    *("alltoall", "alltoallsingle", "broadcastobjectlist", "gatherobject", "scatterobjectlist", "barrier"),
    *("monitoredbarrier", "syncglobaldevices", "waitforeveryone"),
)
_AMBIGUOUS = (  # only in files of these packages: others have functions of the same names
    *("broadcast", "reduce", "gather", "scatter", "send", "recv", "wait", "batchisendirecv", "synchronize"),
    *("initprocessgroup", "destroyprocessgroup", "storebasedbarrier", "enginerunbackward", "blockuntilready"),
)
_PACKAGES = ("torch/", "horovod/", "mpi4py/", "deepspeed/", "jax/", "jaxlib/", "accelerate/")
_LIBRARIES = ("threading.py", "queue.py", "selectors.py", "socket.py", "ssl.py", "subprocess.py", "contextlib.py",
              "concurrent/", "multiprocessing/", "asyncio/", *_PACKAGES)  # fmt: skip
_PEER_WAITS = ("futex", "poll", "sock", "skb", "recv", "unix_", "inet_", "tcp_", "pipe_", "ep_")
_LINES = 5  # groups that are shown
EXITED = "X"  # the state of a rank that has exited


@record
class HangGroup:
    """Ranks in the same place. Smaller groups say more, so they come first.

    Attributes:
        ranks: In order.
        hosts: Theirs, each once.
        place: Where they are: a function with its file and line, or the kernel's function.
        cpu: What they use on average, in CPUs. None: unknown.
        is_waited_for: The others wait for them.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    place: str
    cpu: float | None
    is_waited_for: bool

    @property
    def who(self) -> str:
        """`ranks 0-1,3 on host1`."""
        hosts = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"
        return f"{ranks_text(self.ranks)} on {hosts}"


@record
class HangAnalysis:
    """The groups of one hang.

    Attributes:
        why: Its sign: `no output and no CPU used for 30.0 s`.
        groups: All, the smallest first.
        waited_for: The ranks that the others wait for. Empty: no group is the odd one, or it is not sure.
        stopped_for: Those of them that still live.
        waiting: How many wait for them.
        only: The one rank that hangs, if nobody waits for it and it waits for nobody; else None.
        unanswered: The hosts whose ranks are in no group, because they did not answer. The cause may be there.
    """

    why: str
    groups: tuple[HangGroup, ...]
    waited_for: tuple[int, ...] = ()
    stopped_for: tuple[int, ...] = ()
    waiting: int = 0
    only: int | None = None
    unanswered: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """`no output for 30.0 s: 7 of 8 ranks wait for rank 2`. Empty if one rank alone hangs."""
        total = sum(len(group.ranks) for group in self.groups)
        if self.only is not None:
            return ""
        if self.unanswered:
            places = self.groups[0].place if len(self.groups) == 1 else f"{len(self.groups)} places"
            some = f"{total} ranks are" if total > 1 else "1 rank is"
            return f"{self.why}: {some} in {places}, and {hosts_text(self.unanswered)} did not answer"
        if self.waited_for:
            verb = "waits" if self.waiting == 1 else "wait"
            return f"{self.why}: {self.waiting} of {total} ranks {verb} for {ranks_text(self.waited_for)}"
        if len(self.groups) == 1:
            return f"{self.why}: all {total} ranks wait in {self.groups[0].place}"
        return f"{self.why}: {total} ranks are in {len(self.groups)} places, and none is the odd one out"

    def lines(self) -> list[str]:
        """Return a line for each group, or for the first five: its ranks, where they are, and what CPU they use."""
        shown = self.groups[: _LINES if len(self.groups) > _LINES + 1 else len(self.groups)]
        rows = [(group.who, group.place, _cpu_text(group.cpu)) for group in shown]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"  {who:<{widths[0]}}  {place:<{widths[1]}}  {cpu}".rstrip() for who, place, cpu in rows]
        rest = self.groups[len(shown) :]
        if rest:
            lines.append(f"  and {len(rest)} more groups, of {sum(len(group.ranks) for group in rest)} ranks")
        return lines


def hosts_text(hosts: Sequence[str]) -> str:
    """Return `host1 and host2`, or their number if there are more."""
    return " and ".join(hosts) if len(hosts) < 3 else f"{len(hosts)} hosts"


def analyze_hang(snapshots: Sequence[HangSnapshot], unanswered: Sequence[str] = ()) -> HangAnalysis | None:
    """Fold the snapshots of the last hang.

    Args:
        snapshots: Those of a launch, in the order in which they were made.
        unanswered: The hosts that have ranks, and did not send their snapshots. Then no rank is named.

    Returns:
        None if no rank hangs.
    """
    last: dict[int, HangSnapshot] = {}
    newest: dict[str, int] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: (snapshot.is_sure, snapshot.finding)):
        if snapshot.state != EXITED:  # one that a stop has cut short counts only if there is no other
            newest[snapshot.host] = snapshot.finding
    for snapshot in snapshots:
        if snapshot.state == EXITED or snapshot.finding == newest[snapshot.host]:
            last[snapshot.rank] = snapshot
    hung = [snapshot for snapshot in last.values() if snapshot.kind == "hung"]
    if not hung:
        return None
    groups = fold(last.values())
    odd, waiting = ([], 0) if unanswered else _odd_ones(groups)
    waited_for = tuple(sorted(snapshot.rank for group in odd for snapshot in group))
    is_alone = not odd and not unanswered and (len(last) == 1 or (len(hung) == 1 and not _is_waiting(hung[0])))
    return HangAnalysis(
        why=hung[0].why,
        groups=tuple(describe_group(group, is_waited_for=group in odd) for group in groups),
        waited_for=waited_for,
        stopped_for=tuple(rank for rank in waited_for if last[rank].state != EXITED),
        waiting=waiting,
        only=hung[0].rank if is_alone else None,
        unanswered=tuple(unanswered),
    )


def fold(snapshots: Iterable[HangSnapshot]) -> list[list[HangSnapshot]]:
    """Return the snapshots in groups that are in the same place, the smallest group first, each by rank."""
    members: dict[tuple[str, ...], list[HangSnapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda each: each.rank):
        members.setdefault(_key(snapshot), []).append(snapshot)
    return sorted(members.values(), key=len)


def with_exited(snapshots: Sequence[HangSnapshot], exits: Iterable[Exit]) -> tuple[HangSnapshot, ...]:
    """Return the snapshots of a hang with one per rank that had exited well before: the others may wait for it."""
    if not snapshots or any(snapshot.kind == "late" for snapshot in snapshots):
        return tuple(snapshots)
    last = snapshots[-1]
    known = {snapshot.rank for snapshot in snapshots}
    gone = [exit_ for exit_ in exits if exit_.ended_well and exit_.rank not in known]
    return (*snapshots, *(_exited(exit_, last) for exit_ in gone if (exit_.end_s or 0.0) <= last.time_s))


def _exited(exit_: Exit, last: HangSnapshot) -> HangSnapshot:
    return HangSnapshot(
        rank=exit_.rank,
        pid=exit_.pid or 0,
        host=exit_.host,
        time_s=last.time_s,
        why=f"exited with code 0, {duration_text(last.time_s - (exit_.end_s or 0.0))} before",
        is_sure=last.is_sure,
        state=EXITED,
    )


def hang_text(
    snapshots: Sequence[HangSnapshot], logs: Mapping[int, str], unanswered: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return a sentence about ranks that hang or are late, and the lines below it.

    Args:
        snapshots: At least one of a rank that hangs or is late.
        logs: The path of each rank's log; empty: none.
        unanswered: As for analyze_hang.
    """
    hang = analyze_hang(snapshots, unanswered)
    if hang is not None and hang.headline:
        return hang.headline, [*hang.lines(), *files_lines(hang, snapshots, logs)]
    first, *rest = (snapshot for snapshot in snapshots if snapshot.kind)
    more = f", and {len(rest)} more" if rest else ""
    head = f"rank {first.rank} on {first.host} {first.sentence} (pid {first.pid}{more})"
    return head, [*first.lines(), *([f"  details: {first.file}"] if first.file else [])]


def files_lines(hang: HangAnalysis, snapshots: Sequence[HangSnapshot], logs: Mapping[int, str]) -> list[str]:
    """Return where to look: the log of the first of those that the others wait for, and the files with all stacks.

    Args:
        hang: The analysis.
        snapshots: What was analyzed.
        logs: The path of each rank's log; empty: none.
    """
    rank = hang.waited_for[0] if hang.waited_for else -1
    parts = [f"log of rank {rank}: {logs[rank]}"] if logs.get(rank) else []
    folder = next((snapshot.file.rpartition("/")[0] for snapshot in snapshots if snapshot.file), "")
    if folder:
        known = logs.get(rank, "").rpartition("/")[0]  # as the user gave it
        parts.append(f"all stacks: {known if known and folder.endswith(f'/{known}') else folder}/hang_*.txt")
    return [f"  {'   '.join(parts)}"] if parts else []


def _key(snapshot: HangSnapshot) -> tuple[str, ...]:
    """What ranks of one group share. Where they are inside of a collective does not matter: it may spin."""
    state = snapshot.state if snapshot.state in ("T", "D", EXITED) else ""
    at = collective(snapshot.frames)
    frames = snapshot.frames if at < 0 else (without_line(snapshot.frames[at]), *snapshot.frames[at + 1 :])
    return (state, *(frames or (snapshot.wait,)))


def _odd_ones(groups: Sequence[list[HangSnapshot]]) -> tuple[list[list[HangSnapshot]], int]:
    """Return the groups that the others wait for, and how many ranks wait. Without such a group: none, and 0."""
    everybody = [snapshot for group in groups for snapshot in group]
    if len(groups) < 2 or not all(snapshot.is_sure for snapshot in everybody):
        return [], 0
    waiting = [group for group in groups if _is_waiting(group[0])]
    if not waiting and not any(snapshot.frames for snapshot in everybody):
        waiting = [group for group in groups[-1:] if len(group) * 2 > len(everybody) and _waits_for_peer(group[0])]
    if not waiting:
        return [], 0
    others = [group for group in groups if group not in waiting]
    if not others:  # all are in collectives, and a few of them in another one
        others, waiting = waiting[:-1], waiting[-1:]
        is_odd = _count(others) < _count(waiting)
    else:
        is_odd = _count(others) <= _count(waiting)
    return (others, _count(waiting)) if is_odd else ([], 0)


def _count(groups: Iterable[list[HangSnapshot]]) -> int:
    return sum(map(len, groups))


def _is_waiting(snapshot: HangSnapshot) -> bool:
    """Whether it waits in a collective, as far as its Python frames tell."""
    return snapshot.state not in ("T", "D", EXITED) and collective(snapshot.frames) >= 0


def _waits_for_peer(snapshot: HangSnapshot) -> bool:
    """Whether the kernel's function is one in which a program waits for another: known without any Python."""
    return snapshot.state == "S" and any(wait in snapshot.wait for wait in _PEER_WAITS)


def collective(frames: Sequence[str]) -> int:
    """Return the index of the outermost frame that is a collective; -1: there is none.

    Args:
        frames: As py-spy writes them, `all_reduce (train.py:41)`, the innermost first.
    """
    for at in range(len(frames) - 1, -1, -1):
        name, _, file = frames[at].partition(" (")
        function = name.replace("_", "").lower()
        if function in _COLLECTIVES or (function in _AMBIGUOUS and file.startswith(_PACKAGES)):
            return at
    return -1


def _place(snapshot: HangSnapshot) -> str:
    """`all_reduce (train.py:41)`: the function that says most, and the line that called it."""
    if snapshot.state == EXITED:
        return snapshot.why
    frames = snapshot.frames
    at = collective(frames)
    if at >= 0 and at + 1 < len(frames) and frames[at].partition(" (")[2].startswith(_PACKAGES):
        callers = [frame for frame in frames[at + 1 :] if not frame.partition(" (")[2].startswith(_LIBRARIES)]
        caller = (callers or frames[at + 1 :])[0]
        place = f"{frames[at].partition(' (')[0]} ({caller.partition(' (')[2]}"
    elif at >= 0:
        place = frames[at]
    else:
        own = [frame for frame in frames if not frame.partition(" (")[2].startswith(_LIBRARIES)]
        place = (own or list(frames) or [snapshot.wait or "running"])[0]
    if snapshot.state == "T":
        return f"{place}, {'waits for the terminal' if 'waits for' in snapshot.why else 'suspended by a signal'}"
    return f"{place}, in the kernel: {snapshot.wait}" if snapshot.state == "D" and frames else place


def describe_group(members: Sequence[HangSnapshot], *, is_waited_for: bool = False) -> HangGroup:
    """Return the group of these snapshots.

    Args:
        members: They are in the same place.
        is_waited_for: As in HangGroup.
    """
    cpus = [snapshot.cpu for snapshot in members if snapshot.cpu is not None]
    return HangGroup(
        ranks=tuple(snapshot.rank for snapshot in members),
        hosts=tuple(dict.fromkeys(snapshot.host for snapshot in members)),
        place=_place(members[0]),
        cpu=sum(cpus) / len(cpus) if cpus else None,
        is_waited_for=is_waited_for,
    )


def _cpu_text(cpu: float | None) -> str:
    return "" if cpu is None else f"{cpu * 100:.0f}% CPU"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 0-1,3-7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = ",".join(parts[:8]) + (",..." if len(parts) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
