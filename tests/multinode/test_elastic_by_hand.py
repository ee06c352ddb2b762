"""The same command on every node, without ranks: they are handed out, and the job goes on when it loses a node."""

# ruff: noqa: F811

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path

import pytest

from infini_run.multinode.link.protocol import GOODBYE, LAST_WORD, pack, pack_json
from tests.multinode.test_border import join, meet
from tests.multinode.test_by_hand import TOKEN, handles, no_agent_left, port, told  # noqa: F401
from tests.multinode.test_elastic_ssh import FailingRank, finish, hear_world, in_world, launcher_of, process_of, ring
from tests.support.command import NOTICES_AT_ONCE, Bell, altered
from tests.support.processes import GUARD, is_asleep, lead_group, marked, processes
from tests.support.waiting import until

TIMEOUT_S = 3  # a machine with much to do may be silent for more than a second
FAST = (f"--node_timeout={TIMEOUT_S}", "--grace=1")
SLOW = ("--node_timeout=600", "--grace=1")  # where nobody is silent for certain
JOIN_SOON = ("--join_timeout=5",)  # nor are launchers there at once


@pytest.fixture
def gate(tmp_path):
    """Who reads a line of it goes on. It is open for writing all the time: of two readers none finds its end."""
    gate = Bell(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture
def start(infini_run, port):
    """One of the same commands."""

    def start(*words, nnodes="2", token=TOKEN, env=None, **kwargs):
        env = {**os.environ, **({"INFINI_RUN_TOKEN": token} if token else {}), **(env or {})}
        return infini_run(f"--nnodes={nnodes}", f"--rdzv_endpoint=127.0.0.1:{port}", *words, env=env, **kwargs)

    return start


def said(commands):
    """What ranks have said, of all launchers: one of them shows it all."""
    lines = [line for command in commands for line in command.out.decode().splitlines()]
    return sorted(line.split("is ")[1] for line in lines)


def read_error_until(commands, *texts):
    """Until one of them has said one of these: which is the head is not known here."""

    def has_come():
        for command in commands:
            os.set_blocking(command.process.stderr.fileno(), False)
            command.err += command.process.stderr.read() or b""
        return any(text in command.err for command in commands for text in texts)

    until(has_come)


def test_the_same_command_three_times_is_one_job_whose_ranks_are_handed_out(start):
    """Of those that find the address to be theirs, the one that has the link's port is the head."""
    commands = [start("sh", "-c", "echo is $RANK/$WORLD_SIZE $GROUP_RANK/$NNODES", nnodes=3) for _ in range(3)]
    assert [command.wait() for command in commands] == [0, 0, 0]
    assert said(commands) == ["0/3 0/3", "1/3 1/3", "2/3 2/3"]
    assert told(*commands) == []


def test_torchruns_own_command_of_several_nodes_runs_as_it_stands(start):
    commands = [start("--rdzv_backend=c10d", "--rdzv_id=7", "sh", "-c", "echo is $RANK") for _ in range(2)]
    assert [command.wait() for command in commands] == [0, 0]
    assert said(commands) == ["0", "1"]


def test_variables_of_an_elastic_pytorchjob_are_enough(infini_run, port, tmp_path):
    """PET_*, as the training operator sets them, and the token as a Secret's file."""
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(stat.S_IRUSR)
    env = {
        **os.environ, "PET_NNODES": "1:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_ID": "job", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": "3",
    }  # fmt: skip
    words = (f"--token_file={secret}", "--join_window=60", "sh", "-c", "echo is $RANK/$WORLD_SIZE")
    commands = [infini_run(*words, env=env) for _ in range(2)]
    assert [command.wait() for command in commands] == [0, 0]
    assert said(commands) == ["0/2", "1/2"]


def test_a_spare_takes_the_place_of_a_launcher_that_was_killed_before_its_lease_ends(start, bell):
    """Its guard says that its ranks are dead."""
    commands = [start("--spares=1", *SLOW, *ring(bell, in_world(1, "exit 0"))) for _ in range(3)]
    hear_world(bell, 0, 2)
    os.kill(launcher_of(1), signal.SIGKILL)
    hear_world(bell, 1, 2)
    assert sorted(command.wait() for command in commands) == [-signal.SIGKILL, 0, 0]
    until(lambda: not marked())
    assert any("node 1 (" in line and "lost node" in line for line in told(*commands))


@pytest.mark.parametrize("readers", ["1", "all"])
def test_stdin_has_ended_on_spare_that_takes_place(start, bell, readers):
    flags = ("--spares=1", f"--stdin={readers}", *SLOW, *ring(bell, in_world(1, "exit 0"), first="cat"))
    commands = [start(*flags, stdin=subprocess.DEVNULL) for _ in range(3)]
    hear_world(bell, 0, 2)
    os.kill(launcher_of(1), signal.SIGKILL)
    hear_world(bell, 1, 2)
    assert sorted(command.wait() for command in commands) == [-signal.SIGKILL, 0, 0]


def test_spare_that_refuses_waits_longer_before_each_return(start, bell, tmp_path):
    """It imports again each time."""
    imports = Bell(tmp_path / "imports")
    (tmp_path / "early.py").write_text(
        f"import os\nwith open({imports.path!r}, 'w') as file: print('began', file=file)\n"
        "if 'BAD' in os.environ:\n    import nosuch\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        f"import time\nwith open({bell.path!r}, 'w') as file: print('up', file=file)\ntime.sleep(1000)\n"
    )
    flags = ("--spares=1", "--join_window=0.1", *SLOW, "--nproc_per_node=1", "--preload=early", str(script))
    env = {"PYTHONPATH": str(tmp_path)}
    commands = [start(*flags, env=env) for _ in range(2)]
    bell.hear(2)
    imports.hear(2)
    spare = start(*flags, env={**env, "BAD": "1"})
    read_error_until([spare], b"rejoining in 4 s")
    spare.signal(signal.SIGTERM)
    assert spare.wait() in (143, -signal.SIGTERM)
    refusal = "infini-run: --preload: early cannot be imported: ModuleNotFoundError: No module named 'nosuch'"
    pauses = [f"infini-run: this node cannot run its ranks; rejoining in {pause_s} s" for pause_s in (1, 2, 4)]
    assert spare.err.decode().splitlines() == [line for pause in pauses for line in (refusal, pause)]
    imports.hear(3)
    imports.close()
    commands[0].signal(signal.SIGTERM)
    commands[1].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]


