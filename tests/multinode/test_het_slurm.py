"""--engine=slurm and tasks of srun in heterogeneous jobs of a real Slurm: components of one node and of two, whose
names sort the other way round."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest

from tests.multinode.test_many_slurm import HARD, SAY, SURE, Allocation, Slurm, agents_of, left, read_up, said
from tests.support.cluster import need
from tests.support.command import COMMAND, PYTHON, without_waits
from tests.support.restarting_programs import ENDS, IDS, JOB_FLAGS, programs
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

ORDER = ("node3", "node1", "node2")
SHAPE = ("--nodelist=node3", ":", "--nodelist=node1,node2", "--nodes=2")
PROGRAMS = """
[[program]]
name = "trainer"
command = ["sh", "-c", 'echo is $ROLE_NAME $RANK/$WORLD_SIZE $SLURMD_NODENAME']
on_nodes = "0"
nproc_per_node = 2

[[program]]
name = "rollout"
command = ["sh", "-c", 'echo is $ROLE_NAME $RANK/$WORLD_SIZE $SLURMD_NODENAME']
on_nodes = "rest"
nproc_per_node = 1
"""
PLACED = [
    "rollout 0/2 node1", "rollout 1/2 node2", "trainer 0/2 node3", "trainer 1/2 node3",
]  # fmt: skip


@pytest.fixture(scope="module")
def slurm():
    need("slurm-wlm", "munge")
    bed = Slurm(SLURM_TB_SCHEDULER="backfill")
    yield bed
    bed.close()


@pytest.fixture(scope="module")
def het(slurm):
    """A heterogeneous job, as salloc gives it."""
    allocation = Allocation(slurm, *SHAPE)
    yield allocation
    allocation.close()


@pytest.fixture
def run(infini_run, het, case):
    """`infini-run --engine=slurm` in that job."""
    return het.runner(infini_run, case)


def call(slurm, case, *words, **env):
    environ = {**os.environ, **slurm.env, **case.env, **env}
    return subprocess.run(words, env=environ, cwd="/tmp", capture_output=True, text=True, check=False)


def batch(slurm, case, tmp_path, shape, *words, **env):
    """What a batch script prints whose command this is."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(f"#!/bin/sh\nexec {shlex.join(map(str, words))}\n")
    done = call(slurm, case, "sbatch", "-Q", "--wait", f"--output={out}", *shape, script, **env)
    assert done.returncode == 0, (done.stderr, out.exists() and out.read_text())
    return out.read_text().splitlines()


def check_ranks(found, each=2):
    assert sorted(found) == list(range(3 * each))
    assert len({words[6] for words in found.values()}) == 1, "all meet at one place"
    for rank, words in found.items():
        node, local = divmod(rank, each)
        assert words[:5] == [str(3 * each), str(local), str(each), str(node), ORDER[node]]
        assert words[6].startswith("node3:")


def words_of(lines):
    return sorted(line.split("is ", 1)[1] for line in lines if "is " in line)


# ---- who is who


@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_nodes_of_all_components_run_ranks(run, case, engine):
    command = run("--nproc_per_node=2", "sh", "-c", SAY, engine=engine)
    assert command.wait() == 0, command.err
    check_ranks(said(command))
    assert without_waits(command.err.decode().splitlines()) == []
    case.end()


@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_nodes_of_all_components_run_ranks_in_batch_script(slurm, case, tmp_path, engine):
    lines = batch(slurm, case, tmp_path, SHAPE, *COMMAND, f"--engine={engine}", "--nproc_per_node=2", "sh", "-c", SAY)
    check_ranks({int(line.split()[2]): line.split()[3:] for line in lines})
    case.end()


