"""At a terminal: who has the foreground, what Ctrl-C and Ctrl-Z do, who may read. A real shell on a real pty."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.command import COMMAND, play
from tests.support.processes import GUARD, is_alive, marked, processes, state_of
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
PROMPT = b"next> "


def is_reading(pid):
    """Whether its first thread waits in read(2)."""
    call = Path(f"/proc/{pid}/syscall").read_text().split()[0]  # of x86-64, of aarch64
    return state_of(pid) == "S" and call in ("0", "63")


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

    def answer(self, count, launcher):
        """Answer so many ranks, whichever gets the terminal first, once it reads: before, it drops what is typed."""
        others = {launcher, self.shell.pid}
        for number in range(count):
            until(lambda: self.foreground not in others and is_reading(self.foreground))
            others.add(self.foreground)
            self.type(f"secret{number}\n")
            self.see(b"heard secret%d" % number)

    @property
    def foreground(self):
        return os.tcgetpgrp(self.master)

    def launcher(self):
        """infini-run, the shell's only child."""
        (pid,) = [pid for pid, (parent, _, _) in processes().items() if parent == self.shell.pid]
        return pid

    def turn_echo_on(self):
        """As a person has it, so that a question for a password changes the modes."""
        self.type("stty echo\n")
        self.see(PROMPT)

    def launcher_in_pipeline(self):
        """infini-run, beside another child of the shell's."""
        (pid,) = [pid for pid, (parent, _, name) in processes().items() if parent == self.shell.pid and name != "cat"]
        return pid

    def close(self):
        for pid, (parent, _, _) in processes().items():
            if parent == self.shell.pid:
                with contextlib.suppress(ProcessLookupError):  # the shell has reaped it
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


# ---- a rank that asks for the terminal

PASSWORD = """
import getpass, os, sys
for _ in range({times}):
    said = getpass.getpass("rank " + os.environ["RANK"] + "? ")
    print("rank", os.environ["RANK"], "heard", said, flush=True)
"""
READ_TWO_LINES = (
    'import os\nfor _ in range(2): print("read", open("/dev/tty").readline().strip(), os.environ["RANK"], flush=True)'
)


@pytest.mark.parametrize("times", [1, 2])
def test_every_rank_that_asks_for_a_password_gets_one(terminal, times, every_path):
    terminal.turn_echo_on()
    terminal.run("--nproc_per_node=3", sys.executable, "-c", PASSWORD.format(times=times))
    for number in range(3 * times):
        (rank,) = terminal.see(rb"rank (\d)\? $")
        terminal.type(f"secret{number}\n")
        terminal.see(b"rank %s heard secret%d" % (rank, number))
    assert terminal.code() == 0
    assert terminal.foreground == terminal.shell.pid


def test_the_rank_that_asks_is_named_above_its_question(terminal):
    terminal.turn_echo_on()
    terminal.run("--nproc_per_node=2", "--console=prefix", sys.executable, "-c", PASSWORD.format(times=1))
    (rank,) = terminal.see(rb"rank (\d) asks for the terminal: your next line goes to it\r\nrank \1\? $")
    terminal.type("first\n")
    (other,) = terminal.see(rb"rank (\d)\? $")
    terminal.type("second\n")
    assert terminal.code() == 0
    assert {rank, other} == {b"0", b"1"}


def test_ctrl_c_at_the_question_of_a_rank_ends_all(terminal, every_path):
    terminal.turn_echo_on()
    terminal.run("--nproc_per_node=2", sys.executable, "-c", PASSWORD.format(times=1))
    terminal.see(rb"rank \d\? $")
    until(lambda: state_of(terminal.foreground) == "S")  # a signal between the prompt and the read is lost in Python
    terminal.type("\x03")
    assert terminal.code() == 130
    assert terminal.foreground == terminal.shell.pid


def test_ctrl_c_reaches_every_rank_again_once_the_question_is_answered(terminal, every_path):
    asks = f"{PASSWORD.format(times=1)}\nimport signal; print('waits', flush=True); signal.pause()"
    words = ["sh", "-c", '[ $RANK = 1 ] && exec "$@"; echo waits; exec sleep 1000', "sh", sys.executable, "-c", asks]
    terminal.run("--nproc_per_node=2", *words)
    terminal.see(rb"rank 1\? $")
    terminal.type("secret\n")
    terminal.see(rb"heard secret")
    until(lambda: terminal.foreground == terminal.launcher())
    terminal.type("\x03")
    terminal.see(rb"SIGINT: stopping")
    assert terminal.code() == 130


