"""Slow ranks of real jobs: the line at the end, the report, the trace, and the table."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from tests.display.test_chrome_trace import validate
from tests.display.test_live_table import window  # noqa: F401
from tests.support.command import CHILDREN

HOST = os.uname().nodename
LOOP = (sys.executable, f"{CHILDREN}/slow_loop.py")
TIMES = ("0.11", "0.28")  # of a step, and of the slow rank: as a sample of it is at least 0.1 s, and 16 are needed


def named(command):
    return [line for line in command.err.decode().splitlines() if " slow: " in line]


def check(content, *, waits, rank=2, steps=15):
    (slow,) = content["slow_ranks"]
    assert slow["rank"] == rank
    assert slow["step_s"] > 1.5 * slow["others_step_s"] > 0.1
    assert slow["steps"] >= steps
    assert (slow["waited_s"] > 1.0) is waits


@pytest.mark.parametrize("rank", [0, 2])
def test_rank_that_the_others_wait_for_in_each_step_is_named(infini_run, tmp_path, rank):
    report, trace = tmp_path / "report", tmp_path / "trace"
    flags = ("--nproc_per_node=4", "--standalone", f"--report={report}", f"--trace={trace}")
    command = infini_run(*flags, *LOOP, "meet", rank, "36", *TIMES)
    assert command.wait() == 0, command.err
    (line,) = named(command)
    assert re.match(
        rf"infini-run: rank {rank} on {HOST} was slow: \d+ ms a step, others \d+ ms; the others waited \d", line
    )
    check(json.loads(report.read_text()), waits=True, rank=rank)
    events = validate(json.loads(trace.read_text()))
    counts = [event["args"]["PROGRESS"] for event in events if event["name"] == "progress"]
    assert sorted(set(counts)) == list(range(1, 37))
    marks = {(event["name"], event["pid"]) for event in events if "slow" in event["name"]}
    (pid,) = {event["pid"] for event in events if event["ph"] == "X" and event["name"] == f"rank {rank}"}
    assert ("slow", pid) in marks
    assert {marked for _, marked in marks} == {pid}, (
        "a busy machine may slow the others for a while, but they are not"
    )


def test_rank_that_is_slow_by_itself_is_named(infini_run, tmp_path):
    """Nobody waits: its own steps take longer."""
    report = tmp_path / "report"
    flags = ("--nproc_per_node=4", "--standalone", f"--report={report}")
    command = infini_run(*flags, *LOOP, "apart", "2", "28", *TIMES)
    assert command.wait() == 0, command.err
    (line,) = named(command)
    assert re.fullmatch(rf"infini-run: rank 2 on {HOST} was slow: \d+ ms a step, others \d+ ms", line)
    check(json.loads(report.read_text()), waits=False)


def test_nobody_is_named_when_ranks_report_after_they_met(infini_run, tmp_path):
    """All report at the same moment: who was late cannot be known, and no innocent rank is named."""
    report = tmp_path / "report"
    flags = ("--nproc_per_node=4", "--standalone", f"--report={report}")
    command = infini_run(*flags, *LOOP, "after", "2", "28", *TIMES)
    assert command.wait() == 0, command.err
    assert (named(command), json.loads(report.read_text())["slow_ranks"]) == ([], [])


def test_rank_is_compared_with_those_of_its_program(infini_run, tmp_path):
    """A sampler's step is not a trainer's. Rank 3 is b 2."""
    report = tmp_path / "report.json"
    trainer = ["--program=a", "--nproc_per_node=1", *LOOP, "apart", "9", "18", "0.4", "0.4"]
    sampler = ["--program=b", "--nproc_per_node=3", *LOOP, "apart", "2", "28", *TIMES]
    command = infini_run(f"--report={report}", *trainer, ":", *sampler)
    assert command.wait() == 0, command.err
    (line,) = named(command)
    assert re.fullmatch(rf"infini-run: b 2 on {HOST} was slow: \d+ ms a step, others \d+ ms", line)
    assert [slow["rank"] for slow in json.loads(report.read_text())["slow_ranks"]] == [3]


def test_slow_rank_is_named_when_the_job_fails(infini_run):
    """A line below what the failure takes."""
    script = f'{LOOP[0]} {LOOP[1]} "$@"; exit 3'
    command = infini_run("--nproc_per_node=4", "--standalone", "sh", "-c", script, "sh", "meet", "2", "36", *TIMES)
    assert command.wait() == 3
    assert command.err.decode().splitlines()[-1] == named(command)[0]


def test_table_shows_progress_with_its_rate_and_who_is_slow(window):  # noqa: F811
    one = window("--live", "--standalone", "--nproc_per_node=4", *LOOP, "meet", "2", "36", *TIMES)
    one.see(lambda: one.row(2)[1:2] == ["slow"])
    assert "PROGRESS" in next(line for line in one.text if "RANK STATE" in line)
    assert all(one.row(rank)[1] == "running" for rank in (0, 1, 3))
    words = one.row(0)
    at = next(at for at, word in enumerate(words) if word.endswith("/s"))
    assert 0 < int(words[at - 1]) <= 36
    assert 1.0 < float(words[at].removesuffix("/s")) < 5.0
    assert one.wait() == 0
    assert all("36" in one.row(rank) for rank in range(4))
    assert any(line.startswith("infini-run: rank 2 on ") for line in one.text)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.xdist_group("torch")
def test_slow_loader_of_a_ddp_training_is_named(infini_run, tmp_path):
    report = tmp_path / "report"
    command = infini_run(
        "--nproc_per_node=4",
        "--standalone",
        "--console=none",
        f"--report={report}",
        sys.executable,
        f"{CHILDREN}/slow_ddp.py",
    )
    assert command.wait() == 0, command.err
    (line,) = named(command)
    assert line.startswith(f"infini-run: rank 2 on {HOST} was slow: ")
    check(json.loads(report.read_text()), waits=True)