def test_directives_of_script_make_components_with_own_resources(slurm, case, tmp_path):
    """Tasks, CPUs and GPUs of each component are its own."""
    say = "echo is $RANK/$WORLD_SIZE $LOCAL_WORLD_SIZE $SLURMD_NODENAME $SLURM_CPUS_ON_NODE $CUDA_VISIBLE_DEVICES"
    words = shlex.join([*COMMAND, "--engine=auto", "sh", "-c", say])
    first = "--nodelist=node3 --ntasks-per-node=2 --cpus-per-task=3 --gpus-per-node=1"
    second = "--nodelist=node1,node2 --nodes=2 --ntasks-per-node=1 --cpus-per-task=4 --gpus-per-node=2"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH {first}\n#SBATCH hetjob\n#SBATCH {second}\nexec {words}\n")
    done = call(slurm, case, "sbatch", "-Q", "--wait", f"--output={tmp_path}/out", script)
    assert done.returncode == 0, done.stderr
    assert words_of((tmp_path / "out").read_text().splitlines()) == [
        "0/4 2 node3 3 0", "1/4 2 node3 3 0", "2/4 1 node1 4 0,1", "3/4 1 node2 4 0,1",
    ]  # fmt: skip
    case.end()


@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_programs_are_on_nodes_of_components(run, case, tmp_path, engine):
    (tmp_path / "job.toml").write_text(PROGRAMS)
    command = run(f"--programs={tmp_path}/job.toml", engine=engine)
    assert command.wait() == 0, command.err
    assert words_of(command.out.decode().splitlines()) == PLACED
    case.end()


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
def test_one_program_restarts_alone_across_components(run, case, tmp_path, fails, check):
    command = run(*JOB_FLAGS, *programs(tmp_path, fails, nodes=3))
    code = command.wait()
    check(code, command.out.decode().splitlines(), command.err.decode().splitlines(), nodes=3)
    case.end()


def test_nnodes_takes_first_nodes_of_components(run, case):
    command = run("--nnodes=2", "--nproc_per_node=1", "sh", "-c", "echo is $RANK $SLURMD_NODENAME")
    assert command.wait() == 0, command.err
    assert words_of(command.out.decode().splitlines()) == ["0 node3", "1 node1"]
    case.end()


@pytest.mark.parametrize("hosts", ["node2", "node2,node3,node1", "node1,node2"])
def test_hosts_may_be_of_any_components(run, case, hosts):
    command = run(f"--hosts={hosts}", "--nproc_per_node=1", "sh", "-c", "echo is $RANK $SLURMD_NODENAME")
    assert command.wait() == 0, command.err
    assert words_of(command.out.decode().splitlines()) == [f"{n} {name}" for n, name in enumerate(hosts.split(","))]
    case.end()


def test_dry_run_shows_nodes_of_all_components(run):
    command = run("--dry_run", "--nproc_per_node=1", "true")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert [line for line in lines if line.startswith("node ")] == [
        "node 0 (node3):", "node 1 (node1):", "node 2 (node2):",
    ]  # fmt: skip
    who = "(SLURM_JOB_NODELIST_HET_GROUP_0=node3, SLURM_JOB_NODELIST_HET_GROUP_1=node[1-2])"
    assert f"  nnodes 3 {who}" in lines
    assert f"  hosts node[3,1-2] {who}" in lines


