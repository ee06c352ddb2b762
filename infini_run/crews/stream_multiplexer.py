"""Many channels over one stream of bytes: a lane for each, between a socket at this end and one at the other.

Bytes are passed on as they are, in both directions, and so is the end of either. Nothing holds up anything else: each
direction of a lane has a window, so that what nobody takes is at most so much, and what was passed on is credited.
Words (JSON) go beside the lanes, in order with what was sent before them. A gift is bytes for several lanes that
cross the stream once. Both ends are alike; who owns the stream says how it is sent, and feeds what comes.
"""

from __future__ import annotations

import socket
from collections import deque
from struct import Struct

from infini_run.errors import LinkError
from infini_run.system.json_codec import decode, encode
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.channel.serializer import Buffer
    from infini_run.system.poller import Poller

WINDOW = 4 << 20  # bytes of one direction of a lane that are on their way
LARGEST = 1 << 34  # bytes of a gift, as of a message of a channel
_PIECE = 1 << 18
_LONGEST_WORD = 64 << 20  # as that of a link
_GIFTS = 0  # the lane that they cross by
_HEAD = Struct(">cII")  # kind, lane, bytes that follow
_COUNT = Struct(">I")
_DATA, _END, _CUT, _CREDIT, _USE, _WORD = b"d", b"e", b"x", b"c", b"u", b"w"


