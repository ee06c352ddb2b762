"""Faults of output and the terminal: readers that go, stop or hang up, full disks, Ctrl-C and Ctrl-Z."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import termios

import pytest

from tests.support.command import play
from tests.support.launch_shapes import as_root
from tests.support.processes import is_alive, is_full, marked, state_of
from tests.support.waiting import LIMIT_S, until

PREFIX = "--console=prefix"


def sh(script):
    return ("sh", "-c", script)


def lines_of(output, rank):
    return [line.split(b"] ", 1)[1] for line in output.splitlines() if line.startswith(b"[rank %d]" % rank)]


# ---- the console


def test_reader_that_has_gone_is_told_once_and_the_job_goes_on(launch, gate):
    goes = gate()
    script = f"echo first; head -c1 /dev/fd/{goes}; seq 2000; echo fine >&2"
    command = launch(PREFIX, "--keep_going", *sh(f"{script}; exit 7"), gates=(goes,))
    command.read_lines(b"[rank", launch.ranks)
    command.process.stdout.close()
    command.process.stdout = None
    goes.open()
    assert command.wait() == 7
    assert command.err.count(b"the console takes no more output") == 1
    assert b"Broken pipe" in command.err
    assert command.err.count(b" err] fine\n") == launch.ranks


def test_rank_that_writes_to_a_reader_that_has_gone_dies_of_sigpipe_as_it_would_alone(launch, gate):
    """With --console=inherit it is the rank's own affair. Its SIGPIPE is not ignored, though Python ignores ours."""
    goes = gate()
    command = launch("--console=inherit", *sh(f"echo first; head -c1 /dev/fd/{goes}; exec yes"), gates=(goes,))
    command.read_lines(b"first", launch.ranks)
    command.process.stdout.close()
    command.process.stdout = None
    goes.open()
    assert command.wait() == 128 + signal.SIGPIPE
    assert b"killed by SIGPIPE" in command.err


def test_reader_that_stops_and_goes_on_loses_nothing_and_signals_work_meanwhile(launch, tmp_path):
    script = f"trap ': > {tmp_path}/'$RANK USR1; seq 20000; while ! test -e {tmp_path}/$RANK; do sleep 0.01; done"
    command = launch(PREFIX, *sh(script))
    until(lambda: is_full(command.process.stdout))
    command.signal(signal.SIGWINCH)
    assert is_full(command.process.stdout)
    taken = b""
    while taken.count(b" 20000\n") < launch.ranks:
        taken += os.read(command.process.stdout.fileno(), 65536)
    command.signal(signal.SIGUSR1)
    assert command.wait() == 0
    for rank in range(launch.ranks):
        assert lines_of(taken + command.out, rank) == [b"%d" % n for n in range(1, 20001)]


def test_term_ends_a_job_whose_output_nobody_reads(launch):
    command = launch(PREFIX, "--grace=1000", "yes")
    until(lambda: is_full(command.process.stdout))
    command.signal(signal.SIGTERM)
    assert command.process.wait(LIMIT_S) == 143
    assert is_full(command.process.stdout)


def test_job_that_ignores_term_and_fills_a_stderr_that_nobody_reads_is_killed(launch):
    """Without labels the ranks write themselves, and what we have to say finds no room."""
    command = launch("--grace=0.2", *sh("trap '' TERM; while :; do echo yes >&2; done"))
    until(lambda: is_full(command.process.stderr))
    command.signal(signal.SIGTERM)
    assert command.process.wait(LIMIT_S) == 143


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_full_device_as_console_is_no_end_of_the_job_and_the_logs_have_everything(launch, tmp_path, stream):
    words = ("--keep_going", f"--log_dir={tmp_path}", *sh("echo out; echo err >&2; exit 9"))
    with open("/dev/full", "wb") as full:
        command = launch(PREFIX, *words, **{stream: full})
        assert command.wait() == 9
    for rank in range(launch.ranks):
        assert sorted((tmp_path / f"rank_{rank}.log").read_text().splitlines()) == ["err: err", "out"]
    if stream == "stdout":
        assert command.err.count(b"No space left") == 1
        assert command.err.count(b" err] err\n") == launch.ranks
    else:
        assert command.out.count(b"] out\n") == launch.ranks


def test_closed_console_is_no_end_of_the_job_and_the_logs_have_everything(launch, tmp_path):
    under = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    command = launch(PREFIX, f"--log_dir={tmp_path}", *sh("echo out; echo err >&2; exit 6"), under=under)
    assert command.wait() == 6
    done = [(tmp_path / f"rank_{rank}.log").read_text() for rank in range(launch.ranks)]
    assert any(sorted(text.splitlines()) == ["err: err", "out"] for text in done)


@as_root
def test_full_disk_is_told_once_for_each_log_and_the_job_goes_on(launch, tmp_path):
    """A tmpfs of 64 KiB in a mount namespace of its own."""
    mount = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=64k none {tmp_path} && exec "$@"', "sh")
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    script = "i=0; while [ $i -lt 100 ]; do printf '%01000d\\n' $i; i=$((i+1)); done; echo end"
    command = launch("--keep_going", PREFIX, f"--log_dir={tmp_path}", *sh(f"{script}; exit 5"), under=mount)
    assert command.wait() == 5
    assert 1 <= command.err.count(b"cannot be written (No space left on device)") <= launch.ranks
    assert command.out.count(b"] end\n") == launch.ranks
    assert command.out.count(b"\n") == 101 * launch.ranks


# ---- who holds a pipe


