"""Lines of several ranks that share a pipe or a file never mix, and are otherwise what was written."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.core.c_structs import INHERIT, PIPE, TO_CONSOLE, UNLABELLED
from tests.support.group_case import Live, spec
from tests.support.waiting import until

# A rank's every byte says whose it is: its pieces of a line, however long the machine lets one wait for the next.
PIECES = """
import os
mark = (b"abcdefgh", b"ABCDEFGH")
for i in range(150):
    for fd in (1, 2):
        byte = mark[fd - 1][int(os.environ["RANK"]):][:1]
        os.write(fd, byte * 3)
        os.write(fd, byte * 4)
        os.write(fd, b"\\n")
"""


def check_unmixed(data, marks, count=150):
    for line in data.split(b"\n"):
        assert len(set(line)) <= 1, f"a line of two: {line!r}"
    for mark in marks:
        assert data.count(mark) == count * 7


def ways(infini_run, *flags, **kwargs):
    command = infini_run("--dry_run=json", *flags, "true", **kwargs)
    assert command.wait() == 0
    return set(re.findall(r'"std(out|err)": "(\w+)"', command.out.decode()))


def test_by_default_ranks_that_share_a_pipe_never_mix_within_a_line(infini_run):
    command = infini_run("--nproc_per_node=8", sys.executable, "-ISc", PIECES)
    assert command.wait() == 0
    check_unmixed(command.out, [b"%c" % byte for byte in b"abcdefgh"])
    check_unmixed(command.err, [b"%c" % byte for byte in b"ABCDEFGH"])


def test_stdout_and_stderr_that_are_one_file_never_mix_either(infini_run, tmp_path):
    with (tmp_path / "both").open("wb") as file:
        command = infini_run("--nproc_per_node=4", sys.executable, "-ISc", PIECES, stdout=file, stderr=file)
        assert command.wait() == 0
    check_unmixed((tmp_path / "both").read_bytes(), [b"%c" % byte for byte in b"abcdABCD"])


def test_what_ends_no_line_is_shown_and_anothers_line_begins_a_new_one(infini_run, gate):
    """A prompt is seen before it is answered."""
    second = gate()
    script = f'if test $RANK = 0; then printf "name? "; read x; echo $x; else head -c1 /dev/fd/{second}; echo; fi'
    command = infini_run("--nproc_per_node=2", "sh", "-c", script, stdin=subprocess.PIPE, gates=(second,))
    command.read_until(b"name? ")
    assert command.out == b"name? "
    second.open("z")
    command.read_until(b"\nz\n")
    command.process.stdin.write(b"me\n")
    command.close_stdin()
    assert command.wait() == 0
    assert command.out == b"name? \nz\nme\n"


def test_what_goes_on_after_a_while_is_one_line(infini_run):
    script = 'test $RANK = 0 || exit 0; printf "name? "; read x; echo $x'
    command = infini_run("--nproc_per_node=2", "sh", "-c", script, stdin=subprocess.PIPE)
    command.read_until(b"name? ")
    command.process.stdin.write(b"me\n")
    command.close_stdin()
    assert command.wait() == 0
    assert command.out == b"name? me\n"


def test_what_one_rank_alone_writes_is_not_changed_by_a_byte(infini_run, tmp_path):
    (tmp_path / "data").write_bytes(os.urandom(300_000) + b"\nno end")
    script = f"test $RANK = 1 || exec cat {tmp_path}/data"
    command = infini_run("--nproc_per_node=2", "sh", "-c", script)
    assert command.wait() == 0
    assert command.out == (tmp_path / "data").read_bytes()


def test_a_failure_has_its_last_words(infini_run):
    script = 'test $RANK = 1 || exec sleep 1000; echo "why it failed" >&2; printf "half a line" >&2; exit 3'
    command = infini_run("--nproc_per_node=2", "sh", "-c", script)
    assert command.wait() == 3
    shown, report = command.err.split(b"infini-run: ", 1)
    assert shown == b"why it failed\nhalf a line\n"
    assert b"| why it failed" in report
    assert b"| half a line" in report


# ---- which streams


def test_auto_is_lines_for_several_ranks_and_inherit_for_one(infini_run):
    assert ways(infini_run, "--nproc_per_node=2") == {("out", "lines"), ("err", "lines")}
    assert ways(infini_run) == {("out", "inherit"), ("err", "inherit")}
    assert ways(infini_run, "--nproc_per_node=2", "--log_dir=x") == {("out", "prefix"), ("err", "prefix")}
    assert ways(infini_run, "--nproc_per_node=2", "--console=inherit") == {("out", "inherit"), ("err", "inherit")}
    assert ways(infini_run, "--console=lines") == {("out", "lines"), ("err", "lines")}


def test_a_terminal_and_the_null_device_are_inherited_stream_by_stream(infini_run):
    controller, terminal = pty.openpty()
    command = infini_run("--nproc_per_node=2", "sh", "-c", "readlink /proc/self/fd/2", stderr=terminal)
    assert command.wait() == 0
    assert command.out.split() == [os.ttyname(terminal).encode()] * 2
    tell = (sys.executable, "-ISc", "import os; os.write(2, os.readlink('/proc/self/fd/1').encode() + b'\\n')")
    null = infini_run("--nproc_per_node=2", *tell, stdout=subprocess.DEVNULL)
    assert null.wait() == 0
    assert null.err.split() == [b"/dev/null"] * 2
    os.close(controller)
    os.close(terminal)


def test_where_descriptors_do_not_suffice_ranks_write_themselves(infini_run):
    under = ("prlimit", "--nofile=60:60")
    words = ("--nproc_per_node=8", "--verbose", "sh", "-c", "readlink /proc/self/fd/1")
    few = infini_run(*words, under=under)
    assert few.wait() == 0
    assert len(set(few.out.split())) == 1
    assert b"too few descriptors" in few.err
    enough = infini_run(*words)
    assert enough.wait() == 0
    assert len(set(enough.out.split())) == 8
    assert b"too few descriptors" not in enough.err


# ---- the core


def plain(rank, *argv, **more):
    return spec(rank, *argv, stdio=(more.pop("stdin", INHERIT), PIPE, PIPE), output=(TO_CONSOLE | UNLABELLED,) * 2)


def timers():
    """How many timers of ours are set."""
    found = 0
    for fd in os.listdir("/proc/self/fdinfo"):
        try:
            text = Path(f"/proc/self/fdinfo/{fd}").read_text()
        except FileNotFoundError:
            continue
        found += "it_value: (" in text and "it_value: (0, 0)" not in text
    return found


def test_the_timer_runs_only_while_a_piece_waits_for_the_end_of_its_line():
    reader, writer = os.pipe()
    gate = os.pipe()
    before = timers()
    with Live(
        plain(0, "/bin/sh", "-c", "echo whole; printf half; read x", stdin=gate[0]), console=(writer, writer)
    ) as live:
        os.close(gate[0])
        seen = b""

        def has(text):
            nonlocal seen
            os.set_blocking(reader, False)
            with contextlib.suppress(BlockingIOError):
                seen += os.read(reader, 100)
            return text in seen

        live.until(lambda: has(b"whole\n"))
        live.until(lambda: has(b"half"))
        live.settle()
        assert timers() == before
        os.close(gate[1])
        live.end()
    os.close(writer)
    os.close(reader)


chunks = st.lists(
    st.one_of(st.binary(max_size=8), st.sampled_from([b"\r", b"\n", b"\r\n", b"x" * 70000])), max_size=12
)


@given(chunks, st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_bytes_of_one_stream_come_out_as_they_were(pieces, step_by_step):
    out, err = os.memfd_create("out"), os.memfd_create("err")
    reader, writer = os.pipe()
    with Live(plain(0, "/bin/sh", "-c", "echo up >&2; read gate", stdin=reader), console=(out, err)) as live:
        os.close(reader)
        live.until(lambda: os.fstat(err).st_size)
        out_fd, err_fd = (f"/proc/{live.pid(0)}/fd/{fd}" for fd in (1, 2))
        until(lambda: os.readlink(out_fd) != os.readlink(err_fd))  # the shell has put its own stdout back
        end = os.open(out_fd, os.O_WRONLY | os.O_NONBLOCK)
        for piece in pieces:
            while piece:
                try:
                    piece = piece[os.write(end, piece) :]
                except BlockingIOError:
                    live.settle()
            if step_by_step:
                live.settle()
        os.write(writer, b"\n")
        os.close(end)
        live.end()
    os.close(writer)
    assert os.pread(out, 1 << 20, 0) == b"".join(pieces)
    os.close(out)
    os.close(err)
