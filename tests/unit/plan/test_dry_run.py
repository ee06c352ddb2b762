"""--dry_run shows the plan: enough to run any rank by hand, and starts nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.unit.environments.test_environments import SRUN


@pytest.fixture
def shown(infini_run):
    def show(*words, said=b"", **kwargs):
        command = infini_run(*words, **kwargs)
        assert command.wait() == 0, command.err
        assert command.err == said
        return command.out.decode()

    return show


def test_the_text_names_every_rank_and_every_variable(shown):
    text = shown(
        "--dry_run", "--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--rdzv_endpoint=n0:7", "sh", "a b"
    )
    lines = text.splitlines()
    assert lines[0] == "2 of 4 ranks, 2 nodes, rendezvous at n0:7"
    assert lines[1].startswith("every rank: INFINI_RUN_ID=ir-")
    assert lines[2] == f"node 1 ({os.uname().nodename}):"
    assert [line.split(":")[0] for line in lines[3:]] == ["  rank 2", "  rank 3"]
    for line in lines[3:]:
        assert line.endswith("/sh 'a b'")


def test_the_hosts_that_are_listed_last_are_shown_as_spares(shown):
    flags = ("--hosts=host[1-5]", "--nnodes=2:3", "--spares=2", "true")
    first, *_, last = shown("--dry_run", *flags).splitlines()
    assert first.startswith("3 of 3 ranks, 3 nodes (2 are enough), rendezvous at ")
    assert last == "spares: host4, host5"
    found = json.loads(shown("--dry_run=json", *flags))
    assert (found["nnodes"], found["least_nodes"], found["world_size"]) == (3, 2, 3)
    assert (found["spares"], [node["host"] for node in found["nodes"]]) == (
        ["host4", "host5"],
        ["host1", "host2", "host3"],
    )
    assert {rank["env"]["WORLD_SIZE"] for rank in found["ranks"]} == {"3"}


ASSIGNED = b"infini-run: the head assigns the node rank; the plan is that of node 0\n"
TOKENLESS = (
    b"infini-run: the launch itself needs a token to join its nodes; set the same INFINI_RUN_TOKEN=... on every "
    b"node\n"
)
UNREACHABLE = b"infini-run: other nodes cannot reach 127.0.0.1; add --rdzv_endpoint=HOST:PORT of node 0\n"


def test_spares_that_join_by_themselves_have_no_names_yet(shown):
    flags = ("--nnodes=3", "--spares=1", "--rdzv_endpoint=n0:7", "true")
    text = shown("--dry_run", *flags, said=ASSIGNED + TOKENLESS)
    assert text.endswith("\nspares: 1 (the last by name of the nodes that join)\n")
    joined = {**os.environ, "INFINI_RUN_TOKEN": "0123456789abcdef"}
    assert json.loads(shown("--dry_run=json", *flags, said=ASSIGNED, env=joined))["spares"] == [None]


def test_elastic_plan_without_token_lacks_line_about_restarts(shown):
    shown("--dry_run", "--nnodes=1:4", "--rdzv_endpoint=n0:7", "--max_restarts=3", "true", said=ASSIGNED + TOKENLESS)


def test_spare_of_a_step_shows_the_plan_of_node_0(shown):
    step = {**os.environ, **SRUN, "INFINI_RUN_TOKEN": "0123456789abcdef"}
    said = b"infini-run: this node is a spare; the plan is that of node 0\n"
    flags = ("--engine=auto", "--nproc_per_node=2", "--spares=1", "true")
    plan = json.loads(shown("--dry_run=json", *flags, said=said, env=step))
    assert (plan["nnodes"], plan["world_size"], [node["node_rank"] for node in plan["nodes"]]) == (2, 4, [0])
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    step["SLURM_NODEID"] = "1"
    plan = json.loads(shown("--dry_run=json", *flags, env=step))
    assert [rank["rank"] for rank in plan["ranks"]] == [2, 3]


def test_plan_of_one_of_several_launchers_has_warnings_of_launch(shown):
    """It shows the ranks of its own node."""
    text = shown("--dry_run", "--nnodes=4", "--nproc_per_node=2", "true", said=UNREACHABLE)
    assert text.startswith("2 of 8 ranks, 4 nodes, rendezvous at 127.0.0.1:29500\n")
    joined = {**os.environ, "INFINI_RUN_TOKEN": "0123456789abcdef"}
    text = shown(
        "--dry_run", "--nnodes=4", "--rdzv_endpoint=n0:7", "--max_restarts=1", "true", said=ASSIGNED, env=joined
    )
    assert "\nnode 0 (" in text
    text = shown("--dry_run", "--nnodes=4", "--node_rank=3", "--rdzv_endpoint=n0:7", "true", env=joined)
    assert "\nnode 3 (" in text


def test_a_range_with_fewer_hosts_than_its_most_is_shown_with_those(shown):
    found = json.loads(shown("--dry_run=json", "--hosts=a,b", "--nnodes=2:3", "true"))
    assert (found["nnodes"], found["least_nodes"], found["world_size"], found["spares"]) == (2, 2, 2, [])


def test_an_ipv6_endpoint_is_shown_in_brackets(shown):
    assert "rendezvous at [::1]:7\n" in shown("--dry_run", "--rdzv_endpoint=[::1]:7", "true")


def test_a_line_of_the_text_can_be_pasted_into_a_shell(shown):
    script = 'echo "$RANK of $WORLD_SIZE: $1"'
    lines = shown("--dry_run", "--nproc_per_node=2", "sh", "-c", script, "sh", "it's; $HOME").splitlines()
    common = lines[1].removeprefix("every rank: ")
    own = lines[4].partition(": ")[2]
    done = subprocess.run(["sh", "-c", f"{common} {own}"], capture_output=True, text=True, check=True)
    assert done.stdout == "1 of 2: it's; $HOME\n"


def said(output):
    """What `env -0` printed, but for what differs from launch to launch."""
    return {
        line
        for line in output.split(b"\0")
        if not line.startswith((b"INFINI_RUN_ID=", b"NOTIFY_SOCKET=", b"_=", b"PWD="))
    }


def test_the_json_is_enough_to_run_a_rank_by_hand(shown, infini_run, tmp_path):
    """A rank that shows all it was given shows the same when it is run from the JSON."""
    flags = "--nproc_per_node=3", "--nnodes=2", "--node_rank=1", f"--log_dir={tmp_path}", "--console=none"
    words = "--distributed_args", "sh", "-c", 'env -0 | sort -z; printf "%s\\0" "$@"', "sh", "x y", ""
    environ = dict(os.environ)  # readline changes the real one behind Python's back
    plan = json.loads(shown(*flags, "--dry_run=json", *words, env=environ, said=UNREACHABLE))
    real = infini_run(*flags, *words, env=environ)
    assert real.wait() == 0
    for rank in plan["ranks"]:
        by_hand = subprocess.run(
            rank["argv"], executable=rank["file"], env=environ | rank["env"], capture_output=True, check=True
        )
        assert said(by_hand.stdout) == said(Path(rank["log"]).read_bytes())
    assert [rank["rank"] for rank in plan["ranks"]] == [3, 4, 5]


def test_the_json_describes_the_job_and_its_nodes(shown):
    plan = json.loads(shown("--dry_run=json", "--nnodes=2", "--nproc_per_node=2", "--rdzv_endpoint=n0:7", "true"))
    host = os.uname().nodename
    del plan["ranks"], plan["launch_id"]
    assert plan == {
        "format": 2,
        "nnodes": 2,
        "least_nodes": 2,
        "spares": [],
        "preload": [],
        "exported": [],
        "world_size": 4,
        "master_addr": "n0",
        "master_port": 7,
        "nodes": [{"node_rank": 0, "host": host, "nproc": 2}],
    }


def test_names_that_are_no_text_come_out_of_the_json_whole(shown):
    word = os.fsdecode(b"\xff\xfe")
    plan = json.loads(shown("--dry_run=json", "echo", word))
    assert os.fsencode(plan["ranks"][0]["argv"][1]) == b"\xff\xfe"


@pytest.mark.parametrize("how", ["--dry_run", "--dry_run=text", "--dry_run=json"])
def test_nothing_is_started_or_made(how, shown, tmp_path):
    shown(how, f"--log_dir={tmp_path}/logs", f"--report={tmp_path}/report", "touch", f"{tmp_path}/started")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_that_is_off_is_a_run(infini_run, tmp_path):
    command = infini_run("--nodry_run", "touch", tmp_path / "started")
    assert command.wait() == 0
    assert (tmp_path / "started").exists()


def test_a_dry_run_refuses_what_a_run_refuses(infini_run):
    command = infini_run("--dry_run", "no-such-program")
    assert command.wait() == 127
    assert command.out == b""
    assert shlex.split("no-such-program")[0].encode() in command.err


def test_a_reader_that_has_gone_is_no_failure(infini_run):
    read, write = os.pipe()
    os.close(read)
    command = infini_run("--dry_run", "true", stdout=write)
    os.close(write)
    assert command.wait() in (0, -13, 141)
    assert command.err == b""


def test_the_plan_of_many_hosts_names_no_address_that_the_launch_does_not_use(shown):
    """Where rank 0 listens is known when node 0 has been reached: its address, and a port that is free there."""
    text = shown("--dry_run", "--hosts=a:2,b:1", "true")
    assert text.startswith("3 of 3 ranks, 2 nodes, rendezvous at the address of a, a free port of a\n")
    assert "MASTER_ADDR='<address of a>'" in text
    assert "MASTER_PORT='<free port of a>'" in text
    assert "OMP_NUM_THREADS=" not in text, "how many CPUs they have is not known here"
    plan = json.loads(shown("--dry_run=json", "--hosts=a:2,b:1", "true"))
    assert (plan["master_addr"], plan["master_port"]) == (None, None)
    assert {plan["ranks"][2]["env"][name] for name in ("MASTER_ADDR", "MASTER_PORT")} == {None}
    given = shown("--dry_run", "--hosts=a,b", "--rdzv_endpoint=a-ib:7", "true")
    assert given.startswith("2 of 2 ranks, 2 nodes, rendezvous at a-ib:7\n")
    alone = shown("--dry_run", "--hosts=a", "true")
    assert alone.startswith("1 of 1 rank, 1 node, rendezvous at 127.0.0.1, a free port of a\n")


def test_plan_of_many_hosts_leaves_their_gpus_to_them(shown):
    text = shown("--dry_run", "--hosts=a,b", "--nproc_per_node=2", "--gpus_per_proc=1", "true")
    assert text.splitlines()[2].endswith("; with --gpus_per_proc, CUDA_VISIBLE_DEVICES or the like")
    assert text.count("  rank ") == 4
    plan = json.loads(shown("--dry_run=json", "--hosts=a,b", "--gpus_per_proc=1", "true"))
    assert [rank["devices"] for rank in plan["ranks"]] == [None, None]
    plan = json.loads(shown("--dry_run=json", "--hosts=a,b", "true"))
    assert [rank["devices"] for rank in plan["ranks"]] == [[], []]


def test_plan_of_many_hosts_names_what_is_exported(shown):
    words = ("--hosts=a,b", "--export=NCCL_DEBUG,HF_*", "true")
    env = os.environ | {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf"}
    assert "\nexported: HF_HOME, NCCL_DEBUG\n" in shown("--dry_run", *words, env=env)
    assert json.loads(shown("--dry_run=json", *words, env=env))["exported"] == ["HF_HOME", "NCCL_DEBUG"]


def test_plan_of_many_hosts_needs_a_number_of_ranks(infini_run):
    command = infini_run("--dry_run", "--hosts=a,b", "--nproc_per_node=gpu", "true")
    assert command.wait() == 2
    why = "the number of ranks is known only on the nodes; use --nproc_per_node=N"
    assert command.err.decode() == f"infini-run: --dry_run with --nproc_per_node=gpu: {why}\n"


def test_the_plan_of_hosts_with_different_slots(shown):
    plan = json.loads(shown("--dry_run=json", "--hosts=a:2,b:3,c:1", "true"))
    names = (
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NPROC_PER_NODE",
        "GROUP_RANK",
        "WORLD_SIZE",
        "ROLE_WORLD_SIZE",
    )
    assert [[int(rank["env"][name]) for name in names] for rank in plan["ranks"]] == [
        [0, 0, 2, 2, 0, 6, 6], [1, 1, 2, 2, 0, 6, 6],
        [2, 0, 3, 3, 1, 6, 6], [3, 1, 3, 3, 1, 6, 6], [4, 2, 3, 3, 1, 6, 6],
        [5, 0, 1, 1, 2, 6, 6],
    ]  # fmt: skip
    assert [node["nproc"] for node in plan["nodes"]] == [2, 3, 1]


def test_a_task_of_pbs_knows_the_ranks_of_all_nodes(shown, tmp_path):
    """pbsdsh: the file of nodes is there on each."""
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    job = {
        "PBS_JOBID": "7.head",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_NODENUM": "1",
        "PBS_TASKNUM": "08000001",
    }
    plan = json.loads(shown("--dry_run=json", "--engine=auto", "true", env={**os.environ, **job}))
    assert (plan["world_size"], [rank["rank"] for rank in plan["ranks"]]) == (3, [2])
    asked = json.loads(
        shown("--dry_run=json", "--engine=auto", "--nproc_per_node=2", "true", env={**os.environ, **job})
    )
    assert (asked["world_size"], [rank["rank"] for rank in asked["ranks"]]) == (4, [2, 3])
