"""Several programs in one job: submitted as infini-run has them, in one allocation."""

from __future__ import annotations

import json

import pytest

import infini_run as ir
from tests.support.job_case import Jobs
from tests.support.restarting_programs import ENDS, IDS, JOB_FLAGS, check_job, programs

SAY = "echo $ROLE_NAME $RANK/$WORLD_SIZE"


def two(*flags, of_second=(), first=SAY, second=SAY):
    words = ["--slots=2", *flags, "--program=trainer", "--nproc_per_node=2", "sh", "-c", first, ":"]
    return [*words, "--program=server", *of_second, "sh", "-c", second]


@pytest.mark.parametrize("ends", [(), ("--",)], ids=["flags", "words"])
def test_programs_are_one_job(local, ends):
    done = local.call("submit", "--wait", *two(*ends))
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[1]
    assert sorted(local.lines(name)) == [
        "[server 0] server 0/1",
        "[trainer 0] trainer 0/2",
        "[trainer 1] trainer 1/2",
    ]
    assert local.lines(name, "--rank=1") == ["[trainer 1] trainer 1/2"]
    assert local.lines(name, "--rank=2") == ["[server 0] server 0/1"]
    assert local.lines(name, "--rank=trainer:0") == ["[trainer 0] trainer 0/2"]
    assert list(ir.find_job(name, dir=local.path).logs(rank="server:0")) == ["[server 0] server 0/1"]


def test_unknown_rank_of_programs_has_no_logs(local):
    name = local.submit("--wait", *two())
    for rank, line in {
        "3": "unknown rank 3; use ranks 0 to 2",
        "server:1": "unknown rank server:1; use server:0 to server:0",
        "tester:0": "unknown program tester; use trainer, server",
        "trainer:": "expected a rank from 0 to 2147483647, or trainer:0 of a program",
    }.items():
        wrong = local.call("logs", f"--rank={rank}", name)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert line in wrong.stderr
    with pytest.raises(ir.UsageError, match="rank=trainer: expected a rank"):
        list(ir.find_job(name, dir=local.path).logs(rank="trainer"))


def test_first_failure_has_the_number_of_its_logs(local):
    name = local.submit(*two(second=f"{SAY}; exit 7"))
    assert local.wait(name)["program"] == "server"
    job = ir.find_job(name, dir=local.path)
    assert list(job.logs(rank=job.status().rank)) == ["[server 0] server 0/1"]


def test_programs_in_a_file_are_one_job(local, tmp_path):
    (tmp_path / "job.toml").write_text(
        f"[[program]]\nname = \"a\"\ncommand = ['sh', '-c', '{SAY}']\nnproc_per_node = 2\n"
        f"[[program]]\nname = \"b\"\ncommand = ['sh', '-c', '{SAY}']\nafter = \"a\"\n"
    )
    done = local.call("submit", "--wait", "--slots=2", f"--cwd={tmp_path}", "--programs=job.toml")
    assert done.returncode == 0, done.stderr
    assert local.lines(done.stdout.split()[1])[-1] == "[b 0] b 0/1"


def test_failure_of_a_program_is_that_of_the_job(local):
    words = two("--wait", first="exec sleep 1000", second="exit 7")
    done = local.call("submit", *words)
    assert done.returncode == 7
    assert "server 0 on " in done.stdout + done.stderr


def test_program_of_any_name_may_ask_to_run_again(local):
    """A program called restart is no restart after a failure, of which there may be none."""
    name = local.submit("--program=restart", "sh", "-c", "[ $INFINI_JOB_ATTEMPT = 2 ] || exit 85")
    status = local.wait(name)
    assert (status["headline"], status["attempt"]) == ("COMPLETED", 2)


def test_flags_of_the_job_are_run_options(local):
    done = local.call("submit", "--wait", "--run_options=--one_world", *two())
    assert done.returncode == 0, done.stderr
    lines = sorted(local.lines(done.stdout.split()[1]))
    assert lines == ["[server 0] server 2/3", "[trainer 0] trainer 0/3", "[trainer 1] trainer 1/3"]


def test_program_of_a_job_restarts_alone(local):
    server = f"{SAY} $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3"
    words = two(
        "--run_options=--restart_scope=program --restart_delay=0", of_second=("--max_restarts=1",), second=server
    )
    done = local.call("submit", "--wait", *words)
    assert done.returncode == 0, done.stderr
    lines = local.lines(done.stdout.split()[1])
    assert [line for line in lines if "server" in line] == ["[server 0] server 0/1 0", "[server 0] server 0/1 1"]
    assert sum("trainer" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--program=a", "x", ":", "--program=a", "y"], "--program=a: already the name of another program; ..."),
        (["--program=a", "x", ":"], "':' at the end: missing program; ..."),
        (["--program=a", "--grace=3", "x"], "--grace=3: a flag of the job; use --run_options=--grace=3"),
        (["--program=a", "--after=b", "x"], "--after=b: unknown program b; use a"),
        (["--program=a", "--on_nodes=1", "x"], "--on_nodes=1: unknown node 1; use node 0"),
        (["--programs=none.toml"], "--programs=..."),
        (["--spares=1", "--program=a", "x"], "--spares=1: conflicts with several programs; drop one of them"),
        (
            ["--run_options=--program=a", "x"],
            "--run_options: --program=a: give programs in place of the ...",
        ),
        (
            ["--run_options=--one_world", "x"],
            "--run_options: --one_world: give programs in place of the ...",
        ),
    ],
)
def test_bad_programs_are_refused_at_once(local, words, line):
    done = local.call("submit", "--slots=1", *words)
    assert done.returncode == 2
    start, dots, _ = line.partition("...")
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"infini-job: {start}") if dots else said == f"infini-job: {line}"
    assert json.loads(local.call("list", "--json").stdout) == []


@pytest.mark.parametrize(("fails", "check"), ENDS, ids=IDS)
@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_one_program_restarts_alone_on_its_nodes(request, tmp_path, case, kind, fails, check):
    """On stand-ins for schedulers, which run what they are told."""
    queue = request.getfixturevalue(f"{kind}_queue")
    path = {"PATH": queue.env["PATH"], "TEST_BATCH": queue.folder, "INFINI_JOB_SCHEDULER": kind}
    jobs = Jobs(tmp_path / "jobs", case, path)
    words = ["--slots=4", "--slots_per_node=1", f"--run_options={' '.join(JOB_FLAGS)}", *programs(tmp_path, fails)]
    done = jobs.call("submit", "--wait", *words)
    check_job(jobs, done, check)
    jobs.close()
    queue.ended()