def test_a_rank_that_reads_on_gets_its_next_line_though_rank_0_reads_stdin(terminal, every_path):
    words = ["sh", "-c", '[ $RANK = 1 ] && exec "$@"; read line; echo "stdin had $line"', "sh", sys.executable, "-c"]
    terminal.run("--nproc_per_node=2", *words, READ_TWO_LINES)
    terminal.see(rb"asks for the terminal")
    for text in ("one", "two"):
        until(lambda: terminal.foreground not in (terminal.launcher(), terminal.shell.pid))
        terminal.type(f"{text}\n")
        terminal.see(b"read %s 1" % text.encode())
    terminal.type("three\n")
    terminal.see(b"stdin had three")
    assert terminal.code() == 0


def test_a_single_rank_whose_stdin_is_a_file_may_ask(terminal, every_path):
    terminal.run(sys.executable, "-c", PASSWORD.format(times=1), end=" < /dev/null\n")
    terminal.see(rb"rank 0\? $")
    terminal.type("secret\n")
    terminal.see(rb"heard secret")
    assert terminal.code() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_a_rank_of_an_isolated_job_may_ask(terminal, every_path):
    terminal.turn_echo_on()
    terminal.run("--isolate", "--nproc_per_node=2", sys.executable, "-c", PASSWORD.format(times=1))
    for number in range(2):
        (rank,) = terminal.see(rb"rank (\d)\? $")
        terminal.type(f"secret{number}\n")
        terminal.see(b"rank %s heard secret%d" % (rank, number))
    assert terminal.code() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of its own needs root")
def test_a_rank_of_an_isolated_job_without_the_terminal_as_stdin_is_named(terminal, every_path):
    asks = (sys.executable, "-c", PASSWORD.format(times=1))
    terminal.run("--isolate", "--grace=1", "--nproc_per_node=2", *asks, end=" < /dev/null\n")
    terminal.see(rb"rank \d is suspended: it cannot read the terminal here", 2)
    terminal.type("\x03")
    assert terminal.code() == 130


