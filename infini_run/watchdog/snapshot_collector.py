"""The look at every rank when one of them hangs or is late: what /proc says, one rank a step, then py-spy.

Nothing here waits: the caller goes on serving the ranks between two steps.
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

    from infini_run.core.group import Group, ProcessAtEntry
    from infini_run.system.procfs import ProcessTable

_RANKS = 256  # that are looked at, those that hang first
_PYTHONS = 4  # processes of one rank that py-spy looks at


@record
class RankToInspect:
    """A rank to look at. kind, why: as in Look."""

    index: int
    rank: int
    pid: int
    kind: str
    why: str


class SnapshotCollector:
    """Step it, waiting for `fds` and until `deadline_s` at most, until it is `done`; then it has its `looks`."""

    def __init__(
        self,
        subjects: Sequence[RankToInspect],
        table: ProcessTable,
        *,
        group: Group,
        entry: ProcessAtEntry | None,
        environ: Mapping[str, str],
        folder: str,
    ) -> None:
        self.looks: list[HangSnapshot] = []
        self._subjects = list(reversed(subjects[:_RANKS]))
        self._table = table
        self._group = group
        self._entry = entry
        self._environ = environ
        self._folder = folder
        self._host = os.uname().nodename
        self._dumps: StackDumps | None = None
        self._abandoned = ""

    @property
    def done(self) -> bool:
        return not self._subjects and self._dumps is not None and self._dumps.done

    @property
    def deadline_s(self) -> float:
        return 0.0 if self._dumps is None else self._dumps.deadline_s

    def fds(self) -> list[int]:
        return [] if self._dumps is None else self._dumps.fds()

    def step(self, now_s: float) -> None:
        """The next bit of it."""
        if self._subjects:
            self.looks.append(self._look_at(self._subjects.pop()))
            return
        if self._dumps is None:
            self._dumps = self._start_dumps(now_s)
        self._dumps.step(now_s)
        if self.done:
            self.looks = [_with_stacks(look, self._dumps) for look in self.looks]

    def abandon(self, why: str) -> None:
        """Be done soon, with what there is."""
        self._abandoned = why
        self._subjects = [subject for subject in self._subjects if subject.kind]
        if self._dumps is not None:
            self._dumps.abandon(why)

    def close(self) -> None:
        """End our helpers."""
        if self._dumps is not None:
            self._dumps.close()

    def _look_at(self, subject: RankToInspect) -> HangSnapshot:
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
            self.looks = [replace(look, python_note=missing if _pythons(look) else "") for look in self.looks]
        pids = [pid for look in self.looks for pid in _pythons(look)] if program else []
        dumps = StackDumps(program, pids, ranks=self._group, entry=self._entry, environ=self._environ, now_s=now_s)
        if self._abandoned:
            dumps.abandon(self._abandoned)
        return dumps


def _pythons(look: HangSnapshot) -> list[int]:
    return [picture.pid for picture in look.processes if picture.is_python][:_PYTHONS]


def _with_stacks(look: HangSnapshot, dumps: StackDumps) -> HangSnapshot:
    pids = _pythons(look)
    texts = tuple(dumps.texts[pid] for pid in pids if pid in dumps.texts)
    notes = [dumps.notes[pid] for pid in pids if pid in dumps.notes]
    return replace(look, python=texts, python_note=notes[0] if notes else look.python_note)


def write_looks(looks: Sequence[HangSnapshot]) -> tuple[tuple[HangSnapshot, ...], str]:
    """Each to the end of its file; the looks, without the files that could not be written, and why the first not."""
    written, problem = [], ""
    for look in looks:
        try:
            if look.file:
                append_text(look.file, look.text())
            written.append(look)
        except OSError as error:
            problem = problem or f"{look.file} cannot be written: {error.strerror}"
            written.append(replace(look, file=""))
    return tuple(written), problem
