"""At a terminal: who has the foreground, what Ctrl-C and Ctrl-Z do, who may read. A real shell on a real pty."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import termios

import pytest

from tests.support.command import COMMAND, play
from tests.support.processes import GUARD, is_alive, marked, processes, state_of
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
PROMPT = b"next> "


class Terminal:
    """An interactive shell on a pty; `type` is the keyboard, what appears on the screen is in `seen`."""

    def __init__(self):
        self.master, slave = os.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO  # so that what is seen was said
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "PS1": PROMPT.decode(), "HISTFILE": "/dev/null", "TERM": "dumb"},
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
        os.close(slave)
        self.seen = b""
        self.mark = 0
        self.see(PROMPT)

    def type(self, text):
        self.mark = len(self.seen)
        os.write(self.master, text.encode())

    def run(self, *words, end="\n"):
        self.type(shlex.join([*COMMAND, *map(str, words)]) + end)

    def see(self, pattern, count=1):
        """Read on until it was seen so often since the last key; all that matches."""
        while len(found := re.findall(pattern, self.seen[self.mark :])) < count:
            ready, _, _ = select.select([self.master], [], [], LIMIT_S)
            assert ready, f"{pattern!r} never came: {self.seen!r}"
            self.seen += os.read(self.master, 65536)
        return found

    def pids(self, text, count=1):
        found = self.see(text.encode() + rb" -?\d+ (\d+)\r\n", count)
        return [int(pid) for pid in found]

    def code(self):
        """The exit code of the shell's last command."""
        self.see(PROMPT)
        self.type("echo code=$?\n")
        return int(self.see(rb"code=(\d+)\r\n")[0])

    @property
    def foreground(self):
        return os.tcgetpgrp(self.master)

    def launcher(self):
        """infini-run, the shell's only child."""
        (pid,) = [pid for pid, (parent, _, _) in processes().items() if parent == self.shell.pid]
        return pid

    def close(self):
        for pid, (parent, _, _) in processes().items():
            if parent == self.shell.pid:
                os.kill(pid, signal.SIGKILL)
        self.shell.kill()
        self.shell.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_ctrl_c_reaches_every_rank_exactly_once(terminal, every_path):
    terminal.run("--nproc_per_node=3", *play("tell=INT", "end=USR1:0", "say=ready", "wait"))
    pids = terminal.pids("ready", 3)
    terminal.type("\x03")
    assert sorted(terminal.pids("got INT", 3)) == sorted(pids)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert terminal.code() == 0
    assert terminal.seen.count(b"got INT") == 3
    assert terminal.foreground == terminal.shell.pid


def test_ctrl_c_ends_several_ranks(terminal, every_path):
    terminal.run("--nproc_per_node=3", *play("say=ready", "wait"))
    pids = terminal.pids("ready", 3)
    terminal.type("\x03")
    assert terminal.code() == 130
    assert not any(map(is_alive, pids))


def test_second_ctrl_c_kills(terminal, every_path):
    terminal.run("--nproc_per_node=2", "--grace=1000", *play("tell=INT", "say=ready", "wait"))
    terminal.pids("ready", 2)
    terminal.type("\x03")
    terminal.pids("got INT", 2)
    terminal.type("\x03")
    assert terminal.code() == 130


def test_ctrl_c_reaches_a_lone_rank_exactly_once(terminal, every_path):
    terminal.run(*play("tell=INT", "end=USR1:0", "say=ready", "wait"))
    (pid,) = terminal.pids("ready")
    terminal.type("\x03")
    terminal.pids("got INT")
    os.kill(pid, signal.SIGUSR1)
    assert terminal.code() == 0  # it is the rank's own affair, as it is without us
    assert terminal.seen.count(b"got INT") == 1


def test_ctrl_backslash_ends_all(terminal):
    terminal.run("--nproc_per_node=2", *play("end=QUIT:0", "say=ready", "wait"))
    terminal.pids("ready", 2)
    terminal.type("\x1c")
    assert terminal.code() == 0


