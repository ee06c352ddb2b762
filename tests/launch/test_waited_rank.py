"""Whom a hanging job waits for: the kinds of hang, and the sentence for each."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from infini_run.watchdog.pyspy import find_pyspy
from tests.launch.test_terminal import terminal  # noqa: F401
from tests.support.command import CHILDREN

PYSPY = pytest.mark.skipif(not find_pyspy(os.environ), reason="py-spy is not installed")
HOST = os.uname().nodename
HANG = f"{CHILDREN}/hang.py"
_LINES = Path(HANG).read_text().splitlines()
ALL_REDUCE = f"all_reduce (hang.py:{_LINES.index('def all_reduce():') + 2})"
BLAMED = "3 of 4 ranks wait for rank 2"
NOBODY = "4 ranks are in 2 places, and none is the odd one out"
EXPECTED = {  # the sentence, and where the ranks of each group are
    "loader": (BLAMED, {"2": "loader (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "left_early": (BLAMED, {"2": "exited with code 0, ", "0-1,3": "all_reduce (hang.py:"}),
    "two_collectives": (NOBODY, {"0,2": "all_gather (hang.py:", "1,3": "all_reduce (hang.py:"}),
    "suspended": (
        f"{BLAMED}, which is suspended by a signal",
        {"2": "all_reduce (hang.py:", "0-1,3": "all_reduce (hang.py:"},
    ),
    "uninterruptible": (BLAMED, {"2": "uninterruptible (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "terminal": (BLAMED, {"2": "terminal (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "dead_child": (BLAMED, {"2": "dead_child (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "python_deadlock": (BLAMED, {"2": "python_deadlock (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "in_threads": (BLAMED, {"2": "python_deadlock (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "beside_threads": (BLAMED, {"2": ", in python_deadlock (hang.py:", "0-1,3": ", in all_reduce (hang.py:"}),
    "native_deadlock": (BLAMED, {"2": "native_deadlock (hang.py:", "0-1,3": "all_reduce (hang.py:"}),
    "spinning": (f"{BLAMED}, which uses CPU", {"2": "spinning (hang.py", "0-1,3": "all_reduce (hang.py:"}),
    "writing": (f"{BLAMED}, which wrote ", {"2": "writing (hang.py", "0-1,3": "all_reduce (hang.py:"}),
    "other_caller": (BLAMED, {"2": ", in other_caller (hang.py:", "0-1,3": ", in main (hang.py:"}),
    "slow_link": ("all 4 ranks wait in all_reduce (hang.py:", {"0-3": "all_reduce (hang.py:"}),  # on hosts only
    "file_lock": ("all 4 ranks wait in file_lock (hang.py:", {"0-3": "file_lock (hang.py:"}),
}
KINDS = {  # the causes that must be told apart, each on one node and on hosts
    *("loader", "left_early", "two_collectives", "suspended", "uninterruptible", "terminal", "dead_child"),
    *("python_deadlock", "native_deadlock", "spinning", "file_lock", "slow_link"),
}
BESIDE = {"suspended": ", suspended by a signal", "uninterruptible": ", in the kernel: ", "writing": ", output "}
ALIVE = ("spinning", "writing")


def test_each_kind_has_its_sentence():
    innocent = {kind for kind in KINDS if "rank 2" not in EXPECTED[kind][0]}
    assert innocent == {"two_collectives", "file_lock", "slow_link"}
    assert len(KINDS) == 12


def check(text, kind, *, hosts=HOST):
    """The report has the sentence, the groups, the smallest first, and ten lines at most."""
    sentence, groups = EXPECTED[kind]
    lines = text.splitlines()
    first = max(at for at, line in enumerate(lines) if ": no " in line and "for " in line and "stopping" not in line)
    assert f": {sentence}" in lines[first], text
    assert len(lines) - first <= 10
    for (ranks, place), line in zip(groups.items(), lines[first + 1 :], strict=False):
        assert line.split(" on ")[0] == f"  rank{'s' if len(ranks) > 1 else ''} {ranks}", text
        assert place in line, text
    assert BESIDE.get(kind, "") in lines[first + 1], text
    assert (" by ranks 0-1,3: " in lines[first]) == (kind in ALIVE), text
    return lines[first:]


@PYSPY
@pytest.mark.rows(5)  # tests/multinode/test_many_hang.py has each kind on hosts
@pytest.mark.parametrize("kind", [kind for kind in EXPECTED if kind not in ("terminal", "slow_link")])
def test_hang_is_blamed_on_the_rank_that_the_others_wait_for(infini_run, tmp_path, kind):
    logs, report, locked = tmp_path / "logs", tmp_path / "report", tmp_path / "locked"
    flags = ("--nproc_per_node=4", "--hang_timeout=2", "--on_hang=stop", f"--log_dir={logs}", f"--report={report}")
    with locked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = infini_run(*flags, "--console=none", "--grace=1", sys.executable, HANG, kind, "2", locked)
        assert command.wait() == 1, command.err
    lines = check(command.err.decode(), kind)
    left = {"left_early": "3 ranks", **dict.fromkeys(("two_collectives", "file_lock"), "4 ranks")}
    stopped = f"; {left.get(kind, '3 others')} were stopped"
    assert lines[0].endswith(stopped), lines
    assert f"all stacks: {logs}/hang_*.txt" in lines[-1]
    content = json.loads(report.read_text())
    named = [rank["rank"] for rank in content["ranks"] if rank["watchdog_reason"]]
    if "rank 2" in EXPECTED[kind][0] and kind != "left_early":
        assert (named, content["first_failure"]) == ([2], 2)
        assert f"  log of rank 2: {logs}/rank_2.log   " in lines[-1]
    assert all(shot["sure"] for shot in content["snapshots"])


@PYSPY
def test_rank_that_failed_is_named_with_its_code(infini_run):
    """With --keep_going the others go on, and wait for it."""
    flags = ("--nproc_per_node=4", "--keep_going", "--hang_timeout=2", "--console=none")
    command = infini_run(*flags, sys.executable, HANG, "failed", "2")
    command.read_error_until(b"all_reduce (hang.py:")
    command.signal(signal.SIGTERM)
    assert command.wait() == 3, command.err
    lines = command.err.decode().splitlines()
    assert lines[1].startswith(f"  rank 2 on {HOST} "), lines
    assert "  failed (exit code 3), " in lines[1]
    assert lines[2].startswith(f"  ranks 0-1,3 on {HOST}  all_reduce (hang.py:")


@PYSPY
def test_hang_after_a_failure_blames_the_rank_that_failed(infini_run, tmp_path):
    """No rank that only waits counts as failed, and the places are in the report."""
    report = tmp_path / "report"
    flags = ("--nproc_per_node=4", "--keep_going", "--hang_timeout=2", "--on_hang=stop", "--console=none")
    command = infini_run(*flags, "--grace=1", f"--report={report}", sys.executable, HANG, "failed", "2")
    assert command.wait() == 3, command.err
    lines = command.err.decode().splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith(f"infini-run: rank 2 on {HOST} failed: "))
    assert "; then no output and no CPU used for " in lines[at] or "; then no writes and no CPU used" in lines[at]
    assert lines[at].endswith(": 3 of 4 ranks wait for rank 2; 3 others were stopped")
    assert "  failed (exit code 3), " in lines[at + 1]
    assert lines[at + 2].startswith(f"  ranks 0-1,3 on {HOST}  all_reduce (hang.py:")
    assert len(lines) - at <= 10
    ranks = json.loads(report.read_text())["ranks"]
    assert [(rank["failed"], rank["watchdog_reason"]) for rank in ranks if rank["rank"] != 2] == [(False, None)] * 3


@PYSPY
def test_rank_that_sent_the_trigger_is_named_beside_the_one_that_is_waited_for(infini_run, tmp_path):
    flags = ("--nproc_per_node=4", "--on_hang=stop", "--grace=1", "--console=none")
    command = infini_run(*flags, sys.executable, HANG, "triggered", "2", tmp_path / "there")
    assert command.wait() == 1, command.err
    assert b"infini-run: rank 3 sent WATCHDOG=trigger: 3 of 4 ranks wait for rank 2; " in command.err


@PYSPY
def test_rank_that_waits_for_the_terminal_is_blamed(terminal):  # noqa: F811
    terminal.run("--nproc_per_node=4", "--hang_timeout=2", "--on_hang=stop", sys.executable, HANG, "terminal", "2")
    assert terminal.code() == 1
    check(terminal.seen.decode().replace("\r", ""), "terminal")


@PYSPY
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.xdist_group("torch")
def test_rank_that_skips_an_all_reduce_of_torch_is_named(infini_run):
    flags = ("--nproc_per_node=4", "--hang_timeout=3", "--on_hang=stop", "--console=none")
    command = infini_run(*flags, sys.executable, f"{CHILDREN}/hang_ddp.py")
    assert command.wait() == 1, command.err
    lines = command.err.decode().splitlines()
    assert ": 3 of 4 ranks wait for rank 2; " in lines[1]
    assert lines[2].startswith(f"  rank 2 on {HOST} ")
    assert "save_metrics (hang_ddp.py:" in lines[2]
    assert lines[3].startswith(f"  ranks 0-1,3 on {HOST}  all_reduce (hang_ddp.py:")
