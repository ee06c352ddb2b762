"""The same command on every node, with INFINI_RUN_TOKEN: launchers join, and are one job. All on loopback here."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from infini_run.node.ports import _is_free, _lock, free_port, let_go
from tests.launch.test_control import all_listed
from tests.support.command import COMMAND, NOTICES_AT_ONCE, play, without_waits
from tests.support.hosts import agents
from tests.support.nvml import UUIDS, busy_gpus  # noqa: F401
from tests.support.processes import lead_group, marked, state_of, written
from tests.support.waiting import until
from tests.unit.environments.test_environments import SRUN

TOKEN = "a-secret-that-nobody-guesses"


@pytest.fixture
def port():
    """Free, and the next one, too, which is the link's: none that the kernel gives to a connection, and none
    of another test's."""
    while True:
        first = free_port()
        if _is_free(first + 1) and _lock(first + 1):
            break
        let_go(first)
    yield first
    let_go(first)
    let_go(first + 1)


@pytest.fixture(autouse=True)
def no_agent_left():
    yield
    until(lambda: not agents())


@pytest.fixture
def node(infini_run, port):
    """Start one node's command."""

    def start(rank, *words, nnodes=2, nproc=2, token=TOKEN, flags=(), **kwargs):
        env = {**os.environ, **kwargs.pop("env", {})}
        env |= {"INFINI_RUN_TOKEN": token} if token else {}
        shape = (f"--nnodes={nnodes}", f"--node_rank={rank}", f"--nproc_per_node={nproc}")
        return infini_run(*shape, f"--rdzv_endpoint=127.0.0.1:{port}", *flags, *words, env=env, **kwargs)

    return start


def ring(bell, then="exec sleep 1000", first=":"):
    """A rank that does `first` (a trap, say), tells that it is there, and does `then`."""
    return ["sh", "-c", f"{first}; echo $RANK $$ > {shlex.quote(bell.path)}; {then}"]


def told(*commands):
    """What launchers themselves have said, of all of them."""
    lines = [line for command in commands for line in command.err.decode(errors="replace").splitlines()]
    return [line for line in without_waits(lines) if not line.startswith("[")]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["head-first", "head-last"])
def test_three_launchers_are_one_job(node, order):
    script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK/$NNODES ${INFINI_RUN_TOKEN-none}"
    commands = {rank: node(rank, "sh", "-c", script, nnodes=3) for rank in order}
    for command in commands.values():
        assert command.wait() == 0, command.err
    lines = commands[0].out.decode().splitlines()
    assert sorted(line.split("] ")[1] for line in lines) == [
        f"{rank}/6 {rank % 2} {rank // 2}/3 none" for rank in range(6)
    ]
    assert told(*commands.values()) == []


def test_head_lists_ranks_that_are_ready(node, gate):
    """Those that have sent READY=1 on any node; in the next attempt none has."""
    first, second = gate(), gate()
    then = (f"hold={first}", "notify=READY=1", "say=ready", f"hold={second}", "exit=3")
    words = play("say=up", "+0", *then, "+1", "wait")
    commands = [node(rank, *words, flags=("--max_restarts=1",), gates=(first, second)) for rank in range(2)]
    head = commands[0]

    def ranks():
        (row,) = (row["ranks"] for row in all_listed() if row["pid"] == head.pid)
        return {state: count for state, count in row.items() if count}

    def see(word, count):
        while head.out.count(word) < count:
            head.read_more()

    see(b"up ", 4)
    assert ranks() == {"running": 4}
    first.open()
    see(b"ready ", 4)
    until(lambda: ranks() == {"ready": 4})
    second.open()
    see(b"up ", 8)
    assert ranks() == {"running": 4}
    head.signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".test"])
def test_a_name_that_no_dns_could_have_is_an_address_that_does_not_answer(infini_run, host):
    """The codec of host names raises an error of its own."""
    env = {**os.environ, "INFINI_RUN_TOKEN": TOKEN}
    flags = ("--nnodes=2", "--node_rank=1", f"--rdzv_endpoint={host}:1", "--join_timeout=0.2")
    command = infini_run(*flags, "true", env=env)
    assert command.wait() == 1
    assert b"Traceback" not in command.err
    assert host.encode() in command.err


