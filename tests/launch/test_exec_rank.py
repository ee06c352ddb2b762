"""A task of a step becomes its rank: the engine's numbers, no launcher above it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from tests.support.command import COMMAND, play, run_mpi
from tests.support.processes import is_alive
from tests.unit.environments.test_environments import HYDRA, SRUN


def step(counts=(2, 2), ranks=None):
    """The environment of every task of a Slurm step, by rank; `ranks`: those of each node (None: block)."""
    ranks = ranks or [[sum(counts[:node]) + local for local in range(count)] for node, count in enumerate(counts)]
    shared = SRUN | {
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
    }
    return {
        rank: shared | {"SLURM_NODEID": str(node), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)}
        for node, own in enumerate(ranks)
        for local, rank in enumerate(own)
    }


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def run(infini_run, environ, *words, **kwargs):
    command = infini_run("--engine=auto", *words, env=dict(os.environ) | environ, **kwargs)
    assert command.wait() == 0, command.err
    return command


def seen(infini_run, environ, *flags):
    command = run(infini_run, environ, *flags, "env")
    return dict(line.split("=", 1) for line in command.out.decode().splitlines())


@pytest.mark.parametrize(
    ("counts", "ranks"),
    [((2, 2), None), ((3, 1), None), ((2, 2), [[0, 2], [1, 3]])],
    ids=["block", "uneven", "cyclic"],
)
def test_every_task_is_the_rank_that_srun_made_it(infini_run, counts, ranks):
    tasks = step(counts, ranks)
    for rank, environ in tasks.items():
        env = seen(infini_run, environ)
        node, local = int(environ["SLURM_NODEID"]), environ["SLURM_LOCALID"]
        assert [env[name] for name in NAMES] == [
            str(rank),
            str(sum(counts)),
            local,
            str(counts[node]),
            str(node),
            "2",
        ]
        assert (env["GLOBAL_PROC_RANK"], env["LOCAL_PROC_RANK"], env["PROC_WORLD_SIZE"]) == (str(rank), local, "4")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["NNODES"]) == ("n1", "29799", "2")
        assert env["INFINI_RUN_ID"] == "ir-slurm-8.3"
        assert {"NOTIFY_SOCKET", "TORCHELASTIC_ERROR_FILE"}.isdisjoint(env)


def test_the_program_takes_the_launchers_place(infini_run):
    command = run(infini_run, step()[1], *play("say=here"))
    assert command.out.split()[-1] == str(command.pid).encode()


def test_what_is_sent_to_the_task_reaches_the_program_itself(infini_run):
    command = infini_run("--engine=auto", *play("say=here", "wait"), env=dict(os.environ) | step()[1])
    command.read_until(b"here")
    command.signal(signal.SIGTERM)
    assert command.wait() == -signal.SIGTERM
    assert not is_alive(command.pid)


def test_signals_and_limits_are_as_without_us(infini_run):
    words = ["/bin/sh", "-c", "grep ^Sig[BIC] /proc/self/status; ulimit -n; umask; ls /proc/$$/fd"]
    plain = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    assert run(infini_run, step()[0], *words).out == plain


def test_only_the_rank_that_reads_has_stdin(infini_run):
    for flags, readers in (
        ((), {0}),
        (("--stdin=2",), {2}),
        (("--stdin=all",), {0, 1, 2, 3}),
        (("--stdin=none",), set()),
    ):
        for rank, environ in step().items():
            command = infini_run(
                "--engine=auto", *flags, "cat", env=dict(os.environ) | environ, stdin=subprocess.PIPE
            )
            out, _ = command.process.communicate(b"word")
            assert (out == b"word") == (rank in readers), (flags, rank)


def test_ranks_that_are_not_shown_are_silent(infini_run):
    words = ("sh", "-c", "echo out; echo err >&2")
    for rank, environ in step().items():
        command = run(infini_run, environ, "--ranks_on_console=0,3", *words)
        assert (command.out, command.err) == ((b"out\n", b"err\n") if rank in (0, 3) else (b"", b""))
    command = run(infini_run, step()[0], "--console=none", *words)
    assert (command.out, command.err) == (b"", b"")


def test_a_rank_that_mpiexec_started_is_still_its_client(infini_run):
    """Elsewhere a rank does not see these: there it is the launcher that was started."""
    environ = HYDRA | {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    env = seen(infini_run, environ, "--rdzv_endpoint=10.0.0.1:7")
    assert env.items() >= environ.items()
    assert [env[name] for name in NAMES] == ["3", "4", "1", "2", "1", "2"]


def test_the_plan_of_a_task_is_its_one_rank(infini_run):
    command = run(infini_run, step()[3], "--dry_run", "--distributed_args", "true")
    text = command.out.decode()
    assert text.startswith("1 of 4 ranks, 2 nodes, rendezvous at n1:29799\n")
    assert text.count("  rank ") == 2  # the fact and the worker
    assert "  rank 3: " in text
    assert "--distributed-rank=3 --distributed-world-size=4" in text
    assert "NOTIFY_SOCKET" not in text


def test_a_program_that_the_kernel_refuses_is_told(infini_run, tmp_path):
    path = tmp_path / "program"
    path.write_bytes(b"\0\1\2 no format that anybody knows")
    path.chmod(0o755)
    command = infini_run("--engine=auto", path, env=dict(os.environ) | step()[0])
    assert command.wait() == 126
    assert command.err == f"infini-run: {path} cannot be executed: Exec format error\n".encode()
    command = infini_run("--engine=auto", "no-such-program", env=dict(os.environ) | step()[0])
    assert command.wait() == 127


# ---- under the real ones

OPENMPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo")
SCRIPT = (
    'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"'
)


def test_a_rank_has_the_descriptor_on_which_mpiexec_listens():
    words = ["mpiexec.hydra", "-n", "2", *COMMAND, "--engine=auto", "sh", "-c", 'readlink "/proc/self/fd/$PMI_FD"']
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    done = run_mpi(words)
    assert [line[:7] for line in done.stdout.splitlines()] == ["socket:", "socket:"]


def under(*launcher):
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"needs {launcher[0]}")
    words = [*launcher, *COMMAND, "--engine=auto"]

    def launch(*more):
        done = run_mpi([*words, *more, "sh", "-c", SCRIPT])
        return sorted(done.stdout.splitlines())

    return launch


@pytest.mark.parametrize("launcher", [OPENMPI, ("mpiexec.hydra",)], ids=["openmpi", "hydra"])
def test_processes_of_a_real_launcher_are_ranks_that_meet(launcher):
    lines = under(*launcher, "-n", "3")()
    assert [line.rsplit(" ", 1)[0] for line in lines] == ["0/3 0/3 0/1", "1/3 1/3 0/1", "2/3 2/3 0/1"]
    assert len({line.rsplit(" ", 1)[1] for line in lines}) == 1


@pytest.mark.parametrize("launcher", [OPENMPI, ("mpiexec.hydra",)], ids=["openmpi", "hydra"])
def test_one_process_of_a_real_launcher_launches_the_ranks(launcher):
    lines = under(*launcher, "-n", "1")("--nproc_per_node=2")
    assert [line.rsplit(" ", 1)[0] for line in lines] == ["0/2 0/2 0/1", "1/2 1/2 0/1"]


def test_one_process_on_each_of_two_hosts_is_two_launchers():
    lines = under("mpiexec.hydra", "-launcher", "fork", "-hosts", "a,b", "-ppn", "1", "-n", "2")(
        "--nproc_per_node=2", "--rdzv_endpoint=10.0.0.1:7"
    )
    assert lines == [f"{rank}/4 {rank % 2}/2 {rank // 2}/2 10.0.0.1:7" for rank in range(4)]
