"""Several programs in one plan: the table of every variable, in own worlds and in one, on two nodes."""

from __future__ import annotations

import json

import pytest

from infini_run.options.options import resolve
from infini_run.plan.model import Command, FoundProgram, Node
from infini_run.plan.planner import make_plan

COUNTS = (6, 1)  # ranks of trainer, and of rollout, on each of two nodes
TRAINER_RANKS, ROLLOUT_RANKS = range(12), range(2)
# What each rank sees: a value for all ranks of a program, or one for each of its ranks, node after node.
TABLE = {  # variable: (trainer, rollout) in own worlds, (trainer, rollout) in one world
    "RANK": ((range(12), range(2)), (range(12), (12, 13))),
    "GLOBAL_PROC_RANK": ((range(12), range(2)), (range(12), (12, 13))),
    "WORLD_SIZE": ((12, 2), (14, 14)),
    "PROC_WORLD_SIZE": ((12, 2), (14, 14)),
    "LOCAL_RANK": (([*range(6), *range(6)], (0, 0)), ([*range(6), *range(6)], (6, 6))),
    "LOCAL_PROC_RANK": (([*range(6), *range(6)], (0, 0)), ([*range(6), *range(6)], (6, 6))),
    "LOCAL_WORLD_SIZE": ((6, 1), (7, 7)),
    "NPROC_PER_NODE": ((6, 1), (7, 7)),
    "ROLE_NAME": (("trainer", "rollout"), ("trainer", "rollout")),
    "ROLE_RANK": ((range(12), range(2)), (range(12), range(2))),
    "ROLE_WORLD_SIZE": ((12, 2), (12, 2)),
    "GROUP_RANK": (([0] * 6 + [1] * 6, (0, 1)), ([0] * 6 + [1] * 6, (0, 1))),
    "GROUP_WORLD_SIZE": ((2, 2), (2, 2)),
    "NNODES": ((2, 2), (2, 2)),
    "MASTER_ADDR": (("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")),
    "MASTER_PORT": ((4001, 4002), (4001, 4001)),
    "INFINI_RUN_ID": (("ir-1", "ir-1"), ("ir-1", "ir-1")),
    "TORCHELASTIC_RUN_ID": (("none", "none"), ("none", "none")),
    "TORCHELASTIC_RESTART_COUNT": ((0, 0), (0, 0)),
    "TORCHELASTIC_MAX_RESTARTS": ((0, 0), (0, 0)),
    "OMP_NUM_THREADS": ((2, 2), (2, 2)),
    "NOTIFY_SOCKET": (
        ([f"@infini-run/ir-1/{rank}" for rank in range(12)], [f"@infini-run/ir-1/{rank}" for rank in (12, 13)]),
    )
    * 2,
}


def plan_of(*flags, environ=None, nodes=None, counts=COUNTS, more=(), later=(), **given):
    argv = [*flags, "--program=trainer", f"--nproc_per_node={counts[0]}", *more, "train.py", ":"]
    options = resolve([*argv, "--program=rollout", f"--nproc_per_node={counts[1]}", *later, "serve.py"], {}).options
    programs = tuple(
        FoundProgram(
            options=each, command=Command(file=f"/bin/{each.name}", argv=each.program), master_port=4001 + at
        )
        for at, each in enumerate(options.programs)
    )
    if nodes is None:
        nodes = tuple(
            Node(index=at, host=f"host{at}", nproc=sum(counts), counts=counts, cpus=14, **given) for at in range(2)
        )
    plan_options = type(options)(**(vars(options) | {"nnodes": len(nodes)}))
    return make_plan(plan_options, programs, nodes, launch_id="ir-1", environ=environ or {})


def seen_by(plan, program, environ=None):
    return [plan.environ(worker, environ or {}) for worker in plan.workers if worker.program == program]


@pytest.mark.parametrize(("flags", "mode"), [((), 0), (("--one_world",), 1)])
@pytest.mark.parametrize("name", TABLE)
def test_table_of_variables_for_six_and_one_on_two_nodes(name, flags, mode):
    plan = plan_of(*flags)
    for program, wanted in zip(("trainer", "rollout"), TABLE[name][mode], strict=True):
        seen = [environ[name] for environ in seen_by(plan, program)]
        each = [wanted] * len(seen) if isinstance(wanted, (int, str)) else list(wanted)
        assert seen == [str(value) for value in each], (program, name)


