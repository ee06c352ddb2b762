"""infini-job --spares on a real Slurm: a node that goes down during the job is replaced, and the job ends well."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from tests.multinode.test_elastic_ssh import hear_world, in_world, launcher_of, ring
from tests.multinode.test_many_slurm import Slurm
from tests.support.cluster import need
from tests.support.job_case import Jobs
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)

THREE = (
    "--slots=3",
    "--slots_per_node=1",
    "--slot_type=cpu",
    "--spares=1",
    "--run_options=--node_timeout=3 --grace=1",
)


@pytest.fixture(scope="module")
def bed():
    """Of its own: nodes of it go down. A job that is to be run again waits for 5 s, Slurm's own are 2 minutes."""
    need("slurm-wlm", "munge")
    bed = Slurm(SLURM_TB_CRED="5")
    yield bed
    bed.close()


@pytest.fixture
def queue(tmp_path, bed, case):
    jobs = Jobs(tmp_path / "jobs", case, {**bed.env, "INFINI_JOB_SCHEDULER": "slurm"})
    yield jobs
    jobs.close()
    for name in os.listdir(jobs.path) if jobs.path.exists() else ():
        subprocess.run(["scancel", "--name", name], env=jobs.env, check=False, capture_output=True)
    case.end()
    bed.settle()


@pytest.fixture
def down(bed):
    """Let a node die, and tell Slurm. It is up again at the end, or with `down.up`."""
    numbers = []

    def down(number):
        numbers.append(number)
        bed.call("node-down", str(number))
        bed.ask("scontrol", "update", f"NodeName=node{number}", "State=DOWN", "Reason=test")

    def up():
        while numbers:
            bed.call("node-up", str(numbers.pop()))

    down.up = up
    yield down
    up()


def test_a_node_that_goes_down_is_replaced_by_the_spare_that_was_allocated(queue, down, bell, tmp_path):
    gate = tmp_path / "gate"
    ends = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo done; exit 0"
    done = queue.call("submit", *THREE, "--", *ring(bell, in_world(1, ends)))
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[1]
    assert "  3 nodes x 1 cpu + 1 spare  " in done.stdout
    assert hear_world(bell, 0, 3) == ["node1", "node2", "node3"]
    until(lambda: queue.status(name)["nodes"] == ["node1", "node2", "node3"])
    assert (queue.status(name)["spares"], queue.status(name)["lost"]) == (["node4"], [])
    since_s = queue.status(name)["since_s"]
    down(2)
    assert hear_world(bell, 1, 3) == ["node1", "node4", "node3"]
    until(lambda: queue.status(name)["nodes"] == ["node1", "node4", "node3"])
    status = queue.status(name)
    assert (status["spares"], status["lost"], status["state"], status["since_s"]) == (
        [],
        ["node2"],
        "RUNNING",
        since_s,
    )
    gate.touch()
    assert queue.wait(name)["headline"] == "COMPLETED"
    assert queue.lines(name, "--node=node2") == []
    assert len(queue.lines(name, "--node=node4")) == 1
    assert re.search(r"^infini-run: lost node 1 \(node2\)", queue.logs(name), re.M)


def test_an_agent_that_is_killed_ends_no_job_and_its_node_is_a_spare_again(queue, bell, tmp_path):
    gate = tmp_path / "gate"
    ends = f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 0"
    name = queue.submit(*THREE, "--", *ring(bell, in_world(1, ends)))
    assert hear_world(bell, 0, 3) == ["node1", "node2", "node3"]
    os.kill(launcher_of(1), signal.SIGKILL)
    assert hear_world(bell, 1, 3)[::2] == ["node1", "node3"]
    until(lambda: len(queue.status(name)["spares"]) == 1)
    status = queue.status(name)
    assert sorted([*status["nodes"], *status["spares"]]) == ["node1", "node2", "node3", "node4"]
    assert status["lost"] == []
    gate.touch()
    assert queue.wait(name)["headline"] == "COMPLETED"


def test_the_loss_of_the_node_that_has_the_head_ends_the_job(queue, down, bell):
    """Slurm does not (--no-kill); who hears nothing of the head any more does."""
    name = queue.submit(*THREE, "--", *ring(bell))
    hear_world(bell, 0, 3)
    down(1)
    status = queue.wait(name)
    assert (status["headline"], status["nodes"]) == ("NODE_FAIL exit 1 on node1", ["node1", "node2", "node3"])
    assert status["reason"] == "lost node1, which ran the job's script and its head"


def test_it_is_queued_again_then_if_it_may_be(queue, down, bell):
    script = "[ $INFINI_JOB_ATTEMPT = 0 ] || exit 0; exec sleep 1000"
    name = queue.submit(*THREE, "--restarts=1", "--", *ring(bell, script))
    assert hear_world(bell, 0, 3) == ["node1", "node2", "node3"]
    down(1)
    queue.wait(name, "QUEUED")
    down.up()
    bell.hear(3)
    status = queue.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slots=4", "--spares=1"), "the request needs 5 nodes with 1 CPU (1 spare among them); pool debug has 4"),
        (("--spares=1", "--options=--no-kill"), "--no-kill: use --spares=N of infini-job"),
        (
            ("--spares=1", "--run_options=--keep_going"),
            "--spares=1: conflicts with --run_options=--keep_going: a failure ends",
        ),
        (
            ("--run_options=--spares=1",),
            "--run_options: --spares=1: use --spares of infini-job, which also allocates the nodes",
        ),
        (("--spares=1", "--layout=determined"), "--spares: conflicts with --layout=determined"),
        (("--spares=1", "--scheduler=local"), "--spares=1: needs several nodes"),
    ],
)
def test_what_contradicts_spares_is_one_line(queue, words, said):
    done = queue.call("submit", "--slot_type=cpu", "--slots_per_node=1", *words, "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith(f"infini-job: {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert queue.is_empty()
