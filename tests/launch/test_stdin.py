"""Our stdin goes to the rank that --stdin names, to all, or to none; to the byte."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infini_run.core.c_structs import INHERIT, PIPE, TO_CONSOLE
from tests.support.command import CHILDREN
from tests.support.group_case import Live, spec, wait_for_line
from tests.support.processes import processes
from tests.support.waiting import LIMIT_S, until

COUNT = (sys.executable, "-ISE", CHILDREN / "count_bytes.py")
BIG = os.urandom(5_000_000)


def said(data):
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}"


def counts(command):
    """{rank: "size sha256"} of what the ranks read."""
    return dict(line.split(" ", 1) for line in command.out.decode().splitlines())


def start(infini_run, how, *, nproc=3, child=COUNT, **kwargs):
    return infini_run(f"--nproc_per_node={nproc}", f"--stdin={how}", *child, **kwargs)


def feed(command, data):
    """Write it all and close; communicate() would do the same, but reads meanwhile."""
    command.out, command.err = command.process.communicate(data, timeout=LIMIT_S)
    return command.process.returncode


@pytest.mark.parametrize(("how", "reader"), [("rank0", 0), ("0", 0), ("2", 2)])
def test_one_rank_reads_and_the_others_see_the_end(infini_run, how, reader):
    command = start(infini_run, how, stdin=subprocess.PIPE)
    assert feed(command, b"some text\n") == 0
    assert counts(command) == {str(r): said(b"some text\n" if r == reader else b"") for r in range(3)}


def test_rank_0_reads_where_nothing_was_said(infini_run):
    command = infini_run("--nproc_per_node=2", *COUNT, stdin=subprocess.PIPE)
    assert feed(command, BIG) == 0
    assert counts(command) == {"0": said(BIG), "1": said(b"")}


def test_none_reads_nothing(infini_run, tmp_path):
    (tmp_path / "in").write_bytes(b"text")
    with (tmp_path / "in").open("rb") as file:
        command = start(infini_run, "none", stdin=file)
        assert command.wait() == 0
        assert file.tell() == 0
    assert counts(command) == {str(r): said(b"") for r in range(3)}


def test_one_reader_of_a_file_has_the_file_itself(infini_run, tmp_path):
    """So that it can seek, map it and see its size; no byte goes through us."""
    path = tmp_path / "in"
    path.write_bytes(b"text")
    with path.open("rb") as file:
        command = infini_run("--nproc_per_node=2", "--stdin=1", "readlink", "/proc/self/fd/0", stdin=file)
        assert command.wait() == 0
    assert sorted(command.out.decode().splitlines()) == ["/dev/null", str(path)]


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 5_000_000])
@pytest.mark.parametrize("source", ["pipe", "file", "socket"])
@pytest.mark.rows(6)
def test_all_gives_every_rank_a_copy(infini_run, tmp_path, source, size):
    data = BIG[:size]
    if source == "pipe":
        command = start(infini_run, "all", stdin=subprocess.PIPE)
        assert feed(command, data) == 0
    elif source == "file":
        (tmp_path / "in").write_bytes(data)
        with (tmp_path / "in").open("rb") as file:
            command = start(infini_run, "all", stdin=file)
            assert command.wait() == 0
    else:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = start(infini_run, "all", stdin=theirs)
            theirs.close()
            ours.sendall(data)
            ours.close()
            assert command.wait() == 0
    assert counts(command) == {str(r): said(data) for r in range(3)}


def test_all_of_a_file_begins_where_the_file_stands(infini_run, tmp_path):
    (tmp_path / "in").write_bytes(b"read already, not yet")
    with (tmp_path / "in").open("rb", buffering=0) as file:
        file.read(len(b"read already, "))
        command = start(infini_run, "all", stdin=file)
        assert command.wait() == 0
    assert counts(command) == {str(r): said(b"not yet") for r in range(3)}


def test_all_of_nothing_is_the_end(infini_run):
    command = start(infini_run, "all", stdin=subprocess.DEVNULL)
    assert command.wait() == 0
    assert counts(command) == {str(r): said(b"") for r in range(3)}


def test_all_of_a_closed_stdin_is_the_end(infini_run):
    command = start(infini_run, "all", under=("/bin/sh", "-c", 'exec "$@" <&-', "sh"))
    assert command.wait() == 0
    assert counts(command) == {str(r): said(b"") for r in range(3)}


def test_all_passes_a_line_on_before_the_next_one_is_typed(infini_run):
    """Nothing is gathered: every rank answers a line while the rest is still to come."""
    child = ("/bin/sh", "-c", "while read line; do echo $RANK $line; done")
    command = start(infini_run, "all", child=child, stdin=subprocess.PIPE)
    for word in (b"one", b"two"):
        command.process.stdin.write(word + b"\n")
        command.process.stdin.flush()
        for rank in range(3):
            command.read_until(b"%d %s\n" % (rank, word))
    command.process.stdin.close()
    command.process.stdin = None
    assert command.wait() == 0


def test_a_rank_that_reads_no_more_does_not_hold_the_others(infini_run, tmp_path):
    os.mkfifo(tmp_path / "gate")
    script = (
        f"if [ $RANK = 1 ]; then exec <&-; read x < {tmp_path}/gate; exit 0; fi; exec {' '.join(map(str, COUNT))}"
    )
    (tmp_path / "in").write_bytes(BIG)
    with (tmp_path / "in").open("rb") as file:
        command = start(infini_run, "all", child=("/bin/sh", "-c", script), stdin=file)
        for rank in (0, 2):
            command.read_until(f"{rank} {said(BIG)}\n".encode())
        (tmp_path / "gate").write_text("go\n")
        assert command.wait() == 0


def test_a_rank_that_stops_in_the_middle_does_not_hold_the_others(infini_run):
    script = f"exec {' '.join(map(str, COUNT))} $([ $RANK = 1 ] && echo 100000)"
    command = start(infini_run, "all", child=("/bin/sh", "-c", script), stdin=subprocess.PIPE)
    assert feed(command, BIG) == 0
    assert counts(command) == {"0": said(BIG), "1": said(BIG[:100000]), "2": said(BIG)}


def test_a_slow_rank_misses_nothing(infini_run, tmp_path):
    """Rank 1 begins to read only when the others cannot get on without it."""
    os.mkfifo(tmp_path / "gate")
    script = f"if [ $RANK = 1 ]; then read x < {tmp_path}/gate; fi; exec {' '.join(map(str, COUNT))}"
    (tmp_path / "in").write_bytes(BIG)
    with (tmp_path / "in").open("rb", buffering=0) as file:
        command = start(infini_run, "all", child=("/bin/sh", "-c", script), stdin=file)
        until(lambda: file.tell() >= 65536)
        assert file.tell() < len(BIG)
        command.signal(signal.SIGCONT)  # where a terminal's reader would look at its source again
        (tmp_path / "gate").write_text("go\n")
        assert command.wait() == 0
    assert counts(command) == {str(r): said(BIG) for r in range(3)}


def test_a_rank_that_never_reads_does_not_hold_the_end(infini_run):
    """Its pipe is full when it exits: what it did not read is nobody's."""
    command = start(infini_run, "all", child=("/bin/sh", "-c", "echo here; exit 3"), stdin=subprocess.PIPE)
    assert command.process.wait(LIMIT_S) == 3


