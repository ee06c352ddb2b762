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
import time
from collections import deque
from threading import get_ident

from infini_run.errors import Broken, ChannelError, End
from infini_run.half import Half, Line
from infini_run.inbox import BYTES, END, PICKLE, Inbox
from infini_run.outbox import Outgoing, bytes_frame, end_frame, parcel_frame
from infini_run.parcel import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from typing import Any

    from infini_run.inbox import Message
    from infini_run.parcel import Buffer

LIMIT = 1 << 34  # bytes of one message, unless the channel is told otherwise
LINGER_S = 5.0  # how long close() waits for room to say END, behind what nobody reads
_NOW, _ALL, _QUIET = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL), int(socket.MSG_NOSIGNAL)
_QUIET_NOW = _QUIET | _NOW


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


class Sender(Half):
    """The end that messages go into. Threads and coroutines take turns."""

    _too_late = "nobody made room for the message in time"

    def __init__(self, line: Line, limit: int = LIMIT) -> None:
        super().__init__(line, limit)
        self._sock_send, self._sock_sendmsg = line.sock.send, line.sock.sendmsg
        self._out: Outgoing | None = None  # what is being sent, or was given up in its middle
        self._broken = ""
        self._last: Outgoing | None = None  # END, once we close
        self._posted: deque[Outgoing] = deque()
        self._ends = False  # END was posted
        self._is_widened = False
        self._bell = -1  # wakes who waits for room when we close; there from the first such wait on

    def send(self, thing: object, timeout_s: float | None = None) -> None:
        """Send an object; return when the kernel has all of it. bytes go as they are, all else by (cloud)pickle.

        Large buffers in it (bytes, arrays) are not copied: leave them alone meanwhile.

        Raises:
            TimeoutError: no room for it within `timeout_s` seconds (0: at once). It will not be delivered.
            Closed, Broken, UnpicklableError, MessageTooLong: it will not be delivered.
        """
        if type(thing) is bytes:
            self._locked(timeout_s, self._start, bytes_frame(thing, self._limit))
        else:
            self._locked(timeout_s, self._start, parcel_frame(pack(thing), self._limit))

    def send_bytes(self, data: Buffer | list[Buffer], timeout_s: float | None = None) -> None:
        """Send the bytes of any contiguous buffer, or of a list of them. Raises as `send` does."""
        self._locked(timeout_s, self._start, bytes_frame(data, self._limit))

    def post_bytes(self, data: Buffer | list[Buffer]) -> bool:
        """For a caller with a loop of its own: send, or keep what finds no room now, for `flush`. Order is kept.
        Whether all has gone. Raises Closed, Broken, MessageTooLong."""
        return self._post(bytes_frame(data, self._limit))

    def post_end(self) -> bool:
        """The same for END: nothing may follow it."""
        self._ends = True
        return self._post(end_frame())

    def _post(self, out: Outgoing) -> bool:
        out.is_live = True
        self._posted.append(out)
        return self.flush()

    def flush(self) -> bool:
        """Send on what was posted, as far as there is room: whether all of it has gone. Raises Closed, Broken."""
        try:
            self._locked(0.0, self._flush, None)
        except TimeoutError:
            return False
        return True

    def _flush(self, _: None, end_s: float | None) -> None:
        if self._closed:
            raise self._closed_error()
        if self._broken:
            raise Broken(self._broken)
        self._settle(0.0)
        while self._posted:
            self._out = self._posted.popleft()
            self._push(self._out, 0.0)
        if self._ends:
            self._line.sock.shutdown(socket.SHUT_WR)

    async def asend(self, thing: object) -> None:
        """`send` in a coroutine. Where it is cancelled, the message will not be delivered."""
        if type(thing) is bytes:
            await self._asend(bytes_frame(thing, self._limit))
        else:
            await self._asend(parcel_frame(pack(thing), self._limit))

    async def asend_bytes(self, data: Buffer) -> None:
        """`send_bytes` in a coroutine."""
        await self._asend(bytes_frame(data, self._limit))

    async def _asend(self, out: Outgoing) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        out.is_live = True
        try:
            async with self._turn(loop):
                while not await self._try(loop, out):
                    await self._until_ready(loop, loop.add_writer, loop.remove_writer)
        except BaseException:
            out.is_live = False
            raise

    async def _try(self, loop: AbstractEventLoop, out: Outgoing) -> bool:
        """Whether all of it has been sent, be it by us."""
        await self._until_free(loop)
        try:
            if not out.is_done:
                if self._is_finished:
                    raise self._closed_error()
                if self._out is out:
                    self._push(out, 0.0)
                else:
                    self._start(out, 0.0)
        except TimeoutError:
            return False
        finally:
            self._leave()
        return True

    def _start(self, out: Outgoing, end_s: float | None) -> None:
        """Send a frame, after what is left of the one before. The lock is ours."""
        if self._closed and out is not self._last:
            raise self._closed_error()
        if self._broken:
            raise Broken(self._broken)
        if self._out is not None:
            self._settle(end_s)
        self._out = out
        self._push(out, end_s)

    def _settle(self, end_s: float | None) -> None:
        """Finish what somebody waits for; make void what was given up."""
        if self._out is not None and not self._out.is_live:
            self._out = self._out.filler()
        if self._out is not None:
            self._push(self._out, end_s)

    def _push(self, out: Outgoing, end_s: float | None) -> None:
        flags = _QUIET if end_s is None else _QUIET_NOW
        counts, pieces = out.counts, out.pieces
        while sum(counts) != out.size:
            if counts or len(pieces) > 1:
                pieces = out.rest()
            try:  # one call in C: no interrupt comes between what is sent and its count
                if len(pieces) == 1:
                    counts.extend(map(self._sock_send, pieces, (flags,)))
                else:
                    counts.extend(map(self._sock_sendmsg, (pieces,), ((),), (flags,)))
            except BlockingIOError:
                self._wait_for_room(out, end_s)
            except (BrokenPipeError, ConnectionResetError):
                raise self._gone() from None
        self._out = None

    def _wait_for_room(self, out: Outgoing, end_s: float | None) -> None:
        if out is self._last and not self._is_widened:
            self._is_widened = True  # END finds room however full it is: twice as much, within the kernel's limit
            sock = self._line.sock
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
            return
        if end_s and self._bell < 0:
            self._bell = os.eventfd(0)
        try:
            self._wait(select.POLLOUT, end_s, self._bell)
        except TimeoutError:
            if not out.is_live:
                self._out = out.filler()
            raise

    def _gone(self) -> ChannelError:
        self._out = None
        if self._closed:
            return self._closed_error()
        self._broken = "the other side takes no more: it has died, or closed its receiver"
        return Broken(self._broken)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Say END and end this direction; what was sent can still be received. Safe twice, and in any state.

        Waits only where a message is half sent, or no room can be made for END, and at most `linger_s` seconds: then
        the other side gets Broken instead of End.
        """
        if not self._begin_to_close():
            return
        self._last = end_frame()
        end_s = time.monotonic() + linger_s
        is_free = self._owner != get_ident() and self._lock.acquire(timeout=max(0.0, linger_s))
        try:
            if is_free and not self._broken:
                self._start(self._last, end_s)
        except (TimeoutError, ChannelError):
            pass  # nobody reads: that the stream ends without END is all there is to say
        finally:
            if is_free:
                self._lock.release()
            self._finish()

    async def aclose(self, linger_s: float = LINGER_S) -> None:
        """`close` in a coroutine."""
        import asyncio

        if linger_s <= 0:
            self.close(linger_s)
        elif self._begin_to_close():
            self._last = end_frame()
            try:
                await asyncio.wait_for(self._asend(self._last), linger_s)
            except (asyncio.TimeoutError, ChannelError):
                pass  # as in close()
            finally:
                self._finish()

    def _finish(self) -> None:
        self._is_finished = True
        self._line.sock.shutdown(socket.SHUT_WR)  # wakes who is sending
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)
        super()._finish()

    def _drop(self) -> None:
        super()._drop()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Receiver(Half):
    """The end that messages come out of. Iterating, by `for` or `async for`, gives them all, up to the End."""

    _too_late = "no message came in time"

    def __init__(self, line: Line, limit: int = LIMIT) -> None:
        super().__init__(line, limit)
        self._recv_into = line.sock.recv_into
        self._inbox = Inbox(limit)
        self._kept: Message | None = None  # a message that was seen and not taken
        self._over: tuple[type[ChannelError], str] | None = None

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message.

        Raises:
            End: the other side closed, and all has been received.
            Broken: it died; what it had sent whole has been received.
            Closed: we have closed.
            TimeoutError: no whole message came within `timeout_s` seconds (0: none is here); what came of it is kept.
            CannotUnpickle, MessageTooLong: this message is lost; the channel goes on.
        """
        return _open(self._locked(timeout_s, self._next, 0))

    def recv_bytes(self, timeout_s: float | None = None) -> bytes:
        """The next message, which is bytes. Raises TypeError if it is not: recv() has it then."""
        return self._locked(timeout_s, self._next, BYTES)[1]  # type: ignore[no-any-return]

    async def arecv(self) -> Any:
        """`recv` in a coroutine. Where it is cancelled, no message is lost."""
        return _open(await self._areceive(0))

    async def arecv_bytes(self) -> bytes:
        """`recv_bytes` in a coroutine."""
        return (await self._areceive(BYTES))[1]  # type: ignore[return-value]

    @property
    def pending(self) -> bool:
        """Whether recv() has an answer without reading: nothing more may come then that makes `fileno()` readable."""
        if self._kept is None and not self._closed and self._over is None and self._lock.acquire(False):
            try:
                self._kept = self._inbox.take()
            finally:
                self._leave()
        return self._kept is not None or self._over is not None or self._closed

    async def _areceive(self, must_be: int) -> Message:
        import asyncio

        loop = asyncio.get_running_loop()
        async with self._turn(loop):
            while True:
                await self._until_free(loop)
                try:
                    return self._next(must_be, 0.0)
                except TimeoutError:
                    pass  # it is not here yet
                finally:
                    self._leave()
                await self._until_ready(loop, loop.add_reader, loop.remove_reader)

    def _next(self, must_be: int, end_s: float | None) -> Message:
        """The next message. The lock is ours."""
        while not self._closed:
            message = self._kept or self._inbox.take()
            if message is None:
                if self._over is not None:
                    raise self._over[0](self._over[1])
                self._read(end_s)
            elif message[0] == END:
                self._kept = None
                self._over = End, "the other side has closed; everything has been received"
            elif must_be and message[0] != must_be:
                self._kept = message
                raise TypeError("the next message is an object and not bytes: recv() takes it")
            else:
                self._kept = None
                return message
        raise self._closed_error()

    def _read(self, end_s: float | None) -> None:
        try:
            if end_s is None:
                count = self._inbox.pull(self._recv_into, 0, _ALL)
            else:
                count = self._inbox.pull(self._recv_into, _NOW, _NOW)
        except BlockingIOError:
            self._wait(select.POLLIN, end_s)
            return
        except ConnectionResetError:  # it has gone with messages of ours unread
            count = 0
        if not count:
            where = "" if self._inbox.is_empty else " in the middle of a message"
            self._over = Broken, f"the other side has died{where}: its stream ends without END"

    def close(self) -> None:
        """Take no more: what is unread is dropped, and the other side's sends are Broken from now on. Safe twice."""
        if self._begin_to_close():
            self._line.sock.shutdown(socket.SHUT_RD)  # wakes who waits for a message
            self._finish()

    def __iter__(self) -> Receiver:
        return self

    def __next__(self) -> Any:
        try:
            return self.recv()
        except End:
            raise StopIteration from None

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.arecv()
        except End:
            raise StopAsyncIteration from None

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(message: Message) -> object:
    kind, payload = message
    if kind == BYTES:
        return payload
    if kind == PICKLE:
        return unpack(payload)  # type: ignore[arg-type]
    return unpack(payload[0], payload[1:])  # type: ignore[arg-type]
