"""--engine=mpi with Debian's Open MPI and MPICH (Hydra), over real sshd hosts (tests/support/beds/ssh.sh)."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.cluster import AS_CASE, Bed, free_ports, need
from tests.support.command import altered
from tests.support.hosts import KEY_EXCHANGE
from tests.support.processes import OURS, is_alive, processes
from tests.support.restarting_programs import ENDS, IDS, JOB_FLAGS, programs
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group(__name__)  # one bed for all of them

HOSTS = "host1,host2,host3,host4"
SLOW = 'trap "sleep 1; echo graceful; exit 0" TERM; setsid sleep 1000 & echo up; sleep 1000 & wait'
HARD = 'trap "" TERM INT; setsid sleep 1000 & echo up; sleep 1000; sleep 1000'
KINDS = {
    "openmpi": {"mpirun": "/usr/bin/mpirun.openmpi"},
    "mpich": {"mpirun": "/usr/bin/mpirun.mpich", "hydra_pmi_proxy": "/usr/bin/hydra_pmi_proxy"},
}


@pytest.fixture(scope="module")
def bed():
    need("openmpi-bin", "mpich", "openssh-server", "openssh-client")
    bed = Bed("ssh.sh", "4", SSH_TB_PORT=str(free_ports(1)), SSH_TB_SSHD_EXTRA=KEY_EXCHANGE)
    ssh = f"{bed.folder}/ssh"
    with open(ssh, "w") as file:
        file.write(f'#!/bin/sh\nexec ssh -F {bed.folder}/ssh_config "$@"\n')
    os.chmod(ssh, 0o755)
    for kind, files in KINDS.items():
        os.mkdir(f"{bed.folder}/{kind}")
        for name, path in files.items():
            os.symlink(path, f"{bed.folder}/{kind}/{name}")
    yield bed
    bed.close()


@pytest.fixture(params=list(KINDS))
def run(request, infini_run, bed, case):
    """`infini-run --engine=mpi` with that mpirun first on PATH."""

    def start(*words, hosts=HOSTS, path=None):
        env = {
            **os.environ,
            **case.env,
            "PATH": path if path is not None else f"{bed.folder}/{request.param}:{os.environ['PATH']}",
            "OMPI_MCA_plm_rsh_agent": f"ssh -F {bed.folder}/ssh_config",
            "OMPI_MCA_oob_tcp_if_include": "lo",
            "OMPI_MCA_odls_base_cutoff": "100000",
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": f"{bed.folder}/ssh",
        }
        flags = ["--engine=mpi", f"--hosts={hosts}", f"--export={AS_CASE},{OURS[0]}"]
        return infini_run(*flags, *words, env=env, cwd="/tmp")

    start.kind = request.param
    return start


def read_up(command, count=8):
    while command.out.count(b"up\n") < count:
        command.read_more()


def test_every_rank_is_on_its_node(run, case):
    say = 'echo "is $RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK $(hostname) at $MASTER_ADDR:$MASTER_PORT"'
    command = run("--nproc_per_node=2", "sh", "-c", say)
    assert command.wait() == 0, command.err
    lines = [line.split("is ", 1)[1].split() for line in command.out.decode().splitlines()]
    found = {int(words[0]): words[1:] for words in lines}
    assert sorted(found) == list(range(8))
    assert len({words[5] for words in found.values()}) == 1
    for rank, words in found.items():
        assert words[:4] == ["8", str(rank % 2), str(rank // 2), f"host{rank // 2 + 1}"]
    case.end()


def test_ranks_are_where_the_list_of_hosts_says(run, case):
    command = run("--nproc_per_node=1", "sh", "-c", "echo is $RANK $(hostname)", hosts="host3,host1,host2")
    assert command.wait() == 0, command.err
    assert sorted(command.out.decode().splitlines()) == [
        "[host1:1] is 1 host1", "[host2:2] is 2 host2", "[host3:0] is 0 host3"
    ]  # fmt: skip
    case.end()


def test_programs_are_on_their_nodes(run, case):
    say = "echo is $ROLE_NAME $RANK/$WORLD_SIZE $GROUP_RANK/$NNODES $(hostname)"
    words = ("--program=a", "--on_nodes=1-2", "sh", "-c", say, ":", "--program=b", "--on_nodes=rest", "sh", "-c", say)
    command = run(*words)
    assert command.wait() == 0, command.err
    assert sorted(line.split("is ", 1)[1] for line in command.out.decode().splitlines()) == [
        "a 0/2 0/2 host2", "a 1/2 1/2 host3", "b 0/2 0/2 host1", "b 1/2 1/2 host4",
    ]  # fmt: skip
    case.end()


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
def test_one_program_restarts_alone(run, case, tmp_path, fails, check):
    command = run(*JOB_FLAGS, *programs(tmp_path, fails))
    code = command.wait()
    check(code, command.out.decode().splitlines(), command.err.decode().splitlines(), nodes=4)
    case.end()


def test_hosts_with_different_slots_run_so_many_ranks_each(run, case):
    say = "echo is $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $(hostname)"
    command = run("sh", "-c", say, hosts="host2:1,host1:2")
    assert command.wait() == 0, command.err
    assert sorted(line.split("is ", 1)[1] for line in command.out.decode().splitlines()) == [
        "0/3 0/1 0 host2", "1/3 0/2 1 host1", "2/3 1/2 1 host1"
    ]  # fmt: skip
    case.end()


def test_ranks_do_not_see_the_mpi_that_started_the_agents(run, case):
    """A rank that imports MPI would answer in the agent's place, and wait for ever."""
    command = run("--nproc_per_node=1", "sh", "-c", "env")
    assert command.wait() == 0, command.err
    names = {line.split("] ", 1)[1].partition("=")[0] for line in command.out.decode().splitlines() if "] " in line}
    assert "RANK" in names
    places = {name for name in names if name.startswith(("OMPI_COMM", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL"))}
    assert places == set()
    case.end()


def test_ranks_inherit_no_descriptor_of_the_mpi_that_started_the_agents(run, case):
    command = run("--nproc_per_node=1", "sh", "-c", "ls /proc/$$/fd; exit 0")
    assert command.wait() == 0, command.err
    assert sorted(line.split("] ")[1] for line in command.out.decode().splitlines()) == sorted("012" * 4)
    case.end()


def test_a_failure_on_one_node_ends_all_with_its_code(run, case):
    script = "[ $RANK = 5 ] || { echo up; exec sleep 1000; }; echo up; sleep 0.3; exit 7"
    command = run("--nproc_per_node=2", "sh", "-c", script)
    assert command.wait() == 7
    case.end()
    text = command.err.decode()
    assert text.count(" failed") == 1
    assert "rank 5 on host3 failed: exit code 7" in text


def test_the_head_told_to_stop_gives_ranks_their_grace(run, case):
    command = run("--nproc_per_node=2", "sh", "-c", SLOW)
    read_up(command)
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert command.out.count(b"graceful") == 8
    case.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_twice_it_kills_at_once(run, case, number):
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD)
    read_up(command)
    command.signal(number)
    command.read_error_until(b"stopping")
    command.insist(number)
    assert command.wait() == 128 + number
    case.end()


def test_a_killed_head_leaves_nothing_anywhere(run, case):
    command = run("--grace=1000", "--nproc_per_node=2", "sh", "-c", HARD)
    read_up(command)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    case.end()


def test_a_node_that_dies_is_named_and_ends_the_job(run, case, bed):
    command = run("--nproc_per_node=2", "sh", "-c", SLOW)
    read_up(command)
    bed.call("host-down", "3")
    try:
        assert command.wait() == 1
        case.end()
        assert command.err.count(b"lost node") == 1
        if run.kind == "mpich":  # Hydra ends the others with it, and their ends may be heard of first
            assert re.search(rb"lost node \d \(host\d\)(, and with it |: )", command.err)
            assert b"host3" in command.err
        else:
            assert b"lost node 2 (host3): " in command.err
    finally:
        bed.call("host-up", "3")
        until(lambda: os.system(f"{bed.folder}/ssh host3 true 2>/dev/null") == 0)


def test_an_mpirun_that_is_killed_ends_the_job_and_leaves_nothing(run, case):
    command = run("--nproc_per_node=2", "sh", "-c", SLOW)
    read_up(command)
    [mpirun] = [pid for pid, (parent, *_) in processes().items() if parent == command.pid and is_mpirun(pid)]
    os.kill(mpirun, signal.SIGKILL)
    assert command.wait() == 1
    case.end()
    assert command.err.count(b"mpirun exited with 137") == 1


def is_mpirun(pid):
    return Path(f"/proc/{pid}/comm").read_text().startswith("mpi")


def test_mpirun_that_is_not_there_is_one_line(run, tmp_path):
    command = run("true", path=str(tmp_path))
    assert command.wait() == 127
    assert command.err == b"infini-run: mpirun is not on PATH, and --engine=mpi needs it\n"


@pytest.mark.parametrize("limit", range(9, 14))
def test_mpirun_that_cannot_start_is_not_called_missing(infini_run, tmp_path, limit):
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    few = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
    command = infini_run("--engine=mpi", "--hosts=a,b", "--nproc_per_node=1", "true", env=env, under=few)
    assert command.wait() == 1
    (line,) = command.err.splitlines()
    assert line.endswith(
        b"Too many open files; the limit on open descriptors was reached; raise ulimit -n or ulimit -Hn"
    )


def test_mpirun_that_does_not_say_its_version_is_killed(infini_run, bell, tmp_path):
    """With what it started. A launcher hears no signal before the head waits."""
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {bell.path}\nwait\n")
    (tmp_path / "mpirun").chmod(0o755)
    soon = altered({"multinode.engines.mpi._VERSION_S": 0.5})
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = infini_run("--engine=mpi", "--hosts=a,b", "--nproc_per_node=1", "true", env=env, under=soon)
    (pids,) = bell.hear(1)
    assert command.wait() == 2
    assert command.err == (
        b"infini-run: mpirun --version: no answer within 0.5 s; run it to see why, or use another --engine\n"
    )
    until(lambda: not any(is_alive(int(pid)) for pid in pids.split()))


def test_an_mpirun_that_is_nobodys_is_one_line(run, tmp_path):
    shutil.copy("/bin/echo", tmp_path / "mpirun")
    command = run("true", path=str(tmp_path))
    assert command.wait() == 2
    assert command.err == (
        b"infini-run: mpirun on PATH is neither from Open MPI nor Hydra (MPICH, Intel MPI); use another --engine\n"
    )
