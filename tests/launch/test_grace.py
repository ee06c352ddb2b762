"""--grace: 25 s where a signal told us to stop, 10 s after a failure; where it is given, that on every path."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

import infini_run as ir
from infini_run.node.launch import NodeLaunch
from infini_run.options.options import resolve
from tests.support.build_c import WITH_CORE, build
from tests.support.cluster import free_ports
from tests.support.command import COMMAND, play
from tests.support.processes import is_alive
from tests.support.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("words", "environ", "graces"),
    [
        ((), {}, (10.0, 25.0)),
        (("--grace=2m",), {}, (120.0, 120.0)),
        (("--grace=0",), {}, (0.0, 0.0)),
        ((), {"PET_SHUTDOWN_TIMEOUT": "4"}, (4.0, 4.0)),
    ],
)
def test_the_grace_as_it_is_given(words, environ, graces):
    options = resolve([*words, "true"], environ).options
    assert (options.grace_s, options.signal_grace_s) == graces


@pytest.mark.parametrize(("flags", "seconds"), [((), 25), (("--grace=70",), 70)], ids=["default", "given"])
def test_who_is_told_to_stop_hears_how_long_the_ranks_have(infini_run, flags, seconds):
    command = infini_run("--nproc_per_node=2", *flags, *play("end=TERM:0", "say=ready", "wait"))
    command.read_lines(b"ready", 2)
    command.signal(signal.SIGTERM)
    assert command.wait() == 0
    assert f"SIGTERM: stopping; SIGKILL in {seconds} s".encode() in command.err


def test_a_failure_that_is_being_stopped_keeps_its_grace_when_we_are_told(infini_run):
    command = infini_run("--nproc_per_node=2", *play("tell=TERM", "say=ready", "wait"))
    pids = command.pids_of(b"ready", 2)
    os.kill(pids[0], signal.SIGKILL)
    command.read_lines(b"got TERM")
    command.signal(signal.SIGTERM)
    command.signal(signal.SIGTERM)
    command.read_error_until(b"SIGTERM: stopping; SIGKILL in 10 s")
    assert is_alive(pids[1])
    os.kill(pids[1], signal.SIGKILL)
    assert command.wait() == 137


WITH_GRACES = """
import sys
import infini_run.options.options as options
from infini_run.cli import main

