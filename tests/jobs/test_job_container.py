"""Jobs in the image of a real runtime: podman, on two nodes of a real Slurm."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys

import pytest

from tests.multinode.test_many_slurm import Slurm
from tests.support.cluster import need
from tests.support.command import play
from tests.support.job_case import Jobs
from tests.support.podman import IMAGE, binds, limits
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)

TWO = ("--slots=4", "--slots_per_node=2")


@pytest.fixture(scope="module")
def bed():
    need("slurm-wlm", "munge")
    bed = Slurm(nodes=2, SLURM_TB_KILLWAIT="2")
    yield bed
    bed.close()


@pytest.fixture
def queue(tmp_path, bed, podman, case):
    """Jobs in that image. Nothing of them is left at the end: no process, no container."""
    env = {**bed.env, **podman.env, "INFINI_JOB_SCHEDULER": "slurm", "INFINI_JOB_CONTAINER": IMAGE,
           "INFINI_JOB_RUNTIME": "podman", "INFINI_JOB_CONTAINER_PYTHON": sys.executable,
           "INFINI_JOB_BIND": shlex.join(binds()), "INFINI_JOB_CONTAINER_OPTIONS": shlex.join(limits()),
           "INFINI_JOB_SLOT_TYPE": "cpu"}  # fmt: skip
    jobs = Jobs(tmp_path / "jobs", case, env)
    yield jobs
    jobs.close()
    bed.settle()
    case.end()
    until(lambda: not podman.containers())


def test_ranks_of_two_nodes_run_in_the_image(queue, tmp_path):
    script = "echo is $RANK $LOCAL_RANK $GROUP_RANK $SLURMD_NODENAME $(cat /etc/image) $(pwd)"
    done = queue.call("submit", *TWO, "--wait", "--", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    name = done.stdout.split()[1]
    said = sorted(line.split("is ")[1] for line in queue.lines(name))
    assert said == [f"{r} {r % 2} {r // 2} node{r // 2 + 1} the image {tmp_path}" for r in range(4)]


def test_a_rank_that_fails_inside_is_the_jobs_end(queue):
    done = queue.call("submit", *TWO, "--wait", "--", *play("@3", "exit=7", "@*", "wait"))
    assert done.returncode == 7, done.stdout
    assert done.stdout.splitlines()[1].startswith(
        "FAILED exit 7 on node2, rank 3: rank 3 on node2 failed: exit code 7"
    )


def test_cancel_gives_ranks_inside_their_grace(queue, bell, tmp_path):
    script = f'trap "echo saved $RANK; exit 0" TERM; (echo up > {bell.path}; exec sleep 1000) & wait'
    where = os.path.dirname(bell.path)
    name = queue.submit(*TWO, f"--bind={shlex.join([*binds(), where])}", "--", "sh", "-c", script)
    bell.hear(4)
    assert queue.call("cancel", name).returncode == 0
    assert queue.wait(name)["state"] == "CANCELLED"
    assert sorted(line.split()[-2:] for line in queue.lines(name)) == [["saved", str(r)] for r in range(4)]


def test_a_container_whose_runtime_is_killed_ends(queue, bell, case):
    """It is conmon's child, not podman's: the launcher's own teardown ends it. The fixture looks for what is left."""
    where = os.path.dirname(bell.path)
    script = f"echo up > {bell.path}; exec sleep 1000"
    name = queue.submit(*TWO, f"--bind={shlex.join([*binds(), where])}", "--", "sh", "-c", script)
    bell.hear(4)
    clients = [pid for pid, comm in case.alive().items() if comm == "podman"]
    assert len(clients) == 2
    os.kill(clients[1], signal.SIGKILL)
    status = queue.wait(name)
    assert status["state"] == "FAILED"
    assert re.search(r"srun: error: (node1: task 0|node2: task 1): Killed", status["reason"]), status["reason"]


def test_a_launcher_of_this_machine_that_is_killed_leaves_no_container(queue, bell):
    """Without a scheduler nobody else would end it."""
    where = os.path.dirname(bell.path)
    words = ("--scheduler=local", "--slots=2", f"--bind={shlex.join([*binds(), where])}")
    name = queue.submit(*words, "--", "sh", "-c", f"cat /etc/image; echo up > {bell.path}; exec sleep 1000")
    bell.hear(2)
    assert sorted(queue.lines(name)) == ["[rank 0] the image", "[rank 1] the image"]
    os.kill(int((queue.path / name / "id").read_text().partition(".")[0]), signal.SIGKILL)
    assert queue.wait(name)["state"] == "LOST"