@pytest.mark.parametrize("flags", [(), ("--one_world",)])
def test_table_has_every_variable(flags):
    plan = plan_of(*flags)
    for program in ("trainer", "rollout"):
        assert set(seen_by(plan, program)[0]) == {*TABLE, "JOB_PROGRAMS"}


def test_ranks_of_the_plan_count_through_all_programs():
    plan = plan_of()
    assert [worker.rank for worker in plan.workers] == list(range(14))
    assert [worker.name for worker in plan.workers[10:]] == ["trainer 10", "trainer 11", "rollout 0", "rollout 1"]
    assert [worker.node for worker in plan.workers] == [0] * 6 + [1] * 6 + [0, 1]
    assert plan.world_size == 14


@pytest.mark.parametrize("flags", [(), ("--one_world",)])
def test_job_programs_tells_every_rank_of_all(flags):
    plan = plan_of(*flags)
    told = {environ["JOB_PROGRAMS"] for name in ("trainer", "rollout") for environ in seen_by(plan, name)}
    (text,) = told
    assert json.loads(text) == [
        {"name": "trainer", "size": 12, "hosts": ["host0", "host1"], "addr": "127.0.0.1", "port": 4001},
        {"name": "rollout", "size": 2, "hosts": ["host0", "host1"], "addr": "127.0.0.1", "port": 4002},
    ]


def test_nodes_may_have_different_numbers_of_each():
    nodes = (
        Node(index=0, host="a", nproc=3, counts=(3, 0)),
        Node(index=1, host="b", nproc=3, counts=(1, 2)),
    )
    plan = plan_of(nodes=nodes)
    assert [e["RANK"] for e in seen_by(plan, "trainer")] == ["0", "1", "2", "3"]
    assert [e["LOCAL_WORLD_SIZE"] for e in seen_by(plan, "trainer")] == ["3", "3", "3", "1"]
    assert [(e["RANK"], e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in seen_by(plan, "rollout")] == [
        ("0", "2", "2"),
        ("1", "2", "2"),
    ]
    assert json.loads(seen_by(plan, "trainer")[0]["JOB_PROGRAMS"])[1]["hosts"] == ["b"]


def test_devices_and_cpus_are_those_of_the_place_on_the_node():
    devices = (*((str(at),) for at in range(6)), ("6", "7"))
    plan = plan_of(devices=devices)
    assert [worker.devices for worker in plan.workers if worker.node == 0] == list(devices)
    assert seen_by(plan, "rollout")[0]["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_variable_that_one_program_sets_is_inherited_by_the_other():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5", "HOME": "/h"}
    plan = plan_of(devices=(*((str(at),) for at in range(6)), ()), environ=environ)
    assert seen_by(plan, "trainer", environ)[1]["CUDA_VISIBLE_DEVICES"] == "1"
    assert seen_by(plan, "rollout", environ)[0]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5"
    assert "CUDA_VISIBLE_DEVICES" not in plan.base(environ)


def test_logs_and_error_files_are_in_a_folder_per_program():
    plan = plan_of("--log_dir=logs")
    assert [worker.log for worker in plan.workers[11:]] == [
        "logs/trainer/rank_11.log",
        "logs/rollout/rank_0.log",
        "logs/rollout/rank_1.log",
    ]


def test_only_the_program_with_logs_of_its_own_has_logged_output():
    workers = plan_of(later=("--log_dir=logs",)).workers
    assert [worker.stdout.log for worker in workers] == [worker.program == "rollout" for worker in workers]


def test_only_the_first_rank_of_all_has_the_input():
    assert [worker.stdin == "null" for worker in plan_of().workers] == [False] + [True] * 13


def test_distributed_args_count_in_the_world_that_ranks_see():
    more = ("--distributed_args",)
    ends = {flags: plan_of(*flags, more=more).workers[-3].argv[-2:] for flags in ((), ("--one_world",))}
    assert ends[()] == ("--distributed-rank=11", "--distributed-world-size=12")
    assert ends[("--one_world",)] == ("--distributed-rank=11", "--distributed-world-size=14")
