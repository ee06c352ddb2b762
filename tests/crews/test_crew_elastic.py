"""Crews that lose a host and go on, over real sshd: its workers start again on a spare or beside those of another
host, the other workers work on, and no two processes of one worker live at once."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

import infini_run as ir
from infini_run.crews.spawn.failover_spawner import FailoverSpawner
from tests.support.command import Command
from tests.support.hosts import Bed, agents, ssh_to
from tests.support.processes import GUARD, OURS, marked, processes
from tests.support.waiting import LIMIT_S, stderr_so_far, until

pytestmark = pytest.mark.xdist_group(__name__)


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=3)
    yield bed
    bed.close()


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    until(lambda: not agents())
    until(lambda: not marked())


@pytest.fixture
def crew(bed):
    """A crew on the first few hosts of the bed, whose workers answer by who they are."""

    def make(count, **more):
        names = [f"host{number + 1}" for number in range(count)]
        given = {"hosts": names, "engine": "ssh", "ssh_config": str(bed.config), "nproc": 1, "grace": 2, **more}
        return ir.Crew(answer, **{"restart": ir.Restart(max_restarts=3)} | given)

    return make


def answer(ctx, task):
    if task == "stay":
        ctx.status("staying")
        time.sleep(1000)
    return os.uname().nodename, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.getpid()


def ask_all(crew, task="who"):
    return [crew.worker(rank).ask(task) for rank in range(crew.nproc)]


def places(asks):
    return [ask.result(LIMIT_S)[0] for ask in asks]


def spawn_server_on(host):
    """The process of the spawn server on a host and that of its agent, as this machine numbers them."""
    for pid, (parent, state, _) in processes().items():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        reached = [entry.split()[2] for entry in environ if entry.startswith("SSH_CONNECTION=")]
        is_there = bool(reached) and f"host{reached[0].rpartition('.')[2]}" == host
        if state not in "ZX" and b"crews.spawn.spawn_server" in words and is_there and "=".join(OURS) in environ:
            return pid, parent
    raise AssertionError(f"no spawn server on {host}")


def workers_on(host):
    """The processes of the workers there, as this machine numbers them."""
    server = spawn_server_on(host)[0]
    return [pid for pid, (parent, _, name) in processes().items() if parent == server and name != GUARD]


def agent_on(host):
    return spawn_server_on(host)[1]


def agent_of(crew, rank):
    return agent_on(crew.status().workers[rank].host)


def test_workers_of_a_lost_host_start_again_on_a_spare_and_the_others_work_on(crew):
    with crew(3, spares=1, nproc=2) as group:
        assert places(ask_all(group)) == ["host1"] * 2 + ["host2"] * 2
        pids = [worker.pid for worker in group.status().workers]
        stay = group.worker(2).ask("stay")
        until(lambda: group.status().workers[2].text == "staying")
        os.kill(agent_of(group, 2), signal.SIGKILL)
        with pytest.raises(ir.WorkerDied, match=r"is gone: lost node ") as caught:
            stay.result(LIMIT_S)
        assert isinstance(caught.value.__cause__, ir.NodeLost)
        found = [ask.result(LIMIT_S) for ask in ask_all(group)]
        assert [place[0] for place in found[:2]] == ["host1"] * 2
        assert [place[0] for place in found[2:]] in (["host3"] * 2, ["host2"] * 2)  # the host may be back before
        assert [place[1:4] for place in found] == [(str(rank), "4", str(rank % 2)) for rank in range(4)]
        status = group.status().workers
        assert [worker.pid for worker in status[:2]] == pids[:2]
        assert [worker.restarts for worker in status] == [0, 0, 1, 1]


def test_a_lost_host_is_one_failure_with_all_its_workers(crew):
    with crew(3, spares=1, nproc=2, restart=ir.Restart(max_restarts=1)) as group:
        places(ask_all(group))
        os.kill(agent_of(group, 3), signal.SIGKILL)
        until(lambda: [worker.restarts for worker in group.status().workers] == [0, 0, 1, 1])
        assert len(places(ask_all(group))) == 4


def test_workers_restart_elsewhere_when_agent_refuses(crew):
    """It cannot start again what holds the workers of its host: nothing of them is left there."""
    with crew(3, spares=1, restart=ir.Restart(delay_s=3)) as group:
        assert places(ask_all(group)) == ["host1", "host2"]
        server, agent = spawn_server_on("host2")
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (16, resource.prlimit(agent, resource.RLIMIT_NOFILE)[1]))
        os.kill(server, signal.SIGKILL)
        until(lambda: [worker.restarts for worker in group.status().workers] == [0, 1])
        assert places(ask_all(group))[1] in ("host2", "host3")  # the host is well, and may be back before


def test_without_a_policy_a_lost_host_fails_the_crew(crew):
    group = crew(3, spares=1, restart=None)
    places(ask_all(group))
    os.kill(agent_of(group, 1), signal.SIGKILL)
    until(lambda: group.failure is not None)
    assert "lost node" in str(group.failure)
    with pytest.raises(ir.CrewFailed):
        group.ask("who")
    group.close()


def test_all_workers_start_again_if_the_policy_says_so_and_meet_at_one_place(crew):
    with crew(3, spares=1, restart=ir.Restart(strategy="one_for_all")) as group:
        places(ask_all(group))
        os.kill(agent_of(group, 0), signal.SIGKILL)
        until(lambda: [worker.restarts for worker in group.status().workers] == [1, 1])
        assert set(places(ask_all(group))) in ({"host2", "host3"}, {"host1", "host2"})


def test_without_a_spare_they_start_beside_those_of_another_host(bed, crew):
    with crew(2, nnodes=(1, 2), node_timeout=3) as group:
        assert places(ask_all(group)) == ["host1", "host2"]
        with bed.host_down(2):
            until(lambda: group.status().workers[1].restarts == 1)
            assert places(ask_all(group)) == ["host1", "host1"]


def test_a_host_that_is_told_to_stop_leaves_with_its_grace(crew):
    with crew(3, spares=1) as group:
        places(ask_all(group))
        os.kill(agent_of(group, 1), signal.SIGTERM)
        until(lambda: group.status().workers[1].restarts == 1)
        assert places(ask_all(group)) == ["host1", "host3"]


def test_a_spawn_server_that_is_killed_is_started_again(crew):
    with crew(2, spares=1) as group:
        (host,) = places(ask_all(group))
        os.kill(spawn_server_on(host)[0], signal.SIGKILL)  # the spare has one, too
        until(lambda: group.failure is not None or group.status().workers[0].restarts == 1)
        assert len(places(ask_all(group))) == 1


def test_workers_start_again_where_they_were_once_their_spawn_server_does(crew):
    """It is back before they are due, under the same agent; no other host is there."""
    restart = ir.Restart(strategy="one_for_one", delay_s=1.5)
    with crew(2, nnodes=(2, 3), join_window=0.1, join_timeout=20, restart=restart) as group:
        before = places(ask_all(group))
        os.kill(spawn_server_on(before[1])[0], signal.SIGKILL)
        until(lambda: group.failure is not None or any(worker.restarts == 1 for worker in group.status().workers))
        assert places(ask_all(group)) == before


def test_workers_move_only_when_the_last_process_on_their_host_has_ended(crew, freezer, capfd):
    """SIGKILL does not end one that is in uninterruptible sleep. Another host waits for them."""
    with crew(3, spares=1, grace=0.2) as group:
        (host,) = places(ask_all(group)[1:])
        freezer.freeze(*workers_on(host))
        os.kill(spawn_server_on(host)[0], signal.SIGKILL)
        until(lambda: f"({host}): SIGKILL did not end process" in stderr_so_far())
        time.sleep(1.0)  # a worker is up sooner
        assert [worker.restarts for worker in group.status().workers] == [0, 0]
        freezer.thaw()
        until(lambda: group.status().workers[1].restarts == 1)
        assert len(places(ask_all(group))) == 2


def test_a_worker_starts_again_beside_no_process_that_sigkill_did_not_end(crew, freezer, capfd):
    with crew(2, spares=1, grace=0.2, watchdog_s=1) as group:
        host, *_, pid = group.worker(0).ask("who").result()
        freezer.freeze(*workers_on(host))
        waiting = group.worker(0).ask("who")
        until(lambda: f"SIGKILL did not end process {pid} (" in stderr_so_far())
        time.sleep(1.0)  # a worker is up sooner
        assert group.status().workers[0].restarts == 0
        freezer.thaw()
        assert isinstance(waiting.exception(), ir.WorkerDied)
        assert group.worker(0).ask("who").result()[-1] != pid


def test_what_lost_hosts_have_cost_is_forgotten_once_their_workers_have_moved(crew):
    with crew(2, spares=1, restart=ir.Restart(max_restarts=10)) as group:
        for count in range(1, 4):
            (host,) = places(ask_all(group))
            os.kill(spawn_server_on(host)[0], signal.SIGKILL)
            until(lambda: group.status().workers[0].restarts == count)  # noqa: B023
        assert len(group._supervisor._placement._losses) == 1


def test_workers_for_which_no_host_comes_fail_the_crew(bed, crew):
    group = crew(2, nnodes=(2, 3), join_window=0.1, node_timeout=3, join_timeout=5)
    places(ask_all(group))
    with bed.host_down(2):
        until(lambda: group.failure is not None)
    assert "no host joined for ranks 1 within 5 s (join_timeout)" in str(group.failure)
    group.close()


def test_a_crew_whose_host_is_gone_closes(bed, crew):
    group = crew(2, nnodes=(1, 2), node_timeout=30)
    places(ask_all(group))
    with bed.host_down(2):
        until(lambda: group.status().workers[1].state != "ready")
        group.close(drain=False)


def test_too_few_hosts_at_the_start_are_named(bed, crew):
    with bed.host_down(2), pytest.raises(ir.NodeLost, match=r"1 of at least 2 hosts joined .*; missing: host2"):
        crew(2, nnodes=(2, 3), join_window=0.1, join_timeout=5)


# ---- one process of a worker at a time


@pytest.fixture(scope="module")
def cabled_bed():
    bed = Bed(hosts=3, mode="netns")
    yield bed
    bed.close()


WRITER = """
import os, sys, time
import infini_run as ir

