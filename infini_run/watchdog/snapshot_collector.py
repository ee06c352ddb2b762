"""Snapshots of every rank when one of them hangs or is late: from /proc, one rank in each call, then from py-spy.

Nothing here blocks: the caller serves the ranks between two calls.
"""

from __future__ import annotations

import os
import time

from infini_run.record import record, replace
from infini_run.report.hang_snapshot import LOOK_S, HangSnapshot, waits_in
from infini_run.system.procfs import ProcessTable, snapshot_processes
from infini_run.system.secure_files import append_text
from infini_run.watchdog.agreement import agreed, is_at_rest, place_of
from infini_run.watchdog.pyspy import StackDumps, find_pyspy
from infini_run.watchdog.torch_recorder import RecordReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.core.c_structs import ProcessState
    from infini_run.core.group import Group
    from infini_run.system.procfs import ProcessSnapshot

AGREE_S = 2.0  # between two looks at a rank
_MAX_RANKS = 256  # those that hang first
_PYSPIES, _MOST_PYSPIES = 4, 16  # that run at a time; before a stop one per CPU
_MAX_PYTHONS = 4  # processes of one rank


@record
class RankToInspect:
    """A rank of which a snapshot is to be made.

    Attributes:
        index: Its index in the plan of this node.
        rank: Its global rank.
        pid: Its process.
        kind: As in HangSnapshot.
        why: As in HangSnapshot.
        program, program_rank: As in Exit.
    """

    index: int
    rank: int
    pid: int
    kind: str
    why: str
    program: str = ""
    program_rank: int = 0


