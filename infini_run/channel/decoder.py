"""The receiving half of a channel: bytes in, where they belong, and messages out. Pure.

A frame is a head (kind, number of parts, bytes of the payload), the payload, and one byte that says whether it
counts. A sender that gave up in its middle fills it up and says VOID, so that the stream is never torn. The payload
is a pickle, bytes, or a table of sizes and as many parts. Such parts are a pickle and its buffers, each read into
separate memory.

State changes in single stores, so an interrupt (a signal handler that raises) can come anywhere. It may lose the
message that the call was about to return, but never the place in the stream.
"""

from __future__ import annotations

from bisect import bisect_right
from io import BytesIO
from struct import Struct

from infini_run.channel.errors import ChannelBroken, MessageTooLong

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Payload = bytes | list[bytes | bytearray]
    Message = tuple[int, Payload]
    _State = tuple[int, int, "_LargeFrame | None", int, list[int]]
    _RecvInto = Callable[[memoryview, int, int], int]

HEAD = Struct(">BIQ")
SIZE = Struct(">Q")
PICKLE, BYTES, PARTS, END = 0xF9, 0xFA, 0xFB, 0xFC  # bytes that no text has, and that few numbers begin with
VOID, VALID = b"\0", b"\1"
WRITABLE = 1 << 63  # in the table of sizes: the part was writable where it came from
ROOM = 1 << 16  # many small frames come with one read; a large one goes by it
_HEAD_SIZE, _OVERHEAD, _unpack_head = HEAD.size, HEAD.size + 1, HEAD.unpack_from
_NO_LENGTH = (0,)
NOT_OURS = "what came over the channel is not what infini-run sends"
_DATA = frozenset((PICKLE, BYTES))
_SMALL = frozenset((*_DATA, END))  # kinds of one piece
_KINDS = frozenset((*_SMALL, PARTS))
_DIRECT = 1 << 14  # from this many bytes, a payload is read into separate memory


class Source:
    """The ways to read from a stream.

    Args:
        reads: an iterator whose next item is one read of at most ROOM bytes.
        recv_into: the method of a socket.
        flags: the flags of `recv_into`, and of a read into the memory of a large frame.
    """

    __slots__ = ("flags", "reads", "recv_into")

    def __init__(self, reads: Iterator[bytes], recv_into: _RecvInto, *flags: int) -> None:
        self.reads = reads
        self.recv_into = recv_into
        self.flags = [(flag,) for flag in flags]


class FrameDecoder:
    """The messages of a stream: `next_message()` until it returns None, then `read()`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memory = bytearray()  # of ROOM bytes, once it is needed
        self._view = memoryview(self._memory)
        # None: nothing. bytes: what one read brought since. tuple: the memory with its start and stop; the large
        # frame and how much of it came; what came since
        self._state: _State | bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no frame is incomplete."""
        if not isinstance(self._state, tuple):
            return not self._state
        start, stop, large, _, _ = self._apply_counts()
        return start == stop and large is None

    @property
    def state(self) -> object:
        """What came and is not returned: equal as long as nothing else comes, and no message is returned."""
        return self._state

    def read(self, source: Source) -> Message | None:
        """Return the next message, after at most one read, or None while it is not whole. An exception of the read
        passes through; nothing came then.

        Raises:
            EOFError: the stream ended.
            ChannelBroken, MessageTooLong: as `next_message`.
        """
        if self._state:
            message = self.next_message()
            if message is not None:
                return message
            if self._state:
                self._read_on(source)
                return self.next_message()
        for self._state in source.reads:  # a store, which no interrupt keeps apart from the call in C
            break
        data = self._state
        assert data is not None
        if len(data) >= _OVERHEAD:  # most often just one small message
            kind, count, size = _unpack_head(data)
            if size == len(data) - _OVERHEAD and kind in _DATA and not count and data[-1]:
                self._state = None
                return kind, data[_HEAD_SIZE:-1]
        elif not data:
            self._state = None
            raise EOFError
        return self.next_message()

    def _read_on(self, source: Source) -> None:
        """Read once, to where the bytes belong."""
        room, is_of_large = self._room()
        counts = self._apply_counts()[4]
        try:  # one call in C: no interrupt comes between what is received and its count
            counts.extend(map(source.recv_into, (room,), _NO_LENGTH, source.flags[is_of_large]))
        finally:
            del room  # a traceback would keep it, and with it the memory of a large frame
        if not counts[-1]:
            raise EOFError

    def _room(self) -> tuple[memoryview, bool]:
        """Return where the next bytes belong, and whether all of it is of one large frame."""
        start, stop, large, filled, counts = self._apply_counts()
        if large is not None and filled < large.size:
            return large.room(filled), True
        if start == stop:
            self._state = 0, 0, large, filled, counts
            return self._view, False
        if stop > ROOM // 2 and stop - start <= start:  # to where it does not overlap
            self._view[: stop - start] = self._view[start:stop]
            self._state = start, stop, large, filled, counts = 0, stop - start, large, filled, counts
        return self._view[stop:], False

    def next_message(self) -> Message | None:
        """Return the next message, kind and payload, or None while it is not whole. Raises MessageTooLong for a
        message that this end skipped."""
        while True:
            state = self._state
            if not isinstance(state, tuple):
                if not state:
                    return None
                state = self._keep(state)
            elif state[4]:
                state = self._apply_counts()
            start, stop, large, _, _ = state
            if large is not None:
                end = self._end_large(large)
                if end is None:
                    return None
                if end:
                    return large.kind, large.payload(self._limit)
                continue
            body = start + _HEAD_SIZE
            if stop < body:
                if stop > start and self._memory[start] not in _KINDS:  # nothing more may come
                    raise ChannelBroken(NOT_OURS)
                return None
            kind, count, size = _unpack_head(self._memory, start)
            end = body + size
            if end < stop and kind in _SMALL and not count:
                payload = bytes(self._view[body:end])
                is_valid = self._memory[end]
                if kind != END or not is_valid:  # nothing follows END: an interrupt cannot lose it, for it stays
                    self._state = (end + 1, stop, None, 0, []) if end + 1 < stop else None
                if is_valid:
                    return kind, payload
            elif count if kind in _SMALL else kind != PARTS or not 0 < count * SIZE.size <= size:
                raise ChannelBroken(NOT_OURS)
            elif size >= _DIRECT or kind == PARTS:
                self._begin(_LargeFrame(kind, count, size, self._limit))
            else:
                return None

    def _keep(self, data: bytes) -> _State:
        """Keep what one read brought, in memory."""
        if not self._memory:
            memory = bytearray(ROOM)
            self._view = memoryview(memory)
            self._memory = memory
        self._view[: len(data)] = data
        state: _State = (0, len(data), None, 0, [])
        self._state = state
        return state

    def _apply_counts(self) -> _State:
        state = self._state
        assert isinstance(state, tuple)
        if not state[4]:
            return state
        start, stop, large, filled, counts = state
        if large is not None and filled < large.size:
            filled += sum(counts)
        else:
            stop += sum(counts)
        self._state = state = start, stop, large, filled, []
        return state

    def _begin(self, large: _LargeFrame) -> None:
        """Begin a large frame: move what is in memory to its own."""
        start, stop, _, _, counts = self._apply_counts()
        start += _HEAD_SIZE
        filled = 0
        while start < stop and filled < large.size:
            room = large.room(filled)
            size = min(len(room), stop - start)
            room[:size] = self._view[start : start + size]
            start, filled = start + size, filled + size
        self._state = start, stop, large, filled, counts

    def _end_large(self, large: _LargeFrame) -> bool | None:
        """Finish the large frame. Return whether it counts, or None while it is not whole."""
        start, stop, _, filled, counts = self._apply_counts()
        if filled < large.size or start == stop:
            return None
        self._state = (start + 1, stop, None, 0, counts) if start + 1 < stop else None
        return bool(self._memory[start])


