"""Functions that lose a node and go on, over real sshd: a spare takes its place, the world shrinks, no rank of an old
world lives when one of the new world starts, and nothing is left running."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

import infini_run as ir
from tests.multinode.test_elastic_ssh import launcher_of
from tests.support.command import Command
from tests.support.hosts import Bed, agents
from tests.support.processes import marked
from tests.support.waiting import LIMIT_S, stderr_so_far, until

pytestmark = pytest.mark.xdist_group(__name__)

QUICK = {"agent_timeout_s": LIMIT_S, "timeout_s": 2 * LIMIT_S, "grace": 2}


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=4)
    yield bed
    bed.close()


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    until(lambda: not agents())
    until(lambda: not marked())


@pytest.fixture
def hosts(bed):
    """Arguments of a Launcher on the first few hosts of the bed."""

    def make(count, **more):
        names = [f"host{number + 1}" for number in range(count)]
        return {"hosts": names, "engine": "ssh", "ssh_config": str(bed.config), **QUICK, "nproc": 1, **more}

    return make


def tell(folder, stays=0, gate=None):
    """Write down who this rank is; ranks of the first worlds then stay, those of the last one return."""
    worker = ir.this_worker()
    words = (worker.world_size, os.uname().nodename, os.environ["MASTER_PORT"], os.environ["WORLD_SIZE"])
    new = folder / f"new{worker.restarts}-rank{worker.rank}"
    new.write_text(" ".join(map(str, words)))
    new.rename(folder / f"world{worker.restarts}-rank{worker.rank}")
    if worker.restarts <= stays:
        while gate is None or not gate.exists():
            time.sleep(0.02)
    return worker.restarts, worker.world_size, os.uname().nodename


def world(folder, number, size):
    """Wait until all ranks of a world have told of themselves; return their hosts, by rank."""
    paths = [folder / f"world{number}-rank{rank}" for rank in range(size)]
    until(lambda: all(path.exists() for path in paths))
    words = [path.read_text().split() for path in paths]
    assert {word[0] for word in words} == {word[3] for word in words} == {str(size)}
    assert len({word[2] for word in words}) == 1, "all meet at one place"
    return [word[1] for word in words]


def test_a_spare_takes_the_place_of_a_node_whose_agent_was_killed(hosts, tmp_path, capfd):
    with ir.Launcher(**hosts(3, spares=1, nproc=2)).start(tell, tmp_path) as handle:
        assert world(tmp_path, 0, 4) == ["host1"] * 2 + ["host2"] * 2
        os.kill(launcher_of(1, world=0), signal.SIGKILL)  # a spawn server is a rank of one on its node
        result = handle.result(LIMIT_S)
        assert handle.restarts == 1
    assert [value[:2] for value in result] == [(1, 4)] * 4
    names = [value[2] for value in result]
    assert names[:2] == ["host1"] * 2
    assert names[2:] in (["host3"] * 2, ["host2"] * 2)  # the host is well, and may be back before
    err = capfd.readouterr().err
    assert "infini-run: lost node 1 (host2)" in err
    assert "; restarting all ranks" in err


def test_a_world_shrinks_and_the_result_has_its_size(hosts, tmp_path):
    with ir.Launcher(**hosts(3, nnodes=(2, 3), join_window=3)).start(tell, tmp_path) as handle:
        assert world(tmp_path, 0, 3) == ["host1", "host2", "host3"]
        os.kill(launcher_of(1), signal.SIGTERM)
        result = handle.result(LIMIT_S)
    assert list(result) == [(1, 2, "host1"), (1, 2, "host3")]
    assert result.hosts == ("host1", "host3")
    assert len(handle.exits) == 2


def test_a_host_that_is_gone_is_replaced(bed, hosts, tmp_path, capfd):
    with ir.Launcher(**hosts(3, spares=1, node_timeout=3)).start(tell, tmp_path) as handle:
        world(tmp_path, 0, 2)
        with bed.host_down(2):
            result = handle.result(LIMIT_S)
    assert list(result) == [(1, 2, "host1"), (1, 2, "host3")]
    err = capfd.readouterr().err
    assert "lost node 1 (host2)" in err
    assert "--" not in err, "a caller in Python has keywords"


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ({"log_dir": "/dev/null/logs"}, "the log directory /dev/null/logs cannot be written"),
        ({"gpus_per_proc": 1}, "GPU"),
    ],
)
def test_nodes_are_checked_for_what_workers_need(hosts, needs, why):
    with pytest.raises(
        ir.NodeLost,
        match=r"the check of \d of [123] nodes failed, so the check may be "
        rf"wrong; .*{why}",
    ):
        ir.Launcher(**hosts(3, spares=1, **needs)).run(os.getpid)


@pytest.fixture(scope="module")
def cabled_bed():
    """A bed in which this process's ssh is where the hosts can be reached."""
    bed = Bed(hosts=3, mode="netns")
    yield bed
    bed.close()


