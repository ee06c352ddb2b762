"""One launcher under one fault, in a PID namespace of its own that ends with the trial: nothing escapes.

Everything is observed from outside the namespace, in /proc and by what wait says. Unless the launcher is to
be process 1 itself, that is keeper.c, which only reaps.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bed import Bed
from gate import Gate
from launchers import Launcher
from sample import CommandFailed

LIMIT_S = 5.0
LOOK_S = 0.002


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    name: str


def processes() -> dict[int, Process]:
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
        except OSError:
            continue
        name, _, rest = stat.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        found[int(entry)] = Process(int(entry), int(parent), state, name)
    return found


def below(root: int) -> list[Process]:
    """All descendants: in a PID namespace orphans stay below its process 1."""
    all_, found, known = processes(), [], {root}
    grown = True
    while grown:
        more = [p for p in all_.values() if p.parent in known and p.pid not in known]
        found += more
        known |= {p.pid for p in more}
        grown = bool(more)
    return found


def comes_true(what: Callable[[], Any], limit_s: float) -> float | None:
    """How long it took, in seconds; None: it did not come true in time."""
    begin = time.monotonic()
    while not what():
        if time.monotonic() - begin > limit_s:
            return None
        time.sleep(LOOK_S)
    return time.monotonic() - begin


@dataclass(frozen=True)
class Ended:
    """`code` as a shell says it; `at_ns` is CLOCK_MONOTONIC."""

    code: int
    at_ns: int


def fd_close(fd: int) -> int:
    os.close(fd)
    return -1


def namespace_words() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child"]


class Trial:
    """`words` are fault.c's; `options` are keeper.c's; `stdio`: one descriptor for all three, a terminal."""

    def __init__(
        self,
        bed: Bed,
        launcher: Launcher,
        n: int,
        words: str,
        directory: Path,
        *,
        options: Sequence[str] = (),
        limit_s: float = LIMIT_S,
        is_process_1: bool = False,
        command: Sequence[str] = (),
        stdio: int | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.n, self.limit_s = n, limit_s
        self.gate = Gate(directory)
        self.argv = launcher.argv(
            n, [bed.program("fault"), str(self.gate.up_path), str(self.gate.go_path), *words.split()]
        )
        self.is_process_1 = is_process_1
        self.err_path = directory / "stderr"
        self._told, tell = os.pipe()
        self._heard = ""
        keeper = [bed.program("keeper"), *(["-x"] if is_process_1 else []), *options, str(tell)]
        with self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*namespace_words(), *keeper, *(command or self.argv)],
                stdin=subprocess.DEVNULL if stdio is None else stdio,
                stdout=subprocess.DEVNULL if stdio is None else stdio,
                stderr=err if stdio is None else stdio,
                env={**bed.env, **launcher.env, **(env or {})},
                pass_fds=[tell],
            )
        os.close(tell)

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Safe twice."""
        if self._told < 0:
            return
        self.process.kill()  # and with it process 1 of the namespace, and so all
        self.process.wait()
        self._told = fd_close(self._told)
        self.gate.__exit__(None, None, None)

    # ---- who there is

    @property
    def launcher(self) -> int:
        """Its pid, as we see it."""
        if self.is_process_1:
            return self._child_of(self.process.pid, lambda _: True)
        told = self._hear("started", LIMIT_S) or ["none"]
        inside = re.compile(rf"^NSpid:.*\t{told[0]}$", re.MULTILINE)
        keeper = self._child_of(self.process.pid, lambda _: True)
        return self._child_of(keeper, lambda pid: inside.search(Path(f"/proc/{pid}/status").read_text()))

    def _child_of(self, parent: int, is_it: Callable[[int], Any]) -> int:
        for process in processes().values():
            if process.parent == parent and is_it(process.pid):
                return process.pid
        raise CommandFailed("the launcher is not there")

    def inside(self) -> list[Process]:
        """What was started in there, beside the keeper: the launcher and all its descendants."""
        found = below(self.process.pid)
        return found if self.is_process_1 else [p for p in found if p.parent != self.process.pid]

    def alive(self, *names: str) -> list[Process]:
        return [p for p in self.inside() if p.state not in "ZX" and (not names or p.name in names)]

    def zombies(self) -> int:
        return sum(p.state == "Z" for p in self.inside())

    def worker(self) -> int:
        return self.alive("fault")[0].pid

    # ---- what happens

    def signal(self, number: int) -> int:
        """To the launcher; CLOCK_MONOTONIC at that moment."""
        pid = self.launcher
        at_ns = time.monotonic_ns()
        os.kill(pid, number)
        return at_ns

    def started_ns(self) -> int:
        """Just before the launcher was forked; CLOCK_MONOTONIC."""
        told = self._hear("started", LIMIT_S)
        if told is None:
            raise CommandFailed("the launcher was not executed")
        return int(told[1])

    def _hear(self, word: str, limit_s: float) -> list[str] | None:
        end = time.monotonic() + limit_s
        while True:
            for line in self._heard.splitlines():
                if line.startswith(f"{word} "):
                    return line.split()[1:]
            if not select.select([self._told], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            chunk = os.read(self._told, 4096).decode()
            if not chunk:
                raise CommandFailed(f"the keeper ended: {self.err()}")
            self._heard += chunk

    def end(self, limit_s: float) -> Ended | None:
        """How the launcher ended, if it did in time."""
        if self.is_process_1:
            try:
                code = self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            return Ended(code if code >= 0 else 128 - code, time.monotonic_ns())
        told = self._hear("ended", limit_s)
        if told is None:
            return None
        code = os.waitstatus_to_exitcode(int(told[0]))
        return Ended(code if code >= 0 else 128 - code, int(told[1]))

    def err(self) -> str:
        return self.err_path.read_text(errors="replace")
