"""What every test gets: a clean environment, and a failure if it leaves anything behind.

Leaks are looked for in the kernel: our descriptors, our children and zombies, our threads, and processes
that carry the mark of a launch.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

# speed is bench/'s affair: how long an example takes on a busy machine says nothing
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

T = TypeVar("T")
pytest_plugins = ["shape", "nvml", "machine", "batch", "jobs", "podman", "service"]
CHILDREN = Path(__file__).parent / "children"
FOREIGN = (
    "INFINI_",
    "SLURM",
    "PBS_",
    "OMPI_",
    "PMI",
    "PET_",
    "TORCHELASTIC_",
    "TORCH_ELASTIC_",
    "FLAGS_",
    "PALS_",
    "MPI_LOCAL",
    "MV2_",
)
FOREIGN += ("FLUX_", "LSB_", "JSM_", "LWS_", "SM_")
OURS = ("TEST_RUN", os.urandom(6).hex())  # other tests may run on this machine; theirs are not ours to end
os.environ.update([OURS])
os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="infini-run-tests-")  # what SIGKILLed launchers leave goes with it
atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
PATHS = ("", "fork", "nopidfd", "fork,nopidfd")  # both ways to spawn, both ways to wait
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # ignored under nohup, and behind a shell's `&`
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
GUARD = "irun-guard"  # what the process is called that outlives a launcher, to end what that has left
# Workers of pytest-xdist inherit the seed: all of them have to choose the same rows.
SEED = int(os.environ.setdefault("TEST_SEED", str(random.SystemRandom().randrange(2**32))))
TAKES_ALL = os.environ.get("TEST_ROWS") == "all"  # make test-all
LIMIT_S = 60.0  # how long anything may take on a loaded machine before it counts as hung


def until(what: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait for something that no descriptor tells of. The pause is how often we look, not what we wait for."""
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(0.005)


def interrupt_main(raised: threading.Event) -> None:
    """SIGINT to the main thread, again until `raised`: CPython sees one that comes just before it waits for a lock
    only when it wakes."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while not raised.wait(1):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def lead_group() -> None:
    """Before exec: be a job as a shell's. The kernel stops no process group that has no parent in its session, as all
    of these tests may be (setpgid(2), orphaned process groups)."""
    os.setpgid(0, 0)


def sample(rows: Iterable[T], count: int) -> list[T]:
    """`count` of the rows in their order, chosen by TEST_SEED; all of them under TEST_ROWS=all (make test-all)."""
    rows = list(rows)
    if TAKES_ALL or len(rows) <= count:
        return rows
    return [rows[i] for i in sorted(random.Random(SEED).sample(range(len(rows)), count))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `rows(count)`, so many of its rows run; those that the command line names, always."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("rows") and not any("[" in word for word in config.args):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: list[pytest.Item] = []
    for rows in families.values():
        kept = sample(rows, rows[0].get_closest_marker("rows").args[0])
        left += [item for item in rows if item not in kept]
    if left:
        config.hook.pytest_deselected(items=left)
        dropped = set(left)
        items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how this choice of rows can be had again."""
    chosen = "all rows of every matrix" if TAKES_ALL else f"rows of large matrices were chosen by TEST_SEED={SEED}"
    terminalreporter.write_line(chosen)