def test_srun_tasks_keep_a_spare_for_a_lost_node(infini_run, bell, port):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-3]"}
    step |= {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    flags = ("--engine=auto", f"--rdzv_endpoint=127.0.0.1:{port}", "--spares=1", *SLOW)
    commands = []
    for node in range(3):
        env = os.environ | step | {"INFINI_RUN_TOKEN": TOKEN, "SLURM_LOCALID": "0"}
        env |= {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}
        commands.append(infini_run(*flags, *ring(bell, in_world(1, "exit 0")), env=env))
    hear_world(bell, 0, 2)
    os.kill(launcher_of(1), signal.SIGKILL)
    hear_world(bell, 1, 2)
    assert sorted(command.wait() for command in commands) == [-signal.SIGKILL, 0, 0]


def test_a_lease_is_waited_for_where_the_guard_says_nothing_and_a_late_word_changes_nothing(start, bell, port):
    """Of a killed launcher whose guard is suspended nobody knows that the ranks are dead."""
    commands = [start("--spares=1", *FAST, *ring(bell, in_world(2, "exit 0"))) for _ in range(3)]
    hear_world(bell, 0, 2)
    victim = launcher_of(1)
    guard = guard_of(victim)
    word = last_word(guard)
    os.kill(guard, signal.SIGSTOP)
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    hear_world(bell, 1, 2)
    assert time.monotonic() - killed_s > 1.5
    os.kill(guard, signal.SIGCONT)
    say(port, word)
    until(lambda: guard not in processes())
    os.kill(process_of(0, world=1), signal.SIGSTOP)  # it lives, and world 1 with it
    os.kill(process_of(0, world=1), signal.SIGCONT)
    for command in commands:
        command.signal(signal.SIGTERM)
    assert sorted(command.wait() for command in commands) == [-signal.SIGKILL, 143, 143]
    assert not any("attempt 3" in line for line in told(*commands))


def test_a_word_that_comes_while_its_launcher_lives_proves_nothing(start, bell, port):
    commands = [start("--spares=1", *FAST, *ring(bell, in_world(1, "exit 0"))) for _ in range(3)]
    hear_world(bell, 0, 2)
    victim = launcher_of(1)
    guard = guard_of(victim)
    say(port, last_word(guard), os.urandom(37), pack(LAST_WORD, os.urandom(32)), pack(LAST_WORD), last_word(guard))
    heartbeats_s = time.monotonic() + TIMEOUT_S / 2  # --node_timeout is three of them
    until(lambda: time.monotonic() > heartbeats_s)
    os.kill(guard, signal.SIGSTOP)
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    hear_world(bell, 1, 2)
    assert time.monotonic() - killed_s > 1.5
    os.kill(guard, signal.SIGCONT)
    assert sorted(command.wait() for command in commands) == [-signal.SIGKILL, 0, 0]
    until(lambda: not marked())


def guard_of(launcher):
    """The pid of its guard."""
    (guard,) = [pid for pid, (parent, _, name) in processes().items() if parent == launcher and name == GUARD]
    return guard


def last_word(guard):
    """What it will send to the head (struct lease_memory)."""
    memory = Path(f"/proc/{guard}/fd/2").read_bytes()
    (size,) = struct.unpack_from("I", memory, 12)
    return memory[144 : 144 + size]


def say(port, *words):
    """Send each to the head, over a connection of its own, and wait until the head has closed that. The link listens
    beside the port that --rdzv_endpoint names."""
    for word in words:
        with socket.create_connection(("127.0.0.1", port + 1)) as connection:
            connection.sendall(word)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(100):
                pass


def test_a_launcher_that_was_cut_off_joins_again_and_is_a_spare(start, bell):
    """Its ranks end with its lease, and the same process comes back."""
    commands = [start("--spares=1", *FAST, *ring(bell, in_world(2, "exit 0"))) for _ in range(3)]
    hear_world(bell, 0, 2)
    first = launcher_of(1)
    os.kill(first, signal.SIGSTOP)
    hear_world(bell, 1, 2)
    os.kill(first, signal.SIGCONT)
    read_error_until(commands, b" joined as a spare")
    second = launcher_of(1, world=1)
    assert second != first
    os.kill(second, signal.SIGKILL)
    hear_world(bell, 2, 2)
    assert sorted(command.wait() for command in commands) == [-signal.SIGKILL, 0, 0]


def test_a_launcher_that_is_told_to_stop_leaves_and_the_job_goes_on(start, bell):
    commands = [start("--spares=1", *SLOW, *ring(bell, in_world(1, "exit 0")), nnodes=3) for _ in range(4)]
    hear_world(bell, 0, 3)
    victim = next(command for command in commands if command.pid == launcher_of(1))
    victim.signal(signal.SIGTERM)
    hear_world(bell, 1, 3)
    assert [command.wait() for command in commands if command is not victim] == [0, 0, 0]
    assert victim.wait() == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_spare_that_is_told_to_stop_says_so(start, bell, number):
    commands = [start("--spares=1", *SLOW, *ring(bell)) for _ in range(3)]
    hear_world(bell, 0, 2)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    (spare,) = [command for command in commands if command.pid not in (head.pid, launcher_of(1))]
    spare.signal(signal.SIGUSR1)  # is nothing to it
    spare.signal(number)
    assert spare.wait() == 128 + number
    head.read_error_until(f": got {number.name} there, and leaves".encode())
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands if command is not spare] == [143, 143]
    assert b"lost node" not in head.err


