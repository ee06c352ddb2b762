"""The shapes in which every fault is tried: one rank or eight, as process 1 of a PID namespace or not.

A plugin of conftest.py: a test asks for them by the fixture `launch`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command import COMMAND, Command, Gate
from tests.support.processes import processes
from tests.support.rows import SEED
from tests.support.waiting import until

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
RANKS = (1, 8)
STRAY = ("daemon", "name=left-behind", "say=stray", "wait", "done")
STUBBORN = ("daemon", "ignore=TERM", *STRAY[1:])
ALL_BLOCKED = 0xFFFFFFFFFFFFFFFF & ~(1 << 8 | 1 << 18 | 3 << 31)  # but KILL, STOP and glibc's own two
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
with_strace = pytest.mark.skipif(
    shutil.which("strace") is None or "TEST_PYTHON" in os.environ, reason="needs strace, and a core of its own"
)


def numbers_in(member: int) -> dict[int, int]:
    """Of every process in the PID namespace of `member`: its number there, and the one that we know it by."""
    namespace, known = os.readlink(f"/proc/{member}/ns/pid"), {}
    for pid in processes():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                status = Path(f"/proc/{pid}/status").read_text()
                known[int(status.partition("NSpid:")[2].split("\n")[0].split()[-1])] = pid
        except OSError:
            continue  # it ended
    return known


class Launched(Command):
    """A running launch. `pid` is the launcher's own, in our namespace, and so are the pids of its ranks."""

    def __init__(self, argv: list[str], **kwargs: object) -> None:
        super().__init__(argv, **kwargs)
        self.is_process_1 = tuple(argv[: len(UNSHARE)]) == UNSHARE
        if self.is_process_1:
            until(lambda: self._below_unshare() or self.process.poll() is not None)
            self.pid = next(iter(self._below_unshare()), self.pid)

    def _below_unshare(self) -> list[int]:
        return [pid for pid, (parent, _, _) in processes().items() if parent == self.process.pid]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def seen_here(self, *pids: int) -> list[int]:
        """Our numbers of processes that told theirs."""
        if not self.is_process_1:
            return list(pids)
        known = numbers_in(self.pid)
        return [known[pid] for pid in pids]

    def pids_of(self, text: bytes, n: int = 1) -> dict[int, int]:
        told = super().pids_of(text, n)
        return dict(zip(told, self.seen_here(*told.values()), strict=True))

    def each_of(self, text: bytes, n: int) -> list[int]:
        """The same where a rank has several processes that say it."""
        return self.seen_here(*[int(words[-1]) for words in self.read_lines(text, n)])

    def until_it_takes_signals(self) -> None:
        """Past the interpreter's start, where nobody can be ready for a signal yet."""
        until(lambda: self.process.poll() is not None or self._blocked() & ALL_BLOCKED == ALL_BLOCKED)

    def _blocked(self) -> int:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0
        return int(status.partition("SigBlk:")[2].split()[0], 16)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()


class Launch:
    """Starts `infini-run` in one shape; `under` puts words before it, inside the namespace."""

    def __init__(self, ranks: int, is_process_1: bool) -> None:
        self.ranks = ranks
        self.is_process_1 = is_process_1
        self.started: list[Launched] = []

    def __call__(
        self, *words: object, under: tuple[object, ...] = (), gates: tuple[Gate, ...] = (), **kwargs: object
    ) -> Launched:
        if gates:
            kwargs["pass_fds"] = [gate.fd for gate in gates]
        outer = UNSHARE if self.is_process_1 else ()
        argv = [*outer, *under, *COMMAND, f"--nproc_per_node={self.ranks}", *words]
        self.started.append(Launched(list(map(str, argv)), **kwargs))
        return self.started[-1]

    def close(self) -> None:
        for command in self.started:
            command.close()


SHAPES = [(ranks, is_process_1) for is_process_1 in (False, True) for ranks in RANKS]


def name_of(shape: tuple[int, bool]) -> str:
    ranks, is_process_1 = shape
    return f"{ranks} rank{'s' * (ranks > 1)}{' as process 1' * is_process_1}"


def skip_unless_possible(is_process_1: bool) -> None:
    if is_process_1 and os.geteuid() != 0:
        pytest.skip("a PID namespace of its own needs root")


@pytest.fixture(params=SHAPES, ids=name_of)
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    skip_unless_possible(request.param[1])
    launch = Launch(*request.param)
    yield launch
    launch.close()


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """All shapes side by side, for a fault whose bound is seconds."""
    skip_unless_possible(True)
    launches = [Launch(*shape) for shape in SHAPES]
    yield launches
    for launch in launches:
        launch.close()


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """draw(s): a random time below `s`; the seed is told with a failure, and TEST_SEED repeats it."""
    print(f"TEST_SEED={SEED}")
    chance = random.Random(f"{SEED} {request.node.name}")
    return lambda most: chance.uniform(0, most)


def pass_time(seconds: float) -> None:
    """Spend it without sleeping: the moment is a test's input. It is drawn, and nothing is waited for."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def strace(*words: object) -> tuple[object, ...]:
    """Before a launcher that keeps its pid: the tracer is a grandchild."""
    return ("strace", "-D", "-qq", "-o", *words)
