"""Nothing that a reader of the launcher's output does, or does not do, delays a stop."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tty

import pytest

from infini_run.core.nonblocking_writer import NonblockingWriter, write_all
from tests.support.cluster import free_ports
from tests.support.waiting import LIMIT_S, until

# Another user's pipe or terminal cannot be opened anew, also by a root without this capability.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")
STRANGER = 65534
SOON_S = 15  # the reader has a second, and a write that blocks had no end
FLOOD = ("sh", "-c", "while :; do echo output; echo error >&2; done")


class Reader:
    """What stands where output goes, and does not read: a socket, pipe or terminal. theirs: the launcher's end."""

    def __init__(self, kind):
        self.kind = kind
        self.under = ()
        if kind == "socket":
            ours, theirs = socket.socketpair()
            self.ours, self.theirs = ours.detach(), theirs.detach()
            return
        self.ours, self.theirs = os.openpty() if kind == "terminal" else os.pipe()
        if kind == "terminal":
            tty.setraw(self.theirs)
        if os.geteuid() == 0:
            if not shutil.which("setpriv"):
                pytest.skip("no setpriv here (util-linux)")
            os.fchown(self.theirs, STRANGER, STRANGER)
            self.under = UNPRIVILEGED
        os.fchmod(self.theirs, 0 if os.geteuid() else 0o600)

    def is_full(self):
        return not select.select([], [self.theirs], [], 0)[1]

    def read(self):
        return os.read(self.ours, 1 << 16)

    def close(self):
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture(params=["socket", "pipe", "terminal"])
def reader(request):
    one = Reader(request.param)
    yield one
    one.close()


def stdio(reader):
    return {"stdin": reader.theirs, "stdout": reader.theirs, "stderr": reader.theirs, "start_new_session": True}


def test_one_node_is_stopped_though_nobody_reads(infini_run, reader, tmp_path):
    report = tmp_path / "report.json"
    flags = ("--nproc_per_node=2", "--console=lines", "--stdin=none", f"--report={report}")
    command = infini_run(*flags, *FLOOD, under=reader.under, **stdio(reader))
    until(reader.is_full)
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(SOON_S) == 143
    assert json.loads(report.read_text())["received_signal"] == "SIGTERM"


def test_many_nodes_are_stopped_though_nobody_reads(infini_run, reader, tmp_path):
    report = tmp_path / "report.json"
    port = free_ports(2)
    env = {**os.environ, "INFINI_RUN_TOKEN": "a-secret-that-nobody-guesses"}
    flags = ("--nnodes=2", f"--rdzv_endpoint=127.0.0.1:{port}", "--stdin=none")
    head = infini_run(*flags, f"--report={report}", *FLOOD, env={**env}, under=reader.under, **stdio(reader))
    other = infini_run("--node_rank=1", *flags, *FLOOD, env=env)
    until(reader.is_full)
    head.process.send_signal(signal.SIGTERM)
    assert head.process.wait(SOON_S) == 143
    assert other.wait() == 143
    assert json.loads(report.read_text())["received_signal"] == "SIGTERM"


def test_a_report_that_nobody_reads_ends_with_a_signal(infini_run):
    """The rank has filled stderr and failed; nothing is left but to say so."""
    reader = Reader("socket")
    fill = (
        "import os, socket\n"
        "ours = socket.socket(fileno=2)\n"
        "try:\n"
        "    while True: ours.send(b'x' * 1000, socket.MSG_DONTWAIT)\n"
        "except BlockingIOError:\n"
        "    os._exit(3)\n"
    )
    command = infini_run(sys.executable, "-ISc", fill, stderr=reader.theirs)
    until(lambda: reader.is_full() and not children_of(command.process.pid))
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(LIMIT_S) == 3
    reader.close()


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return file.read().split()