class MuxStream:
    """One channel: our socket's bytes to the other end's, and the other way."""

    def __init__(self, lanes: Multiplexer, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.number = number
        self._lanes = lanes
        self._sock = sock
        self._out: deque[tuple[memoryview, bool]] = deque()  # and whether it is credited
        self._sent = 0  # bytes that the other end has not passed on yet
        self._waiting = 0  # bytes of theirs that we have not passed on
        self._owed = 0  # bytes that we have passed on, and not credited yet
        self._can_read = self._can_write = True
        self._ends = False  # no more comes from the other end
        self._uses: deque[int] = deque()  # gifts, after what the socket has now
        self._when_read: list[Callable[[], None]] = []
        self._when_written: list[Callable[[], None]] = []
        self.watch()

    # ---- from our socket

    def _read(self) -> None:
        while self._can_read and self._lanes.has_room and self._sent < WINDOW:
            try:
                data = self._sock.recv(min(_PIECE, WINDOW - self._sent))
            except BlockingIOError:
                self._has_read()
                return
            except OSError:
                data = b""
            if not data:
                self._can_read = False
                self._lanes.post(_END, self.number)
            else:
                self._sent += len(data)
                self._lanes.post(_DATA, self.number, data)
        if not self._can_read:
            self._has_read()

    def _has_read(self) -> None:
        """Everything that was in the socket is on its way."""
        while self._uses:
            self._lanes.post(_USE, self.number, _COUNT.pack(self._uses.popleft()))
        calls, self._when_read = self._when_read, []
        for call in calls:
            call()

    def when_read(self, call: Callable[[], None]) -> None:
        """Call it when everything that is in our socket now has been sent."""
        self._when_read.append(call)
        self.turn()

    def use(self, gift: int) -> None:
        """The other end's socket gets that gift after what is in ours now."""
        self._uses.append(gift)

    # ---- to our socket

    def put(self, data: Buffer, *, is_credited: bool = True) -> None:
        """It came from the other end."""
        self._out.append((memoryview(data), is_credited))
        self.turn()

    def _write(self) -> None:
        while self._out and self._can_write:
            view, is_credited = self._out[0]
            try:
                sent = self._sock.send(view, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:  # nobody reads there any more
                self.refuse()
                break
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = view[sent:], is_credited
            if is_credited:
                self._waiting -= sent
                self._owed += sent
        self._credit()
        if not self._out:
            if self._ends and self._can_write:
                self._can_write = False
                self._shut(socket.SHUT_WR)
            calls, self._when_written = self._when_written, []
            for call in calls:
                call()

    def refuse(self) -> None:
        """Our socket takes no more: what still comes is dropped, and the other end is told."""
        if self._can_write:
            self._can_write = False
            self._out.clear()
            self._lanes.post(_CUT, self.number)

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            return  # it was closed on the other side

    def _credit(self) -> None:
        if self._owed >= WINDOW // 4:
            self._lanes.post(_CREDIT, self.number, _COUNT.pack(self._owed))
            self._owed = 0

    def when_written(self, call: Callable[[], None]) -> None:
        """Call it when our socket has taken all that has come."""
        self._when_written.append(call)
        self.turn()

    # ---- what the other end says

    def take(self, kind: bytes, payload: bytes) -> None:
        """A frame. Raises LinkError: it is more than there is a window for."""
        if kind == _DATA and self._can_write:
            self._waiting += len(payload)
            if self._waiting + self._owed > WINDOW:
                raise _nonsense("more than the window")
            self.put(payload)
        elif kind == _END:
            self._ends = True
            self.turn()
        elif kind == _CUT:
            self._cut()
        elif kind == _CREDIT:
            self._sent = _less(self._sent, payload)
            self.turn()
        elif kind == _USE and self._can_write:
            self.put(self._lanes.gift(_count(payload)), is_credited=False)

    def _cut(self) -> None:
        """Nobody reads at the other end: who writes to our socket is to know."""
        if self._can_read:
            self._can_read = False
            self._shut(socket.SHUT_RD)
        self._has_read()
        self.watch()

    # ---- for the loop

    def turn(self) -> None:
        """Move what can be moved."""
        if self._sock.fileno() >= 0:
            self._write()
            self._read()
            self.watch()

    def watch(self) -> None:
        if self._sock.fileno() < 0:
            return
        read = self._can_read and self._lanes.has_room and self._sent < WINDOW
        write = self._out and self._can_write
        self._lanes.poller.watch(self._sock.fileno(), (READ if read else 0) | (WRITE if write else 0), self.turn)

    def close(self) -> None:
        """Safe twice."""
        if self._sock.fileno() >= 0:
            self._lanes.poller.unwatch(self._sock.fileno())
            self._sock.close()
        self._can_read = self._can_write = False
        self._out.clear()
        for call in (*self._when_read, *self._when_written):
            call()
        self._when_read, self._when_written = [], []

    def after_fork_in_child(self) -> None:
        """In a forked child: nothing is said, and nobody called."""
        self._sock.close()


class Multiplexer:
    """All lanes of one stream. send: gets bytes for the other end. take: gets its words. takes_gifts: the other end
    may give some, and is trusted not to give more than there is memory for."""

    def __init__(
        self,
        poller: Poller,
        send: Callable[[bytes], None],
        take: Callable[[Any], None],
        *,
        takes_gifts: bool = False,
    ) -> None:
        self._takes_gifts = takes_gifts
        self.poller = poller
        self.has_room = True
        self._send = send
        self._take = take
        self._lanes: dict[int, MuxStream] = {}
        self._buffer = bytearray()
        self._giving: deque[memoryview | Callable[[], None]] = deque()
        self._given = 0  # bytes of gifts that the other end has not taken yet
        self._gifts: dict[int, bytearray] = {}
        self._coming: list[tuple[int, int]] = []  # the gift that comes now, and its size

    def add(self, number: int, sock: socket.socket) -> MuxStream:
        """A lane, whose number both ends know. The socket is ours from now on."""
        self._lanes[number] = lane = MuxStream(self, number, sock)
        return lane

    def drop(self, number: int) -> None:
        """Close it. Safe where there is none."""
        lane = self._lanes.pop(number, None)
        if lane is not None:
            lane.close()

    def find(self, number: int) -> MuxStream | None:
        return self._lanes.get(number)

    def close(self) -> None:
        """Safe twice."""
        for number in list(self._lanes):
            self.drop(number)
        self._giving.clear()
        self._gifts.clear()

    def after_fork_in_child(self) -> None:
        """In a forked child: all of it is our parent's."""
        for lane in self._lanes.values():
            lane.after_fork_in_child()

    def set_room(self, has_room: bool) -> None:
        """Whether the stream takes more now."""
        if has_room != self.has_room:
            self.has_room = has_room
            self._give()
            for lane in list(self._lanes.values()):
                lane.turn()

    # ---- out

    def post(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        self._send(_HEAD.pack(kind, number, len(payload)) + payload)

    def say(self, content: object) -> None:
        """Words for the other end."""
        self.post(_WORD, 0, encode(content))

    def give(self, number: int, pieces: Sequence[Buffer], then: Callable[[], None]) -> None:
        """Send a gift of that number as there is room, and call `then` when all of it is on its way."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        size = sum(map(len, views))
        self._giving.append(lambda: self.say({"gift": number, "size": size}))
        for view in views:
            self._giving += [view[at : at + _PIECE] for at in range(0, len(view), _PIECE)]
        self._giving.append(then)
        self._give()

    def _give(self) -> None:
        while self._giving:
            first = self._giving[0]
            if isinstance(first, memoryview):
                if not self.has_room or self._given >= WINDOW:
                    return
                self._given += len(first)
                self.post(_DATA, _GIFTS, bytes(first))
            self._giving.popleft()
            if not isinstance(first, memoryview):
                first()

    def when_all_read(self, numbers: Sequence[int], then: Callable[[], None]) -> None:
        """Call it when what is in the sockets of all these lanes now has been sent."""
        left = set(numbers)

        def note(number: int) -> None:
            left.discard(number)
            if not left:
                then()

        for number in numbers:
            lane = self.find(number)
            if lane is None:
                note(number)
            else:
                lane.when_read(lambda number=number: note(number))  # type: ignore[misc]

    # ---- in

    def feed(self, data: bytes) -> None:
        """Bytes of the stream. Raises LinkError: they are not what infini-run sends."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(self._buffer, at)
            if size > (_LONGEST_WORD if kind == _WORD else _PIECE):
                raise _nonsense(f"a frame of {size} bytes")
            end = at + _HEAD.size + size
            if len(self._buffer) < end:
                break
            payload = bytes(memoryview(self._buffer)[at + _HEAD.size : end])
            at = end
            self._hear(kind, number, payload)
        del self._buffer[:at]

    def _hear(self, kind: bytes, number: int, payload: bytes) -> None:
        if kind == _WORD:
            self._hear_word(payload)
        elif number == _GIFTS:
            self._hear_gift(kind, payload)
        elif number in self._lanes:  # else it was closed here meanwhile
            self._lanes[number].take(kind, payload)

    def _hear_word(self, payload: bytes) -> None:
        try:
            word = decode(payload)
        except (ValueError, RecursionError):
            raise _nonsense("no JSON") from None
        if type(word) is not dict:
            raise _nonsense("no word")
        if word.keys() == {"gift", "size"}:
            self._hear_of_gift(word["gift"], word["size"])
        elif word.keys() == {"given"}:
            self._gifts.pop(word["given"] if type(word["given"]) is int else -1, None)
        else:
            self._take(word)

    def _hear_of_gift(self, number: object, size: object) -> None:
        if not self._takes_gifts or type(number) is not int or type(size) is not int or not 0 < size <= LARGEST:
            raise _nonsense("a gift")
        self._coming.append((number, size))
        self._gifts[number] = bytearray()

    def _hear_gift(self, kind: bytes, payload: bytes) -> None:
        if kind == _CREDIT:
            self._given = _less(self._given, payload)
            self._give()
            return
        if not self._coming:
            raise _nonsense("a piece of no gift")
        number, size = self._coming[0]
        self._gifts[number] += payload
        self.post(_CREDIT, _GIFTS, _COUNT.pack(len(payload)))
        if len(self._gifts[number]) >= size:
            self._coming.pop(0)

    def gift(self, number: int) -> bytearray:
        """Raises LinkError: there is none."""
        if number not in self._gifts:
            raise _nonsense("no such gift")
        return self._gifts[number]


def _count(payload: bytes) -> int:
    if len(payload) != _COUNT.size:
        raise _nonsense("no count")
    found: int = _COUNT.unpack(payload)[0]
    return found


def _less(held: int, credit: bytes) -> int:
    """What is held, less a credit. Raises LinkError: it is for more than that."""
    left = held - _count(credit)
    if left < 0:
        raise _nonsense("a credit for what was not sent")
    return left


def _nonsense(what: str) -> LinkError:
    return LinkError(f"what came over the stream is not what infini-run sends: {what}")
