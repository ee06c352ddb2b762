"""What comes in over a channel may be any bytes: messages come out, or an error of ours, and no memory is taken for
what a head only says."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_run.channel.decoder import BYTES, HEAD, PARTS, SIZE, WRITABLE
from infini_run.channel.endpoint import SharedSocket
from infini_run.channel.errors import CannotUnpickle, ChannelBroken, ChannelError, MessageTooLong
from infini_run.channel.receiver import Receiver

LIMIT = 1 << 20
NUMBERS = st.integers(0, 40) | st.sampled_from([1 << 16, 1 << 20, 1 << 31, (1 << 32) - 1])
SIZES = NUMBERS | st.sampled_from([1 << 33, 1 << 62, (1 << 64) - 1, WRITABLE | 3])


def table(*sizes):
    return b"".join(map(SIZE.pack, sizes))


def received(data, limit=LIMIT):
    """All that a receiver makes of these bytes, to the error that ends it."""
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    receiver = Receiver(SharedSocket(ours), limit)
    found = []
    for _ in range(100):
        try:
            found.append(receiver.recv(5))
        except (MessageTooLong, CannotUnpickle) as error:  # this one is lost, and the channel goes on
            found.append(error)
        except ChannelError as error:
            found.append(error)
            break
    with pytest.raises(type(found[-1])):  # and so for ever
        receiver.recv(5)
    receiver.close()
    return found


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.integers(BYTES - 2, BYTES + 3), NUMBERS, SIZES, st.lists(SIZES, max_size=3), st.binary(max_size=40)
        ),
        max_size=3,
    )
)
@example([(PARTS, 0, 0, [], b"\1")])
@example([(PARTS, 1, 8, [0], b"\1")])
@example([(PARTS, (1 << 32) - 1, (1 << 64) - 1, [], b"")])
@example([(PARTS, 1, 1 << 19, [1 << 62], b"x")])
@example([(PARTS, 2, 19, [3, 0], b"abc\1")])
@example([(1, 0, 0, [], b"\1")])
@example([(BYTES, 1, 0, [], b"\1")])
@example([(BYTES, 0, 1 << 63, [], b"")])
def test_any_frames_are_messages_or_an_error_of_ours(frames):
    data = b"".join(
        HEAD.pack(kind, min(count, 2**32 - 1), size) + table(*sizes) + rest
        for kind, count, size, sizes, rest in frames
    )
    assert received(data)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_an_error_of_ours(data):
    assert received(data)


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(PARTS, 0, 0) + b"\1",
        HEAD.pack(PARTS, 5, 8) + table(0) + b"\1",
        HEAD.pack(PARTS, 1, 8) + table(9) + b"\1",
        HEAD.pack(PARTS, 1, 9) + table(1 << 62) + b"x\1",
        HEAD.pack(7, 0, 3) + b"abc\1",
        HEAD.pack(0, 0, 1 << 30),
        HEAD.pack(BYTES, 2, 1 << 30),
        b"h",
        (1).to_bytes(8, "little"),
        HEAD.pack(PARTS, (1 << 32) - 1, 1 << 20) + b"x" * 100,
    ],
    ids=[
        "no-part",
        "a-table-beyond-its-frame",
        "a-part-beyond-its-frame",
        "a-huge-part",
        "kind-7",
        "kind-0",
        "bytes-in-parts",
        "text",
        "the-count-of-an-eventfd",
        "2^32-parts",
    ],
)
def test_a_head_that_cannot_be_is_broken(data):
    (error,) = received(data)
    assert type(error) is ChannelBroken
    assert str(error) == "what came over the channel is not what infini-run sends"


def test_parts_without_a_byte_are_a_message_that_does_not_unpickle():
    found = received(HEAD.pack(PARTS, 1, 8) + table(0) + b"\1")
    assert "cannot be unpickled" in str(found[0])


def test_a_message_that_finds_no_memory_is_passed_over_and_the_channel_goes_on():
    code = """
import resource, socket
from infini_run.channel.errors import MessageTooLong
from infini_run.channel.endpoint import SharedSocket
from infini_run.channel.decoder import BYTES, HEAD, PARTS, SIZE
from infini_run.channel.receiver import Receiver
import threading, time
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
size = 500 << 20
for head in (HEAD.pack(BYTES, 0, size), HEAD.pack(PARTS, 1, size + 8) + SIZE.pack(size)):
    ours, theirs = socket.socketpair()
    receiver = Receiver(SharedSocket(ours))
    def send():
        theirs.sendall(head)
        piece = bytes(1 << 20)
        for _ in range(500):
            theirs.sendall(piece)
        theirs.sendall(b"\\1" + HEAD.pack(BYTES, 0, 2) + b"ok\\1")
    thread = threading.Thread(target=send)
    thread.start()
    try:
        receiver.recv()
    except MessageTooLong as error:
        print(error.finds_no_memory, receiver.recv())
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"True b'ok'\nTrue b'ok'\n", b"")