def test_spares_that_are_told_to_stop_at_once_end_no_job(start, bell):
    """Two of four are no more than half of them."""
    commands = [start("--spares=2", *SLOW, *ring(bell)) for _ in range(4)]
    hear_world(bell, 0, 2)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    spares = [command for command in commands if command.pid not in (head.pid, launcher_of(1))]
    for spare in spares:
        spare.signal(signal.SIGTERM)
    assert [spare.wait() for spare in spares] == [143, 143]
    until(lambda: error_so_far(head).count("got SIGTERM there, and leaves") == 2)
    assert "stopping" not in error_so_far(head)
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands if command not in spares] == [143, 143]


def test_a_launcher_that_is_told_to_stop_between_two_attempts_is_not_lost(start, bell):
    words = ("--max_restarts=1", "--restart_delay=1000", *SLOW, *ring(bell, "exit 3"))
    commands = [start("--join_window=60", *words, nnodes="1:2") for _ in range(2)]
    heads = []
    until(lambda: heads or [heads.append(each) for each in commands if "restart" in error_so_far(each)])
    (head,) = heads
    (joiner,) = [command for command in commands if command is not head]
    until(lambda: handles(joiner.pid, signal.SIGTERM))
    joiner.signal(signal.SIGTERM)
    assert joiner.wait() == 143
    until(lambda: "got SIGTERM there, and leaves" in error_so_far(head))
    head.signal(signal.SIGTERM)
    head.wait()
    assert b"lost node" not in head.err


def test_what_a_check_leaves_is_no_zombie_of_the_launcher(start, bell):
    check = "--node_check=sh -c '(true &); sleep 0.3'"
    commands = [start("--spares=1", check, *ring(bell)) for _ in range(3)]
    hear_world(bell, 0, 2)
    pids = [command.pid for command in commands]
    until(lambda: not any(state == "Z" and parent in pids for parent, state, _ in processes().values()))
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143] * 3


def test_a_job_of_which_most_launchers_are_told_to_stop_ends(start, bell):
    """A spare counts, too. The head reads both at once."""
    commands = [start("--spares=1", *ring(bell)) for _ in range(3)]
    hear_world(bell, 0, 2)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    (node,) = [command for command in commands if command.pid == launcher_of(1)]
    (spare,) = [command for command in commands if command not in (head, node)]
    head.signal(signal.SIGSTOP)
    for command in (node, spare):
        command.signal(signal.SIGTERM)
    until(lambda: handles(node.pid, signal.SIGTERM))
    assert spare.wait() == 143
    head.signal(signal.SIGCONT)
    assert head.wait() == node.wait() == 143
    assert b"attempt 2" not in head.err
    assert b"lost node" not in head.err


def test_a_launcher_is_told_to_stop_after_the_end_of_its_ranks_and_the_job_goes_on(start, bell, gate):
    first = "[ $RANK = 0 ] && trap '' TERM"
    then = in_world(0, f"[ $RANK = 2 ] && {{ read line < {shlex.quote(gate.path)}; exit 5; }}")
    words = ("--max_restarts=1", "--grace=1000", "--join_window=4", *ring(bell, then, first=first))
    commands = [start(*words, nnodes="1:3") for _ in range(3)]
    hear_world(bell, 0, 3)
    (head,) = [command for command in commands if command.pid not in (launcher_of(1), launcher_of(2))]
    (node,) = [command for command in commands if command.pid == launcher_of(1)]
    rank = process_of(0)
    gate.ring("now")
    until(lambda: handles(node.pid, signal.SIGTERM))
    node.signal(signal.SIGTERM)
    assert node.wait() == 143
    read_error_until([head], b": got SIGTERM there, and leaves")
    os.kill(rank, signal.SIGKILL)
    hear_world(bell, 1, 2)
    head.signal(signal.SIGTERM)
    read_error_until([head], b"SIGTERM: stopping")  # else the rank's death may come first, and is a failure
    os.kill(process_of(0, world=1), signal.SIGKILL)
    assert [command.wait() for command in commands if command is not node] == [143, 143]
    assert head.err.count(b"(" + os.uname().nodename.encode() + b")") == 1
    assert b"smaller: 2 nodes instead of 3" in head.err


