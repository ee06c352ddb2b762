"""The control socket of a head: a launch of several hosts is listed, asked, signalled, and stopped as one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from infini_run.control import launches
from infini_run.control.client import ask as ask_launch
from tests.launch.test_control import PYTHON_UP, all_listed, ask, found
from tests.launch.test_hang import PYSPY
from tests.multinode.test_many_ssh import bed, many, no_agent_left  # noqa: F401
from tests.support.command import COMMAND, Command, play
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them
TRAP = "trap 'echo got $RANK; exit 0' USR1; echo up $RANK $$; while :; do sleep 1000 & wait; done"


def row_of(command):
    """The row of the launch whose program has this word."""
    return next((row for row in all_listed() if row["program"] and command in row["program"]), None)


@pytest.fixture
def word():
    """A word that no other launch has in its command line."""
    return f"word-{os.urandom(6).hex()}"


def up(command, count):
    """Read until so many ranks are there; their lines have labels."""
    while sum(line.partition("] ")[2].startswith("up ") for line in command.out.decode().splitlines()) < count:
        command.read_more()


def test_report_names_who_killed_a_rank_of_another_host(many, word, tmp_path):  # noqa: F811
    command = many(f"--report={tmp_path / 'r.json'}", "sh", "-c", TRAP, word)
    up(command, 8)
    ask("--send=KILL", "--ranks=6", row_of(word)["id"])
    assert command.wait() == 137
    sender = json.loads((tmp_path / "r.json").read_text())["ranks"][6]["sent_by"]
    text = command.err.decode()
    assert re.search(rf" failed: killed by SIGKILL \(pid \d+, after [\d.]+ m?s\), sent by {re.escape(sender)};", text)
    assert "dmesg" not in text


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


def test_second_stop_kills_on_all_hosts(many, word):  # noqa: F811
    program = "trap '' TERM; echo up $RANK $$; while :; do sleep 1000 & wait; done"
    command = many("sh", "-c", program, word)
    up(command, 8)
    launch = found(row_of(word)["pid"])
    assert [ask_launch(launch, "stop")["text"] for _ in range(2)][1] == "killing what is left"
    assert command.wait() == 143
    assert b"SIGTERM again: killing what is left" in command.err
    assert b"did not exit within" not in command.err


def test_launch_of_four_hosts_is_one_row_after_a_restart(many, word):  # noqa: F811
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; echo up $RANK; exec sleep 1000"
    command = many("--max_restarts=1", "--restart_delay=0", "sh", "-c", script, word)
    up(command, 8)
    rows = all_listed()
    (launch_id,) = [row["id"] for row in rows if row["program"] and word in row["program"]]
    for name in (launch_id, launch_id[:-1], f"{launch_id}.1"):
        assert ask("--send=CONT", name) == f"{launch_id}: sent SIGCONT to 8 of 8 ranks\n"
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_list_counts_ranks_that_exited_while_their_host_runs_others(many, word):  # noqa: F811
    script = "[ $RANK = 0 ] && exit 3; [ $RANK = 3 ] && exit 0; echo up $RANK; exec sleep 1000"
    command = many("--keep_going", "sh", "-c", script, word)
    up(command, 6)
    until(lambda: row_of(word)["ranks"] == {"waiting": 0, "running": 6, "ready": 0, "done": 1, "failed": 1})
    command.signal(signal.SIGTERM)
    assert command.wait() == 3


def test_table_of_all_hosts_shows_the_rank_that_hangs(many, word):  # noqa: F811
    """Until that uses CPU again."""
    spins = "spin() { while :; do :; done; }"
    script = f"{spins}; trap spin USR1; echo up $RANK $$; [ $RANK = 1 ] || spin; sleep 1000 & wait"
    command = many("--hang_timeout=1", "sh", "-c", script, word, nproc=1, hosts="host1,host2")
    command.read_error_until(b"rank 1 on host2 hung: no")
    launch = row_of(word)["id"]
    title, _, *rows = ask("--top", launch).splitlines()
    assert title.endswith(": 1 hung, 1 running")
    assert [row.split()[2] for row in rows] == ["running", "hung"]
    ask("--send=USR1", "--ranks=1", launch)
    until(lambda: ask("--top", launch).partition("\n")[0].endswith(": 2 running"))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_follower_gets_the_lines_of_all_hosts(many, word, tmp_path):  # noqa: F811
    """And of the named ranks alone, also where the head shows equal lines once."""
    command = many("--console=fold", "--stop_scope=leader", "sh", "-c", TRAP, word)
    up(command, 8)
    launch_id = row_of(word)["id"]
    followers = [
        Command([*COMMAND, "--follow", *words, launch_id])
        for words in ((), ("--ranks=1,6",), ("--tail=3", "--ranks=9"))
    ]
    try:
        for follower in followers[:2]:
            follower.read_error_until(b"ends this view, not the job\n")
        assert followers[2].wait() == 2
        ask("--send=USR1", launch_id)
        assert command.wait() == 0
        assert [follower.wait() for follower in followers[:2]] == [0, 0]
        lines = [sorted(line.partition("] ")[2] for line in each.out.decode().splitlines()) for each in followers]
        assert lines == [[f"got {rank}" for rank in range(8)], ["got 1", "got 6"], []]
        assert followers[2].err.decode().endswith(": unknown rank 9; use ranks 0 to 7\n")
    finally:
        for follower in followers:
            follower.close()


TALK = (
    "trap 'echo got $RANK; exit 0' USR1; echo old; echo err >&2; echo up $RANK $$; while :; do sleep 9 & wait; done"
)


@pytest.mark.parametrize("has_logs", [True, False], ids=["logs", "last words"])
def test_follower_gets_earlier_lines_of_all_hosts(many, word, tmp_path, has_logs):  # noqa: F811
    flags = [f"--log_dir={tmp_path}", "--console=prefix"] if has_logs else []
    command = many(*flags, "--stop_scope=leader", "sh", "-c", TALK, word)
    up(command, 8)
    if has_logs:
        os.utime(tmp_path / "rank_5.log", (0, 0))
    follower = Command([*COMMAND, "--follow", "--tail=2", "--ranks=1,5,6", row_of(word)["id"]])
    try:
        follower.read_error_until(b"ends this view, not the job\n")
        up(follower, 2 if has_logs else 0)
        follower.read_until(b"err" if has_logs else b":6 err] err\n")
        ask("--send=USR1", row_of(word)["id"])
        assert command.wait() == 0
        assert follower.wait() == 0
        labels = {}
        for line in follower.out.decode().splitlines():
            label, _, text = line.partition("] ")
            labels.setdefault(label.partition(":")[2], []).append(text.partition(" ")[0])
        if has_logs:
            assert labels == {
                "1 err": ["err"],
                "1": ["up", "got"],
                "5": ["got"],
                "6 err": ["err"],
                "6": ["up", "got"],
            }
            assert f"{tmp_path}/rank_5.log is the log of an older launch here" in follower.err.decode()
        else:
            assert labels == {
                f"{rank}{kind}": [text] for rank in (1, 5, 6) for kind, text in ((" err", "err"), ("", "got"))
            }
            assert "keeps only the last 16 KiB of stderr" in follower.err.decode()
    finally:
        follower.close()


def test_table_has_the_ranks_of_all_hosts(many, word):  # noqa: F811
    command = many("sh", "-c", TRAP, word)
    up(command, 8)
    head, columns, *rows = ask("--top", row_of(word)["id"], env={**os.environ, "COLUMNS": "120"}).splitlines()
    assert head.startswith("infini-run, 8 ranks on 4 nodes, ")
    assert head.endswith(": 8 running")
    assert columns.split()[:4] == ["RANK", "HOST", "STATE", "PID"]
    assert [int(row.split()[0]) for row in rows] == list(range(8))
    assert len({row.split()[1] for row in rows}) == 4
    assert [row.split("up ")[1].split()[0] for row in rows] == list("01234567")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@PYSPY
def test_bundle_has_files_of_all_hosts(many, word, tmp_path):  # noqa: F811
    command = many(f"--trace={tmp_path / 'trace.json'}", sys.executable, "-c", PYTHON_UP, word)
    up(command, 8)
    folder = tmp_path / "bundle"
    ask(f"--bundle={folder}", row_of(word)["id"])
    of_nodes = [f"{name}_node_{node}.json" for node in range(4) for name in ("report", "environment")]
    assert sorted(os.listdir(folder)) == sorted(["launch.json", "report.json", "trace.json", "stacks.txt", *of_nodes])
    ranks = [json.loads((folder / f"report_node_{node}.json").read_text())["ranks"] for node in range(4)]
    assert [each["rank"] for of in ranks for each in of] == list(range(8))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


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
    later_s = time.time() + 3600
    os.utime(folder, (later_s, later_s))  # else another test's launch may remove it after a minute
    command.signal(signal.SIGKILL)
    command.wait()
    until(
        lambda: (
            [each.problem for each in launches.find_launches(os.environ) if each.launch_id == launch_id] == ["lost"]
        )
    )
    assert ask("--stop", launch_id, code=2).endswith(" lost; run infini-run --list")
    assert f"{launch_id} " in ask("--list")
    os.utime(folder, (0, 0))  # as after a minute; from now on any launch or list of this user may remove it
    ask("--list")
    assert f"{launch_id} " not in ask("--list")
    assert not os.path.exists(folder)


def test_progress_of_hosts_is_in_the_list(many, word):  # noqa: F811
    command = many(*play("@6", "notify=PROGRESS=12", "@*", "notify=PROGRESS=5", "say=up", "wait"), word)
    until(lambda: (row := row_of(word)) is not None and row["progress"] == 12)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


def test_launch_of_hosts_between_two_attempts_is_listed(many, word):  # noqa: F811
    command = many("--max_restarts=1", "--restart_delay=3600", "sh", "-c", "exit 3", word)
    until(lambda: (row := row_of(word)) is not None and row["state"] == "restarting")
    row = row_of(word)
    assert (row["nodes"], row["world_size"]) == (4, 8)
    assert ask("--stacks", row["id"]) == "no rank runs\n"
    assert ask("--stop", row["id"]).startswith(f"{row['id']}: stopping")
    assert command.wait() == 143
    assert row_of(word) is None
