"""Snapshots of every rank when one of them hangs or is late: from /proc, one rank in each call, then from py-spy.

Nothing here blocks: the caller serves the ranks between two calls.
"""

from __future__ import annotations

import os
import time

from infini_run.record import record, replace
from infini_run.report.hang_snapshot import HangSnapshot
from infini_run.system.procfs import snapshot_processes
from infini_run.system.secure_files import append_text
from infini_run.watchdog.pyspy import StackDumps, find_pyspy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.core.group import Group, ProcessState
    from infini_run.system.procfs import ProcessTable

_MAX_RANKS = 256  # those that hang first
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
    """

    index: int
    rank: int
    pid: int
    kind: str
    why: str


class SnapshotCollector:
    """Makes the `snapshots`. Call `poll` until it is `done`, waiting between two calls for `fds` or `deadline_s`.

    Args:
        subjects: The ranks.
        table: The processes of this machine.
        group: The group of the ranks.
        entry: The entry of that group. None: a host program's.
        environ: The environment of py-spy.
        folder: The folder for the files of the snapshots. Empty: no files.
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
    ) -> None:
        self.snapshots: list[HangSnapshot] = []
        self._subjects = list(reversed(subjects[:_MAX_RANKS]))
        self._table = table
        self._group = group
        self._entry = entry
        self._environ = environ
        self._folder = folder
        self._host = os.uname().nodename
        self._dumps: StackDumps | None = None
        self._early_reason = ""

    @property
    def done(self) -> bool:
        """Whether all snapshots are complete."""
        return not self._subjects and self._dumps is not None and self._dumps.done

    @property
    def deadline_s(self) -> float:
        """When `poll` is due although no descriptor can be read: time.monotonic(). 0: at once."""
        return 0.0 if self._dumps is None else self._dumps.deadline_s

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `poll` has something to do."""
        return [] if self._dumps is None else self._dumps.fds()

    def poll(self, now_s: float) -> None:
        """Make the next snapshot, or serve py-spy. Never blocks."""
        if self._subjects:
            self.snapshots.append(self._make_snapshot(self._subjects.pop()))
            return
        if self._dumps is None:
            self._dumps = self._start_dumps(now_s)
        self._dumps.poll(now_s)
        if self.done:
            self.snapshots = [_with_stacks(snapshot, self._dumps) for snapshot in self.snapshots]

    def finish_early(self, why: str) -> None:
        """Make no more snapshots than those of ranks that hang or are late, without Python stacks."""
        self._early_reason = why
        self._subjects = [subject for subject in self._subjects if subject.kind]
        if self._dumps is not None:
            self._dumps.finish_early(why)

    def close(self) -> None:
        """Kill and reap every py-spy."""
        if self._dumps is not None:
            self._dumps.close()

    def _make_snapshot(self, subject: RankToInspect) -> HangSnapshot:
        return HangSnapshot(
            rank=subject.rank,
            pid=subject.pid,
            host=self._host,
            time_s=time.time(),
            kind=subject.kind,
            why=subject.why,
            status=self._group.status(subject.index).decode("utf-8", "replace"),
            processes=snapshot_processes(self._table.tree(subject.pid)),
            file=f"{self._folder}/hang_{subject.rank}.txt" if self._folder else "",
        )

    def _start_dumps(self, now_s: float) -> StackDumps:
        program = find_pyspy(self._environ)
        if not program:
            missing = "py-spy is not installed; pip install py-spy"
            self.snapshots = [
                replace(snapshot, python_note=missing if _pythons(snapshot) else "") for snapshot in self.snapshots
            ]
        pids = [pid for snapshot in self.snapshots for pid in _pythons(snapshot)] if program else []
        dumps = StackDumps(program, pids, ranks=self._group, entry=self._entry, environ=self._environ, now_s=now_s)
        if self._early_reason:
            dumps.finish_early(self._early_reason)
        return dumps


def _pythons(snapshot: HangSnapshot) -> list[int]:
    return [process.pid for process in snapshot.processes if process.is_python][:_MAX_PYTHONS]


def _with_stacks(snapshot: HangSnapshot, dumps: StackDumps) -> HangSnapshot:
    pids = _pythons(snapshot)
    texts = tuple(dumps.texts[pid] for pid in pids if pid in dumps.texts)
    notes = [dumps.notes[pid] for pid in pids if pid in dumps.notes]
    return replace(snapshot, python=texts, python_note=notes[0] if notes else snapshot.python_note)


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
