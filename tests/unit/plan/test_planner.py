"""The plan is arithmetic: who the ranks are, what they see, where their output goes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.devices.cpu_binding import CpuBinding
from infini_run.errors import UsageError
from infini_run.plan.planner import with_error_folder, with_folder
from infini_run.value_types import STDERR, STDOUT
from tests.support.plans import plan_of

# ---- who the ranks are


@st.composite
def jobs(draw):
    nnodes = draw(st.integers(1, 50))
    return nnodes, draw(st.integers(1, 20)), draw(st.integers(0, nnodes - 1))


@given(jobs())
def test_ranks_are_contiguous_and_follow_from_node_and_local_rank(job):
    nnodes, nproc, node_rank = job
    plan = plan_of(f"--nnodes={nnodes}", f"--nproc_per_node={nproc}", f"--node_rank={node_rank}")
    assert plan.world_size == nnodes * nproc
    assert [w.local_rank for w in plan.workers] == list(range(nproc))
    assert [w.rank for w in plan.workers] == [node_rank * nproc + local for local in range(nproc)]
    for worker in plan.workers:
        seen = plan.environ(worker, {})
        assert int(seen["RANK"]) == worker.rank < int(seen["WORLD_SIZE"]) == nnodes * nproc
        assert worker.node == node_rank


@given(st.integers(1, 12), st.integers(1, 12))
def test_the_nodes_of_a_job_make_every_rank_once(nnodes, nproc):
    flags = f"--nnodes={nnodes}", f"--nproc_per_node={nproc}"
    plans = [plan_of(*flags, f"--node_rank={node}") for node in range(nnodes)]
    assert [w.rank for plan in plans for w in plan.workers] == list(range(nnodes * nproc))


@pytest.mark.parametrize(("node", "ranks"), [(0, (0, 7)), (1, (8, 15)), (2, (16, 23)), (3, (24, 31))])
def test_four_nodes_of_eight_ranks_are_numbered_as_documented(node, ranks):
    plan = plan_of("--nnodes=4", "--nproc_per_node=8", f"--node_rank={node}", "--rdzv_endpoint=192.168.1.100:29500")
    seen = [plan.environ(worker, {}) for worker in plan.workers]
    first, last = ranks
    assert [int(env["GLOBAL_PROC_RANK"]) for env in seen] == list(range(first, last + 1))
    assert [int(env["LOCAL_PROC_RANK"]) for env in seen] == list(range(8))
    for env in seen:
        assert env["NNODES"] == "4"
        assert env["NPROC_PER_NODE"] == "8"
        assert env["PROC_WORLD_SIZE"] == "32"
        assert env["MASTER_ADDR"] == "192.168.1.100"
        assert env["MASTER_PORT"] == "29500"


def test_a_world_that_is_too_large_is_refused_when_the_count_was_not_known_before():
    with pytest.raises(UsageError, match="ranks; use at most 2147483647"):
        plan_of("--nnodes=2147483647", "--nproc_per_node=auto", "--node_rank=0", nproc=2)


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("--ranks_on_console=2", "use ranks 0 to 1"),
        ("--local_ranks_filter=0,5", "use local ranks 0 to 1"),
        ("--stdin=2", "use ranks 0 to 1"),
    ],
)
def test_a_rank_that_is_not_there_is_refused_when_the_count_was_not_known_before(flag, what):
    with pytest.raises(UsageError, match=what):
        plan_of("--nproc_per_node=cpu", flag, nproc=2)
    plan_of("--nproc_per_node=cpu", flag, nproc=6)


# ---- what they see


DIALECTS = {
    # infini_run
    "NNODES": "2",
    "NPROC_PER_NODE": "3",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "7",
    "GLOBAL_PROC_RANK": "4",
    "LOCAL_PROC_RANK": "1",
    "PROC_WORLD_SIZE": "6",
    # torchrun
    "RANK": "4",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "4",
    "ROLE_WORLD_SIZE": "6",
    "ROLE_NAME": "trainer",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_ERROR_FILE": "/errors/rank_4.error.json",
    # ours
    "INFINI_RUN_ID": "ir-1",
    "NOTIFY_SOCKET": "@infini-run/ir-1/4",
    # where asked, or nobody said
    "OMP_NUM_THREADS": "2",
}
FLAGS = (
    "--nnodes=2",
    "--nproc_per_node=3",
    "--node_rank=1",
    "--rdzv_endpoint=node0:7",
    "--role=trainer",
    "--run_id=run7",
)


def test_a_rank_sees_exactly_the_documented_variables():
    plan = plan_of(*FLAGS, error_dir="/errors")
    assert plan.environ(plan.workers[1], {}) == DIALECTS


def test_what_is_inherited_stays_unless_the_plan_sets_it():
    inherited = dict.fromkeys(DIALECTS, "inherited") | {"HOME": "/root", "LD_PRELOAD": "x", "": "odd"}
    del inherited["OMP_NUM_THREADS"]
    plan = plan_of(*FLAGS, error_dir="/errors", environ=inherited)
    seen = plan.environ(plan.workers[1], inherited)
    assert seen == DIALECTS | {"HOME": "/root", "LD_PRELOAD": "x", "": "odd"}


@pytest.mark.parametrize(
    "name", ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "WATCHDOG_USEC", "WATCHDOG_PID"]
)
def test_what_belongs_to_an_outer_launch_is_not_handed_down(name):
    plan = plan_of(*FLAGS, environ={name: "outer"})
    assert name not in plan.environ(plan.workers[0], {name: "outer"})


def test_every_rank_has_a_notify_socket_of_its_own_and_never_that_of_an_outer_launch():
    plan = plan_of(*FLAGS, environ={"NOTIFY_SOCKET": "/run/outer"})
    seen = [plan.environ(worker, {"NOTIFY_SOCKET": "/run/outer"})["NOTIFY_SOCKET"] for worker in plan.workers]
    assert seen == [worker.notify for worker in plan.workers] == [f"@infini-run/ir-1/{rank}" for rank in (3, 4, 5)]


def test_ranks_know_the_watchdogs_time_where_there_is_one_and_any_process_may_ping():
    outer = {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}
    plan = plan_of(*FLAGS, "--hang_timeout=1500ms", environ=outer)
    seen = plan.environ(plan.workers[0], outer)
    assert seen["WATCHDOG_USEC"] == "1500000"
    assert "WATCHDOG_PID" not in seen


@given(st.dictionaries(st.text(min_size=1), st.text()), jobs())
def test_torchs_agent_store_is_never_promised(environ, job):
    nnodes, nproc, node = job
    environ = environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    plan = plan_of(f"--nnodes={nnodes}", f"--nproc_per_node={nproc}", f"--node_rank={node}", environ=environ)
    for worker in plan.workers:
        assert "TORCHELASTIC_USE_AGENT_STORE" not in plan.environ(worker, environ)


def test_the_environment_that_comes_in_is_not_changed():
    environ = {"RANK": "9", "A": "b"}
    plan = plan_of(*FLAGS, environ=environ)
    plan.environ(plan.workers[0], environ)
    assert environ == {"RANK": "9", "A": "b"}


def test_a_job_without_a_name_is_called_none_as_torchrun_does():
    assert dict(plan_of().env)["TORCHELASTIC_RUN_ID"] == "none"
    assert dict(plan_of("--standalone").env)["TORCHELASTIC_RUN_ID"] == plan_of().launch_id
    assert dict(plan_of("--standalone", "--run_id=a").env)["TORCHELASTIC_RUN_ID"] == "a"


def test_cuda_visible_devices_is_left_alone_unless_gpus_were_asked_for():
    inherited = {"CUDA_VISIBLE_DEVICES": "3,4"}
    plan = plan_of("--nproc_per_node=2", environ=inherited)
    assert plan.environ(plan.workers[0], inherited)["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert "CUDA_VISIBLE_DEVICES" not in plan.environ(plan.workers[0], {})


def test_each_rank_sees_its_own_devices_where_gpus_were_asked_for():
    inherited = {"CUDA_VISIBLE_DEVICES": "3,4,5,6"}
    devices = (("3", "4"), ("5", "6"))
    plan = plan_of("--nproc_per_node=2", "--gpus_per_proc=2", environ=inherited, devices=devices)
    seen = [plan.environ(worker, inherited)["CUDA_VISIBLE_DEVICES"] for worker in plan.workers]
    assert seen == ["3,4", "5,6"]
    assert [worker.devices for worker in plan.workers] == list(devices)


@pytest.mark.parametrize(
    ("flags", "cpus", "inherited", "seen"),
    [
        (("--nproc_per_node=2",), 8, None, "4"),
        (("--nproc_per_node=3",), 8, None, "2"),
        (("--nproc_per_node=9",), 8, None, "1"),
        (("--nproc_per_node=1",), 8, None, None),
        (("--nproc_per_node=2",), 8, "5", "5"),
        (("--nproc_per_node=1",), 8, "5", "5"),
        (("--nproc_per_node=2",), 8, "", ""),
        (("--nproc_per_node=2", "--omp_num_threads=3"), 8, None, "3"),
        (("--nproc_per_node=2", "--omp_num_threads=3"), 8, "5", "3"),
        (("--nproc_per_node=1", "--omp_num_threads=3"), 8, None, "3"),
        (("--nproc_per_node=2", "--omp_num_threads=auto"), 8, "5", "5"),
    ],
)
def test_omp_num_threads_is_a_fair_share_unless_somebody_said(flags, cpus, inherited, seen):
    environ = {} if inherited is None else {"OMP_NUM_THREADS": inherited}
    plan = plan_of(*flags, environ=environ, cpus=cpus)
    assert plan.environ(plan.workers[0], environ).get("OMP_NUM_THREADS") == seen


def places_of(*threads):
    return tuple(CpuBinding(cpus=tuple(range(count)), nodes=(), threads=count) for count in threads)


@pytest.mark.parametrize(
    ("flags", "places", "inherited", "seen"),
    [
        ((), places_of(4, 4), None, ["4", "4"]),
        ((), places_of(3, 2), None, ["3", "2"]),
        ((), places_of(3, 2), "5", ["5", "5"]),
        (("--omp_num_threads=6",), places_of(3, 2), None, ["6", "6"]),
        ((), places_of(4), None, [None]),
    ],
)
def test_omp_num_threads_follows_the_cpus_that_each_rank_is_bound_to(flags, places, inherited, seen):
    environ = {} if inherited is None else {"OMP_NUM_THREADS": inherited}
    plan = plan_of(f"--nproc_per_node={len(places)}", *flags, environ=environ, cpu_bindings=places)
    assert [plan.environ(worker, environ).get("OMP_NUM_THREADS") for worker in plan.workers] == seen
    assert [worker.cpu_binding for worker in plan.workers] == list(places)


def test_each_ranks_devices_are_shown_by_the_variable_of_their_vendor():
    inherited = {"ROCR_VISIBLE_DEVICES": "3,4", "CUDA_VISIBLE_DEVICES": "kept"}
    devices, variable = (("3",), ("4",)), "ROCR_VISIBLE_DEVICES"
    plan = plan_of(
        "--nproc_per_node=2",
        "--gpus_per_proc=1",
        environ=inherited,
        devices=devices,
        visible_devices_variable=variable,
    )
    seen = [plan.environ(worker, inherited) for worker in plan.workers]
    assert [(one[variable], one["CUDA_VISIBLE_DEVICES"]) for one in seen] == [("3", "kept"), ("4", "kept")]


# ---- what they are told, and where they speak


def test_every_rank_is_told_the_same_unless_asked():
    plan = plan_of("--nproc_per_node=2")
    assert [worker.argv for worker in plan.workers] == [("prog", "--lr=1")] * 2
    assert [worker.file for worker in plan.workers] == ["/bin/prog"] * 2


def test_distributed_args_tell_each_rank_who_it_is():
    plan = plan_of("--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--distributed_args")
    assert [worker.argv[2:] for worker in plan.workers] == [
        ("--distributed-rank=2", "--distributed-world-size=4"),
        ("--distributed-rank=3", "--distributed-world-size=4"),
    ]


def test_labels_name_the_rank_and_with_more_nodes_the_host():
    assert [w.label for w in plan_of("--nproc_per_node=2").workers] == ["rank 0", "rank 1"]
    plan = plan_of("--nnodes=2", "--node_rank=1", "--nproc_per_node=2")
    assert [w.label for w in plan.workers] == ["here:2", "here:3"]


def test_a_log_is_named_by_its_global_rank():
    plan = plan_of("--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--log_dir=logs")
    assert [w.log for w in plan.workers] == ["logs/rank_2.log", "logs/rank_3.log"]
    assert [w.log for w in plan_of("--nproc_per_node=2").workers] == ["", ""]


CONSOLES = ("auto", "inherit", "lines", "prefix", "none")
SHOWN = (
    (),
    ("--ranks_on_console=1",),
    ("--local_ranks_filter=0",),
    ("--ranks_on_console=1", "--local_ranks_filter=1"),
)
STREAMS = (0, 1, 2, 3)
TABLE = [(console, False, shown, 0, 0) for console, shown in itertools.product(CONSOLES, SHOWN)] + [
    *itertools.product(CONSOLES, (True,), SHOWN, STREAMS, STREAMS)
]


@pytest.mark.parametrize(("console", "log", "shown", "redirects", "tee"), TABLE)
def test_a_stream_goes_where_console_log_filters_redirects_and_tee_say(console, log, shown, redirects, tee):
    flags = ["--nproc_per_node=2", f"--console={console}", *shown]
    flags += ["--log_dir=logs", f"--redirects={redirects}", f"--tee={tee}"] if log else []
    for worker in plan_of(*flags).workers:
        for stream, output in ((STDOUT, worker.stdout), (STDERR, worker.stderr)):
            on_console = (
                console != "none"
                and not ("--ranks_on_console=1" in shown and worker.rank != 1)
                and not ("--local_ranks_filter=0" in shown and worker.local_rank != 0)
                and not ("--local_ranks_filter=1" in shown and worker.local_rank != 1)
                and not (redirects & stream and not tee & stream)
            )
            assert output.console == on_console
            assert output.log == log
            # through us only where something must be done with it, or stderr's last words be kept
            keeps_words = stream == STDERR and not on_console
            how = ("prefix" if log else "lines") if console == "auto" else console
            assert output.piped == (log or (on_console and how in ("lines", "prefix")) or keeps_words)
            assert output.unlabelled == (on_console and how != "prefix" and (log or how == "lines"))


def test_redirects_and_tee_can_name_local_ranks():
    flags = "--nproc_per_node=2", "--log_dir=logs", "--console=prefix", "--redirects=1:3", "--tee=1:2"
    zero, one = plan_of(*flags).workers
    assert (zero.stdout.console, zero.stderr.console) == (True, True)
    assert (one.stdout.console, one.stderr.console) == (False, True)


@pytest.mark.parametrize(
    ("flags", "is_terminal", "stdins"),
    [
        (("--nproc_per_node=2",), False, ["inherit", "null"]),
        (("--nproc_per_node=2",), True, ["pipe", "null"]),
        (("--nproc_per_node=1",), True, ["inherit"]),
        (("--nproc_per_node=2", "--stdin=1"), False, ["null", "inherit"]),
        (("--nproc_per_node=2", "--stdin=1"), True, ["null", "pipe"]),
        (("--nproc_per_node=2", "--stdin=all"), False, ["pipe", "pipe"]),
        (("--nproc_per_node=1", "--stdin=all"), False, ["inherit"]),
        (("--nproc_per_node=2", "--stdin=none"), True, ["null", "null"]),
        (("--nnodes=2", "--node_rank=1", "--nproc_per_node=2"), False, ["null", "null"]),
        (("--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--stdin=3"), False, ["null", "inherit"]),
    ],
)
def test_stdin_goes_to_one_rank_to_all_or_to_none(flags, is_terminal, stdins):
    assert [w.stdin for w in plan_of(*flags, is_terminal=is_terminal).workers] == stdins


# ---- what a plan is


def test_a_plan_is_frozen_all_the_way_down():
    plan = plan_of("--nproc_per_node=2", "--log_dir=logs", devices=(("0",), ("1",)))
    for part in (plan, plan.nodes[0], plan.workers[0], plan.workers[0].stdout):
        with pytest.raises(AttributeError, match="is frozen"):
            part.anything = 1
    assert hash(plan) == hash(plan_of("--nproc_per_node=2", "--log_dir=logs", devices=(("0",), ("1",))))


def test_the_same_request_makes_the_same_plan():
    assert plan_of(*FLAGS, environ={"A": "1"}) == plan_of(*FLAGS, environ={"A": "1"})


# ---- the same plan for another folder


@pytest.mark.parametrize(
    ("folder", "abstract_id", "notify", "error_file"),
    [
        ("/g", "", "/g/notify.0", "/g/rank_0.error.json"),
        ("/g", "secret", "@infini-run/secret/0", "/g/rank_0.error.json"),
        ("", "secret", "@infini-run/secret/0", None),
    ],
)
def test_plan_moves_with_its_folder(folder, abstract_id, notify, error_file):
    plan = with_folder(plan_of(folder="/f", error_dir="/f"), folder, abstract_id=abstract_id)
    seen = plan.environ(plan.workers[0], {})
    assert (seen["NOTIFY_SOCKET"], seen.get("TORCHELASTIC_ERROR_FILE")) == (notify, error_file)
    assert (plan.workers[0].notify, plan.workers[0].error_file) == (notify, error_file or "")
    beside_logs = with_folder(plan_of(folder="/f", error_dir="/logs"), folder, abstract_id=abstract_id)
    assert beside_logs.workers[0].error_file == "/logs/rank_0.error.json"


@pytest.mark.parametrize(("folder", "error_file"), [("/g", "/g/rank_0.error.json"), ("", None)])
def test_plan_moves_error_files_alone(folder, error_file):
    before = plan_of(folder="/f", error_dir="/logs")
    plan = with_error_folder(before, folder)
    seen = plan.environ(plan.workers[0], {})
    assert seen.get("TORCHELASTIC_ERROR_FILE") == error_file
    assert plan.workers[0].error_file == (error_file or "")
    assert seen["NOTIFY_SOCKET"] == before.workers[0].notify
    assert with_error_folder(plan_of(folder="/f"), "/g").workers[0].error_file == ""
