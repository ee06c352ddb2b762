"""The multiplexer: many channels over one connection. Bytes, ends and broadcasts arrive as they were, in whatever
pieces the connection carries them, and a stream that is not read delays no other."""

from __future__ import annotations

import os
import random
import socket
import struct

import pytest

from infini_run.crews.spawn.mux_stream import WINDOW
from infini_run.crews.spawn.stream_multiplexer import LARGEST, Multiplexer
from infini_run.errors import LinkError
from infini_run.system.poller import Poller


class Side:
    """One end: its streams, what it has sent and the other has not got, what it was told."""

    def __init__(self) -> None:
        self.poller = Poller()
        self.out = bytearray()
        self.words: list[object] = []
        self.most = 0
        self.streams = Multiplexer(self.poller, self._send, self.words.append, takes_broadcasts=True)
        self.ends: dict[int, socket.socket] = {}

    def _send(self, data: bytes) -> None:
        self.out += data
        self.most = max(self.most, len(self.out))

    def open(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.streams.add(number, theirs)
        self.ends[number] = ours
        return ours

    def close(self) -> None:
        self.streams.close()
        self.poller.close()
        for end in self.ends.values():
            end.close()


class Both:
    """A stream between two sides; `turn` moves what is there, in pieces of any size."""

    def __init__(self, seed: int = 0) -> None:
        self.a, self.b = Side(), Side()
        self.random = random.Random(seed)

    def turn(self) -> bool:
        moved = False
        for here, there in ((self.a, self.b), (self.b, self.a)):
            here.poller.poll(0.0)
            size = self.random.choice((1, 7, 100, 1 << 16, 1 << 22))
            piece = bytes(here.out[:size])
            del here.out[:size]
            there.streams.feed(piece)
            moved = moved or bool(piece)
        return moved

    def settle(self) -> None:
        """Until nothing moves any more."""
        while self.turn() or self.a.out or self.b.out:
            pass

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def both():
    made = Both()
    yield made
    made.close()


def send(end: socket.socket, data: bytes) -> int:
    """How much of it found room."""
    try:
        return end.send(data)
    except BlockingIOError:
        return 0


def read(end: socket.socket) -> bytes | None:
    """What is there; None: nothing now."""
    try:
        return end.recv(1 << 20)
    except BlockingIOError:
        return None


@pytest.mark.parametrize("seed", range(5))
def test_bytes_cross_whole_in_both_directions_and_so_do_ends(seed):
    both = Both(seed)
    try:
        numbers = (1, 2, 3)
        sent = {n: os.urandom(200_000 * n) for n in numbers}
        got = {(side, n): bytearray() for side in "ab" for n in numbers}
        ends = {("a", n): both.a.open(n) for n in numbers} | {("b", n): both.b.open(n) for n in numbers}
        at = dict.fromkeys(ends, 0)
        open_ends = set(ends)
        while open_ends:
            for key, end in ends.items():
                data = sent[key[1]]
                if at[key] < len(data):
                    at[key] += send(end, data[at[key] : at[key] + both.random.choice((1, 5000, 1 << 17))])
                    if at[key] == len(data):
                        end.shutdown(socket.SHUT_WR)
                piece = read(end) if key in open_ends else None
                if piece == b"":
                    open_ends.discard(key)
                got[key] += piece or b""
            both.turn()
        assert {key: bytes(data) for key, data in got.items()} == {key: sent[key[1]] for key in got}
    finally:
        both.close()


def test_who_does_not_read_holds_a_window_and_nobody_else(both):
    slow, quick = both.a.open(1), both.a.open(2)
    both.b.open(1)
    reader = both.b.open(2)
    sent = 0
    while more := send(slow, b"x" * 65536):
        sent += more
        both.settle()
    assert WINDOW <= sent < 2 * WINDOW
    quick.send(b"said")
    both.settle()
    assert read(reader) == b"said"


def test_a_reader_that_is_gone_is_told_to_who_sends(both):
    here, there = both.a.open(1), both.b.open(1)
    there.close()
    here.send(b"to nobody")
    both.settle()
    with pytest.raises(BrokenPipeError):
        here.send(b"more", socket.MSG_NOSIGNAL)


def test_a_broadcast_crosses_once_and_comes_after_what_was_sent_before(both):
    broadcast = os.urandom(300_000)
    ends = {number: (both.a.open(number), both.b.open(number)) for number in (1, 2, 3, 4)}
    for n, (here, _) in ends.items():
        here.send(b"before %d," % n)

    def use() -> None:
        for n in ends:
            both.a.streams.find(n).use(9)
            both.a.streams.find(n).move()

    both.a.streams.send_broadcast(9, [broadcast[:1000], broadcast[1000:]], use)
    crossed = 0
    got = dict.fromkeys(ends, b"")
    while any(len(data) < len(broadcast) + 9 for data in got.values()):
        crossed += len(both.a.out)
        both.b.streams.feed(bytes(both.a.out))
        both.a.out.clear()
        both.turn()
        for n, (_, there) in ends.items():
            got[n] += read(there) or b""
    assert got == {n: b"before %d," % n + broadcast for n in ends}
    assert len(broadcast) <= crossed < len(broadcast) + 2000
    both.a.streams.send_control({"broadcast_sent": 9})
    both.settle()
    assert both.b.streams._broadcasts == {}


def test_a_large_broadcast_waits_for_the_other_end(both):
    """No more than a window of it is on its way."""
    both.a.streams.send_broadcast(1, [bytes(3 * WINDOW)], lambda: both.a.streams.send_control({"all": "sent"}))
    assert WINDOW <= len(both.a.out) < WINDOW + (1 << 20)
    both.settle()
    assert both.b.words == [{"all": "sent"}]
    assert len(both.b.streams.broadcast(1)) == 3 * WINDOW


def test_words_come_after_what_was_read_and_once_it_is_written(both):
    here, there = both.a.open(1), both.b.open(1)
    order: list[bytes | None] = []
    here.send(b"last words")
    both.a.streams.find(1).when_read(lambda: both.a.streams.send_control({"ended": 1}))
    while not both.b.words:
        both.turn()
    both.b.streams.find(1).when_written(lambda: order.append(read(there)))
    assert order == [b"last words"]


def test_a_stream_without_room_holds_the_streams(both):
    here, there = both.a.open(1), both.b.open(1)
    both.a.streams.set_room(False)
    here.send(b"later")
    both.settle()
    assert read(there) is None
    both.a.streams.set_room(True)
    both.settle()
    assert read(there) == b"later"


def test_what_is_no_word_is_refused(both):
    both.a.streams.post(b"w", 0, b"no json")
    with pytest.raises(LinkError):
        both.settle()


def test_a_stream_that_was_dropped_hears_nothing(both):
    here = both.a.open(1)
    both.b.open(1)
    both.b.streams.drop(1)
    both.b.streams.drop(1)
    here.send(b"x")
    both.settle()
    assert both.b.words == []


def sent(kind: bytes, number: int, payload: bytes = b"", size: int | None = None) -> bytes:
    return struct.pack(">cII", kind, number, len(payload) if size is None else size) + payload


COUNT = struct.pack(">I", 1)
NONSENSE = {
    "a broadcast without end": sent(b"w", 0, b'{"broadcast":1,"size":1e999}'),
    "a broadcast of no size": sent(b"w", 0, b'{"broadcast":1,"size":-5}'),
    "a broadcast larger than any": sent(b"w", 0, b'{"broadcast":1,"size":%d}' % (LARGEST + 1)),
    "a broadcast without a number": sent(b"w", 0, b'{"broadcast":[],"size":5}'),
    "a piece of no broadcast": sent(b"d", 0, b"x"),
    "the use of no broadcast": sent(b"u", 1, COUNT),
    "half a count": sent(b"c", 1, b"\0"),
    "a credit for nothing": sent(b"c", 1, COUNT),
    "a credit for no broadcast": sent(b"c", 0, COUNT),
    "a frame that would take all memory": sent(b"d", 1, size=0xFFFFFFFF),
    "a word that would": sent(b"w", 0, size=0xFFFFFFFF),
    "a number for a word": sent(b"w", 0, b"5"),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_what_makes_no_sense_is_refused_before_it_costs_anything(both, data):
    both.a.open(1)
    with pytest.raises(LinkError):
        both.a.streams.feed(data)


def test_who_sends_more_than_the_window_is_cut(both):
    both.a.open(1)
    piece = sent(b"d", 1, bytes(1 << 18))
    data = piece * (WINDOW // (1 << 18) + 8)  # some of it is in the socket, which nobody reads
    with pytest.raises(LinkError, match="more than the window"):
        both.a.streams.feed(data)


def test_a_node_gives_nothing():
    side = Side()
    side.streams = Multiplexer(side.poller, side._send, side.words.append)
    with pytest.raises(LinkError):
        side.streams.feed(sent(b"w", 0, b'{"broadcast":1,"size":5}'))
    side.close()
