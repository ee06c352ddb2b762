"""Nodes that are lost: who is told to be the reason, and that report, exit code and words say the same."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess

import pytest

from tests.multinode.test_by_hand import handles, node, port, ring, told  # noqa: F401
from tests.multinode.test_elastic_ssh import launcher_of, process_of
from tests.multinode.test_many_ssh import bed, cabled_bed, many, no_agent_left, own_lines  # noqa: F401
from tests.support.command import COMMANDS_END_SOON
from tests.support.hosts import agents
from tests.support.processes import lead_group, marked, processes, state_of, written
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them


def test_a_node_is_lost_from_when_it_was_last_heard(node, bell, tmp_path):  # noqa: F811
    """The usual order: collective operations of other ranks fail before the silence is long enough."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    fail = f"[ $RANK = 0 ] && {{ read x < {shlex.quote(str(gate))}; echo no peer >&2; exit 7; }}; exec sleep 1000"
    flags = ("--node_timeout=3", "--grace=1", f"--report={tmp_path}/r")
    commands = [node(rank, *ring(bell, fail), flags=flags) for rank in range(2)]
    bell.hear(4)
    commands[1].suspend()
    gate.write_text("\n")
    assert commands[0].wait() == 1
    lines = told(commands[0])
    assert "node 1 (" in lines[0]
    assert ": no message from it for 3 s (--node_timeout)" in lines[0]
    assert "rank 0 on " in lines[1]
    assert "failed: exit code 7" in lines[1]
    assert lines[2] == "  | no peer"
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["first_failure"], report["world_size"]) == (1, 2, 4)
    assert f"infini-run: {report['error']}" == lines[0]
    assert report["lost"] == [report["error"]]
    assert [(rank["rank"], rank["lost"], rank["failed"]) for rank in report["ranks"]] == [
        (0, False, True), (1, False, False), (2, True, True), (3, True, True)
    ]  # fmt: skip
    commands[1].signal(signal.SIGCONT)
    commands[1].wait()


def test_a_node_is_lost_before_a_rank_that_its_loss_ends_though_the_head_reads_both_late(many, bell, tmp_path):  # noqa: F811
    """The last that a node has sent is no younger because a busy head reads it late. srun ends the other ranks so."""
    gates = [tmp_path / f"gate{rank}" for rank in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    speak = f"read line < {shlex.quote(str(tmp_path))}/gate$RANK; echo $line; exec sleep 1000"
    head = many(f"--report={tmp_path}/r", "--grace=1", *ring(bell, speak), hosts="host[1-2]", nproc=1)
    bell.hear(2)
    ranks = [process_of(rank) for rank in range(2)]
    theirs = [processes()[pid][0] for pid in ranks]
    head.suspend()
    for rank in (1, 0):  # the head will read first what came first
        before = written(theirs[rank])
        gates[rank].write_text("the last\n")
        until(lambda agent=theirs[rank], before=before: written(agent) > before)
    os.kill(theirs[0], signal.SIGKILL)
    before = written(theirs[1])
    os.kill(ranks[1], signal.SIGTERM)
    until(lambda: written(theirs[1]) > before)
    head.signal(signal.SIGCONT)
    assert head.wait() == 1
    lines = own_lines(head)
    assert lines[0].startswith("infini-run: lost node 0 (host1)")
    assert "rank 1 on host2" in lines[1]
    assert "SIGTERM" in lines[1]
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["first_failure"], report["error"]) == (1, 0, report["lost"][0])
    assert [(rank["lost"], rank["failed"]) for rank in report["ranks"]] == [(True, True), (False, True)]


def test_the_rank_that_failed_first_is_named_though_the_head_reads_both_late(many, bell, tmp_path):  # noqa: F811
    """And the other one first: its node had sent output before."""
    gates = [tmp_path / f"gate{rank}" for rank in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    gate = f"exec 3<> {shlex.quote(str(tmp_path))}/gate$RANK"  # for writing too: then it has no end
    fail = f"{gate}; read line <&3; echo $line; read line <&3; exit $((7 + RANK))"
    head = many(f"--report={tmp_path}/r", "--grace=1", *ring(bell, fail), hosts="host[1-2]", nproc=1)
    bell.hear(2)
    theirs, pids = [launcher_of(rank) for rank in range(2)], [process_of(rank) for rank in range(2)]
    gates[0].write_text("0\n")
    head.read_until(b"0\n")
    head.suspend()
    for rank, fails in ((1, False), (0, True), (1, True)):  # 1 speaks
        before = written(theirs[rank])
        gates[rank].write_text("1\n")
        until(lambda agent=theirs[rank], before=before: written(agent) > before)
        until(lambda pid=pids[rank], fails=fails: not fails or pid not in processes())  # a late heartbeat was written
    head.signal(signal.SIGCONT)
    assert head.wait() == 7
    assert "rank 0 on host1" in own_lines(head)[0]
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["first_failure"]) == (7, 0)


