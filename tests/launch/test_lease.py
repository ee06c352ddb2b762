"""A lease in the guard's hand: ranks that nobody answers for any more are ended, whatever their launcher does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import infini_run
from infini_run.core.group import debug_flags
from infini_run.node import plan_node
from infini_run.node.guard_lease import GuardLease
from infini_run.node.launch import NodeLaunch
from infini_run.options.options import resolve
from tests.support.command import CHILDREN, PYTHON, Command, play
from tests.support.group_case import Live, spec
from tests.support.processes import GUARD, is_alive, marked, processes, state_of
from tests.support.waiting import until

LEASE_S = 1.5
STRAY = ["daemon", "ignore=TERM", "name=left-behind", "say=stray", "wait", "done"]
RANK = [*STRAY, "ignore=TERM", "say=ready", "wait"]
PROGRAM = os.fsencode(Path(infini_run.__file__).parent / GUARD)
BOTH = pytest.mark.parametrize("how", ["own", "library"])


@pytest.fixture
def hold():
    """Start hold_lease.py."""
    started = []

    def start(how, *words, lease_s=LEASE_S, renew_s=LEASE_S / 10, ranks=2, under=(), **environ):
        argv = [*under, *PYTHON, str(CHILDREN / "hold_lease.py"), how, str(lease_s), str(renew_s), str(ranks)]
        started.append(
            Command([*argv, *(words or play(*RANK))], stdin=subprocess.PIPE, env={**os.environ, **environ})
        )
        return started[-1]

    yield start
    for command in started:
        command.close()
    until(lambda: not marked())  # of one that was killed: its guard is at it


def tell(command, line):
    command.process.stdin.write(line.encode() + b"\n")
    command.process.stdin.flush()


def all_pids(command, ranks=2):
    pids = [int(words[-1]) for word in (b"stray", b"ready") for words in command.read_lines(word, ranks)]
    assert len(pids) == 2 * ranks
    return pids


def guard_of(launcher):
    (guard,) = [pid for pid, (parent, _, name) in processes().items() if parent == launcher and name == GUARD]
    return guard


def parents():
    return {parent for parent, _, _ in processes().values()}


def events(command, kind):
    return [words[2:] for words in command.read_lines(b"event " + kind.encode())]


def is_over(command, code=0, ranks=2):
    """The launcher was told, reaped its ranks as stopped ones, and ended."""
    command.read_until(b"over\n")
    assert events(command, "lease_ended") == [["-1", str(code), "0", "False"]]
    exited = events(command, "exited")
    assert sorted(words[0] for words in exited) == [str(rank) for rank in range(ranks)]
    assert all(words[3] == "True" for words in exited)
    assert command.wait() == 0


# ---- it ends


@BOTH
@pytest.mark.rows(3)
def test_ranks_of_a_suspended_launcher_end_with_the_lease(hold, how, every_path):
    """With their descendants in other sessions; the launcher finds them dead when it goes on, and ends well."""
    command = hold(how)
    pids = all_pids(command)
    command.suspend()
    until(lambda: not any(map(is_alive, pids)))
    assert state_of(command.pid) == "T"
    command.signal(signal.SIGCONT)
    is_over(command)


@BOTH
@pytest.mark.rows(2)
def test_a_renewed_lease_goes_on_and_ends_after_the_last_renewal(hold, how, every_path):
    command = hold(how, lease_s=1.5 * LEASE_S)
    pids = all_pids(command)
    time.sleep(2 * LEASE_S)
    assert all(map(is_alive, pids))
    command.suspend()
    until(lambda: not any(map(is_alive, pids)))
    command.signal(signal.SIGCONT)
    is_over(command)


@BOTH
@pytest.mark.rows(3)
def test_a_renewal_that_comes_too_late_revives_nothing(hold, how, every_path):
    command = hold(how)
    pids = all_pids(command)
    command.suspend()
    tell(command, "renew")
    until(lambda: not any(map(is_alive, pids)))
    command.signal(signal.SIGCONT)
    is_over(command)
    assert b"renewed True" not in command.out


def test_a_renewal_in_time_is_said_to_be(hold):
    command = hold("own", lease_s=1000, renew_s=0)
    all_pids(command)
    tell(command, "renew")
    command.read_until(b"renewed True\n")
    tell(command, "renew 500")  # never shortened
    until(lambda: (command.read_more(), command.out.count(b"renewed True\n") == 2)[1])


def test_a_renewal_counts_from_when_it_was_asked_for(hold):
    """Its answer lay unread while the launcher was suspended, say."""
    command = hold("own")
    pids = all_pids(command)
    tell(command, "let go")
    while any(map(is_alive, pids)):
        tell(command, f"renew {LEASE_S}")
        time.sleep(LEASE_S / 20)
    command.read_until(b"over\n")
    assert b"renewed True" in command.out


@BOTH
@pytest.mark.rows(3)
def test_a_launcher_that_is_busy_loses_its_ranks(hold, how, every_path):
    command = hold(how)
    pids = all_pids(command)
    tell(command, "busy")
    until(lambda: not any(map(is_alive, pids)))
    assert is_alive(command.pid)
    tell(command, "go on")
    is_over(command)


@pytest.mark.parametrize("ranks", [1, 40])
@pytest.mark.rows(4)
@BOTH
def test_a_launcher_that_is_suspended_while_it_starts_ranks_starts_no_more_of_them(hold, how, ranks, every_path):
    script = "echo ready $RANK $$; (setsid sleep 1000 &); exec sleep 1000"
    for pause_s in (0.0, 0.003):
        command = hold(how, "/bin/sh", "-c", script, ranks=ranks, renew_s=0)
        until(lambda launcher=command.pid: state_of(launcher) == "Z" or launcher in parents())
        if state_of(command.pid) == "Z":  # on a loaded machine its lease may be over before we look
            continue
        time.sleep(pause_s)
        command.suspend()
        time.sleep(LEASE_S)
        until(lambda: not marked())
        command.signal(signal.SIGCONT)
        while b"failed" not in command.out and b"over\n" not in command.out:
            command.read_more()
        command.process.stdin.close()
        command.process.stdin = None
        assert command.wait() == 0
        assert not marked()
        assert b"failed" in command.out or b"lease_ended" in command.out


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace is root's")
def test_process_1_has_a_guard_for_its_lease(hold):
    """A pod's launcher is process 1, which the kernel cannot help while it is suspended."""
    command = hold("own", under=("unshare", "--pid", "--fork", "--mount-proc"))
    command.read_lines(b"ready", 2)
    (launcher,) = [pid for pid, (parent, _, _) in processes().items() if parent == command.pid]
    os.kill(launcher, signal.SIGSTOP)
    until(lambda: marked().keys() == {launcher} or not marked())
    os.kill(launcher, signal.SIGCONT)
    is_over(command)


