"""--follow: the lines of a running launch in another terminal, and what is told of those that are missing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.control.launch_facts import ABOUT, ANSWER, COUNTS, REQUEST
from infini_run.control.line_frames import END, LINES, LOST, SHOWN, read_lines, read_loss
from infini_run.control.server import Client
from infini_run.errors import InfiniRunError, LinkError
from infini_run.questions import following
from infini_run.system.frames import WireDecoder, pack
from infini_run.system.poller import Poller
from tests.display.test_live_table import window  # noqa: F401
from tests.launch.test_control import ask, connect, forged, found, greeting, new_folder, running, stop  # noqa: F401
from tests.launch.test_security import STRANGER, needs_root, shared  # noqa: F401
from tests.support.command import COMMAND, Command
from tests.support.processes import marked, state_of
from tests.support.waiting import until

# Each rank waits for a word of its stdin before each further part.
PARTS = """
echo up $RANK $$
while read -r count; do
    i=0
    while [ $i -lt $count ]; do
        n=$((n + 1)); i=$((i + 1))
        echo "line $n $FILL"; echo "problem $n" >&2
    done
    echo "part $RANK" >&2
done
printf 'no end'
"""


@pytest.fixture
def parts(running):  # noqa: F811
    """Start ranks that write as many lines as they are told; return the launch."""

    def start(*flags, nproc=2, fill="", **kwargs):
        environ = {**os.environ, "FILL": fill}
        command, _ = running(
            "--stdin=all",
            *flags,
            nproc=nproc,
            program=("sh", "-c", PARTS),
            stdin=subprocess.PIPE,
            env=environ,
            **kwargs,
        )
        return command

    return start


def write(command, count):
    command.process.stdin.write(b"%d\n" % count)
    command.process.stdin.flush()


def finish(command):
    command.close_stdin()
    assert command.wait() == 0


@pytest.fixture
def follow():
    """Start --follow with these words; return it once it is connected."""
    started = []

    def start(command, *words):
        follower = Command([*COMMAND, "--follow", *words, str(command.pid)])
        started.append(follower)
        follower.read_error_until(b"ends this view, not the job\n")
        return follower

    yield start
    for follower in started:
        follower.close()


def notes_of(follower):
    """What it says beside the lines, without that it is connected."""
    notes = [line.removeprefix("infini-run: ") for line in follower.err.decode().splitlines()]
    return [note for note in notes if not note.startswith("following ir-")]


def lines_of(follower, rank, stream=""):
    label = f"[rank {rank}{stream}] ".encode()
    return [line.removeprefix(label).decode() for line in follower.out.splitlines() if line.startswith(label)]


def test_lines_from_now_on_have_labels(parts, follow):
    command = parts("--console=lines")
    write(command, 1)
    command.read_lines(b"line 1", 2)
    follower = follow(command)
    write(command, 2)
    finish(command)
    assert follower.wait() == 0
    for rank in (0, 1):
        assert lines_of(follower, rank) == ["line 2 ", "line 3 ", "no end"]
        assert lines_of(follower, rank, " err") == ["problem 2", "problem 3", f"part {rank}"]
    assert notes_of(follower) == []
    assert command.out.count(b"line") == 6


def test_line_end_in_two_pieces_is_one(running, follow):  # noqa: F811
    script = r"echo up $RANK $$; read go; printf 'one\r'; read go; printf '\ntwo\n\nthree\n'"
    command, _ = running(
        "--stdin=all", "--console=lines", nproc=1, program=("sh", "-c", script), stdin=subprocess.PIPE
    )
    follower = follow(command)
    write(command, 1)
    follower.read_until(b"one\n")
    write(command, 1)
    finish(command)
    assert follower.wait() == 0
    assert lines_of(follower, 0) == ["one", "two", "", "three"]


@pytest.mark.parametrize("layout", ["flat", "torchrun"])
def test_tail_of_logs_meets_new_lines_without_gap(parts, follow, tmp_path, layout):
    """While a rank writes, --follow begins: each line comes once."""
    command = parts(f"--log_dir={tmp_path}", f"--log_layout={layout}", "--console=lines")
    write(command, 500)
    follower = follow(command, "--tail=100000", "--ranks=1")
    write(command, 500)
    finish(command)
    assert follower.wait() == 0
    assert notes_of(follower) == []
    out = [line for line in lines_of(follower, 1) if line.startswith("line")]
    assert out == [f"line {number} " for number in range(1, 1001)]
    err = [line for line in lines_of(follower, 1, " err") if line.startswith("problem")]
    assert err == [f"problem {number}" for number in range(1, 1001)]
    assert lines_of(follower, 0) == lines_of(follower, 0, " err") == []


def test_tail_of_logs_is_the_last_lines_of_each_rank(parts, follow, tmp_path):
    command = parts(f"--log_dir={tmp_path}", "--console=lines")
    write(command, 5)
    command.read_lines(b"line 5", 2)
    until(lambda: all(b"part" in (tmp_path / f"rank_{rank}.log").read_bytes() for rank in (0, 1)))
    follower = follow(command, "--tail=1")
    finish(command)
    assert follower.wait() == 0
    for rank in (0, 1):
        last = [line for line in (tmp_path / f"rank_{rank}.log").read_text().splitlines() if line != "no end"][-1]
        stream = " err" if last.startswith("err: ") else ""
        assert lines_of(follower, rank, stream)[0] == last.removeprefix("err: ")
    assert len(follower.out.splitlines()) == 4


def test_tail_without_logs_has_last_words_and_says_so(parts, follow):
    command = parts("--console=lines")
    write(command, 2)
    until(lambda: command.out.count(b"line 2") == 2 or command.read_more())
    command.read_error_until(b"part 0")
    command.read_error_until(b"part 1")
    follower = follow(command, "--tail=2")
    finish(command)
    assert follower.wait() == 0
    assert lines_of(follower, 0, " err") == ["problem 2", "part 0"]
    assert notes_of(follower) == ["--tail: without --log_dir, a launch keeps only the last 16 KiB of stderr"]


def test_ranks_that_write_themselves_are_named(parts, follow):
    command = parts("--console=inherit")
    follower = follow(command)
    write(command, 1)
    finish(command)
    assert follower.wait() == 0
    assert follower.out == b""
    assert notes_of(follower) == [
        f"cannot show {stream} of ranks 0-1: it bypasses infini-run; start with --console=lines"
        for stream in ("stdout", "stderr")
    ]


def test_follower_of_a_killed_launch_fails_with_a_line(parts, follow):
    command = parts("--console=lines")
    launch_id = found(command.pid).launch_id
    follower = follow(command)
    command.signal(signal.SIGKILL)
    command.wait()
    assert follower.wait() == 1
    assert notes_of(follower) == [
        f"{launch_id}: the last lines are lost: it was killed, or they were not read in time"
    ]
    until(lambda: not marked())  # the guard ends them


def test_end_of_a_follower_leaves_the_launch_alone(parts, follow):
    command = parts("--console=lines")
    follower = follow(command)
    follower.signal(signal.SIGINT)
    assert follower.wait() == -signal.SIGINT
    write(command, 1)
    finish(command)
    assert command.out.count(b"line 1") == 2


# ---- who does not read, and who is no follower


def test_follower_ends_with_its_reader_and_not_with_the_next_line(parts):
    command = parts("--console=lines")
    words = [*COMMAND, "--follow", str(command.pid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as follower:
        while b"ends this view" not in follower.stderr.readline():
            pass
        follower.stdout.close()
        assert follower.wait(20) == 0
    write(command, 1)
    finish(command)


def _request(**fields):
    return pack(
        REQUEST, json.dumps({"protocol": 1, "question": "follow", "ranks": None, "tail": 0, **fields}).encode()
    )


def _begin(pid):
    """A connection that has asked to follow, and got the answer."""
    client = connect(pid)
    client.sendall(_request())
    decoder = WireDecoder(frozenset((ABOUT, COUNTS, ANSWER, LINES, LOST, END)), 1 << 20)
    frames = []
    client.settimeout(20)
    while not any(kind == ANSWER for kind, _ in frames):
        frames += decoder.feed(client.recv(65536))
    return client, decoder


def _read_all(client, decoder):
    frames = []
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            frames += decoder.feed(data)
    return frames


def test_followers_that_do_not_read_are_told_how_many_lines_they_lost(parts):
    command = parts("--console=lines", fill="x" * 1000)
    clients = [_begin(command.pid) for _ in range(3)]
    write(command, 2000)
    until(lambda: command.out.count(b"line 2000") == 2 or command.read_more())
    frames, more = [[], [], []], 0
    for (client, decoder), of in zip(clients, frames, strict=True):
        while not any(kind == LOST for kind, _ in of):  # told with the next line that finds room
            write(command, 1)
            more += 1
            while select.select([client], [], [], 0.1)[0]:
                of += decoder.feed(client.recv(65536))
    finish(command)
    for (client, decoder), of in zip(clients, frames, strict=True):
        of += _read_all(client, decoder)
        assert [kind for kind, _ in of].count(END) == 1
        assert of[-1] == (END, b"")
        lost = sum(read_loss(payload) for kind, payload in of if kind == LOST)
        read = sum(read_lines(payload)[2].count(b"\n") for kind, payload in of if kind == LINES)
        assert lost > 1000
        assert lost + read == 2 * (2 * 2000 + 1 + more * 3)
        client.close()
    assert command.out.count(b"line") == 2 * (2000 + more)


BURST = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.write(1, b"up %s %d\\n" % (os.environb[b"RANK"], os.getpid()))
signal.sigwait({signal.SIGUSR1})
os.write(1, (b"line " + b"x" * 994 + b"\\n") * 60)
os.mkdir(f"{sys.argv[1]}/{os.environ['RANK']}")
signal.sigwait({signal.SIGUSR1})
"""


