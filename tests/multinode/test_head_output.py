"""The head's streams: whole lines under any chunking; a reader that stops, closes or is a file blocks nobody."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_run.core.nonblocking_writer import NonblockingWriter
from infini_run.multinode.head.output import LineBuffer, StdinReader
from tests.support.group_case import read_all


@given(st.lists(st.binary(max_size=40)))
def test_lines_are_whole_and_nothing_is_lost(chunks):
    lines = LineBuffer()
    whole = [lines.feed(chunk) for chunk in chunks]
    assert all(piece == b"" or piece.endswith(b"\n") for piece in whole)
    assert b"".join(chain(whole, [lines.end()])) == b"".join(chunks)
    assert lines.end() == b""


def test_a_line_without_end_is_passed_on_in_pieces():
    lines = LineBuffer()
    assert lines.feed(b"x" * (1 << 18) + b"") == b"x" * (1 << 18)
    assert lines.feed(b"x" * ((1 << 18) - 1)) == b""
    assert lines.feed(b"x") == b"x" * (1 << 18)
    assert lines.feed(b"end\n") == b"end\n"


def test_what_agents_send_as_a_line_is_no_line_too_long():
    """The core passes on pieces of 64 KiB, each with a label and an end of line: cut again, two nodes' would mix."""
    lines, piece = LineBuffer(), b"[a-host-with-a-name:123456 +] " + b"x" * 65536 + b"\n"
    halves = [lines.feed(piece[:-1]), lines.feed(piece[-1:])]
    assert halves == [b"", piece]


def test_what_a_reader_does_not_take_is_kept():
    reader, writer = os.pipe()
    outlet = NonblockingWriter(writer)
    outlet.write(b"x" * (1 << 20))
    assert outlet.waiting > 0
    os.close(writer)
    taken = b""
    while outlet.waiting:
        taken += os.read(reader, 1 << 16)
        outlet.flush()
    outlet.close()
    taken += read_all(reader)
    assert taken == b"x" * (1 << 20)
    os.close(reader)


def test_the_stream_itself_still_blocks_for_others():
    """Not to block is our own affair: the description that we share stays as it is."""
    reader, writer = os.pipe()
    outlet = NonblockingWriter(writer)
    outlet.write(b"x")
    assert os.get_blocking(writer)
    outlet.close()
    outlet.close()
    os.close(reader)
    os.close(writer)


def test_a_reader_that_has_gone_is_a_problem_and_no_error():
    reader, writer = os.pipe()
    outlet = NonblockingWriter(writer)
    os.close(reader)
    outlet.write(b"x")
    assert isinstance(outlet.problem, BrokenPipeError)
    outlet.write(b"y")
    assert outlet.waiting == 0
    outlet.close()
    os.close(writer)


def test_a_full_device_is_a_problem_and_no_error():
    full = os.open("/dev/full", os.O_WRONLY)
    outlet = NonblockingWriter(full)
    outlet.write(b"x")
    assert outlet.problem is not None
    outlet.close()
    os.close(full)


def test_a_closed_stream_is_a_problem_and_no_error():
    fd = os.open("/dev/null", os.O_WRONLY)
    os.close(fd)
    outlet = NonblockingWriter(fd)
    assert outlet.problem is not None
    outlet.write(b"x")
    assert outlet.waiting == 0


def test_a_file_is_written_where_its_owner_stands(tmp_path):
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        file.write(b"before ")
        outlet = NonblockingWriter(file.fileno())
        outlet.write(b"ours ")
        file.write(b"after")
        outlet.close()
    assert path.read_bytes() == b"before ours after"


def test_waiting_for_a_reader_can_be_given_up():
    reader, writer = os.pipe()
    outlet = NonblockingWriter(writer)
    assert not outlet.give_up()
    outlet.write(b"x" * (1 << 20))
    assert outlet.give_up()
    outlet.write(b"more")
    assert outlet.waiting == 0
    outlet.close()
    os.close(reader)
    os.close(writer)


def test_a_source_ends_once(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"words")
    with path.open("rb") as file:
        source = StdinReader(file.fileno(), wanted=True)
        assert source.never_waits
        assert [source.read(), source.read(), source.read()] == [b"words", b"", None]
        assert source.has_ended


def test_a_terminal_that_comes_to_the_front_while_it_is_read_has_not_ended():
    """Another job takes the foreground and gives it back as fast as it can; then it hangs up, which is the end."""
    child = os.fork()
    if not child:  # a session of its own, whose terminal it is
        code = 2
        try:
            code = _count_false_ends()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _count_false_ends():
    os.setsid()
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ours = os.getpid()
    other = os.fork()
    if not other:
        os.close(master)
        os.setpgid(0, 0)
        while os.getppid() == ours:
            os.tcsetpgrp(slave, os.getpid())
            os.tcsetpgrp(slave, ours)
        os._exit(0)
    source = StdinReader(slave, wanted=True)
    false_ends = sum(source.read() is not None for _ in range(20000))
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    os.close(master)
    return bool(false_ends) or source.read() != b""


@pytest.mark.parametrize("wanted", [True, False])
def test_a_source_that_is_closed_or_not_wanted_has_ended(wanted):
    reader, writer = os.pipe()
    if wanted:
        os.close(reader)
    source = StdinReader(reader, wanted=wanted)
    assert source.has_ended
    assert source.read() is None
    os.close(writer)
    if not wanted:
        os.close(reader)
