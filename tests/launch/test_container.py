"""In a container, as examples/Dockerfile has it: its ENTRYPOINT is process 1 on a root of its own.

What a container runtime does is done here by unshare(1) and mount(8): PID, mount, UTS and IPC namespaces, a
read-only root that holds only what is bound into it, a /proc, a /dev and a /dev/pts of its own, a user
without a name, three variables of environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.command import Command, play
from tests.support.paths import ROOT
from tests.support.processes import OURS, marked, processes
from tests.support.waiting import LIMIT_S, until

SCRIPTS = Path(sys.executable).parent
UNSHARE = ("unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--kill-child", "--propagation=private")
STRAY = ["daemon", "ignore=TERM", "name=left-behind", "say=stray", "wait", "done"]
PROMPT = b"next> "
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a container needs root"),
    pytest.mark.skipif("TEST_PYTHON" in os.environ, reason="a sanitizer's libraries are not in the container"),
    pytest.mark.skipif(
        not (SCRIPTS / "infini-run").exists(), reason="the command is not installed beside this Python"
    ),
]

# The new root's place, what to bind into it, whether there is a /dev/shm (none: nor a /tmp to write to), the user;
# then the command. This shell is process 1 already, and becomes the command.
MAKE = r"""
root=$1 binds=$2 shm=$3 uid=$4; shift 4
memory() { mkdir -p "$root$1"; mount -t tmpfs -o "mode=$2" none "$root$1"; }
place() { if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; : > "$root$1"; fi; }
memory "" 755
memory /tmp "$([ "$shm" = none ] && echo 555 || echo 1777)"
mkdir -p "$root/proc" "$root/dev/pts" "$root/old"
for path in $binds /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty; do
    place "$path"
    mount --rbind "$path" "$root$path"
