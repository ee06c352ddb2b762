"""--engine=pbs over stand-ins that run what they are asked to (tests/support/fakes): no environment, no output."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import AS_CASE
from tests.support.command import LOCALES, in_locale
from tests.support.paths import SUPPORT
from tests.support.processes import OURS
from tests.support.restarting_programs import ENDS, IDS, JOB_FLAGS, programs
from tests.support.waiting import until

FAKES = SUPPORT / "fakes"
NODES = ("node1", "node2", "node3", "node4")
SLOW = 'trap "sleep 1; echo graceful; exit 0" TERM; setsid sleep 1000 & echo up; sleep 1000 & wait'
HARD = 'trap "" TERM INT; setsid sleep 1000 & echo up; sleep 1000; sleep 1000'


@pytest.fixture
def job(tmp_path, case):
    """The environment of a job script on four nodes with two processes each."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "nodes").write_text("".join(f"{node}\n{node}\n" for node in NODES))
    mom = subprocess.Popen([sys.executable, FAKES / "pbs_mom.py", folder / "mom", folder], stdout=subprocess.PIPE)
    assert mom.stdout.readline() == b"up\n"
    yield {
        **os.environ,
        **case.env,
        "PATH": f"{FAKES}:{os.environ['PATH']}",
        "PBS_JOBID": "0.head",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODENUM": "0",
        "PBS_TASKNUM": "00000001",
        "TEST_PBS_MOM": str(folder / "mom"),
    }
    mom.kill()
    mom.stdout.close()
    mom.wait()


@pytest.fixture
def run(infini_run, job, tmp_path):
    def start(*words, engine="pbs", cwd=None, **kwargs):
        flags = [f"--engine={engine}", f"--export={AS_CASE},{OURS[0]}"]
        return infini_run(*flags, *words, env=job, cwd=cwd or tmp_path, **kwargs)

    return start


def read_up(command, count=8):
    while command.out.count(b"up\n") < count:
        command.read_more()


def tokens(folder):
    return list(folder.glob(".infini-run-*.token"))


