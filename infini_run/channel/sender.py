"""The sending end of a channel.

A message goes whole or not at all: the next send makes void what was given up in its middle.
"""

from __future__ import annotations

import _socket
import select
import time
from _thread import get_ident
from collections import deque
from itertools import repeat
from operator import itemgetter

from infini_run.channel.encoder import OutgoingFrame, bytes_frame, end_frame, in_pieces, joined, parcel_frame
from infini_run.channel.endpoint import LIMIT, Endpoint
from infini_run.channel.errors import ChannelBroken, ChannelError
from infini_run.channel.serializer import serialize
from infini_run.number_arguments import LONGEST_S, read_seconds
from infini_run.system.wakeup import Wakeup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from infini_run.channel.encoder import Frame
    from infini_run.channel.endpoint import SharedSocket
    from infini_run.channel.serializer import Buffer

LINGER_S = 5.0  # how long close() waits for room to say END, behind what nobody reads
_QUIET = _socket.MSG_NOSIGNAL
_QUIET_NOW = _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT


class Sender(Endpoint):
    """The sending end of a channel. Threads and coroutines take turns."""

    _too_late = "the receiver made no room for the message in time"
    _wakeup: Wakeup | None = None  # wakes who waits for room when this end closes; exists from the first such wait on

    def __init__(self, line: SharedSocket, limit: int = LIMIT) -> None:
        super().__init__(line, limit)
        self._sock_send, self._sock_sendmsg = line.sock.send, line.sock.sendmsg
        self._next_frame = [b""]  # what `_sends` sends whenever it is asked for its next item
        self._sends = map(line.sock.send, map(itemgetter(0), repeat(self._next_frame)), repeat(_QUIET))
        self._out: Frame | None = None  # what is being sent, or was given up in its middle; of bytes, as far as:
        self._written = 0
        self._posted: deque[OutgoingFrame] = deque()  # what is to be sent when there is room
        self._ends = False  # END is the last of them
        self._broken = ""
        self._last: OutgoingFrame | None = None  # END, once this end closes
        self._is_widened = False

    def send(self, thing: object, timeout_s: float | None = None) -> None:
        """Send an object; return when the kernel has all of it. bytes go unchanged, all else by (cloud)pickle.

        Large buffers in it (bytes, arrays) go without a copy: leave them alone meanwhile.

        Args:
            thing: any object that pickles.
            timeout_s: how long to wait for room, in seconds (0: not at all); None: no limit.

        Raises:
            TimeoutError: there was no room for it in time. The other side will not get it.
            ChannelClosed, ChannelBroken, UnpicklableError, MessageTooLong: the other side will not get it.
        """
        if type(thing) is bytes:
            self._locked(timeout_s, self._start, bytes_frame(thing, self._limit))
        else:
            self._locked(timeout_s, self._start, parcel_frame(serialize(thing), self._limit))

    def send_bytes(self, data: Buffer | list[Buffer], timeout_s: float | None = None) -> None:
        """Send bytes as one message; return when the kernel has all of it.

        Args:
            data: any contiguous buffer, or a list of them.
            timeout_s: how long to wait for room, in seconds (0: not at all); None: no limit.

        Raises:
            TimeoutError: there was no room for it in time. The other side will not get it.
            ChannelClosed, ChannelBroken, MessageTooLong: the other side will not get it.
        """
        self._locked(timeout_s, self._start, bytes_frame(data, self._limit))

    def post_bytes(self, *messages: Buffer | list[Buffer]) -> bool:
        """Send messages without waiting, for a caller with its own event loop, and keep those that find no room for
        `flush`. Their order stays. Return True if everything was sent.

        Args:
            messages: each any contiguous buffer, or a list of them; several go with one call of the kernel.

        Raises:
            ChannelClosed, ChannelBroken, MessageTooLong: the other side will not get it.
        """
        return self._post(joined([bytes_frame(data, self._limit) for data in messages]))

    def post_end(self) -> bool:
        """Send END without waiting, as `post_bytes` does: nothing may follow it."""
        self._last = end_frame()
        is_sent = self._post(self._last)
        self._ends = True
        return is_sent and self.flush()

    def flush(self) -> bool:
        """Send the kept messages as far as there is room. Return True if everything was sent. Raises ChannelClosed,
        ChannelBroken."""
        try:
            self._locked(0.0, self._flush, None)
        except TimeoutError:
            return False
        return True

    def _post(self, frame: Frame) -> bool:
        if self._closed or self._ends:
            raise self._closed_error()
        out = in_pieces(frame)
        out.is_awaited = True
        self._posted.append(out)
        return self.flush()

    def _flush(self, _: None, end_s: float | None) -> None:
        if self._closed:
            raise self._closed_error()
        if self._broken:
            raise ChannelBroken(self._broken)
        self._finish_pending(end_s)
        if self._ends:
            self._line.sock.shutdown(_socket.SHUT_WR)

    async def asend(self, thing: object) -> None:
        """Send an object, in a coroutine. After a cancellation the other side will not get the message.

        Args:
            thing: any object that pickles.
        """
        if type(thing) is bytes:
            await self._asend(bytes_frame(thing, self._limit))
        else:
            await self._asend(parcel_frame(serialize(thing), self._limit))

    async def asend_bytes(self, data: Buffer) -> None:
        """Send bytes as one message, in a coroutine.

        Args:
            data: any contiguous buffer.
        """
        await self._asend(bytes_frame(data, self._limit))

    async def _asend(self, frame: Frame) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        out = in_pieces(frame)
        out.is_awaited = True
        try:
            async with self._queue_for(loop):
                while not await self._try(loop, out):
                    await self._until_ready(loop, loop.add_writer, loop.remove_writer, lambda: out.is_done)
        except BaseException:
            out.is_awaited = False
            raise

    async def _try(self, loop: AbstractEventLoop, out: OutgoingFrame) -> bool:
        """Return whether the kernel has all of it, whoever sent it."""
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

    def _start(self, frame: Frame, end_s: float | None) -> None:
        """Send a frame, after what is left of the one before. The caller holds the lock."""
        if (self._closed or self._ends) and frame is not self._last:
            raise self._closed_error()
        if self._broken:
            raise ChannelBroken(self._broken)
        if self._out is not None or self._posted:
            self._finish_pending(end_s)
        if type(frame) is bytes and end_s is None:
            self._written, self._out = 0, frame
            self._next_frame[0] = frame
            sends = self._sends
            try:
                for self._written in sends:  # a store, which no interrupt keeps apart from the call in C
                    break
            except (BrokenPipeError, ConnectionResetError):
                raise self._peer_closed_error() from None
            if self._written == len(frame):
                self._out = None
                return
            frame = in_pieces(frame, self._written)
        self._push(in_pieces(frame), end_s)

    def _finish_pending(self, end_s: float | None) -> None:
        """Finish what somebody waits for; make void what was given up."""
        out = None if self._out is None else in_pieces(self._out, self._written)
        if out is not None and not out.is_awaited:
            self._out = out = out.void_remainder()
        if out is not None:
            self._push(out, end_s)
        while self._posted:
            self._push(self._posted.popleft(), end_s)

    def _push(self, out: OutgoingFrame, end_s: float | None) -> None:
        self._out = out
        flags = _QUIET if end_s is None else _QUIET_NOW
        counts = out.counts
        while not out.is_done:
            pieces = out.rest()
            try:  # one call in C: no interrupt comes between what is sent and its count
                if len(pieces) == 1:
                    counts.extend(map(self._sock_send, pieces, (flags,)))
                else:
                    counts.extend(map(self._sock_sendmsg, (pieces,), ((),), (flags,)))
            except BlockingIOError:
                self._wait_for_room(out, end_s)
            except (BrokenPipeError, ConnectionResetError):
                raise self._peer_closed_error() from None
        self._out = None

    def _wait_for_room(self, out: OutgoingFrame, end_s: float | None) -> None:
        if out is self._last and not self._is_widened:
            self._is_widened = True  # END finds room however full it is: twice as much, within the kernel's limit
            room = _socket.SOL_SOCKET, _socket.SO_SNDBUF
            self._line.sock.setsockopt(*room, self._line.sock.getsockopt(*room))
            return
        if end_s and self._wakeup is None:
            self._wakeup = Wakeup()
        try:
            self._wait(select.POLLOUT, end_s, self._wakeup)
        except TimeoutError:
            if not out.is_awaited:
                self._out = out.void_remainder()
            raise

    def _peer_closed_error(self) -> ChannelError:
        self._out = None
        if self._closed:
            return self._closed_error()
        self._broken = "the other side is gone: it died, or closed its receiver"
        return ChannelBroken(self._broken)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Send END and end this direction; the other side can still receive what was sent. Safe twice, and in any
        state.

        Args:
            linger_s: how long to wait, in seconds, if a message is half sent, or there is no room for END. Then the
                other side gets ChannelBroken instead of ChannelEnd.
        """
        linger_s = min(read_seconds("linger_s", linger_s), LONGEST_S)
        if not self._begin_to_close():
            return
        self._last = end_frame()
        end_s = time.monotonic() + linger_s
        is_free = self._owner != get_ident() and self._lock.acquire(timeout=linger_s)
        try:
            if is_free and not self._broken:
                self._start(self._last, end_s)
        except (TimeoutError, ChannelError):
            pass  # nobody reads: a stream that ends without END is all there is to report
        finally:
            if is_free:
                self._lock.release()
            self._finish()

    async def aclose(self, linger_s: float = LINGER_S) -> None:
        """Close as `close` does, in a coroutine.

        Args:
            linger_s: how long to wait for room, in seconds.
        """
        import asyncio

        linger_s = min(read_seconds("linger_s", linger_s), LONGEST_S)
        if not linger_s:
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
        self._line.sock.shutdown(_socket.SHUT_WR)  # wakes whoever is sending
        if self._wakeup is not None:
            self._wakeup.wake()
        super()._finish()

    def _drop(self) -> None:
        super()._drop()
        if self._wakeup is not None:
            self._wakeup.close()

    def _after_fork(self) -> None:
        super()._after_fork()
        if self._wakeup is not None:
            self._wakeup.after_fork_in_child()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
