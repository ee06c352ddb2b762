"""Functions and crews on two nodes of a real Slurm (tests/support/beds/slurm.sh): the same API, by srun and the
Link."""

from __future__ import annotations

import os
import signal
import sys

import pytest

import infini_run as ir
from tests.multinode.test_many_slurm import Allocation, Slurm
from tests.support.cluster import need
from tests.support.command import Command
from tests.support.processes import OURS, marked
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them


@pytest.fixture(scope="module")
def two():
    need("slurm-wlm", "munge")
    slurm = Slurm(nodes=2)
    allocation = Allocation(slurm, "-N2")
    yield allocation
    allocation.close()
    slurm.close()


@pytest.fixture
def inside(two, case, monkeypatch):
    """We are in the allocation's shell."""
    for name, value in {**two.env, **case.env, OURS[0]: OURS[1]}.items():
        monkeypatch.setenv(name, value)


def place():
    return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")], os.environ["SLURMD_NODENAME"]


def test_auto_is_the_allocations_nodes_reached_by_its_own_engine(inside, case):
    launcher = ir.Launcher("auto", 2)
    assert len(launcher.hosts) == 2
    result = launcher.run(place)
    assert [found for found, _ in result] == [[rank, rank % 2, 4] for rank in range(4)]
    assert [name for _, name in result] == [host for host in launcher.hosts for _ in range(2)]
    assert result.hosts == launcher.hosts
    case.end()


def test_what_a_rank_raises_is_raised_here_with_rank_and_host(inside, case):
    def fail():
        if os.environ["RANK"] == "1":
            raise LookupError("on the second")
        signal.pause()

    launcher = ir.Launcher("auto", 1, engine="slurm")
    with pytest.raises(LookupError, match="on the second") as caught:
        launcher.run(fail)
    assert (caught.value.rank, caught.value.host) == (1, launcher.hosts[1])
    assert f"on rank 1, {launcher.hosts[1]}:\nTraceback" in caught.value.__notes__[0]
    case.end()


def test_a_large_result_comes_whole(inside, case):
    size = 50 << 20
    result = ir.Launcher("auto", 1).run(lambda: os.environ["RANK"].encode() * size)
    assert [data.count(b"%d" % rank) for rank, data in enumerate(result)] == [size, size]
    case.end()


def test_a_worker_of_a_crew_is_started_again_on_its_node(inside, case):
    def serve(ctx, task):
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return ctx.rank, ctx.restarts, os.environ["SLURMD_NODENAME"]

    with ir.Crew(serve, hosts="auto", nproc=1, restart=ir.Restart()) as crew:
        hosts = [worker.host for worker in crew.status().workers]
        assert [crew.worker(rank).ask(0).result(LIMIT_S) for rank in range(2)] == [(0, 0, hosts[0]), (1, 0, hosts[1])]
        with pytest.raises(ir.WorkerDied, match=f"rank 1 on {hosts[1]} died: killed by SIGKILL"):
            crew.worker(1).ask("die").result(LIMIT_S)
        assert crew.worker(1).ask(0).result(LIMIT_S) == (1, 1, hosts[1])
    case.end()


CALLER = """
import os, signal
import infini_run as ir
def wait(path):
    with open(path, "w") as file:
        file.write("here\\n")
    signal.pause()
ir.Launcher("auto", 2).run(wait, {path!r})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_is_killed_leaves_nothing_on_any_node(inside, case, bell, number):
    caller = Command([sys.executable, "-c", CALLER.format(path=bell.path)])
    try:
        bell.hear(4)
        caller.signal(number)
        caller.wait()
        case.end()
        until(lambda: not marked(), LIMIT_S)
    finally:
        caller.close()


def test_an_agent_that_is_killed_is_a_lost_node(inside, case, bell):
    def wait(path):
        with open(path, "w") as file:
            file.write("here\n")
        signal.pause()

    handle = ir.Launcher("auto", 1).start(wait, bell.path)
    try:
        bell.hear(2)
        agent = next(pid for pid in case.alive() if _is_agent(_words(pid)))
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(ir.NodeLost, match=r"lost node \d \(.*\)"):
            handle.result(LIMIT_S)
    finally:
        handle.close()
    case.end()


def _is_agent(words):
    return words[0] == os.fsencode(sys.executable) and any(b"infini_run.multinode.agent" in word for word in words)


def _words(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