def test_rank_that_closes_its_stdout_and_stderr_lives_on(launch, gate):
    goes = gate()
    words = f"echo out; exec >&- 2>&-; head -c1 /dev/fd/{goes}; exit 6"
    command = launch(PREFIX, *sh(words), gates=(goes,))
    command.read_lines(b"[rank", launch.ranks)
    until(lambda: state_of(command.pid) == "S")
    command.signal(signal.SIGWINCH)
    assert command.process.poll() is None
    goes.open()
    assert command.wait() == 6


@pytest.mark.parametrize("console", ["prefix", "none"])
def test_grandchild_that_keeps_the_pipe_does_not_hold_us_and_is_ended(launch, tmp_path, console):
    words = play("daemon", "ignore=TERM", "name=left-behind", "say=stray", "wait", "done", "say=done", "exit=0")
    command = launch(f"--console={console}", "--grace=0.2", f"--log_dir={tmp_path}", *words)
    assert command.wait() == 0
    assert b"left behind: left-behind (" in command.err
    for rank in range(launch.ranks):
        assert (tmp_path / f"rank_{rank}.log").read_text().splitlines()[-1].startswith("done ")
    assert not marked()


@as_root
def test_process_that_is_not_ours_to_end_and_keeps_the_pipe_is_told_and_let_go(launch):
    """It came by the rank's /proc/PID/fd, from outside the launch."""
    command = launch(PREFIX, *play("end=TERM:0", "say=ready", "wait"))
    command.read_lines(b"[rank", launch.ranks)
    told = {int(line.split()[-2]): int(line.split()[-1]) for line in command.out.decode().splitlines()}
    (pid,) = command.seen_here(told[0])
    with contextlib.closing(os.fdopen(os.open(f"/proc/{pid}/fd/1", os.O_WRONLY), "wb")):
        assert command.stop() == 0
    assert (
        b"stdout of rank 0 is still open in a process that infini-run may not end; not read any more" in command.err
    )


# ---- the terminal


class Session:
    """A launch on a terminal of its own; it, or the unshare before it, leads the session, as in a container."""

    def __init__(self, launch, *words):
        self.master, slave = os.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO  # so that what is seen was said
        attributes[3] |= termios.NOFLSH  # a key is looked at later than it is typed, and would take said things away
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        own = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.command = launch(*words, preexec_fn=self._take_terminal, **own)
        os.close(slave)
        self.seen = b""

    @staticmethod
    def _take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text):
        os.write(self.master, text.encode())

    def see(self, text, count):
        while self.seen.count(text) < count:
            assert select.select([self.master], [], [], LIMIT_S)[0], f"{text!r} never came: {self.seen!r}"
            self.seen += os.read(self.master, 65536)

    def close(self):
        if self.master >= 0:
            os.close(self.master)
        self.master = -1

    def wait(self):
        """Its exit code as a shell has it. Reads on, so that nobody waits for the terminal."""
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while select.select([self.master], [], [], LIMIT_S)[0]:
                self.seen += os.read(self.master, 65536)
        code = self.command.process.wait(LIMIT_S)
        return code if code >= 0 else 128 - code


@pytest.fixture
def session(launch):
    sessions = []

    def start(*words):
        sessions.append(Session(launch, *words))
        return sessions[-1]

    yield start
    for one in sessions:
        one.close()


def test_ctrl_c_reaches_every_rank_exactly_once(launch, session):
    one = session(*play("tell=INT", "end=USR1:0", "say=ready", "wait"))
    one.see(b"ready", launch.ranks)
    one.type("\x03")
    one.see(b"got INT", launch.ranks)
    one.command.signal(signal.SIGUSR1)
    assert one.wait() == 0  # to a lone rank it is its own affair, as without us
    assert one.seen.count(b"got INT") == launch.ranks


def test_second_ctrl_c_kills(launch, session):
    if launch.ranks == 1:
        pytest.skip("a lone rank has the terminal: Ctrl-C is between the two, as without us")
    one = session("--grace=1000", *play("tell=INT", "say=ready", "wait"))
    one.see(b"ready", launch.ranks)
    one.type("\x03")
    one.see(b"got INT", launch.ranks)
    one.type("\x03")
    assert one.wait() == 130


def test_ctrl_z_where_nobody_could_continue_us_stops_nothing(launch, session):
    """The kernel drops it for a process group without a shell above it, and for process 1."""
    one = session(*play("tell=USR1", "end=TERM:0", "say=ready", "wait"))
    one.see(b"ready", launch.ranks)
    one.type("\x1a")
    one.command.signal(signal.SIGUSR1)
    one.see(b"got USR1", launch.ranks)
    one.command.signal(signal.SIGTERM)
    assert one.wait() == 0


def test_tstp_and_cont_by_hand_are_no_end_of_the_job(launch):
    command = launch(*play("tell=USR1", "end=TERM:0", "say=ready", "wait"))
    command.pids_of(b"ready", launch.ranks)
    for _ in range(3):
        command.signal(signal.SIGTSTP)
        command.signal(signal.SIGCONT)
    command.signal(signal.SIGUSR1)
    command.pids_of(b"got USR1", launch.ranks)
    assert command.stop() == 0


def test_terminal_that_hangs_up_ends_launcher_and_ranks(launch, session):
    one = session(*play("say=ready", "wait"))
    one.see(b"ready", launch.ranks)
    one.close()
    assert one.command.process.wait(LIMIT_S) != 0
    until(lambda: not marked() and not is_alive(one.command.pid))
