"""--engine=auto: the surroundings fill in what flags left open, and are never overruled in silence."""

from __future__ import annotations

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.environments.detect import detect
from infini_run.errors import UsageError
from infini_run.options.from_environment import describe, facts
from infini_run.options.options import Request, resolve
from tests.support.command import ask_modules
from tests.unit.environments.test_environments import (
    BATCH_SCRIPT,
    FILES,
    HYDRA,
    JOB,
    KNOWN,
    LWS,
    OPENMPI,
    SRUN,
    VALUES,
    VECTORS,
    reader,
)

BATCH = {
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "node1",
}
ONE_NODE = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}
TASKS = SRUN | {
    "SLURM_STEP_TASKS_PER_NODE": "4(x3)",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
POD = {"MASTER_ADDR": "m-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}


def options(*flags, environ, **more):
    return resolve(["--engine=auto", *flags, "prog"], environ | more).options


def refused(*flags, environ, **more):
    with pytest.raises(UsageError) as caught:
        options(*flags, environ=environ, **more)
    assert str(caught.value).isprintable()
    return str(caught.value)


# ---- filling in


def test_a_step_says_everything():
    got = options(environ=SRUN)
    assert (got.nnodes, got.node_rank, got.nproc_per_node) == (3, 2, 1)
    assert (got.master_addr, got.master_port, got.rdzv_explicit) == ("node2", 29799, True)


def test_a_process_for_each_gpu_or_as_many_as_were_asked_for():
    assert options(environ=SRUN, SLURM_GPUS_ON_NODE="8").nproc_per_node == 8
    assert options("--nproc_per_node=2", environ=SRUN, SLURM_GPUS_ON_NODE="8").nproc_per_node == 2
    assert options("--gpus_per_proc=2", environ=SRUN, SLURM_GPUS_ON_NODE="8").nproc_per_node == 4
    assert options("--gpus_per_proc=0", environ=SRUN, SLURM_GPUS_ON_NODE="8").nproc_per_node == 8
    assert options(environ=ONE_NODE, SLURM_NTASKS_PER_NODE="4").nproc_per_node == 4
    assert options(environ=ONE_NODE, SLURM_NTASKS_PER_NODE="4", SLURM_GPUS_ON_NODE="2").nproc_per_node == 2


# As Kubeflow's operator sets them on the second of two pods with eight ranks each (training-operator, envvar.go):
# WORLD_SIZE counts ranks, RANK counts pods.
PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "16",
    "RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
}


def test_what_pet_says_wins_over_what_a_pods_variables_may_mean():
    request = resolve(["--engine=auto", "prog"], PYTORCHJOB)
    got = request.options
    assert (got.nnodes, got.node_rank, got.nproc_per_node) == (2, 1, 8)
    assert (got.master_addr, got.master_port) == ("job-master-0", 23456)
    assert request.cluster.warning == "", "nothing was guessed"
    assert not [line for line in describe(request.cluster) if "WORLD_SIZE" in line]
    without = {name: value for name, value in PYTORCHJOB.items() if name != "PET_NODE_RANK"}
    assert options(environ=without).node_rank == 1
    by_index = JOB | {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "m"}
    assert options(environ=by_index).node_rank == 3


def test_a_world_size_that_is_the_ranks_asked_for_counts_those():
    pod = {name: value for name, value in PYTORCHJOB.items() if not name.startswith("PET_")}
    got = options("--nnodes=2", "--nproc_per_node=8", environ=pod)
    assert (got.nnodes, got.node_rank, got.nproc_per_node) == (2, 1, 8)
    assert "--nnodes=3 conflicts with WORLD_SIZE=16" in refused("--nnodes=3", "--nproc_per_node=8", environ=pod)


def test_nobody_looks_without_the_flag():
    assert resolve(["prog"], SRUN) == resolve(["prog"], {})
    assert resolve(["--engine=local", "prog"], SRUN).options.nnodes == 1


def test_the_variable_of_the_flag_is_the_flag():
    assert resolve(["prog"], SRUN | {"INFINI_RUN_ENGINE": "auto"}).options.nnodes == 3


def test_nothing_found_is_one_node():
    request = resolve(["--engine=auto", "prog"], {})
    assert (request.cluster, request.options.nnodes, request.options.master_addr) == (None, 1, "127.0.0.1")


def test_what_a_flag_may_choose_is_the_flags():
    got = options("--rdzv_endpoint=ib0:7", environ=SRUN)
    assert (got.master_addr, got.master_port, got.node_rank) == ("ib0", 7, 2)
    got = options("--master_addr=ib0", environ=SRUN)
    assert (got.master_addr, got.master_port) == ("ib0", 29799)
    got = options("--master_port=7", environ=SRUN)
    assert (got.master_addr, got.master_port) == ("node2", 7)
    got = options(environ=SRUN, PET_RDZV_ENDPOINT="ib0:7", INFINI_RUN_MASTER_PORT="8")
    assert (got.master_addr, got.master_port) == ("ib0", 8)


def test_a_flag_that_says_the_same_is_no_contradiction():
    assert options("--nnodes=3", "--node_rank=2", environ=SRUN) == options(environ=SRUN)


def test_spares_are_some_of_the_nodes():
    for words in (["--spares=1"], ["--spares=1", "--nnodes=2"], ["--spares=1", "--nnodes=1:2"]):
        got = resolve([*words, "--engine=auto", "--dry_run", "true"], SRUN).options
        assert (got.nnodes, got.spares) == (2, 1)


def test_step_of_components_without_token_needs_number_of_ranks():
    """GPUs are counted by each node, and those of another component may be more."""
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n2", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1,3]"}
    names = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": SRUN["SLURM_JOB_ID"], "SLURM_GPUS_ON_NODE": "8"}
    step = SRUN | lists | names | {
        "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    assert refused(environ=step).startswith("SLURM_GPUS_ON_NODE=8: other components of the job may have other ")
    assert refused("--nproc_per_node=gpu", environ=step).startswith("--nproc_per_node=gpu: other components of ")
    assert options("--nproc_per_node=2", environ=step).nproc_per_node == 2
    found = options(environ=step, INFINI_RUN_TOKEN="0123456789abcdef")
    assert (found.nproc_per_node, found.node_rank, found.master_addr) == (8, 1, "n2")
    one = step | {"SLURM_STEP_NODELIST": "n[1,3]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert options(environ=one | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}).nproc_per_node == 8


def test_one_node_meets_on_itself():
    step = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n9", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    got = options(environ=step)
    assert (got.nnodes, got.master_addr, got.master_port) == (1, "127.0.0.1", 29799)
    assert options("--standalone", environ=step).master_port == 0
    assert options("--rdzv_backend=c10d", environ=step).master_port == 0


def test_a_batch_script_on_its_only_node_launches_there():
    got = options(environ=ONE_NODE)
    assert (got.nnodes, got.node_rank, got.master_addr, got.master_port) == (1, 0, "127.0.0.1", 29508)


def test_what_is_not_said_can_be_given():
    got = options("--nnodes=4", "--rdzv_endpoint=a:7", environ=JOB)
    assert (got.nnodes, got.node_rank, got.master_addr) == (4, 2, "a")
    got = options("--rdzv_endpoint=a:7", environ=HYDRA)
    assert (got.nnodes, got.node_rank, got.master_port) == (4, 3, 7)
    assert options(environ=LWS).master_port == 29500


# ---- refusing

REFUSALS = [
    (
        ["--nnodes=2"],
        SRUN,
        "--nnodes=2 conflicts with SLURM_STEP_NUM_NODES=3 (slurm); drop --nnodes, or --engine=auto",
    ),
    (
        ["--node_rank=0"],
        SRUN,
        "--node_rank=0 conflicts with SLURM_NODEID=2 (slurm); drop --node_rank, or --engine=auto",
    ),
    (["--spares=3"], SRUN, "--spares=3: needs more nodes than SLURM_STEP_NUM_NODES=3 (slurm); add nodes"),
    (
        ["--spares=1"],
        TASKS,
        "--spares=1: needs a launcher above the ranks, but with SLURM_STEP_TASKS_PER_NODE=4(x3) each",
    ),
    (["--standalone"], SRUN, "--standalone conflicts with SLURM_STEP_NUM_NODES=3 (slurm); drop --standalone"),
    ([], SRUN | {"PET_NNODES": "2"}, "PET_NNODES=2 conflicts with SLURM_STEP_NUM_NODES=3 (slurm); drop PET_NNODES"),
    (
        ["--nproc_per_node=4194304"],
        {**SRUN, "SLURM_STEP_NUM_NODES": "1000", "SLURM_STEP_NODELIST": "node[2-1001]"},
        "SLURM_STEP_NUM_NODES=1000 and --nproc_per_node=4194304 make",
    ),
    (["--master_port=0"], SRUN, "--master_port=0: cannot be a free port with SLURM_STEP_NUM_NODES=3; use a port"),
    ([], JOB, "--engine=auto: kubernetes does not report the number of nodes; add --nnodes=N"),
    (
        ["--nnodes=2", "--rdzv_endpoint=a:7"],
        JOB,
        "JOB_COMPLETION_INDEX=2: with --nnodes=2, expected a rank from 0 to 1",
    ),
    ([], HYDRA, "--engine=auto: hydra does not report the address of node 0; add --rdzv_endpoint=HOST:PORT"),
    ([], OPENMPI, "--engine=auto: openmpi does not report the address of node 0"),
    (
        ["--rdzv_endpoint=a:7"],
        LWS | {"LWS_WORKER_INDEX": ""},
        "lws does not report the rank of this node; add --node",
    ),
    ([], POD | {"MASTER_ADDR": "a b"}, "MASTER_ADDR=a b: expected a host name or an address"),
    (
        [],
        SRUN | {"INFINI_RUN_ID": "ir-1"},
        "--engine=auto: INFINI_RUN_ID is set, so this is a rank of another launch",
    ),
    ([], {"SLURM_JOB_ID": "8"}, "--engine=auto: slurm job 8 has no host in its allocation"),
    (
        ["--nproc_per_node=8"],
        TASKS,
        "--nproc_per_node=8 conflicts with SLURM_STEP_TASKS_PER_NODE=4(x3) (slurm): each",
    ),
    (["--nproc_per_node=gpu"], TASKS, "--nproc_per_node=gpu conflicts with SLURM_STEP_TASKS_PER_NODE=4(x3)"),
    (
        ["--log_dir=x"],
        TASKS,
        "--log_dir=x: needs a launcher above the ranks, but with SLURM_STEP_TASKS_PER_NODE=4(x3) each task is one",
    ),
    (
        ["--grace=3"],
        TASKS,
        "--grace=3: needs a launcher above the ranks, but with SLURM_STEP_TASKS_PER_NODE=4(x3) each task is one rank",
    ),
    (
        ["--console=prefix"],
        TASKS,
        "--console=prefix: needs a launcher above the ranks, but with SLURM_STEP_TASKS_PER_NODE=4(x3) each task",
    ),
    (
        ["--isolate"],
        TASKS,
        "--isolate: needs a launcher above the ranks, but with SLURM_STEP_TASKS_PER_NODE=4(x3) each task",
    ),
    (["--master_port=0"], TASKS, "--master_port=0: cannot be a free port with SLURM_STEP_TASKS_PER_NODE"),
    (["--rdzv_endpoint=a:0"], TASKS, "--rdzv_endpoint=a:0: cannot be a free port with"),
    (["--stdin=12"], TASKS, "--stdin=12: unknown rank 12; use ranks 0 to 11"),
]


@pytest.mark.parametrize(("flags", "environ", "message"), REFUSALS, ids=[message[:50] for *_, message in REFUSALS])
def test_a_contradiction_shows_both_and_a_gap_says_what_to_give(flags, environ, message):
    assert message in refused(*flags, environ=environ)


@pytest.mark.parametrize("environ", [BATCH_SCRIPT, ONE_NODE | {"SLURMD_NODENAME": ""}])
def test_an_allocation_of_several_nodes_or_elsewhere_is_reached_from_here(environ):
    request = resolve(["--engine=auto", "true"], environ)
    assert request.node_list.engine == "slurm"
    assert len(request.node_list.hosts) == int(environ["SLURM_JOB_NUM_NODES"]) == request.options.nnodes


def test_our_own_node_is_reached_without_an_engine():
    assert resolve(["--engine=auto", "true"], ONE_NODE).node_list is None


def test_an_allocation_that_its_engine_does_not_reach_may_be_reached_by_ssh():
    lsf = {"LSB_JOBID": "8", "LSB_MCPU_HOSTS": "n1 4 n2 4"}
    assert "--engine=ssh --hosts='n[1-2]'" in refused(environ=lsf)


def test_a_flag_at_its_default_needs_no_launcher():
    assert options("--stop_signal=TERM", "--console=auto", "--nproc_per_node=4", environ=TASKS).nproc_per_node == 4


surroundings = st.dictionaries(st.sampled_from(KNOWN), st.sampled_from(VALUES) | st.text(), max_size=25)


@given(st.sampled_from([environ for environ, _ in VECTORS.values()]), surroundings)
def test_any_environment_is_options_or_one_line(environ, more):
    said = ""
    try:
        request = resolve(["--engine=auto", "prog"], environ | more)
    except UsageError as error:
        said = str(error)
    else:
        assert isinstance(request, Request)
        assert request.options.node_rank < request.options.nnodes
    assert said == "" or said.isprintable()


# ---- showing


@pytest.mark.parametrize("environ", [environ for environ, _ in VECTORS.values()], ids=VECTORS)
def test_what_is_shown_is_what_was_found(environ):
    site = detect(environ, reader(FILES))
    text = "\n".join(describe(site))
    assert text.startswith("variables of a pod" if site.engine == "pod_variables" else f"{site.engine} {site.form}")
    for name, value, source in facts(site):
        assert f"  {name} {value} ({source})" in text or (not source and f"  {name} {value}" in text)
        assert name == "hosts" or getattr(site, name) == value


def test_a_dry_run_shows_what_was_found_and_from_which_variable(infini_run, monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    command = infini_run("--engine=auto", "--dry_run", "true")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    assert lines[0] == "1 of 3 ranks, 3 nodes, rendezvous at node2:29799"
    assert lines[2:8] == [
        "found: slurm step 8.3",
        "  nnodes 3 (SLURM_STEP_NUM_NODES=3)",
        "  node_rank 2 (SLURM_NODEID=2)",
        "  hosts node[2-4] (SLURM_STEP_NODELIST=node[2-4])",
        "  master_addr node2 (SLURM_STEP_NODELIST=node[2-4])",
        "  master_port 29799 (derived from SLURM_JOB_ID=8, SLURM_STEP_ID=3)",
    ]
    command = infini_run("--engine=auto", "--dry_run=json", "true")
    assert command.wait() == 0, command.err
    found = json.loads(command.out)["cluster"]
    assert (found["engine"], found["form"], found["job_id"]) == ("slurm", "step", "8.3")
    assert {"name": "node_rank", "value": 2, "from": "SLURM_NODEID=2"} in found["values"]


@pytest.mark.parametrize("engine", ["auto", "slurm"])
def test_head_of_an_allocation_shows_what_it_found(infini_run, monkeypatch, engine):
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    command = infini_run(f"--engine={engine}", "--dry_run", "true")
    assert command.wait() == 0, command.err
    lines = command.out.decode().splitlines()
    at = lines.index("found: slurm batch 8")
    assert lines[at + 1 : at + 3] == [
        "  nnodes 2 (SLURM_JOB_NUM_NODES=2)",
        "  hosts node[1-2] (SLURM_JOB_NODELIST=node[1-2])",
    ]
    assert lines[at - 1].startswith("each node adds: ")
    assert "node 0 (node1):" in lines


def test_plan_shows_number_of_ranks_from_what_counts(infini_run, monkeypatch):
    """The tasks of a Slurm job on one node count only where no GPUs do."""
    here = os.uname().nodename
    one = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": here, "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": here}
    for name, value in {**one, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    by_tasks = infini_run("--engine=auto", "--dry_run", "true")
    assert by_tasks.wait() == 0, by_tasks.err
    assert b"\n  nproc 4 (SLURM_NTASKS=4)\n" in by_tasks.out
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    by_gpus = infini_run("--engine=auto", "--dry_run", "true")
    assert by_gpus.wait() == 0, by_gpus.err
    assert by_gpus.out.startswith(b"8 of 8 ranks")
    assert b"\n  gpus 8 (SLURM_GPUS_ON_NODE=8)\n" in by_gpus.out
    assert b"nproc" not in by_gpus.out


def test_verbose_says_that_nothing_was_found(infini_run):
    command = infini_run("--engine=auto", "--verbose", "true")
    assert command.wait() == 0
    assert command.err.startswith(b"infini-run: --engine=auto: no scheduler or launcher found in the environment")
    quiet = infini_run("--engine=auto", "true")
    assert quiet.wait() == 0
    assert quiet.err == b""


def test_what_was_guessed_is_always_said(infini_run, monkeypatch):
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    command = infini_run("--engine=auto", "true")
    assert command.wait() == 0
    assert b"WORLD_SIZE=2 and RANK=1 are taken to count nodes, not ranks" in command.err
    assert command.err.count(b"\n") == 1


# ---- launching


def seen(infini_run, monkeypatch, environ, *flags):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    command = infini_run(*flags, "env")
    assert command.wait() == 0, command.err
    return dict(line.split("=", 1) for line in command.out.decode().splitlines())


def test_a_rank_does_not_see_what_mpirun_said_to_us(infini_run, monkeypatch):
    flags = ("--engine=auto", "--rdzv_endpoint=10.0.0.1:7", "--export=OMPI_COMM_WORLD_NODE_RANK")
    env = seen(infini_run, monkeypatch, OPENMPI | {"SLURM_JOB_NAME": "train"}, *flags)
    assert [name for name in env if name.startswith(("OMPI_", "PMIX_"))] == ["OMPI_COMM_WORLD_NODE_RANK"]
    assert (env["RANK"], env["WORLD_SIZE"], env["GROUP_RANK"], env["SLURM_JOB_NAME"]) == ("3", "4", "3", "train")


def test_without_the_flag_a_rank_sees_all_that_we_see(infini_run, monkeypatch):
    assert seen(infini_run, monkeypatch, OPENMPI | SRUN).items() >= (OPENMPI | SRUN).items()


def test_a_plain_launch_in_a_step_loads_nothing_of_this(monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    loaded = ask_modules(sys.executable, "-m", "infini_run", "true")
    assert "infini_run.options.options" in loaded
    assert not {name for name in loaded if "site" in name and name.startswith("infini_run")}
    assert loaded.isdisjoint(
        {
            "infini_run.options.from_environment",
            "infini_run.environments.hostlist",
            "infini_run.system.addresses",
            "infini_run.node.exec_rank",
        }
    )
    assert {"infini_run.options.from_environment", "infini_run.environments.slurm"} <= ask_modules(
        sys.executable, "-m", "infini_run", "--engine=auto", "true"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--rdzv_endpoint=127.0.0.1:29500",),
            b"other nodes cannot reach node 0: 127.0.0.1 is a loopback address",
        ),
        (
            ("--rdzv_endpoint=localhost:29500",),
            b"other nodes cannot reach node 0: localhost is the loopback name of every machine",
        ),
        (("--rdzv_endpoint=10.0.0.1:29500",), b""),
        ((), b"other nodes cannot reach 127.0.0.1; add --rdzv_endpoint"),
    ],
)
def test_an_address_of_no_use_to_others_is_told(infini_run, flags, said):
    command = infini_run("--nnodes=2", *flags, "true")
    assert command.wait() == 0
    assert said in command.err
    assert command.err.count(b"\n") == bool(said)
