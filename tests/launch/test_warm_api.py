"""`run(preload=)` on this machine: an agent forks the ranks, so that the host program adopts no orphans."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

import infini_run as ir
from tests.support.processes import marked
from tests.support.waiting import until

SHOWS = "import os, sys; print(os.environ['RANK'], 'decimal' in sys.modules, os.environ['ASKED'], os.getcwd())"
PR_GET_CHILD_SUBREAPER = 37


def script(text, path):
    path.write_text(text)
    return [sys.executable, path]


def test_ranks_are_forks_of_imports(capfd, tmp_path):
    command = script(SHOWS, tmp_path / "train.py")
    report = ir.run(command, nproc_per_node=2, preload=["decimal"], env={"ASKED": "yes"}, cwd=tmp_path)
    lines = sorted(capfd.readouterr().out.splitlines())
    assert [line.split()[:6] for line in lines] == [
        ["[rank", "0]", "0", "True", "yes", str(tmp_path)],
        ["[rank", "1]", "1", "True", "yes", str(tmp_path)],
    ]
    assert (report.exit_code, report.world_size) == (0, 2)
    assert [(use.modules, use.cold_because) for use in report.preload] == [(("decimal",), "")]
    assert not marked()


def test_host_program_adopts_no_orphans(tmp_path):
    ir.run(script("", tmp_path / "train.py"), nproc_per_node=1, preload=["decimal"])
    adopts = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0) == 0
    assert adopts.value == 0


def test_failure_and_limit_are_those_of_run(tmp_path):
    with pytest.raises(ir.WorkerError, match=r"^infini-run: rank 1 on .* failed: exit code 3 "):
        ir.run(
            script("import os; os._exit(3 * int(os.environ['RANK']))", tmp_path / "train.py"),
            nproc=2,
            preload="decimal",
        )
    with pytest.raises(ir.LaunchTimeout, match="did not end within 3 s; stopped all ranks"):
        ir.run(
            script("import time; time.sleep(1000)", tmp_path / "train.py"), nproc=2, preload="decimal", timeout_s=3
        )
    assert not marked()


def test_restart_forks_again(capfd, tmp_path):
    text = "import os, sys; life = os.environ['TORCHELASTIC_RESTART_COUNT']; print(life, 'decimal' in sys.modules); "
    text += "sys.exit(life == '0')"
    report = ir.run(script(text, tmp_path / "train.py"), nproc=1, preload="decimal", max_restarts=1, restart_delay=0)
    assert (report.exit_code, report.restarts) == (0, 1)
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[rank 0] 0 True",
        "[rank 0] 1 False",
    ]  # cold: it failed at once


@pytest.mark.parametrize(
    ("preload", "command", "message"),
    [
        ("nosuch", [sys.executable, "-c", "pass"], "nosuch cannot be imported"),
        ("decimal", ["true"], "needs a Python program, and true is not one"),
    ],
)
def test_bad_preload_is_refused(preload, command, message):
    with pytest.raises(ir.UsageError, match=message):
        ir.run(command, nproc=2, preload=preload)
    assert not marked()


def test_one_of_several_launches_is_refused():
    with pytest.raises(ir.UsageError, match=r"^preload=: this is one of 2 launches, one on each node; "):
        ir.run(["train.py"], nnodes=2, node_rank=0, master_addr="127.0.0.1", preload="decimal")


def test_host_that_is_killed_leaves_nothing(tmp_path):
    """The agent ends with the host program, and its ranks with it."""
    (tmp_path / "train.py").write_text("import time; print('runs', flush=True); time.sleep(1000)")
    text = f"import infini_run as ir; ir.run(['{sys.executable}', '{tmp_path}/train.py'], nproc=2, preload='decimal')"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as host:
        assert host.stdout.readline().endswith(b"runs\n")
        host.kill()
    until(lambda: not marked())
