"""Looks at several machines at once: one command of the engine for each, with a limit of time.

Each wave of commands is a group of the core: at the limit, and if this process ends, all of them are killed.
"""

from __future__ import annotations

import os
import select
import time

from infini_run.core.c_structs import PIPE, SpawnSpec
from infini_run.core.group import Group, debug_flags, is_main_thread
from infini_run.doctor.finding import Finding, failing, note
from infini_run.doctor.machine import MAGIC
from infini_run.errors import ProgramMissing, StartError, printable
from infini_run.system.resource_limits import explain_command
from infini_run.system.shell import find_program, missing_text
from infini_run.system.signal_numbers import SIGTERM
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

WAVE = 64  # commands at a time
_READ = 1 << 16
_MOST = 1 << 20  # bytes that a machine is read
_SHOWN = 80  # characters of what a shell prints at login


class Machine:
    """A machine that is looked at.

    Attributes:
        label: how the user calls it.
        facts: what it says of itself; empty: it did not answer.
        findings: those of its checks, and what was found out about reaching it.
        clock_s: how far its clock is ahead of the launcher's, known to the time of its answer's way.

    Args:
        argv: the command that runs machine.run there.
        env: variables added to those of the launcher.
        explain: says why the command failed, from its exit code and its last output.
    """

    def __init__(
        self,
        label: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        explain: Callable[[int | None, str], str],
    ) -> None:
        self.label = label
        self.argv = argv
        self.env = dict(env or {})
        self.facts: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.clock_s = 0.0
        self._explain = explain
        self._data = bytearray()
        self._answered_s = 0.0

    def feed(self, data: bytes) -> None:
        """Take output of the command."""
        if not self._answered_s and MAGIC in self._data + data:
            self._answered_s = time.time()
        if len(self._data) < _MOST:
            self._data += data

    def conclude(self, code: int | None, stderr: str, limit_s: float, *, is_late: bool) -> None:
        """Make findings of the output, and of how the command ended.

        Args:
            code: its exit code.
            stderr: its last output there.
            limit_s: the limit of time.
            is_late: it was killed at that limit.
        """
        before, found, text = bytes(self._data).partition(MAGIC)
        running, is_done = "", False
        for line in _records(text):
            if "facts" in line:
                self.facts = line["facts"]
                self.clock_s = float(self.facts.get("time", self._answered_s)) - self._answered_s
            elif "check" in line:
                running = str(line["check"])
            elif "grade" in line:
                self.findings.append(
                    Finding(name=str(line["name"]), grade=str(line["grade"]), text=str(line["text"]))
                )
            elif "done" in line:
                is_done = True
        if is_done:
            self.findings += _of_login(before)
        elif not found and is_late:
            last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
            more = f"; its last output: {printable(last)}" if last else ""
            self.findings.append(
                failing("reach", f"no answer within {limit_s:g} s: a launch would wait for it{more}")
            )
        elif not found:
            self.findings.append(failing("reach", printable(self._explain(code, stderr))))
        elif is_late:
            self.findings.append(failing(running, f"this check did not end within {limit_s:g} s; skipped it"))
        else:
            self.findings.append(
                failing(running, f"this check ended early: {printable(self._explain(code, stderr))}")
            )


def _records(text: bytes) -> list[dict[str, Any]]:
    from json import JSONDecodeError, loads

    found = []
    for line in text.split(b"\n"):
        try:
            record = loads(line)
        except (JSONDecodeError, UnicodeDecodeError):  # the last line, of a process that was killed
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _of_login(before: bytes) -> list[Finding]:
    """Return what a login shell prints without a terminal. Agents skip it if it is short."""
    first = next((line for line in before.decode("utf-8", "replace").splitlines() if line.strip()), "")
    if not first:
        return []
    text = f"its shell prints {len(before)} bytes without a terminal ({printable(first[:_SHOWN])!r})"
    return [note("login", f"{text}: infini-run skips them, but scp and rsync do not; see ~/.bashrc there")]


