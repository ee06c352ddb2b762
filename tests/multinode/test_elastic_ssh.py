"""Jobs that lose a node and go on, over real sshd: a spare takes its place, a world shrinks, and no rank of an old
world lives when one of the new world starts."""

# ruff: noqa: F811

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.multinode.test_many_ssh import bed, cabled_bed, many, no_agent_left, own_lines  # noqa: F401
from tests.support.cgroups import cgroup
from tests.support.command import CHILDREN, NOTICES_AT_ONCE, Bell, altered
from tests.support.hosts import agents, ssh_to
from tests.support.processes import OURS, is_alive, lead_group, marked, processes, state_of
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)

SAYS = "echo $TORCHELASTIC_RESTART_COUNT $RANK/$WORLD_SIZE $(uname -n) $MASTER_PORT"
STAYS = "exec sleep 1000"
TIMEOUT_S = 3  # a busy machine is not silent for so long
FAST = (f"--node_timeout={TIMEOUT_S}", "--grace=1")
CALM = ("--spares=1", *FAST)


def ring(bell, then=STAYS, first=":"):
    """A rank that does `first`, tells of itself, and then does `then`."""
    return ["sh", "-c", f"{first}; {SAYS} > {shlex.quote(bell.path)}; {then}"]


def in_world(number, then):
    """What the ranks of one world do; those of others stay."""
    return f"[ $TORCHELASTIC_RESTART_COUNT = {number} ] && {{ {then}; }}; {STAYS}"


class FailingRank:
    """A rank of the first attempt that exits with 1 when it is told to; and a check that waits on one host then."""

    def __init__(self, folder, rank):
        self.rank, self.slow = rank, folder / "slow"
        self.order, self.gate = folder / "order", folder / "gate"
        os.mkfifo(self.order)
        os.mkfifo(self.gate)
        self.check = f"""--node_check=sh -c '[ "$(cat {self.slow} 2>&1)" != $(uname -n) ] || read go < {self.gate}'"""

    def then(self, otherwise=STAYS):
        mine = f"[ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $RANK = {self.rank} ]"
        return f"{mine} && {{ read go < {self.order}; exit 1; }}; {otherwise}"

    def now(self, slow=""):
        self.slow.write_text(slow)
        self.order.write_text("go\n")

    def open_gate(self):
        self.gate.write_text("go\n")


def hear_world(bell, number, size):
    """The hosts of a world's ranks, by rank: no other world's rank tells of itself meanwhile."""
    hosts, ports = {}, set()
    for line in bell.hear(size):
        world, rank, host, port = line.split()
        assert (world, rank.partition("/")[2]) == (str(number), str(size)), line
        hosts[int(rank.partition("/")[0])] = host
        ports.add(port)
    assert sorted(hosts) == list(range(size)), "each rank once"
    assert len(ports) == 1, "all meet at one place"
    return [hosts[rank] for rank in range(size)]


def launcher_of(rank, world=0):
    """The agent that runs that rank, as this machine numbers it."""
    found = []
    until(
        lambda: found.extend(processes()[pid][0] for pid in _processes_of(rank, world) if pid in processes()) or found
    )
    return found[0]


def process_of(rank, world=0):
    """The rank itself. In the middle of an exec it has no environment for a moment."""
    found = []
    until(lambda: found.extend(_processes_of(rank, world)) or found)
    return found[0]


def _processes_of(rank, world):
    wanted = {f"RANK={rank}", f"TORCHELASTIC_RESTART_COUNT={world}", "=".join(OURS)}
    for pid, (parent, state, _) in processes().items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if state not in "ZX" and wanted <= set(environ) and f"RANK={rank}".encode() not in environ_of(parent):
            return [pid]
    return []


def environ_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def writes_to(folder):
    """What a rank does that writes its world and the time, again and again."""
    return f"while :; do echo $TORCHELASTIC_RESTART_COUNT $(date +%s.%N) >> {folder}/written-$(uname -n); done"


