"""A running `infini-run`, or any other program, of a test; and what ranks of tests do."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.support.paths import C
from tests.support.processes import state_of
from tests.support.waiting import LIMIT_S, until

CHILDREN = Path(__file__).parent / "children"


@functools.cache
def _build_play() -> str:
    """Build the worker, once for all runs: an interpreter takes twenty times as long to start, and a run of the tests
    starts thousands. It is where other users of this machine find it, and needs no library if it can."""
    from tests.support.build_c import compiler

    source = C / "play.c"
    made = CHILDREN / "__pycache__" / f"play-{os.uname().machine}"
    if not made.exists() or made.stat().st_mtime <= source.stat().st_mtime:
        made.parent.mkdir(exist_ok=True)
        new = made.with_name(f"{made.name}.{os.getpid()}")
        words = [compiler(), "-std=c11", "-D_GNU_SOURCE", "-O1", "-pthread", "-o", str(new), str(source)]
        for link in (["-static"], []):  # not every system has a libc to link statically
            done = subprocess.run([*words, *link], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stderr
        new.replace(made)
    return str(made)


PATHS = ("", "fork", "nopidfd", "fork,nopidfd")  # both ways to spawn, both ways to wait


class Bell:
    """A FIFO that ranks ring: `echo word > path`. How a test hears that a rank is there.

    A shell with a trap that waits for a program rings in the fork for it: `(echo up > path; exec sleep 1000) & wait`.
    Before the fork runs, it has the shell's handler, which may take the signal from the program.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._heard = b""

    def hear(self, count: int, limit_s: float = LIMIT_S) -> list[str]:
        """The next `count` lines."""
        end = time.monotonic() + limit_s
        while self._heard.count(b"\n") < count:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{count} lines never came; so far {self._heard!r}"
            self._heard += os.read(self._fd, 65536)
        *lines, self._heard = self._heard.split(b"\n", count)
        return [line.decode() for line in lines]

    def ring(self, line: str) -> None:
        """Say something to whoever reads at the other end."""
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def play(*words: str) -> list[str]:
    """A worker that does what the words say (tests/c/play.c)."""
    return [_build_play(), *map(str, words)]


def play_in_python(*words: str) -> list[str]:
    """The same in Python, for tests of stacks, or of the memory of a rank (children/python_rank.py)."""
    return [sys.executable, "-ISu", str(CHILDREN / "python_rank.py"), *map(str, words)]


class Gate:
    """A pipe that workers wait at (`hold={gate}`): its read end is theirs by inheritance, opening it is ours."""

    def __init__(self) -> None:
        self.fd, self._ours = os.pipe()

    def __str__(self) -> str:
        return str(self.fd)

    def open(self, text: str = "") -> None:
        if self._ours >= 0:
            os.write(self._ours, text.encode())
            os.close(self._ours)
            self._ours = -1

    def close(self) -> None:
        self.open()
        os.close(self.fd)


class Command:
    """A running `infini-run`, or any other program, of a test; it is always ended and reaped."""

    def __init__(self, argv: list[str], **kwargs: object) -> None:
        kwargs.setdefault("stdin", subprocess.DEVNULL)
        kwargs.setdefault("stdout", subprocess.PIPE)
        kwargs.setdefault("stderr", subprocess.PIPE)
        self.process = subprocess.Popen(argv, **kwargs)  # type: ignore[call-overload]
        self.pid: int = self.process.pid
        self.out = b""
        self.err = b""

    def read_until(self, text: bytes, limit_s: float = LIMIT_S) -> bytes:
        """Read stdout until `text` has been seen in all that came so far."""
        while text not in self.out:
            self.read_more(limit_s)
        return self.out

    def read_more(self, limit_s: float = LIMIT_S) -> None:
        fd = self.process.stdout.fileno()
        ready, _, _ = select.select([fd], [], [], limit_s)
        assert ready, f"nothing more came; so far {self.out!r}"
        chunk = os.read(fd, 65536)
        assert chunk, f"stdout ended: {self.out!r} {self.process.stderr.read()!r}"
        self.out += chunk

    def read_lines(self, text: bytes, n: int = 1) -> list[list[str]]:
        """Read stdout until `n` whole lines begin with `text`; those lines, split into words."""
        while True:
            lines = [line for line in self.out.split(b"\n")[:-1] if line.startswith(text)]
            if len(lines) >= n:
                return [line.decode().split() for line in lines]
            self.read_more()

    def pids_of(self, text: bytes, n: int = 1) -> dict[int, int]:
        """rank: pid, as `n` workers told them after `text`."""
        return {int(words[-2]): int(words[-1]) for words in self.read_lines(text, n)}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def insist(self, number: int) -> None:
        """Send the same signal again until it has ended: within a moment of the first it is the same request."""
        with contextlib.suppress(ProcessLookupError):
            until(lambda: self.process.poll() is not None or self.signal(number))

    def read_error_until(self, *texts: bytes) -> None:
        """The same for stderr, and for one of several texts."""
        while not any(text in self.err for text in texts):
            ready, _, _ = select.select([self.process.stderr], [], [], LIMIT_S)
            assert ready, f"nothing more came; so far {self.err!r}"
            chunk = os.read(self.process.stderr.fileno(), 65536)
            assert chunk, f"stderr ended: {self.err!r}"
            self.err += chunk

    def close_stdin(self) -> None:
        self.process.stdin.close()
        self.process.stdin = None

    def suspend(self) -> None:
        """Stop it, so that several things happen before it looks again (SIGCONT)."""
        self.signal(signal.SIGSTOP)
        until(lambda: state_of(self.pid) == "T")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code; self.out and self.err hold everything that it wrote."""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it has not ended within {limit_s} s: {error.stdout!r} {error.stderr!r}") from None
        self.out += out or b""
        self.err += err or b""
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()


def run_mpi(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run mpiexec or mpirun to its end, with a stdin that stays open: Hydra passes the end of its own on, and dies of
    SIGPIPE if its processes have been faster."""
    reader, writer = os.pipe()
    try:
        return subprocess.run(words, stdin=reader, capture_output=True, text=True, check=True)
    finally:
        os.close(reader)
        os.close(writer)


