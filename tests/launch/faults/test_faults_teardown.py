"""Faults of the end: ranks that do not want to, cannot, or are held; and our own end before theirs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.command import COMMAND, Command, play
from tests.support.launch_shapes import STUBBORN, as_root, strace, with_strace
from tests.support.processes import is_alive, marked, state_of
from tests.support.rows import FORK_STORM
from tests.support.waiting import LIMIT_S, until

GUARD_S = 20.0  # a second is promised; a loaded machine, and one that strace holds up, gets more


def ends_of(path):
    return {rank["rank"]: rank["signal"] or rank["exit_code"] for rank in json.loads(path.read_text())["ranks"]}


# ---- ranks that handle, ignore, or sleep through it


@pytest.mark.parametrize("name", ["TERM", "INT", "QUIT"])
@pytest.mark.rows(5)
def test_told_to_stop_is_0_where_every_rank_then_exits_0_by_itself(launch, tmp_path, name):
    command = launch("--grace=1000", f"--report={tmp_path}/r", *play(f"end={name}:0", "say=ready", "wait"))
    command.pids_of(b"ready", launch.ranks)
    command.signal(signal.Signals[f"SIG{name}"])
    assert command.wait() == 0
    assert command.out.count(f"got {name}".encode()) == launch.ranks
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["received_signal"], report["first_failure"]) == (0, f"SIG{name}", None)


@pytest.mark.parametrize("end", ["end=TERM:7", "end=TERM:-TERM", "ignore=TERM"])
def test_told_to_stop_is_128_plus_the_signal_where_one_rank_does_not_exit_0(infini_run, tmp_path, end):
    words = play("@1", end, "@0", "end=TERM:0", "@*", "say=ready", "wait")
    command = infini_run("--nproc_per_node=2", "--grace=0.2", f"--report={tmp_path}/r", *words)
    command.pids_of(b"ready", 2)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert json.loads((tmp_path / "r").read_text())["exit_code"] == 143


def test_rank_that_ignores_the_stop_signal_is_killed_after_the_grace(launch, tmp_path):
    command = launch("--grace=0.2", f"--report={tmp_path}/r", *play("ignore=TERM", "say=ready", "wait"))
    command.pids_of(b"ready", launch.ranks)
    assert command.stop() == 143
    assert ends_of(tmp_path / "r") == dict.fromkeys(range(launch.ranks), "SIGKILL")


def test_rank_that_is_stopped_is_continued_and_ends_by_itself(launch, tmp_path):
    command = launch("--grace=1000", f"--report={tmp_path}/r", *play("end=TERM:7", "say=ready", "wait"))
    pids = command.pids_of(b"ready", launch.ranks)
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
        until(lambda pid=pid: state_of(pid) == "T")
    assert command.stop() == 143
    assert set(ends_of(tmp_path / "r").values()) == {7}


def test_rank_that_is_stopped_and_ignores_the_stop_signal_is_killed(launch):
    command = launch("--grace=0.2", *play("ignore=TERM", "say=ready", "wait"))
    pids = command.pids_of(b"ready", launch.ranks)
    os.kill(pids[0], signal.SIGSTOP)
    until(lambda: state_of(pids[0]) == "T")
    assert command.stop() == 143


@pytest.mark.parametrize("second", ["TERM", "INT"])
@pytest.mark.rows(8)
def test_second_signal_kills_at_once(launch, every_path, tmp_path, second):
    words = play("tell=TERM", "ignore=INT", "say=ready", "wait")
    command = launch("--grace=1000", f"--report={tmp_path}/r", *words)
    command.pids_of(b"ready", launch.ranks)
    command.signal(signal.SIGTERM)
    command.pids_of(b"got TERM", launch.ranks)
    command.insist(signal.Signals[f"SIG{second}"])
    assert command.wait() == 143
    assert f"SIG{second} again".encode() in command.err
    assert set(ends_of(tmp_path / "r").values()) == {"SIGKILL"}


# ---- what SIGKILL does not end


@pytest.mark.rows(5)
def test_dead_rank_that_a_tracer_holds_is_waited_for_without_spinning(launch, every_path, gate, trace):
    dies = gate()
    words = ["@0", "say=ready", f"hold={dies}", "exit=3", "@*", "tell=USR1", "say=ready", "wait"]
    command = launch("--grace=0.1", *play(*words), gates=(dies,))
    pids = command.pids_of(b"ready", launch.ranks)
    tracer = trace(pids[0])
    dies.open()
    until(lambda: state_of(pids[0]) == "Z")
    command.signal(signal.SIGUSR1)
    command.read_lines(b"got USR1", launch.ranks - 1)
    until(lambda: {state_of(command.pid) for _ in range(100)} == {"S"})  # one that spins never sleeps so long
    tracer.let_go()
    assert command.wait() == 3


def test_rank_that_a_tracer_holds_does_not_hold_us(launches, trace):
    commands, tracers = [], []
    for launch in launches:
        commands.append(launch("--grace=0.1", *play("say=ready", "wait")))
        pids = commands[-1].pids_of(b"ready", launch.ranks)
        tracers.append(trace(pids[0]))
        commands[-1].signal(signal.SIGTERM)
    for command in commands:
        command.read_error_until(b"survived SIGKILL (state Z); leaving it")
        assert command.is_process_1 or command.wait() == 143
    for tracer in tracers:
        tracer.let_go()
    for command in commands:  # a namespace ends only with the last process in it, as the kernel has it
        assert command.wait() == 143


def test_rank_in_uninterruptible_sleep_is_named_with_its_state_and_left_after_a_bound(launches, freezer):
    commands = [launch("--grace=0.1", *play("say=ready", "wait")) for launch in launches]
    freezer.freeze(*(c.pids_of(b"ready", launch.ranks)[0] for c, launch in zip(commands, launches, strict=True)))
    for command in commands:
        command.signal(signal.SIGTERM)
    for command in commands:
        command.read_error_until(b"survived SIGKILL (state D); leaving it")
        assert command.is_process_1 or command.process.wait(LIMIT_S) == 143
    freezer.thaw()
    for command in commands:
        assert command.wait() == 143
    until(lambda: not marked())


@as_root
def test_rank_that_became_somebody_elses_is_named_and_left_after_a_bound(launches):
    """As a setuid program may: no signal of ours reaches it, and the parent-death signal is gone."""
    uid = 50000 + os.getpid() % 10000
    caps = "-all,+dac_override,+setuid,+setgid"
    ours = (
        "setpriv",
        f"--reuid={uid}",
        "--regid=0",
        "--clear-groups",
        f"--inh-caps={caps}",
        f"--ambient-caps={caps}",
    )
    other = f"setpriv --reuid={uid + 1} --regid=0 --clear-groups --inh-caps=-all --ambient-caps=-all"
    script = f"test $RANK = 0 || exec sleep 1000; exec {other} sh -c 'echo ready 0 $$; exec sleep 1000'"
    commands = [launch("--grace=0.1", "sh", "-c", script, under=ours) for launch in launches]
    left = []
    for command in commands:
        left += command.pids_of(b"ready").values()
        command.signal(signal.SIGTERM)
    for command in commands:
        assert command.process.wait(LIMIT_S) == 143
    for pid in left[:2]:
        assert is_alive(pid)  # said, not hidden
        os.kill(pid, signal.SIGKILL)
    for command in commands:
        assert command.wait() == 143
        assert b"survived SIGKILL (state S); leaving it" in command.err
    until(lambda: not any(map(is_alive, left)))  # the others went with their namespace


@FORK_STORM
def test_trees_that_fork_as_fast_as_they_are_killed_are_ended(launch):
    hopper = ["daemon", "ignore=TERM", "say=stray", "hop", "done"]
    command = launch("--grace=0.1", *play(*hopper * (8 // launch.ranks), "exit=0"))
    assert command.wait() == 0
    assert not marked()


# ---- our own end, which we cannot see coming


DOUBLE = [*STUBBORN, "ignore=TERM", "ignore=HUP"]
STAGES = {
    "running": (["say=ready", "wait"], [b"ready"]),
    "stopping": (["tell=TERM", "say=ready", "wait"], [b"ready", b"TERM", b"got TERM"]),
}


def kill(command):
    command.signal(signal.SIGKILL)
    command.process.wait(LIMIT_S)


def check_nothing_is_left():
    """Soon; and if something is, it is ended here, so that the failure is this one's own."""
    try:
        until(lambda: not marked(), GUARD_S)
    finally:
        for pid in marked():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not marked())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.rows(10)