def test_a_job_ends_though_its_stdin_stays_open(infini_run):
    command = start(infini_run, "all", child=("true",), stdin=subprocess.PIPE)
    assert command.process.wait(LIMIT_S) == 0


def test_signals_work_while_a_rank_does_not_read(infini_run, tmp_path):
    (tmp_path / "in").write_bytes(BIG)
    with (tmp_path / "in").open("rb", buffering=0) as file:
        command = start(infini_run, "all", child=("/bin/sh", "-c", "echo up; exec sleep 1000"), stdin=file)
        until(lambda: file.tell() >= 65536)
        command.signal(signal.SIGTERM)
        assert command.wait() == 143


def test_our_stdin_is_not_made_nonblocking(infini_run):
    """O_NONBLOCK belongs to the open file, which the shell shares with us."""
    reader, writer = os.pipe()
    child = ("/bin/sh", "-c", "read x; echo $x; read x")
    command = start(infini_run, "all", child=child, stdin=reader)
    os.write(writer, b"word\n")
    for _ in range(3):
        wait_for_line(command.process.stdout.fileno())
    assert os.get_blocking(reader)
    os.close(reader)
    os.close(writer)
    assert command.wait() == 1


def test_a_waiting_source_costs_nothing(infini_run):
    command = start(infini_run, "all", child=("/bin/sh", "-c", "echo up; read x"), stdin=subprocess.PIPE)
    for _ in range(3):
        wait_for_line(command.process.stdout.fileno())
    until(lambda: processes()[command.pid][1] == "S")
    command.process.stdin.close()
    command.process.stdin = None
    assert command.wait() == 1