def ask_modules(*argv: str) -> set[str]:
    """The modules that a Python command loads."""
    environ = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


class Tracer:
    """Another process that holds a process, dead or alive, until it is told to let go."""

    def __init__(self, pid):
        words = [sys.executable, "-ISu", str(CHILDREN / "trace.py"), str(pid)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.said = self.process.stdout.readline()

    def let_go(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Freezer:
    """A cgroup whose processes do not die of SIGKILL until they are thawed."""

    def __init__(self, folder):
        self._folder = folder

    def freeze(self, *pids):
        for pid in pids:
            (self._folder / "cgroup.procs").write_text(str(pid))
        (self._folder / "freezer.state").write_text("FROZEN")
        until(lambda: (self._folder / "freezer.state").read_text() == "FROZEN\n")

    def thaw(self):
        (self._folder / "freezer.state").write_text("THAWED")


PYTHON = shlex.split(os.environ.get("TEST_PYTHON", sys.executable))  # asan.sh has an interpreter of its own
# What a user starts; -m takes a sixth more CPU.
_INSTALLED = f"{Path(sys.executable).parent}/infini-run"
COMMAND = [*PYTHON, "-m", "infini_run"] if "TEST_PYTHON" in os.environ else [_INSTALLED]


_WAITS = re.compile(r"infini-run: waiting for (\d+ of \d+ nodes|node 0): ")


def without_waits(lines: Iterable[str]) -> list[str]:
    """Lines of a job of several nodes, without those that a slow start adds."""
    return [line for line in lines if not _WAITS.match(line)]


def altered(values: Mapping[str, object]) -> tuple[str, ...]:
    """Words before the command (`under=`), with which constants of the package have other values, by
    "module.NAME": a test of what follows a wait need not wait as long as a user does."""
    lines = ["import sys", f"del sys.argv[1 : 1 + {len(COMMAND)}]"]  # the command comes behind it
    return (*PYTHON, "-c", "\n".join([*lines, program_with(values)]))


def program_with(values: Mapping[str, object]) -> str:
    """The same as a program."""
    lines = ["import importlib"]
    for name, value in values.items():
        module, _, constant = name.rpartition(".")
        lines.append(f"module = importlib.import_module('infini_run.{module}')")
        lines.append(f"assert hasattr(module, '{constant}')")
        lines.append(f"module.{constant} = {value!r}")
    return "\n".join([*lines, "import infini_run.__main__", ""])


# For a busy machine: a look at ranks before a stop (--snapshots=failure) has a minute, not a second.
PATIENT = dict.fromkeys(("watchdog.watchdog.LOOK_S", "watchdog.watchdog.STOP_S"), 60.0)
# Each wait that a user hears of after some seconds is reported at once.
NOTICES_AT_ONCE = altered(
    dict.fromkeys(
        (
            f"multinode.{name}._NOTICE_S"
            for name in ("head.world_changes", "head.join_phase", "link.tcp", "head.end_phase")
        ),
        0.3,
    )
)


# The ssh or srun of a host that is gone does not end by itself, and the head waits for it twice.
COMMANDS_END_SOON = altered({"multinode.head.end_phase._COMMANDS_END_S": 2.0})


LIBC_OWN = 3 << 31  # signals 32 and 33, which a sanitizer's runtime may have ignored for all that follows


LOCALES = ({}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "POSIX"}, {"LC_CTYPE": "C.UTF-8"}, {"LANG": "C"}, {"LC_ALL": "C"})


def in_locale(locale: dict[str, str], environ: dict[str, str]) -> dict[str, str]:
    """An environment with these variables of a locale alone. In most of LOCALES a Python sets LC_CTYPE (PEP 538)."""
    rest = {name: text for name, text in environ.items() if name != "LANG" and not name.startswith("LC_")}
    return rest | locale


def locale_of(lines: Sequence[str]) -> dict[str, str]:
    """What env(1) in a rank has printed of its locale."""
    pairs = (line.partition("=")[::2] for line in lines)
    return {name: text for name, text in pairs if name == "LANG" or name.startswith("LC_")}
