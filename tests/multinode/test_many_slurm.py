"""--engine=slurm on a real Slurm of four nodes (tests/support/beds/slurm.sh): salloc, sbatch, srun, and every way to
end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infini_run.errors import counted
from tests.support.cluster import Bed, free_ports, need
from tests.support.command import COMMAND, COMMANDS_END_SOON, PYTHON, without_waits
from tests.support.processes import OURS, is_alive, state_of
from tests.support.restarting_programs import ENDS, IDS, JOB_FLAGS, programs
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

# a rank that ends a second after TERM, with a stray in a session of its own
SLOW = 'trap "sleep 1; echo graceful; exit 0" TERM; setsid sleep 1000 & echo up; sleep 1000 & wait'
HARD = 'trap "" TERM INT; setsid sleep 1000 & echo up; sleep 1000; sleep 1000'
# a shell may take a TERM that all of its group gets into a fork of its own
SURE = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.write(1, b"up\\n")
signal.sigwait([signal.SIGTERM])
time.sleep(1)
os.write(1, b"graceful\\n")
"""
SEEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURMD_NODENAME")
SAY = f'echo "is {" ".join("$" + name for name in SEEN)} at $MASTER_ADDR:$MASTER_PORT"'


class Slurm(Bed):
    """Slurm with so many nodes; `env` has what its commands need."""

    def __init__(
        self, nodes: int = 4, proctrack: str = "linuxproc", gpus: int = 2, cpus: int = 64, **settings: str
    ) -> None:
        settings |= {"SLURM_TB_PORT": str(free_ports(nodes + 1)), "SLURM_TB_PROCTRACK": proctrack}
        super().__init__("slurm.sh", str(nodes), str(gpus), str(cpus), **settings)
        self.nodes = nodes
        self.env = {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    def ask(self, *words: str) -> str:
        return subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, check=True
        ).stdout

    def said(self, lines: int = 15) -> str:
        """The last that its daemons wrote down, for who asks what went wrong."""
        logs = sorted(Path(self.folder).glob("slurm*.log"))
        return "\n".join("\n".join([log.name, *log.read_text().splitlines()[-lines:]]) for log in logs)

    def settle(self) -> None:
        """Every node is up, and no job is left."""
        until(
            lambda: (
                not self.ask("squeue", "-h")
                and self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == f"{self.nodes}\n"
            )
        )


def cgroup_bed(nodes: int) -> Slurm:
    """A Slurm that knows by cgroups what belongs to a step."""
    if os.geteuid() != 0 or not os.path.isdir("/sys/fs/cgroup/freezer"):
        pytest.skip("proctrack/cgroup of this Slurm needs root and the freezer of cgroup v1")
    need("slurm-wlm", "munge")
    return Slurm(nodes=nodes, proctrack="cgroup")


class Allocation:
    """An salloc that lives as long as we want, and the environment that its shell has."""

    def __init__(self, slurm: Slurm, *words: str) -> None:
        shell = "env -0; echo END; read _"
        self.process = subprocess.Popen(
            ["salloc", "-Q", *words, "sh", "-c", shell],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **slurm.env},
        )  # fmt: skip
        said = b""
        while not said.endswith(b"END\n"):
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, self.process.stderr.read()
            said += piece
        self.env = dict(os.fsdecode(word).split("=", 1) for word in said.split(b"\0")[:-1])
        self.job = self.env["SLURM_JOB_ID"]

    def runner(self, infini_run, case):
        """`infini-run --engine=slurm` in it."""

        def start(*words, engine="slurm", env=None, **kwargs):
            environ = {**(env or self.env), **case.env, OURS[0]: OURS[1]}
            kwargs.setdefault("cwd", "/tmp")
            return infini_run(f"--engine={engine}", *words, env=environ, **kwargs)

        return start

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module", params=["linuxproc", "cgroup"])
def tracked(request):
    """Both ways in which Slurm knows what belongs to a step: `cgroup` is what clusters have."""
    if request.param == "linuxproc":
        yield request.getfixturevalue("slurm")
        return
    bed = cgroup_bed(nodes=4)
    yield bed
    bed.close()