def test_no_rank_and_no_descendant_outlives_a_launcher_that_is_killed(launch, every_path, stage):
    words, steps = STAGES[stage]
    command = launch("--grace=1000", *play(*DOUBLE, *words))
    for step in steps:
        if step == b"TERM":
            command.signal(signal.SIGTERM)
        else:
            command.pids_of(step, launch.ranks)
    kill(command)
    check_nothing_is_left()


def test_no_stray_outlives_a_launcher_that_is_killed_while_it_ends_strays(launch):
    words = ["daemon", "tell=TERM", "say=stray", "wait", "done", "exit=0"]
    command = launch("--grace=1000", *play(*words))
    command.read_lines(b"got TERM", launch.ranks)
    kill(command)
    check_nothing_is_left()


@with_strace
def test_no_descendant_outlives_a_launcher_that_is_killed_while_it_starts_ranks(launch, tmp_path):
    """strace holds it between its last clone and what follows, so that the ranks' daemons are there."""
    words = ("sh", "-c", "setsid sleep 1000 <&- >&- 2>&- & exec sleep 1000")
    inject = ("-e", "trace=setpgid", "-e", f"inject=setpgid:delay_enter=1s:when={launch.ranks}")
    command = launch(*words, under=strace(tmp_path / "trace", *inject))
    until(lambda: list(marked().values()).count("sleep") == 2 * launch.ranks)
    kill(command)
    check_nothing_is_left()


def test_end_of_our_parent_is_no_signal_unless_it_was_asked_for(launch):
    """As an ssh or a kubectl exec that goes away: the job goes on. `setpriv --pdeathsig` asks (prctl(2))."""
    if launch.is_process_1:
        pytest.skip("the kernel ends a namespace that its process 1 leaves; process 1 has no parent in it")
    words = [*COMMAND, f"--nproc_per_node={launch.ranks}", *play("tell=USR1", "end=TERM:0", "say=ready", "wait")]
    for asked in ((), ("setpriv", "--pdeathsig", "TERM")):
        shell = ("sh", "-c", '"$@" & echo "launcher 0 $!"; exec sleep 1000', "sh", *asked, *words)
        parent = Command(list(shell))
        launcher = parent.pids_of(b"launcher")[0]
        parent.pids_of(b"ready", launch.ranks)
        parent.signal(signal.SIGKILL)
        if not asked:
            os.kill(launcher, signal.SIGUSR1)
            parent.pids_of(b"got USR1", launch.ranks)
            os.kill(launcher, signal.SIGTERM)
        assert parent.wait() == -signal.SIGKILL  # and everybody else has closed the pipe
        assert parent.out.count(b"got TERM") == launch.ranks
        assert parent.err.count(b"SIGTERM: stopping") == 1
        until(lambda launcher=launcher: not is_alive(launcher))