def test_run_in_python_reaches_all_components(het, case):
    script = """
import infini_run as ir
nodes = ["node3", "node1", "node2"]
for engine in ("auto", "slurm"):
    report = ir.run(["sh", "-c", "exit 0"], engine=engine, nproc_per_node=1)
    assert [exit_.host for exit_ in report.exits] == nodes, report
results = ir.Launcher(engine="slurm", hosts=nodes, nproc_per_node=1).run(__import__("os").getenv, "SLURMD_NODENAME")
assert list(results) == nodes, results
"""
    env = {**os.environ, **het.env, **case.env}
    done = subprocess.run([*PYTHON, "-c", script], env=env, capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    case.end()


def test_doctor_asks_nodes_of_all_components(run):
    command = run("--doctor")
    command.wait()
    found = [line.partition(":")[0] for line in command.out.decode().splitlines() if line.startswith("node")]
    assert found == list(ORDER)


def test_more_nodes_than_components_have_are_refused(run):
    command = run("--nnodes=4", "true")
    assert command.wait() == 2
    assert command.err == (
        b"infini-run: --nnodes=4: needs more hosts than SLURM_JOB_NODELIST_HET_GROUP_0=node3, "
        b"SLURM_JOB_NODELIST_HET_GROUP_1=node[1-2], which is 3 hosts; add hosts\n"
    )


def test_host_of_no_component_is_refused(run):
    command = run("--hosts=node3,node4", "--nproc_per_node=1", "true")
    assert command.wait() == 2
    assert command.err == b"infini-run: node4: not a node of this job; use node[3,1-2]\n"


def test_mpi_in_heterogeneous_job_is_refused(run):
    command = run("--nproc_per_node=1", "true", engine="mpi")
    assert command.wait() == 2
    assert command.err == (
        b"infini-run: --engine=mpi: cannot reach all components of a heterogeneous Slurm job, because mpirun starts "
        b"only in the first; use --engine=slurm\n"
    )


def test_job_that_heterogeneous_job_submits_is_not_taken_for_it(slurm, case, tmp_path):
    """It inherits the variables, with which srun itself fails."""
    inner, out = tmp_path / "inner.sh", tmp_path / "inner.out"
    words = shlex.join([*COMMAND, "--engine=slurm", "--nproc_per_node=1", "sh", "-c", "echo is $SLURMD_NODENAME"])
    inner.write_text(f"#!/bin/sh\n{words}\nunset SLURM_HET_SIZE\nexec {words}\n")
    batch(slurm, case, tmp_path, SHAPE, "sbatch", "-Q", "--nodelist=node4", f"--output={out}", inner)
    until(lambda: out.exists() and out.read_text().count("\n") == 2)
    assert out.read_text().splitlines() == [
        "infini-run: SLURM_HET_SIZE=2: not of this job, and srun fails with it; unset it",
        "[rank 0] is node4",
    ]
    case.end()


# ---- tasks of srun


def test_tasks_of_all_components_are_launchers(slurm, case, tmp_path):
    (tmp_path / "job.toml").write_text(PROGRAMS)
    words = ("srun", "--het-group=0,1", *COMMAND, "--engine=auto", f"--programs={tmp_path}/job.toml")
    done = call(slurm, case, "salloc", "-Q", *SHAPE, *words, INFINI_RUN_TOKEN=os.urandom(16).hex())
    assert done.returncode == 0, done.stderr
    assert words_of(done.stdout.splitlines()) == PLACED
    case.end()


def test_tasks_that_are_launchers_meet_at_first_component(slurm, case):
    words = ("srun", "--het-group=0,1", *COMMAND, "--engine=auto", "--nproc_per_node=2", "sh", "-c", SAY)
    done = call(slurm, case, "salloc", "-Q", *SHAPE, *words, INFINI_RUN_TOKEN=os.urandom(16).hex())
    assert done.returncode == 0, done.stderr
    lines = [line.split("is ", 1)[1].split() for line in done.stdout.splitlines()]
    check_ranks({int(words[0]): words[1:] for words in lines})
    case.end()


def test_tasks_of_component_are_its_nodes_alone(slurm, case):
    say = "echo is $RANK/$WORLD_SIZE $SLURMD_NODENAME $MASTER_ADDR"
    words = ("srun", "--het-group=1", *COMMAND, "--engine=auto", "--nproc_per_node=1", "sh", "-c", say)
    done = call(slurm, case, "salloc", "-Q", *SHAPE, *words, INFINI_RUN_TOKEN=os.urandom(16).hex())
    assert done.returncode == 0, done.stderr
    assert words_of(done.stdout.splitlines()) == ["0/2 node1 node1", "1/2 node2 node1"]
    case.end()


def test_tasks_without_token_need_number_of_ranks(slurm, case):
    """Each launcher knows the GPUs of its node alone: two and one here, of which each would count other ranks."""
    shape = ("--nodelist=node3", "--gpus-per-node=2", ":", "--nodelist=node1", "--gpus-per-node=1")
    say = "echo is $RANK/$WORLD_SIZE"
    words = ("srun", "--het-group=0,1", *COMMAND, "--engine=auto", "--console=none", "sh", "-c", say)
    done = call(slurm, case, "salloc", "-Q", *shape, *words)
    assert done.returncode == 2
    advice = "add --nproc_per_node=N, or set the same INFINI_RUN_TOKEN=... on every node"
    for gpus in (1, 2):
        line = f"infini-run: SLURM_GPUS_ON_NODE={gpus}: other components of the job may have other numbers; {advice}"
        assert line in done.stderr.splitlines()
    done = call(slurm, case, "salloc", "-Q", *shape, *words, INFINI_RUN_TOKEN=os.urandom(16).hex())
    assert done.returncode == 0, done.stderr
    case.end()


def test_several_tasks_per_node_of_components_become_ranks(slurm, case):
    say = "echo is $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $SLURMD_NODENAME $MASTER_ADDR"
    rank = (*COMMAND, "--engine=auto", "sh", "-c", say)
    words = ("srun", "--het-group=0", "--ntasks=2", *rank, ":", "--het-group=1", "--ntasks=2", *rank)
    done = call(slurm, case, "salloc", "-Q", "--ntasks=2", *SHAPE, *words)
    assert done.returncode == 0, done.stderr
    assert words_of(done.stdout.splitlines()) == [
        "0/4 0/2 0 node3 node3", "1/4 1/2 0 node3 node3", "2/4 0/1 1 node1 node3", "3/4 0/1 2 node2 node3",
    ]  # fmt: skip
    case.end()


# ---- how it ends


def test_failure_in_second_component_ends_all(run, case, slurm, het):
    command = run("--nproc_per_node=2", "sh", "-c", "[ $RANK = 5 ] || exec sleep 1000; sleep 0.3; exit 7")
    assert command.wait() == 7
    case.end()
    assert b"rank 5 on node2 failed: exit code 7" in command.err
    assert b"5 others were stopped" in command.err
    until(lambda: not left(slurm, het.job))


def test_ranks_of_all_components_get_their_grace(run, case):
    command = run("--nproc_per_node=2", sys.executable, "-ISc", SURE)
    read_up(command, 6)
    command.signal(signal.SIGTERM)
    assert command.wait() == 0, command.err
    assert command.out.count(b"graceful") == 6
    case.end()


def test_second_signal_kills_in_all_components(run, case):
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD)
    read_up(command, 6)
    command.signal(signal.SIGTERM)
    command.read_error_until(b"stopping")
    command.insist(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    case.end()


def test_killed_head_leaves_nothing_in_any_component(slurm, run, case, het):
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD)
    read_up(command, 6)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    case.end()
    until(lambda: not left(slurm, het.job))