def test_a_rank_that_failed_while_all_nodes_were_there_is_to_blame(node, bell, tmp_path):  # noqa: F811
    """And a node that is lost after that is told of, too."""
    tells, stays = f"trap 'echo $RANK has got TERM > {shlex.quote(bell.path)}' TERM", "while :; do sleep 0.1; done"
    flags = ("--stdin=0", "--node_timeout=3", "--grace=1000")
    then = f"[ $RANK = 0 ] && {{ read x; exit 7; }}; [ $RANK = 2 ] || exec sleep 1000; {stays}"
    words = ring(bell, then, f"[ $RANK != 2 ] || {tells}")
    head = node(0, *words, flags=(*flags, f"--report={tmp_path}/r"), stdin=subprocess.PIPE)
    joiner = node(1, *words, flags=flags)
    bell.hear(4)
    head.process.stdin.write(b"\n")
    head.process.stdin.flush()
    assert bell.hear(1) == ["2 has got TERM"]
    joiner.suspend()
    assert head.wait() == 7
    lines = told(head)
    assert "rank 0 on " in lines[0]
    assert "failed: exit code 7" in lines[0]
    assert "node 1 (" in lines[-1]
    assert ": no message from it for 3 s (--node_timeout)" in lines[-1]
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["first_failure"], report["error"]) == (7, 0, None)
    assert len(report["lost"]) == 1
    assert [rank["failed"] for rank in report["ranks"]] == [True, False, False, False]
    joiner.signal(signal.SIGKILL)
    joiner.wait()
    until(lambda: not marked())


def test_a_node_that_is_lost_while_a_signal_ends_the_job_is_told_in_one_line(node, bell, tmp_path):  # noqa: F811
    flags = ("--node_timeout=3", "--grace=7", f"--report={tmp_path}/r")
    tells, stays = f"trap 'echo $RANK has got TERM > {shlex.quote(bell.path)}' TERM", "while :; do sleep 0.1; done"
    head, joiner = (node(rank, *ring(bell, stays, tells), flags=flags) for rank in range(2))
    bell.hear(4)
    head.signal(signal.SIGTERM)
    bell.hear(4)
    joiner.suspend()
    assert head.wait() == 143
    first, last, *killed = told(head)
    assert first == "infini-run: SIGTERM: stopping; SIGKILL in 7 s, or now if repeated"
    assert [line for line in killed if " did not exit within 7 s, and w" not in line] == []
    assert "node 1 (" in last
    assert ": no message from it for 3 s (--node_timeout)" in last
    report = json.loads((tmp_path / "r").read_text())
    assert [f"infini-run: {text}" for text in report["lost"]] == [last]
    assert report["exit_code"] == 143
    joiner.signal(signal.SIGKILL)
    joiner.wait()
    until(lambda: not marked())


def test_a_host_that_cannot_be_reached_is_the_reports_error(many, tmp_path):  # noqa: F811
    command = many(f"--report={tmp_path}/r", "true", hosts="host1,no-such-host")
    assert command.wait() == 1
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["first_failure"], report["world_size"]) == (1, None, 4)
    assert own_lines(command) == [f"infini-run: {report['error']}"]


def test_a_program_that_is_not_there_is_the_reports_error(many, tmp_path):  # noqa: F811
    command = many(f"--report={tmp_path}/r", "/no/such/program", hosts="host1,host2")
    assert command.wait() == 127
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["world_size"]) == (127, 4)
    assert "/no/such/program" in report["error"]


# ---- a head that is not there for a while


def sleepers():
    return [pid for pid, name in marked().items() if name == "sleep"]