@pytest.fixture(scope="module")
def slurm():
    need("slurm-wlm", "munge")
    bed = Slurm()
    yield bed
    bed.close()


@pytest.fixture(scope="module")
def four(slurm):
    """Four nodes, as salloc gives them."""
    allocation = Allocation(slurm, "-N4")
    yield allocation
    allocation.close()


@pytest.fixture
def run(infini_run, four, case):
    """`infini-run --engine=slurm` in the allocation of four nodes."""
    return four.runner(infini_run, case)


def said(command):
    """What the ranks said of themselves: {rank: the other words}."""
    lines = [line.split("is ", 1)[1].split() for line in command.out.decode().splitlines() if "is " in line]
    return {int(words[0]): words[1:] for words in lines}


def check_ranks(found, nodes=4, each=2, first=1):
    world = nodes * each
    assert sorted(found) == list(range(world))
    assert len({words[6] for words in found.values()}) == 1, "all meet at one place"
    for rank, words in found.items():
        node, local = divmod(rank, each)
        assert words[:5] == [str(world), str(local), str(each), str(node), f"node{node + first}"]


def read_up(command, count=8):
    while command.out.count(b"up\n") < count:
        command.read_more()


def left(slurm, job):
    """Steps that Slurm knows of, but the batch script's and the shell's own."""
    rows = slurm.ask("squeue", "-h", "-s", "-j", job, "-o", "%i").split()
    return [row for row in rows if row.rpartition(".")[2].isdecimal()]


# ---- who is who


def test_ranks_of_preload_are_forked_on_each_node(run):
    text = "import os, sys; print('is', os.environ['RANK'], os.getppid(), 'decimal' in sys.modules)"
    command = run("--nproc_per_node=2", "--preload=decimal", sys.executable, "-c", text)
    assert command.wait() == 0, command.err
    assert [words[1] for words in said(command).values()] == ["True"] * 8
    assert b"cold" not in command.err


@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_in_salloc_every_rank_is_on_its_node(run, case, engine):
    command = run("--nproc_per_node=2", "sh", "-c", SAY, engine=engine)
    assert command.wait() == 0, command.err
    check_ranks(said(command))
    assert without_waits(command.err.decode().splitlines()) == []
    case.end()


@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_in_a_batch_script_with_a_shape_of_its_own_every_rank_is_on_its_node(slurm, case, tmp_path, engine):
    """SLURM_NTASKS, SLURM_CPUS_PER_TASK and the like are the script's, not the launch's."""
    words = shlex.join([*COMMAND, f"--engine={engine}", "--nproc_per_node=2", "sh", "-c", SAY])
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nenv | grep SLURM_NTASKS= >&2\nexec {words}\n")
    shape = ["-N4", "--ntasks-per-node=3", "--cpus-per-task=2", "--distribution=cyclic", "-D", "/tmp"]
    env = {**os.environ, **slurm.env, **case.env}
    out = [f"--output={tmp_path}/out", f"--error={tmp_path}/err"]
    subprocess.run(["sbatch", "-Q", "--wait", *shape, *out, script], env=env, check=True)
    assert (tmp_path / "err").read_text() == "SLURM_NTASKS=12\n"
    found = {int(line.split()[2]): line.split()[3:] for line in (tmp_path / "out").read_text().splitlines()}
    check_ranks(found)
    case.end()


@pytest.fixture(scope="module")
def binding():
    """A Slurm whose site binds each task of srun to cores."""
    cpus = os.cpu_count()
    if cpus < 2 or len(os.sched_getaffinity(0)) < cpus:
        pytest.skip("this process may not use two CPUs, or all that there are")
    need("slurm-wlm", "munge")
    bed = Slurm(nodes=1, cpus=cpus, SLURM_TB_BIND="1")
    yield bed
    bed.close()


