"""The head of many nodes as process 1 of a container: what loses its parent there is reaped, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.launch.test_pid1 import UNSHARE, process_1
from tests.multinode.test_by_hand import node, port, ring  # noqa: F401
from tests.multinode.test_many_ssh import bed, many, no_agent_left  # noqa: F401
from tests.support.command import NOTICES_AT_ONCE
from tests.support.hidden_proc import hidden
from tests.support.processes import is_alive, processes
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group(__name__),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root"),
]
PRINTS_TERM = 'trap "echo term; exit 0" TERM; grep SigBlk /proc/self/status'
ORPHANS = "for at in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (sh -c : &); done"


def zombies(parent):
    return [pid for pid, (above, state, _) in processes().items() if above == parent and state in "ZX"]


@pytest.mark.parametrize("way", ["hosts", "by hand"])
def test_orphans_are_reaped_and_commands_are_not(node, many, bell, way):  # noqa: F811
    """As `docker exec` leaves them, or an ssh that goes on for later connections."""
    if way == "hosts":
        head = many(*ring(bell), hosts="host[1-2]", under=UNSHARE)
        commands = [head]
    else:
        commands = [node(rank, *ring(bell), under=UNSHARE if rank == 0 else ()) for rank in range(2)]
        head = commands[0]
    bell.hear(4)
    first = process_1(head)
    subprocess.run(["nsenter", f"--target={first}", "--pid", "--mount", "sh", "-c", ORPHANS], check=True)
    until(lambda: not zombies(first))
    os.kill(first, signal.SIGTERM)
    assert [command.wait() for command in commands] == [143] * len(commands), head.err


def test_ranks_of_a_launcher_that_joins_get_signals(node, bell):  # noqa: F811
    """It has blocked all of them from its first line on, and they have not."""
    waits = "while :; do sleep 1000 & wait; done"
    commands = [node(rank, *ring(bell, waits, first=PRINTS_TERM), under=UNSHARE if rank else ()) for rank in range(2)]
    bell.hear(4)
    commands[0].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [0, 0]  # as the ranks, which were told to stop
    assert commands[0].out.count(b"SigBlk:\t0000000000000000") == 4, commands[0].out
    assert commands[0].out.count(b"term") == 4


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_launcher_that_waits_for_the_head_ends_when_told_to(node, name):  # noqa: F811
    command = node(1, "true", under=(*UNSHARE, *NOTICES_AT_ONCE))
    command.read_error_until(b"waiting for node 0")
    os.kill(process_1(command), signal.Signals[f"SIG{name}"])
    assert command.wait() == 128 + signal.Signals[f"SIG{name}"]


def test_without_proc_a_job_by_hand_runs(node):  # noqa: F811
    hides = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /proc; exec "$@"',
        "sh",
    ]
    commands = [node(rank, "sh", "-c", "exit 7", under=hides) for rank in range(2)]
    assert [command.wait() for command in commands] == [7, 7], [command.err for command in commands]


def test_leftovers_of_nodes_are_ended_without_proc(node, tmp_path):  # noqa: F811
    path = f"{tmp_path}/$RANK"  # it has left the rank's process group once it writes there
    leave = f"exec >&- 2>&- <&-; setsid sh -c 'echo $$ > {path}; exec sleep 4111' & "
    leave += f"while [ ! -s {path} ]; do sleep 0.01; done; exit 7"
    commands = [node(rank, "sh", "-c", leave, under=hidden("empty")) for rank in range(2)]
    assert [command.wait() for command in commands] == [7, 7], [command.err for command in commands]
    left = [int(path.read_text()) for path in tmp_path.iterdir() if path.name in "01"]
    assert left
    assert not any(map(is_alive, left))
    assert b"left behind: ? (" in b"".join(command.err for command in commands)


def test_an_exit_code_is_the_ranks_own(many):  # noqa: F811
    """That of an ssh, which is our child, is not taken for an orphan's."""
    assert many("sh", "-c", "exit 7", hosts="host[1-2]", under=UNSHARE).wait() == 7
    command = many("true", hosts="host1,no-such-host", under=UNSHARE)
    assert command.wait() == 1
    assert b"Could not resolve hostname" in command.err