WRITER = """
import os, sys, time
import infini_run as ir

def write(folder):
    restarts = ir.this_worker().restarts
    with open(f"{folder}/{os.uname().nodename}", "a", buffering=1) as file:
        end_s = time.monotonic() + 1.0
        while restarts == 0 or time.monotonic() < end_s:
            print(restarts, time.time(), file=file)
            time.sleep(0.001)
    return restarts, os.uname().nodename

result = ir.Launcher(["host1", "host2", "host3"], 1, engine="ssh", ssh_config=sys.argv[2], spares=1, node_timeout=3,
                     grace=1, agent_timeout_s=60).run(write, sys.argv[1])
print(list(result))
"""


@pytest.mark.parametrize("loss", ["cable", "suspended"])
def test_a_node_that_is_not_reached_writes_nothing_after_the_first_word_of_the_next_world(cabled_bed, tmp_path, loss):
    """Its workers end by the lease that its agent's guard holds, also if the agent is suspended."""
    folder = tmp_path / "written"
    folder.mkdir()
    words = [*cabled_bed.under, sys.executable, "-c", WRITER, str(folder), str(cabled_bed.config)]
    command = Command(words, env=dict(os.environ))
    until(lambda: len(list(folder.iterdir())) == 2)
    if loss == "cable":
        cabled_bed.tell("cable", 2, "down")
    else:
        agent = launcher_of(1)
        os.kill(agent, signal.SIGSTOP)
    try:  # else its ssh is waited for at the end
        until(lambda: "1" in worlds_in(folder) or command.process.poll() is not None)
    finally:
        if loss == "cable":
            cabled_bed.tell("cable", 2, "up")
    assert command.wait() == 0, command.err
    assert command.out.strip() in (b"[(1, 'host1'), (1, 'host3')]", b"[(1, 'host1'), (1, 'host2')]")
    times = worlds_in(folder)
    assert max(times["0"]) < min(times["1"])


def worlds_in(folder):
    """When something was written, by world."""
    times = {}
    for host in folder.iterdir():
        for line in host.read_text().splitlines():
            number, at_s = line.split()
            times.setdefault(number, []).append(float(at_s))
    return times


def test_a_silent_node_is_the_cause_though_a_rank_elsewhere_fails_before_it_is_given_up(hosts, tmp_path, suspended):
    """The usual order with NCCL: what was heard last of a node is all that is known of its end."""
    gate = tmp_path / "gate"

    def run():
        tell(tmp_path, gate=gate if os.environ["RANK"] == "0" else None)
        raise ConnectionError("the peer does not answer")

    with ir.Launcher(**hosts(2, node_timeout=3)).start(run) as handle:
        world(tmp_path, 0, 2)
        suspended(launcher_of(1))
        gate.touch()
        with pytest.raises(ir.NodeLost, match=r"lost node 1 \(host2\): .* for 3 s \(node_timeout=\)") as caught:
            handle.result(LIMIT_S)
    assert caught.value.__notes__ == ["later: rank 0: ConnectionError: the peer does not answer"]


def test_a_node_that_is_lost_while_a_failure_stops_it_is_not_the_cause(hosts, tmp_path, bell):
    """Its last heartbeat may be from before the failure; it answers when it is told to stop."""
    gate, path = tmp_path / "gate", bell.path

    def run():
        def ring(*given):
            with open(path, "w") as file:
                file.write("told\n")

        if os.environ["RANK"] == "1":  # rank 0 may be stopped before the other node is
            signal.signal(signal.SIGTERM, ring)
        tell(tmp_path, gate=gate if os.environ["RANK"] == "0" else None)
        raise ValueError("the first failure")

    with ir.Launcher(**hosts(2, node_timeout=60, grace=1000)).start(run) as handle:
        world(tmp_path, 0, 2)
        gate.touch()
        bell.hear(1)
        os.kill(launcher_of(1), signal.SIGKILL)
        with pytest.raises(ValueError, match="the first failure") as caught:
            handle.result(LIMIT_S)
    assert any("lost node 1 (host2)" in note for note in caught.value.__notes__)


def fail_on(host, fails):
    """A rank on that host fails in the first few worlds."""
    restarts, name = ir.this_worker().restarts, os.uname().nodename
    if name == host and restarts < fails:
        raise ValueError(f"world {restarts} on {host}")
    return restarts, name