def check_written(folder, worlds):
    """Nothing of a world was written after the first word of the next one."""
    times = written(folder)
    assert sorted(times) == list(range(worlds))
    for world in range(1, worlds):
        assert max(times[world - 1]) < min(times[world])


def written(folder):
    """When something was written, by world."""
    times = {}
    for path in folder.glob("written-*"):
        for line in path.read_text().splitlines():
            if line.count(" ") == 1:
                world, at = line.split()
                times.setdefault(int(world), []).append(float(at))
    return times


def agent_on(host):
    """The agent there, as this machine numbers it."""
    for pid in agents():
        words = [word.split() for word in environ_of(pid) if word.startswith(b"SSH_CONNECTION=")]
        if words and host == f"host{int(words[0][2].rpartition(b'.')[2])}":
            return pid
    raise AssertionError(f"no agent on {host}")


def finish(command, code=0):
    assert command.wait() == code, command.err
    until(lambda: not marked())


def test_a_spare_takes_the_place_of_a_node_whose_agent_was_killed(many, bell):
    """That the ranks of the killed agent are gone is known as soon as an agent has looked there."""
    command = many("--spares=1", "--grace=2", *ring(bell, in_world(1, "exit 0")))
    assert hear_world(bell, 0, 6) == ["host1"] * 2 + ["host2"] * 2 + ["host3"] * 2
    os.kill(launcher_of(2), signal.SIGKILL)
    hosts = hear_world(bell, 1, 6)
    assert hosts[:2] + hosts[4:] == ["host1"] * 2 + ["host3"] * 2
    assert hosts[2:4] in (["host4"] * 2, ["host2"] * 2)  # the host is well, and may be back before
    finish(command)
    assert any(line.startswith("infini-run: lost node 1 (host2)") for line in own_lines(command))


def test_a_host_is_reached_again_at_once_for_its_answer_is_what_the_next_world_waits_for(many, bell):
    """Without an answer it waits for GUARD_WAIT_S, which is longer here than any test waits, as --node_timeout is."""
    waits = altered({"multinode.head.world_changes.GUARD_WAIT_S": 1000.0})
    flags = ("--spares=1", "--grace=2", "--node_timeout=1000", *ring(bell))
    command = many(*flags, hosts="host[1-3]", nproc=1, under=waits)
    hear_world(bell, 0, 2)
    os.kill(launcher_of(1), signal.SIGKILL)
    hear_world(bell, 1, 2)
    command.read_error_until(b" joined as a spare")
    command.signal(signal.SIGTERM)
    finish(command, 143)