def test_launcher_in_a_step_has_all_cpus_of_its_job(binding, case):
    """The documented form, --cpu-bind=none, whatever the site binds tasks to; without it, a line says what to add."""
    env = {**os.environ, **binding.env, **case.env}
    cpus = os.cpu_count()
    step = ["srun", "--ntasks-per-node=1"]
    words = [*COMMAND, "--engine=auto", "--nproc_per_node=1", "nproc"]
    found = {}
    for more in ((), ("--cpu-bind=none",)):
        made = subprocess.run(
            ["salloc", "-Q", "-N1", f"--cpus-per-task={cpus}", *step, *more, *words],
            env=env, cwd="/tmp", capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        found[more] = int(made.stdout), made.stderr
    assert found["--cpu-bind=none",] == (cpus, "")
    bound, line = found[()]
    text = f"infini-run: srun binds this process to {counted(bound, 'CPU')} of {cpus} in its step"
    assert line == (f"{text}; add --cpu-bind=none to srun\n" if bound < cpus else "")
    case.end()


def test_ranks_are_as_many_as_the_tasks_of_each_node(slurm, case):
    """Three tasks on two nodes: srun would number its tasks as our ranks are."""
    env = {**os.environ, **slurm.env, **case.env}
    words = [*COMMAND, "--engine=slurm", "sh", "-c", SAY]
    made = subprocess.run(
        ["salloc", "-Q", "-N2", "-n3", *words], env=env, cwd="/tmp", capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    found = {int(line.split()[2]): line.split()[3:7] for line in made.stdout.splitlines()}
    assert found == {0: ["3", "0", "2", "0"], 1: ["3", "1", "2", "0"], 2: ["3", "0", "1", "1"]}
    case.end()


@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_programs_are_on_their_nodes(run, case, engine):
    say = "echo is $ROLE_NAME $RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK/$NNODES $SLURMD_NODENAME"
    trainer = ("--program=trainer", "--nproc_per_node=2", "--on_nodes=0-2", "sh", "-c", say)
    command = run(*trainer, ":", "--program=server", "--on_nodes=rest", "sh", "-c", say, engine=engine)
    assert command.wait() == 0, command.err
    trainers = [f"trainer {rank}/6 {rank % 2} {rank // 2}/3 node{1 + rank // 2}" for rank in range(6)]
    found = sorted(line.split("is ", 1)[1] for line in command.out.decode().splitlines())
    assert found == ["server 0/1 0 0/1 node4", *trainers]
    assert without_waits(command.err.decode().splitlines()) == []
    case.end()


def test_failure_of_a_program_on_one_node_ends_all(run, case):
    trainer = ("--program=trainer", "sh", "-c", "echo up; exec sleep 1000")
    command = run(*trainer, ":", "--program=server", "--on_nodes=3", "sh", "-c", "exit 7")
    assert command.wait() == 7
    assert b"infini-run: server 0 on node4 failed: exit code 7" in command.err
    case.end()


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
@pytest.mark.parametrize("engine", ["slurm", "auto"])
def test_one_program_restarts_alone(run, case, tmp_path, engine, fails, check):
    command = run(*JOB_FLAGS, *programs(tmp_path, fails), engine=engine)
    code = command.wait()
    check(code, command.out.decode().splitlines(), command.err.decode().splitlines(), nodes=4)
    case.end()


def srun(slurm, case, *words, env=None, **kwargs):
    env = {**os.environ, **slurm.env, **case.env, **(env or {})}
    return subprocess.run(
        ["srun", "-Q", *words], env=env, cwd="/tmp", capture_output=True, text=True, check=False, **kwargs
    )


def test_as_the_task_of_a_node_it_is_the_nodes_launcher(slurm, case):
    words = [*COMMAND, "--engine=auto", "--nproc_per_node=2", "sh", "-c", SAY]
    made = srun(slurm, case, "-N4", "--ntasks-per-node=1", *words)
    assert made.returncode == 0, made.stderr
    check_ranks({int(line.split()[1]): line.split()[2:] for line in made.stdout.splitlines()})
    case.end()


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
def test_one_program_restarts_alone_under_launchers_of_srun(slurm, case, tmp_path, fails, check):
    """In one word of a shell: srun would take the `:` for its own."""
    token = {"INFINI_RUN_TOKEN": os.urandom(16).hex()}
    words = shlex.join([*COMMAND, "--engine=auto", *JOB_FLAGS, *programs(tmp_path, fails)])
    made = srun(slurm, case, "-N4", "--ntasks-per-node=1", "sh", "-c", f"exec {words}", env=token)
    own = [line for line in made.stderr.splitlines() if line.startswith("infini-run: ")]
    check(made.returncode, made.stdout.splitlines(), own, nodes=4)
    case.end()


def test_as_one_task_of_several_it_becomes_the_rank(slurm, case):
    made = srun(slurm, case, "-N4", "--ntasks-per-node=2", *COMMAND, "--engine=auto", "sh", "-c", SAY)
    assert made.returncode == 0, made.stderr
    check_ranks({int(line.split()[1]): line.split()[2:] for line in made.stdout.splitlines()})
    case.end()


def test_nnodes_takes_the_first_nodes_of_the_allocation(run, case):
    command = run("--nnodes=2", "--nproc_per_node=2", "sh", "-c", SAY)
    assert command.wait() == 0, command.err
    check_ranks(said(command), nodes=2)
    case.end()


def test_output_of_all_nodes_is_whole(run, case):
    lines, width = 300, 200
    script = f'i=0; while [ $i -lt {lines} ]; do printf "%d %d %0{width}d\\n" $RANK $i 0; i=$((i+1)); done'
    command = run("--nproc_per_node=4", "sh", "-c", script)
    assert command.wait() == 0, command.err
    rows = [line.split() for line in command.out.decode().splitlines()]
    assert len(rows) == 16 * lines
    for rank in range(16):
        mine = [row for row in rows if row[1] == str(rank)]
        assert [int(row[2]) for row in mine] == list(range(lines))
        assert {(row[0], row[3]) for row in mine} == {(f"[node{rank // 4 + 1}:{rank}]", "0" * width)}
    case.end()


# ---- how it ends


def test_a_failure_on_one_node_ends_all_and_is_told_once(run, case, slurm, four):
    script = '[ $RANK = 5 ] || { echo up; exec sleep 1000; }; echo up; sleep 0.3; echo "loss is nan" >&2; exit 7'
    command = run("--nproc_per_node=2", "sh", "-c", script)
    assert command.wait() == 7
    case.end()
    text = command.err.decode()
    assert text.count("failed") == 1
    assert "rank 5 on node3 failed: exit code 7" in text
    assert "7 others were stopped" in text
    until(lambda: not left(slurm, four.job))


def test_a_step_of_another_slurm_on_this_machine_is_no_step_of_ours():
    """Slurm names cgroups after nodes, jobs and steps: two beds whose nodes shared them would kill each other's
    ranks."""
    one, other = cgroup_bed(nodes=1), cgroup_bed(nodes=1)
    try:
        longer = subprocess.Popen(["srun", "sh", "-c", "echo up; read _"], env={**os.environ, **one.env},
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert longer.stdout.readline() == b"up\n"
        other.ask("srun", "true")
        longer.communicate(b"\n")
        assert longer.returncode == 0, one.said()
    finally:
        one.close()
        other.close()


def test_ranks_get_their_grace_and_srun_no_signal(tracked, run, case):
    """TERM to srun is SIGKILL to its step: a rank that takes a second to end would not live to say so."""
    allocation = Allocation(tracked, "-N4")
    command = run("--nproc_per_node=2", sys.executable, "-ISc", SURE, env=allocation.env)
    read_up(command)
    command.signal(signal.SIGTERM)
    if command.wait():
        print(tracked.said())  # pytest cuts what an assertion says
    assert command.process.returncode == 0, (command.out, command.err)
    assert command.out.count(b"graceful") == 8
    case.end()
    allocation.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_twice_it_kills_at_once(run, case, number):
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD)
    read_up(command)
    command.signal(number)
    command.read_error_until(b"stopping")
    command.insist(number)
    assert command.wait() == 128 + number
    case.end()


def test_a_killed_head_leaves_nothing_anywhere(tracked, run, case):
    allocation = Allocation(tracked, "-N4")
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD, env=allocation.env)
    read_up(command)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    case.end()
    until(lambda: not left(tracked, allocation.job))
    allocation.close()


def agents_of(case):
    """The agent of each node, by Slurm's number of it."""
    found = {}
    for pid in case.alive():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(b"infini_run.multinode.agent" in word for word in words) and words[0] != b"srun":
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(word.removeprefix(b"SLURM_NODEID=")): pid for word in environ if b"SLURM_NODEID=" in word}
    return found


