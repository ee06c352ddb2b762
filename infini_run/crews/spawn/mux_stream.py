"""One stream of a multiplexer: a socket at this end, and its peer at the other.

Each direction has a window: the most bytes on their way, and the receiving end credits those that its socket has
taken. So unread bytes delay no other stream.
"""

from __future__ import annotations

import socket
from collections import deque
from struct import Struct

from infini_run.errors import LinkError
from infini_run.system.fork_hooks import close_link
from infini_run.system.io_sizes import LARGE_CHUNK
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from infini_run.channel.serializer import Buffer
    from infini_run.system.poller import Poller

    class Mux(Protocol):
        """What a stream needs of its Multiplexer. has_room: the connection takes more."""

        poller: Poller
        has_room: bool

        def post(self, kind: bytes, number: int, payload: bytes = b"") -> None: ...
        def broadcast(self, number: int) -> bytearray: ...


WINDOW = 4 << 20  # bytes of one direction that are on their way
COUNT = Struct(">I")
DATA, END, CUT, CREDIT, USE = b"d", b"e", b"x", b"c", b"u"


class MuxStream:
    """One channel: bytes of the socket at this end go to the socket at the other end, and back."""

    def __init__(self, mux: Mux, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.number = number
        self._mux = mux
        self._sock = sock
        self._out: deque[tuple[memoryview, bool]] = deque()  # and whether it is credited
        self._sent = 0  # bytes that the other end has not credited yet
        self._waiting = 0  # bytes that came and the socket has not taken yet
        self._owed = 0  # bytes that the socket has taken, and that are not credited yet
        self._can_read = self._can_write = True
        self._ends = False  # no more comes from the other end
        self._uses: deque[int] = deque()  # broadcasts, after what the socket has now
        self._when_read: list[Callable[[], None]] = []
        self._when_written: list[Callable[[], None]] = []
        self.watch()

    # ---- from the socket

    def _read(self) -> None:
        while self._can_read and self._mux.has_room and self._sent < WINDOW:
            try:
                data = self._sock.recv(min(LARGE_CHUNK, WINDOW - self._sent))
            except BlockingIOError:
                self._has_read()
                return
            except OSError:
                data = b""
            if not data:
                self._can_read = False
                self._mux.post(END, self.number)
            else:
                self._sent += len(data)
                self._mux.post(DATA, self.number, data)
        if not self._can_read:
            self._has_read()

    def _has_read(self) -> None:
        """Note that everything in the socket is on its way."""
        while self._uses:
            self._mux.post(USE, self.number, COUNT.pack(self._uses.popleft()))
        calls, self._when_read = self._when_read, []
        for call in calls:
            call()

    def when_read(self, call: Callable[[], None]) -> None:
        """Call this after everything that is in the socket at present has gone."""
        self._when_read.append(call)
        self.move()

    def use(self, broadcast: int) -> None:
        """Give that broadcast to the other end's socket, after what is in this one now."""
        self._uses.append(broadcast)

    # ---- to the socket

    def put(self, data: Buffer, *, is_credited: bool = True) -> None:
        """Write what came from the other end."""
        self._out.append((memoryview(data), is_credited))
        self.move()

    def _write(self) -> None:
        while self._out and self._can_write:
            view, is_credited = self._out[0]
            try:
                sent = self._sock.send(view, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:  # it is not read any more
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
        """Refuse the bytes: the socket takes no more. Drop what still comes, and send CUT."""
        if self._can_write:
            self._can_write = False
            self._out.clear()
            self._mux.post(CUT, self.number)

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            return  # it was closed on the other side

    def _credit(self) -> None:
        if self._owed >= WINDOW // 4:
            self._mux.post(CREDIT, self.number, COUNT.pack(self._owed))
            self._owed = 0

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this after the socket has taken everything that arrived."""
        self._when_written.append(call)
        self.move()

    # ---- from the other end

    def handle(self, kind: bytes, payload: bytes) -> None:
        """Act on a frame. Raises LinkError: it is more than the window."""
        if kind == DATA and self._can_write:
            self._waiting += len(payload)
            if self._waiting + self._owed > WINDOW:
                raise nonsense("more than the window")
            self.put(payload)
        elif kind == END:
            self._ends = True
            self.move()
        elif kind == CUT:
            self._cut()
        elif kind == CREDIT:
            self._sent = minus_credit(self._sent, payload)
            self.move()
        elif kind == USE and self._can_write:
            self.put(self._mux.broadcast(count_of(payload)), is_credited=False)

    def _cut(self) -> None:
        """Let those that write to the socket fail: the other end reads no more."""
        if self._can_read:
            self._can_read = False
            self._shut(socket.SHUT_RD)
        self._has_read()
        self.watch()

    # ---- for the loop

    def move(self) -> None:
        """Move as many bytes as possible."""
        if self._sock.fileno() >= 0:
            self._write()
            self._read()
            self.watch()

    def watch(self) -> None:
        if self._sock.fileno() < 0:
            return
        read = self._can_read and self._mux.has_room and self._sent < WINDOW
        write = self._out and self._can_write
        self._mux.poller.watch(self._sock.fileno(), (READ if read else 0) | (WRITE if write else 0), self.move)

    def close(self) -> None:
        """Close the stream. Safe twice."""
        if self._sock.fileno() >= 0:
            self._mux.poller.unwatch(self._sock.fileno())
            close_link(self._sock)
        self._can_read = self._can_write = False
        self._out.clear()
        for call in (*self._when_read, *self._when_written):
            call()
        self._when_read, self._when_written = [], []

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child: send nothing, and call nothing."""
        self._sock.close()


def count_of(payload: bytes) -> int:
    """Return the number in a frame. Raises LinkError: it has none."""
    if len(payload) != COUNT.size:
        raise nonsense("no count")
    found: int = COUNT.unpack(payload)[0]
    return found


def minus_credit(held: int, credit: bytes) -> int:
    """Return the bytes on their way, less a credit. Raises LinkError if the credit is for more than that."""
    left = held - count_of(credit)
    if left < 0:
        raise nonsense("a credit for what was not sent")
    return left


def nonsense(what: str) -> LinkError:
    """Return the error of a stream on which `what` came."""
    return LinkError(f"what came over the stream is not what infini-run sends: {what}")
