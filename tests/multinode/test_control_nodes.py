"""The control socket of a head: a launch of several hosts is listed, asked, signalled, and stopped as one."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from infini_run.control import launches
from tests.launch.test_control import PYTHON_UP, ask
from tests.launch.test_hang import PYSPY
from tests.multinode.test_many_ssh import bed, many, no_agent_left  # noqa: F401
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
TRAP = "trap 'echo got $RANK; exit 0' USR1; echo up $RANK $$; while :; do sleep 1000 & wait; done"


def row_of(command):
    """The row of the launch whose program has this word."""
    rows = json.loads(ask("--list=json"))["launches"]
    return next((row for row in rows if row["program"] and command in row["program"]), None)


@pytest.fixture
def word():
    """A word that no other launch has in its command line."""
    return f"word-{os.urandom(6).hex()}"


def up(command, count):
    """Read until so many ranks are there; their lines have labels."""
    while sum(line.partition("] ")[2].startswith("up ") for line in command.out.decode().splitlines()) < count:
        command.read_more()


def test_launch_of_four_hosts_is_one_row_and_is_signalled_and_stopped(many, word, tmp_path):  # noqa: F811
    command = many(f"--report={tmp_path / 'r.json'}", "--stop_scope=leader", "sh", "-c", TRAP, word)
    up(command, 8)
    row = row_of(word)
    assert (row["nodes"], row["node"], row["world_size"]) == (4, None, 8)
    assert row["ranks"] == {"waiting": 0, "running": 8, "ready": 0, "done": 0, "failed": 0}
    assert ask("--send=USR1", "--ranks=1,6", row["id"]) == f"{row['id']}: sent SIGUSR1 to 2 of 2 ranks\n"
    until(lambda: command.out.count(b"got") == 2 or command.read_more())
    assert ask("--send=USR1", "--ranks=8", row["id"], code=2) == f"{row['id']}: unknown rank 8; use ranks 0 to 7"
    assert ask("--stop", row["id"]) == f"{row['id']}: stopping; SIGKILL in 25 s, or now if repeated\n"
    assert command.wait() == 143
    assert row_of(word) is None
    got = sorted(line.partition("] ")[2] for line in command.out.decode().splitlines() if "got" in line)
    assert got == ["got 1", "got 6"]
    notices = json.loads((tmp_path / "r.json").read_text())["notices"]
    assert [notice.partition(") ")[2] for notice in notices] == [
        "sent SIGUSR1 to ranks 1, 6",
        "asked to stop this launch",
    ]


@PYSPY
def test_stacks_come_from_all_hosts(many, word):  # noqa: F811
    command = many(sys.executable, "-c", PYTHON_UP, word)
    up(command, 8)
    answer = json.loads(ask("--stacks=json", row_of(word)["id"]))
    assert answer["problems"] == []
    assert [stack["rank"] for stack in answer["stacks"]] == list(range(8))
    assert len({stack["host"] for stack in answer["stacks"]}) == 4
    assert all("wait_for_data" in stack["python"][0] for stack in answer["stacks"])
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_killed_head_is_lost(many, word):  # noqa: F811
    command = many("sh", "-c", TRAP, word)
    up(command, 8)
    launch_id = row_of(word)["id"]
    folder = next(
        each.folder
        for each in launches.find_launches(os.environ)
        if each.launch_id == launch_id and each.facts.node < 0
    )
    command.signal(signal.SIGKILL)
    command.wait()
    until(
        lambda: (
            [each.problem for each in launches.find_launches(os.environ) if each.launch_id == launch_id] == ["lost"]
        )
    )
    assert ask("--stop", launch_id, code=2).endswith(" lost; run infini-run --list")
    os.unlink(f"{folder}/control")
    os.rmdir(folder)
