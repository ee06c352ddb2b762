"""A flag about other nodes that has no effect where it stands is told of in one line, or refused."""

from __future__ import annotations

import os

import pytest

import infini_run as ir
from infini_run.options.ineffective_flags import NAMES
from infini_run.options.options import _MAY_BE_IDLE, resolve
from tests.multinode.test_by_hand import node, port  # noqa: F401  fixtures

TOKEN = {"INFINI_RUN_TOKEN": "x"}
TWO = ("--nnodes=2", "--rdzv_endpoint=h:1", "--node_rank=0")


def idle(*words, environ=None):
    return resolve([*words, "true"], environ or {}).without_effect


@pytest.mark.parametrize(
    ("words", "environ", "names", "why"),
    [
        (
            ("--node_timeout=5", "--ssh_config=f"),
            {},
            ["--ssh_config=f", "--node_timeout=5"],
            "there is only one node",
        ),
        ((*TWO, "--join_timeout=5"), {}, ["--join_timeout=5"], "without INFINI_RUN_TOKEN"),
        ((*TWO, "--join_timeout=5", "--link_port=7", "--export=A"), TOKEN, [], ""),
        (("--spares=1", "--join_timeout=5"), TOKEN, [], ""),
        ((*TWO, "--remote_python=p"), TOKEN, ["--remote_python=p"], "this launcher reaches no node"),
        ((*TWO, "--console=inherit"), TOKEN, ["--console=inherit"], "[host:rank]"),
        (("--hosts=a,b", "--link_port=7"), {}, ["--link_port=7"], "over ssh"),
        (("--hosts=a,b", "--ssh_config=f", "--join_timeout=5", "--export=A"), {}, [], ""),
        (("--hosts=a,b", "--engine=mpi", "--ssh_config=f"), {}, ["--ssh_config=f"], "mpi reaches the nodes"),
        (("--engine=auto", "--join_timeout=5"), {}, ["--join_timeout=5"], "there is only one node"),
        ((*TWO, "--engine=auto", "--link_port=7"), {}, ["--link_port=7"], "without INFINI_RUN_TOKEN"),
        (("--console=inherit",), {}, [], ""),
        (("--metrics_interval=3",), {}, ["--metrics_interval=3"], "add --metrics=FILE"),
        (("--metrics_interval=3", "--metrics=f"), {}, [], ""),
        (("--metrics_interval=3",), {"INFINI_RUN_METRICS": "f"}, [], ""),
        (("--preload_timeout=3",), {}, ["--preload_timeout=3"], "add --preload=NAMES"),
        (("--preload_timeout=3", "--preload=torch"), {}, [], ""),
        ((), {"INFINI_RUN_JOIN_TIMEOUT": "5", "INFINI_RUN_SSH_CONFIG": "f"}, [], ""),  # for other launches
    ],
)
def test_flags_without_effect_are_named_with_the_reason(words, environ, names, why):
    said = idle(*words, environ=environ)
    assert said.partition(": no effect here")[0].split(", ") == (names or [""])
    assert why in said


def test_flags_that_are_looked_at_are_those_that_are_known():
    assert set(_MAY_BE_IDLE) == NAMES


def test_the_command_says_it_and_goes_on(infini_run):
    command = infini_run("--join_timeout=5", "true")
    assert command.wait() == 0
    assert command.err.startswith(b"infini-run: --join_timeout=5: no effect here: there is only one node")


def test_a_host_program_is_refused():
    with pytest.raises(ir.UsageError, match="join_timeout=5: no effect here"):
        ir.run(["true"], join_timeout=5)


def test_what_only_node_0_does_is_said_where_another_is_asked_for_it(node, tmp_path):  # noqa: F811
    head = node(0, "true")
    joiner = node(1, "true", flags=(f"--trace={tmp_path}/t", "--report=r", "--stdin=1"))
    assert [head.wait(), joiner.wait()] == [0, 0]
    assert joiner.err == b"infini-run: --report, --trace, --stdin=1: no effect here; set it on node 0\n"
    assert head.err == b""
    both = [node(rank, "true", flags=(f"--trace={tmp_path}/t",)) for rank in (0, 1)]
    assert [command.wait() for command in both] == [0, 0], [command.err for command in both]
    assert [command.err for command in both] == [b"", b""]
    assert os.listdir(tmp_path) == ["t"]


def test_joiner_is_told_of_restart_flags_that_node_0_lacks(node):  # noqa: F811
    head = node(0, "true", flags=("--max_restarts=2",))
    joiner = node(1, "true", flags=("--max_restarts=2", "--restart_delay=5"))
    assert [head.wait(), joiner.wait()] == [0, 0]
    assert joiner.err == b"infini-run: --restart_delay: no effect here; set it on node 0\n"
    assert head.err == b""


def test_isolate_with_a_token_is_refused(node):  # noqa: F811
    command = node(0, "true", flags=("--isolate",))
    assert command.wait() == 2
    assert b"--isolate with INFINI_RUN_TOKEN" in command.err


@pytest.mark.parametrize("flag", ["--trace=t", "--max_restarts=1"])
def test_where_each_task_is_a_rank_nobody_traces_or_restarts_it(infini_run, flag):
    from tests.multinode.test_by_hand import step

    command = infini_run("--engine=auto", flag, "true", env={**os.environ, **step(0, 2)})
    assert command.wait() == 2
    assert flag.encode() in command.err
