"""A function and a crew that lose a node and go on, in an allocation of a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import infini_run as ir
from tests.multinode.test_many_slurm import Allocation, Slurm
from tests.support.cluster import Case, need
from tests.support.processes import OURS, marked, processes
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)


@pytest.fixture(scope="module")
def three():
    """Nodes of an allocation that survives the loss of one."""
    need("slurm-wlm", "munge")
    slurm = Slurm(nodes=3)
    allocation = Allocation(slurm, "-N3", "--no-kill")
    yield allocation
    allocation.close()
    slurm.close()


@pytest.fixture
def inside(three, monkeypatch):
    """We are in the allocation's shell."""
    case = Case()
    for name, value in {**three.env, **case.env, OURS[0]: OURS[1]}.items():
        monkeypatch.setenv(name, value)
    yield case
    case.end()
    case.clear()
    until(lambda: not marked())


def agent_of(node):
    """The agent of a spawn server on that node."""
    for pid, (parent, state, _) in processes().items():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        wanted = {f"SLURMD_NODENAME={node}", "=".join(OURS)}
        if state not in "ZX" and b"crews.spawn.spawn_server" in words and wanted <= set(environ):
            return parent
    raise AssertionError(f"no spawn server on {node}")


def stay_once(folder):
    worker = ir.this_worker()
    (folder / f"{worker.restarts}.{worker.rank}").write_text(os.environ["SLURMD_NODENAME"])
    while worker.restarts == 0:
        time.sleep(0.02)
    return worker.restarts, os.environ["SLURMD_NODENAME"]


def test_a_function_goes_on_with_a_spare_of_the_allocation(inside, tmp_path):
    launcher = ir.Launcher("auto", 1, spares=1, grace=2)
    with launcher.start(stay_once, tmp_path) as handle:
        until(lambda: all((tmp_path / f"0.{rank}").exists() for rank in range(2)))
        os.kill(agent_of(launcher.hosts[1]), signal.SIGKILL)
        result = handle.result(LIMIT_S)
    assert [restarts for restarts, _ in result] == [1, 1]
    assert result[0][1] == launcher.hosts[0]
    assert result[1][1] in launcher.hosts[1:]


def test_a_crew_goes_on_with_a_spare_of_the_allocation(inside):
    def place(ctx, task):
        return os.environ["SLURMD_NODENAME"]

    with ir.Crew(place, hosts="auto", nproc=1, spares=1, grace=2, restart=ir.Restart()) as crew:
        first, second = [crew.worker(rank).ask("").result(LIMIT_S) for rank in range(2)]
        os.kill(agent_of(second), signal.SIGKILL)
        until(lambda: crew.status().workers[1].restarts == 1)
        assert crew.worker(0).ask("").result(LIMIT_S) == first
        assert crew.worker(1).ask("").result(LIMIT_S) != first
        assert crew.status().workers[0].restarts == 0


def test_a_crew_whose_allocation_has_ended_does_not_wait_for_hosts(three, inside):
    """The last of these tests, for it ends their allocation."""
    crew = ir.Crew(stay, hosts="auto", nproc=1, spares=1, grace=2, restart=ir.Restart(max_restarts=9))
    asks = [crew.worker(rank).ask("") for rank in range(2)]
    until(lambda: all(worker.state == "busy" for worker in crew.status().workers))
    subprocess.run(["scancel", three.job], check=True)
    for ask in asks:
        assert isinstance(ask.exception(LIMIT_S), ir.WorkerDied | ir.CrewFailed)
    with pytest.raises(ir.CrewFailed):  # of ask, once the crew knows
        crew.ask("").result(LIMIT_S)
    crew.close(drain=False)


def stay(ctx, task):
    time.sleep(1000)
