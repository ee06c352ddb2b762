"""infini-job top, follow, and stacks: questions to the launch of a running job, here and on a real Slurm."""

from __future__ import annotations

import os
import signal

import pytest

from tests.jobs.test_job_slurm_real import eights, queue  # noqa: F401
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.xdist_group("tests.jobs.test_job_slurm_real")  # one bed for all of them


def waits(bell, gate):
    """A rank that says that it is there, and writes a line once somebody opens the gate."""
    return ("sh", "-c", f'echo up; echo "$RANK $$" > {bell.path}; read go < {gate}; echo "line of $RANK"')


def ask_all(jobs, name, bell, gate, count):
    """Ask a running job everything, and let it end."""
    ranks = dict(line.split() for line in bell.hear(count))
    table = jobs.call("top", name)
    assert table.returncode == 0, table.stderr
    assert f" {count} ranks" in table.stdout.splitlines()[0]
    rows = [line.split() for line in table.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == [str(rank) for rank in range(count)]
    assert all(ranks[row[0]] in row for row in rows)
    stacks = jobs.call("stacks", "--ranks=1", name)
    assert stacks.returncode == 0, stacks.stderr
    assert f"pid {ranks['1']}: sh " in stacks.stdout
    interrupted = jobs.start("follow", name)
    interrupted.read_error_until(b"ends this view, not the job\n")
    interrupted.signal(signal.SIGINT)
    assert interrupted.wait() != 0
    follower = jobs.start("follow", "--ranks=1", name)
    follower.read_error_until(b"ends this view, not the job\n")
    with open(gate, "w") as file:
        for _ in range(count):
            file.write("go\n")
    assert follower.wait() == 0
    assert [line.partition("] ")[2] for line in follower.out.decode().splitlines()] == ["line of 1"]
    jobs.wait(name, "COMPLETED")
    for verb in ("top", "follow", "stacks"):
        done = jobs.call(verb, name)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"job {name} does not run: COMPLETED" in done.stderr


@pytest.fixture
def gate(tmp_path):
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def test_running_job_of_this_machine_answers(local, bell, gate):
    name = local.submit("--slots=2", "--", *waits(bell, gate))
    ask_all(local, name, bell, gate, 2)


def test_rank_of_a_program_of_a_running_job_answers(local, bell, gate):
    wait = waits(bell, gate)
    name = local.submit("--slots=2", "--program=trainer", *wait, ":", "--program=server", *wait)
    bell.hear(2)
    stacks = local.call("stacks", "--ranks=server:0", name)
    assert stacks.returncode == 0, stacks.stderr
    assert "server 0" in stacks.stdout
    assert "trainer" not in stacks.stdout
    unknown = local.call("stacks", "--ranks=server:1", name)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "unknown rank server:1; use server:0 to server:0" in unknown.stderr
    with open(gate, "w") as file:
        file.write("go\ngo\n")
    local.wait(name, "COMPLETED")


def test_running_job_of_slurm_answers_on_the_login_node(queue, bell, gate):  # noqa: F811
    """Two nodes; the commands run outside of them."""
    name = queue.submit("--slots=8", "--slots_per_node=4", "--", *waits(bell, gate))
    ask_all(queue, name, bell, gate, 8)


def test_task_of_a_running_array_of_slurm_answers(queue, bell, gate):  # noqa: F811
    """Also within another allocation, whose variables are options of srun."""
    queue.env |= {"SLURM_NTASKS_PER_GPU": "1", "SLURM_GPUS": "1", "SLURM_LABELIO": "1"}
    name = queue.submit("--slots=4", "--slots_per_node=4", "--array=3-4", "--", *waits(bell, gate))
    bell.hear(8)
    for task in (3, 4):
        table = queue.call("top", f"{name}.{task}")
        assert (table.returncode, table.stderr) == (0, "")
        assert table.stdout.startswith("infini-run, 4 ranks")
    with open(gate, "w") as file:
        file.write("go\n" * 8)
    queue.wait(name, "COMPLETED")


def test_top_names_itself_when_rich_is_missing(local, bell, gate, tmp_path):
    name = local.submit("--slots=1", "--", *waits(bell, gate))
    bell.hear(1)
    (tmp_path / "rich.py").write_text("raise ImportError\n")
    local.env["PYTHONPATH"] = str(tmp_path)
    done = local.call("top", name)
    assert (done.returncode, done.stderr) == (
        2,
        "infini-job: infini-job top: needs rich; run pip install 'infini-run[live]'\n",
    )
    local.call("cancel", name)
    local.wait(name)


def test_array_needs_one_of_its_tasks(local, bell, gate):
    name = local.submit("--slots=1", "--array=1-2%1", "--", *waits(bell, gate))
    bell.hear(1)
    done = local.call("top", name)
    assert (done.returncode, done.stderr) == (
        2,
        f"infini-job: job {name} is an array; use one of its tasks, such as {name}.1\n",
    )
    assert "infini-run, 1 rank, " in local.call("top", f"{name}.1").stdout
    local.call("cancel", name)
    local.wait(name)


def test_job_of_pbs_is_reached_by_ssh(pbs_queue, tmp_path, case, bell):
    from tests.support.job_case import Jobs

    jobs = Jobs(tmp_path / "jobs", case, {**pbs_queue.env, "INFINI_JOB_SCHEDULER": "pbs"})
    try:
        name = jobs.submit(
            "--slots=1", "--slots_per_node=1", "--", "sh", "-c", f"echo up > {bell.path}; exec sleep 1000"
        )
        bell.hear(1, LIMIT_S)
        line = jobs.call("follow", "--ranks=0", name).stderr
        assert line.startswith("infini-job: PBS has no command for a running job; run ssh pbsn")
        assert line.endswith(f" infini-run --follow --ranks=0 {name}\n")
        jobs.call("cancel", name)
        jobs.wait(name)
    finally:
        jobs.close()
        case.end()
