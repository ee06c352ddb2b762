"""How a command is timed, and how many of them are timed fairly side by side.

A command is started by posix_spawn and collected by wait4, with CLOCK_MONOTONIC around both; the subprocess
module would add its own milliseconds. Cases take turns in rounds, in another order every round: on a shared
machine a slow minute then hits all of them alike, and only ratios of medians taken in one run mean
anything.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from provision import RESULTS

STDERR_PATH = RESULTS / "stderr.txt"
TIMEOUT_S = 30.0
TERM_S = 5.0


class CommandFailed(Exception):
    """A timed command did not end as it should have."""


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    fds: Mapping[int, int | Path] | None = None,
) -> int:
    """Starts a command, and returns its pid.

    `fds` gives it descriptors: ours, or a file to write. What is not given is /dev/null, stderr a file.
    """
    RESULTS.mkdir(exist_ok=True)
    given: dict[int, int | Path] = {1: Path("/dev/null"), 2: STDERR_PATH, **(fds or {})}
    actions: list[tuple[Any, ...]] = []
    if 0 not in given:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    for fd, source in given.items():
        if isinstance(source, int):
            actions.append((os.POSIX_SPAWN_DUP2, source, fd))
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            actions.append((os.POSIX_SPAWN_OPEN, fd, str(source), flags, 0o644))
    return os.posix_spawn(argv[0], list(argv), env, file_actions=actions)


def finish(pid: int, timeout_s: float = TIMEOUT_S) -> int:
    """Waits for a command of ours and returns its exit code, negative if a signal ended it.

    One that is late gets TERM, so that it can take its ranks along, KILL after that, and has failed.
    """
    escalation = iter([signal.SIGTERM])
    late = ""

    def too_late(_signum: int, _frame: FrameType | None) -> None:
        nonlocal late
        late = late or Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        os.kill(pid, next(escalation, signal.SIGKILL))

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, TERM_S)
    try:
        _, status, _ = os.wait4(pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if late:
        raise CommandFailed(f"{late}\ndid not end within {timeout_s:.0f} s; stderr:\n{last_stderr()}")
    return os.waitstatus_to_exitcode(status)


def last_stderr() -> str:
    try:
        return STDERR_PATH.read_text(errors="replace")[-600:].strip()
    except FileNotFoundError:
        return ""


def expect(argv: Sequence[str], code: int, wanted: int = 0) -> None:
    if code != wanted:
        raise CommandFailed(f"{' '.join(argv)}\nexit code {code}, not {wanted}; stderr:\n{last_stderr()}")


def time_command(argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int | Path] | None = None) -> int:
    """Runs a command that must succeed, and returns how long it took, in ns."""
    begin = time.monotonic_ns()
    code = finish(start(argv, env, fds))
    took = time.monotonic_ns() - begin
    expect(argv, code)
    return took


def read_output(argv: Sequence[str], env: Mapping[str, str], at: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Runs a command that must succeed, and returns what it wrote; `at` is a file to hold it."""
    expect(argv, finish(start(argv, env, {1: at}), timeout_s))
    return at.read_text()


@dataclass(kw_only=True)
class Case:
    """Something to measure `rounds` times. A case that may fail (a peer) only says that it did."""

    name: str
    measure: Callable[[], Any]
    rounds: int
    may_fail: bool = False
    samples: list[Any] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float:
        middle: float = median(self.samples)
        return middle

    def is_due(self, turn: int, turns: int) -> bool:
        """Spreads the rounds of a case evenly over all turns."""
        return turn * self.rounds // turns != (turn + 1) * self.rounds // turns

    def take(self) -> None:
        try:
            self.samples.append(self.measure())
        except CommandFailed as error:
            if not self.may_fail:
                raise
            self.failure = str(error)


def interleave(cases: Sequence[Case]) -> dict[str, Case]:
    """Measures all cases in turns, one that has failed no longer; returns those that have samples."""
    order = random.Random(0)
    turns = max(case.rounds for case in cases)
    for turn in range(turns):
        due = [case for case in cases if case.is_due(turn, turns) and not case.failure]
        for case in order.sample(due, len(due)):
            case.take()
    return {case.name: case for case in cases if case.samples}


def raw(cases: Sequence[Case]) -> dict[str, Any]:
    """All samples of each case, for the JSON."""
    return {case.name: case.samples for case in cases}


def failures(cases: Sequence[Case]) -> list[str]:
    """A remark for each case that failed."""
    return [f"{case.name}: {' '.join(case.failure.split())}" for case in cases if case.failure]