options.GRACES_S = {}
sys.argv[1:] = sys.argv[sys.argv.index("{}") + 1 :]
main()
"""


@pytest.fixture(params=["one node", "two nodes"])
def launch_with(request, infini_run):
    """Start a launch for which those are the default graces, after a failure and by a signal."""

    def start(graces, *words, **files):
        under = (sys.executable, "-c", WITH_GRACES.format(graces, COMMAND[-1]))
        flags = [f"--{name}={path}" for name, path in files.items()]
        if request.param == "one node":
            return infini_run("--nproc_per_node=2", *flags, *words, under=under)
        shape = ("--nnodes=2", f"--rdzv_endpoint=127.0.0.1:{free_ports(2)}")
        env = {**os.environ, "INFINI_RUN_TOKEN": "a-secret-that-nobody-guesses"}
        head, _ = (
            infini_run(*shape, f"--node_rank={node}", *(() if node else flags), *words, under=under, env=env)
            for node in (0, 1)
        )
        return head

    return start


def test_deaf_ranks_have_the_grace_of_a_signal_where_one_asks(launch_with, bell):
    command = launch_with((1000.0, 0.2), "sh", "-c", f"trap '' TERM; echo > {bell.path}; while :; do sleep 1; done")
    bell.hear(2)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143


@pytest.mark.parametrize(
    ("stops", "words", "said"),
    [
        (1, ("ignore=TERM",), "ranks 0-1 did not exit within 0.3 s, and were killed"),
        (1, ("@0", "end=TERM:0", "@1", "ignore=TERM", "@*"), "rank 1 did not exit within 0.3 s, and was killed"),
        (1, ("end=TERM:5",), ""),
        (2, ("ignore=TERM",), ""),
    ],
    ids=["all", "one", "none", "killed by the second TERM"],
)
def test_report_names_ranks_killed_after_grace(launch_with, tmp_path, stops, words, said):
    """And the report and the file for Kubernetes do, too."""
    report, log = tmp_path / "report.json", tmp_path / "termination-log"
    graces = (1000.0, 0.3 if stops == 1 else 1000.0)
    command = launch_with(graces, *play(*words, "say=up", "wait"), report=report, termination_log=log)
    while command.out.count(b"up ") < 2:
        command.read_more()
    command.signal(signal.SIGTERM)
    if stops == 2:
        command.read_error_until(b"SIGTERM: stopping")
        command.insist(signal.SIGTERM)
    assert command.wait() == 143
    lines = [line for line in command.err.decode().splitlines() if "did not exit" in line]
    assert lines == ([f"infini-run: {said}"] if said else [])
    assert log.read_text().splitlines() == lines
    after = [rank["killed_after"] for rank in json.loads(report.read_text())["ranks"]]
    assert after == [0.3 if f"rank {rank} " in said or "0-1" in said else None for rank in range(2)]


def test_deaf_ranks_have_the_grace_of_a_failure_where_one_fails(launch_with, bell):
    gate = f"{bell.path}.gate"
    os.mkfifo(gate)
    deaf = f"trap '' TERM; echo > {bell.path}; while :; do sleep 1; done"
    command = launch_with((0.2, 1000.0), "sh", "-c", f"[ $RANK = 0 ] || {{ {deaf}; }}; read line < {gate}; exit 3")
    bell.hear(1)
    os.close(os.open(gate, os.O_WRONLY))
    assert command.wait() == 3


@pytest.mark.parametrize(("flags", "seconds"), [({}, 10.0), ({"grace": 3}, 3.0)])
def test_the_grace_of_a_block_that_is_left(flags, seconds):
    with ir.ProcessLauncher(["sleep", "1000"], **flags) as launcher:
        launcher.launch()
        assert launcher._launch.run.options.grace_s == seconds
    assert launcher.report().exits[0].signal == signal.SIGTERM


def test_the_link_says_whether_a_signal_asked_for_the_stop():
    """The agent's own launch chooses between the two graces by the head's STOP frame."""
    from infini_run.multinode.agent.agent import Agent
    from infini_run.multinode.link.connection import from_socket
    from infini_run.multinode.link.protocol import STOP, pack_json

    asked = []

    class Run(NodeLaunch):
        def __init__(self):
            pass

        def stop(self, number=0, *, by_signal=False):
            asked.append((number, by_signal))

    ours, theirs = socket.socketpair()
    head, agent = from_socket(ours), Agent(from_socket(theirs), 0)
    agent._orders.run = Run()
    try:
        for signal_number, by_signal in ((2, True), (0, False)):
            head.send(pack_json(STOP, {"signal": signal_number, "by_signal": by_signal, "after_s": 0}))
            agent._link.poll(LIMIT_S)
    finally:
        head.close()
        agent._link.connection.close()
        agent._poller.close()
    assert asked == [(2, True), (0, False)]


@WITH_CORE
@pytest.mark.parametrize(
    ("grace", "is_told", "ago", "most", "least"),
    [
        (25_000, 1, 25_000, 2000, 2000),
        (25_000, 1, 5_000, 20_000, 15_000),  # 5 s for this program to come so far
        (1_000, 1, 1_000, 1000, 1000),
        (10_000, 0, 0, 10_000, 10_000),
    ],
    ids=["used up", "a part", "short", "a failure"],
)
def test_strays_have_what_is_left_of_the_grace_of_who_was_told(grace, is_told, ago, most, least):
    """Kubernetes and Slurm kill 30 s after their signal: 25 s for ranks and 25 s for strays would be too long."""
    words = [build("grace.c", instead_of="stop_state.c"), *map(str, (grace, is_told, ago))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert least <= int(done.stdout) <= most


def test_a_signal_to_the_process_and_then_to_its_group_is_one_request(infini_run):
    """As timeout(1) sends it: ranks keep their grace."""
    script = "trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    for _ in range(4):
        command = infini_run("--nproc_per_node=2", "sh", "-c", script, start_new_session=True)
        command.read_lines(b"ready", 2)
        command.signal(signal.SIGTERM)
        os.killpg(command.pid, signal.SIGTERM)
        assert command.wait() == 0, command.err
        assert command.out.count(b"saved") == 2
