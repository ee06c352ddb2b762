"""A batch scheduler that is none: its commands on PATH, which really run what they are told
(tests/support/fakes/batch_*.py).

slurm_queue, pbs_queue      fixtures: Queue, with the environment that has them
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import SUPPORT
from tests.support.waiting import LIMIT_S, until

FAKES = SUPPORT / "fakes"
COMMANDS = {
    "slurm": ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct", "srun"),
    "pbs": ("qsub", "qstat", "qsig", "qdel", "qselect", "qmgr"),
}
SETTINGS = {
    "slurm": {
        "nodes": {f"node{n}": {"cpus": 64, "gpus": 8} for n in range(1, 5)},
        "pools": {"debug": {}, "short": {"limit": "1:00:00"}},
        "default": "debug", "select": "cons_tres", "accounting": False, "forget": False,
        "env": {"SLURM_RESTART_COUNT": "{restarts}"},
    },
    "pbs": {
        "nodes": {f"pbsn{n}": {"ncpus": 64, "ngpus": 8} for n in range(1, 5)},
        "pools": {"workq": {}, "short": {"resources_max": {"walltime": "01:00:00"}}}, "history": True, "env": {},
    },
}  # fmt: skip


class Queue:
    """Slurm or PBS. `env`: the environment with its commands, and nothing of a real one's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.folder = tempfile.mkdtemp(prefix="q-")  # short: a socket's path has 107 bytes
        self._write(
            {"next": 101, "jobs": {}, "faults": {}, "settings": {"hold": "", "kill_wait_s": 2.0, **SETTINGS[kind]}}
        )
        os.mkdir(f"{self.folder}/bin")
        # as a module, since what is started as a file is compiled at every start
        python = f"import sys; sys.path.insert(0, '{FAKES}'); import batch_{kind}; batch_{kind}.main()"
        for name in COMMANDS[kind]:
            script = Path(self.folder, "bin", name)
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -IS -c "{python}" {name} "$@"\n')
            script.chmod(0o755)
        if kind == "pbs":
            os.symlink(FAKES / "pbs_tmrsh", f"{self.folder}/bin/pbs_tmrsh")
        os.mkfifo(f"{self.folder}/alive")  # keepers read it: its end is ours
        self._alive = os.open(f"{self.folder}/alive", os.O_RDWR | os.O_CLOEXEC)
        self.env = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "TEST_BATCH": self.folder}

    def _write(self, book: dict[str, object]) -> None:
        Path(self.folder, "book.new").write_bytes(marshal.dumps(book))
        os.rename(f"{self.folder}/book.new", f"{self.folder}/book")

    def book(self) -> dict[str, object]:
        return marshal.loads(Path(self.folder, "book").read_bytes())

    @contextlib.contextmanager
    def _changed_book(self) -> Iterator[dict[str, object]]:
        """Under the lock that its commands and the jobs' keepers take, too."""
        with open(f"{self.folder}/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            book = self.book()
            yield book
            self._write(book)

    def set(self, **settings: object) -> None:
        """Change what it has: hold="Resources" keeps new jobs waiting."""
        with self._changed_book() as book:
            book["settings"].update(settings)

    def change(self, number: str, **attributes: object) -> None:
        """What a job that does not run is like."""
        with self._changed_book() as book:
            book["jobs"][number].update(attributes)

    def fail(self, command: str, *faults: str) -> None:
        """What the next calls of a command do wrong (batch_queue.py); "" for one that does not."""
        with self._changed_book() as book:
            book["faults"].setdefault(command, []).extend(faults)

    def jobs(self) -> list[dict[str, object]]:
        return list(self.book()["jobs"].values())

    def calls(self, command: str) -> list[str]:
        """How a command was called, each time."""
        path = Path(self.folder, "calls")
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.split()[0] == command]

    def ended(self) -> None:
        """Wait until no job runs."""
        until(lambda: not any(job["keeper"] for job in self.jobs()))

    def close(self) -> None:
        """End every job that is left; its keeper kills all of it."""
        for job in self.jobs():
            if job["keeper"]:
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(job["keeper"])
                    signal.pidfd_send_signal(fd, signal.SIGTERM)
                    assert select.select([fd], [], [], LIMIT_S)[0], f"the keeper of job {job['id']} does not end"
                    os.close(fd)
        os.close(self._alive)
        until(self._is_removed)

    def _is_removed(self) -> bool:
        """A command whose caller did not wait for its answer may be writing still."""
        shutil.rmtree(self.folder, ignore_errors=True)
        return not os.path.exists(self.folder)


@pytest.fixture
def slurm_queue():
    queue = Queue("slurm")
    yield queue
    queue.close()


@pytest.fixture
def pbs_queue():
    queue = Queue("pbs")
    yield queue
    queue.close()
