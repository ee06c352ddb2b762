"""The stand-ins for Slurm and PBS: they run what they are told, end it when told to, and do wrong as asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import is_alive
from tests.support.waiting import until

SUBMIT = {
    "slurm": ("sbatch", "--parsable", "--nodes=2"),
    "pbs": ("qsub", "-l", "select=2:ncpus=1", "-l", "place=scatter"),
}
CANCEL = {"slurm": "scancel", "pbs": "qdel"}


@pytest.fixture(params=["slurm", "pbs"])
def queue(request):
    return request.getfixturevalue(f"{request.param}_queue")


@pytest.fixture
def submit(queue, tmp_path):
    def call(text, *words):
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/sh\n{text}\n")
        name = ["-o", str(tmp_path / "out")] if queue.kind == "pbs" else [f"--output={tmp_path}/out"]
        argv = [*SUBMIT[queue.kind], *name, *words, str(script)]
        return subprocess.run(argv, env=queue.env, capture_output=True, text=True, check=False)

    return call


def test_a_job_runs_and_how_it_ended_is_known(queue, submit, tmp_path):
    done = submit("env; echo hello; exit 3")
    assert done.returncode == 0, done.stderr
    queue.ended()
    (job,) = queue.jobs()
    assert (job["state"], job["code"], len(job["nodes"])) == ("FAILED", 3, 2)
    said = (tmp_path / "out").read_text()
    assert "hello" in said
    assert ("SLURM_JOB_ID=101" if queue.kind == "slurm" else "PBS_JOBID=101.pbshead") in said


def test_a_job_that_is_cancelled_is_ended_with_all_that_it_has_started(queue, submit, bell):
    done = submit(f"setsid sleep 1000 & echo $! >{bell.path}; echo $$ >{bell.path}; wait")
    pids = [int(line) for line in bell.hear(2)]
    subprocess.run([CANCEL[queue.kind], done.stdout.strip()], env=queue.env, check=True)
    queue.ended()
    assert queue.jobs()[0]["state"] == "CANCELLED"
    assert not any(map(is_alive, pids))


def test_a_job_that_ignores_term_is_killed_in_the_end(queue, submit, bell):
    queue.set(kill_wait_s=0.2)
    done = submit(f'trap "" TERM; echo up >{bell.path}; while :; do sleep 1000; done')
    bell.hear(1)
    subprocess.run([CANCEL[queue.kind], done.stdout.strip()], env=queue.env, check=True)
    queue.ended()
    code = {"slurm": 137, "pbs": 143}[queue.kind]  # PBS tells of the user's shell above the script
    assert (queue.jobs()[0]["state"], queue.jobs()[0]["code"]) == ("CANCELLED", code)


def test_a_queue_that_is_closed_leaves_nothing(queue, submit, bell):
    submit(f"echo $$ >{bell.path}; sleep 1000")
    (pid,) = bell.hear(1)
    assert is_alive(int(pid))  # the fixture's close, and the checks of conftest, do the rest


def test_a_test_that_is_killed_leaves_nothing(tmp_path, bell):
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.batch import Queue
queue = Queue("slurm")
script = {str(tmp_path / "job.sh")!r}
open(script, "w").write("echo $$ >{bell.path}; sleep 1000")
subprocess.run(["sbatch", "--output=/dev/null", script], env=queue.env, check=True)
print(queue.jobs()[0]["keeper"], flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""
    killed = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    (pid,) = map(int, bell.hear(1))
    said, _ = killed.communicate()
    keeper = int(said.splitlines()[-1])
    until(lambda: not is_alive(pid) and not is_alive(keeper))


def test_a_fault_is_done_once(queue, submit):
    queue.fail(SUBMIT[queue.kind][0], "lost", "empty", "away")
    lost, empty, away, well = (submit("true") for _ in range(4))
    assert (lost.returncode, empty.returncode, empty.stdout) == (1, 0, "")
    assert away.returncode != 0
    assert well.returncode == 0
    queue.ended()
    assert len(queue.jobs()) == 2


def test_a_silent_answer_is_no_answer_but_the_job_is_there(queue, submit, tmp_path):
    queue.fail(SUBMIT[queue.kind][0], "silent")
    (tmp_path / "job.sh").write_text("true\n")
    asked = subprocess.Popen([*SUBMIT[queue.kind], str(tmp_path / "job.sh")], env=queue.env, stdout=subprocess.PIPE)
    while not queue.jobs():
        assert asked.poll() is None
    queue.ended()
    assert asked.poll() is None
    asked.kill()
    assert asked.communicate()[0] == b""


def test_a_task_of_pbs_runs_on_its_node(pbs_queue, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(
        'for host in $(cat "$PBS_NODEFILE"); do pbs_tmrsh $host /bin/sh -c "exit 4" || echo $host $?; done\n'
    )
    argv = ["qsub", "-l", "select=2:ngpus=4", "-o", str(tmp_path / "out"), str(script)]
    subprocess.run(argv, env=pbs_queue.env, check=True, capture_output=True)
    pbs_queue.ended()
    assert (tmp_path / "out").read_text() == "pbsn1 4\npbsn1 4\n"  # what fits on one host is put there


def test_a_step_of_slurm_runs_on_all_nodes(slurm_queue, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("srun --nodes=2 sh -c 'echo $SLURM_NODEID $SLURMD_NODENAME'; srun --nodes=1 sh -c 'exit 5'\n")
    argv = ["sbatch", "--nodes=2", f"--output={tmp_path}/out", str(script)]
    subprocess.run(argv, env=slurm_queue.env, check=True, capture_output=True)
    slurm_queue.ended()
    said = (tmp_path / "out").read_text()
    assert {"0 node1", "1 node2"} <= set(said.splitlines())
    assert slurm_queue.jobs()[0]["code"] == 5


def test_a_task_that_fails_ends_its_step(slurm_queue, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("srun --nodes=2 sh -c '[ $SLURM_NODEID = 0 ] && exit 7; exec sleep 1000'\n")
    argv = ["sbatch", "--nodes=2", f"--output={tmp_path}/out", str(script)]
    subprocess.run(argv, env=slurm_queue.env, check=True, capture_output=True)
    slurm_queue.ended()
    assert slurm_queue.jobs()[0]["code"] == 143  # the highest, that of the one that was ended: as srun has it
    assert "Exited with exit code 7" in (tmp_path / "out").read_text()


def test_a_job_that_is_run_again_has_another_number(slurm_queue, bell, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"echo $SLURM_RESTART_COUNT >{bell.path}\n[ $SLURM_RESTART_COUNT = 1 ] || sleep 1000\n")
    argv = ["sbatch", "--parsable", "--requeue", f"--output={tmp_path}/out", str(script)]
    number = subprocess.run(argv, env=slurm_queue.env, check=True, capture_output=True, text=True).stdout.strip()
    assert bell.hear(1) == ["0"]
    subprocess.run(["scontrol", "requeue", number], env=slurm_queue.env, check=True)
    assert bell.hear(1) == ["1"]
    slurm_queue.ended()
    assert slurm_queue.jobs()[0]["state"] == "COMPLETED"


def test_a_real_scheduler_is_not_reached(slurm_queue):
    code = "import shutil; print(shutil.which('sbatch'))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=slurm_queue.env, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).parent == Path(slurm_queue.folder, "bin")
