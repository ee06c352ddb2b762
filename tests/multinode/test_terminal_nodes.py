"""At a terminal with several ranks, on one node or many: what is typed reaches those that --stdin names, wherever
they run, and so does its end; in the background nothing is taken, and nothing stops. A real shell on a real pty."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess

import pytest

from tests.launch.test_terminal import PROMPT, Terminal
from tests.multinode.test_by_hand import TOKEN, port  # noqa: F401  a fixture
from tests.multinode.test_many_lost import sleepers
from tests.support.command import COMMAND
from tests.support.hosts import Bed, agents
from tests.support.processes import marked, state_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group(__name__),
    pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control"),
]
READ = ["sh", "-c", 'echo up $RANK; while read line; do echo "read $line $RANK"; done; echo over $RANK']


@pytest.fixture
def terminal():
    terminal = Terminal()
    yield terminal
    terminal.close()
    until(lambda: not agents())


@pytest.fixture(scope="module")
def bed():
    bed = Bed(hosts=2)
    yield bed
    bed.close()


@pytest.fixture(params=["one", "hand", "ssh"])
def start(request, bed, port, infini_run, terminal):  # noqa: F811
    """Start two ranks, on one node or on two, the head in the terminal's shell."""

    def on_one(*words, end="\n"):
        terminal.run("--nproc_per_node=2", *words, end=end)

    def by_hand(*words, end="\n"):
        flags = [f"--rdzv_endpoint=127.0.0.1:{port}", "--nnodes=2", *words]
        env = {**os.environ, "INFINI_RUN_TOKEN": TOKEN}
        infini_run("--node_rank=1", *flags, env=env)
        terminal.type(f"INFINI_RUN_TOKEN={TOKEN} {shlex.join([*COMMAND, *flags])}{end}")

    def by_ssh(*words, end="\n"):
        terminal.run("--hosts=host[1-2]", f"--ssh_config={bed.config}", *words, end=end)

    return {"one": on_one, "hand": by_hand, "ssh": by_ssh}[request.param]


@pytest.mark.parametrize(
    ("flag", "readers"), [("rank0", {b"0"}), ("1", {b"1"}), ("all", {b"0", b"1"}), ("none", set())]
)
def test_what_is_typed_reaches_its_readers_and_its_end_does(start, terminal, flag, readers):
    start(f"--stdin={flag}", *READ)
    terminal.see(rb"up \d", 2)
    for word in ("one", "two") if readers else ():
        terminal.type(f"{word}\n")
        assert set(terminal.see(rb"read %s (\d)\r" % word.encode(), len(readers))) == readers
    if readers:
        terminal.type("\x04")
    assert terminal.code() == 0
    assert sorted(set(re.findall(rb"over (\d)", terminal.seen))) == [b"0", b"1"]


def test_in_the_background_it_takes_nothing_and_does_not_stop_and_after_fg_it_reads(start, terminal):
    start(*READ, end=" &\n")
    terminal.see(rb"up \d", 2)
    launcher = terminal.launcher()
    for word in ("still", "yours"):
        terminal.type(f"echo {word}=here\n")  # a read of ours would stop us, or take it
        terminal.see(rb"%s=here\r\n" % word.encode())
    assert state_of(launcher) in "RS"
    assert b"read " not in terminal.seen
    terminal.type("fg\n")
    until(lambda: terminal.foreground == launcher)
    terminal.type("typed\n")
    assert terminal.see(rb"read typed (\d)\r") == [b"0"]
    terminal.type("\x1a")
    terminal.see(PROMPT)
    terminal.type("fg\n")
    until(lambda: terminal.foreground == launcher and state_of(launcher) == "S")
    terminal.type("again\n\x04")
    assert terminal.see(rb"read again (\d)\r") == [b"0"]
    assert terminal.code() == 0
    until(lambda: not marked())


def test_a_terminal_that_stops_writers_of_the_background_does_not_stop_the_head(start, terminal):
    terminal.type("stty tostop\n")
    start("--console=prefix", "sh", "-c", "echo up $RANK; exec sleep 1000", end=" &\n")
    terminal.see(rb"up \d", 2)
    launcher = terminal.launcher()
    assert state_of(launcher) in "RS"
    terminal.type(f"kill -TERM {launcher}; wait %1\n")
    terminal.see(rb"SIGTERM: stopping")
    assert terminal.code() == 143


def test_a_node_by_hand_that_ctrl_z_stops_keeps_its_place(port, infini_run, terminal):  # noqa: F811
    """Node 1 is in the shell, and stopped for longer than --node_timeout, twice: node 0 hears of it all the while."""
    flags = ["--nnodes=2", "--node_timeout=2", f"--rdzv_endpoint=127.0.0.1:{port}", "sleep", "1000"]
    head = infini_run("--node_rank=0", *flags, env={**os.environ, "INFINI_RUN_TOKEN": TOKEN})
    terminal.type(f"INFINI_RUN_TOKEN={TOKEN} {shlex.join([*COMMAND, '--node_rank=1', *flags])}\n")
    until(lambda: len(sleepers()) == 2)
    launcher = terminal.launcher()
    for _ in range(2):
        terminal.type("\x1a")
        until(lambda: state_of(launcher) == "T")
        until(lambda: sorted(state_of(pid) for pid in sleepers()) == ["S", "T"])
        subprocess.run(["sleep", "3"], check=True)
        assert head.process.poll() is None
        terminal.type("fg\n")
        until(lambda: [state_of(pid) for pid in (launcher, *sleepers())] == ["S"] * 3)
    terminal.type("\x03")
    assert head.wait() == 130, head.err
    assert b"lost node" not in head.err
    until(lambda: not marked())


@pytest.mark.parametrize("key", ["\x03", "\x1c"], ids=["INT", "QUIT"])
def test_a_key_that_ends_the_job_ends_the_launcher_by_its_signal(start, terminal, key):
    start("sh", "-c", "ulimit -c 0; echo up $RANK; exec sleep 1000")
    terminal.see(rb"up \d", 2)
    launcher = terminal.launcher()
    terminal.type(key)
    assert terminal.code() == (130 if key == "\x03" else 131)
    assert state_of(launcher) == ""
    assert key == "\x03" or b"Quit\r" in terminal.seen


def test_ctrl_c_at_a_head_ends_the_loop_around_it(bed, terminal):
    words = ["--hosts=host[1-2]", f"--ssh_config={bed.config}", "sh", "-c", "echo up $RANK; exec sleep 1000"]
    loop = f"for i in 1 2 3; do {shlex.join([*COMMAND, *words])}; done; echo still here"
    terminal.type(shlex.join(["bash", "-c", loop]) + "\n")
    terminal.see(rb"up \d", 2)
    terminal.type("\x03")
    assert terminal.code() == 130
    assert b"still here" not in terminal.seen[terminal.mark :]