def test_a_node_whose_ranks_fail_again_and_again_is_left_out(hosts, capfd):
    flags = {"max_restarts": 2, "restart_delay": 0, "spares": 1}
    result = ir.Launcher(**hosts(3, **flags)).run(fail_on, "host2", 99)
    assert list(result) == [(2, "host1"), (2, "host3")]
    err = capfd.readouterr().err
    assert "restart 2 of 2" in err
    assert "excluded host2: its ranks were the first to fail in 2 attempts" in err


def test_a_failure_costs_a_restart_and_a_lost_node_does_not(hosts, tmp_path):
    def run(folder, gate):
        worker = ir.this_worker()
        tell(folder, stays=0)
        if worker.restarts == 1 and worker.rank == 0:
            raise ValueError("the one failure that is allowed")
        return worker.restarts

    launcher = ir.Launcher(**hosts(3, spares=1, max_restarts=1, restart_delay=0))
    with launcher.start(run, tmp_path, None) as handle:
        world(tmp_path, 0, 2)
        os.kill(launcher_of(1), signal.SIGKILL)
        assert list(handle.result(LIMIT_S)) == [2, 2]
        assert handle.restarts == 2


def test_one_failure_too_many_is_raised_though_there_is_a_spare(hosts):
    with pytest.raises(ValueError, match="world 0 on host1") as caught:
        ir.Launcher(**hosts(2, spares=1)).run(fail_on, "host1", 1)
    assert (caught.value.rank, caught.value.host) == (0, "host1")


def test_a_spawn_server_that_is_killed_costs_a_restart(hosts, tmp_path):
    launcher = ir.Launcher(**hosts(2, spares=1, max_restarts=1, restart_delay=0))
    with launcher.start(tell, tmp_path) as handle:
        world(tmp_path, 0, 1)
        server = next(pid for pid, words in words_of_all() if "crews.spawn.spawn_server" in words)
        os.kill(server, signal.SIGKILL)
        assert [value[:2] for value in handle.result(LIMIT_S)] == [(1, 1)]


def words_of_all():
    for pid in marked():
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                yield pid, file.read()
        except OSError:
            continue


def test_a_world_that_is_too_small_grows_when_a_host_joins(bed, hosts, tmp_path):
    given = hosts(2, nnodes=(1, 2), join_window=1, on_join="restart")
    with bed.host_down(2):
        handle = ir.Launcher(**given).start(tell, tmp_path)
        assert world(tmp_path, 0, 1) == ["host1"]
    with handle:
        assert list(handle.result(LIMIT_S)) == [(1, 2, "host1"), (1, 2, "host2")]


def test_large_arguments_come_to_every_world(hosts, tmp_path):
    def count(folder, data):
        tell(folder)
        return len(data)

    with ir.Launcher(**hosts(2, nnodes=(1, 2), join_window=1)).start(count, tmp_path, bytes(20 << 20)) as handle:
        world(tmp_path, 0, 2)
        os.kill(launcher_of(0), signal.SIGKILL)
        assert set(handle.result(LIMIT_S)) == {20 << 20}


