"""Many channels over one connection: a stream for each, between a socket at this end and one at the other.

It passes on bytes unchanged in both directions, and so the end of either. Control messages (JSON) go beside the
streams, in order with all earlier bytes. A broadcast is bytes for several streams that cross the connection once.
Both ends are alike; the owner of the connection sends what `send` gets, and feeds what comes.
"""

from __future__ import annotations

from collections import deque
from struct import Struct

from infini_run.crews.spawn.mux_stream import COUNT, CREDIT, DATA, WINDOW, MuxStream, minus_credit, nonsense
from infini_run.system.io_sizes import LARGE_CHUNK
from infini_run.system.json_codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.channel.serializer import Buffer
    from infini_run.system.poller import Poller

LARGEST = 1 << 34  # bytes of a broadcast, as of a message of a channel
_LONGEST_CONTROL = 64 << 20  # as that of a link
_BROADCASTS = 0  # the number by which they cross
_HEAD = Struct(">cII")  # kind, stream, bytes that follow
_CONTROL = b"w"


class Multiplexer:
    """All streams of one connection.

    Args:
        poller: waits for their sockets.
        send: called with bytes for the other end.
        on_message: called with each control message of the other end.
        takes_broadcasts: the other end may send broadcasts, and never more than there is memory for.
    """

    def __init__(
        self,
        poller: Poller,
        send: Callable[[bytes], None],
        on_message: Callable[[Any], None],
        *,
        takes_broadcasts: bool = False,
    ) -> None:
        self._takes_broadcasts = takes_broadcasts
        self.poller = poller
        self.has_room = True
        self._send = send
        self._on_message = on_message
        self._streams: dict[int, MuxStream] = {}
        self._buffer = bytearray()
        self._to_send: deque[memoryview | Callable[[], None]] = deque()
        self._uncredited = 0  # bytes of broadcasts that are not credited yet
        self._broadcasts: dict[int, bytearray] = {}
        self._coming: list[tuple[int, int]] = []  # those that are coming, and their sizes

    def add(self, number: int, sock: socket.socket) -> MuxStream:
        """Return a new stream, whose number both ends know. It owns the socket from now on."""
        self._streams[number] = stream = MuxStream(self, number, sock)
        return stream

    def drop(self, number: int) -> None:
        """Close it. Safe where there is none."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()

    def find(self, number: int) -> MuxStream | None:
        return self._streams.get(number)

    def close(self) -> None:
        """Close all streams. Safe twice."""
        for number in list(self._streams):
            self.drop(number)
        self._to_send.clear()
        self._broadcasts.clear()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child, to which none of it belongs."""
        for stream in self._streams.values():
            stream.after_fork_in_child()

    def set_room(self, has_room: bool) -> None:
        """Note whether the connection takes more now."""
        if has_room != self.has_room:
            self.has_room = has_room
            self._send_broadcasts()
            for stream in list(self._streams.values()):
                stream.move()

    # ---- out

    def post(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        self._send(_HEAD.pack(kind, number, len(payload)) + payload)

    def send_control(self, content: object) -> None:
        """Send a control message (JSON) to the other end."""
        self.post(_CONTROL, 0, encode(content))

    def send_broadcast(self, number: int, pieces: Sequence[Buffer], then: Callable[[], None]) -> None:
        """Send a broadcast of that number as there is room, and call `then` when all of it is on its way."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        size = sum(map(len, views))
        self._to_send.append(lambda: self.send_control({"broadcast": number, "size": size}))
        for view in views:
            self._to_send += [view[at : at + LARGE_CHUNK] for at in range(0, len(view), LARGE_CHUNK)]
        self._to_send.append(then)
        self._send_broadcasts()

    def _send_broadcasts(self) -> None:
        while self._to_send:
            first = self._to_send[0]
            if isinstance(first, memoryview):
                if not self.has_room or self._uncredited >= WINDOW:
                    return
                self._uncredited += len(first)
                self.post(DATA, _BROADCASTS, bytes(first))
            self._to_send.popleft()
            if not isinstance(first, memoryview):
                first()

    def when_all_read(self, numbers: Sequence[int], then: Callable[[], None]) -> None:
        """Call it after what is in the sockets of all these streams at present has gone."""
        left = set(numbers)

        def note(number: int) -> None:
            left.discard(number)
            if not left:
                then()

        for number in numbers:
            stream = self.find(number)
            if stream is None:
                note(number)
            else:
                stream.when_read(lambda number=number: note(number))  # type: ignore[misc]

    # ---- in

    def feed(self, data: bytes) -> None:
        """Take in bytes of the connection. Raises LinkError: they are not what infini-run sends."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(self._buffer, at)
            if size > (_LONGEST_CONTROL if kind == _CONTROL else LARGE_CHUNK):
                raise nonsense(f"a frame of {size} bytes")
            end = at + _HEAD.size + size
            if len(self._buffer) < end:
                break
            payload = bytes(memoryview(self._buffer)[at + _HEAD.size : end])
            at = end
            self._on_frame(kind, number, payload)
        del self._buffer[:at]

    def _on_frame(self, kind: bytes, number: int, payload: bytes) -> None:
        if kind == _CONTROL:
            self._on_control(payload)
        elif number == _BROADCASTS:
            self._on_broadcast_piece(kind, payload)
        elif number in self._streams:  # else it was closed here meanwhile
            self._streams[number].handle(kind, payload)

    def _on_control(self, payload: bytes) -> None:
        try:
            message = decode(payload)
        except (ValueError, RecursionError):
            raise nonsense("no JSON") from None
        if type(message) is not dict:
            raise nonsense("no control message")
        if message.keys() == {"broadcast", "size"}:
            self._begin_broadcast(message["broadcast"], message["size"])
        elif message.keys() == {"broadcast_sent"}:
            self._broadcasts.pop(message["broadcast_sent"] if type(message["broadcast_sent"]) is int else -1, None)
        else:
            self._on_message(message)

    def _begin_broadcast(self, number: object, size: object) -> None:
        if not self._takes_broadcasts or type(number) is not int or type(size) is not int or not 0 < size <= LARGEST:
            raise nonsense("a broadcast")
        self._coming.append((number, size))
        self._broadcasts[number] = bytearray()

    def _on_broadcast_piece(self, kind: bytes, payload: bytes) -> None:
        if kind == CREDIT:
            self._uncredited = minus_credit(self._uncredited, payload)
            self._send_broadcasts()
            return
        if not self._coming:
            raise nonsense("a piece of no broadcast")
        number, size = self._coming[0]
        self._broadcasts[number] += payload
        self.post(CREDIT, _BROADCASTS, COUNT.pack(len(payload)))
        if len(self._broadcasts[number]) >= size:
            self._coming.pop(0)

    def broadcast(self, number: int) -> bytearray:
        """Raises LinkError: there is none."""
        if number not in self._broadcasts:
            raise nonsense("no such broadcast")
        return self._broadcasts[number]