def test_process_1_that_ends_kills_all_and_its_guard_unnoticed(hold):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    command = hold("own", lease_s=1000, under=("unshare", "--pid", "--fork", "--mount-proc"))
    command.read_lines(b"ready", 2)
    command.process.stdin.close()
    command.process.stdin = None
    assert command.wait() == 0
    assert b"lease_ended" not in command.out


def test_the_launcher_s_death_still_ends_what_is_left(hold, tmp_path):
    """After the lease, too: the folder goes with the launcher."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = hold("own", FOLDER=str(folder))
    pids = all_pids(command)
    guard = guard_of(command.pid)
    command.suspend()
    until(lambda: not any(map(is_alive, pids)))
    assert is_alive(guard)
    assert folder.exists()
    command.signal(signal.SIGKILL)
    until(lambda: not is_alive(guard))
    assert not folder.exists()


def test_the_launcher_s_death_ends_all_before_the_lease_is_over(hold):
    command = hold("own", lease_s=1000, renew_s=0)
    pids = all_pids(command)
    command.signal(signal.SIGKILL)
    until(lambda: not any(map(is_alive, pids)))


# ---- the guard


def test_renewals_do_not_wake_the_guard(hold):
    def wakes():
        lines = Path(f"/proc/{guard}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    command = hold("own", lease_s=1000, renew_s=0)
    all_pids(command)
    guard = guard_of(command.pid)
    until(lambda: state_of(guard) == "S")
    before = wakes()
    for count in range(20):
        tell(command, "renew")
        until(lambda n=count: (command.read_more(), command.out.count(b"renewed True\n") > n)[1])
    assert wakes() == before


def test_a_guard_that_holds_a_lease_holds_nothing_else(hold):
    command = hold("own", lease_s=1000, renew_s=0)
    all_pids(command)
    guard = guard_of(command.pid)
    until(lambda: len(os.listdir(f"/proc/{guard}/fd")) == 3)
    held = [os.readlink(f"/proc/{guard}/fd/{fd}").split(":")[0] for fd in range(3)]
    assert held == ["pipe", "pipe", "/memfd"]


@BOTH
@pytest.mark.rows(4)
def test_a_guard_that_is_killed_ends_the_ranks(hold, how, every_path):
    """Nobody else could do it in time: without a guard there is no lease."""
    command = hold(how, lease_s=1000, renew_s=0)
    pids = all_pids(command)
    os.kill(guard_of(command.pid), signal.SIGKILL)
    until(lambda: not any(map(is_alive, pids)))
    is_over(command, code=1)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"GUARD": "/no/such/guard"}, b"No such file or directory"),
        ({"GUARD": "/bin/false"}, b"Operation not permitted"),  # it ended with 1
        ({"GUARD": "/bin/cat", "SINCE": "0"}, b""),
        ({"SINCE": "0.001"}, b"Timer expired"),
    ],
    ids=["missing", "fails", "another program", "over"],
)
@BOTH
@pytest.mark.rows(10)
def test_without_a_guard_that_holds_the_lease_nothing_starts(hold, how, environ, why, every_path):
    command = hold(how, "/bin/sh", "-c", "echo ready", **environ)
    assert command.wait() == 0
    assert command.out.startswith(b"failed None starting the guard that holds its lease: " + why)
    assert b"ready" not in command.out
    assert command.err == b""


def test_a_lease_without_a_guard_is_refused():
    with pytest.raises(infini_run.StartError, match="Invalid argument"):
        Live(size=1, lease_s=1.0)


# ---- without one, and above


def test_a_launch_without_a_lease_has_nothing_to_renew(every_path):
    with Live(size=1, guard=PROGRAM, debug=debug_flags(os.environ)) as live:
        live.spawn(spec(0, *play("wait")))
        assert not live.group.renew_lease()
        live.group.kill()
        live.end()
        assert not live.of("lease_ended")
    assert not live.group.renew_lease()


@pytest.mark.parametrize("renewals", [0, 3])
def test_a_node_s_launch_tells_of_the_end_of_its_lease(renewals):
    options = resolve(["--console=none", *play("wait")], os.environ).options
    lease = GuardLease(length_s=LEASE_S)
    launch = NodeLaunch(plan_node(options, os.environ), options, environ=os.environ, lease=lease)
    try:
        launch.start()
        for _ in range(renewals):
            launch.poll(LEASE_S / 2)
            assert launch.renew_lease()
        while not launch.ended:
            launch.poll()
        assert launch.lease_ended
        assert not launch.renew_lease()
        report = launch.report()
        assert report.exit_code == 128 + signal.SIGKILL
        assert report.first_failure is None
        assert report.notices == ("the lease of the ranks expired (it was not renewed in time); killed them",)
    finally:
        launch.close()
