"""The Python stacks of processes through `py-spy dump`, a few at a time, within a bound.

Each runs in a group of the core, beside that of the ranks: it is reaped, ended with us, and no stray. The caller
goes on serving the ranks: it waits for the descriptors of ours together with its own.
"""

from __future__ import annotations

import os
import sys

from infini_run.core.group import STEPS, Group, SpawnSpec, debug_flags
from infini_run.errors import StartError
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.core.group import ProcessAtEntry

LIMIT_S = 10.0  # for all of them
_AT_ONCE = 4
_SHOWN = 16384  # bytes of a dump
_TERM = 15


def find_pyspy(environ: Mapping[str, str]) -> str:
    """On PATH, or beside our interpreter; "" where there is none."""
    folders = [folder for folder in environ.get("PATH", "").split(":") if os.path.isabs(folder)]
    for folder in (*folders, os.path.dirname(sys.executable)):
        path = os.path.join(folder, "py-spy")
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


class StackDumps:
    """What py-spy says of each process: `texts` and `notes` (why it said nothing), by pid, once `done`.

    ranks: the group that must not take our helpers for its own. entry: as the ranks' group has it.
    """

    def __init__(
        self,
        program: str,
        pids: Sequence[int],
        *,
        ranks: Group,
        entry: ProcessAtEntry | None,
        environ: Mapping[str, str],
        now_s: float,
    ) -> None:
        self.texts: dict[int, str] = {}
        self.notes: dict[int, str] = {}
        self.deadline_s = now_s + LIMIT_S
        self._program = program
        self._waiting = list(reversed(pids))
        self._runs: dict[int, _Run] = {}
        self._ranks = ranks
        self._entry = entry
        self._environ = environ

    @property
    def done(self) -> bool:
        return not self._waiting and not self._runs

    def fds(self) -> list[int]:
        """Readable when `step` has something to do."""
        return [run.group.fileno() for run in self._runs.values()]

    def step(self, now_s: float) -> None:
        """Take what has ended, start what is still to be done; never blocks."""
        if now_s >= self.deadline_s:
            self.abandon(f"py-spy took longer than {LIMIT_S:g} s")
        for pid, run in list(self._runs.items()):
            if run.step():
                self._finish(pid, run)
        while self._waiting and len(self._runs) < _AT_ONCE:
            self._start(self._waiting.pop())

    def abandon(self, why: str) -> None:
        """Kill what runs and start no more; it is `done` a few steps later."""
        self.deadline_s = float("inf")
        for pid in (*self._waiting, *self._runs):
            self.notes.setdefault(pid, why)
        self._waiting.clear()
        for run in self._runs.values():
            run.group.kill()

    def close(self) -> None:
        """Kill and reap what still runs."""
        self._waiting.clear()
        while self._runs:
            self._forget(self._runs.popitem()[1])

    def _start(self, pid: int) -> None:
        run = None
        try:
            run = _Run(self._program, pid, self._entry, self._environ)
            self._runs[pid] = run
            if self._entry is not None and run.pid:
                self._ranks.spare(run.pid)
        except StartError as error:
            self.notes[pid] = f"py-spy cannot be started: {error.step}: {error}"

    def _finish(self, pid: int, run: _Run) -> None:
        text = run.text()
        if "\nThread " in text:
            self.texts[pid] = text
        else:
            said = " ".join(text.partition("Stack backtrace")[0].split())
            self.notes.setdefault(pid, run.failure or f"py-spy: {said or 'it said nothing'}")
        self._forget(self._runs.pop(pid))

    def _forget(self, run: _Run) -> None:
        run.close()
        if self._entry is not None and run.pid:
            self._ranks.spare(run.pid, False)


class _Run:
    """One py-spy, writing into a file without a name."""

    def __init__(self, program: str, pid: int, entry: ProcessAtEntry | None, environ: Mapping[str, str]) -> None:
        self.pid = 0
        self.failure = ""
        mark = f"{MARKER_VARIABLE}=look-{os.urandom(6).hex()}"
        base = [os.fsencode(f"{name}={value}") for name, value in environ.items() if name != MARKER_VARIABLE]
        words = [os.fsencode(word) for word in (program, "dump", "--pid", str(pid))]
        spec = SpawnSpec(0, words[0], words, [os.fsencode(mark)])
        spec.dies_with_us = entry is not None  # in a library the thread may end before it
        self._out = self._null = -1
        try:
            self._out = _above_stdio(os.memfd_create("py-spy"))
            self._null = _above_stdio(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self._close_files()
            raise StartError(str(error.strerror), "opening its output", error.errno or 0) from None
        spec.stdio = [self._null, self._out, self._out]
        try:
            self.group = Group(
                1,
                mark=os.fsencode(mark),
                grace_s=0.0,
                stop_signal=_TERM,
                stop_scope="group",
                entry=entry,
                beside=True,
                debug=debug_flags(environ),
            )
        except StartError:
            self._close_files()
            raise
        try:
            self.group.spawn([spec], base)
            self.step()
        except StartError:
            self.close()
            raise

    def step(self) -> bool:
        """Whether it has ended. Its exit code may have been taken by the ranks' group: its words tell enough."""
        for event in self.group.run_once():
            if event.kind == "started":
                self.pid = event.pid
            if event.kind == "start_failed":
                self.failure = f"py-spy cannot be started: {STEPS[event.code]}: {os.strerror(event.signal)}"
        return self.group.ended

    def text(self) -> str:
        return os.pread(self._out, _SHOWN, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self.group.close()
        self._close_files()

    def _close_files(self) -> None:
        for fd in (self._out, self._null):
            if fd >= 0:
                os.close(fd)
        self._out = self._null = -1


def _above_stdio(fd: int) -> int:
    """The core asks for that: a host program may have closed its stdio."""
    if fd > 2:
        return fd
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved
