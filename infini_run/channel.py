"""Channels: typed messages between two processes, in two directions, each with one owner of either end.

A socketpair whose two directions are two half-streams. A process owns one end of each: it sends into one and receives
from the other, and closes nothing else. So the end of a stream is a place in it: END, when the sender closed it; the
kernel's end of file without it, when the sender died; never a flag that two could set.

    ours, theirs = channel.pair()     # each a Sender and a Receiver
    tx, rx = channel.connect(fd)      # in the process that inherited theirs
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections import deque

from infini_run.errors import Broken, ChannelError, Closed, End
from infini_run.inbox import BYTES, END, PICKLE, Inbox
from infini_run.outbox import END_FRAME, Outgoing, bytes_frame, parcel_frame
from infini_run.parcel import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from infini_run.inbox import Payload
    from infini_run.parcel import Buffer

LIMIT = 1 << 34  # bytes of one message, unless the channel is told otherwise
LINGER_S = 5.0  # how long close() waits for room to say END, behind what nobody reads
_NOW, _ALL, _QUIET = socket.MSG_DONTWAIT, socket.MSG_WAITALL, socket.MSG_NOSIGNAL


def pair(limit: int = LIMIT) -> tuple[tuple[Sender, Receiver], tuple[Sender, Receiver]]:
    """Two connected sides, each a Sender and a Receiver. `limit`: bytes of one message.

    Hand one side's `fileno()` to another process (`pass_fds`, stdin), then `forget()` that side here."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _side(here, limit), _side(there, limit)


def connect(fd: int, limit: int = LIMIT) -> tuple[Sender, Receiver]:
    """The side whose socket was inherited as `fd`, which is ours from now on. Raises OSError: it is no socket."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(True)
    os.set_inheritable(fd, False)
    return _side(sock, limit)


def _side(sock: socket.socket, limit: int) -> tuple[Sender, Receiver]:
    line = Line(sock)
    return Sender(line, limit), Receiver(line, limit)


class Line:
    """A socket that two halves share; it is closed when both have let go of it."""

    def __init__(self, sock: socket.socket, holders: int = 2) -> None:
        self.sock = sock
        self._holders = holders
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self.sock.close()


class Half:
    """One end of one direction."""

    def __init__(self, line: Line, limit: int) -> None:
        self._line = line
        self._fd = line.sock.fileno()
        self._limit = limit
        self._lock = threading.Lock()
        self._closed = False
        _halves.add(self)

    def fileno(self) -> int:
        """The socket, to wait on; the other half of this side has the same. -1 when closed."""
        return -1 if self._closed else self._fd

    @property
    def closed(self) -> bool:
        """Whether we have closed it."""
        return self._closed

    def forget(self) -> None:
        """Let go of our copy of the socket without a word to the other side: another process has it."""
        if not self._closed:
            self._closed = True
            self._line.let_go()

    def _wait(self, events: int, end_s: float | None, what: str) -> None:
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError(what)
        poller = select.poll()
        poller.register(self._fd, events)
        if not poller.poll(None if left_s is None else left_s * 1000):
            raise TimeoutError(what)

    def _enter(self, end_s: float | None, what: str) -> None:
        """Take the lock. Raises Closed, TimeoutError."""
        if not self._lock.acquire(False) and not self._lock.acquire(
            timeout=-1 if end_s is None else max(0.0, end_s - time.monotonic())
        ):
            raise TimeoutError(what)
        if self._closed:
            self._lock.release()
            raise self._closed_error()

    def _closed_error(self) -> Closed:
        return Closed(f"this {type(self).__name__} has been closed")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self._closed else f'fd {self._fd}'}>"


_halves: weakref.WeakSet[Half] = weakref.WeakSet()


def _end_of(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


class Sender(Half):
    """The end that messages go into. One thread sends at a time; the others wait."""

    def __init__(self, line: Line, limit: int = LIMIT) -> None:
        super().__init__(line, limit)
        self._out: Outgoing | None = None
        self._broken = ""
        self._posted: deque[Outgoing] = deque()
        self._ends = False

    def send(self, thing: object, timeout_s: float | None = None) -> None:
        """Send an object; return when the kernel has all of it. bytes go as they are.

        Large buffers in it are not copied: leave them alone meanwhile.

        Raises:
            TimeoutError: there was no room for so long. The message is not delivered; nothing is torn.
            Closed, Broken, UnpicklableError, MessageTooLong: nothing was sent.
        """
        if type(thing) is bytes:
            self.send_bytes(thing, timeout_s)
        else:
            self._send(parcel_frame(pack(thing), self._limit), timeout_s)

    def send_bytes(self, data: Buffer | list[Buffer], timeout_s: float | None = None) -> None:
        """Send the bytes of any contiguous buffer. Raises as `send` does."""
        self._send(bytes_frame(data, self._limit), timeout_s)

    def post_bytes(self, data: Buffer | list[Buffer]) -> bool:
        """For a caller with a loop of its own: send, or keep what finds no room now, for `flush`. Order is kept.
        Whether all has gone. Raises Closed, Broken, MessageTooLong."""
        self._posted.append(Outgoing(bytes_frame(data, self._limit), is_live=True))
        return self.flush()

    def post_end(self) -> bool:
        """The same for END: nothing may follow it."""
        self._posted.append(Outgoing([END_FRAME], is_live=True))
        self._ends = True
        return self.flush()

    def flush(self) -> bool:
        """Send on what was posted, as far as there is room: whether all of it has gone. Raises Closed, Broken."""
        try:
            self._enter(0.0, "")
        except TimeoutError:
            return False
        try:
            if self._broken:
                raise Broken(self._broken)
            self._settle(0.0, "")
            while self._posted:
                self._out = self._posted.popleft()
                self._push(self._out, 0.0, "")
            if self._ends:
                self._line.sock.shutdown(socket.SHUT_WR)
        except TimeoutError:
            return False
        finally:
            self._lock.release()
        return True

    def _send(self, pieces: list[Buffer], timeout_s: float | None) -> None:
        end_s = _end_of(timeout_s)
        what = f"nobody made room for a message within {timeout_s} s"
        self._enter(end_s, what)
        try:
            if self._broken:
                raise Broken(self._broken)
            self._settle(end_s, what)
            self._out = Outgoing(pieces)
            self._push(self._out, end_s, what)
        finally:
            self._lock.release()

    def _settle(self, end_s: float | None, what: str) -> None:
        """Finish, or make void, what an earlier send has left."""
        if self._out is not None:
            if not self._out.is_live:
                self._out = self._out.filler()
            if self._out is not None:
                self._push(self._out, end_s, what)

    def _push(self, out: Outgoing, end_s: float | None, what: str) -> None:
        flags = _QUIET if end_s is None else _QUIET | _NOW
        while not out.is_done:
            try:  # one call in C: no interrupt comes between what is sent and its count
                out.counts.extend(map(self._line.sock.sendmsg, (out.rest(),), ((),), (flags,)))
            except BlockingIOError:
                self._wait(select.POLLOUT, end_s, what)
            except (BrokenPipeError, ConnectionResetError):
                raise self._gone() from None
        self._out = None

    def _gone(self) -> ChannelError:
        if self._closed:
            return self._closed_error()
        self._broken = "the other side takes no more: it has died, or closed its receiver"
        return Broken(self._broken)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Say END and end this direction. What was sent is still read. Safe twice; never raises.

        Waits at most `linger_s` for a message that is half sent; the other side gets Broken instead of End then.
        """
        if self._closed:
            return
        self._closed = True
        end_s = time.monotonic() + linger_s
        has_lock = self._lock.acquire(timeout=linger_s)
        try:
            if has_lock and not self._broken:
                self._settle(end_s, "")
                self._push(Outgoing([END_FRAME]), end_s, "")
        except (TimeoutError, ChannelError):
            pass  # nobody reads: the end of the stream without END is what there is to say
        finally:
            self._line.sock.shutdown(socket.SHUT_WR)  # wakes who is in the middle of sending
            if not has_lock:
                self._lock.acquire()
            self._lock.release()
            self._line.let_go()


