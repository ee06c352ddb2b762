"""Whom a hanging job waits for: snapshots of ranks, folded into groups that are in the same place. Pure.

In a hang nearly all ranks wait in a collective for those that did not enter it. So the ranks that hang first say
little, and the group that differs says it all. Nobody is named without two looks that agree, or if no group is odd.
"""

from __future__ import annotations

from infini_run.record import record, replace
from infini_run.report.hang_snapshot import AT_TERMINAL, BEFORE_STOP, SUSPENDED, TRIGGERED, HangSnapshot, without_line
from infini_run.report.text import describe_end, duration_text
from infini_run.report.torch_records import culprits, gap_lines, pending_text
from infini_run.system.kernel_wait import KINDS

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
_PEER_WAITS = tuple(f" ({kind})" for kind in KINDS)  # as waits_in writes them
_SILENT = ("no output", "no writes", "no CPU used")  # not what a rank has said of itself
_IDLE = 0.01  # of a CPU: as the watchdog's
_CLOCK_S = 0.5  # what two readings of a clock that is set meanwhile may differ by
_BUSY_CPU = 0.05  # of a CPU: more than what the kernel's ticks may add to a rank that sleeps
_BUSY = "running"  # the place of a rank that moves between two looks
_LINES = 5  # groups that are shown
_LINES_BESIDE = 3  # beside a failure
_FAILED = "failed"  # how a rank has exited, at its beginning
EXITED = "X"  # the state of a rank that has exited


@record
class HangGroup:
    """Ranks in the same place. Smaller groups say more, so they come first.

    Attributes:
        ranks: In order.
        hosts: Theirs, each once.
        place: Where they are: a function with its file and line, or the kernel's function.
        cpu: What they use on average, in CPUs. None: unknown.
        gpu: How busy their GPUs are on average, from 0 to 1. None: unknown.
        is_waited_for: The others wait for them.
        lives: They gave signs of life since the others fell silent, and are in no collective.
        output_ago_s: How long ago one of them wrote something, in seconds, if they live or the others wait for them.
            None: none did.
        collective: In which all of them are, by torch's records. Empty: none, or unknown.
        program: The name of their program; empty: nobody named it.
        first: The rank of the first one of that program.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    place: str
    cpu: float | None
    gpu: float | None
    is_waited_for: bool
    lives: bool = False
    output_ago_s: float | None = None
    collective: str = ""
    program: str = ""
    first: int = 0

    @property
    def who(self) -> str:
        """Return `ranks 0-1,3 on host1`."""
        hosts = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"
        return f"{ranks_text(self.ranks, self.program, self.first)} on {hosts}"


@record
class HangAnalysis:
    """The groups of one hang: those of the program whose rank hung first.

    Attributes:
        why: Its sign: `no output and no CPU used for 30.0 s`, `rank 1 sent WATCHDOG=trigger`.
        groups: All, the smallest first.
        waited_for: The ranks that the others wait for. Empty: no group is the odd one, or it is not sure.
        stopped_for: Those of them that still live.
        waiting: How many wait for them.
        silent: Of whom the sign is, if it is not that of those that the others wait for; else empty.
        doing: What those do that the others wait for: `, which wrote 48 ms ago`. Empty: their lines tell.
        is_guess: Only the kernel's functions say who waits for whom.
        has_failed: One of those that the others wait for has failed.
        only: The one rank that hangs, if nobody waits for it and it waits for nobody; else None.
        unanswered: The hosts whose ranks are in no group, because they did not answer. The cause may be there.
        gaps: Lines about collectives that some ranks did not enter.
        no_stacks: Whose Python stacks are missing, and why. Empty: none is.
        program, first: As in HangGroup.
    """

    why: str
    groups: tuple[HangGroup, ...]
    waited_for: tuple[int, ...] = ()
    stopped_for: tuple[int, ...] = ()
    waiting: int = 0
    silent: tuple[int, ...] = ()
    doing: str = ""
    is_guess: bool = False
    has_failed: bool = False
    only: int | None = None
    unanswered: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    no_stacks: str = ""
    program: str = ""
    first: int = 0

    @property
    def headline(self) -> str:
        """Return `no output for 30.0 s: 7 of 8 ranks wait for rank 2`; empty if one rank alone hangs."""
        total = sum(len(group.ranks) for group in self.groups)
        if self.only is not None:
            return ""
        if self.unanswered:
            places = self.groups[0].place if len(self.groups) == 1 else f"{len(self.groups)} places"
            some = f"{total} ranks are" if total > 1 else "1 rank is"
            return f"{self.why}: {some} in {places}, and {hosts_text(self.unanswered)} did not answer"
        if self.waited_for:
            verb = "waits" if self.waiting == 1 else "wait"
            guess = "seems" if self.waiting == 1 else "seem"
            others = ranks_text(self.waited_for, self.program, self.first)
            by = f" by {ranks_text(self.silent, self.program, self.first)}" if self.silent else ""
            if self.is_guess:
                return f"{self.why}{by}: {self.waiting} of {total} ranks {guess} to wait for {others}{self.doing}"
            return f"{self.why}{by}: {self.waiting} of {total} ranks {verb} for {others}{self.doing}"
        silent = [group for group in self.groups if not group.lives]
        if len(silent) == 1:
            waiting = len(silent[0].ranks)
            who = f"all {total} ranks" if waiting == total else f"{waiting} of {total} ranks"
            if silent[0].place == _BUSY:
                return f"{self.why}: {who} use CPU"
            return f"{self.why}: {who} wait{'s' * (waiting == 1)} in {silent[0].place}"
        return f"{self.why}: {total} ranks are in {len(self.groups)} places, and none is the odd one out"

    def cause(self, ranks_to_stop: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks because of which the job is stopped. Empty: one has failed, which is the cause.

        Args:
            ranks_to_stop: Those that hang, of which the first one stands for all if nobody is to blame.
        """
        return self.stopped_for or (() if self.has_failed else tuple(ranks_to_stop[:1]))

    def lines(self) -> list[str]:
        """Return a line for each group, or for the first five: its ranks, where they are, and what they use."""
        return [*groups_lines(self.groups, _LINES - len(self.gaps)), *self.gaps]