def test_a_signal_that_comes_before_the_ranks_reaches_them(node, bell):
    """To a node that Ctrl-Z has stopped while it waited: what to start and the signal come to it in one piece."""
    path = shlex.quote(bell.path)
    script = f"trap 'echo got $RANK > {path}; exit 0' USR1; echo up $RANK > {path}; while :; do sleep 0.05; done"
    words = ("sh", "-c", script)
    head, joiner = (node(rank, *words, nnodes=3, nproc=1, preexec_fn=lead_group) for rank in range(2))
    until(lambda: handles(joiner.pid, signal.SIGTSTP))
    joiner.signal(signal.SIGTSTP)
    until(lambda: state_of(joiner.pid) == "T")
    last = node(2, *words, nnodes=3, nproc=1)
    assert sorted(bell.hear(2)) == ["up 0", "up 2"]
    head.signal(signal.SIGUSR1)
    assert sorted(bell.hear(2)) == ["got 0", "got 2"]
    joiner.signal(signal.SIGCONT)
    codes = {command.wait() for command in (head, joiner, last)}
    assert len(codes) == 1
    assert codes <= {0, 128 + signal.SIGUSR1}  # that of a rank which it reached before its trap was set


def test_a_joiner_that_waits_may_insist_though_its_head_is_suspended(node):
    head = node(0, "true", nnodes=3, preexec_fn=lead_group, under=NOTICES_AT_ONCE)
    joiner = node(1, "true", nnodes=3)
    head.read_error_until(b"waiting for 1 of 3 nodes: node 2")
    head.suspend()
    before = written(joiner.pid)
    joiner.signal(signal.SIGTERM)
    until(lambda: written(joiner.pid) > before)
    joiner.signal(signal.SIGTERM)
    assert joiner.wait() == 143
    head.signal(signal.SIGCONT)
    assert head.wait() == 143


def test_a_head_whose_terminal_hangs_up_while_it_waits_for_nodes_ends(node):
    head = node(0, "true", under=NOTICES_AT_ONCE)
    head.read_error_until(b"waiting for 1 of 2 nodes")
    head.signal(signal.SIGHUP)
    assert head.wait() == 128 + signal.SIGHUP
    assert told(head)[-1].startswith("infini-run: SIGHUP: stopping")


def test_a_signal_to_the_head_that_waits_for_nodes_reaches_the_ranks_at_their_start(node, bell):
    path, number = shlex.quote(bell.path), signal.SIGUSR1
    script = f"trap 'echo got $RANK > {path}; exit 0' USR1; while :; do sleep 0.05; done"
    words = ("--keep_going", "--max_restarts=1", "sh", "-c", script)  # after a signal that was passed on: no restart
    head = node(0, *words, nproc=1)
    until(lambda: handles(head.pid, signal.SIGTSTP))
    head.signal(number)
    other = node(1, *words, nproc=1)
    codes = {head.wait(), other.wait()}
    assert len(codes) == 1
    assert codes <= {0, 128 + number}  # that of a rank which it reached before its trap was set


def handles(pid, number):
    """Whether a handler for that signal is there (proc(5), SigCgt). While ranks run, their launcher has none."""
    with open(f"/proc/{pid}/status") as file:
        (mask,) = (line.split()[1] for line in file if line.startswith("SigCgt"))
    return int(mask, 16) >> (number - 1) & 1


def test_log_dir_of_node_0_alone_is_reported(node, tmp_path):
    head, joiner = (node(rank, "true", flags=(f"--log_dir={tmp_path}",) * (rank == 0)) for rank in range(2))
    assert [head.wait(), joiner.wait()] == [0, 0]
    said = "infini-run: --log_dir: set on node 0 only, so ranks of this node have no log; add it here"
    assert (told(head), told(joiner)) == ([], [said])
    assert sorted(path.name for path in tmp_path.glob("rank_*")) == ["rank_0.log", "rank_1.log"]


def test_what_the_user_has_set_for_mpi_is_the_ranks_own(node):
    commands = [node(rank, "sh", "-c", "echo is $OMPI_MCA_btl", env={"OMPI_MCA_btl": "self"}) for rank in range(2)]
    assert [command.wait() for command in commands] == [0, 0]
    assert [line.split("is ")[1] for line in commands[0].out.decode().splitlines()] == ["self"] * 4