def test_too_few_nodes_are_waited_for_and_then_the_launch_ends(bed, hosts, tmp_path):
    given = hosts(2, nnodes=(2, 3), join_window=0.1, node_timeout=3, join_timeout=5)  # for ssh on a busy machine
    with ir.Launcher(**given).start(tell, tmp_path) as handle:
        world(tmp_path, 0, 2)
        with bed.host_down(2), pytest.raises(ir.NodeLost, match="1 of at least 2 nodes joined") as caught:
            handle.result(LIMIT_S)
    assert "after 5 s (join_timeout=); missing: host2" in str(caught.value)
    assert handle.restarts == 0, "none has begun"
    assert not any("after" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("end", ["stop", "timeout"])
def test_a_launch_that_waits_for_a_node_can_be_ended(bed, hosts, tmp_path, end):
    given = hosts(2, nnodes=(2, 3), join_window=0.1, node_timeout=3) | ({"timeout_s": 8} if end == "timeout" else {})
    with ir.Launcher(**given).start(tell, tmp_path) as handle:
        world(tmp_path, 0, 2)
        with bed.host_down(2):
            until(lambda: all(handle.exits))
            begin_s = time.monotonic()
            if end == "stop":
                handle.stop()
            with pytest.raises(ir.LaunchTimeout if end == "timeout" else ir.InfiniRunError):
                handle.result(LIMIT_S)
            assert time.monotonic() - begin_s < LIMIT_S / 2


def test_a_node_that_fails_its_check_is_left_out_with_its_last_line(hosts, tmp_path, capfd):
    check = 'sh -c "[ $(uname -n) != host2 ] || { echo ECC errors on GPU 2; exit 3; }"'
    gate = tmp_path / "gate"
    launcher = ir.Launcher(**hosts(3, spares=1, join_window=0.1, node_check=check))
    with launcher.start(tell, tmp_path, 0, gate) as handle:
        until(lambda: "excluded host2: node check exited with 3: ECC errors on GPU 2" in stderr_so_far())
        gate.touch()
        assert [value[2] for value in handle.result(LIMIT_S)] == ["host1", "host3"]


def test_attempts_without_progress_end_the_launch_whoever_is_lost(hosts, tmp_path):
    def run(folder):
        ir.this_worker().progress(5)
        tell(folder, stays=99)

    launcher = ir.Launcher(**hosts(3, spares=1, max_no_progress=2))
    with launcher.start(run, tmp_path) as handle:
        for number in range(3):
            world(tmp_path, number, 2)
            os.kill(launcher_of(1, world=number), signal.SIGKILL)
        with pytest.raises(ir.NodeLost, match="lost node") as caught:
            handle.result(LIMIT_S)
    assert "not restarted: 2 attempts in a row without exceeding PROGRESS=5" in caught.value.__notes__


def test_each_attempt_has_a_folder_of_its_own_for_its_logs(hosts, tmp_path):
    def run(folder):
        print("this is attempt", ir.this_worker().restarts, flush=True)
        tell(folder)

    logs = [tmp_path / "logs" / f"attempt_{number}" / "rank_0.log" for number in (1, 2)]
    with ir.Launcher(**hosts(2, spares=1, log_dir=tmp_path / "logs")).start(run, tmp_path) as handle:
        world(tmp_path, 0, 1)
        until(logs[0].read_text)  # the agent writes it, and is killed then
        os.kill(launcher_of(0), signal.SIGKILL)
        handle.result(LIMIT_S)
    assert [log.read_text() for log in logs] == ["this is attempt 0\n", "this is attempt 1\n"]


# ---- pools


def test_a_pool_whose_node_is_lost_goes_on_in_all_its_launches(hosts, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ir.Pool(**hosts(3, spares=1)) as pool:
        handles = [pool.start(tell, folder) for folder in folders]
        for folder in folders:
            world(folder, 0, 2)
        os.kill(launcher_of(1), signal.SIGKILL)
        for handle in handles:
            assert [value[:2] for value in handle.result(LIMIT_S)] == [(1, 2)] * 2
        assert len(pool.run(os.getpid)) == 2


def test_an_idle_pool_whose_node_is_lost_runs_the_next_function_elsewhere(hosts):
    with ir.Pool(**hosts(2, nnodes=(1, 2), join_window=3)) as pool:
        assert len(pool.run(os.getpid)) == 2
        agent = launcher_of(1)
        os.kill(agent, signal.SIGTERM)
        until(lambda: not os.path.exists(f"/proc/{agent}"))
        assert list(pool.run(lambda: os.uname().nodename)) == ["host1"]


def test_a_failure_in_a_pool_leaves_its_other_launches_alone(hosts, tmp_path):
    gate = tmp_path / "gate"
    with ir.Pool(**hosts(2, spares=1, max_restarts=1, restart_delay=0)) as pool:
        handle = pool.start(tell, tmp_path, 0, gate)
        world(tmp_path, 0, 1)
        assert list(pool.run(fail_on, "host1", 1)) == [(1, "host1")]
        gate.touch()
        assert handle.result(LIMIT_S)[0][0] == 0


# ---- bad input


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"hosts": ["a", "b"], "nnodes": (3, 4)},
            'nnodes="3:4": needs more hosts than hosts="a,b", which is 2 hosts',
        ),
        ({"hosts": ["a", "b"], "nnodes": (4, 3)}, "4:3"),
        ({"hosts": ["a", "b"], "spares": 2}, 'needs more hosts than hosts="a,b"'),
        ({"hosts": ["a:2", "b:1"], "spares": 1}, "hosts with different numbers of workers"),
        ({"hosts": ["a", "b"], "nproc": [2, 1], "spares": 1}, "hosts with different numbers of workers"),
        (
            {"hosts": ["a", "b"], "spares": 1, "keep_going": True},
            "spares=1: conflicts with keep_going: a failure ends all ranks",
        ),
        ({"hosts": ["a", "b"], "spares": -1}, "spares"),
        ({"hosts": ["a", "b"], "spares": 1, "on_join": "dance"}, "on_join"),
        ({"hosts": ["a", "b"], "spares": 1, "engine": "mpi"}, "mpirun ends all nodes when one is lost"),
        ({"spares": 1}, "spares=1: needs the nodes of a launch; add hosts="),
        ({"nnodes": (1, 2)}, "nnodes=.1, 2.: needs the nodes of a launch; add hosts="),
        ({"max_no_progress": -1}, "max_no_progress"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_before_anything_starts(given, text):
    with pytest.raises(ir.UsageError, match=text) as caught:
        ir.Launcher(**given).run(os.getpid)
    assert "\n" not in str(caught.value)