def processes() -> dict[int, tuple[int, str, str]]:
    """pid: (parent, state, name) of every process there is."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
            found[int(entry)] = (int(parent), state, name)
    return found


def children() -> dict[int, str]:
    return {pid: f"{name} {state}" for pid, (parent, state, name) in processes().items() if parent == os.getpid()}


def state_of(pid: int) -> str:
    """The letter that /proc has for it; "" when it is gone."""
    return processes().get(pid, (0, "", ""))[1]


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def marked(mark: bytes = b"INFINI_RUN_ID=") -> dict[int, str]:
    """Live processes that carry the mark of a launch and that of this test run."""
    ours = "=".join(OURS).encode()
    found = {}
    for pid, (_, state, name) in processes().items():
        try:
            strings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_ours = ours in strings and any(string.startswith(mark) for string in strings)
        if pid != os.getpid() and state not in "ZX" and is_ours:
            found[pid] = name
    return found


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def is_full(stream):
    """Whether nothing more fits into a pipe, seen from its reading end."""
    end = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # not by FIONREAD: pages that are not filled count as well (pipe(7))
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs PyTorch is skipped where there is none; TEST_TORCH=required (make torch): then it fails."""
    is_asked = item.get_closest_marker("torch") is not None and os.environ.get("TEST_TORCH") != "required"
    if is_asked and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: make torch")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(FOREIGN) or name in (
            "CUDA_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "ASCEND_RT_VISIBLE_DEVICES",
            "OMP_NUM_THREADS",
            "PYTHONUNBUFFERED",
            "NOTIFY_SOCKET",
            "WATCHDOG_USEC",
            "WATCHDOG_PID",
            *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            *("PE_HOSTFILE", "JOB_COMPLETION_INDEX"),
        ):
            monkeypatch.delenv(name)


@pytest.fixture(params=PATHS, ids=lambda path: path or "clone,pidfd")
def every_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once for each way in which the core can spawn and wait."""
    monkeypatch.setenv("INFINI_RUN_DEBUG", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before, threads, kids, strays = descriptors(), threading.enumerate(), children(), marked()
    yield
    left = {pid: name for pid, name in marked().items() if pid not in strays}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes that outlived their launch: {left}"
    assert {p: n for p, n in children().items() if p not in kids} == {}, "children or zombies left"
    assert [t for t in threading.enumerate() if t not in threads] == [], "threads left"
    after = descriptors()
    assert {fd: to for fd, to in after.items() if before.get(fd) != to} == {}, "descriptors left"


class Bell:
    """A FIFO that ranks ring: `echo word > path`. How a test hears that a rank is there."""

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


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    bell = Bell(tmp_path / "bell")
    yield bell
    bell.close()


def play(*words: str) -> list[str]:
    """A worker that does what the words say (children/play.py)."""
    return [sys.executable, "-ISu", str(CHILDREN / "play.py"), *map(str, words)]


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


@pytest.fixture
def gate() -> Iterator[Callable[[], Gate]]:
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate())
        return gates[-1]

    yield make
    for one in gates:
        one.close()


@pytest.fixture
def shut(tmp_path: Path) -> str:
    """A FIFO that nobody opens for writing: who reads it waits."""
    path = str(tmp_path / "shut")
    os.mkfifo(path)
    return path


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

    def read_error_until(self, text: bytes) -> None:
        """The same for stderr."""
        while text not in self.err:
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
        out, err = self.process.communicate(timeout=limit_s)
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


@pytest.fixture
def infini_run() -> Iterator[Callable[..., Command]]:
    """Start `infini-run WORDS...`; `under` puts words before it (unshare, nohup, a shell's limit)."""
    started: list[Command] = []

    def start(*words: object, under: tuple[str, ...] = (), gates: tuple[Gate, ...] = (), **kwargs: object) -> Command:
        if gates:
            kwargs["pass_fds"] = [gate.fd for gate in gates]
        started.append(Command([*under, *COMMAND, *map(str, words)], **kwargs))
        return started[-1]

    yield start
    for command in started:
        command.close()


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


@pytest.fixture
def trace():
    tracers = []

    def start(pid):
        tracers.append(Tracer(pid))
        if tracers[-1].said != b"tracing\n":
            pytest.skip(f"ptrace is not permitted here: {tracers[-1].said!r}")
        return tracers[-1]

    yield start
    for tracer in tracers:
        if tracer.process.returncode is None:
            tracer.let_go()


# asan.sh has an interpreter of its own
COMMAND = [*shlex.split(os.environ.get("TEST_PYTHON", sys.executable)), "-m", "infini_run"]
LIBC_OWN = 3 << 31  # signals 32 and 33, which a sanitizer's runtime may have ignored for all that follows