def step(node, tasks):
    """What a task of srun sees on that node of two."""
    return SRUN | {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": str(2 * tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node * tasks),
        "SLURM_LOCALID": "0",
        "PMI_RANK": str(node * tasks),
    }


def test_launchers_of_a_step_join_with_a_token(node):
    script = ("sh", "-c", "echo is $RANK/$WORLD_SIZE ${PMI_RANK-none}")
    commands = [node(rank, *script, flags=("--engine=auto",), env=step(rank, 1)) for rank in range(2)]
    assert [command.wait() for command in commands] == [0, 0], commands[0].err
    lines = sorted(line.split("is ")[1] for line in commands[0].out.decode().splitlines())
    assert lines == [f"{rank}/4 none" for rank in range(4)]
    assert told(*commands) == []


def test_a_task_that_is_one_rank_joins_nobody(node):
    command = node(1, "sh", "-c", "echo $RANK $PMI_RANK", flags=("--engine=auto",), env=step(1, 2))
    assert command.wait() == 0, command.err
    assert command.out == b"2 2\n"


def test_ranks_of_one_job_meet(node):
    script = "echo $INFINI_RUN_ID $MASTER_ADDR $MASTER_PORT"
    commands = [node(rank, "sh", "-c", script) for rank in range(2)]
    for command in commands:
        assert command.wait() == 0, command.err
    assert len({line.split("] ")[1] for line in commands[0].out.decode().splitlines()}) == 1


def test_a_failure_on_one_ends_all_with_its_code_and_one_report(node, bell):
    fail = "[ $RANK = 3 ] && { echo oops >&2; exit 7; }; exec sleep 1000"
    commands = [node(rank, *ring(bell, fail)) for rank in range(2)]
    assert [command.wait() for command in commands] == [7, 7]
    lines = told(*commands)
    assert len(lines) <= 10
    assert len([line for line in lines if "rank 3 on" in line and "failed: exit code 7" in line]) == 1
    assert told(commands[1]) == []


@pytest.mark.parametrize("token", ["\udcff\udc80", " a b\t", "\u0661", "x" * 100_000])
def test_a_token_is_any_text(node, token):
    commands = [node(rank, "true", token=token) for rank in range(2)]
    assert [command.wait() for command in commands] == [0, 0], commands[0].err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_head_is_told_to_stop(node, bell, number):
    commands = [node(rank, *ring(bell)) for rank in range(2)]
    bell.hear(4)
    commands[0].signal(number)
    assert [command.wait() for command in commands] == [128 + number, 128 + number]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_joiner_is_told_to_stop(node, bell, number):
    """As Ctrl-C in its own terminal: the whole job ends."""
    commands = [node(rank, *ring(bell)) for rank in range(2)]
    bell.hear(4)
    commands[1].signal(number)
    assert [command.wait() for command in commands] == [128 + number, 128 + number]


def test_a_joiner_that_waits_is_told_to_stop(node):
    command = node(1, "true")
    # Python 3.10 sleeps in select(2)
    until(lambda: any(call in Path(f"/proc/{command.pid}/wchan").read_text() for call in ("nanosleep", "poll")))
    command.signal(signal.SIGINT)
    assert command.wait() == -signal.SIGINT  # nothing was started: it ends as any program does
    assert command.err == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_joiner_that_has_come_and_waits_for_others_is_told_to_stop(node, number):
    head, joiner = node(0, "true", nnodes=3, under=NOTICES_AT_ONCE), node(1, "true", nnodes=3)
    head.read_error_until(b"waiting for 1 of 3 nodes: node 2")
    joiner.signal(number)
    assert [command.wait() for command in (head, joiner)] == [128 + number] * 2
    assert told(head)[-1].startswith(f"infini-run: {number.name} on {os.uname().nodename}: stopping")