def test_one_turn_of_the_loop_with_more_than_a_buffer_loses_nothing(running, tmp_path):  # noqa: F811
    """The socket has room for what the buffer of a follower has not."""
    program = (sys.executable, "-c", BURST, str(tmp_path))
    command, ranks = running("--console=lines", nproc=5, program=program)
    client, decoder = _begin(command.pid)
    command.signal(signal.SIGSTOP)
    until(lambda: state_of(command.pid) == "T")
    for pid in ranks.values():
        os.kill(pid, signal.SIGUSR1)
    until(lambda: len(os.listdir(tmp_path)) == 5)
    command.signal(signal.SIGCONT)
    assert command.read_lines(b"line", 300)
    for pid in ranks.values():
        os.kill(pid, signal.SIGUSR1)
    frames = _read_all(client, decoder)
    assert command.wait() == 0
    assert {kind for kind, _ in frames} == {LINES, END}
    assert sum(read_lines(payload)[2].count(b"\n") for kind, payload in frames if kind == LINES) == 300
    client.close()


def test_connection_given_away_is_not_touched_again():
    """The new owner may close it at once; then somebody else may have its number."""
    ours, theirs = socket.socketpair()
    poller = Poller()
    client = Client(ours.detach(), poller, lambda client, _: client.hand_over({}, take))
    given = []

    def take(fd, first):
        os.close(fd)
        assert os.open("/dev/null", os.O_WRONLY) == fd
        given.append(fd)

    theirs.sendall(_request())
    poller.poll(20)
    client.close()
    os.close(*given)
    poller.close()
    assert theirs.recv(1) == b""
    theirs.close()


