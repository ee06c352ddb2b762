"""The receiving end of a channel, up to END."""

from __future__ import annotations

import _socket
import select
from functools import partial
from itertools import repeat

from infini_run.channel.decoder import BYTES, END, PICKLE, ROOM, FrameDecoder, Source
from infini_run.channel.endpoint import LIMIT, Endpoint
from infini_run.channel.errors import ChannelBroken, ChannelEnd, ChannelError
from infini_run.channel.serializer import deserialize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.channel.decoder import Message
    from infini_run.channel.endpoint import SharedSocket

_ALL, _NOW = _socket.MSG_WAITALL, _socket.MSG_DONTWAIT


class Receiver(Endpoint):
    """The receiving end of a channel. Iterating, by `for` or `async for`, gives all messages, up to END."""

    _too_late = "no message arrived in time"

    def __init__(self, line: SharedSocket, limit: int = LIMIT) -> None:
        super().__init__(line, limit)
        recv, recv_into = line.sock.recv, line.sock.recv_into
        self._waiting = Source(map(recv, repeat(ROOM), repeat(0)), recv_into, 0, _ALL)
        self._instant = Source(map(recv, repeat(ROOM), repeat(_NOW)), recv_into, _NOW, _NOW)
        self._decoder = FrameDecoder(limit)
        self._kept: Message | None = None  # a message that `pending` saw and nobody took
        self._over: tuple[type[ChannelError], str] | None = None
        self.is_torn = False  # what came is no message, and the start of the next one is unknown

    def recv(self, timeout_s: float | None = None) -> Any:
        """Return the next message.

        Args:
            timeout_s: how long to wait for it, in seconds (0: not at all); None: no limit.

        Raises:
            ChannelEnd: the other side closed, and this side received everything.
            ChannelBroken: the other side died; this side received what it sent whole.
            ChannelClosed: this end closed.
            TimeoutError: no whole message came in time; a part that came is kept.
            CannotUnpickle, MessageTooLong: this message is lost; the channel continues.
        """
        return _open(self._locked(timeout_s, self._next, 0))

    def recv_bytes(self, timeout_s: float | None = None) -> bytes:
        """Return the next message, which is bytes.

        Args:
            timeout_s: how long to wait for it, in seconds (0: not at all); None: no limit.

        Raises:
            TypeError: it is not bytes; recv() has it then.
            ChannelEnd: the other side closed, and this side received everything.
            ChannelBroken: the other side died; this side received what it sent whole.
            ChannelClosed: this end closed.
            TimeoutError: no whole message came in time; a part that came is kept.
            MessageTooLong: this message is lost; the channel continues.
        """
        return self._locked(timeout_s, self._next, BYTES)[1]  # type: ignore[no-any-return]

    async def arecv(self) -> Any:
        """Return the next message, in a coroutine. A cancellation loses no message.

        Raises:
            ChannelEnd: the other side closed, and this side received everything.
            ChannelBroken: the other side died; this side received what it sent whole.
            ChannelClosed: this end closed.
            CannotUnpickle, MessageTooLong: this message is lost; the channel continues.
        """
        return _open(await self._areceive(0))

    async def arecv_bytes(self) -> bytes:
        """Return the next message, which is bytes, in a coroutine. A cancellation loses no message.

        Raises:
            TypeError: it is not bytes; arecv() has it then.
            ChannelEnd: the other side closed, and this side received everything.
            ChannelBroken: the other side died; this side received what it sent whole.
            ChannelClosed: this end closed.
            MessageTooLong: this message is lost; the channel continues.
        """
        return (await self._areceive(BYTES))[1]  # type: ignore[return-value]

    @property
    def pending(self) -> bool:
        """Whether recv() has an answer without reading: `fileno()` may not become readable again then."""
        if self._kept is None and not self._closed and self._over is None and self._lock.acquire(False):
            try:
                self._kept = self._decoder.next_message()
            except ChannelBroken as error:
                self._tear(error)
            finally:
                self._leave()
        return self._kept is not None or self._over is not None or self._closed

    async def _areceive(self, must_be: int) -> Message:
        import asyncio

        loop = asyncio.get_running_loop()
        async with self._queue_for(loop):
            while True:
                await self._until_free(loop)
                try:
                    return self._next(must_be, 0.0)
                except TimeoutError:
                    before = self._decoder.state  # it is not here yet
                finally:
                    self._leave()
                await self._until_ready(loop, loop.add_reader, loop.remove_reader, partial(self._has_news, before))

    def _has_news(self, before: object) -> bool:
        """Return whether another thread has read since, perhaps more than its own message."""
        return self._kept is not None or self._over is not None or self._decoder.state != before

    def _next(self, must_be: int, end_s: float | None) -> Message:
        """Return the next message. The caller holds the lock."""
        while not self._closed:
            message = self._kept
            if message is None:
                if self._over is not None:
                    raise self._over[0](self._over[1])
                try:
                    message = self._decoder.read(self._waiting if end_s is None else self._instant)
                except BlockingIOError:
                    self._wait(select.POLLIN, end_s)
                except ChannelBroken as error:
                    self._tear(error)
                    raise
                except (EOFError, ConnectionResetError):  # the latter: it has gone, and did not read all messages
                    where = "" if self._decoder.is_empty else " in the middle of a message"
                    self._over = ChannelBroken, f"the other side died{where}: its stream ends without END"
                if message is None:
                    continue
            if message[0] == END:
                self._over = ChannelEnd, "the other side closed its channel; everything was received"
                self._kept = None
            elif must_be and message[0] != must_be:
                self._kept = message
                raise TypeError("the next message is an object, not bytes; use recv()")
            else:
                self._kept = None
                return message
        raise self._closed_error()

    def _tear(self, error: ChannelBroken) -> None:
        self._over, self.is_torn = (ChannelBroken, str(error)), True

    def close(self) -> None:
        """Close this endpoint and drop unread messages. The other side's sends then raise ChannelBroken. You may call
        it again."""
        if self._begin_to_close():
            self._line.sock.shutdown(_socket.SHUT_RD)  # wakes whoever waits for a message
            self._finish()

    async def aclose(self) -> None:
        """Close as `close` does, in a coroutine, without a wait."""
        self.close()

    def __iter__(self) -> Receiver:
        return self

    def __next__(self) -> Any:
        try:
            return self.recv()
        except ChannelEnd:
            raise StopIteration from None

    def __aiter__(self) -> Receiver:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.arecv()
        except ChannelEnd:
            raise StopAsyncIteration from None

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Receiver:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _open(message: Message) -> object:
    kind, payload = message
    if kind == BYTES:
        return payload
    if kind == PICKLE:
        return deserialize(payload)  # type: ignore[arg-type]
    return deserialize(payload[0], payload[1:])  # type: ignore[arg-type]