done
for link in bin sbin lib lib64; do [ -e "$root/$link" ] || ln -s "usr/$link" "$root/$link"; done
mount -t devpts -o newinstance,ptmxmode=666,mode=620 none "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
[ "$shm" != yes ] || memory /dev/shm 1777
cd "$root"
pivot_root . old
mount -t proc proc /proc
umount -l /old
rmdir /old
mount -o remount,ro /
cd /tmp
exec setpriv --reuid="$uid" --regid="$uid" --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs "$@"
"""


def dockerfile():
    """Its instructions; a later one replaces an earlier one."""
    text = (ROOT / "examples/Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {word: rest for word, _, rest in (line.partition(" ") for line in lines)}


DOCKERFILE = dockerfile()
ENTRYPOINT = json.loads(DOCKERFILE["ENTRYPOINT"])
USER = DOCKERFILE["USER"].partition(":")[0]
STOP = getattr(signal, DOCKERFILE["STOPSIGNAL"])


def binds():
    """The system, this Python, the package and the tests."""
    places = [
        "/usr",
        *(
            str(path)
            for path in map(Path, ("/bin", "/sbin", "/lib", "/lib64"))
            if not path.is_symlink() and path.exists()
        ),
        *("/etc/ld.so.cache", "/etc/ld.so.conf"),
        *dict.fromkeys([sys.prefix, sys.base_prefix, str(ROOT)]),
    ]
    return " ".join(place for place in places if os.path.exists(place))


@pytest.fixture
def container(tmp_path):
    """Start `docker run IMAGE WORDS...`; `env` is -e, `under` are words before the shell that makes the root."""
    started = []

    def start(*words, env=(), shm="yes", under=(), **kwargs):
        place = tmp_path / f"root{len(started)}"
        place.mkdir()
        name, _, value = DOCKERFILE["ENV"].partition("=")
        variables = {"PATH": f"{SCRIPTS}:/usr/bin:/bin", name: value, **dict([OURS]), **dict(env)}
        make = ["sh", "-euc", MAKE, "sh", str(place), binds(), shm, USER]
        entry = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *ENTRYPOINT]
        argv = [*UNSHARE, *under, *make, *entry, *map(str, words)]
        started.append(Command(argv, **kwargs))
        return started[-1]

    yield start
    for command in started:
        command.close()


def process_1(command):
    """Its number out here."""
    (pid,) = [pid for pid, (parent, _, _) in processes().items() if parent == command.pid]
    return pid


def test_the_example_is_what_a_container_needs(container):
    """Words, so that no shell is process 1; what it says is what infini-run takes."""
    assert ENTRYPOINT[0] == "infini-run"
    assert json.loads(DOCKERFILE["CMD"])
    source = re.fullmatch(r"(\S+) /job/train.py", DOCKERFILE["COPY"])[1]
    words = [str(ROOT / source) if word == "train.py" else word for word in json.loads(DOCKERFILE["CMD"])]
    command = container("--dry_run=json", *words)
    assert command.wait() == 0, command.err
    assert json.loads(command.out)["world_size"] == 2


@pytest.mark.parametrize("code", [0, 7, 255])
def test_exit_code_is_the_jobs(container, code):
    command = container("--nproc_per_node=2", "sh", "-c", f"exit {code}")
    assert command.wait() == code, command.err


def test_program_that_is_missing_is_127(container):
    command = container("no-such-program")
    assert command.wait() == 127
    assert command.err.count(b"\n") == 1


def test_the_command_is_process_1_and_its_ranks_are_its_children(container):
    command = container("--nproc_per_node=2", *play("ask=parent", "ask=pids"))
    assert command.wait() == 0, command.err
    assert [words[1] for words in command.read_lines(b"parent", 2)] == ["1", "1"]
    assert all(int(words[1]) <= 3 for words in command.read_lines(b"pids", 2))


def test_stop_signal_of_the_example_stops_every_rank(container):
    command = container("--nproc_per_node=2", *play(f"end={STOP.name[3:]}:0", "say=ready", "wait"))
    command.read_lines(b"ready", 2)
    os.kill(process_1(command), STOP)
    assert command.wait() == 0
    assert command.out.count(b"got ") == 2


def test_rank_and_stray_that_are_deaf_are_killed_after_the_grace_of_the_environment(container):
    env = {DOCKERFILE["ENV"].partition("=")[0]: "200ms"}
    command = container(*play("ignore=TERM", *STRAY, "say=ready", "wait"), env=env)
    command.read_lines(b"ready")
    os.kill(process_1(command), STOP)
    assert command.wait() == 128 + STOP
    assert b"SIGKILL in 0.2 s" in command.err
    assert b"left-behind (" in command.err
    assert not marked()


def test_orphans_are_reaped_while_the_job_runs(container):
    command = container("--nproc_per_node=2", *play("orphans=40", "reaped", "say=clean"))
    assert command.wait() == 0, command.err
    assert command.out.count(b"clean") == 2


def test_killed_process_1_leaves_nothing(container):
    command = container("--nproc_per_node=2", *play(*STRAY, "say=ready", "wait"))
    command.read_lines(b"ready", 2)
    os.kill(process_1(command), signal.SIGKILL)
    assert command.wait() != 0
    until(lambda: not marked())


def test_a_rank_cannot_stop_or_kill_process_1(container):
    command = container("sh", "-c", "kill -STOP 1; kill -KILL 1; echo alive; exit 5")
    assert command.wait() == 5
    assert command.out == b"alive\n"


@pytest.mark.parametrize("shm", ["yes", "no"])
def test_a_read_only_root_a_user_without_a_name_and_no_home_are_enough(container, shm):
    script = 'touch /here 2>/dev/null && exit 9; [ -z "${HOME-}" ] || exit 8; id -un >/dev/null 2>&1 && exit 7; id -u'
    command = container("--nproc_per_node=2", "sh", "-c", script, shm=shm)
    assert command.wait() == 0, command.err
    assert command.out.split() == [USER.encode()] * 2
    assert command.err == b""


@pytest.mark.parametrize("shm", ["yes", "no", "none"])
def test_a_failure_is_told_with_or_without_a_place_for_its_error_file(container, shm):
    script = 'echo boom > "${TORCHELASTIC_ERROR_FILE:-/dev/null}"; exit 3'
    command = container("sh", "-c", script, shm=shm, env={"TMPDIR": "/nowhere"})
    assert command.wait() == 3
    assert b"infini-run: rank 0 on " in command.err
    assert (b"error: boom" in command.err) == (shm != "none")
    assert (b"cannot make a control socket in /dev/shm, /tmp, or TMPDIR: " in command.err) == (shm == "none")


def test_container_without_place_for_sockets_notes_it_once(container):
    """Else a probe that asks --list finds no launch, and nothing says why."""
    words = ("--max_restarts=2", "--restart_delay=0", "sh", "-c", "exit 3")
    command = container(*words, shm="none", env={"TMPDIR": "/nowhere"})
    assert command.wait() == 3
    assert command.err.count(b"--list and other questions do not find this launch\n") == 1


@pytest.mark.parametrize(("shm", "start"), [("yes", "/dev/shm/"), ("no", "/tmp/"), ("none", "@")])
def test_ranks_are_heard_wherever_a_folder_can_be_made_or_none(container, shm, start):
    say = "import os, socket; a = os.environ['NOTIFY_SOCKET']; print(a); "
    say += "socket.socket(1, 2).sendto(b'READY=1', a.replace('@', chr(0), 1)); os.read(0, 1)"
    words = ("--ready_timeout=60", "--stdin=all", sys.executable, "-Ic", say)
    command = container("--verbose", *words, shm=shm, stdin=subprocess.PIPE)
    command.read_error_until(b"rank 0 is ready")
    command.close_stdin()
    assert command.wait() == 0
    assert command.out.decode().startswith(start)


def test_umask_keeps_no_rank_from_its_socket(container):
    say = """