@pytest.mark.parametrize("stray", [(), ("ignore=TERM", "daemon", "ignore=TERM", "say=stray", "wait", "done")])
def test_nothing_outlives_a_killed_head(node, stray):
    commands = [node(rank, *play("ignore=TERM", *stray, "say=here", "wait")) for rank in range(2)]
    count = 4 if stray else 0
    until(lambda: (commands[0].read_more(), commands[0].out.count(b"here") == 4)[1])
    assert commands[0].out.count(b"stray") == count
    commands[0].signal(signal.SIGKILL)
    commands[0].wait()
    assert commands[1].wait() == 1
    assert told(commands[1]) == ["infini-run: lost the connection to the head"]
    until(lambda: not marked())


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_with_closed_descriptors_is_as_any(node, rank, closed):
    """/dev/null is there in place of them, before anything of ours gets their numbers."""
    closes = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    script = "sleep 0.2; [ $RANK = 3 ] && exit 7; exec sleep 1000"
    commands = [node(at, "sh", "-c", script, under=closes if at == rank else ()) for at in range(2)]
    assert [command.wait() for command in commands] == [7, 7]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_that_was_deleted_is_one_line(node, tmp_path, rank):
    gone = tmp_path / "gone"
    gone.mkdir()
    deletes = ["sh", "-c", f'rmdir {gone}; exec "$@"', "sh"]
    command = node(rank, "true", cwd=gone, under=deletes)
    assert command.wait() == 2
    (line,) = told(command)
    assert line.startswith(
        "infini-run: the current directory cannot be used: No such file or directory; use an existing"
    )


def test_a_joiner_in_the_delay_of_a_restart_can_be_suspended_and_stops_the_job_at_once(node):
    script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || echo again; [ $RANK = 2 ] && exit 3; exec sleep 1000"
    flags = ("--max_restarts=1", "--restart_delay=1000", "--grace=1", "--node_timeout=2")
    head, joiner = (node(rank, "sh", "-c", script, flags=flags, preexec_fn=lead_group) for rank in range(2))
    head.read_error_until(b"restart 1 of 1 in ")
    until(lambda: not marked())
    joiner.signal(signal.SIGTSTP)
    until(lambda: state_of(joiner.pid) == "T")
    time.sleep(2.5)  # longer than the timeout
    joiner.signal(signal.SIGCONT)
    joiner.signal(signal.SIGTERM)
    assert [joiner.wait(), head.wait()] == [143, 143]
    assert b": stopping; " in head.err
    assert b"again" not in head.out


def test_a_head_that_waits_for_nodes_ends_at_once(node):
    """It has nothing to stop. A busy machine gets some tries."""
    for _ in range(5):
        head = node(0, "true", under=NOTICES_AT_ONCE)
        head.read_error_until(b"waiting for 1 of 2 nodes")
        begun_s = time.monotonic()
        head.signal(signal.SIGTERM)
        assert head.wait() == 143
        if time.monotonic() - begun_s < 0.9:
            return
    raise AssertionError("it waits for a second")


def test_a_joiner_that_is_told_twice_kills(node, bell):
    commands = [node(rank, *ring(bell, first="trap '' TERM"), flags=("--grace=1000",)) for rank in range(2)]
    bell.hear(4)
    commands[1].signal(signal.SIGTERM)
    commands[0].read_error_until(b": stopping; SIGKILL in ")
    time.sleep(1.2)  # TERM again at once is the same request: timeout(1)
    commands[1].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]
    assert b" again: killing what is left" in commands[0].err
    until(lambda: not marked())


def test_a_joiner_whose_ranks_have_ended_may_insist(node, bell):
    first = "[ $RANK -lt 2 ] && trap '' TERM"
    commands = [node(rank, *ring(bell, first=first), flags=("--grace=1000",)) for rank in range(2)]
    bell.hear(4)
    commands[1].signal(signal.SIGTERM)
    commands[0].read_error_until(b": stopping; SIGKILL in ")
    until(lambda: handles(commands[1].pid, signal.SIGTERM))
    time.sleep(1.2)  # TERM again at once is the same request: timeout(1)
    commands[1].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]
    assert b" again: killing what is left" in commands[0].err


def test_it_is_said_that_others_run_on_when_a_joiner_whose_ranks_have_ended_is_told_to_stop(node, bell):
    commands = [node(rank, *ring(bell, "[ $RANK -ge 2 ] || exec sleep 1000")) for rank in range(2)]
    bell.hear(4)
    until(lambda: handles(commands[1].pid, signal.SIGTERM))
    commands[1].signal(signal.SIGTERM)
    commands[0].read_error_until(b": its ranks finished; the others keep running")
    commands[0].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]