def groups_lines(groups: Sequence[HangGroup], most: int) -> list[str]:
    """Return a line for each group, or for the first `most` and one for all others."""
    shown = groups[: most if len(groups) > most + 1 else len(groups)]
    rows = [(group.who, group.place, group.collective or _use_text(group)) for group in shown]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {who:<{widths[0]}}  {place:<{widths[1]}}  {cpu}".rstrip() for who, place, cpu in rows]
    rest = groups[len(shown) :]
    if rest:
        lines.append(f"  and {len(rest)} more groups, of {sum(len(group.ranks) for group in rest)} ranks")
    return lines


def hosts_text(hosts: Sequence[str]) -> str:
    """Return `host1 and host2`, or their number if there are more."""
    return " and ".join(hosts) if len(hosts) < 3 else f"{len(hosts)} hosts"


def analyze_hang(snapshots: Sequence[HangSnapshot], unanswered: Sequence[str] = ()) -> HangAnalysis | None:
    """Fold the snapshots of the last hang.

    Args:
        snapshots: Those of a launch, in the order in which they were made; of several nodes, as count_back returns
            each node's.
        unanswered: The hosts that have ranks, and did not send their snapshots. Then no rank is named.

    Returns:
        None if no rank hangs, or nobody has looked.
    """
    newest = _last_finding(snapshots)
    last = {
        snapshot.rank: snapshot for snapshot in snapshots if snapshot.state == EXITED or snapshot.finding == newest
    }
    hung = [snapshot for snapshot in last.values() if snapshot.kind == "hung"]
    if not any(snapshot.wait or snapshot.state or snapshot.frames for snapshot in hung):
        return None
    program = hung[0].program
    hung = [snapshot for snapshot in hung if snapshot.program == program]
    last = {rank: snapshot for rank, snapshot in last.items() if snapshot.program == program}
    groups = fold(last.values())
    unread = [snapshot for snapshot in last.values() if _is_unread(snapshot)]
    is_partial = bool(unread) and any(snapshot.frames for snapshot in last.values())
    is_sure = not unanswered and not is_partial and all(snapshot.is_sure for snapshot in last.values())
    odd, waiting = _odd_ones(groups) if is_sure else ([], 0)
    waited_for = tuple(sorted(snapshot.rank for group in odd for snapshot in group))
    if is_sure and not odd:
        waited_for, waiting = culprits(list(last.values()))
    silent_s = min(map(_silence_s, hung))
    if not waited_for:
        groups = _without_living(groups, silent_s)
    before = hung[0].rank - hung[0].program_rank if program else 0
    alike = [each for each in last.values() if _main_key(each) == _main_key(hung[0]) and not _lives(each, silent_s)]
    is_like_others = len(alike) > 1 and hung[0].why.startswith(_SILENT)  # they have not been silent as long
    has_own_reason = len(hung) == 1 and not _is_waiting(hung[0]) and not is_like_others
    is_single = len(last) == 1 or has_own_reason
    is_alone = not waited_for and not unanswered and is_single
    odd_ones = [last[rank] for rank in waited_for]
    living = {snapshot.rank for snapshot in odd_ones if _is_alive(snapshot, silent_s)}
    return HangAnalysis(
        why=_reason(hung, before),
        groups=_with_difference(
            groups,
            [
                describe_group(
                    group,
                    is_waited_for=any(snapshot.rank in waited_for for snapshot in group),
                    lives=not waited_for and _lives(group[0], silent_s),
                    writes=any(_writes(snapshot, silent_s) for snapshot in group),
                )
                for group in groups
            ],
        ),
        waited_for=waited_for,
        stopped_for=tuple(rank for rank in waited_for if last[rank].state != EXITED),
        waiting=waiting,
        silent=tuple(sorted(rank for rank in last if rank not in living)) if living else (),
        doing=_doing(odd_ones, silent_s) if odd_ones else "",
        is_guess=bool(odd) and not any(snapshot.frames for snapshot in last.values()),
        has_failed=any(snapshot.state == EXITED and snapshot.wait.startswith(_FAILED) for snapshot in odd_ones),
        only=hung[0].rank if is_alone else None,
        unanswered=tuple(unanswered),
        gaps=tuple(gap_lines(last.values(), ranks_text)),
        no_stacks=_no_stacks(unread, program, before, is_partial=is_partial),
        program=program,
        first=before,
    )