def test_a_host_that_is_down_for_a_while_is_reached_again_until_it_answers(bed, many, bell):
    flags = ("--spares=1", f"--node_timeout={TIMEOUT_S}", *ring(bell, in_world(2, "exit 0")))
    command = many(*flags, hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    with bed.host_down(2):
        hear_world(bell, 1, 2)
        command.read_error_until(b"host2 could not be reached")
    command.read_error_until(b"host2 joined as a spare")
    os.kill(launcher_of(0, world=1), signal.SIGKILL)
    hear_world(bell, 2, 2)
    finish(command)


def test_the_requested_address_is_that_of_the_first_node_0_and_another_has_its_own(bed, many, bell):
    """A port that processes of an earlier attempt know is not used again on that node."""
    says = f"echo $RANK $(uname -n) $MASTER_ADDR $MASTER_PORT > {shlex.quote(bell.path)}"
    flags = ("--spares=1", *FAST, "--rdzv_endpoint=host1:29700")
    ends = in_world(2, "exit 0")
    command = many(*flags, "sh", "-c", f"{says}; {ends}", hosts="host[1-3]", nproc=1)
    assert sorted(bell.hear(2)) == ["0 host1 host1 29700", "1 host2 host1 29700"]
    with bed.host_down(1):
        (_, host, address, port), (_, _, *same) = sorted(line.split() for line in bell.hear(2))
        assert (host, address, port) == ("host3", "127.0.78.3", "29700")
        assert same == [address, port]
        command.read_error_until(b"host1 could not be reached")
    command.read_error_until(b"host1 joined as a spare")
    os.kill(launcher_of(0, world=1), signal.SIGKILL)
    (_, host, address, port), (_, _, *same) = sorted(line.split() for line in bell.hear(2))
    assert address == {"host1": "host1", "host3": "127.0.78.3"}[host]
    assert port != "29700"
    assert same == [address, port]
    finish(command)


def test_a_world_shrinks_and_the_numbers_of_its_ranks_are_those_of_its_hosts(many, bell, tmp_path):
    gate = tmp_path / "gate"
    fails = f"while [ ! -e {gate} ]; do sleep 0.05; done; [ $RANK = 1 ] && exit 7"
    flags = ("--nnodes=2:3", "--join_window=4", f"--report={tmp_path}/r")
    command = many(*flags, *ring(bell, in_world(1, fails)), hosts="host[1-3]", nproc=1)
    assert hear_world(bell, 0, 3) == ["host1", "host2", "host3"]
    os.kill(launcher_of(1), signal.SIGTERM)
    assert hear_world(bell, 1, 2) == ["host1", "host3"]
    gate.touch()
    finish(command, 7)
    assert b"node 1 (host2): got SIGTERM there, and leaves" in command.err
    smaller = b"attempt 2: smaller: 2 nodes instead of 3: host1, host3 (host2 was asked to stop)"
    assert smaller in command.err
    assert b"rank 1 on host3" in command.err
    report = json.loads((tmp_path / "r").read_text())
    assert (report["exit_code"], report["world_size"], report["restarts"]) == (7, 2, 1)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]


@pytest.mark.parametrize("loss", ["cable", "suspended"])
def test_a_node_that_is_not_reached_writes_nothing_after_the_first_word_of_the_next_world(
    cabled_bed, many, bell, tmp_path, loss
):
    """Its ranks end by their lease, also where the agent is stopped; the others wait for that."""
    command = many(*CALM, *ring(bell, writes_to(tmp_path)), on=cabled_bed, nproc=1)
    assert hear_world(bell, 0, 3) == ["host1", "host2", "host3"]
    if loss == "cable":
        cabled_bed.tell("cable", 2, "down")
    else:
        agent = launcher_of(1)
        os.kill(agent, signal.SIGSTOP)
    try:
        hosts = hear_world(bell, 1, 3)
    finally:
        if loss == "cable":
            cabled_bed.tell("cable", 2, "up")
    assert hosts[0] == "host1"
    assert hosts[2] == "host3"
    if loss == "cable":
        assert hosts[1] == "host4"
    until(lambda: 1 in written(tmp_path))
    check_written(tmp_path, worlds=2)
    command.signal(signal.SIGTERM)
    finish(command, 143)


def test_ssh_that_was_killed_here_tells_nothing_of_the_ranks_there(many, bell, tmp_path, suspended):
    """They live until their lease ends, since their agent does not see that its link has ended."""
    command = many(*CALM, *ring(bell, writes_to(tmp_path)), nproc=1)
    assert hear_world(bell, 0, 3) == ["host1", "host2", "host3"]
    suspended(launcher_of(1))
    os.kill(ssh_to("host2", command.pid), signal.SIGKILL)
    hear_world(bell, 1, 3)
    until(lambda: 1 in written(tmp_path))
    command.signal(signal.SIGTERM)
    finish(command, 143)
    check_written(tmp_path, worlds=2)