import fcntl, os, socket, termios, time
wire = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
wire.connect(os.environ["NOTIFY_SOCKET"])
wire.send(b"READY=1")
while any(fcntl.ioctl(wire, termios.TIOCOUTQ, bytes(4))):  # until it is read: a rank's end may come before
    time.sleep(0.01)
"""
    script = 'umask 777; exec infini-run --verbose --ready_timeout=60 "$@"'
    command = container("sh", "-c", script, "sh", sys.executable, "-Ic", say)
    assert command.wait() == 0, command.err
    assert b"rank 0 is ready" in command.err


def test_logs_and_report_go_where_a_volume_is(container):
    command = container("--report=/tmp/none/report", "--log_dir=/tmp/out", "true")
    assert command.wait() == 2
    assert b"use a file in a folder that exists" in command.err
    inner = 'infini-run "$@" echo line && cat /tmp/out/rank_0.log /tmp/out/report'
    command = container("sh", "-c", inner, "sh", "--report=/tmp/out/report", "--log_dir=/tmp/out")
    assert command.wait() == 0, command.err
    assert b"line\n" in command.out
    assert b'"exit_code": 0' in command.out


def test_logs_on_a_read_only_root_are_refused_in_one_line(container):
    command = container("--log_dir=/logs", "true")
    assert command.wait() == 2
    assert command.err == b"infini-run: --log_dir=/logs cannot be made: Read-only file system\n"


def test_isolate_that_a_container_does_not_permit_is_refused_in_one_line(container):
    command = container("--isolate", "true")
    code = command.wait()
    assert code in (0, 1)  # 0 where user namespaces may nest and mount
    assert command.err.count(b"\n") == code


def test_closed_stdio_is_survived(container):
    command = container("sh", "-c", "exit 6", under=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
    assert command.wait() == 6


# ---- docker run -it


class Tty:
    """The far end of `docker run -it`: the pty is the container's terminal, process 1 leads its session."""

    def __init__(self, container, *words, env=()):
        self.master, slave = os.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO  # so that what is seen was said
        attributes[3] |= termios.NOFLSH  # a Ctrl-Z that the kernel looks at late takes nothing back (termios(3))
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        variables = {"PS1": PROMPT.decode(), "HISTFILE": "/dev/null", "TERM": "dumb", **dict(env)}
        self.command = container(
            *words, under=("setsid", "--ctty"), env=variables, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.seen = b""
        self.mark = 0

    def type(self, text):
        self.mark = len(self.seen)
        os.write(self.master, text.encode())

    def see(self, pattern, count=1):
        while len(found := re.findall(pattern, self.seen[self.mark :])) < count:
            ready, _, _ = select.select([self.master], [], [], LIMIT_S)
            assert ready, f"{pattern!r} never came: {self.seen!r}"
            self.seen += os.read(self.master, 65536)
        return found

    def run(self, text):
        """One line at the shell, up to its next prompt."""
        self.type(text + "\n")
        self.see(re.escape(PROMPT))
        return self.seen[self.mark :].decode()

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self):
        self.command.close()
        os.close(self.master)