def write(ctx, folder):
    end_s = time.monotonic() + 1.0
    with open(f"{folder}/{ctx.rank}-{ctx.restarts}-{os.uname().nodename}", "a", buffering=1) as file:
        while ctx.rank == 0 or ctx.restarts == 0 or time.monotonic() < end_s:
            print(time.time(), file=file)
            time.sleep(0.001)
            if ctx.rank == 0 and ctx.cancelled:
                break
    return ctx.restarts, os.uname().nodename

with ir.Crew(write, hosts=["host1", "host2", "host3"], nproc=1, engine="ssh", ssh_config=sys.argv[2], spares=1,
             node_timeout=3, grace=1, restart=ir.Restart()) as crew:
    asks = [crew.worker(rank).ask(sys.argv[1]) for rank in (0, 1)]
    try:
        asks[1].result()
    except ir.WorkerDied as error:
        print(type(error.__cause__).__name__)
    print(crew.worker(1).ask(sys.argv[1]).result())
    asks[0].cancel()
"""


@pytest.mark.parametrize("loss", ["cable", "suspended", "ssh"])
def test_a_worker_whose_host_is_not_reached_writes_nothing_after_its_next_process(
    cabled_bed, tmp_path, loss, suspended
):
    """ssh: the loss is known at once, and the workers live until their lease ends."""
    folder = tmp_path / "written"
    folder.mkdir()
    words = [*cabled_bed.under, sys.executable, "-c", WRITER, str(folder), str(cabled_bed.config)]
    command = Command(words, env=dict(os.environ))
    until(lambda: len(list(folder.iterdir())) == 2)
    if loss == "cable":
        cabled_bed.tell("cable", 2, "down")
    else:
        suspended(agent_on("host2"))
    if loss == "ssh":
        os.kill(ssh_to("host2", command.pid), signal.SIGKILL)
    try:  # else its ssh is waited for at the end
        until(lambda: command.process.poll() is not None or any(folder.glob("1-1-*")))
    finally:
        if loss == "cable":
            cabled_bed.tell("cable", 2, "up")
    assert command.wait() == 0, command.err
    name, place = command.out.decode().split("\n")[:2]
    assert name == "NodeLost"
    assert place in ("(1, 'host3')", "(1, 'host2')")
    times = {path.name[:3]: [float(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}
    assert sorted(times) == ["0-0", "1-0", "1-1"]
    assert max(times["1-0"]) < min(times["1-1"])
    assert max(times["0-0"]) > min(times["1-1"]), "the worker on the other host has worked on"


def test_workers_of_a_host_that_was_lost_just_now_do_not_start_yet(bed, suspended):
    """Their supervisor may have looked at its fence before."""
    names = ["host1", "host2", "host3"]
    reach = {"engine": "ssh", "ssh_config": str(bed.config)}
    spawner = FailoverSpawner(names, nproc=1, spares=1, node_timeout=3, grace=1, **reach)
    try:
        processes = spawner.start([0, 1])
        suspended(agent_on("host2"))
        os.kill(ssh_to("host2", os.getpid()), signal.SIGKILL)
        until(lambda: processes[1].node.problem is not None)
        with pytest.raises(ir.NodeLost, match="lost host2, whose workers may still be alive"):
            spawner.start([1])
        until(lambda: spawner.start_due_s([1]) <= time.monotonic())
        processes += spawner.start([1])
        for process in processes:
            process.close()
    finally:
        spawner.close()


# ---- checks of hosts


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ({"log_dir": "/dev/null/logs"}, "the log directory /dev/null/logs cannot be written"),
        ({"gpus_per_proc": 1}, "GPU"),
    ],
)
def test_a_host_without_what_workers_need_is_left_out(crew, capfd, needs, why):
    with pytest.raises(ir.NodeLost, match=r"0 of at least 2 hosts joined"):
        crew(3, spares=1, join_window=0.1, join_timeout=5, **needs)
    err = capfd.readouterr().err
    assert all(re.search(rf"excluded host{number}: .*{why}", err) for number in (1, 2, 3)), err


# ---- bad input


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"spares": 1}, "spares=1: needs the nodes of a launch; add hosts="),
        ({"hosts": ["a", "b"], "spares": 2}, 'needs more hosts than hosts="a,b"'),
        ({"hosts": ["a:2", "b:1"], "spares": 1}, "hosts with different numbers of workers"),
        ({"hosts": ["a", "b"], "spares": 1, "on_join": "restart"}, "no effect on a crew: on_join="),
        ({"hosts": ["a", "b"], "spares": 1, "max_node_failures": 1}, "no effect on a crew: max_node_failures="),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_before_anything_starts(given, text):
    with pytest.raises(ir.UsageError, match=text) as caught:
        ir.Crew(answer, **given)
    assert "\n" not in str(caught.value)