def test_a_head_that_was_stopped_does_not_blame_a_node(node, bell, tmp_path):  # noqa: F811
    """SIGSTOP, or a machine that slept: it is told of nothing, and has to see by itself that it was not there."""
    flags = ("--node_timeout=3", "--grace=1", f"--report={tmp_path}/r")
    head, joiner = (node(rank, *ring(bell), flags=flags) for rank in range(2))
    bell.hear(4)
    head.suspend()
    until(lambda: not sleepers())  # they have heard nothing for too long
    head.signal(signal.SIGCONT)
    assert [head.wait(), joiner.wait()] == [1, 1]
    assert told(joiner) == ["infini-run: no message from the head for 3 s (--node_timeout)"]
    lines = [line for line in told(head) if "no message from the head" not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("infini-run: infini-run was suspended, or its machine slept: it sent no heartbeat")
    assert lines[0].endswith(", and nodes end their ranks after 3 s without one (--node_timeout)")
    assert "node 1" not in lines[0]
    assert json.loads((tmp_path / "r").read_text())["exit_code"] == 1


def test_a_network_that_dies_while_the_head_is_stopped_by_ctrl_z_ends_the_ranks_there(cabled_bed, many, bell):  # noqa: F811
    words = ("--grace=1", "--node_timeout=3", *ring(bell))
    command = many(*words, on=cabled_bed, hosts="host[1-2]", preexec_fn=lead_group, under=COMMANDS_END_SOON)
    bell.hear(4)
    until(lambda: len(sleepers()) == 4)
    command.signal(signal.SIGTSTP)
    until(lambda: all(state_of(pid) == "T" for pid in (command.pid, *sleepers())))
    cabled_bed.tell("cable", 2, "down")
    try:
        until(lambda: len(sleepers()) == 2)
        assert state_of(command.pid) == "T"
        command.signal(signal.SIGCONT)
        assert command.wait() == 1
        (line,) = own_lines(command)
        assert line.startswith("infini-run: lost node 1 (host2): ")
    finally:
        cabled_bed.tell("cable", 2, "up")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_head_that_is_ended_while_ctrl_z_has_stopped_it_leaves_nothing(node, bell, number):  # noqa: F811
    """By hand: the links are sealed, and go on where the stand-in has left them."""
    commands = [node(rank, *ring(bell), flags=("--node_timeout=2",), preexec_fn=lead_group) for rank in range(2)]
    bell.hear(4)
    until(lambda: len(sleepers()) == 4)
    for _ in range(2):
        commands[0].signal(signal.SIGTSTP)
        until(lambda: all(state_of(pid) == "T" for pid in (commands[0].pid, *sleepers())))
        subprocess.run(["sleep", "3"], check=True)
        if number == signal.SIGKILL:
            break
        commands[0].signal(signal.SIGCONT)
        until(lambda: all(state_of(pid) == "S" for pid in sleepers()))
    assert len(sleepers()) == 4
    commands[0].signal(number)
    codes = [command.wait() for command in commands]
    assert codes == ([-signal.SIGKILL, 1] if number == signal.SIGKILL else [143, 143])
    until(lambda: not marked())


def test_a_node_that_ctrl_z_has_stopped_before_all_have_come_is_not_given_up(node):  # noqa: F811
    flags = ("--node_timeout=2",)
    commands = [node(rank, "true", nnodes=3, flags=flags, preexec_fn=lead_group) for rank in range(2)]
    until(lambda: handles(commands[1].pid, signal.SIGTSTP))
    for _ in range(2):
        commands[1].signal(signal.SIGTSTP)
        until(lambda: state_of(commands[1].pid) == "T")
        subprocess.run(["sleep", "3"], check=True)
        commands[1].signal(signal.SIGCONT)
        until(lambda: state_of(commands[1].pid) == "S")
    commands.append(node(2, "true", nnodes=3, flags=flags))
    assert [command.wait() for command in commands] == [0, 0, 0]
    assert told(*commands) == []


def test_an_agent_that_is_stopped_for_ever_is_killed_with_its_ranks(many, bell):  # noqa: F811
    command = many("--grace=1", "--node_timeout=3", *ring(bell), hosts="host[1-2]")
    bell.hear(4)
    victim = min(pid for pid, words in agents().items() if not words.startswith(("ssh ", "sshd")))
    os.kill(victim, signal.SIGSTOP)
    assert command.wait() == 1
    first, second = own_lines(command)
    assert first.endswith("): its agent did not respond; killed it and its ranks there")
    assert ": no message from it for 3 s (--node_timeout)" in second
    until(lambda: not marked())


def test_an_ssh_that_is_stopped_for_ever_leaves_no_rank(many, bell):  # noqa: F811
    command = many("--grace=1", "--node_timeout=3", *ring(bell), hosts="host[1-2]")
    bell.hear(4)
    ours = [pid for pid, (parent, _, name) in processes().items() if parent == command.pid and name == "ssh"]
    os.kill(ours[0], signal.SIGSTOP)
    assert command.wait() == 1
    assert ": no message from it for 3 s (--node_timeout)" in own_lines(command)[-1]
    until(lambda: not marked())