def test_worker_that_restarts_gets_what_came_meanwhile(tmp_path):
    """Nobody else reads; and the end of the input, which comes at once, wakes the core no further."""
    source, typed = os.pipe()
    reads = spec(0, "/bin/sh", "-c", f"read word; echo $word >> {tmp_path}/words", stdio=(PIPE, INHERIT, INHERIT))
    with Live(reads, stays=True, stdin_fd=source) as live:
        os.write(typed, b"one\n")
        live.until(lambda: live.of("exited"))
        os.write(typed, b"two\n")
        os.close(typed)
        live.settle()
        assert live.group.part_signal([0], signal.SIGTERM, leaders=False) == 0
        assert live.group.part_start([reads], [live.mark], [0]) == 1
        live.until(lambda: len(live.of("exited")) == 2)
    os.close(source)
    assert (tmp_path / "words").read_text() == "one\ntwo\n"


@given(st.lists(st.binary(max_size=200_000), max_size=6), st.integers(1, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_bytes_in_any_chunks_reach_every_rank(chunks, ranks):
    """Through a group: what is put in comes out of every `cat`."""
    console = os.memfd_create("console")
    source, feeder = os.pipe()
    os.set_blocking(feeder, False)
    copies = [os.memfd_create("copy") for _ in range(ranks)]
    specs = [spec(r, "/bin/cat", stdio=(PIPE, copies[r], PIPE), output=(0, TO_CONSOLE)) for r in range(ranks)]
    with Live(*specs, stdin_fd=source, console=(console, console)) as live:
        os.close(source)
        for data in chunks:
            left = data
            while left:
                try:
                    left = left[os.write(feeder, left) :]
                except BlockingIOError:
                    live.group.wait(1.0)
                live.settle()
        os.close(feeder)
        live.end()
    whole = b"".join(chunks)
    for fd in copies:
        assert os.pread(fd, len(whole) + 1, 0) == whole
        os.close(fd)
    assert os.fstat(console).st_size == 0
    os.close(console)


def test_a_host_that_wants_sigpipe_survives_a_rank_that_does_not_read():
    """In a library no signal of the host's is ours to change, nor ours to die of."""
    program = (
        "import signal, infini_run as ir\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "report = ir.run(['/bin/sh', '-c', 'exec <&-; echo > /dev/null; true'], nproc_per_node=2, stdin='all',"
        " console='none')\n"
        "print(report.exit_code)\n"
    )
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", program], stdin=read, stdout=subprocess.PIPE) as host:
        os.close(read)
        os.set_blocking(write, False)
        try:
            while host.poll() is None:
                try:
                    os.write(write, b"x" * 4096)
                except BlockingIOError:
                    os.sched_yield()
        except BrokenPipeError:
            pass
        finally:
            os.close(write)
        assert host.stdout.read() == b"0\n"
    assert host.returncode == 0