def _with_difference(groups: Sequence[list[HangSnapshot]], described: Sequence[HangGroup]) -> tuple[HangGroup, ...]:
    """Return the groups, those in the same place each with a frame that others lack: `barrier (train.py:3), in save
    (train.py:4)`."""
    results = []
    for group, text in zip(groups, described, strict=True):
        alike = [
            (*other[0].frames, *other[0].beside)
            for other, its in zip(groups, described, strict=True)
            if its.place == text.place and other is not group
        ]
        frames_of = (*group[0].frames, *group[0].beside)
        own = [frame for frame in frames_of if any(frame not in frames for frames in alike)]
        alone = [frame for frame in own if all(frame not in frames for frames in alike)]
        if own:
            place = _with_caller(frames_of, frames_of.index((alone or own)[0]))
            text = replace(text, place=f"{text.place}, in {place}")
        results.append(text)
    return tuple(results)


def _reason(hung: Sequence[HangSnapshot], before: int) -> str:
    """Return the sign of a hang, for a sentence that may be about other ranks: with who sent it, and no state."""
    first = hung[0]
    if first.why == TRIGGERED:
        senders = sorted(snapshot.rank for snapshot in hung if snapshot.why == TRIGGERED)
        return f"{ranks_text(senders, first.program, before)} {TRIGGERED.removeprefix('it ')}"
    return first.why.removesuffix(f": {SUSPENDED}").removesuffix(f": {AT_TERMINAL}")


