"""The stop: the stop signal and CONT, the grace, SIGKILL; to whom, as --stop_scope says."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess

import pytest

from tests.support.command import play
from tests.support.processes import is_alive, marked, processes, state_of
from tests.support.waiting import until


def pids_that_got(command, name):
    return [int(line.split()[-1]) for line in command.out.decode().split("\n") if line.startswith(f"got {name}")]


def ends_of(path):
    return {rank["rank"]: rank["signal"] or rank["exit_code"] for rank in json.loads(path.read_text())["ranks"]}


def test_ranks_that_ignore_the_stop_signal_are_killed_after_the_grace(infini_run, tmp_path, every_path):
    words = ["@1", "ignore=TERM", "@*", "say=ready", "wait"]
    command = infini_run("--nproc_per_node=3", "--grace=0.2", f"--report={tmp_path}/r", *play(*words))
    command.pids_of(b"ready", 3)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert ends_of(tmp_path / "r") == {0: "SIGTERM", 1: "SIGKILL", 2: "SIGTERM"}


def test_after_a_failure_the_others_get_the_same_grace(infini_run, tmp_path, gate, every_path):
    fails = gate()
    words = [
        "@0",
        "end=TERM:0",
        "@1",
        "ignore=TERM",
        "@*",
        "say=ready",
        "@2",
        f"hold={fails}",
        "exit=3",
        "@*",
        "wait",
    ]
    command = infini_run("--nproc_per_node=3", "--grace=1", f"--report={tmp_path}/r", *play(*words), gates=(fails,))
    command.pids_of(b"ready", 3)
    fails.open()
    assert command.wait() == 3
    assert ends_of(tmp_path / "r") == {0: 0, 1: "SIGKILL", 2: 3}
    assert b"2 others were stopped" in command.err


def test_within_the_grace_nobody_is_killed(infini_run, gate, every_path):
    saved = gate()
    command = infini_run(
        "--grace=1000", *play("tell=TERM", "say=ready", f"hold={saved}", "say=saved"), gates=(saved,)
    )
    command.pids_of(b"ready")
    command.signal(signal.SIGTERM)
    command.read_lines(b"got TERM")
    saved.open()
    assert command.wait() == 0
    assert b"saved" in command.out


def test_grace_zero_kills_at_once(infini_run, tmp_path, every_path):
    command = infini_run(
        "--nproc_per_node=2", "--grace=0", f"--report={tmp_path}/r", *play("end=TERM:0", "say=ready", "wait")
    )
    command.pids_of(b"ready", 2)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert ends_of(tmp_path / "r") == {0: "SIGKILL", 1: "SIGKILL"}


@pytest.mark.parametrize("scope", ["group", "leader", "mixed"])
@pytest.mark.rows(4)
def test_rank_that_is_stopped_is_continued_to_end_by_itself(infini_run, scope, every_path):
    command = infini_run(
        "--nproc_per_node=2", "--grace=1000", f"--stop_scope={scope}", *play("end=TERM:0", "say=ready", "wait")
    )
    pids = command.pids_of(b"ready", 2)
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: state_of(pids[1]) == "T")
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert sorted(pids_that_got(command, "TERM")) == sorted(pids.values())


# ---- who is told


def stop_in_scope(infini_run, scope, grace):
    """(pid of the leader, of its group's other process, who got TERM in order), with time to get it."""
    words = ["tell=TERM", "group", "say=member", "wait", "done", "say=leader", "wait"]
    command = infini_run(f"--stop_scope={scope}", f"--grace={grace}", *play(*words))
    leader, member = command.pids_of(b"leader")[0], command.pids_of(b"member")[0]
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    return leader, member, pids_that_got(command, "TERM")


def test_scope_group_tells_the_whole_group_once(infini_run, every_path):
    leader, member, told = stop_in_scope(infini_run, "group", 1)
    assert sorted(told) == sorted([leader, member])


def test_scope_leader_tells_the_leader_only(infini_run, every_path):
    leader, _, told = stop_in_scope(infini_run, "leader", 1)
    assert told == [leader]


def test_scope_mixed_tells_the_leader_and_at_half_the_grace_its_group(infini_run, every_path):
    leader, member, told = stop_in_scope(infini_run, "mixed", 2)
    assert told[0] == leader
    assert sorted(told) == sorted([leader, leader, member])


def test_scope_leader_still_leaves_none_of_the_group(infini_run, every_path):
    words = ["group", "ignore=TERM", "say=member", "wait", "done", "end=TERM:0", "say=leader", "wait"]
    command = infini_run("--stop_scope=leader", "--grace=0.5", *play(*words))
    member = command.pids_of(b"member")[0]
    command.pids_of(b"leader")
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert not is_alive(member)


@pytest.mark.parametrize("path", ["", "fork"])
def test_group_of_the_rank_that_failed_is_told_with_the_others(infini_run, gate, monkeypatch, path):
    monkeypatch.setenv("INFINI_RUN_DEBUG", path)
    rest = gate()
    words = ["@1", "group", "end=TERM:0", "say=member", "wait", "done", "@*", "ignore=TERM", "say=ready"]
    words += ["@0", f"hold={rest}", "exit=0", "@1", "wait"]
    command = infini_run("--nproc_per_node=2", "--grace=1000", *play(*words), gates=(rest,))
    member = command.pids_of(b"member")[1]
    os.kill(command.pids_of(b"ready", 2)[1], signal.SIGKILL)
    assert command.read_lines(b"got TERM")[0][-1] == str(member)
    rest.open()
    assert command.wait() == 137
    assert not is_alive(member)


# ---- one stop during another


@pytest.mark.parametrize("name", ["INT", "TERM"])
@pytest.mark.rows(3)
def test_ctrl_c_while_a_failure_is_being_dealt_with(infini_run, gate, every_path, name):
    fails = gate()
    words = ["@0", "tell=TERM", "@*", "ignore=INT", "say=ready", "@1", f"hold={fails}", "exit=3", "@*", "wait"]
    command = infini_run("--nproc_per_node=2", "--grace=1000", *play(*words), gates=(fails,))
    pids = command.pids_of(b"ready", 2)
    fails.open()
    command.pids_of(b"got TERM")
    number = getattr(signal, f"SIG{name}")
    command.signal(number)
    command.read_error_until(f"SIG{name}: stopping".encode())
    assert is_alive(pids[0])
    command.insist(number)
    assert command.wait() == 3


def test_two_failures_one_stop(infini_run, gate, every_path):
    fails = gate()
    words = ["@0", "tell=TERM", "@*", "say=ready", "@1", f"hold={fails}", "exit=3", "@2", f"hold={fails}", "exit=4"]
    command = infini_run("--nproc_per_node=3", "--grace=1", *play(*words, "@*", "wait"), gates=(fails,))
    command.pids_of(b"ready", 3)
    fails.open()
    assert command.wait() in (3, 4)
    assert command.out.count(b"got TERM") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--isolate",), marks=pytest.mark.root)], ids=["plain", "isolate"]
)
def test_a_signal_that_comes_in_one_turn_with_the_end_is_too_late(infini_run, flags, number):
    """The launcher was not there when its last process ended: both wait for it. The end is the last that it hears."""
    command = infini_run(*flags, *play("ignore=USR1", "say=ready", "read"), stdin=subprocess.PIPE)
    command.read_lines(b"ready")
    command.suspend()
    command.process.stdin.write(b"end\n")
    command.process.stdin.flush()
    until(lambda: any(state == "Z" for parent, state, _ in processes().values() if parent == command.pid))
    command.signal(number)
    command.signal(signal.SIGCONT)
    assert command.wait() == 0


def test_launcher_without_descriptors_ends_with_one_line(infini_run, tmp_path):
    """Its limit was lowered meanwhile: then it cannot import what a report needs, nor the words for that."""
    os.mkfifo(tmp_path / "gate")
    command = infini_run("--nproc_per_node=2", "sh", "-c", f"echo up; read line < {tmp_path}/gate; exit 3")
    command.read_lines(b"up", 2)
    resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    (tmp_path / "gate").write_text("go\ngo\n")
    assert command.wait() == 1
    assert command.err.startswith(b"infini-run: Too many open files; ")
    assert command.err.count(b"\n") == 1
    until(lambda: not marked())  # its guard ends a rank that still runs