@pytest.mark.parametrize("node", [0, 1, 2])
def test_agent_that_hangs_is_ended_by_slurm(run, case, slurm, het, node):
    """The end of its step ends all of it, whatever component the agent is in."""
    command = run("--node_timeout=3", "--nproc_per_node=1", "sh", "-c", "echo up; exec sleep 1000")
    read_up(command, 3)
    os.kill(agents_of(case)[node], signal.SIGSTOP)
    assert command.wait() == 1
    assert f"lost node {node} ({ORDER[node]}): no message from it for 3 s".encode() in command.err
    case.end()
    until(lambda: not left(slurm, het.job))


@pytest.mark.parametrize("node", [0, 1, 2])
def test_agent_that_is_killed_is_lost_node(run, case, slurm, het, node):
    command = run("--nproc_per_node=1", "sh", "-c", "echo up; exec sleep 1000")
    read_up(command, 3)
    os.kill(agents_of(case)[node], signal.SIGKILL)
    assert command.wait() == 1
    assert f"lost node {node} ({ORDER[node]})".encode() in command.err
    case.end()
    until(lambda: not left(slurm, het.job))


def test_scancel_of_job_ends_all_components_with_their_grace(slurm, case, tmp_path):
    words = shlex.join([*COMMAND, "--engine=slurm", "--nproc_per_node=2", sys.executable, "-ISc", SURE])
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(f"#!/bin/sh\nexec {words}\n")
    done = call(slurm, case, "sbatch", "--parsable", f"--output={out}", "-D", "/tmp", *SHAPE, script)
    until(lambda: out.exists() and out.read_text().count("up\n") == 6)
    slurm.ask("scancel", done.stdout.strip())
    case.end()
    assert len({line for line in out.read_text().splitlines() if line.endswith("graceful")}) == 6, out.read_text()
    assert out.read_text().count("stopping") == 1