def test_a_reader_that_is_slow_gets_everything(infini_run, reader):
    """Also through the thread that writes where it may block."""
    command = infini_run("--nproc_per_node=2", "--console=prefix", "seq", 20000, under=reader.under, **stdio(reader))
    seen = b""
    while seen.count(b"\n") < 40000:
        seen += reader.read()
    assert command.process.wait(LIMIT_S) == 0
    seen = re.sub(rb"\033\[\d+m", b"", seen)  # on a terminal, labels have a color
    assert seen.splitlines().count(b"[rank 0] 20000") == 1
    for rank in (b"0", b"1"):
        numbers = [line.split()[2] for line in seen.splitlines() if line.startswith(b"[rank " + rank)]
        assert numbers == [b"%d" % n for n in range(1, 20001)]


# ---- in the hands of a host program


def test_an_outlet_keeps_what_finds_no_room_and_says_when_all_is_taken():
    ours, theirs = socket.socketpair()
    outlet = NonblockingWriter(theirs.fileno())
    outlet.write(b"x" * (1 << 20))
    assert outlet.waiting > 0
    assert not outlet.finish()
    assert theirs.getblocking()
    taken = 0
    while not outlet.finish():
        taken += len(ours.recv(1 << 16))
    outlet.close()
    theirs.close()
    while piece := ours.recv(1 << 16):
        taken += len(piece)
    assert taken == 1 << 20
    ours.close()


def test_writing_all_ends_with_a_descriptor_that_can_be_read():
    ours, theirs = socket.socketpair()
    stop = os.eventfd(1)
    assert write_all(theirs.fileno(), b"x" * (1 << 20), None, lambda: stop) is None
    os.close(stop)
    ours.close()
    theirs.close()


def test_a_reader_that_has_gone_is_a_problem_and_no_signal():
    """SIGPIPE would end a host program that has it at its default."""
    code = (
        "import os, signal, socket\n"
        "from infini_run.core.nonblocking_writer import write_all\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "ours, theirs = socket.socketpair()\n"
        "ours.close()\n"
        "assert isinstance(write_all(theirs.fileno(), b'x', None), BrokenPipeError)\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "assert isinstance(write_all(writer, b'x', None), BrokenPipeError)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S)
    assert done.returncode == 0


AGENT = """
import os, select, signal, socket, sys
from infini_run.multinode.agent.agent import Agent
from infini_run.multinode.link.protocol import ERR
from infini_run.multinode.agent.rank_stdio import RankStdio
from infini_run.multinode.link.connection import Connection

ours, theirs = socket.socketpair()
agent = Agent(Connection(theirs.fileno(), theirs.fileno()), 0)
stdio = RankStdio(agent._link.connection, agent._poller, with_input=False)
signal.alarm(20)

def carry():
    stdio._forward(stdio.err_fd, ERR)

def heard():
    head, seen = Connection(ours.fileno(), ours.fileno()), b""
    while select.select([ours], [], [], 0)[0]:
        seen += b"".join(payload for _, payload in head.read())
    return seen

"""


def agent_that(code):
    """What the head hears on stderr of an agent that does so; its fd 2 is the ranks' pipe, which it reads itself."""
    done = subprocess.run(
        [sys.executable, "-c", AGENT + code + "\nos.write(stdio.own_stderr, heard())"],
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_agent_is_not_held_by_the_pipe_that_it_reads_itself():
    full = "os.set_blocking(2, False)\ntry:\n    while True: os.write(2, b'x' * 63 + b'\\n')\n"
    full += "except BlockingIOError: os.set_blocking(2, True)\n"
    seen = agent_that(full + "stdio.print_line('infini-run: here')\nstdio.drain()")
    assert seen.startswith(b"infini-run: here\nx")
    assert {len(line) for line in seen.splitlines()[1:]} == {63}


def test_a_line_of_an_agent_does_not_stand_in_a_line_of_a_rank():
    halves = "os.write(2, b'one ')\ncarry()\nstdio.print_line('infini-run: here')\n"
    halves += "os.write(2, b'line\\nnext\\nand ')\ncarry()\n"
    assert agent_that(halves) == b"one line\ninfini-run: here\nnext\nand "
    rest = "stdio.print_line('infini-run: there')\nstdio.drain()"
    assert agent_that(halves + rest) == b"one line\ninfini-run: here\nnext\nand \ninfini-run: there\n"