def _doing(odd: Sequence[HangSnapshot], silent_s: float) -> str:
    """Return what all those do that the others wait for: `, which wrote 48 ms ago`. Empty: not all do the same."""
    is_one = len(odd) == 1
    if all(snapshot.state == "T" for snapshot in odd):
        states = {AT_TERMINAL if AT_TERMINAL in snapshot.why else SUSPENDED for snapshot in odd}
        if states == {SUSPENDED}:
            return f", which {'is' if is_one else 'are'} {SUSPENDED}"
        return f", which {'waits' if is_one else 'wait'} for the terminal" if states == {AT_TERMINAL} else ""
    if all(_writes(snapshot, silent_s) for snapshot in odd):
        return f", which wrote {duration_text(_output_ago_s(odd) or 0.0)} ago"
    is_busy = all(_is_alive(snapshot, silent_s) for snapshot in odd)
    return f", which use{'s' * is_one} CPU" if is_busy else ""


def _is_unread(snapshot: HangSnapshot) -> bool:
    """Return whether its Python stack could have told where it is, and is missing."""
    return bool(snapshot.python_note) and not snapshot.frames and snapshot.state not in ("T", "D", EXITED)


def _no_stacks(unread: Sequence[HangSnapshot], program: str, before: int, *, is_partial: bool) -> str:
    """Return why Python stacks are missing, and whose if some were read. Empty: none is missing."""
    if not unread:
        return ""
    whose = f" of {ranks_text([snapshot.rank for snapshot in unread], program, before)}" if is_partial else ""
    return f"no Python stack{whose}: {unread[0].python_note}"


def _without_living(groups: Sequence[list[HangSnapshot]], silent_s: float) -> list[list[HangSnapshot]]:
    """Return the groups, those that live apart from those that do not: one place does not make them alike."""
    apart: list[list[HangSnapshot]] = []
    for group in groups:
        living = [snapshot for snapshot in group if _lives(snapshot, silent_s)]
        apart += [part for part in (living, [each for each in group if each not in living]) if part]
    return sorted(apart, key=len)


def _silence_s(snapshot: HangSnapshot) -> float:
    """Return the seconds since a rank that hangs gave a sign of life, as far as known; 0: it is not silent."""
    signs = [at_s for at_s in (snapshot.output_s, snapshot.idle_s) if at_s is not None]
    return snapshot.time_s - max(signs) if signs and snapshot.why.startswith(_SILENT) else 0.0


def _lives(snapshot: HangSnapshot, silent_s: float) -> bool:
    """Return whether a rank that does not hang gave a sign of life since well after others fell silent.

    In a hang of all, ranks fall silent at nearly the same time. CPU counts only without Python frames: a rank may
    also spin in one function.
    """
    if _is_waiting(snapshot) or not _shows_life(snapshot, silent_s):
        return False
    return not snapshot.frames or _writes(snapshot, silent_s)


def _shows_life(snapshot: HangSnapshot, silent_s: float) -> bool:
    """Return whether a rank that does not hang wrote something since well after others fell silent, or uses CPU."""
    if snapshot.kind or snapshot.state in ("T", "D", EXITED):
        return False
    return _writes(snapshot, silent_s) or (snapshot.cpu or 0.0) >= _IDLE


def _is_alive(snapshot: HangSnapshot, silent_s: float) -> bool:
    """Return whether the silence that is reported is certainly not that of this rank."""
    is_busy = (snapshot.cpu or 0.0) >= _BUSY_CPU and _shows_life(snapshot, silent_s)
    return silent_s > 0 and (is_busy or _writes(snapshot, silent_s))


def _writes(snapshot: HangSnapshot, silent_s: float) -> bool:
    """Return whether a rank that does not hang wrote something since well after others fell silent."""
    is_known = not snapshot.kind and snapshot.state not in ("T", "D", EXITED) and snapshot.output_s is not None
    return is_known and snapshot.time_s - (snapshot.output_s or 0.0) < silent_s / 2


def count_back(snapshots: Sequence[HangSnapshot]) -> tuple[HangSnapshot, ...]:
    """Return the snapshots of one node with its hangs numbered from the last one, which is 0: each node counts its
    own, and their host names may be the same."""
    newest = _last_finding(snapshots)
    return tuple(replace(snapshot, finding=snapshot.finding - newest) for snapshot in snapshots)


