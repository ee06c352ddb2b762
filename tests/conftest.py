"""What every test gets: a clean environment, and a failure if it leaves anything behind.

Leaks are looked for in the kernel: our descriptors, our children and zombies, our threads, and processes
that carry the mark of a launch.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.cluster import Case
from tests.support.command import COMMAND, PATHS, Bell, Command, Freezer, Gate, Tracer
from tests.support.processes import OURS, children, descriptors, marked, state_of, thread_names
from tests.support.rows import SEED, TAKES_ALL, sample
from tests.support.waiting import until

# speed is bench/'s affair: how long an example takes on a busy machine says nothing
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

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
os.environ.update([OURS])
os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="infini-run-tests-")  # what SIGKILLed launchers leave goes with it
atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # ignored under nohup, and behind a shell's `&`
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is collected stays until the end, so no garbage collection looks at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `rows(count)`, so many of its rows run; those that the command line names, always."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("rows") and not any("[" in word for word in config.args):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: list[pytest.Item] = []
    for name, rows in families.items():
        kept = sample(rows, rows[0].get_closest_marker("rows").args[0], name)
        left += [item for item in rows if item not in kept]
    if left:
        config.hook.pytest_deselected(items=left)
        dropped = set(left)
        items[:] = [item for item in items if item not in dropped]
    if config.getoption("loadgroup", False):
        items[:] = spread_groups(items)


def spread_groups(items: list[pytest.Item]) -> list[pytest.Item]:
    """Groups wait, most other tests compute: so the groups begin one after the other while others are run. Those with
    slow tests are first, then the largest. The other tests of a file are spread over the whole run: whether they wait
    or compute is mostly their file's."""
    groups: dict[str, list[pytest.Item]] = {"": []}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        groups.setdefault(mark.args[0] if mark else "", []).append(item)
    others = evenly(groups.pop(""))
    step = int(len(others) * 0.7 / max(len(groups), 1))  # the last one has time to end among the others, too
    spread: list[pytest.Item] = []
    for k, group in enumerate(sorted(groups.values(), key=_weight, reverse=True)):
        spread += group + others[k * step : (k + 1) * step]
    return spread + others[len(groups) * step :]


def evenly(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of each file in their order, at equal distances from the first item to the last."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    placed = [((k + 0.5) / len(each), item) for each in files.values() for k, item in enumerate(each)]
    return [item for _place, item in sorted(placed, key=lambda pair: pair[0])]


def _weight(group: list[pytest.Item]) -> tuple[int, int]:
    return sum(item.get_closest_marker("slow") is not None for item in group), len(group)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how this choice of rows can be had again."""
    chosen = "all rows of every matrix" if TAKES_ALL else f"rows of large matrices were chosen by TEST_SEED={SEED}"
    terminalreporter.write_line(chosen)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs PyTorch is skipped where there is none; TEST_TORCH=required (make torch): then it fails. So is what
    needs a GPU; TEST_GPU=required (make gpu).

    A test whose group pytest-xdist does not know of fails: without groups every worker makes every bed, again and
    again.
    """
    is_asked = item.get_closest_marker("torch") is not None and os.environ.get("TEST_TORCH") != "required"
    if is_asked and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: make torch")
    if item.get_closest_marker("gpu") is not None:
        from tests.support.gpus import find_problem

        problem = find_problem(with_torch=item.get_closest_marker("torch") is not None)
        if problem and os.environ.get("TEST_GPU") == "required":
            pytest.fail(problem)
        if problem:
            pytest.skip(problem)
    is_grouped = "@" in item.nodeid or item.get_closest_marker("xdist_group") is None
    if item.config.getoption("loadgroup", False) and not is_grouped:
        pytest.fail("this pytest-xdist does not group with this pytest")


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
    # what a fixture of the module has started may carry the mark only later, once it is executed: so, every number
    before, threads, kids, pids = descriptors(), threading.enumerate(), children(), set(os.listdir("/proc"))
    yield
    left = marked(known=pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes that outlived their launch: {left}"
    assert {p: n for p, n in children().items() if p not in kids} == {}, "children or zombies left"
    assert [t for t in threading.enumerate() if t not in threads] == [], "threads left"
    until(lambda: "irun-drop" not in thread_names())  # nobody waits for it (csrc/io/rights_drop.c)
    after = descriptors()
    assert {fd: to for fd, to in after.items() if before.get(fd) != to} == {}, "descriptors left"


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    bell = Bell(tmp_path / "bell")
    yield bell
    bell.close()


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


@pytest.fixture
def infini_run() -> Iterator[Callable[..., Command]]:
    """Start `infini-run WORDS...`; `under` puts words before it (unshare, nohup, a shell's limit)."""
    started: list[Command] = []
    pids = set(os.listdir("/proc"))

    def start(*words: object, under: tuple[str, ...] = (), gates: tuple[Gate, ...] = (), **kwargs: object) -> Command:
        if gates:
            kwargs["pass_fds"] = [gate.fd for gate in gates]
        started.append(Command([*under, *COMMAND, *map(str, words)], **kwargs))
        return started[-1]

    yield start
    is_killed = any(command.process.poll() is None for command in started)
    for command in started:
        command.close()
    if is_killed:  # its guard ends what it has left, in a moment
        until(lambda: not marked(known=pids))


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


@pytest.fixture
def suspended():
    """Suspend a process by SIGSTOP; it goes on at the end."""
    pids = []

    def suspend(pid):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T")
        pids.append(pid)

    yield suspend
    for pid in pids:
        if state_of(pid) == "T":
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def case():
    """What marks the processes that a test starts, on whichever node. At its end none is left."""
    case = Case()
    yield case
    case.clear()


@pytest.fixture
def freezer():
    """A cgroup whose processes do not die of SIGKILL until they are thawed: as in uninterruptible sleep."""
    folder = Path(f"/sys/fs/cgroup/freezer/test-{os.getpid()}")
    if os.geteuid() != 0 or not (folder.parent / "cgroup.procs").exists():
        pytest.skip("no cgroup v1 freezer here that we may use")
    folder.mkdir()
    freezer = Freezer(folder)
    yield freezer
    freezer.thaw()
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.fixture
def raised():
    """Set by the first SIGINT, which raises KeyboardInterrupt. A later one does nothing, wherever it comes."""
    event = threading.Event()

    def handle(_number, _frame):
        if not event.is_set():
            event.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield event
    signal.signal(signal.SIGINT, before)