def test_after_the_head_was_killed_slurm_leaves_the_end_to_the_agents(slurm, run, case):
    """Its kill of a step by linuxproc may miss what a shell starts meanwhile, and takes who would have found it."""
    allocation = Allocation(slurm, "-N4")
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD, env=allocation.env)
    read_up(command)
    agents = agents_of(case)
    late = agents.pop(2)
    os.kill(late, signal.SIGSTOP)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    until(lambda: not any(map(is_alive, agents.values())))
    assert state_of(late) == "T"
    os.kill(late, signal.SIGCONT)
    case.end()
    until(lambda: not left(slurm, allocation.job))
    allocation.close()


def test_after_the_head_was_killed_slurm_ends_an_agent_that_hangs(slurm, run, case):
    allocation = Allocation(slurm, "-N4")
    command = run("--nproc_per_node=1", "sh", "-c", "echo up; exec sleep 1000", env=allocation.env)
    read_up(command, 4)
    os.kill(agents_of(case)[2], signal.SIGSTOP)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    case.end()
    until(lambda: not left(slurm, allocation.job))
    allocation.close()


def test_a_node_that_dies_is_named_and_ends_the_job(slurm, run, case):
    allocation = Allocation(slurm, "-N4", "--no-kill")
    command = run("--nproc_per_node=2", "sh", "-c", SLOW, env=allocation.env, under=COMMANDS_END_SOON)
    read_up(command)
    slurm.call("node-down", "3")
    try:
        assert command.wait() == 1
        case.end()
    finally:
        slurm.call("node-up", "3")
        allocation.close()
    assert b"lost node 2 (node3)" in command.err
    assert command.err.count(b"lost node") == 1


