"""Where restarts meet the rest: trace, table, binding, torchrun's logs and the report tell one story."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.display.test_chrome_trace import of, rank_slices, read
from tests.display.test_live_table import assert_in_order, heads, window  # noqa: F401
from tests.support.command import play

TELL_CPUS = ("sh", "-c", 'grep Cpus_allowed_list /proc/self/status; exec "$@"', "sh")


def second_time(*first):
    """Rank 1 fails once, after `first`."""
    return play("say=hello", "+0", "@1", *first, "exit=3", "@0", "wait", "+1", "@*", "exit=0")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="--bind=cores wants a core for each rank")
def test_a_job_that_succeeds_the_second_time_is_told_alike_by_trace_logs_and_report(infini_run, gate, tmp_path):
    held = gate()
    flags = ["--nproc_per_node=2", "--max_restarts=1", "--restart_delay=20ms", "--bind=cores"]
    flags += [f"--log_dir={tmp_path}/logs", "--log_layout=torchrun", "--console=prefix"]
    flags += [f"--trace={tmp_path}/t", f"--report={tmp_path}/r"]
    command = infini_run(*flags, *TELL_CPUS, *second_time(f"hold={held}"), gates=(held,))
    while command.out.count(b"hello") < 2:
        command.read_more()
    held.open()
    assert command.wait() == 0
    assert command.err.count(b"restart 1 of 1 in 20 ms: rank 1 ") == 1

    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["restarts"]) == (0, 1)
    assert [(e["rank"], e["exit_code"]) for e in report["earlier_failures"]] == [(1, 3)]
    cpus = []
    for rank, log in enumerate(Path(rank["log"]) for rank in report["ranks"]):
        assert log.parent.parts[-2:] == ("attempt_1", str(rank))
        folders = [log.parents[2] / f"attempt_{attempt}" / str(rank) for attempt in range(2)]
        one, other = ((folder / "stdout.log").read_text().splitlines() for folder in folders)
        assert one[0] == other[0]
        assert all(line.startswith("hello ") for line in (one[1], other[1]))
        cpus.append(one[0])
    assert cpus[0] != cpus[1]

    events, _ = read(tmp_path / "t")
    (restart,) = of(events, "restart 1")
    lives = [e for e in events if e["ph"] == "X" and e["cat"] == "rank" and "attempt" in e.get("args", {})]
    assert sorted((e["name"], e["args"]["attempt"], e["args"]["exit"]) for e in lives) == [
        ("rank 0", 0, "SIGTERM"),
        ("rank 0, attempt 1", 1, "code 0"),
        ("rank 1", 0, "code 3"),
        ("rank 1, attempt 1", 1, "code 0"),
    ]
    assert {e["args"]["attempt"]: e["ts"] < restart["ts"] for e in lives} == {0: True, 1: False}
    last = {rank["rank"]: rank["pid"] for rank in report["ranks"]}
    assert {rank: e["pid"] for rank, e in rank_slices(events).items()} == last


def test_the_signal_that_ends_a_delay_is_in_the_trace(infini_run, tmp_path):
    command = infini_run("--max_restarts=1", "--restart_delay=1000", f"--trace={tmp_path}/t", *play("exit=3"))
    command.read_error_until(b"restart 1 of 1 in ")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    events, _ = read(tmp_path / "t")
    (restart,), (told,) = of(events, "restart 1"), of(events, "signalled SIGTERM")
    assert restart["ts"] <= told["ts"]
    assert len(of(events, "sweep")) == 1


def test_each_attempt_has_a_table_and_the_restart_stands_between_them(window):  # noqa: F811
    one = window("--live", "--nproc_per_node=2", "--max_restarts=1", "--restart_delay=20ms", *second_time())
    assert one.wait() == 0
    assert heads(one) == 2
    first, second = (i for i, line in enumerate(one.text) if "RANK STATE" in line)
    (told,) = (i for i, line in enumerate(one.text) if line.startswith("infini-run: restart 1 of 1 in 20 ms: "))
    assert first < told < second
    assert any(line.split()[:2] == ["0", "stopped"] for line in one.text[first:told])
    assert any(line.split()[:3] == ["1", "exit", "3"] for line in one.text[first:told])
    assert all(any(line.split()[:2] == [rank, "done"] for line in one.text[second:]) for rank in "01")
    assert_in_order(one)