def test_lone_rank_has_the_foreground_and_reads_the_terminal(terminal, every_path):
    terminal.run(*play("ask=foreground", "say=ready", "read", "exit=5"))
    (pid,) = terminal.pids("ready")
    assert terminal.see(rb"foreground (\w+)") == [b"True"]
    assert terminal.foreground == pid
    terminal.type("typed\n")
    terminal.pids("read typed")
    assert terminal.code() == 5
    assert terminal.foreground == terminal.shell.pid


def test_terminal_is_the_shells_again_after_a_rank_was_killed(terminal, every_path):
    terminal.run(*play("say=ready", "wait"))
    (pid,) = terminal.pids("ready")
    os.kill(pid, signal.SIGKILL)
    assert terminal.code() == 137
    assert terminal.foreground == terminal.shell.pid


@pytest.mark.parametrize("flag", ["--stdin=rank0", "--stdin=1", "--stdin=all"])
@pytest.mark.rows(4)
def test_several_ranks_read_what_is_typed(terminal, flag, every_path):
    flag = flag.replace("rank0", "0")
    terminal.run("--nproc_per_node=2", flag, *play("say=ready", "read"))
    terminal.pids("ready", 2)
    terminal.type("typed\n")
    terminal.see(rb"read typed", 2 if flag == "--stdin=all" else 1)
    assert terminal.code() == 0
    told = re.findall(rb"read (\w*) (\d)", terminal.seen)  # who does not read the terminal reads an end of file
    assert len(told) == 2
    expected = {"--stdin=0": {b"0"}, "--stdin=1": {b"1"}, "--stdin=all": {b"0", b"1"}}[flag]
    assert {rank for word, rank in told if word == b"typed"} == expected


@pytest.mark.parametrize("nproc", [1, 3])
@pytest.mark.rows(3)
def test_ctrl_z_stops_ranks_and_us_and_fg_continues_all(terminal, nproc, every_path):
    words = play("tell=USR1", "end=USR2:0", "say=ready", "wait")
    terminal.run(f"--nproc_per_node={nproc}", *words)
    pids = terminal.pids("ready", nproc)
    launcher = terminal.launcher()
    for _ in range(2):
        terminal.type("\x1a")
        terminal.see(PROMPT)
        until(lambda: all(state_of(pid) == "T" for pid in (launcher, *pids)))
        assert terminal.foreground == terminal.shell.pid
        terminal.type("fg\n")
        until(lambda: all(state_of(pid) == "S" for pid in (launcher, *pids)))
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        terminal.pids("got USR1", nproc)
    assert terminal.foreground == (pids[0] if nproc == 1 else launcher)
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    assert terminal.code() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
@pytest.mark.parametrize("nproc", [1, 3])
@pytest.mark.rows(3)
def test_ctrl_z_stops_an_isolated_job_and_fg_continues_it(terminal, nproc, every_path):
    """From inside nobody can stop process 1: it asks its launcher."""
    terminal.run("--isolate", f"--nproc_per_node={nproc}", *play("tell=USR1", "end=USR2:0", "say=ready", "wait"))
    terminal.pids("ready", nproc)
    ranks, launcher = list(marked()), terminal.launcher()
    (inner,) = [pid for pid, (parent, _, name) in processes().items() if parent == launcher and name != GUARD]
    for _ in range(3):
        terminal.type("\x1a")
        terminal.see(PROMPT)
        until(lambda: all(state_of(pid) == "T" for pid in (launcher, inner, *ranks)))
        assert terminal.foreground == terminal.shell.pid
        terminal.type("fg\n")
        until(lambda: all(state_of(pid) == "S" for pid in (launcher, inner, *ranks)))
        until(lambda: terminal.foreground == (ranks[0] if nproc == 1 else inner))
        for pid in ranks:
            os.kill(pid, signal.SIGUSR1)
        terminal.pids("got USR1", nproc)
    terminal.type("\x1a")
    terminal.see(PROMPT)
    terminal.type("bg\n")
    until(lambda: all(state_of(pid) == "S" for pid in (launcher, inner, *ranks)))
    assert terminal.foreground == terminal.shell.pid
    for pid in ranks:
        os.kill(pid, signal.SIGUSR2)
    until(lambda: state_of(launcher) == "")


