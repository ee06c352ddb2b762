"""What tests of jobs share: `infini-job` in a folder of its own, and whatever is left of its jobs afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Case
from tests.support.command import Bell, Command
from tests.support.processes import OURS
from tests.support.waiting import LIMIT_S, until

JOB = [sys.executable, "-m", "infini_run.jobs"]


def changed_job(lines: str) -> list[str]:
    """An infini-job that runs these lines of Python first, as tests.support.command.altered does."""
    return [sys.executable, "-c", f"{lines}\nfrom infini_run.jobs.cli import main\nmain()"]


LOCAL = {"INFINI_JOB_SCHEDULER": "local"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OOM", "PREEMPTED", "LOST")


FILES = {"events": "e", "metrics": "m", "report": "r", "trace": "t", "termination_log": "l"}  # by flag, a name each


def check_files(folder: Path, host: str, ranks: int) -> None:
    """Each of FILES has what it has of a launch whose rank 1 exits with 3, on that host."""
    lines = (folder / FILES["events"]).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert sum(event["kind"] == "started" for event in events) == ranks
    assert [(event["kind"], event["code"]) for event in events if event["kind"] == "ended"] == [("ended", 3)]
    assert re.search(r"^infini_run_exit_code\{.*\} 3", (folder / FILES["metrics"]).read_text(), re.M)
    report = json.loads((folder / FILES["report"]).read_text())
    assert (report["exit_code"], report["first_failure"], len(report["ranks"])) == (3, 1, ranks)
    trace = json.loads((folder / FILES["trace"]).read_text())
    assert trace["otherData"]["world_size"] == ranks
    message = (folder / FILES["termination_log"]).read_text()
    assert message.startswith(f"infini-run: rank 1 on {host} failed: exit code 3 "), message


class Jobs:
    """`infini-job` with --dir of its own. env: beside ours."""

    def __init__(self, path: Path, case: Case, env: dict[str, str] | None = None) -> None:
        self.path = path
        self.env = {**os.environ, **case.env, OURS[0]: OURS[1], "INFINI_JOB_DIR": str(path), **(env or {})}
        self._started: list[Command] = []

    def call(self, *words: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Its end."""
        env = {**self.env, **kwargs.pop("env", {})}
        return subprocess.run(
            [*JOB, *map(str, words)], env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S * 2,
            stdin=subprocess.DEVNULL, **kwargs,
        )  # fmt: skip

    def start(self, *words: object, **kwargs: object) -> Command:
        """One that goes on."""
        self._started.append(Command([*JOB, *map(str, words)], env=self.env, **kwargs))
        return self._started[-1]

    def submit(self, *words: object, **kwargs: object) -> str:
        """The name of a job that was taken."""
        done = self.call("submit", *words, **kwargs)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[1]

    def status(self, name: str) -> dict[str, object]:
        done = self.call("status", "--json", name)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]

    def wait(self, name: str, *states: str) -> dict[str, object]:
        """Its status, once its state is one of these; without any, once it has ended."""
        found: dict[str, object] = {}

        def is_there() -> bool:
            found.update(self.status(name))
            is_over = bool(found["is_final"])
            assert not states or not is_over or found["state"] in states, f"it has ended otherwise: {found}"
            return found["state"] in states if states else is_over

        until(is_there, LIMIT_S * 2)
        return found

    def logs(self, name: str, *words: str) -> str:
        done = self.call("logs", *words, name)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lines(self, name: str, *words: str) -> list[str]:
        """What the ranks wrote, without the launcher's own lines."""
        return [line for line in self.logs(name, *words).splitlines() if not line.startswith("infini-run: ")]

    def log(self, name: str, attempt: int = 0) -> Path:
        return self.path / name / str(attempt) / "log"

    def is_empty(self) -> bool:
        """No job's directory is there."""
        return not self.path.exists() or not os.listdir(self.path)

    def close(self) -> None:
        for command in self._started:
            command.close()


@pytest.fixture
def local(tmp_path, case):
    """Jobs of this machine. Nothing of them is left at the end."""
    jobs = Jobs(tmp_path / "jobs", case, LOCAL)
    yield jobs
    jobs.close()
    case.end()


@contextlib.contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """A block in which this process can open so many descriptors, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    found: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(count):
            os.close(found.pop())
        yield
    finally:
        for fd in found:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def many_descriptors():
    """More open descriptors than select(2) can name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    found = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(1024)]
    yield
    for fd in found:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def turnstile(tmp_path):
    """A pipe that ranks read a line of: as many get past it as it rings."""
    turnstile = Bell(tmp_path / "turnstile")
    yield turnstile
    turnstile.close()