def test_a_job_ends_when_its_head_is_told_to_stop(start, bell):
    commands = [start("--join_window=60", *SLOW, *ring(bell), nnodes="1:2") for _ in range(2)]
    hear_world(bell, 0, 2)
    (head,) = [command for command in commands if command.pid != launcher_of(1)]
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]
    until(lambda: not marked())


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--nnodes=4:2"], "MIN:MAX with MIN at most MAX"),
        (["--nnodes=1:2", "--node_rank=0"], "node ranks are assigned, and change; drop --node_rank=0"),
        (["--nnodes=1:2", "--keep_going"], "--keep_going: a failure ends all ranks, or none"),
        (
            ["--nnodes=2", "--spares=1", "--hosts=a,b"],
            "--nnodes=2 and --spares=1: needs more hosts than --hosts=a,b, which is 2 hosts",
        ),
        (["--spares=2", "--hosts=a,b"], "needs more hosts than --hosts=a,b, which is 2 hosts"),
        (["--spares=1", "--hosts=a:2,b:4"], "hosts with different numbers of processes cannot replace each other"),
        (
            ["--hosts=a,b", "--join_window=5"],
            "--join_window=5: needs a job that can lose a node; add --spares=N",
        ),
        (["--spares=1", "--node_timeout=0"], "expected at least 100ms"),
        (["--spares=1", "--node_check_timeout=0"], "expected at least 100ms"),
        (["--spares=1", "--node_check=a && b"], "without a shell; use sh -c '...' for several"),
        (["--spares=1", "--engine=mpi", "--hosts=a,b"], "mpirun ends all nodes when one is lost; use --engine=ssh"),
    ],
)
def test_flags_that_contradict_each_other_are_one_line_before_anything_starts(infini_run, flags, why):
    env = {**os.environ, "INFINI_RUN_TOKEN": TOKEN}
    command = infini_run(*flags, "true", env=env)
    assert command.wait() == 2
    assert why in command.err.decode()
    assert command.err.count(b"\n") == 1


def test_without_a_token_one_line_says_how_to_add_one(infini_run):
    command = infini_run("--nnodes=1:2", "--rdzv_endpoint=127.0.0.1:1", "true")
    assert command.wait() == 2
    assert b"set the same INFINI_RUN_TOKEN=... on every node, or add --token_file=FILE" in command.err


def test_spares_end_when_the_job_does(start):
    commands = [start("--spares=1", "true") for _ in range(3)]
    for command in commands:
        finish(command)


def test_of_many_spares_the_first_few_are_named(start):
    commands = [start("--spares=9", "true", nnodes=1) for _ in range(10)]
    for command in commands:
        finish(command)
    (line,) = [line for line in told(*commands) if "spares: " in line]
    names = line.partition("spares: ")[2].split(", ")
    assert len(names) == 9
    assert names[-1] == "..."


def test_a_wrong_token_is_no_reason_to_ask_again(start, bell):
    first = start("--spares=1", "--join_window=0.1", *SLOW, *ring(bell), nnodes=1)
    hear_world(bell, 0, 1)
    stranger = start("--spares=1", *SLOW, "true", nnodes=1, token="another-token-of-somebody-else")
    assert stranger.wait() == 1
    assert b"rejoining" not in stranger.err
    first.signal(signal.SIGTERM)
    finish(first, 143)


def test_a_launcher_without_a_place_asks_until_one_is_free_and_is_told_of_once(start, bell, gate):
    words = ("--spares=1", *SLOW, *ring(bell, in_world(1, f"read line < {shlex.quote(gate.path)}; exit 0")))
    commands = [start(*words) for _ in range(3)]
    hear_world(bell, 0, 2)
    late = start(*words)  # it may get the place that is free before the spare gets the rank
    read_error_until([late], b"rejected this node: the nodes are 0 to 2, and all of them joined")
    victim = launcher_of(1)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    os.kill(victim, signal.SIGKILL)
    hear_world(bell, 1, 2)
    read_error_until([head], b" joined as a spare")
    for _ in range(2):
        gate.ring("now")
    assert sorted(command.wait() for command in (*commands, late)) == [-signal.SIGKILL, 0, 0, 0]
    lines = [line for line in told(*commands) if "infini-run: rejected " in line]
    assert len(lines) == 1


def error_so_far(command):
    os.set_blocking(command.process.stderr.fileno(), False)
    command.err += command.process.stderr.read() or b""
    return command.err.decode()


def test_launchers_whose_head_was_killed_end_after_the_join_timeout(start, bell):
    """Nobody will be the head again: they ask for a while, and say so."""
    commands = [start("--spares=1", *JOIN_SOON, *SLOW, *ring(bell)) for _ in range(3)]
    hear_world(bell, 0, 2)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    head.signal(signal.SIGKILL)
    others = [command for command in commands if command is not head]
    for other in others:
        assert other.wait() == 1
        assert "lost the connection to the head; rejoining" in other.err.decode()
        assert "no job accepted this launcher within 5 s (--join_timeout)" in other.err.decode().splitlines()[-1]
    head.wait()
    until(lambda: not marked())


