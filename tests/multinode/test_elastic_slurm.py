"""Jobs that lose a node and go on, on a real Slurm: an agent that is killed, and a node that is down."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.multinode.test_elastic_ssh import FailingRank, hear_world, in_world, launcher_of, ring
from tests.multinode.test_many_slurm import Allocation, Slurm, left
from tests.support.cluster import need
from tests.support.command import COMMANDS_END_SOON, NOTICES_AT_ONCE
from tests.support.hosts import agents
from tests.support.processes import OURS
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)


components = pytest.mark.parametrize(
    "run", [["--nodes=4"], ["--nodes=2", "--no-kill", ":", "--nodes=2"]], ids=["job", "components"], indirect=True
)


@pytest.fixture(scope="module")
def bed():
    """Of its own: a node that was down leaves its allocation for good."""
    need("slurm-wlm", "munge")
    bed = Slurm(SLURM_TB_SCHEDULER="backfill")
    yield bed
    bed.close()


@pytest.fixture
def run(request, infini_run, bed, case):
    """`infini-run --engine=slurm` in an allocation of four nodes that survives the loss of one."""
    allocation = Allocation(bed, *getattr(request, "param", ["--nodes=4"]), "--no-kill")

    def start(*words, under=()):
        environ = {**allocation.env, **case.env, OURS[0]: OURS[1]}
        return infini_run("--engine=slurm", "--nproc_per_node=1", *words, env=environ, cwd="/tmp", under=under)

    start.job = allocation.job
    yield start
    allocation.close()


@components
def test_an_agent_that_was_killed_is_replaced_and_its_node_comes_back_in_a_step_of_its_own(run, case, bed, bell):
    command = run("--spares=1", *ring(bell, in_world(2, "exit 0")))
    hear_world(bell, 0, 3)
    os.kill(launcher_of(1), signal.SIGKILL)
    hear_world(bell, 1, 3)
    # the latter: it was back before another could take its place
    command.read_error_until(b" joined as a spare", b"attempt 2: the same 3 nodes")
    os.kill(launcher_of(2, world=1), signal.SIGKILL)
    hear_world(bell, 2, 3)
    assert command.wait() == 0, command.err
    case.end()
    until(lambda: not left(bed, run.job))


@components
def test_a_node_that_is_down_is_replaced_by_a_spare(run, case, bed, bell):
    words = ("--spares=1", "--node_timeout=3", "--grace=1", *ring(bell, in_world(1, "exit 0")))
    command = run(*words, under=COMMANDS_END_SOON)
    hear_world(bell, 0, 3)
    bed.call("node-down", "2")
    try:
        hear_world(bell, 1, 3)
        assert command.wait() == 0, command.err
        case.end()
    finally:
        bed.call("node-up", "2")
    assert b"lost node 1 (node2)" in command.err
    assert b"node4 replaces node2 as node 1 (node2 was lost)" in command.err


def test_a_node_that_is_well_stays_though_the_check_of_a_spare_is_faster(run, case, bed, bell, tmp_path):
    fails = FailingRank(tmp_path, 2)
    flags = ("--spares=1", "--max_restarts=1", "--restart_delay=0", fails.check)
    command = run(*flags, *ring(bell, fails.then(in_world(1, "exit 0"))), under=NOTICES_AT_ONCE)
    assert hear_world(bell, 0, 3) == ["node1", "node2", "node3"]
    fails.now("node1")
    command.read_error_until(b"waiting for the check of node1", b"attempt 2:")
    assert b"attempt 2:" not in command.err
    fails.open_gate()
    assert hear_world(bell, 1, 3) == ["node1", "node2", "node3"]
    assert command.wait() == 0, command.err
    case.end()


def test_without_a_spare_the_world_shrinks(run, case, bed, bell):
    words = ("--nnodes=3:4", "--join_window=3", "--node_timeout=3", *ring(bell, in_world(1, "exit 0")))
    command = run(*words, under=COMMANDS_END_SOON)
    hear_world(bell, 0, 4)
    bed.call("node-down", "4")
    try:
        hear_world(bell, 1, 3)
        assert command.wait() == 0, command.err
        case.end()
    finally:
        bed.call("node-up", "4")


def test_a_node_that_never_came_keeps_no_other_one_away(run, case, bed, bell, tmp_path):
    """The one srun for all waits for it; a node that was lost comes back in a step of its own."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ $(uname -n) = node4 ] && exec sleep 1000\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    flags = ("--spares=1", "--join_window=1", f"--remote_python={python}")
    command = run(*flags, *ring(bell, in_world(1, "exit 0")))
    assert hear_world(bell, 0, 3) == ["node1", "node2", "node3"]
    os.kill(launcher_of(1), signal.SIGKILL)
    assert hear_world(bell, 1, 3) == ["node1", "node2", "node3"]
    assert command.wait() == 0, command.err
    case.end()


def is_killed(pid):
    """Whether it has a SIGKILL that it has not acted on, or is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)


def test_scancel_ends_all_of_it(run, case, bed, bell):
    command = run("--spares=1", *ring(bell))
    hear_world(bell, 0, 3)
    bed.ask("scancel", run.job)
    assert command.wait() == 143, command.err
    case.end()


@components
def test_scancel_that_no_launcher_can_tell_of_ends_all_of_it(run, case, bed, bell, freezer):
    """They are killed before they have read the signal; the allocation that is gone tells."""
    command = run("--spares=1", *ring(bell))
    hear_world(bell, 0, 3)
    launchers = [pid for pid, command_line in agents().items() if not command_line.startswith("srun")]
    assert len(launchers) == 4
    freezer.freeze(*launchers)
    bed.ask("scancel", run.job)
    until(lambda: all(is_killed(pid) for pid in launchers))
    freezer.thaw()
    assert command.wait() == 143, command.err
    assert b"SIGTERM reached all nodes: their allocation ended" in command.err
    case.end()
