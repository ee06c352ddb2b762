"""Hangs on one of many nodes: the rank and its stack are told, the job ends, or begins again."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys

import pytest

from tests.launch.test_waited_rank import BLAMED, EXPECTED, HANG, PYSPY, check
from tests.multinode.test_by_hand import node, port, told  # noqa: F401
from tests.multinode.test_elastic_ssh import launcher_of
from tests.multinode.test_many_ssh import bed, many, no_agent_left, own_lines  # noqa: F401

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
HANGS = ("--hang_timeout=500ms", "--on_hang=stop", "--grace=1")
SLEEPS = "[ $RANK = 1 ] && exec sleep 1000; while :; do echo busy; sleep 0.1; done"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (HANGS, "rank 1 on host2 hung: "),
        (("--ready_timeout=500ms", "--grace=1"), "rank 0 on host1 was not ready after 500 ms"),
    ],
    ids=["hang", "ready"],
)
def test_a_rank_that_hangs_on_one_host_is_told_with_what_it_waits_in(many, tmp_path, flags, words):  # noqa: F811
    if words.startswith("rank 0"):
        script = '[ $RANK = 1 ] && python3 -c \'import os, socket; socket.socket(1, 2).sendto(b"READY=1", '
        script += 'os.environ["NOTIFY_SOCKET"].replace("@", "\\0"))\'; exec sleep 1000'
    else:
        script = SLEEPS
    command = many(*flags, f"--report={tmp_path}/r", "sh", "-c", script, nproc=1, hosts="host1,host2")
    assert command.wait() == 1, command.err
    lines = own_lines(command)
    first = next(at for at, line in enumerate(lines) if line.startswith(f"infini-run: {words}"))
    assert any(line.startswith("  in: sleep (") for line in lines[first:])
    report = json.loads((tmp_path / "r").read_text())
    assert report["exit_code"] == 1
    assert report["first_failure"] == int(words.split()[1])
    assert {look["rank"] for look in report["snapshots"]} <= {0, 1}
    assert report["snapshots"][0]["processes"][0]["threads"]


def test_by_hand_too(node):  # noqa: F811
    commands = [node(rank, "sh", "-c", SLEEPS, nproc=1, flags=HANGS) for rank in range(2)]
    assert [command.wait() for command in commands] == [1, 1]
    assert any(line.startswith("infini-run: rank 1 on ") and " hung: " in line for line in told(commands[0]))


def test_after_a_hang_all_ranks_of_all_hosts_start_again(many, tmp_path):  # noqa: F811
    script = f"[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; {SLEEPS}"
    flags = (*HANGS, "--max_restarts=1", "--restart_delay=0", f"--report={tmp_path}/r")
    command = many(*flags, "sh", "-c", script, nproc=1, hosts="host1,host2")
    assert command.wait() == 0, command.err
    assert any("restart 1 of 1 in 0 ms: rank 1 on host2 hung: " in line for line in own_lines(command))
    report = json.loads((tmp_path / "r").read_text())
    assert (report["restarts"], report["exit_code"]) == (1, 0)
    assert report["earlier_failures"][0]["watchdog_reason"].startswith("hung: ")


# ---- whom the others wait for, over all hosts


@PYSPY
@pytest.mark.parametrize("kind", [kind for kind in EXPECTED if kind != "terminal"])
def test_hang_over_four_hosts_is_folded_at_the_head(many, tmp_path, kind):  # noqa: F811
    """Rank 2 is on host3; each rank is alone on its host."""
    locked, report = tmp_path / "locked", tmp_path / "report"
    flags = ("--hang_timeout=1", "--on_hang=stop", "--grace=1", f"--report={report}")
    with locked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = many(*flags, sys.executable, HANG, kind, "2", locked, nproc=1)
        assert command.wait() == 1, command.err
    lines = check("\n".join(own_lines(command)), kind)
    if EXPECTED[kind][0] == BLAMED:
        assert lines[1].startswith("  rank 2 on host3 ")
        assert lines[2].startswith("  ranks 0-1,3 on 3 hosts ")
        first = json.loads(report.read_text())["first_failure"]
        assert first == 2 or kind == "left_early", "that one has not failed"


@PYSPY
def test_hang_over_hosts_is_reported_once_and_the_job_continues(many):  # noqa: F811
    command = many("--hang_timeout=1", "--console=none", sys.executable, HANG, "loader", "2", nproc=1)
    command.read_error_until(b"ranks 0-1,3 on 3 hosts")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert command.err.count(b": 3 of 4 ranks wait for rank 2\n") == 1


@PYSPY
def test_host_that_does_not_answer_keeps_others_from_being_named(many):  # noqa: F811
    """Rank 2 would be named, but nobody knows what rank 3 does. The head waits 15 s for its host."""
    command = many("--hang_timeout=3", "--node_timeout=120", sys.executable, HANG, "loader", "2", nproc=1)
    agent = launcher_of(3)
    os.kill(agent, signal.SIGSTOP)
    try:
        command.read_error_until(b"did not answer")
    finally:
        os.kill(agent, signal.SIGCONT)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert b": 3 ranks are in 2 places, and host4 did not answer\n" in command.err
    assert b"wait for rank" not in command.err


STANDS = """
import infini_run, os
def all_reduce():
    while True: pass
def load_batch():
    while True: pass
if os.environ["RANK"] == "0":
    infini_run.progress(1)
load_batch() if os.environ["RANK"] == "1" else all_reduce()
"""


@PYSPY
def test_progress_of_one_rank_stands_for_all_hosts(many, tmp_path):  # noqa: F811
    """Rank 0 alone reports progress, and rank 1 on another host is waited for: all of them spin."""
    (tmp_path / "train.py").write_text(STANDS)
    flags = ("--progress_timeout=1", "--on_hang=stop", "--grace=1")
    command = many(*flags, sys.executable, tmp_path / "train.py", nproc=1, hosts="host[1-3]")
    assert command.wait() == 1, command.err
    lines = own_lines(command)
    assert ": 2 of 3 ranks wait for rank 1; 2 others were stopped" in lines[-3]
    assert lines[-2].startswith("  rank 1 on host2 ")