def test_a_restart_that_never_began_is_not_counted(start, bell, tmp_path):
    flags = ("--join_window=60", *JOIN_SOON, *SLOW)
    commands = [start(*flags, f"--report={tmp_path}/{at}", *ring(bell), nnodes="2:3") for at in range(3)]
    hear_world(bell, 0, 3)
    lost = launcher_of(1), launcher_of(2)
    head = next(command for command in commands if command.pid not in lost)
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    assert head.wait() == 1
    assert "1 of at least 2 nodes joined after 5 s (--join_timeout)" in head.err.decode()
    assert b"after 1 restart" not in head.err
    report = json.loads((tmp_path / str(commands.index(head))).read_text())
    assert report["restarts"] == 0
    for command in commands:
        command.wait()


@pytest.mark.slow
def test_ctrl_z_of_the_head_costs_no_rank(start, bell):
    commands = [start("--spares=1", *FAST, *ring(bell), preexec_fn=lead_group) for _ in range(3)]
    hear_world(bell, 0, 2)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    head.signal(signal.SIGTSTP)
    until(lambda: processes()[head.pid][1] == "T")
    time.sleep(2.2 * TIMEOUT_S)
    head.signal(signal.SIGCONT)
    until(lambda: processes()[head.pid][1] != "T")
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143] * 3
    assert b"lost node" not in head.err


def test_launcher_sleeps_until_head_reads_its_hello(start, bell):
    """Nobody reads the output, so the head reads no message, and grants no lease."""
    flags = ("--join_window=0", *SLOW)
    head = start(*flags, "sh", "-c", f"echo up > {bell.path}; exec yes", nnodes="1:2")
    assert bell.hear(1) == ["up"]
    rank = process_of(0)
    until(lambda: all(is_asleep(rank) for _ in range(1000)))  # all on its way to the reader is full
    at_once = altered({"multinode.agent.agent._OLD_RANKS_S": 0.0})  # the ranks of the head live here
    late = start(*flags, "true", nnodes="1:2", stdout=subprocess.DEVNULL, under=at_once)
    until(lambda: os.readlink(f"/proc/{late.pid}/fd/1").startswith("pipe:"))
    until(lambda: all(is_asleep(late.pid) for _ in range(1000)))
    for command in (late, head):
        command.signal(signal.SIGKILL)
        command.wait()
    until(lambda: not marked())


def test_ctrl_z_of_head_moves_join_timeout(start, bell):
    """Nobody could join meanwhile, and who connected then waits at the head's port."""
    flags = ("--spares=1", "--join_window=0", *FAST, *ring(bell, "exit 0"))
    head = start(*JOIN_SOON, *flags, preexec_fn=lead_group)
    until(lambda: handles(head.pid, signal.SIGTSTP))
    head.signal(signal.SIGTSTP)
    until(lambda: processes()[head.pid][1] == "T")
    other = start(*flags)
    time.sleep(5.5)
    head.signal(signal.SIGCONT)
    assert [command.wait() for command in (head, other)] == [0, 0], head.err
    hear_world(bell, 0, 2)


def test_restart_that_was_due_while_head_was_suspended_follows(start):
    script = "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3"
    flags = ("--join_window=0", "--max_restarts=1", "--restart_delay=1", *FAST)
    head = start(*flags, "sh", "-c", script, nnodes="1:2")
    read_error_until([head], b"restart 1 of 1")
    head.signal(signal.SIGSTOP)
    until(lambda: processes()[head.pid][1] == "T")
    time.sleep(2)
    head.signal(signal.SIGCONT)
    assert head.wait() == 0, head.err


def test_ctrl_z_of_a_node_is_its_loss_and_fg_brings_it_back(start, bell):
    """Its lease ends, and nobody can extend it meanwhile: the ranks are replaced, and the launcher is a spare."""
    commands = [start("--spares=1", *FAST, *ring(bell), preexec_fn=lead_group) for _ in range(3)]
    hear_world(bell, 0, 2)
    (node,) = [command for command in commands if command.pid == launcher_of(1)]
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    node.signal(signal.SIGTSTP)
    hear_world(bell, 1, 2)
    node.signal(signal.SIGCONT)
    read_error_until([head], b" joined as a spare")
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143] * 3
    assert b": suspended; the job continues without it after 3 s (--node_timeout)" in head.err


def test_a_launcher_that_asks_again_and_again_has_one_connection(start, port):
    with socket.create_server(("127.0.0.1", port + 1)) as server:
        server.settimeout(60)
        joiner = start("true", nnodes="1:2")
        counts = []
        for may_return in (True, True, False):
            head = meet(server)
            fds = [f"/proc/{joiner.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{joiner.pid}/fd")]
            counts.append(sum(os.readlink(fd).startswith("socket:") for fd in fds))
            answer = {"error": "no place", "may_return": may_return, "launch_id": "id", "timeout_s": 10}
            head.send(pack_json(GOODBYE, answer))
            head.close()
    assert joiner.wait() == 1
    assert counts == [1, 1, 1]


def test_launchers_that_find_the_port_taken_and_nobody_there_try_again_to_open_it(start, port):
    """Of two that call listen(2) at the same moment the kernel may refuse both."""
    with socket.socket() as holder:
        holder.bind(("", port + 1))  # and does not listen
        commands = [start("sh", "-c", "echo is $RANK/$WORLD_SIZE", under=NOTICES_AT_ONCE) for _ in range(2)]
        for command in commands:
            command.read_error_until(b"waiting for node 0")
    assert [command.wait() for command in commands] == [0, 0]
    assert said(commands) == ["0/2", "1/2"]