@pytest.mark.parametrize(
    "flag",
    [
        "--noisolate",
        pytest.param(
            "--isolate",
            marks=[pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")],
        ),
    ],
)
@pytest.mark.rows(3)
def test_a_stop_that_comes_as_a_signal_stops_all_without_a_terminal_too(terminal, flag, every_path):
    words = play("tell=USR1", "end=USR2:0", "say=ready", "wait")
    terminal.run(flag, "--nproc_per_node=2", *words, end=" < /dev/null &\n")
    terminal.pids("ready", 2)
    ranks, launcher = list(marked()), terminal.launcher()
    for _ in range(2):
        terminal.type("kill -TSTP %1\n")
        until(lambda: all(state_of(pid) == "T" for pid in (launcher, *ranks)))
        terminal.type("kill -CONT %1\n")
        until(lambda: all(state_of(pid) == "S" for pid in (launcher, *ranks)))
    for pid in ranks:
        os.kill(pid, signal.SIGUSR2)
    until(lambda: state_of(launcher) == "")


@pytest.mark.parametrize("nproc", [1, 3])
@pytest.mark.rows(3)
def test_ctrl_z_and_bg_lets_all_go_on_in_the_background(terminal, nproc, every_path):
    terminal.run(f"--nproc_per_node={nproc}", *play("tell=USR1", "end=USR2:0", "say=ready", "wait"))
    pids = terminal.pids("ready", nproc)
    launcher = terminal.launcher()
    terminal.type("\x1a")
    terminal.see(PROMPT)
    terminal.type("bg\n")
    until(lambda: all(state_of(pid) == "S" for pid in (launcher, *pids)))
    assert terminal.foreground == terminal.shell.pid
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    until(lambda: state_of(launcher) == "")
    assert terminal.foreground == terminal.shell.pid


def test_started_in_the_background_it_takes_nothing(terminal, every_path):
    terminal.run(*play("end=TERM:0", "say=ready", "wait"), end=" &\n")
    (pid,) = terminal.pids("ready")
    assert terminal.foreground == terminal.shell.pid
    terminal.type("echo still=here\n")
    terminal.see(rb"still=here\r\n")
    terminal.type("kill %1; wait %1\n")
    assert terminal.code() == 0
    assert not is_alive(pid)


def test_rank_that_reads_in_the_background_stops_until_fg(terminal):
    terminal.run(*play("say=ready", "read", "exit=5"), end=" &\n")
    (pid,) = terminal.pids("ready")
    until(lambda: state_of(pid) == "T")
    until(lambda: state_of(terminal.launcher()) == "T")
    terminal.type("fg\n")
    until(lambda: terminal.foreground == pid)
    terminal.type("typed\n")
    terminal.pids("read typed")
    assert terminal.code() == 5


def test_term_while_stopped_ends_all(terminal, every_path):
    terminal.run("--nproc_per_node=2", *play("end=TERM:0", "say=ready", "wait"))
    terminal.pids("ready", 2)
    launcher = terminal.launcher()
    terminal.type("\x1a")
    terminal.see(PROMPT)
    terminal.type(f"kill -TERM {launcher}; fg\n")
    terminal.pids("got TERM", 2)
    assert terminal.code() == 0


def test_terminal_that_hangs_up_leaves_no_rank(terminal, every_path):
    terminal.run("--nproc_per_node=2", *play("say=ready", "wait"))
    pids = terminal.pids("ready", 2)
    launcher = terminal.launcher()
    os.kill(terminal.shell.pid, signal.SIGKILL)  # the session's leader: the kernel hangs up for it
    until(lambda: not any(map(is_alive, [launcher, *pids])))