@pytest.fixture
def tty(container):
    opened = []

    def start(*words, **kwargs):
        opened.append(Tty(container, *words, **kwargs))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i")


@pytest.fixture
def shell(tty):
    terminal = tty(*SHELL)
    terminal.see(re.escape(PROMPT))
    assert b"no job control" not in terminal.seen
    assert b"terminal process group" not in terminal.seen
    return terminal


def test_a_shell_has_job_control_and_its_exit_code_is_ours(shell):
    assert "job=1" in shell.run("sleep 1000 & jobs; echo job=$(jobs | wc -l)")
    shell.type("kill %1; exit 42\n")
    assert shell.command.wait() == 42


def test_ctrl_c_interrupts_what_the_shell_runs_and_not_the_shell(shell):
    shell.type("sleep 1000\n")
    until(lambda: "sleep" in marked().values())
    shell.type("\x03")
    shell.see(re.escape(PROMPT))
    assert "code=130" in shell.run("echo code=$?")
    shell.type("exit 0\n")
    assert shell.command.wait() == 0


def test_ctrl_z_stops_what_the_shell_runs_and_fg_continues_it(shell):
    shell.type(shlex.join(play("tell=CONT", "say=ready", "listen", "exit=7")) + "\n")
    shell.see(rb"ready -?\d+ (\d+)\r\n")
    for _ in range(2):
        shell.type("\x1a")
        shell.see(re.escape(PROMPT))
        assert "stopped=1" in shell.run("echo stopped=$(jobs -s | wc -l)")
        shell.type("fg\n")
        shell.see(rb"got CONT")  # by then it has the terminal, and Ctrl-Z is its own again
    shell.type("typed\n")
    shell.see(rb"(?s)read typed.*" + re.escape(PROMPT))
    assert "code=7" in shell.run("echo code=$?")
    shell.type("exit 3\n")
    assert shell.command.wait() == 3


def test_a_new_window_size_reaches_the_shell_and_what_it_runs(shell):
    shell.resize(31, 97)
    assert "31 97" in shell.run("stty size")
    shell.type(shlex.join(play("tell=WINCH", "say=ready", "listen", "exit=0")) + "\n")
    shell.see(rb"ready")
    shell.resize(32, 98)
    shell.see(rb"got WINCH")
    shell.type("typed\n")
    shell.see(re.escape(PROMPT))
    shell.type("exit\n")
    assert shell.command.wait() == 0


def test_a_hang_up_ends_the_shell_and_the_container(shell):
    os.kill(process_1(shell.command), signal.SIGHUP)  # what comes when the runtime closes the terminal
    assert shell.command.wait() == 128 + signal.SIGHUP


def test_ctrl_c_at_a_lone_rank_is_the_ranks_own_affair(tty):
    terminal = tty(*play("tell=INT", "end=USR1:4", "say=ready", "wait"))
    terminal.see(rb"ready -?\d+ \d+\r\n")
    terminal.type("\x03")
    terminal.see(rb"got INT")
    os.kill(process_1(terminal.command), signal.SIGUSR1)
    assert terminal.command.wait() == 4


def test_ctrl_z_at_a_lone_rank_that_nobody_could_continue_changes_nothing(tty):
    """No shell is outside: the kernel stops no orphaned process group, and we do not let it hang either."""
    terminal = tty(*play("tell=USR1", "end=USR2:4", "say=ready", "wait"))
    terminal.see(rb"ready -?\d+ \d+\r\n")
    terminal.type("\x1a")
    os.kill(process_1(terminal.command), signal.SIGUSR1)
    terminal.see(rb"got USR1")
    os.kill(process_1(terminal.command), signal.SIGUSR2)
    assert terminal.command.wait() == 4


def test_ctrl_c_ends_several_ranks(tty):
    terminal = tty("--nproc_per_node=3", *play("say=ready", "wait"))
    terminal.see(rb"ready", 3)
    terminal.type("\x03")
    assert terminal.command.wait() == 130