class Receiver(Half):
    """The end that messages come out of. Iterating gives them all, up to the End."""

    def __init__(self, line: Line, limit: int = LIMIT) -> None:
        super().__init__(line, limit)
        self._inbox = Inbox(limit)
        self._kept: tuple[int, Payload] | None = None
        self._over: tuple[type[ChannelError], str] | None = None

    def recv(self, timeout_s: float | None = None) -> object:
        """The next message.

        Raises:
            End: the other side closed, and all has been received.
            Broken: it died; what it had sent whole has been received.
            Closed: we have closed. TimeoutError: no whole message came within `timeout_s`; what came of it is kept.
            CannotUnpickle, MessageTooLong: this message is lost; the channel goes on.
        """
        kind, payload = self._next(timeout_s)
        if kind == BYTES:
            return payload
        if kind == PICKLE:
            return unpack(payload)  # type: ignore[arg-type]
        return unpack(payload[0], payload[1:])  # type: ignore[arg-type]

    def recv_bytes(self, timeout_s: float | None = None) -> bytes:
        """The next message, which is bytes. Raises TypeError if it is an object, which recv() has then."""
        _, payload = self._next(timeout_s, must_be=BYTES)
        return payload  # type: ignore[return-value]

    @property
    def pending(self) -> bool:
        """Whether recv() has an answer without reading: then nothing may come that makes `fileno()` readable."""
        if self._kept is None and not self._closed and self._over is None and self._lock.acquire(False):
            try:
                self._kept = self._inbox.take()
            finally:
                self._lock.release()
        return self._kept is not None or self._over is not None or self._closed

    def _next(self, timeout_s: float | None, must_be: int = 0) -> tuple[int, Payload]:
        end_s = _end_of(timeout_s)
        what = f"no message came within {timeout_s} s"
        self._enter(end_s, what)
        try:
            while True:
                message = self._kept or self._inbox.take()
                if message is None:
                    if self._over is not None:
                        raise self._over[0](self._over[1])
                    self._read(end_s, what)
                elif message[0] == END:
                    self._kept = None
                    self._over = End, "the other side has closed; everything has been received"
                elif must_be and message[0] != must_be:
                    self._kept = message
                    raise TypeError("the next message is an object and not bytes: recv() takes it")
                else:
                    self._kept = None
                    return message
        finally:
            self._lock.release()

    def _read(self, end_s: float | None, what: str) -> None:
        room, is_all_of_one = self._inbox.room()
        flags = _NOW if end_s is not None else _ALL if is_all_of_one else 0
        counts = self._inbox.counts
        try:  # one call in C: no interrupt comes between what is received and its count
            counts.extend(map(self._line.sock.recv_into, (room,), (0,), (flags,)))
        except BlockingIOError:
            self._wait(select.POLLIN, end_s, what)
            return
        except ConnectionResetError:
            counts.append(0)
        if not counts[-1]:
            if self._closed:
                raise self._closed_error()
            where = "" if self._inbox.is_empty else " in the middle of a message"
            self._over = Broken, f"the other side has died{where}: its stream ends without END"

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        try:
            return self.recv()
        except End:
            raise StopIteration from None

    def close(self) -> None:
        """Take no more: what is unread is dropped, and the other side's sends are Broken from now on. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._line.sock.shutdown(socket.SHUT_RD)  # wakes who is waiting for a message
        with self._lock:
            self._line.let_go()


def _forget_all() -> None:
    """In a forked child: the ends are the parent's. They would keep the other side from seeing it die."""
    for half in list(_halves):
        half.forget()


os.register_at_fork(after_in_child=_forget_all)