def test_an_agent_that_hangs_is_ended_by_slurm(run, case, slurm, four):
    """Its node is told silent; what the Link cannot reach any more, scancel of the step does."""
    command = run("--node_timeout=3", "--nproc_per_node=1", "sh", "-c", "echo up; exec sleep 1000")
    read_up(command, 4)
    os.kill(agents_of(case)[2], signal.SIGSTOP)
    assert command.wait() == 1
    assert b"lost node 2 (node3): no message from it for 3 s" in command.err
    case.end()
    until(lambda: not left(slurm, four.job))


def test_scancel_of_the_job_ends_it_with_its_grace(tracked, case, tmp_path):
    words = shlex.join([*COMMAND, "--engine=slurm", "--nproc_per_node=2", sys.executable, "-ISc", SURE])
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {words}\n")
    env = {**os.environ, **tracked.env, **case.env}
    out = tmp_path / "out"
    made = subprocess.run(
        ["sbatch", "-N4", "-D", "/tmp", "--parsable", f"--output={out}", script],
        env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    until(lambda: out.exists() and out.read_text().count("up\n") == 8)
    tracked.ask("scancel", made.stdout.strip())
    case.end()
    assert len({line for line in out.read_text().splitlines() if line.endswith("graceful")}) == 8, out.read_text()
    assert out.read_text().count("stopping") == 1


# ---- what cannot be


def test_without_an_allocation_one_line_says_so(run, slurm):
    command = run("true", env={**os.environ, **slurm.env})
    assert command.wait() == 2
    assert command.err == (b"infini-run: --engine=slurm: needs an allocation; run salloc -N2 or sbatch\n")


def test_an_allocation_without_nodes_is_one_line(run, four):
    command = run("true", env={**four.env, "SLURM_JOB_NODELIST": "", "SLURM_JOB_NUM_NODES": ""})
    assert command.wait() == 2
    assert command.err == (
        f"infini-run: --engine=slurm: slurm job {four.job} has no host in its allocation\n".encode()
    )


def test_more_nodes_than_the_allocation_has_are_refused(run, four):
    command = run("--nnodes=5", "true")
    assert command.wait() == 2
    assert (
        command.err == b"infini-run: --nnodes=5: needs more hosts than SLURM_JOB_NODELIST=node[1-4], "
        b"which is 4 hosts; add hosts\n"
    )


def test_srun_that_is_not_there_is_one_line(run, four, tmp_path):
    command = run("true", env={**four.env, "PATH": str(tmp_path)})
    assert command.wait() == 127
    assert command.err == b"infini-run: srun is not on PATH, and --engine needs it\n"


def test_an_agent_that_is_not_installed_is_told_with_what_to_do(run, case):
    command = run("--remote_python=/no/such", "true")
    assert command.wait() == 1
    assert b"/no/such" in command.err
    assert b"--remote_python" in command.err
    assert command.err.count(b"\n") == 1
    case.end()


def test_an_agent_that_does_not_start_is_told_in_its_own_words(run, case, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'licence.dat: No such file or directory' >&2\nexit 3\n")
    python.chmod(0o755)
    command = run(f"--remote_python={python}", "true")
    assert command.wait() == 1
    # srun's code is the highest of all tasks': 137 if it has killed one that had not failed yet
    why = rb"srun exited with (3|137): licence\.dat: No such file or directory"
    assert re.fullmatch(rb"infini-run: node 0 \(node1\) did not join: " + why + b"\n", command.err)
    case.end()


def test_ranks_are_where_the_list_of_hosts_says(run, four, case):
    """Slurm itself numbers the nodes of a step in its own order; and it hands on how we have logged in elsewhere."""
    env = {**four.env, "SSH_CONNECTION": "10.9.9.9 1234 10.8.8.8 22"}
    script = "echo is $RANK $SLURMD_NODENAME $MASTER_ADDR"
    command = run("--hosts=node3,node1,node2", "--nproc_per_node=1", "sh", "-c", script, env=env)
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[node1:1] is 1 node1 node3", "[node2:2] is 2 node2 node3", "[node3:0] is 0 node3 node3"
    ]  # fmt: skip
    case.end()


def test_nodes_that_are_done_early_do_not_end_the_step(run, case):
    """An agent that took the head for dead would fail, and srun with it all others (--kill-on-bad-exit)."""
    command = run("--node_timeout=2", "--nproc_per_node=1", "sh", "-c", "[ $RANK != 0 ] || sleep 5")
    assert command.wait() == 0, command.err
    assert without_waits(command.err.decode().splitlines()) == []
    case.end()


def test_run_in_python_reaches_all_of_the_allocation(four, case):
    script = """
import infini_run as ir
for engine in ("auto", "slurm"):
    report = ir.run(["sh", "-c", "exit 0"], engine=engine, nproc_per_node=2)
    assert [exit_.host for exit_ in report.exits] == [f"node{1 + rank // 2}" for rank in range(8)], report
"""
    env = {**os.environ, **four.env, **case.env}
    done = subprocess.run([*PYTHON, "-c", script], env=env, capture_output=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    case.end()


# ---- a real training program


@pytest.mark.torch
def test_two_nodes_train_together(run, case, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(DDP)
    command = run("--nnodes=2", "--nproc_per_node=2", str(program))
    assert command.wait() == 0, command.err
    sums = {line.split()[-1] for line in command.out.decode().splitlines() if "loss" in line}
    assert len(sums) == 1, command.out
    case.end()


DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
step = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(5):
    step.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    step.step()
total = sum(parameter.sum() for parameter in model.parameters())
assert dist.get_world_size() == 4
print("loss", f"{total.item():.6f}", flush=True)
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that still holds a tensor would abort the end of Python (docs/start/workstation.md)
"""