READ_ONCE = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("read", open("/dev/tty").readline().strip(), os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    signal.pause()
"""


def test_a_line_that_the_rank_has_read_before_us_ends_its_turn(terminal, every_path):
    terminal.run("--nproc_per_node=3", sys.executable, "-c", READ_ONCE)
    for number in range(3):
        terminal.see(rb"asks for the terminal")
        until(lambda: terminal.foreground not in (terminal.launcher(), terminal.shell.pid))
        terminal.type(f"line{number}\n")
        terminal.see(b"read line%d" % number)
    until(lambda: terminal.foreground == terminal.launcher())
    terminal.type("\x03")
    terminal.see(rb"SIGINT: stopping")
    assert terminal.code() == 130


@pytest.mark.rows(2)
def test_ranks_that_ask_at_once_leave_the_echo_on(terminal, every_path):
    """Each looks at the modes before it stops: while another one has the echo off."""
    terminal.type("stty echo\n")
    terminal.see(PROMPT)
    before = termios.tcgetattr(terminal.master)
    assert before[3] & termios.ECHO
    asks = f"import termios; tty = open('/dev/tty'); was = termios.tcgetattr(tty){PASSWORD.format(times=1)}"
    restores = "was[3] &= ~termios.ECHO; termios.tcsetattr(tty, termios.TCSANOW, was)"
    terminal.run("--nproc_per_node=2", sys.executable, "-c", f"{asks}{restores}; import time; time.sleep(1.5)")
    for number in range(2):
        terminal.see(rb"rank \d\? $")
        terminal.type(f"secret{number}\n")
        terminal.see(b"heard secret%d" % number)
    assert terminal.code() == 0
    assert termios.tcgetattr(terminal.master) == before


def test_ranks_may_ask_though_who_started_us_ignores_their_stop(terminal, every_path):
    terminal.turn_echo_on()
    terminal.type("trap '' TTIN TTOU\n")
    terminal.see(PROMPT)
    terminal.run("--nproc_per_node=2", sys.executable, "-c", PASSWORD.format(times=1))
    for number in range(2):
        terminal.see(rb"rank \d\? $")
        terminal.type(f"secret{number}\n")
        terminal.see(b"heard secret%d" % number)
    assert terminal.code() == 0


def test_a_read_that_ends_without_a_line_ends_the_turn(terminal, every_path):
    reads = "timeout --foreground 1 head -1 /dev/tty; echo over; exec sleep 1000"
    terminal.run("--nproc_per_node=2", "sh", "-c", f"[ $RANK = 1 ] || exec sleep 1000; {reads}")
    terminal.see(rb"over")
    until(lambda: terminal.foreground == terminal.launcher())
    terminal.type("\x03")
    terminal.see(rb"SIGINT: stopping")
    assert terminal.code() == 130


@pytest.mark.parametrize("nproc", [1, 2])
def test_bg_and_fg_bring_a_question_to_its_answer(terminal, nproc, every_path):
    terminal.turn_echo_on()
    terminal.run(f"--nproc_per_node={nproc}", sys.executable, "-c", PASSWORD.format(times=1))
    terminal.see(rb"rank \d\? $")
    terminal.type("\x1a")
    terminal.see(PROMPT)
    for _ in range(2):
        terminal.type("bg\n")
        terminal.see(PROMPT)
        until(lambda: state_of(terminal.launcher()) == "T")
    terminal.type("fg\n")
    terminal.answer(nproc, terminal.launcher())
    assert terminal.code() == 0


def test_second_ctrl_c_kills_though_a_rank_has_the_terminal(terminal, every_path):
    asks = "import signal\nsignal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)\n" + PASSWORD.format(
        times=1
    )
    words = ["sh", "-c", '[ $RANK = 1 ] && exec "$@"; while [ ! -e $GO ]; do sleep 0.05; done; exit 3', "sh"]
    go = os.path.join(os.environ["TMPDIR"], f"go{terminal.shell.pid}")
    terminal.type(f"export GO={go}\n")
    terminal.see(PROMPT)
    terminal.run("--nproc_per_node=2", "--grace=1000", *words, sys.executable, "-c", asks)
    terminal.see(rb"rank 1\? $")
    with open(go, "w"):
        pass
    until(lambda: terminal.foreground == terminal.launcher())
    terminal.type("\x03")
    terminal.see(rb"SIGINT: stopping")
    terminal.type("\x03")
    assert terminal.code() == 3
    os.unlink(go)


def test_ctrl_z_at_a_question_stops_the_pipeline_around_it(terminal, every_path):
    terminal.turn_echo_on()
    terminal.run("--nproc_per_node=2", sys.executable, "-c", PASSWORD.format(times=1), end=" | cat\n")
    terminal.see(rb"rank \d\? $")
    terminal.type("\x1a")
    terminal.see(PROMPT)
    terminal.type("fg\n")
    terminal.answer(2, os.getpgid(terminal.launcher_in_pipeline()))
    assert terminal.code() == 0


def test_a_rank_that_once_asked_and_ends_itself_by_an_interrupt_has_failed(terminal, every_path):
    asks = PASSWORD.format(times=1) + "import signal, time; time.sleep(1); signal.raise_signal(2)"
    words = ["sh", "-c", '[ $RANK = 1 ] && exec "$@"; exec sleep 1000', "sh", sys.executable, "-c", asks]
    terminal.run("--nproc_per_node=2", *words, end="; echo still here\n")
    terminal.see(rb"rank 1\? $")
    terminal.type("secret\n")
    terminal.see(rb"rank 1 on \S+ failed")
    terminal.see(rb"still here")


def test_a_job_in_the_background_is_suspended_when_a_rank_asks_and_goes_on_with_fg(terminal, every_path):
    terminal.turn_echo_on()
    terminal.run("--nproc_per_node=2", sys.executable, "-c", PASSWORD.format(times=1), end=" &\n")
    (launcher,) = map(int, terminal.see(rb"\[1\] (\d+)\r\n"))
    until(lambda: state_of(launcher) == "T")
    terminal.type("fg\n")
    for number in range(2):
        (rank,) = terminal.see(rb"rank (\d)\? $")
        terminal.type(f"secret{number}\n")
        terminal.see(b"rank %s heard secret%d" % (rank, number))
    assert terminal.code() == 0


def test_ctrl_z_at_the_question_and_fg_ask_again(terminal, every_path):
    terminal.turn_echo_on()
    terminal.run("--nproc_per_node=2", sys.executable, "-c", PASSWORD.format(times=1))
    terminal.see(rb"rank \d\? $")
    terminal.type("\x1a")
    terminal.see(PROMPT)
    until(lambda: state_of(terminal.launcher()) == "T")
    assert terminal.foreground == terminal.shell.pid
    terminal.type("fg\n")
    until(lambda: terminal.foreground not in (terminal.launcher(), terminal.shell.pid))
    terminal.type("first\n")
    terminal.see(rb"heard first")
    terminal.see(rb"rank \d\? $")
    terminal.type("second\n")
    terminal.see(rb"heard second")
    assert terminal.code() == 0


@pytest.mark.rows(2)
def test_a_rank_that_asks_where_nobody_can_answer_is_named_and_counts_as_hung(terminal, tmp_path, every_path):
    """Who started the job in the background has gone: nobody can bring it to the foreground, nor suspend it."""
    log = tmp_path / "log"
    log.touch()
    asks = PASSWORD.format(times=1)
    words = [
        "sh",
        "-c",
        '[ $RANK = 1 ] && exec "$@"; while sleep 0.1; do echo; done',
        "sh",
        sys.executable,
        "-c",
        asks,
    ]
    flags = ["--nproc_per_node=2", "--hang_timeout=1s", "--on_hang=stop", "--console=prefix"]
    command = shlex.join([*COMMAND, *flags, *words])
    terminal.type(shlex.join(["sh", "-c", f"{command} 2> {log} &"]) + "\n")
    terminal.see(PROMPT)
    until(lambda: b"infini-run: rank 1 is suspended: it cannot read the terminal here" in log.read_bytes())
    until(lambda: b"rank 1 on " in log.read_bytes() and b": waits for the terminal (pid " in log.read_bytes())
    until(lambda: b": stopping" in log.read_bytes() and not list(marked()))


# ---- Ctrl-C in a loop of the shell


LOOPS = {
    "one rank": ["--nproc_per_node=1"],
    "ranks": ["--nproc_per_node=2"],
    "restarting": ["--nproc_per_node=2", "--max_restarts=1"],
    "isolated": pytest.param(
        ["--nproc_per_node=2", "--isolate"],
        marks=[pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")],
    ),
}


@pytest.mark.parametrize("flags", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.rows(4)
def test_ctrl_c_that_ends_a_job_ends_the_loop_around_it(terminal, flags, every_path):
    ranks = 1 if "--nproc_per_node=1" in flags else 2
    command = shlex.join([*COMMAND, *flags, "sh", "-c", "echo ready; exec sleep 1000"])
    terminal.type(shlex.join(["bash", "-c", f"for i in 1 2 3; do {command}; done; echo still here"]) + "\n")
    terminal.see(rb"ready", ranks)
    terminal.type("\x03")
    assert terminal.code() == 130
    assert b"still here" not in terminal.seen[terminal.mark :]
    assert terminal.seen.count(b"ready\r\n") == ranks


@pytest.mark.parametrize("flags", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.rows(2)
def test_ctrl_backslash_that_ends_a_job_ends_us_by_that_signal(terminal, flags, tmp_path):
    """Without a dump of core of our own."""
    terminal.type(f"ulimit -c unlimited; cd {tmp_path}\n")
    terminal.run(*flags, "sh", "-c", "ulimit -c 0; echo ready; exec sleep 1000")
    terminal.see(rb"ready", 1 if "--nproc_per_node=1" in flags else 2)
    terminal.type("\x1c")
    terminal.see(rb"Quit\r")
    assert terminal.code() == 131
    assert b"core dumped" not in terminal.seen
    assert list(tmp_path.iterdir()) == []


def test_a_loop_goes_on_when_the_ranks_take_ctrl_c_and_end_well(terminal, every_path):
    command = shlex.join([*COMMAND, "--nproc_per_node=2", *play("end=INT:0", "say=ready", "wait")])
    terminal.type(shlex.join(["bash", "-c", f"{command}; echo still here"]) + "\n")
    terminal.pids("ready", 2)
    terminal.type("\x03")
    terminal.see(rb"still here")


def test_an_interrupt_that_no_key_sent_is_an_exit_code(terminal, every_path):
    terminal.run("--nproc_per_node=2", *play("say=ready", "wait"), end="; echo still here\n")
    terminal.pids("ready", 2)
    os.kill(terminal.launcher(), signal.SIGINT)
    terminal.see(rb"still here")


# ---- the modes of the terminal


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_modes_of_a_rank_that_a_signal_ends_are_undone(terminal, nproc, every_path):
    before = termios.tcgetattr(terminal.master)
    script = "stty raw < /dev/tty; echo changed; kill -KILL $$"
    terminal.run(f"--nproc_per_node={nproc}", "sh", "-c", f"[ $RANK = {nproc - 1} ] || exec sleep 1000; {script}")
    terminal.see(rb"changed")
    assert terminal.code() == 137
    assert termios.tcgetattr(terminal.master) == before


def test_the_modes_that_a_rank_leaves_when_it_ends_by_itself_stay(terminal):
    terminal.run("sh", "-c", "stty -icanon; echo changed; exit 3")
    terminal.see(rb"changed")
    terminal.see(PROMPT)
    assert not termios.tcgetattr(terminal.master)[3] & termios.ICANON