class SnapshotCollector:
    """Makes the `snapshots`. Call `poll` until it is `done`, waiting between two calls for `fds` or `deadline_s`.

    With a rank that hangs there are two looks at all ranks, and the snapshots have what both agree on (agreement.py).
    Before a stop there is one, within LOOK_S.

    Args:
        subjects: The ranks.
        table: The processes of this machine.
        group: The group of the ranks.
        entry: The entry of that group. None: a host program's.
        environ: The environment of py-spy.
        folder: The folder for the files of the snapshots. Empty: no files.
        finding: The number of the hang.
        is_asked: A rank elsewhere hangs, whether one does here or not.
        until_s: When the look ends, complete or not: time.monotonic(). None: it is not before a stop.
        sees: False: look at nothing, and only name the ranks that hang or are late.
        recorder: The prefixes of the pipes and dumps of torch's Flight Recorder. None: it is not asked.
    """

    def __init__(
        self,
        subjects: Sequence[RankToInspect],
        table: ProcessTable,
        *,
        group: Group,
        entry: ProcessState | None,
        environ: Mapping[str, str],
        folder: str,
        finding: int = 1,
        is_asked: bool = False,
        until_s: float | None = None,
        sees: bool = True,
        recorder: tuple[str, str] | None = None,
    ) -> None:
        self.snapshots: list[HangSnapshot] = []
        self._subjects = subjects[:_MAX_RANKS] if sees else [subject for subject in subjects if subject.kind]
        self._sees = sees
        self._finding = finding
        self._until_s = until_s
        self.is_before_stop = until_s is not None
        self.done = False  # all snapshots are complete
        self._group = group
        self._entry = entry
        self._environ = environ
        self._folder = folder
        self._begin_s = time.monotonic()
        self._round = self._first = self._make_round(table, {})
        self._again_s = 0.0  # when the second look is due; 0: the first one is not complete
        self._early_reason = ""
        hangs = is_asked or any(subject.kind == "hung" for subject in self._subjects)
        self._is_repeated = hangs and sees and not self.is_before_stop
        self._records: RecordReader | None = None
        if self._is_repeated and recorder is not None:
            ranks = [subject.rank for subject in self._subjects]
            self._records = RecordReader(
                recorder, ranks, group=group, entry=entry, environ=environ, now_s=time.monotonic()
            )

    def _make_round(self, table: ProcessTable, known: Mapping[int, HangSnapshot]) -> _SnapshotRound:
        return _SnapshotRound(
            self._subjects,
            table,
            known,
            self._group,
            self._entry,
            self._environ,
            self._folder,
            begin_s=self._begin_s,
            is_short=self.is_before_stop,
            sees=self._sees,
        )

    @property
    def deadline_s(self) -> float:
        """When `poll` is due although no descriptor can be read: time.monotonic(). 0: at once."""
        if self._waits_for_records:
            return self._records.deadline_s if self._records is not None else 0.0
        due_s = self._again_s or (0.0 if self._round.done else self._round.deadline_s)
        return due_s if self._until_s is None else min(due_s, self._until_s)

    @property
    def _waits_for_records(self) -> bool:
        """Whether all else is complete."""
        is_last = self._round is not self._first or not self._is_repeated or bool(self._early_reason)
        return is_last and self._round.done and self._records is not None and not self._records.done

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `poll` has something to do."""
        return [*self._round.fds(), *(() if self._records is None else self._records.fds())]

    def poll(self, now_s: float) -> None:
        """Make the next snapshot, or serve py-spy. Never blocks."""
        if self._records is not None:
            self._records.poll(now_s)
        if now_s < self._again_s:
            return
        if self._until_s is not None and now_s >= self._until_s:
            self._until_s = float("inf")
            self.finish_early(f"py-spy took longer than {LOOK_S:g} s")
        if self._again_s:
            self._again_s, self._round = 0.0, self._make_round(ProcessTable(), self._first.by_rank)
        self._round.poll(now_s)
        if not self._round.done or self._waits_for_records:
            return
        if self._round is self._first and self._is_repeated and not self._early_reason:
            self._again_s = self._first.taken_s + AGREE_S
        else:
            records = {} if self._records is None else self._records.records
            self.snapshots = [
                replace(shot, finding=self._finding, records=records.get(shot.rank, ())) for shot in self._agreed()
            ]
            self.done = True

    def _agreed(self) -> list[HangSnapshot]:
        if self._round is self._first:
            return [place_of(shot) for shot in self._first.snapshots]
        return [
            agreed(self._first.by_rank[shot.rank], shot, _difference(self._first, self._round, shot.rank))
            for shot in self._round.snapshots
        ]

    def unfinished(self) -> list[HangSnapshot]:
        """Return what there is, if it is not `done`."""
        return [place_of(shot) for shot in self._first.with_stacks()]

    def finish_early(self, why: str) -> None:
        """Make no more snapshots than those of ranks that hang or are late, without Python stacks."""
        self._early_reason = why
        if self._round is not self._first or self._again_s:
            self._round, self._again_s = self._first, 0.0
        self._round.finish_early(why)
        if self._records is not None:
            self._records.finish_early()

    def close(self) -> None:
        """Kill and reap every py-spy."""
        if self._records is not None:
            self._records.close()
        for look in (self._first, self._round):
            look.close()


def _difference(first: _SnapshotRound, second: _SnapshotRound, rank: int) -> float | None:
    before_s, after_s = first.cpu_s[rank], second.cpu_s[rank]
    return None if before_s is None or after_s is None else after_s - before_s


class _SnapshotRound:
    """One look at all ranks: at one in each call of `poll`, then at their Python stacks.

    Args:
        known: The snapshots of the look before, by rank: a Python that has not moved is not read again.
        begin_s: When the reasons to look were found.
        is_short: There may be no time for all Python stacks: those of ranks that wait in a rare place come first.
        sees: As for SnapshotCollector.
    """

    def __init__(
        self,
        subjects: Sequence[RankToInspect],
        table: ProcessTable,
        known: Mapping[int, HangSnapshot],
        group: Group,
        entry: ProcessState | None,
        environ: Mapping[str, str],
        folder: str,
        *,
        begin_s: float,
        is_short: bool,
        sees: bool,
    ) -> None:
        self.snapshots: list[HangSnapshot] = []
        self.cpu_s: dict[int, float | None] = {}  # by rank
        self.taken_s = 0.0  # when the last rank was looked at
        self._subjects = list(reversed(subjects))
        self._table = table
        self._known = known
        self._group = group
        self._entry = entry
        self._environ = environ
        self._folder = folder
        self._begin_s = begin_s
        self._is_short = is_short
        self._sees = sees
        self._host = os.uname().nodename
        self._dumps: StackDumps | None = None
        self._early_reason = ""
        self._kept: dict[int, str] = {}  # by pid: texts of the look before

    @property
    def by_rank(self) -> dict[int, HangSnapshot]:
        """The snapshots."""
        return {snapshot.rank: snapshot for snapshot in self.snapshots}

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return not self._subjects and self._dumps is not None and self._dumps.done

    @property
    def deadline_s(self) -> float:
        """As SnapshotCollector's; so are fds and poll."""
        return 0.0 if self._dumps is None else self._dumps.deadline_s

    def fds(self) -> list[int]:
        return [] if self._dumps is None else self._dumps.fds()

    def poll(self, now_s: float) -> None:
        if self._subjects:
            self.snapshots.append(self._make_snapshot(self._subjects.pop()))
            self.taken_s = now_s
            return
        if self._dumps is None:
            self._dumps = self._start_dumps(now_s)
        self._dumps.poll(now_s)
        if self.done:
            self.snapshots = self.with_stacks()

    def finish_early(self, why: str) -> None:
        self._early_reason = why
        self._subjects = [subject for subject in self._subjects if subject.kind]
        if self._dumps is not None:
            self._dumps.finish_early(why)

    def close(self) -> None:
        if self._dumps is not None:
            self._dumps.close()

    def _make_snapshot(self, subject: RankToInspect) -> HangSnapshot:
        self.cpu_s[subject.rank] = self._table.cpu_s(subject.pid)
        return HangSnapshot(
            rank=subject.rank,
            pid=subject.pid,
            host=self._host,
            time_s=time.time(),
            kind=subject.kind,
            why=subject.why,
            status=self._group.status(subject.index).decode("utf-8", "replace"),
            processes=snapshot_processes(self._table.tree(subject.pid)) if self._sees else (),
            file=self._file(subject.rank),
            program=subject.program,
            program_rank=subject.program_rank,
            later_s=time.monotonic() - self._begin_s,
        )

    def _file(self, rank: int) -> str:
        name = "stacks" if self._is_short else "hang"
        return f"{self._folder}/{name}_{rank}.txt" if self._folder and self._sees else ""

    def _start_dumps(self, now_s: float) -> StackDumps:
        program = find_pyspy(self._environ)
        if not program:
            missing = "py-spy is not installed; pip install py-spy"
            self.snapshots = [
                replace(snapshot, python_note=missing if _pythons(snapshot) else "") for snapshot in self.snapshots
            ]
        for snapshot in self.snapshots:
            self._keep(snapshot)
        found = [process for snapshot in self.snapshots for process in _pythons(snapshot)] if program else []
        if self._is_short:
            found = _rare_first(found)
        dumps = StackDumps(
            program,
            [(process.pid, process.state == "R") for process in found if process.pid not in self._kept],
            ranks=self._group,
            entry=self._entry,
            environ=self._environ,
            now_s=now_s,
            most=min(max(_PYSPIES, len(os.sched_getaffinity(0))), _MOST_PYSPIES) if self._is_short else _PYSPIES,
        )
        if self._early_reason:
            dumps.finish_early(self._early_reason)
        return dumps

    def _keep(self, snapshot: HangSnapshot) -> None:
        """Keep the texts of processes that have not moved since the look before."""
        known = self._known.get(snapshot.rank)
        before = {} if known is None else {process.pid: process for process in known.processes}
        for process in _pythons(snapshot):
            text = next((t for t in known.python if t.startswith(f"Process {process.pid}:")), "") if known else ""
            if text and process.pid in before and is_at_rest(before[process.pid], process, text):
                self._kept[process.pid] = text

    def with_stacks(self) -> list[HangSnapshot]:
        """Return the snapshots with the Python stacks that are complete."""
        if self._dumps is None:
            return self.snapshots
        return [self._with_stacks(snapshot, self._dumps) for snapshot in self.snapshots]

    def _with_stacks(self, snapshot: HangSnapshot, dumps: StackDumps) -> HangSnapshot:
        pids = [process.pid for process in _pythons(snapshot)]
        texts = {**self._kept, **dumps.texts}
        notes = [dumps.notes[pid] for pid in pids if pid in dumps.notes]
        return replace(
            snapshot,
            python=tuple(texts[pid] for pid in pids if pid in texts),
            python_note=notes[0] if notes else snapshot.python_note,
        )


def _pythons(snapshot: HangSnapshot) -> list[ProcessSnapshot]:
    return [process for process in snapshot.processes if process.is_python][:_MAX_PYTHONS]


def _rare_first(processes: Sequence[ProcessSnapshot]) -> list[ProcessSnapshot]:
    """Return the processes, those whose main thread waits where few others do first."""
    waits = [waits_in(process) for process in processes]
    counts = {wait: waits.count(wait) for wait in waits}
    return [processes[at] for at in sorted(range(len(processes)), key=lambda at: counts[waits[at]])]


def write_snapshots(snapshots: Sequence[HangSnapshot]) -> tuple[tuple[HangSnapshot, ...], str]:
    """Append each snapshot to its file.

    Returns:
        The snapshots, without the name of a file that could not be written; and the first problem, or an empty text.
    """
    written, problem = [], ""
    for snapshot in snapshots:
        try:
            if snapshot.file:
                append_text(snapshot.file, snapshot.text())
            written.append(snapshot)
        except OSError as error:
            problem = problem or f"{snapshot.file} cannot be written: {error.strerror}"
            written.append(replace(snapshot, file=""))
    return tuple(written), problem