def test_a_launcher_that_comes_when_the_job_is_over_ends_as_the_job_does(start):
    """The head still waits for the reader of its output."""
    head = start(
        "--join_window=0", "sh", "-c", "head -c 200000 /dev/zero; exit 7", nnodes="1:2", under=NOTICES_AT_ONCE
    )
    head.read_error_until(b"waiting until the output is read")
    late = start("--join_window=0", "true", nnodes="1:2")
    surplus = start("--join_window=0", "true", nnodes="1:2")
    assert late.wait() == surplus.wait() == 7
    assert late.err == surplus.err == b""
    assert head.wait() == 7


def test_launchers_of_another_job_at_the_same_port_are_turned_away(start, bell):
    first = start("--spares=1", "--join_window=0.1", "--rdzv_id=a", *SLOW, *ring(bell), nnodes=1)
    hear_world(bell, 0, 1)
    other = start("--spares=1", "--rdzv_id=b", *SLOW, "true", nnodes=1)
    assert other.wait() == 1
    text = "its --rdzv_id is b, that of this job is a: use a different port for each job"
    assert text in other.err.decode()
    assert b"rejoining" not in other.err
    first.signal(signal.SIGTERM)
    finish(first, 143)
    assert text in first.err.decode()


def test_it_is_said_for_how_long_others_may_join_and_what_is_missing(start, bell):
    first = start("--join_window=60", *SLOW, *ring(bell), nnodes="1:2", under=NOTICES_AT_ONCE)
    read_error_until([first], b"1 node joined, 1 needed; waiting ")
    second = start("--join_window=60", *SLOW, *ring(bell), nnodes="1:2")
    hear_world(bell, 0, 2)
    first.signal(signal.SIGTERM)
    finish(first, 143)
    finish(second, 143)


@pytest.mark.slow
def test_a_launcher_that_joins_again_runs_its_ranks_where_it_was_started(start, bell, tmp_path):
    """While it runs ranks it is in /, so that it holds no folder."""
    tells = f"echo $TORCHELASTIC_RESTART_COUNT $RANK/$WORLD_SIZE $PWD 0 > {bell.path}; exec sleep 1000"
    commands = [start("--spares=1", *FAST, "sh", "-c", tells, nnodes=2, cwd=tmp_path) for _ in range(3)]
    assert hear_world(bell, 0, 2) == [str(tmp_path)] * 2
    (stopped,) = [command for command in commands if command.pid == launcher_of(1)]
    stopped.signal(signal.SIGSTOP)
    assert hear_world(bell, 1, 2) == [str(tmp_path)] * 2
    stopped.signal(signal.SIGCONT)
    read_error_until(commands, b" joined as a spare")
    os.kill(launcher_of(1, world=1), signal.SIGKILL)
    assert hear_world(bell, 2, 2) == [str(tmp_path)] * 2
    stopped.signal(signal.SIGKILL)
    (head,) = [command for command in commands if "spares: " in error_so_far(command)]
    head.signal(signal.SIGTERM)
    for command in commands:
        command.wait()
    until(lambda: not marked())


@pytest.mark.slow
def test_a_head_that_was_stopped_says_so_and_goes_on_with_its_own_node(start, bell):
    commands = [start(*FAST, "--join_window=1", *ring(bell), nnodes="2:3") for _ in range(3)]
    hear_world(bell, 0, 3)
    (head,) = [command for command in commands if command.pid not in (launcher_of(1), launcher_of(2))]
    head.signal(signal.SIGSTOP)
    until(lambda: not marked())  # their leases end
    time.sleep(TIMEOUT_S)
    head.signal(signal.SIGCONT)
    hear_world(bell, 1, 3)
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143] * 3
    assert head.err.count(b"infini-run was suspended, or its machine slept: it sent no heartbeat for ") == 1
    assert b"and nodes end their ranks after 2.0 s or more without one (--node_timeout)" in head.err
    assert b"is only suspended" not in head.err
    assert b"lost node" not in head.err, "it blames no node"
    assert b" gave up this head" in head.err, head.err


def three_launchers(start, bell, *flags):
    """Of a job that could go on with two: the head, and those of ranks 1 and 2."""
    commands = [start("--join_window=60", *flags, *ring(bell), nnodes="2:3") for _ in range(3)]
    hear_world(bell, 0, 3)
    others = [next(each for each in commands if each.pid == launcher_of(rank)) for rank in (1, 2)]
    (head,) = set(commands) - set(others)
    return head, *others


def test_a_new_head_starts_nothing_while_ranks_of_the_old_one_may_live(start, bell):
    """A node that does not come back may not know yet that its head has gone."""
    head, other, cut = three_launchers(start, bell, *FAST)
    old = process_of(2)
    cut.signal(signal.SIGSTOP)
    head.signal(signal.SIGKILL)
    head.wait()
    killed_s = time.monotonic()
    again = start("--join_window=0", *FAST, *ring(bell), nnodes="2:3")
    hear_world(bell, 0, 2)
    assert processes().get(old, (0, "X", ""))[1] in "ZX", "two worlds at a time"
    assert time.monotonic() - killed_s > TIMEOUT_S, "the lease of a node that cannot be asked"
    cut.signal(signal.SIGKILL)
    again.signal(signal.SIGTERM)
    assert [again.wait(), other.wait(), cut.wait()] == [143, 143, -signal.SIGKILL]
    assert b"an earlier head is gone, and nodes without connection may still run its ranks" in again.err
    until(lambda: not marked())


