"""The dumps of torch's Flight Recorder: another process asks the ranks and reads them (torch_dumps.py)."""

from __future__ import annotations

import os

from infini_run.errors import StartError, UsageError
from infini_run.report.torch_records import decode_records
from infini_run.system.interpreter import find_python
from infini_run.system.json_codec import decode
from infini_run.watchdog.pyspy import GuestRun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.core.c_structs import ProcessState
    from infini_run.core.group import Group
    from infini_run.report.torch_records import CollectiveRecord

LIMIT_S = 4.0  # torch looks at its pipe once a second, and then writes
_KILL_S = 1.0  # after that
_PROGRAM = os.path.join(os.path.dirname(__file__), "torch_dumps.py")
_MOST_OUTPUT = 4 << 20  # bytes


class RecordReader:
    """Asks ranks for their records. `records` has them once it is `done`.

    Args:
        prefixes: The prefixes of the pipes and of the dumps.
        ranks: The ranks of this node.
        group: The group of the ranks.
        entry: The entry of that group. None: a host program's.
        environ: The environment of the other process.
        now_s: The time; the limit counts from it.
    """

    def __init__(
        self,
        prefixes: tuple[str, str],
        ranks: Sequence[int],
        *,
        group: Group,
        entry: ProcessState | None,
        environ: Mapping[str, str],
        now_s: float,
    ) -> None:
        self.records: dict[int, tuple[CollectiveRecord, ...]] = {}
        self.deadline_s = now_s + LIMIT_S + _KILL_S
        self._group = group
        self._entry = entry
        self._run: GuestRun | None = None
        try:
            words = (find_python(), "-I", "-S", _PROGRAM, *prefixes, f"{LIMIT_S:g}", *map(str, ranks))
            self._run = GuestRun("reader of dumps", words, entry, environ)
        except (StartError, UsageError):
            return  # without records a hang has its stacks
        if entry is not None and self._run.pid:
            group.spare(self._run.pid)

    @property
    def done(self) -> bool:
        """Whether no process runs any more."""
        return self._run is None

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `poll` has something to do."""
        return [] if self._run is None else [self._run.group.fileno()]

    def poll(self, now_s: float) -> None:
        """Read what the process has printed, once it has exited. Never blocks."""
        if self._run is None:
            return
        if now_s >= self.deadline_s:
            self.finish_early()
        if self._run.poll():
            try:
                self.records = decode_records(decode(self._run.text(_MOST_OUTPUT).encode()))
            except (ValueError, RecursionError):
                self.records = {}  # it was killed, or could not import what it needs
            self.close()

    def finish_early(self) -> None:
        """Kill the process. It is `done` after a few calls of `poll`."""
        self.deadline_s = float("inf")
        if self._run is not None:
            self._run.group.kill()

    def close(self) -> None:
        """Kill and reap the process if it still runs."""
        run, self._run = self._run, None
        if run is not None:
            run.close()
            if self._entry is not None and run.pid:
                self._group.spare(run.pid, False)