def still_hung(snapshots: Sequence[HangSnapshot], earlier: Iterable[HangSnapshot]) -> list[HangSnapshot]:
    """Return later snapshots, those of ranks that hung before and are where they were, without a sign of life since,
    with how long they have been silent by now.

    Args:
        snapshots: Of ranks that no node reports as hung, because it has done so before.
        earlier: Those of that report.
    """
    before = {snapshot.rank: snapshot for snapshot in earlier if snapshot.kind == "hung"}
    return [
        _with_silence(snapshot, before[snapshot.rank]) if snapshot.rank in before else snapshot
        for snapshot in snapshots
    ]


def _with_silence(later: HangSnapshot, earlier: HangSnapshot) -> HangSnapshot:
    is_same_place = _key(later) == _key(earlier) and later.is_sure
    signs = [(later.output_s, earlier.output_s), (later.idle_s, earlier.idle_s)]
    has_lived = any(new_s is not None and new_s > (old_s or 0.0) + _CLOCK_S for new_s, old_s in signs)
    if not is_same_place or has_lived or later.idle_s is None or not earlier.why.startswith(_SILENT):
        return later
    silence = replace(later, why=earlier.why.partition(" for ")[0])
    return replace(silence, kind="hung", why=f"{silence.why} for {duration_text(_silence_s(silence))}", later_s=0.0)


def _last_finding(snapshots: Iterable[HangSnapshot]) -> int:
    """Return the number of the last hang; one that a stop has cut short counts only if there is no other."""
    numbers = ((snapshot.is_sure, snapshot.finding) for snapshot in snapshots if snapshot.state != EXITED)
    return max(numbers, default=(False, 0))[1]


