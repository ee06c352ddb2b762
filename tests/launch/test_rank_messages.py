"""infini_run.progress, ready and status_text: what a rank says of itself, without a line about sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import infini_run as ir
from infini_run.value_types import MARKER_VARIABLE
from tests.support.waiting import LIMIT_S, until

CLOCK_S = 0.001  # two times of one clock, each by another reading of the offset of another
SPEAKS = """
import os, sys
before = set(sys.modules)
import infini_run
infini_run.ready()
infini_run.status_text("epoch\\n3")
for step in (3, 9, 7):
    infini_run.progress(step + int(os.environ.get("RANK", "0")))
print(*sorted(set(sys.modules) - before), flush=True)
"""


def test_words_of_each_rank_are_in_the_report(infini_run, tmp_path):
    """They import nothing but `_socket`."""
    command = infini_run("--nproc_per_node=2", f"--report={tmp_path}/report", sys.executable, "-c", SPEAKS)
    assert command.wait() == 0, command.err
    imported = set(command.out.decode().split())
    assert imported <= {"infini_run", "infini_run.rank_messages", "_socket", "__future__"}
    ranks = json.loads((tmp_path / "report").read_text())["ranks"]
    assert [rank["progress"] for rank in ranks] == [9, 10]
    for rank in ranks:
        assert rank["status"] == "epoch 3"
        assert rank["start"] <= rank["ready"] <= rank["progress_time"] + CLOCK_S <= rank["end"] + 2 * CLOCK_S


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "SOCKET"}, {MARKER_VARIABLE: "x", "NOTIFY_SOCKET": "/no"}])
def test_words_do_nothing_outside_of_a_launch(tmp_path, environ):
    """A NOTIFY_SOCKET without a launch is a service manager's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/socket")
        manager.setblocking(False)
        values = {name: value.replace("SOCKET", f"{tmp_path}/socket") for name, value in environ.items()}
        clean = {name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", MARKER_VARIABLE)}
        done = subprocess.run(
            [sys.executable, "-c", SPEAKS], env=clean | values, capture_output=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
        with pytest.raises(BlockingIOError):
            manager.recv(1)


@pytest.mark.parametrize("value", [-1, 1.5, True, 2**63, "3"])
def test_progress_without_a_total_is_a_whole_number(value):
    with pytest.raises(ir.UsageError, match=r"progress\(.*\): expected a whole number from 0"):
        ir.progress(value)


def test_progress_with_a_total_is_a_status(infini_run, tmp_path):
    code = "import infini_run; infini_run.progress(2.5, of=12345678)"
    command = infini_run(f"--report={tmp_path}/report", sys.executable, "-c", code)
    assert command.wait() == 0, command.err
    (rank,) = json.loads((tmp_path / "report").read_text())["ranks"]
    assert (rank["status"], rank["progress"]) == ("2.5 of 12345678", None)


def test_launcher_that_does_not_read_is_not_waited_for(tmp_path):
    """Its queue is full, as if it was suspended: a training continues."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(f"{tmp_path}/socket")
        code = "import infini_run\nfor step in range(5000): infini_run.progress(step)\n"
        environ = {**os.environ, MARKER_VARIABLE: "x", "NOTIFY_SOCKET": f"{tmp_path}/socket"}
        assert subprocess.run([sys.executable, "-c", code], env=environ, timeout=LIMIT_S).returncode == 0
        assert launcher.recv(100) == b"PROGRESS=0"


def test_worker_reports_by_its_own_channel():
    """With the rules of this_worker()."""

    def work():
        import infini_run as ir

        ir.ready()
        ir.status_text("at work")
        ir.progress(3)
        ir.progress(1, of=2)
        try:
            ir.progress(0.5)
        except ir.UsageError as error:
            return str(error)

    assert ir.Launcher(preload=()).run(work)[0].startswith("progress(0.5): expected a whole number")


def test_progress_of_a_task_reaches_the_crew():
    class Part:
        def task(self, ctx, step):
            import infini_run as ir

            ir.progress(step, of=8)

    with ir.Crew(Part, nproc_per_node=1) as crew:
        crew.ask(5).result()
        until(lambda: [(e.done, e.of) for e in crew.events(0) if e.kind == "progress"] == [(5, 8)])
