"""--max_restarts over several hosts: all ranks of all of them end and begin together, on real sshd hosts."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.multinode.test_many_ssh import bed, lines_of, many, no_agent_left, own_lines, ring  # noqa: F401
from tests.support.hosts import agents
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

FAILS = "[ $RANK = 5 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && exit 7"


def test_all_ranks_of_all_hosts_are_started_again(many, tmp_path):  # noqa: F811
    script = f"echo at $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS $RANK $MASTER_PORT; {FAILS}; exit 0"
    flags = ("--max_restarts=3", "--restart_delay=0", "--keep_going", f"--report={tmp_path}/r")
    command = many(*flags, "sh", "-c", script)
    assert command.wait() == 0, command.err
    words = [line.split("] at ")[1].split() for line in lines_of(command)]
    assert sorted(word[:2] for word in words) == [
        [f"{count}/3", str(rank)] for count in range(3) for rank in range(8)
    ]
    assert len({word[2] for word in words}) == 3  # a port of its own for each attempt
    told = own_lines(command)
    assert [line.partition(" in ")[0] for line in told] == [f"infini-run: restart {n} of 3" for n in (1, 2)]
    assert all("rank 5 on host3 failed: exit code 7" in line for line in told)
    report = json.loads((tmp_path / "r").read_text())
    assert (report["restarts"], report["exit_code"], len(report["earlier_failures"])) == (2, 0, 2)


def test_the_last_failure_is_told_when_the_budget_is_used_up(many):  # noqa: F811
    command = many("--max_restarts=1", "--restart_delay=0", "sh", "-c", "[ $RANK = 3 ] && exit 9; exec sleep 1000")
    assert command.wait() == 9
    first, last, *_ = own_lines(command)
    assert first.startswith("infini-run: restart 1 of 1 in 0 ms: rank 3 on host2 failed: exit code 9")
    assert last.startswith("infini-run: rank 3 on host2 failed: exit code 9")
    assert last.endswith("after 1 restart")


def test_logs_are_appended_with_a_marked_line(many, tmp_path):  # noqa: F811
    flags = ("--max_restarts=2", "--restart_delay=0", "--keep_going", f"--log_dir={tmp_path}/logs")
    assert many(*flags, "sh", "-c", f"echo life $TORCHELASTIC_RESTART_COUNT; {FAILS}; exit 0").wait() == 0
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("life")] == ["life 0", "life 1", "life 2"]
    assert sum("restart 1 of 2: rank 5 on host3 failed" in line for line in lines) == 1


def test_interrupt_in_the_delay_ends_the_job(many):  # noqa: F811
    command = many("--max_restarts=1", "--restart_delay=1000", "sh", "-c", "[ $RANK = 3 ] && exit 9; exec sleep 1000")
    command.read_error_until(b"restart 1 of 1 in ")
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    assert not any("failed: exit code" in line for line in own_lines(command)[1:])


def test_a_node_that_is_lost_in_the_delay_ends_the_job(many):  # noqa: F811
    command = many("--max_restarts=1", "--restart_delay=1000", "sh", "-c", "[ $RANK = 3 ] && exit 9; exec sleep 1000")
    command.read_error_until(b"restart 1 of 1 in ")
    os.kill(next(iter(agents())), signal.SIGKILL)
    assert command.wait() == 1, command.err
    assert any("lost node" in line for line in own_lines(command))


def test_head_killed_in_the_delay_leaves_nothing(many):  # noqa: F811
    command = many("--max_restarts=1", "--restart_delay=1000", "sh", "-c", "[ $RANK = 3 ] && exit 9; exec sleep 1000")
    command.read_error_until(b"restart 1 of 1 in ")
    command.signal(signal.SIGKILL)
    command.wait()
    until(lambda: not agents())