class _LargeFrame:
    """A large frame that is read into separate memory: one piece of bytes, or a table and its parts. The decoder
    discards the bytes of a frame that is over the limit, or for which there is no memory."""

    def __init__(self, kind: int, count: int, size: int, limit: int) -> None:
        self.kind = kind
        self.size = size
        self._table_size = count * SIZE.size if kind == PARTS else 0
        self._table = bytearray()
        self._starts: list[int] = []
        self._keepers: list[BytesIO | bytearray] = []
        self._is_over = size - self._table_size > limit
        self._finds_no_memory = False
        if not self._is_over:
            self._open_all([size] if kind != PARTS else [])

    def _open_all(self, sizes: Sequence[int]) -> None:
        """Return the memory of the parts, or that of the table until the parts are known."""
        try:
            if not sizes:
                self._table = bytearray(self._table_size)
            start = self._table_size
            for size in sizes:
                self._open(start, size)
                start += size & ~WRITABLE
        except MemoryError:
            self._keepers.clear()
            self._is_over = self._finds_no_memory = True

    def room(self, filled: int) -> memoryview:
        """Return the place of the byte `filled`, and what follows it."""
        if self._is_over:
            return memoryview(bytearray(min(self.size - filled, 1 << 20)))
        if filled < self._table_size:
            return memoryview(self._table)[filled:]
        self._open_parts()
        if self._is_over:
            return self.room(filled)
        at = bisect_right(self._starts, filled) - 1
        keeper = self._keepers[at]
        view = memoryview(keeper) if isinstance(keeper, bytearray) else keeper.getbuffer()
        return view[filled - self._starts[at] :]

    def _open_parts(self) -> None:
        """Make room for the parts that the table lists. Takes no memory for parts that the frame is too short for."""
        if self._keepers:
            return
        sizes = [size for (size,) in SIZE.iter_unpack(self._table)]
        if self._table_size + sum(size & ~WRITABLE for size in sizes) != self.size:
            raise ChannelBroken(NOT_OURS)
        self._open_all(sizes)

    def _open(self, start: int, size: int) -> None:
        """Return memory for a part. Bytes arrive where they stay: io.BytesIO has `getbuffer` and `getvalue` without a
        copy."""
        self._starts.append(start)
        self._keepers.append(bytearray(size & ~WRITABLE) if size & WRITABLE else BytesIO(bytes(size)))

    def payload(self, limit: int) -> Payload:
        """Return what came: bytes, or a pickle and its buffers. Raises MessageTooLong."""
        if not self._is_over:
            self._open_parts()  # where none of them has a byte they have not been yet
        if self._is_over:
            raise MessageTooLong(self.size - self._table_size, limit, finds_no_memory=self._finds_no_memory)
        parts = [keeper if isinstance(keeper, bytearray) else keeper.getvalue() for keeper in self._keepers]
        return parts if self.kind == PARTS else bytes(parts[0])