@pytest.mark.parametrize("most", [7, 10, 12, 14, 18, 24])
def test_a_joiner_that_may_open_few_descriptors_says_which_limit_it_was(node, most):
    few = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh"]
    head, joiner = node(0, "true"), node(1, "true", under=few)
    assert [command.wait() for command in (head, joiner)] == [1, 1]
    assert b"Traceback" not in joiner.err
    assert b"the limit on open descriptors was reached; raise ulimit -n or ulimit -Hn" in head.err
    if most > 7:  # with fewer it cannot even wait for the reader of its own line
        assert b"ulimit -n" in joiner.err


def test_a_head_that_may_open_few_descriptors_says_which_limit_it_was(node):
    """Wherever the next one is missing."""
    for most in (5, 6, 7, 8, 10, 12, 16):
        head = node(0, "true", under=["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh"])
        assert head.wait() == 1
        assert b"Traceback" not in head.err
        assert b"the limit on open descriptors was reached; raise ulimit -n or ulimit -Hn" in head.err


def test_a_killed_joiner_is_a_lost_node(node, bell):
    commands = [node(rank, *ring(bell)) for rank in range(2)]
    bell.hear(4)
    commands[1].signal(signal.SIGKILL)
    assert commands[0].wait() == 1
    commands[1].wait()
    assert "node 1 (" in told(commands[0])[0]
    assert told(commands[0])[0].endswith("): its connection closed")
    until(lambda: not marked())


def test_a_stopped_joiner_is_silent_and_lost(node, bell):
    flags = ("--node_timeout=3", "--grace=1")
    commands = [node(rank, *ring(bell), flags=flags) for rank in range(2)]
    bell.hear(4)
    commands[1].suspend()
    assert commands[0].wait() == 1
    assert told(commands[0])[0].endswith(
        "no message from it for 3 s (--node_timeout); if its agent is only suspended, its ranks stay"
    )
    time.sleep(1.5)  # so long after the end of its wait for the head
    commands[1].signal(signal.SIGCONT)
    assert commands[1].wait() == 1
    (line,) = told(commands[1])
    assert line.startswith("infini-run: this launcher was suspended for "), line
    assert line.endswith(", or its machine slept: the head gives up a node after 3 s (--node_timeout)")


def test_a_node_that_is_done_early_waits_for_the_others(node):
    """Longer than the silence that it would bear of a head: srun and mpirun end all when one agent fails."""
    flags = ("--node_timeout=2", "--grace=1")  # a busy machine may be silent for a second
    commands = [node(rank, "sh", "-c", "[ $RANK -ge 2 ] || sleep 5", flags=flags) for rank in range(2)]
    assert [command.wait() for command in commands] == [0, 0]
    assert told(*commands) == []


def test_what_takes_the_connection_and_says_nothing_is_given_up(node, port):
    with socket.create_server(("127.0.0.1", port + 1)):
        command = node(1, "true", flags=("--join_timeout=1",))
        assert command.wait() == 1
    assert told(command) == [
        "infini-run: no response from what listens there for 1 s; check that it is node 0's infini-run"
    ]


def test_another_program_at_the_port_of_our_own_head_is_guessed(infini_run, port):
    env = {**os.environ, "INFINI_RUN_TOKEN": TOKEN}
    with socket.create_server(("127.0.0.1", port + 1)):
        command = infini_run("--nnodes=2", f"--rdzv_endpoint=127.0.0.1:{port}", "--join_timeout=1", "true", env=env)
        assert command.wait() == 1
    assert told(command)[-1].endswith(f"; port {port + 1} is in use on this machine, perhaps by another program")


def test_a_joiner_that_is_told_to_stop_when_its_ranks_have_ended_waits_for_the_end(node, bell):
    """Its report may still be on its way."""
    commands = [node(rank, *ring(bell, "[ $RANK -ge 2 ] || exec sleep 1000")) for rank in range(2)]
    bell.hear(4)
    until(lambda: handles(commands[1].pid, signal.SIGTERM))  # before that a rank may get it, or end by it
    commands[1].signal(signal.SIGTERM)
    commands[0].read_error_until(b": its ranks finished; the others keep running")
    assert commands[1].process.poll() is None
    commands[0].signal(signal.SIGINT)
    assert [command.wait() for command in commands] == [130, 130]


