"""What is done as asked, and was probably meant otherwise, is one line; what may be meant is none."""

from __future__ import annotations

import os
import re

import pytest

from infini_run.environments.detect import detect
from infini_run.options.notices import of_cluster, of_colon, of_variables
from infini_run.options.options import resolve
from infini_run.options.table import CLUSTER_VARIABLES, OTHER_VARIABLES, may_be_first_of_cluster, unknown_variables
from tests.support.paths import ROOT
from tests.unit.environments import test_environments as engines

STEP = engines.SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
MPI = engines.OPENMPI | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
POD = {"MASTER_ADDR": "a", "WORLD_SIZE": "2", "RANK": "0"}


def no_file(path):
    raise FileNotFoundError(path)


# ---- a scheduler that nobody has asked


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (STEP, "task 0 of 3 of slurm step 8.3, but --engine is local, so each task runs its own world; "),
        (MPI, "task 0 of 4 of openmpi job 536936449, but --engine is local, so each task runs its own world; "),
        (POD, "node 0 of 2 of WORLD_SIZE=2, but --engine is local, so each node runs its own world; "),
        (engines.BATCH_SCRIPT, "slurm job 8 has 2 nodes, but --engine is local, so ranks run only on this node; "),
    ],
    ids=["srun", "mpirun", "a pod", "a batch script"],
)
def test_launch_apart_from_others_is_one_line(environ, line):
    assert may_be_first_of_cluster(environ)
    assert of_cluster(environ, no_file).startswith(line)


def test_allocation_that_only_ssh_reaches_is_told_so():
    assert of_cluster(engines.LSF, no_file).endswith("; use --engine=ssh --hosts=launch,a,b for all")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        engines.SRUN,  # the third task
        engines.OPENMPI,
        POD | {"RANK": "1"},
        POD | {"LOCAL_RANK": "0"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1"},
        engines.BATCH_SCRIPT | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1"},
        {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "["},
        engines.JOB,
    ],
)
def test_one_launcher_speaks_and_only_of_several(environ):
    assert of_cluster(environ, engines.reader(engines.FILES)) == ""


@pytest.mark.parametrize("flags", [("--engine=local",), ("--nnodes=1",), ("--standalone",), ("--hosts=a,b",)])
def test_launch_that_was_asked_for_is_not_apart(flags):
    assert not resolve([*flags, "true"], {}).is_alone_by_default
    assert resolve(["true"], {}).is_alone_by_default


def test_every_cluster_has_one_of_the_variables():
    """The plain launch looks at no others."""
    recorded = [value for value in vars(engines).values() if isinstance(value, dict) and "/nodes" not in value]
    found = [environ for environ in recorded if all(map(str.isupper, map(str, environ))) and _is_cluster(environ)]
    assert len(found) > 6
    assert all(not environ.keys().isdisjoint(CLUSTER_VARIABLES) for environ in found)


def _is_cluster(environ):
    return detect(environ, engines.reader(engines.FILES)) is not None


# ---- variables that set no flag


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("INFINI_RUN_NPROC", "; did you mean INFINI_RUN_NPROC_PER_NODE?"),
        ("INFINI_RUN_nnodes", "; did you mean INFINI_RUN_NNODES?"),
        ("INFINI_RUN_LOGDIR", "; did you mean INFINI_RUN_LOG_DIR?"),
        ("INFINI_RUN_NOVERBOSE", "; did you mean INFINI_RUN_VERBOSE?"),
        ("INFINI_RUN_LIST", "; did you mean --list, which has no variable?"),
        ("INFINI_RUN_XQJ", "; infini-run --helpfull lists the flags"),
        ("INFINI_RUN_\n", "; infini-run --helpfull lists the flags"),
    ],
)
def test_misspelt_variable_is_told_with_nearest_name(name, said):
    environ = {name: "2", "INFINI_RUN_VERBOSE": "1", "INFINI_RUN_MAX_RESTARTS": "1", "INFINI_RUN_RDZV_ID": "1"}
    assert unknown_variables(environ) == [name]
    line = of_variables([name], "INFINI_RUN_")
    assert line.startswith("unknown variable ")
    assert line.endswith(said)
    assert "\n" not in line


def test_several_misspelt_variables_are_one_line():
    names = ["INFINI_RUN_NPROC", "INFINI_RUN_NNODE"]
    assert of_variables(names, "INFINI_RUN_") == (
        "unknown variables INFINI_RUN_NPROC, INFINI_RUN_NNODE, ignored; "
        "did you mean INFINI_RUN_NPROC_PER_NODE, INFINI_RUN_NNODES?"
    )
    names = ["INFINI_RUN_DOCTOR", "INFINI_RUN_NNODE", "INFINI_RUN_LIST"]
    assert of_variables(names, "INFINI_RUN_").endswith(
        "; did you mean INFINI_RUN_NNODES, --doctor, --list, which have no variable?"
    )


def test_variables_of_our_own_are_known():
    """All that the code names, and those of tests that stand for a user's."""
    sources = [*ROOT.glob("infini_run/**/*.py"), *ROOT.glob("csrc/**/*.[ch]"), *ROOT.glob("bin/*")]
    text = "\n".join(source.read_text() for source in sources)
    named = set(re.findall(r"INFINI_RUN_[A-Z0-9_]*[A-Z0-9]", text)) - {"INFINI_RUN_NAME"}
    assert unknown_variables(dict.fromkeys(named, "1")) == []
    assert named >= OTHER_VARIABLES
    assert unknown_variables({"INFINI_RUN_NPROC": ""}) == []


# ---- another command behind a colon


@pytest.mark.parametrize(
    "words",
    [
        ("./a", ":", "--nproc_per_node=2", "./b"),
        ("./a", "x", ":", "--nproc-per-node", "2"),
        ("./a", ":", "sh"),
        ("./a", ":", "/bin/sh"),
        ("sh", "-c", ":", ":", "sh"),
    ],
)
def test_second_program_behind_colon_is_told(words):
    assert of_colon(words, {"PATH": "/usr/bin:/bin"}).startswith(
        f"':' and all that follows are arguments of {words[0]};"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("sh", "-c", ":"),
        ("sh", "-c", ":", "sh"),
        ("echo", ":", "no-such-program"),
        ("echo", ":", "--lr=1"),
        ("echo", ":", "-n"),
        ("echo", ":"),
        ("mpirun", "-np", "2", "sh", ":", "-np", "2", "sh"),
        (":", "sh"),
    ],
)
def test_colon_that_may_be_meant_is_not_told(words):
    assert of_colon(words, {"PATH": "/usr/bin:/bin"}) == ""


# ---- all of it, by the command


def test_command_prints_each_line_once(infini_run):
    environ = {**os.environ, **STEP, "INFINI_RUN_NPROC": "2"}
    command = infini_run("sh", "-c", "exit 0", "a", ":", "sh", env=environ)
    assert command.wait() == 0
    lines = command.err.decode().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("infini-run: ") for line in lines)
    assert "unknown variable INFINI_RUN_NPROC, ignored" in lines[0]
    assert "task 0 of 3 of slurm step 8.3" in lines[1]
    assert "':' and all that follows" in lines[2]


@pytest.mark.parametrize("given", [{"INFINI_RUN_ENGINE": "local"}, {"INFINI_RUN_ID": "ir-1"}, {"SLURM_PROCID": "1"}])
def test_command_says_nothing_of_cluster_when_answered(infini_run, given):
    command = infini_run("true", env={**os.environ, **STEP, **given})
    assert command.wait() == 0
    assert command.err == b""
