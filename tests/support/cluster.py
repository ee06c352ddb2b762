"""What every bed of several nodes is made of: packages, ports of its own, an end that comes whatever happens."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.paths import SUPPORT
from tests.support.processes import carrying
from tests.support.waiting import LIMIT_S, until

BEDS = SUPPORT / "beds"
AS_CASE = "TEST_CASE"  # a variable that marks one launch: what carries it, on whichever node, came from there


def need(*packages: str) -> None:
    """Skip where they are not there and we cannot install them; under CI that is an error."""
    skip_without_beds()
    problem = missing(*packages)
    if problem:
        give_up(problem)


def skip_without_beds() -> None:
    """Skip what needs a bed, a browser or a container runtime under TEST_BEDS=none (make near)."""
    if os.environ.get("TEST_BEDS") == "none":
        pytest.skip("it needs a bed, and TEST_BEDS=none")


def missing(*packages: str) -> str:
    """Why they are not there, and cannot be installed by us; "": they are."""
    made = subprocess.run([BEDS / "install.sh", *packages], capture_output=True, text=True, check=False)
    return f"{' '.join(packages)}: {made.stderr.strip()[-300:]}" if made.returncode else ""


def needs(program: str) -> pytest.MarkDecorator:
    """A mark for tests that are skipped where that program is missing; under CI they fail."""
    is_missing = shutil.which(program) is None and not os.environ.get("CI")
    return pytest.mark.skipif(is_missing, reason=f"{program} is not installed")


writes_memory = pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) and not os.environ.get("CI"), reason="/dev/shm cannot be written here"
)


def give_up(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, below those that the kernel gives out by itself."""
    while True:
        first = random.randrange(12000, 32000)
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first


class Bed:
    """A bed of `script`, started. It is stopped when we close it, or die: the keeper reads a pipe of ours."""

    def __init__(self, script: str, *words: str, **settings: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="bed-")
        self._script = str(BEDS / script)
        self._env = {**os.environ, **settings}
        self._keeper = subprocess.Popen(  # before the start: that may be interrupted
            ["sh", "-c", 'trap "" INT TERM HUP; read _; "$0" stop "$1" >/dev/null 2>&1', self._script, self.folder],
            stdin=subprocess.PIPE,
            env=self._env,
            start_new_session=True,
        )
        made = self.call("start", *words)
        atexit.register(self.close)  # before all temporary folders go (conftest.py): without its own none is stopped
        if made.returncode:
            self.close()
            give_up(f"{script} does not start: {(made.stdout + made.stderr).strip()[-1000:]}")

    def call(self, word: str, *words: str) -> subprocess.CompletedProcess[str]:
        # its daemons keep what they inherit: a pipe of ours would never end
        with tempfile.TemporaryFile("w+") as said:
            made = subprocess.run(
                [self._script, word, self.folder, *words],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, text=True, check=False, env=self._env,
            )  # fmt: skip
            said.seek(0)
            return subprocess.CompletedProcess(made.args, made.returncode, said.read(), "")

    def close(self) -> None:
        atexit.unregister(self.close)
        self._keeper.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


class Case:
    """One launch, marked by a variable that all of it inherits."""

    def __init__(self) -> None:
        self.env = {AS_CASE: os.urandom(6).hex()}
        self._mark = f"{AS_CASE}={self.env[AS_CASE]}".encode()

    def alive(self) -> dict[int, str]:
        """What is left of it, on all nodes."""
        return carrying(self._mark)

    def end(self) -> None:
        """Nothing of it is left anywhere, or will be in a moment."""
        try:
            until(lambda: not self.alive(), LIMIT_S)
        except AssertionError:
            argv = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.alive()}
            raise AssertionError(f"it is still running: {argv}") from None

    def clear(self) -> None:
        """SIGKILL to what a broken test has left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
