"""The Python stacks of processes, by `py-spy dump`: a few at a time, and all of them within a limit.

Each py-spy runs in a separate group of the core: so it is reaped, ends with the launcher, and is not a leftover
process of the ranks. Nothing here blocks: the caller waits for the descriptors of these groups beside its own.
"""

from __future__ import annotations

import os

from infini_run.core.c_structs import STEPS, SpawnSpec
from infini_run.core.group import Group, debug_flags
from infini_run.errors import StartError
from infini_run.system.interpreter import executable_text
from infini_run.system.signal_numbers import SIGTERM
from infini_run.system.stdio import above_stdio
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.core.c_structs import ProcessState

LIMIT_S = 10.0  # for all of them
_MAX_DUMP = 16384  # bytes


def find_pyspy(environ: Mapping[str, str]) -> str:
    """Return the path of py-spy, on PATH or beside this interpreter. Empty: there is none."""
    folders = [folder for folder in environ.get("PATH", "").split(":") if os.path.isabs(folder)]
    for folder in (*folders, os.path.dirname(executable_text())):
        path = os.path.join(folder, "py-spy")
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


class StackDumps:
    """The dump of each process. By pid, once `done`: `texts`, or in `notes` the reason why there is no text.

    Args:
        program: The path of py-spy.
        processes: Pids, each with whether the process computes: only such a one is suspended while its stack is read,
            for what waits does not move, and may not even be suspended (state D).
        ranks: The group of the ranks, which must not end py-spy as a leftover process.
        entry: The entry of the ranks' group. None: a host program's.
        environ: The environment of py-spy.
        now_s: The time; the limit counts from it.
        most: How many run at a time.
    """

    def __init__(
        self,
        program: str,
        processes: Sequence[tuple[int, bool]],
        *,
        ranks: Group,
        entry: ProcessState | None,
        environ: Mapping[str, str],
        now_s: float,
        most: int,
    ) -> None:
        self.texts: dict[int, str] = {}
        self.notes: dict[int, str] = {}
        self.deadline_s = now_s + LIMIT_S
        self._program = program
        self._waiting = list(reversed(processes))
        self._runs: dict[int, GuestRun] = {}
        self._ranks = ranks
        self._entry = entry
        self._environ = environ
        self._most = most

    @property
    def done(self) -> bool:
        """Whether no py-spy runs or waits any more."""
        return not self._waiting and not self._runs

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `poll` has something to do."""
        return [run.group.fileno() for run in self._runs.values()]

    def poll(self, now_s: float) -> None:
        """Read the dumps that are complete, and start the next ones. Never blocks."""
        if now_s >= self.deadline_s:
            self.finish_early(f"py-spy took longer than {LIMIT_S:g} s")
        for pid, run in list(self._runs.items()):
            if run.poll():
                self._finish(pid, run)
        while self._waiting and len(self._runs) < self._most:
            self._start(*self._waiting.pop())

    def finish_early(self, why: str) -> None:
        """Kill every py-spy and start no more. It is `done` after a few calls of `poll`."""
        self.deadline_s = float("inf")
        for pid in (*(pid for pid, _ in self._waiting), *self._runs):
            self.notes.setdefault(pid, why)
        self._waiting.clear()
        for run in self._runs.values():
            run.group.kill()

    def close(self) -> None:
        """Kill and reap every py-spy that still runs."""
        self._waiting.clear()
        while self._runs:
            self._close_run(self._runs.popitem()[1])

    def _start(self, pid: int, computes: bool) -> None:
        way = () if computes else ("--nonblocking",)
        words = (self._program, "dump", "--pid", str(pid), *way)
        try:
            run = self._runs[pid] = GuestRun("py-spy", words, self._entry, self._environ)
            if self._entry is not None and run.pid:
                self._ranks.spare(run.pid)
        except StartError as error:
            self.notes[pid] = f"py-spy cannot be started: {error.step}: {error}"

    def _finish(self, pid: int, run: GuestRun) -> None:
        text = run.text(_MAX_DUMP)
        if "\nThread " in text:
            self.texts[pid] = text
        else:
            error = " ".join(text.partition("Stack backtrace")[0].split())
            self.notes.setdefault(pid, run.failure or f"py-spy: {error or 'it printed nothing'}")
        self._close_run(self._runs.pop(pid))

    def _close_run(self, run: GuestRun) -> None:
        run.close()
        if self._entry is not None and run.pid:
            self._ranks.spare(run.pid, False)


class GuestRun:
    """A program that looks at ranks. It writes into a file without a name (memfd_create(2)).

    Args:
        name: Of the program, for messages.
        words: The program, which starts no other process, and its arguments.
        entry: The entry of the ranks' group. None: a host program's.
        environ: The environment of the program.
    """

    def __init__(
        self, name: str, words: Sequence[str], entry: ProcessState | None, environ: Mapping[str, str]
    ) -> None:
        self.pid = 0
        self.failure = ""
        self._name = name
        marker = f"{MARKER_VARIABLE}=guest-{os.urandom(6).hex()}"
        base = [os.fsencode(f"{key}={value}") for key, value in environ.items() if key != MARKER_VARIABLE]
        argv = [os.fsencode(word) for word in words]
        spec = SpawnSpec(0, argv[0], argv, os.fsencode(marker))
        spec.dies_with_us = entry is not None  # in a host program the thread that started it may end before it
        self._out = self._null = -1
        try:
            self._out = above_stdio(os.memfd_create(name))
            self._null = above_stdio(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self._close_files()
            raise StartError(str(error.strerror), "opening its output", error.errno or 0) from None
        spec.stdio = [self._null, self._out, self._out]
        try:
            self.group = Group(
                1,
                mark=b"",  # it starts no process: there is nothing to look for in /proc
                grace_s=0.0,
                stop_signal=SIGTERM,
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
            self.poll()
        except StartError:
            self.close()
            raise

    def poll(self) -> bool:
        """Return whether it exited. Its exit code is not used: the ranks' group may have reaped it."""
        for event in self.group.run_once():
            if event.kind == "started":
                self.pid = event.pid
            if event.kind == "start_failed":
                self.failure = f"{self._name} cannot be started: {STEPS[event.code]}: {os.strerror(event.signal)}"
        return self.group.ended

    def text(self, most: int) -> str:
        """Return what it has written, the first `most` bytes."""
        return os.pread(self._out, most, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self.group.close()
        self._close_files()

    def _close_files(self) -> None:
        for fd in (self._out, self._null):
            if fd >= 0:
                os.close(fd)
        self._out = self._null = -1