def test_followers_that_never_read_leave_the_launch_its_output_and_end(parts):
    command = parts("--console=lines", fill="x" * 1000)
    clients = [_begin(command.pid)[0] for _ in range(16)]
    line = ask("--follow", command.pid, code=2)
    assert line.endswith("too many processes follow this launch; end one of them")
    write(command, 2000)
    finish(command)
    assert command.out.count(b"line") == 4000
    for client in clients:
        client.close()


@pytest.mark.parametrize("data", [b"x", pack(LINES, b"12345x"), _request()], ids=["byte", "lines", "request"])
def test_follower_that_sends_something_is_dropped(parts, data):
    command = parts("--console=lines")
    client, decoder = _begin(command.pid)
    client.sendall(data)
    assert [kind for kind, _ in _read_all(client, decoder)] == []
    write(command, 1)
    finish(command)
    assert command.err.count(b"\n") == 2 * 2
    client.close()


@pytest.mark.parametrize("fields", [{"tail": -1}, {"tail": "1"}, {"tail": 1 << 40}, {"ranks": "all"}], ids=str)
def test_malformed_follow_request_ends_its_connection_alone(parts, fields):
    command = parts("--console=lines")
    with connect(command.pid) as client:
        client.sendall(_request(**fields))
        client.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                pass
    write(command, 1)
    finish(command)


# ---- launches of other users

STEER = b"\x1b]0;owned\x07\x1b[2J\xe2\x80\xae\xc2\x9b\x9b"
SHOWN_STEER = rb"\x1b]0;owned\x07\x1b[2J\u202e\x9b\udc9b"


def _strangers(earlier, *frames):
    """A launch of a stranger whose answer to --follow is this, and its id."""
    folder = new_folder()
    launch_id = os.path.basename(folder).removeprefix("infini-run-")
    answer = {"unseen": {"stdout": [], "stderr": []}, "earlier": earlier}
    reply = pack(ANSWER, json.dumps(answer).encode()) + b"".join(frames) + pack(END, b"")
    return launch_id, forged({folder: greeting(launch_id)}, reply)