def test_a_joiner_says_whom_it_waits_for(node, port):
    command = node(1, "true", under=NOTICES_AT_ONCE)
    command.read_error_until(
        f"waiting for node 0: the head does not respond on port {port + 1}: 127.0.0.1: ".encode()
    )
    command.signal(signal.SIGTERM)
    command.wait()


def test_a_wrong_token_is_refused_and_the_job_unharmed(node, bell):
    head = node(0, *ring(bell), flags=("--join_timeout=50",))
    wrong = node(1, "true", token="other")
    assert wrong.wait() == 1
    assert told(wrong) == ["infini-run: the head rejected this launcher's token, or is not infini-run"]
    head.read_error_until(
        b"rejected 127.0.0.1, which connected to the link's port: the other side has another token, or something "
        b"changed its bytes on the way\n"
    )
    right = node(1, *ring(bell, "exec sleep 1000"))
    bell.hear(4)
    head.signal(signal.SIGTERM)
    assert head.wait() == 143
    assert right.wait() == 143


def test_garbage_and_port_scans_leave_the_job_unharmed(node, bell, port):
    gate = bell
    commands = [node(0, *ring(gate))]
    until(lambda: subprocess.run(["true"]) and _answers(port + 1))
    scans = [socket.create_connection(("127.0.0.1", port + 1)) for _ in range(300)]
    for at, scan in enumerate(scans):
        try:
            if at % 3 == 0:
                scan.send(b"GET / HTTP/1.1\r\n\r\n")
            elif at % 3 == 1:
                scan.send(os.urandom(100_000))
        except OSError:
            pass  # let go already
    for scan in scans[:50]:
        scan.close()
    commands.append(node(1, *ring(gate)))
    bell.hear(4)
    for scan in scans[50:]:
        scan.close()
    commands[0].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]
    assert len(told(commands[0])) < 12  # not one for each of them


def _answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_who_is_missing_is_named_when_the_time_is_up(node):
    joiner = node(1, "true", nnodes=3)  # it waits for its head already
    head = node(0, "true", nnodes=3, flags=("--join_timeout=4",))
    assert head.wait() == 1
    assert told(head)[-1] == "infini-run: 1 of 3 nodes did not join within 4 s (--join_timeout): node 2"
    assert joiner.wait() == 1


def test_a_joiner_without_a_head_gives_up_in_time(node):
    command = node(1, "true", flags=("--join_timeout=1",))
    assert command.wait() == 1
    assert len(told(command)) == 1
    assert "the head does not respond on port" in told(command)[0]


def test_nodes_may_run_different_numbers_of_ranks_and_say_so(node):
    script = "echo is $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$NNODES $NPROC_PER_NODE"
    flags = ("--stdin=4", "--local_ranks_filter=0-2")
    commands = [node(rank, "sh", "-c", script, nproc=nproc, flags=flags) for rank, nproc in enumerate((2, 3))]
    assert [command.wait() for command in commands] == [0, 0], commands[0].err
    assert sorted(line.split("is ")[1] for line in commands[0].out.decode().splitlines()) == [
        "0/5 0/2 0/2 2", "1/5 1/2 0/2 2", "2/5 0/3 1/2 3", "3/5 1/3 1/2 3", "4/5 2/3 1/2 3",
    ]  # fmt: skip
    assert len(told(*commands)) == 1
    assert "nodes run different numbers of ranks: " in told(*commands)[0]
    assert ":3; 5 in all" in told(*commands)[0]


def test_the_same_node_rank_twice_is_turned_away(node, bell):
    head, first = node(0, *ring(bell)), node(1, *ring(bell))
    bell.hear(4)
    second = node(1, "true", flags=("--join_timeout=5",))
    assert second.wait() == 1
    why = f"{os.uname().nodename} at 127.0.0.1 already has that number; use a different --node_rank on every node"
    assert told(second) == [f"infini-run: the head rejected node 1: {why}"]
    head.read_error_until(f"infini-run: rejected 127.0.0.1, which claims to be node 1: {why}\n".encode())
    head.signal(signal.SIGTERM)
    assert [head.wait(), first.wait()] == [143, 143]