def test_the_end_of_a_newcomer_tells_nothing_of_the_ranks_that_were_there_before(
    bed, infini_run, bell, tmp_path, suspended
):
    """It never was an agent: its Python ends with an exit status, which ssh carries."""
    python, broken = tmp_path / "python", tmp_path / "broken"
    python.write_text(
        f'#!/bin/sh\n[ $(uname -n) = host2 ] && [ -e {broken} ] && exit 3\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    reach = ("--hosts=host[1-4]", f"--ssh_config={bed.config}", f"--remote_python={python}", "--nproc_per_node=1")
    command = infini_run(*reach, *CALM, *ring(bell, writes_to(tmp_path)))
    assert hear_world(bell, 0, 3) == ["host1", "host2", "host3"]
    broken.touch()
    suspended(launcher_of(1))
    os.kill(ssh_to("host2", command.pid), signal.SIGKILL)
    assert hear_world(bell, 1, 3) == ["host1", "host4", "host3"]
    until(lambda: 1 in written(tmp_path))
    command.signal(signal.SIGTERM)
    finish(command, 143)
    assert b"host2 did not join: ssh exited with 3" in command.err
    check_written(tmp_path, worlds=2)


def test_the_end_of_an_agent_tells_nothing_of_the_ranks_that_came_after_it(many, bell, tmp_path, suspended):
    """It is killed by a second ssh, which may take as long as it likes: the host runs ranks of the next world by
    then, and has lost them, too."""
    ssh, gate = tmp_path / "bin" / "ssh", tmp_path / "gate"
    ssh.parent.mkdir()
    waits = f"while [ ! -e {gate} ]; do sleep 0.05; done"
    ssh.write_text(f'#!/bin/sh\ncase "$*" in *"kill -KILL"*) {waits};; esac\nexec {shutil.which("ssh")} "$@"\n')
    ssh.chmod(0o755)
    env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    flags = ("--nnodes=1:2", "--join_window=20", *FAST)
    command = many(*flags, *ring(bell, writes_to(tmp_path)), hosts="host[1-2]", nproc=1, env=env)
    assert hear_world(bell, 0, 2) == ["host1", "host2"]
    suspended(launcher_of(1))
    assert hear_world(bell, 1, 2) == ["host1", "host2"]
    suspended(launcher_of(1, world=1))
    os.kill(ssh_to("host2", command.pid), signal.SIGKILL)
    command.read_error_until(b"lost node 1 (host2); restarting all ranks")
    gate.touch()
    command.read_error_until(b"node 1 (host2): its agent did not respond; killed it and its ranks there")
    hear_world(bell, 2, 2)
    until(lambda: 2 in written(tmp_path))
    command.signal(signal.SIGTERM)
    finish(command, 143)
    check_written(tmp_path, worlds=3)


def test_a_node_that_is_silent_after_its_ranks_have_ended_is_reached_again(many, bell, tmp_path, suspended):
    """While those of another node still end. Its suspended agent is killed there, as any that is silent."""
    gate = tmp_path / "gate"
    slow = f"[ $RANK != 0 ] || trap 'while [ ! -e {gate} ]; do sleep 0.05; done; exit 0' TERM"
    flags = ("--spares=1", f"--node_timeout={TIMEOUT_S}", "--grace=100")
    command = many(*flags, *ring(bell, f"[ $RANK != 0 ] || {{ sleep 1000 & wait; }}; {STAYS}", slow), nproc=1)
    assert hear_world(bell, 0, 3) == ["host1", "host2", "host3"]
    agent, rank = launcher_of(1), process_of(1)
    os.kill(launcher_of(2), signal.SIGKILL)
    until(lambda: not is_alive(rank))
    suspended(agent)
    time.sleep(2 * TIMEOUT_S)
    gate.touch()
    if "host2" not in hear_world(bell, 1, 3):
        command.read_error_until(b"host2 joined as a spare")
    until(lambda: not is_alive(agent))
    command.signal(signal.SIGTERM)
    finish(command, 143)


def test_a_spare_that_has_run_ranks_and_is_lost_is_a_spare_no_more(many, bell, tmp_path):
    """Its rank was the first to fail, so it is excluded; its agent stays."""
    fails = FailingRank(tmp_path, 1)
    flags = ("--spares=1", "--max_node_failures=1", "--max_restarts=1", "--restart_delay=0")
    command = many(*flags, *ring(bell, fails.then(in_world(2, "exit 0"))), hosts="host[1-3]", nproc=1)
    assert hear_world(bell, 0, 2) == ["host1", "host2"]
    fails.now()
    assert hear_world(bell, 1, 2) == ["host1", "host3"]
    assert b"attempt 2: host3 replaces host2 as node 1 (host2 is excluded)" in error_until(command, b"attempt 2")
    os.kill(agent_on("host2"), signal.SIGKILL)
    command.read_error_until(b"lost host2; no rank ran there")
    os.kill(launcher_of(0, world=1), signal.SIGKILL)
    hear_world(bell, 2, 2)
    finish(command)


def error_until(command, *texts):
    command.read_error_until(*texts)
    command.read_error_until(b"\n")
    return command.err


@pytest.mark.parametrize("flags", [("--spares=1",), ("--spares=1", "--nnodes=2:3"), ("--nnodes=2:4",)], ids=" ".join)
@pytest.mark.parametrize("slow", ["host1", "host2"])
def test_a_node_that_is_well_stays_though_the_check_of_a_spare_is_faster(many, bell, tmp_path, slow, flags):
    """A rank has failed, and no node is lost: all nodes are checked again, and any check may be the last to end."""
    fails, size = FailingRank(tmp_path, 2), 4 if "2:4" in flags[-1] else 3
    flags = (*flags, "--max_restarts=1", "--restart_delay=0", fails.check)
    command = many(*flags, *ring(bell, fails.then(in_world(1, "exit 0"))), nproc=1, under=NOTICES_AT_ONCE)
    hosts = hear_world(bell, 0, size)
    assert hosts == [f"host{number}" for number in range(1, size + 1)]
    fails.now(slow)
    command.read_error_until(b"waiting for the check of " + slow.encode(), b"attempt 2:")
    assert b"attempt 2:" not in command.err
    fails.open_gate()
    assert hear_world(bell, 1, size) == hosts
    finish(command)
    assert f"attempt 2: the same {size} nodes" in command.err.decode()


def test_a_node_is_excluded_for_the_first_failure_by_the_clocks_not_for_the_first_that_was_heard(
    many, bell, tmp_path, suspended
):
    """As the report has it. The link to the one that failed first is slow."""
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"order{rank}")
    fails = f"[ $RANK != 2 ] && {{ read go < {tmp_path}/order$RANK; exit 1; }}"
    fails = f"[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; {fails}; {STAYS}"
    flags = ("--spares=1", "--max_node_failures=1", "--max_restarts=1", "--restart_delay=0")
    command = many(*flags, *ring(bell, fails), nproc=1)
    assert hear_world(bell, 0, 3) == ["host1", "host2", "host3"]
    ranks = [process_of(rank) for rank in range(3)]
    link = ssh_to("host2", command.pid)
    suspended(link)
    for rank, stopped in ((1, ranks[1]), (0, ranks[2])):  # the last one ends when the head has heard of the failure
        (tmp_path / f"order{rank}").write_text("go\n")
        until(lambda stopped=stopped: stopped not in processes())
    os.kill(link, signal.SIGCONT)
    assert hear_world(bell, 1, 3) == ["host1", "host4", "host3"]
    finish(command)
    assert b"rank 1 on host2 failed: exit code 1" in command.err
    assert b"excluded host2: its ranks were the first to fail in 1 attempt\n" in command.err