def test_a_launcher_that_waits_for_a_place_has_met_the_old_head_too(start, bell):
    """It takes the place of a node that is cut off, and may still run its ranks."""
    flags = ("--join_window=60", *FAST, *ring(bell))
    head = start(*flags, nnodes="1:2")
    cut = start(*flags, nnodes="1:2")
    hear_world(bell, 0, 2)
    if head.pid == launcher_of(1):
        head, cut = cut, head
    third = start(*flags, nnodes="1:2")
    read_error_until([third], b"the head rejected this node")
    old = process_of(1)
    cut.signal(signal.SIGSTOP)
    head.signal(signal.SIGKILL)
    head.wait()
    again = start(*flags, nnodes="1:2")
    hear_world(bell, 0, 2)
    assert processes().get(old, (0, "X", ""))[1] in "ZX", "two worlds at a time"
    cut.signal(signal.SIGKILL)
    again.signal(signal.SIGTERM)
    assert [again.wait(), third.wait(), cut.wait()] == [143, 143, -signal.SIGKILL]
    until(lambda: not marked())


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="another name for a machine needs root")
def test_a_lease_that_is_over_before_the_ranks_begin_is_no_refusal(start, bell, tmp_path):
    """A launcher was suspended while the attempt began. Then it is lost, and comes back."""
    gate, checked = tmp_path / "gate", tmp_path / "checked"
    waits = f"until [ -e {gate} ]; do sleep 0.1; done"
    check = f"--node_check=sh -c 'if [ $(hostname) = hostb ]; then touch {checked}; else {waits}; fi'"
    flags = ("--node_timeout=6", "--grace=1", "--join_window=60", check, *ring(bell))
    head = start(*flags, nnodes="1:2", under=[*named("hosta"), *NOTICES_AT_ONCE])
    read_error_until([head], b"waiting for the check of hosta")
    other = start(*flags, nnodes="1:2", under=named("hostb"))
    until(checked.exists)
    known = error_so_far(head).count("check of hosta\n")
    until(lambda: error_so_far(head).count("check of hosta\n") > known)  # hostb's has passed
    other.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    gate.touch()
    assert bell.hear(1)[0].startswith("0 0/2 "), "the attempt has begun"
    time.sleep(max(0.0, stopped_s + 4.9 - time.monotonic()))  # mostly its lease is over, and not its patience
    other.signal(signal.SIGCONT)
    (line,) = bell.hear(1)
    if not line.startswith("0 1/2 "):  # else the lease was not over
        assert sorted([line[:6], bell.hear(1)[0][:6]]) == ["1 0/2 ", "1 1/2 "]
    head.signal(signal.SIGTERM)
    assert [head.wait(), other.wait()] == [143, 143]
    assert b"stays excluded" not in head.err
    until(lambda: not marked())


def test_another_job_at_the_port_of_a_head_that_is_away_ends_no_launcher(start, bell, port):
    """Their token was taken before: whoever does not take it now is not their head."""
    head, *others = three_launchers(start, bell, *FAST)
    head.signal(signal.SIGKILL)
    head.wait()
    stranger = start(*FAST, "true", nnodes="2:3", token="another-token-of-somebody-else")
    until(lambda: error_so_far(stranger).count("connected to the link's port: the other side has another token") >= 3)
    stranger.signal(signal.SIGKILL)
    stranger.wait()
    again = start("--join_window=60", *FAST, *ring(bell), nnodes="2:3")
    hear_world(bell, 0, 3)
    again.signal(signal.SIGTERM)
    assert [command.wait() for command in (again, *others)] == [143] * 3
    until(lambda: not marked())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="another name for a machine needs root")
def test_a_newcomer_does_not_get_the_place_of_a_node_that_comes_back(start, bell):
    """All places are kept for a while after the head itself was stopped, for its nodes have done nothing wrong."""
    words = (*FAST, "--join_window=60", *ring(bell))
    commands = {name: start(*words, nnodes="2:3", under=named(name)) for name in ("hosta", "hostb", "hostc")}
    hosts = hear_world(bell, 0, 3)
    head = commands[hosts[0]]
    head.signal(signal.SIGSTOP)
    late = start(*words, nnodes="2:3", under=named("hostd"))
    until(lambda: is_connected(late.pid))  # the first one that the head will find
    until(lambda: not marked())
    time.sleep(TIMEOUT_S)
    head.signal(signal.SIGCONT)
    assert hear_world(bell, 1, 3) == hosts
    read_error_until([late], b"the head rejected this node: the nodes are 0 to 2")
    late.signal(signal.SIGTERM)
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in (*commands.values(), late)] == [143] * 3 + [-signal.SIGTERM]
    until(lambda: not marked())


def is_connected(pid):
    """Whether it has a socket."""
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(entry.path))
    return any(link.startswith("socket:") for link in links)