def test_without_a_token_nothing_listens(node, port, bell):
    """As ever: each launcher is for itself."""
    command = node(0, *ring(bell), token="")
    bell.hear(2)
    assert not _answers(port + 1)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize(("rank", "token", "lines"), [(0, "", 1), (1, "", 0), (0, TOKEN, 0)])
def test_restarts_out_of_step_are_told_of_once_with_what_would_help(node, rank, token, lines):
    commands = [node(each, "true", token=token, flags=("--max_restarts=1",)) for each in {rank, 1 if token else rank}]
    assert [command.wait() for command in commands] == [0] * len(commands)
    found = [line for line in told(*commands) if "--max_restarts on several nodes" in line]
    assert len(found) == lines
    assert all("set the same INFINI_RUN_TOKEN=... on every node to make them one job" in line for line in found)


def test_a_short_token_and_another_address_are_told_of_by_node_0(node, port):
    head = node(0, "true", token="secret", flags=("--link_address=127.0.0.2",), under=NOTICES_AT_ONCE)
    head.read_error_until(
        b"infini-run: INFINI_RUN_TOKEN has fewer than 16 characters: others can guess it and join the job; use a "
        b"longer one\n"
    )
    head.read_error_until(f"(node 0 listens on 127.0.0.2:{port + 1}, the others connect to 127.0.0.1)\n".encode())
    head.signal(signal.SIGTERM)
    assert head.wait() == 143


def test_a_token_without_an_endpoint_is_refused(infini_run):
    command = infini_run("--nnodes=2", "true", env={**os.environ, "INFINI_RUN_TOKEN": "x"})
    assert command.wait() == 2
    assert "--rdzv_endpoint" in told(command)[0]
    assert len(told(command)) == 1


def test_the_token_may_be_in_a_file_that_only_we_may_read(node, tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nand a remark\n")
    file.chmod(0o600)
    said = ["sh", "-c", "echo $RANK ${INFINI_RUN_TOKEN-none} ${INFINI_RUN_TOKEN_FILE-none}"]
    head = node(0, *said, token="", env={"INFINI_RUN_TOKEN_FILE": str(file)})
    joiner = node(1, *said)
    assert (head.wait(), joiner.wait()) == (0, 0)
    assert sorted(line.split(b"] ")[1] for line in head.out.splitlines()) == [b"%d none none" % r for r in range(4)]


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [(TOKEN, 0o644, "others can read or write it; run chmod 600 "), ("\n", 0o600, "its first line is empty"),
     (None, 0, "No such file"),
     *(pytest.param("x" * size, 0o600, "its first line is not 16 to 4096 printable characters", id=f"{size} bytes")
       for size in (4097, 1 << 18)),
     *((weak, 0o600, "its first line is not 16 to 4096 printable characters") for weak in (
         "short\n", f"{TOKEN[:15]}\n{TOKEN}", f"{TOKEN}\0{TOKEN}\n", "\0" * 32, b"\xff\x80" * 16, "\x1b" * 20))],
)  # fmt: skip
def test_a_token_file_that_is_no_secret_is_refused(node, tmp_path, text, mode, problem):
    file = tmp_path / "token"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(mode)
    command = node(0, "true", token="", env={"INFINI_RUN_TOKEN_FILE": str(file)})
    assert command.wait() == 2
    assert f"INFINI_RUN_TOKEN_FILE={file}: {problem}" in told(command)[0]
    assert len(told(command)) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which may read what belongs to others")