def test_a_process_that_sigkill_did_not_end_is_the_end_of_the_job(many, bell, tmp_path, freezer):
    """No other attempt begins beside it, though a node was lost, which costs nothing."""
    flags = ("--spares=1", "--grace=0.2", f"--report={tmp_path}/r")
    command = many(*flags, *ring(bell), hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    freezer.freeze(process_of(0))
    os.kill(launcher_of(1), signal.SIGKILL)
    assert command.wait() == 1
    report = json.loads((tmp_path / "r").read_text())
    assert (report["restarts"], report["not_restarted"]) == (0, "some processes did not end")
    assert b"survived SIGKILL (state D); leaving it" in command.err
    freezer.thaw()


def test_a_node_that_comes_back_is_a_spare_and_serves_as_one(many, bell):
    command = many("--spares=1", "--verbose", *ring(bell, in_world(2, "exit 0")), hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    os.kill(launcher_of(1), signal.SIGKILL)
    hear_world(bell, 1, 2)
    command.read_error_until(b" joined as a spare")
    os.kill(launcher_of(0, world=1), signal.SIGKILL)
    hear_world(bell, 2, 2)
    finish(command)


def test_a_node_is_reached_once_also_where_its_end_and_that_of_its_ssh_are_seen_together(many, bell):
    """A second agent on one node would be heard by nobody, and its end, a timeout later, taken for the node's."""
    then = in_world(1, f"sleep {TIMEOUT_S + 2}; exit 0")
    command = many("--spares=1", f"--node_timeout={TIMEOUT_S}", *ring(bell, then), hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    ssh = {pid for pid, (parent, _, name) in processes().items() if (parent, name) == (command.pid, "ssh")}
    command.suspend()
    os.kill(launcher_of(1), signal.SIGKILL)
    until(lambda: any(state_of(pid) == "Z" for pid in ssh))
    command.signal(signal.SIGCONT)
    hear_world(bell, 1, 2)
    finish(command)
    losses = ("lost node", "could not", "gave up this head")  # which had been away for long, perhaps
    told = [line for line in own_lines(command) if any(loss in line for loss in losses)]
    assert len(told) == 1, command.err


def test_a_rank_that_fails_costs_a_restart_and_a_lost_node_does_not(many, bell, tmp_path):
    gate = tmp_path / "gate"
    fails = f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 3"
    then = f"[ $TORCHELASTIC_RESTART_COUNT = 1 ] && [ $RANK = 0 ] && {{ {fails}; }}; {in_world(2, 'exit 0')}"
    command = many("--spares=1", "--max_restarts=1", "--restart_delay=0", *ring(bell, then), nproc=1)
    hear_world(bell, 0, 3)
    os.kill(launcher_of(2), signal.SIGKILL)
    hear_world(bell, 1, 3)
    gate.touch()
    hear_world(bell, 2, 3)
    finish(command)
    assert b"restart 1 of 1" in command.err


def test_too_few_nodes_are_waited_for_and_then_the_job_ends(many, bell):
    flags = ("--nnodes=2:3", "--join_window=0.1", "--join_timeout=5")
    command = many(*flags, "true", hosts="host1,no-such-host,nor-this")
    assert command.wait() == 1
    (line,) = [line for line in own_lines(command) if "--join_timeout" in line]
    assert "1 of at least 2 nodes joined after 5 s (--join_timeout); missing: no-such-host, nor-this" in line
    assert "Could not resolve hostname no-such-host" in line


def test_a_program_that_is_not_there_ends_the_job_at_once(many):
    command = many("--spares=1", "/no/such/program")
    assert command.wait() == 127
    assert b"/no/such/program" in command.err


def test_the_head_is_told_to_stop_and_everything_stops(many, bell):
    command = many("--spares=1", *ring(bell), nproc=1)
    hear_world(bell, 0, 3)
    command.signal(signal.SIGTERM)
    finish(command, 143)


def test_a_node_that_fails_its_check_is_left_out_with_its_last_line(many, bell):
    check = 'sh -c "[ $(uname -n) != host2 ] || { echo ECC errors on GPU 2; exit 3; }"'
    command = many("--spares=1", "--join_window=0.1", f"--node_check={check}", *ring(bell), nproc=1)
    assert hear_world(bell, 0, 3) == ["host1", "host3", "host4"]
    command.read_error_until(b"excluded host2: node check exited with 3: ECC errors on GPU 2")
    command.signal(signal.SIGTERM)
    finish(command, 143)


def test_a_check_that_fails_on_half_of_the_nodes_leaves_a_job_that_runs(many, bed, bell, tmp_path):
    """The node that joins last counts, too, however early the checks of the first ones fail."""
    gate, config = Bell(tmp_path / "gate"), tmp_path / "config"
    config.write_text(f'Match originalhost host4 exec "read go < {gate.path}"\nMatch all\nInclude {bed.config}\n')
    check = 'sh -c "[ $(uname -n) != host1 ] && [ $(uname -n) != host2 ]"'
    flags = ("--spares=2", "--join_window=0.1", f"--node_check={check}")
    command = many(*flags, *ring(bell), nproc=1, config=config)
    command.read_error_until(b"excluded host1: ")
    command.read_error_until(b"excluded host2: ")
    gate.ring("go")
    assert hear_world(bell, 0, 2) == ["host3", "host4"]
    gate.close()
    command.signal(signal.SIGTERM)
    finish(command, 143)


def test_a_check_that_hangs_is_ended_at_its_timeout(many, bell):
    check = 'sh -c "[ $(uname -n) != host1 ] || exec sleep 1000"'
    flags = ("--spares=1", "--join_window=0.1", f"--node_check={check}", "--node_check_timeout=0.5")
    command = many(*flags, *ring(bell), nproc=1)
    assert hear_world(bell, 0, 3) == ["host2", "host3", "host4"]
    command.read_error_until(b"excluded host1: the node check did not end within 0.5 s")
    command.signal(signal.SIGTERM)
    finish(command, 143)


PROGRESSES = """
import os, socket, sys, time
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0" and restarts < 4:
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.connect(os.environ["NOTIFY_SOCKET"].replace("@", chr(0), 1))
    notify.send(f"PROGRESS={restarts}".encode())
    for _ in range(3):  # the launcher answers one after the other: it has dealt with the progress, too
        awaited, answered = os.pipe()
        socket.send_fds(notify, [b"BARRIER=1"], [answered])
        os.close(answered)
        os.read(awaited, 1)
open(sys.argv[1], "w").write(f"{restarts}\\n")
time.sleep(1000 if restarts < 4 else 0)
"""


def test_the_progress_of_a_rank_whose_node_is_lost_counts(many, bell):
    """Only rank 0 tells of progress. The first node to be lost is another one: --max_no_progress holds from there."""
    command = many(
        "--spares=1", "--max_no_progress=1", sys.executable, "-c", PROGRESSES, bell.path, hosts="host[1-3]", nproc=1
    )
    for world in range(4):
        assert bell.hear(2) == [str(world)] * 2
        os.kill(launcher_of(int(world == 0), world=world), signal.SIGKILL)
    finish(command)


def test_attempts_without_progress_end_the_job_whoever_is_lost(many, bell, tmp_path):
    """A rank that tells of its progress is trusted with it: three attempts that get no further are enough."""
    tells = "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
    tells += "s.sendto(b'PROGRESS=5', os.environ['NOTIFY_SOCKET'].replace('@', chr(0), 1)); "
    tells += f"open({bell.path!r}, 'w').write(os.environ['TORCHELASTIC_RESTART_COUNT'] + chr(10)); time.sleep(1000)"
    command = many("--spares=1", "--max_no_progress=2", sys.executable, "-c", tells, hosts="host[1-3]", nproc=1)
    for world in range(3):
        assert bell.hear(2) == [str(world)] * 2
        os.kill(launcher_of(1, world=world), signal.SIGKILL)
    assert command.wait() == 1
    assert b"2 attempts in a row without exceeding PROGRESS=5" in command.err


def test_the_trace_and_the_report_have_the_node_that_was_lost(many, bell, tmp_path):
    flags = ("--spares=1", f"--trace={tmp_path}/t", f"--report={tmp_path}/r")
    command = many(*flags, *ring(bell, in_world(1, "exit 0")), hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    os.kill(launcher_of(1), signal.SIGKILL)
    hosts = hear_world(bell, 1, 2)
    finish(command)
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    for host in {"host1", "host2", *hosts}:
        assert any(host in name for name in names), names
    told = [event["name"] for event in events if event.get("cat") == "event"]
    assert any("lost node 1 (host2)" in text for text in told), told
    report = json.loads((tmp_path / "r").read_text())
    assert report["restarts"] == 1
    assert any("lost node 1 (host2)" in notice for notice in report["notices"])
    assert [text.partition(":")[0] for text in report["lost"]] == ["lost node 1 (host2)"]
    earlier = [(e["rank"], e["host"], e["lost"], e["failed"]) for e in report["earlier_failures"]]
    assert earlier == [(1, "host2", True, True)]
    assert (report["first_failure"], report["exit_code"]) == (None, 0)
    assert [rank["host"] for rank in report["ranks"]] == hosts


def test_a_reader_that_does_not_read_costs_no_rank(many, bell, tmp_path):
    """The head reads no node meanwhile, so it hears no request for a lease."""
    gate = tmp_path / "gate"
    floods = f"[ $RANK = 1 ] && {{ head -c 30000000 /dev/zero | tr '\\0' x; touch {gate}; exit 0; }}; {STAYS}"
    command = many(*CALM, *ring(bell, floods), hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    time.sleep(2.2 * TIMEOUT_S)
    assert not gate.exists(), "the head reads on"
    while not gate.exists():
        command.read_more()
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert b"lost node" not in command.err, command.err.decode()


def test_a_head_with_little_of_a_processor_costs_no_rank(many, bell):
    """A node's requests for a lease stand behind its output, which the head reads too slowly."""
    floods = f"[ $RANK = 1 ] && exec tr '\\0' x < /dev/zero; {STAYS}"
    command = many(*CALM, *ring(bell, floods), hosts="host[1-3]", nproc=1)
    hear_world(bell, 0, 2)
    a_hundredth = {
        1: {"cpu.cfs_quota_us": "1000", "cpu.cfs_period_us": "100000"},
        2: {"cpu.max": "1000 100000"},
    }
    size, end_s = 0, time.monotonic() + 3 * TIMEOUT_S
    with cgroup("cpu", a_hundredth) as folder:
        (folder / "cgroup.procs").write_text(str(command.pid))
        while time.monotonic() < end_s or size < 6 << 20:  # more than the head, ssh and the node's agent keep
            size += len(os.read(command.process.stdout.fileno(), 1 << 16))
            time.sleep(0.05)  # a reader that is quicker makes up for the processor
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert b"lost node" not in command.err, command.err.decode()


def test_a_node_that_ends_its_ranks_since_its_link_carries_nonsense_is_lost(many, bell, tmp_path):
    """It is no node that could not start them: they may live for a moment."""
    ssh, nonsense = tmp_path / "bin" / "ssh", tmp_path / "nonsense"
    ssh.parent.mkdir()
    os.mkfifo(nonsense)
    spoiled = f"{sys.executable} -IS {CHILDREN}/spoiled_ssh.py {shutil.which('ssh')} {nonsense} host2"
    ssh.write_text(f'#!/bin/sh\nexec {spoiled} "$@"\n')
    ssh.chmod(0o755)
    env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    command = many(*CALM, *ring(bell), hosts="host[1-3]", nproc=1, env=env)
    assert hear_world(bell, 0, 2) == ["host1", "host2"]
    Path(f"{nonsense}.off").touch()
    nonsense.write_bytes(bytes(5))
    hear_world(bell, 1, 2)
    command.signal(signal.SIGTERM)
    finish(command, 143)
    lost = b"lost node 1 (host2): what came over the link is not what infini-run sends; restarting all ranks"
    assert lost in command.err, command.err.decode()


def test_ctrl_z_of_the_head_costs_no_rank(many, bell):
    command = many(*CALM, *ring(bell), hosts="host[1-3]", nproc=1, preexec_fn=lead_group)
    hear_world(bell, 0, 2)
    command.signal(signal.SIGTSTP)
    until(lambda: processes()[command.pid][1] == "T")
    time.sleep(2.2 * TIMEOUT_S)
    command.signal(signal.SIGCONT)
    until(lambda: processes()[command.pid][1] != "T")
    command.signal(signal.SIGTERM)
    finish(command, 143)
    assert b"lost node" not in command.err, command.err.decode()