@pytest.mark.parametrize("engine", ["pbs", "auto"])
def test_every_rank_is_on_its_node_and_as_many_as_it_has_slots(run, case, tmp_path, engine):
    say = 'echo "is $RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK $PBS_NODENUM $PWD"'
    command = run("sh", "-c", say, engine=engine)
    assert command.wait() == 0, command.err
    found = {int(w[0]): w[1:] for w in (line.split("is ")[1].split() for line in command.out.decode().splitlines())}
    assert found == {r: ["8", str(r % 2), str(r // 2), str(r // 2), str(tmp_path)] for r in range(8)}
    assert tokens(tmp_path) == []
    case.end()


@pytest.mark.parametrize("engine", ["pbs", "auto"])
def test_nodes_with_different_numbers_of_slots_run_so_many_ranks(run, case, job, engine):
    Path(job["PBS_NODEFILE"]).write_text("node1\nnode2\nnode2\nnode2\n")
    command = run("sh", "-c", 'echo "is $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK"', engine=engine)
    assert command.wait() == 0, command.err
    assert sorted(line.split("is ")[1] for line in command.out.decode().splitlines()) == [
        "0/4 0/1 0", "1/4 0/3 1", "2/4 1/3 1", "3/4 2/3 1",
    ]  # fmt: skip
    case.end()


def test_programs_are_on_their_nodes(run, case):
    say = "echo is $ROLE_NAME $RANK/$WORLD_SIZE $GROUP_RANK/$NNODES $PBS_NODENUM"
    words = ("--program=a", "--on_nodes=0,2", "sh", "-c", say, ":", "--program=b", "sh", "-c", say)
    command = run(*words)
    assert command.wait() == 0, command.err
    assert sorted(line.split("is ")[1] for line in command.out.decode().splitlines()) == [
        "a 0/2 0/2 0", "a 1/2 1/2 2", "b 0/4 0/4 0", "b 1/4 1/4 1", "b 2/4 2/4 2", "b 3/4 3/4 3",
    ]  # fmt: skip
    case.end()


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
def test_one_program_restarts_alone(run, case, tmp_path, fails, check):
    command = run(*JOB_FLAGS, *programs(tmp_path, fails))
    code = command.wait()
    check(code, command.out.decode().splitlines(), command.err.decode().splitlines(), nodes=4)
    case.end()


def test_a_failure_on_one_node_ends_all_with_its_code(run, case):
    command = run("sh", "-c", "[ $RANK = 5 ] || { echo up; exec sleep 1000; }; echo up; sleep 0.3; exit 7")
    assert command.wait() == 7
    case.end()
    assert command.err.count(b" failed") == 1
    host = "node3" if os.geteuid() == 0 else os.uname().nodename  # a name of its own takes root
    assert f"rank 5 on {host} failed: exit code 7".encode() in command.err


def test_the_head_told_to_stop_gives_ranks_their_grace(run, case):
    command = run("sh", "-c", SLOW)
    read_up(command)
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert command.out.count(b"graceful") == 8
    case.end()


def test_a_killed_head_leaves_nothing_anywhere(run, case):
    """pbs_tmrsh's tasks live on without it: the agents see that the link has ended."""
    command = run("--grace=1000", "sh", "-c", HARD)
    read_up(command)
    command.signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    case.end()


def test_an_agent_that_is_killed_is_a_node_that_is_lost(run, case):
    command = run("sh", "-c", SLOW)
    read_up(command)
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in case.alive()}
    agents = [pid for pid, w in words.items() if b"--node=2" in w and b"pbs_tmrsh" not in w[0] + w[2]]
    os.kill(next(pid for pid in agents if not any(b"pbs_tmrsh" in word for word in words[pid])), signal.SIGKILL)
    assert command.wait() == 1
    case.end()
    assert command.err.count(b"lost node") == 1
    assert b"lost node 2 (node3)" in command.err


def command_lines():
    """Of every process there is; some go while they are looked at."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_the_token_is_its_owners_alone_and_gone_when_all_have_come(run, case, tmp_path):
    """A node that does not come keeps it there, for us to look at."""
    (tmp_path / "late").write_text('#!/bin/sh\n[ "$PBS_NODENUM" = 3 ] && exec sleep 1000\nexec "$PYTHON" "$@"\n')
    text = (tmp_path / "late").read_text().replace("$PYTHON", sys.executable)
    (tmp_path / "late").write_text(text)
    (tmp_path / "late").chmod(0o755)
    command = run(f"--remote_python={tmp_path}/late", "--grace=1", "true")
    until(lambda: any(token.read_text() for token in tokens(tmp_path)))
    assert stat.S_IMODE(tokens(tmp_path)[0].stat().st_mode) == 0o600
    assert tokens(tmp_path)[0].read_text() not in str(list(command_lines()))
    command.signal(signal.SIGTERM)
    assert command.wait() == 143
    assert tokens(tmp_path) == []
    case.clear()  # the one that never was an agent


def test_a_directory_that_cannot_be_written_is_one_line(run):
    command = run("true", cwd="/proc")
    assert command.wait() == 2
    assert command.err.count(b"\n") == 1
    assert command.err.startswith(b"infini-run: /proc/.infini-run-")
    assert command.err.endswith(b"; use a directory that the nodes share\n")


def test_a_token_that_cannot_be_written_is_one_line_and_no_file(run, tmp_path):
    """As on a full disk: the file can be made, and takes nothing."""
    command = run("true", under=("prlimit", "--fsize=0"))
    assert command.wait() == 2
    assert command.err.count(b"\n") == 1
    assert command.err.endswith(b" cannot be written: File too large\n")
    assert tokens(tmp_path) == []


def test_an_agent_that_is_not_installed_is_told(run, case):
    command = run("--remote_python=/no/such", "true")
    assert command.wait() == 1
    assert b"pbs_tmrsh exited with 254" in command.err
    case.end()


@pytest.mark.parametrize("locale", LOCALES, ids=str)
def test_rank_of_agent_has_locale_of_its_node(locale, run, job):
    """The stand-in gives an agent no variable of a locale, as pbs_mom(8) does; its Python sets one."""
    environ = in_locale(locale, job)
    job.clear()
    job.update(environ)
    command = run("--nproc_per_node=1", "sh", "-c", "env | grep -E '^(LANG|LC_)' || echo none")
    assert command.wait() == 0, command.err
    assert command.out.count(b"none") == len(NODES)
    assert b"LC_" not in command.out