def test_a_guard_that_was_killed_is_the_reason(start, bell):
    head, other, _ = three_launchers(start, bell, *FAST)
    (guard,) = [pid for pid, (parent, _, name) in processes().items() if parent == other.pid and name == GUARD]
    os.kill(guard, signal.SIGKILL)
    read_error_until([other], b"the guard of the ranks is gone, and so are they; rejoining")
    hear_world(bell, 1, 3)
    head.signal(signal.SIGTERM)
    assert head.wait() == 143
    assert b": the guard of the ranks is gone, and so are they; restarting all ranks" in head.err


def named(host):
    """Under this name for the machine."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]


def test_another_launcher_that_takes_a_lost_place_is_named(start, bell, tmp_path):
    """Its own name, and not that of who was there before."""
    words = (*SLOW, "--join_window=60", *ring(bell, in_world(1, "echo from; exit 0")))
    commands = [start(*words, nnodes="2:3", under=named(name)) for name in ("hosta", "hostb", "hostc")]
    hosts = hear_world(bell, 0, 3)
    late = start(*words, nnodes="2:3", under=named("hostd"))
    read_error_until([late], b"all of them joined")
    victim = next(each for each in commands if each.pid == launcher_of(1))
    victim.signal(signal.SIGKILL)
    after = hear_world(bell, 1, 3)
    assert set(after) - set(hosts) == {"hostd"}
    for command in (*commands, late):
        command.wait()
    out = b"".join(command.out for command in (*commands, late)).decode()
    assert sorted(line.split(":")[0] for line in out.splitlines()) == sorted(f"[{name}" for name in after)
    err = b"".join(command.err for command in (*commands, late)).decode()
    assert f"hostd replaces {hosts[1]} as node {after.index('hostd')} ({hosts[1]} was lost)" in err
    assert f"; the place of {hosts[1]} is reserved for a moment" in err


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="another name for a machine needs root")
def test_other_host_in_place_of_excluded_one_is_spare(start, bell, tmp_path):
    """What ranks did on the host before says nothing about this one."""
    fails = FailingRank(tmp_path, 1)
    flags = ("--spares=1", "--max_node_failures=1", "--max_restarts=1", "--restart_delay=0", *SLOW)
    words = (*flags, *ring(bell, fails.then(in_world(2, "exit 0"))))
    commands = {name: start(*words, under=named(name)) for name in ("hosta", "hostb", "hostc")}
    first, out = hear_world(bell, 0, 2)
    fails.now()
    spare = hear_world(bell, 1, 2)[1]
    commands[out].signal(signal.SIGKILL)
    late = start(*words, under=named("hostd"))
    read_error_until([commands[first]], b"hostd joined as a spare", b"hostd is back")
    commands[spare].signal(signal.SIGKILL)
    assert hear_world(bell, 2, 2) == [first, "hostd"]
    assert [commands[first].wait(), late.wait()] == [0, 0]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_node_that_is_well_stays_though_the_check_of_a_spare_is_faster(start, bell, tmp_path, slow):
    fails = FailingRank(tmp_path, 1)
    words = ("--spares=1", "--max_restarts=1", "--restart_delay=0", fails.check)
    words += tuple(ring(bell, fails.then(in_world(1, "exit 0"))))
    names = ("hosta", "hostb", "hostc")
    commands = [start(*words, under=[*named(name), *NOTICES_AT_ONCE]) for name in names]
    hosts = hear_world(bell, 0, 2)
    fails.now(hosts[slow])
    read_error_until(commands, b"waiting for the check of " + hosts[slow].encode(), b"attempt 2:")
    assert not any(b"attempt 2:" in command.err for command in commands)
    fails.open_gate()
    assert hear_world(bell, 1, 2) == hosts
    assert [command.wait() for command in commands] == [0] * 3


@pytest.mark.slow
def test_a_node_that_cannot_start_its_ranks_is_replaced_and_stays_out(start, bell):
    """That is known only when the attempt begins, and the other ranks would wait for its ranks."""
    few = ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh"]
    words = (*FAST, "--join_window=60", *ring(bell, in_world(1, "exit 0")))
    head = start("--spares=1", *words, under=NOTICES_AT_ONCE)
    read_error_until([head], b"of at least 2 nodes joined")
    poor = start("--spares=1", "--nproc_per_node=20", "--console=prefix", *words, under=few)
    read_error_until([head], b"2 nodes joined, 2 needed; waiting ")
    other = start("--spares=1", *words)
    assert [command.wait() for command in (head, other)] == [0, 0]
    said = head.err.decode()
    assert "Too many open files" in said
    assert "cannot run its ranks; restarting all ranks" in said
    poor.signal(signal.SIGTERM)  # the head has gone, and it asks for it
    poor.wait()
    until(lambda: not marked())


def test_who_connects_and_says_nothing_loses_the_place_again(start, bell, port):
    """Nobody else could have it."""
    head = start("--spares=1", "--join_window=0", *JOIN_SOON, *FAST, *ring(bell), nnodes=1)
    hear_world(bell, 0, 1)
    wire = join(f"127.0.0.1:{port + 1}")
    read_error_until([head], b"it did not describe itself within 5 s (--join_timeout)")
    wire.close()
    head.signal(signal.SIGTERM)
    finish(head, 143)
    assert b"no effect" not in head.err, "a spare is a node, too"