def test_token_file_of_other_user_is_refused(node, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    os.chown(file, 31000, 0)
    command = node(0, "true", token="", flags=(f"--token_file={file}",))
    assert command.wait() == 2
    said = f"--token_file={file}: belongs to user 31000, who can read the token; run chown 0 {file}"
    assert told(command) == [f"infini-run: {said}"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root lets itself be another user")
def test_token_file_of_root_is_refused_without_chmod(node, tmp_path):
    """The kubelet's files are root's: their reader can change no mode."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o440)
    os.chown(file, 0, 31000)
    may_read = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")  # this Python may be in a closed folder
    under = ("setpriv", "--reuid=31000", "--regid=31000", "--clear-groups", *may_read)
    command = node(0, "true", token="", flags=(f"--token_file={file}",), under=under)
    assert command.wait() == 2
    said = f"--token_file={file}: others can read or write it; set INFINI_RUN_TOKEN=... instead"
    assert told(command) == [f"infini-run: {said}"]


def test_token_file_that_is_no_file_is_refused_at_once(node, tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, problem in ((tmp_path / "fifo", "its first line is empty"), ("/dev/null", "not a regular file")):
        command = node(0, "true", token="", flags=(f"--token_file={path}",))
        assert command.wait() == 2
        assert f"--token_file={path}: {problem}" in told(command)[0]


def test_token_may_come_from_process_substitution(node):
    script = f'exec "$@" --token_file=<(sleep 0.2; echo {TOKEN}) true'
    head = node(0, token="", under=("bash", "-c", script, "_"))
    joiner = node(1, "true")
    assert (head.wait(), joiner.wait()) == (0, 0)


def test_a_port_that_is_taken_is_one_line(node, port):
    with socket.create_server(("127.0.0.1", port + 1)):
        command = node(0, "true")
        assert command.wait() == 2
        assert told(command) == [
            f"infini-run: port {port + 1} for the link between the nodes: Address already in use"
        ]


# ---- files of several nodes in one folder


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_nodes_that_share_a_folder_in_the_layout_of_torchrun_share_no_file(node, tmp_path, token):
    """Same id, same folder, same local ranks: the error of each rank is told as its own."""
    script = 'echo out $RANK; echo "boom $RANK" > $TORCHELASTIC_ERROR_FILE; [ $RANK != 2 ] || exit 3'
    flags = ("--rdzv_id=job", f"--log_dir={tmp_path}", "--log_layout=torchrun", f"--report={tmp_path}/report")
    commands = [
        node(rank, "sh", "-c", script, token=token, flags=(*flags[:-1], f"{flags[-1]}{rank}", "--keep_going"))
        for rank in range(2)
    ]
    assert [command.wait() for command in commands] == ([3, 3] if token else [0, 3])
    files = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*/attempt_0/*/*")}
    found = sorted((str(path).partition("/")[2], text) for path, text in files.items() if path.name != "stderr.log")
    assert found == sorted(
        (f"node_{rank // 2}/attempt_0/{rank % 2}/{name}", f"{said} {rank}\n")
        for rank in range(4)
        for name, said in (("stdout.log", "out"), ("error.json", "boom"))
    )
    first = commands[0 if token else 1].err
    assert b"rank 2 on" in first
    assert b"error: boom 2\n" in first
    assert len({str(path).partition("/")[0] for path in files}) == (1 if token else 2)


def test_attempts_of_nodes_in_the_layout_of_torchrun_stand_in_one_run(node, tmp_path):
    flags = ("--max_restarts=1", "--restart_delay=0", f"--log_dir={tmp_path}", "--log_layout=torchrun")
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3"
    commands = [node(rank, "sh", "-c", script, nproc=1, flags=flags) for rank in range(2)]
    assert [command.wait() for command in commands] == [0, 0], commands[0].err
    (run,) = tmp_path.iterdir()
    folders = sorted(str(path.parent.relative_to(run)) for path in run.rglob("stdout.log"))
    assert folders == [f"node_{node}/attempt_{attempt}/0" for node in range(2) for attempt in range(2)]


def test_table_from_outside_has_the_gpus_of_all_nodes(node, busy_gpus, tmp_path):  # noqa: F811
    """Read by a process of its own on each node, which the next answer has; not by the launcher."""
    gpus = tmp_path / "gpus"
    gpus.write_text(f"{UUIDS[0]} 70 3000\n{UUIDS[1]} 20 500\n")
    environ = {"LD_LIBRARY_PATH": busy_gpus, "BUSY_GPUS": str(gpus), "CUDA_VISIBLE_DEVICES": "0,1"}
    words = ("--gpus_per_proc=1", *play("say=up", "wait"))
    commands = [node(rank, *words, env=environ) for rank in (0, 1)]
    until(lambda: commands[0].out.count(b"up") == 4 or commands[0].read_more())
    top = [*COMMAND, "--top", str(commands[0].pid)]

    def table():
        return subprocess.run(
            top, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
        ).stdout

    until(lambda: table().count("70%") == 2)
    assert table().count("2.9G") == table().count("500M") == table().count("20%") == 2
    commands[0].signal(signal.SIGTERM)
    assert [command.wait() for command in commands] == [143, 143]