def look_at(machines: Sequence[Machine], environ: Mapping[str, str], limit_s: float) -> None:
    """Run the commands of machines, a wave at a time, and make findings of what each has written.

    Args:
        environ: the environment of the commands.
        limit_s: seconds for each wave.

    Raises:
        StartError, ProgramMissing: a command cannot be started from here.
    """
    for start in range(0, len(machines), WAVE):
        _Wave(machines[start : start + WAVE], environ, limit_s).run()


class _Wave:
    def __init__(self, machines: Sequence[Machine], environ: Mapping[str, str], limit_s: float) -> None:
        self._machines = machines
        self._environ = environ
        self._limit_s = limit_s
        self._poll = select.poll()
        self._reading: dict[int, Machine] = {}
        self._codes: dict[int, int | None] = {}
        self._late: set[int] = set()  # those that were killed at the limit
        self._is_late = False

    def run(self) -> None:
        group = Group(
            len(self._machines),
            mark=b"",  # a connection that ssh keeps for others (ControlPersist) is no leftover process
            grace_s=0.0,
            stop_signal=SIGTERM,
            stop_scope="group",
            debug=debug_flags(self._environ),
        )
        try:
            try:
                self._start(group)
            except StartError as error:
                raise explain_command(error, self._machines[0].argv[0]) from None
            self._collect(group)
            for index, machine in enumerate(self._machines):
                stderr = group.tail(index).decode("utf-8", "replace")
                machine.conclude(self._codes.get(index), stderr, self._limit_s, is_late=index in self._late)
        finally:
            group.close()
            for fd in self._reading:
                os.close(fd)

    def _start(self, group: Group) -> None:
        base = [os.fsencode(f"{k}={v}") for k, v in self._environ.items() if k != MARKER_VARIABLE]
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        writing, specs = [], []
        try:
            for rank, machine in enumerate(self._machines):
                ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._reading[ours] = machine
                writing.append(theirs)
                os.set_blocking(theirs, True)
                specs.append(self._spec(rank, machine, [null, theirs, PIPE]))
            group.spawn(specs, base)
        finally:
            for fd in (null, *writing):
                os.close(fd)
        for fd in (group.fileno(), *self._reading):
            self._poll.register(fd, select.POLLIN)

    def _spec(self, rank: int, machine: Machine, stdio: list[int]) -> SpawnSpec:
        program = machine.argv[0]
        path = program if "/" in program else find_program(program, self._environ.get("PATH") or os.defpath)
        if not path:
            raise ProgramMissing(missing_text(program), program)
        own = b"\0".join(os.fsencode(f"{name}={value}") for name, value in machine.env.items())
        spec = SpawnSpec(rank, os.fsencode(path), [os.fsencode(word) for word in machine.argv], own)
        spec.dies_with_us = is_main_thread()
        spec.stdio = stdio
        return spec

    def _collect(self, group: Group) -> None:
        end_s = time.monotonic() + self._limit_s
        while not group.ended:
            left_s = None if self._is_late else max(0.0, end_s - time.monotonic())
            for fd, _ in self._poll.poll(None if left_s is None else left_s * 1000 + 1):
                if fd in self._reading:
                    self._read(fd)
            for event in group.run_once():
                if event.kind == "exited":
                    self._codes[event.worker] = 128 + event.signal if event.signal else event.code
                elif event.kind == "start_failed":
                    self._codes[event.worker] = 127
            if not self._is_late and time.monotonic() >= end_s:
                self._is_late = True
                self._late = set(range(len(self._machines))) - self._codes.keys()
                group.kill()
        for fd in list(self._reading):
            while self._read(fd):
                pass

    def _read(self, fd: int) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:  # another process still has the other end
            return False
        if data:
            self._reading[fd].feed(data)
            return True
        self._poll.unregister(fd)
        del self._reading[fd]
        os.close(fd)
        return False