@needs_root("becoming a stranger")
def test_log_of_another_users_launch_is_read_with_the_rights_of_that_user(shared, tmp_path):  # noqa: F811
    def file(path, owner, mode=0o600):
        path.write_text(f"line of {path.name}\n")
        os.chown(path, owner, owner)
        path.chmod(mode)
        return path

    tmp_path.chmod(0o700)
    secret = file(tmp_path / "secret", 0)
    hidden = file(tmp_path / "hidden", STRANGER)  # below a folder of root, as the files of a container
    (shared / "link").symlink_to(secret)
    (shared / "to_log").symlink_to(shared / "log")
    os.mkfifo(shared / "fifo", 0o666)
    public = file(shared / "public", 0, 0o644)
    refused = {
        secret: "Permission denied",
        hidden: "Permission denied",
        shared / "link": "Permission denied",
        public: "its owner is not the user of the launch",
        shared / "fifo": "it is not a regular file",
        "/proc/self/environ": "Permission denied",
    }
    paths = [*refused, file(shared / "log", STRANGER), shared / "to_log"]
    earlier = [
        {"rank": rank, "stream": 0, "path": str(path), "end": 8, "has_both": False} for rank, path in enumerate(paths)
    ]
    launch_id, launch = _strangers(earlier)
    with launch:
        follower = Command([*COMMAND, "--follow", "--tail=2", launch_id])
        assert follower.wait() == 0
    assert follower.out.splitlines() == [f"[rank {rank}] line of ".encode() for rank in (6, 7)]
    assert notes_of(follower) == [f"--tail: cannot read {path}: {why}" for path, why in refused.items()]
    follower.close()


@needs_root("becoming a stranger")
def test_output_of_another_users_launch_cannot_steer_the_terminal(window):  # noqa: F811
    rank = (0).to_bytes(4, "big") + b"\0"
    red = b"\x1b[1;31mred\ta\xc3\xa9"
    launch_id, launch = _strangers(
        [{"rank": 0, "stream": 1, "text": "\x1b[2Jearlier"}],
        pack(LINES, rank + STEER + red + b"\n"),
        pack(SHOWN, b"[rank 1] " + STEER + b"\n"),
    )
    with launch:
        view = window("--follow", "--tail=1", launch_id, TERM="dumb")
        assert view.wait() == 0
        piped = Command([*COMMAND, "--follow", launch_id])
        assert piped.wait() == 0
    assert b"[rank 0 err] \\x1b[2Jearlier\r\n" in view.seen
    assert b"[rank 0] " + SHOWN_STEER + red + b"\x1b[m\r\n" in view.seen
    assert b"[rank 1] " + SHOWN_STEER + b"\r\n" in view.seen
    assert piped.out == b"[rank 0] " + STEER + red + b"\n[rank 1] " + STEER + b"\n"  # a file has the bytes
    piped.close()


def test_output_of_an_own_launch_reaches_the_terminal_as_it_is(parts, window):  # noqa: F811
    command = parts("--console=lines", fill="\x1b]0;title\x07")
    view = window("--follow", command.pid, TERM="dumb")
    view.see(lambda: b"ends this view" in view.seen)
    write(command, 1)
    finish(command)
    assert view.wait() == 0
    assert b"[rank 1] line 1 \x1b]0;title\x07\r\n" in view.seen


class _Frames:
    """A conversation whose launch sends these frames."""

    def __init__(self, frames):
        self._frames = frames

    def frames(self, limit_s, output_fd):
        yield from self._frames


@given(st.lists(st.tuples(st.sampled_from((LINES, SHOWN, LOST, END)), st.binary(max_size=40)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_frames_of_a_launch_are_lines_or_an_error(frames):
    printer = following._Printer(os.geteuid(), colored=False, begin_s=0.0)
    printed = []
    printer.write = printer.note = printed.append
    with contextlib.suppress(InfiniRunError):
        following._print_frames(_Frames(frames), printer, "ir-0")


@given(st.binary(max_size=20))
def test_any_payload_is_lines_or_a_link_error(payload):
    for read in (read_lines, read_loss):
        with contextlib.suppress(LinkError):
            read(payload)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--follow", "--live"], "--follow: conflicts with --live; drop one of them"),
        (["--follow", "--tail=x"], "--tail=x: expected 0 to 100000"),
        (["--tail=3"], "--tail=3: needs --follow; add it, or drop --tail=3"),
        (["--stacks", "--tail=3"], "--tail=3: needs --follow; add it, or drop --tail=3"),
        (["--follow", "ir-1", "x"], "--follow: unexpected x; drop it"),
    ],
)
def test_words_that_follow_nothing_are_refused(words, line):
    assert ask(*words, code=2) == line