def fold(snapshots: Iterable[HangSnapshot]) -> list[list[HangSnapshot]]:
    """Return the snapshots in groups that are in the same place, the smallest group first, each by rank."""
    members: dict[tuple[str, ...], list[HangSnapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda each: each.rank):
        members.setdefault(_key(snapshot), []).append(snapshot)
    return sorted(members.values(), key=len)


def with_exited(snapshots: Sequence[HangSnapshot], exits: Iterable[Exit]) -> tuple[HangSnapshot, ...]:
    """Return the snapshots of a hang with one per rank that exited before its end: the others may wait for it. With
    --keep_going, it may have failed. It stands for what was seen of that rank, unless nothing would be left of the
    hang."""
    if not snapshots or any(snapshot.kind == "late" for snapshot in snapshots):
        return tuple(snapshots)
    last = snapshots[-1]
    gone = {exit_.rank: exit_ for exit_ in exits if _has_left(exit_, last.time_s)}
    left = [snapshot for snapshot in snapshots if snapshot.rank not in gone]
    if not any(snapshot.kind for snapshot in left):
        left = list(snapshots)
    known = {snapshot.rank for snapshot in left}
    return (*left, *(_exited(exit_, last) for rank, exit_ in gone.items() if rank not in known))


def _has_left(exit_: Exit, at_s: float) -> bool:
    """Return whether a rank had exited at that time, and not because it was stopped."""
    return exit_.end_s is not None and exit_.end_s <= at_s and not exit_.stopped and not exit_.lost


def _exited(exit_: Exit, last: HangSnapshot) -> HangSnapshot:
    end = "exited with code 0" if exit_.ended_well else f"{_FAILED} ({describe_end(exit_)})"
    return HangSnapshot(
        rank=exit_.rank,
        pid=exit_.pid or 0,
        host=exit_.host,
        time_s=last.time_s,
        why=f"{end}, {duration_text(last.time_s - (exit_.end_s or 0.0))} before",
        is_sure=last.is_sure,
        wait=end,
        state=EXITED,
        program=exit_.program,
        program_rank=exit_.program_rank,
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
    head = f"{first.name} on {first.host} {first.sentence} (pid {first.pid}{more})"
    return head, [*first.lines(), *([f"  details: {shown_file(first.file, logs.values())}"] if first.file else [])]


def shown_file(path: str, logs: Iterable[str]) -> str:
    """Return the path of a snapshot's file, with the folder as the user gave it if that of the first log is the same.

    Args:
        path: The absolute path.
        logs: The paths of logs; empty: none.
    """
    known = next(filter(None, logs), "").rpartition("/")[0]
    folder, _, name = path.rpartition("/")
    return f"{known}/{name}" if known and folder.endswith(f"/{known}") else path


def files_lines(hang: HangAnalysis, snapshots: Sequence[HangSnapshot], logs: Mapping[int, str]) -> list[str]:
    """Return where to look: the log of the first of those that the others wait for, and the files with all stacks.
    Before that, why Python stacks are missing.

    Args:
        hang: The analysis.
        snapshots: What was analyzed.
        logs: The path of each rank's log; empty: none.
    """
    rank = hang.waited_for[0] if hang.waited_for else -1
    notes = [f"  {hang.no_stacks}"] if hang.no_stacks else []
    parts = [f"log of {ranks_text([rank], hang.program, hang.first)}: {logs[rank]}"] if logs.get(rank) else []
    files = _all_files(snapshots, logs, rank)
    if files:
        parts.append(f"all stacks: {files}")
    return [*notes, *([f"  {'   '.join(parts)}"] if parts else [])]


def _all_files(snapshots: Iterable[HangSnapshot], logs: Mapping[int, str], rank: int) -> str:
    """`logs/hang_*.txt`, the folder as the user gave it, if that of a log is the same: of this rank's node first, and
    of one more node whose folder is another one. Empty: there are no files."""
    paths = []
    for snapshot in sorted(snapshots, key=lambda each: each.rank != rank):
        folder, _, name = shown_file(snapshot.file, logs.values()).rpartition("/")
        paths += [f"{folder}/{name.partition('_')[0]}_*.txt"] if snapshot.file else []
    shown = list(dict.fromkeys(paths))
    return ", ".join([*shown[:2], *(["..."] if shown[2:] else [])])


def lines_after_failure(hang: HangAnalysis, snapshots: Sequence[HangSnapshot], logs: Mapping[int, str]) -> list[str]:
    """Return the lines of a hang that followed a failure: six at most. Arguments as for files_lines."""
    return [*groups_lines(hang.groups, _LINES_BESIDE), *files_lines(hang, snapshots, logs)]


def lines_before_stop(snapshots: Iterable[HangSnapshot], logs: Mapping[int, str]) -> list[str]:
    """Return where the other ranks were when one had failed. There was one look, so no rank is named as the cause.

    Args:
        snapshots: Those of a launch.
        logs: The path of each rank's log; empty: none.

    Returns:
        At most five lines. None if no group differs from most, and no rank is suspended or in state D.
    """
    seen = [snapshot for snapshot in snapshots if snapshot.why == BEFORE_STOP]
    groups = fold(seen)
    odd = _odd_ones(groups)[0]
    if not odd and not any(group[0].state in ("T", "D") for group in groups):
        return []
    files = _all_files(seen, logs, groups[0][0].rank)
    described = [describe_group(group, is_waited_for=group in odd) for group in groups]
    return [
        f"  the others before the stop{f' (all stacks: {files})' if files else ''}:",
        *groups_lines(_with_difference(groups, described), _LINES_BESIDE),
    ]


def _key(snapshot: HangSnapshot) -> tuple[str, ...]:
    """Return what ranks of one group share: the place, and what other threads do if the main one waits for them."""
    return (*_main_key(snapshot), *snapshot.beside)


def _main_key(snapshot: HangSnapshot) -> tuple[str, ...]:
    """Return what ranks in one place share. Their place within a collective does not count: it may spin."""
    state = snapshot.state if snapshot.state in ("T", "D", EXITED) else ""
    at = collective(snapshot.frames)
    frames = snapshot.frames if at < 0 else (without_line(snapshot.frames[at]), *snapshot.frames[at + 1 :])
    return (snapshot.program, state, *(frames or (snapshot.wait,)))


def _odd_ones(groups: Sequence[list[HangSnapshot]]) -> tuple[list[list[HangSnapshot]], int]:
    """Return the groups that the others wait for, and how many ranks wait. Without such a group: none, and 0."""
    everybody = [snapshot for group in groups for snapshot in group]
    if len(groups) < 2:
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
    """Return whether it waits in a collective, as far as its Python frames show.

    That is in its telling_thread, or in any of several threads that its main thread waits for.
    """
    is_stopped = snapshot.state in ("T", "D", EXITED)
    return not is_stopped and max(collective(snapshot.frames), collective(snapshot.beside)) >= 0


def _waits_for_peer(snapshot: HangSnapshot) -> bool:
    """Return whether a program waits for another in the kernel's function. That is known without any Python."""
    return snapshot.state == "S" and any(wait.endswith(_PEER_WAITS) for wait in snapshot.wait.split(", "))


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


def _with_caller(frames: Sequence[str], at: int) -> str:
    """Return a frame; of a library's collective, its name with the line of the program that called it."""
    name, _, file = frames[at].partition(" (")
    after = frames[at + 1 :]
    if not after or not file.startswith(_PACKAGES) or collective(frames[at : at + 1]) < 0:
        return frames[at]
    callers = [frame for frame in after if not frame.partition(" (")[2].startswith(_LIBRARIES)]
    return f"{name} ({(callers or after)[0].partition(' (')[2]}"


def _place(snapshot: HangSnapshot) -> str:
    """Return `all_reduce (train.py:41)`: the function that says most, and the line that called it."""
    if snapshot.state == EXITED:
        return snapshot.why
    frames = snapshot.frames
    at = collective(frames)
    if at >= 0:
        place = _with_caller(frames, at)
    else:
        own = [frame for frame in frames if not frame.partition(" (")[2].startswith(_LIBRARIES)]
        is_busy = snapshot.state == "R" or (snapshot.cpu or 0.0) >= _IDLE
        place = (own or list(frames) or [snapshot.wait or (_BUSY if is_busy else "an unknown place")])[0]
    if snapshot.state == "T":
        return f"{place}, {AT_TERMINAL if AT_TERMINAL in snapshot.why else SUSPENDED}"
    return f"{place}, in the kernel: {snapshot.wait}" if snapshot.state == "D" and frames else place


def describe_group(
    members: Sequence[HangSnapshot], *, is_waited_for: bool = False, lives: bool = False, writes: bool = False
) -> HangGroup:
    """Return the group of these snapshots.

    Args:
        members: They are in the same place.
        is_waited_for, lives: As in HangGroup.
        writes: One of them does.
    """
    shows_output = lives or (is_waited_for and writes)
    return HangGroup(
        ranks=tuple(snapshot.rank for snapshot in members),
        hosts=tuple(dict.fromkeys(snapshot.host for snapshot in members)),
        place=_place(members[0]),
        cpu=_mean([snapshot.cpu for snapshot in members]),
        gpu=_mean([snapshot.gpu for snapshot in members]),
        is_waited_for=is_waited_for,
        lives=lives,
        output_ago_s=_output_ago_s(members) if shows_output else None,
        collective=pending_text(members),
        program=members[0].program,
        first=members[0].rank - members[0].program_rank if members[0].program else 0,
    )


def _output_ago_s(members: Iterable[HangSnapshot]) -> float | None:
    written = [each.time_s - each.output_s for each in members if each.output_s is not None]
    return max(0.0, min(written)) if written else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _use_text(group: HangGroup) -> str:
    cpu = "" if group.cpu is None else f"{group.cpu * 100:.0f}% CPU"
    gpu = "" if group.gpu is None else f"GPU {group.gpu * 100:.0f}%"
    output = "" if group.output_ago_s is None else f"output {duration_text(group.output_ago_s)} ago"
    return ", ".join(part for part in (cpu, gpu, output) if part)


def ranks_text(ranks: Sequence[int], program: str = "", before: int = 0) -> str:
    """Return `rank 2`, or `ranks 0-1,3-7`; of a program with a name, `trainer 2`, or `trainer 0-1,3-7`.

    Args:
        ranks: The ranks.
        program: The name of their program.
        before: The rank of the first one of that program.
    """
    spans: list[list[int]] = []
    for rank in [rank - before for rank in ranks]:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    shown = ",".join(parts[:8]) + (",..." if len(parts) > 8 else "")
    return f"{program or ('ranks' if len(ranks) > 1 else 'rank')} {shown}"
