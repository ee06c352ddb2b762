"""What comes in over a channel: bytes in, at the place where they belong, and messages out. Pure.

A frame is a head (kind, number of parts, bytes of the payload), the payload, and one byte that says whether it
counts: a sender that gave up in its middle fills it up and says VOID, so that the stream is never torn. The payload
is a pickle, bytes, or a table of sizes and as many parts: a pickle and its buffers, each read into memory of its own.

What is known changes in single stores, so an interrupt (a signal handler that raises) can come anywhere: it may lose
the message that is being handed over, and never the place in the stream.
"""

from __future__ import annotations

from bisect import bisect_right
from struct import Struct

from infini_run.errors import Broken, MessageTooLong
from infini_run.parcel import blank_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BytesIO

    Payload = bytes | list[bytes | bytearray]

HEAD = Struct(">BIQ")
SIZE = Struct(">Q")
PICKLE, BYTES, PARTS, END = 1, 2, 3, 4
VOID, VALID = b"\0", b"\1"
WRITABLE = 1 << 63  # in the table of sizes: the part was writable where it came from
ROOM = 1 << 16  # many small frames come with one read; a large one goes by it
_DIRECT = 1 << 14  # bytes of a payload from which on it is read into its own memory


class Inbox:
    """Messages of a stream. Read into `room()`, and put into `counts` how many bytes came; then `take()`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._memory = bytearray(ROOM)
        self._view = memoryview(self._memory)
        # what is in memory: start and stop; the large frame and how much of it is there; what came since
        self._state: tuple[int, int, _Large | None, int, list[int]] = (0, 0, None, 0, [])

    @property
    def counts(self) -> list[int]:
        return self._state[4]

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in mid-frame."""
        start, stop, large, _, _ = self._settle()
        return start == stop and large is None

    def room(self) -> tuple[memoryview, bool]:
        """Where the next bytes belong, and whether all of it is of one frame."""
        start, stop, large, filled, counts = self._settle()
        if large is not None and filled < large.size:
            return large.room(filled), True
        if start == stop:
            if stop:
                self._state = 0, 0, large, filled, counts
            return self._view, False
        if stop > ROOM // 2 and stop - start <= start:  # to where it does not overlap
            self._view[: stop - start] = self._view[start:stop]
            self._state = start, stop, large, filled, counts = 0, stop - start, large, filled, counts
        return self._view[stop:], False

    def take(self) -> tuple[int, Payload] | None:
        """The next message, kind and payload, if it is whole. Raises MessageTooLong for one that was passed over."""
        while True:
            start, stop, large, filled, counts = self._settle()
            if large is not None:
                if filled < large.size or start == stop:
                    return None
                counts_so = self._memory[start] == VALID[0]
                self._state = start + 1, stop, None, 0, counts
                if counts_so:
                    return large.kind, large.payload(self._limit)
                continue
            if stop - start < HEAD.size:
                return None
            kind, count, size = HEAD.unpack_from(self._memory, start)
            end = start + HEAD.size + size
            if kind != PARTS and end < stop:
                payload = bytes(self._view[start + HEAD.size : end])
                counts_so = self._memory[end] == VALID[0]
                self._state = end + 1, stop, None, 0, counts
                if counts_so:
                    return kind, payload
            elif kind == PARTS or size >= _DIRECT:
                self._begin(_Large(kind, count, size, self._limit))
            else:
                return None

    def _settle(self) -> tuple[int, int, _Large | None, int, list[int]]:
        start, stop, large, filled, counts = self._state
        if counts:
            if large is not None and filled < large.size:
                filled += sum(counts)
            else:
                stop += sum(counts)
            self._state = start, stop, large, filled, []
        return self._state

    def _begin(self, large: _Large) -> None:
        """A large frame: what of it is in memory goes to its own."""
        start, stop, _, _, counts = self._state
        start += HEAD.size
        filled = 0
        while start < stop and filled < large.size:
            room = large.room(filled)
            size = min(len(room), stop - start)
            room[:size] = self._view[start : start + size]
            start, filled = start + size, filled + size
        self._state = start, stop, large, filled, counts


class _Large:
    """A frame that is read into memory of its own: one piece of bytes, or a table and its parts."""

    def __init__(self, kind: int, count: int, size: int, limit: int) -> None:
        self.kind = kind
        self.size = size
        self._table = bytearray(count * SIZE.size)
        self._starts: list[int] = []
        self._views: list[memoryview] = []
        self._keepers: list[BytesIO | bytearray] = []
        self._is_over = size - len(self._table) > limit
        if kind != PARTS and not self._is_over:
            self._open(0, size)

    def room(self, filled: int) -> memoryview:
        """The place of the byte `filled`, and what follows it."""
        if self._is_over:
            return memoryview(bytearray(min(self.size - filled, 1 << 20)))
        if filled < len(self._table):
            return memoryview(self._table)[filled:]
        if not self._views:
            self._open_parts()
        at = bisect_right(self._starts, filled) - 1
        return self._views[at][filled - self._starts[at] :]

    def _open_parts(self) -> None:
        start = len(self._table)
        for (size,) in SIZE.iter_unpack(self._table):
            self._open(start, size)
            start += size & ~WRITABLE
        if start != self.size:
            raise Broken("what came over the channel is not what infini-run sends")

    def _open(self, start: int, size: int) -> None:
        keeper: BytesIO | bytearray
        if size & WRITABLE:
            keeper = bytearray(size & ~WRITABLE)
            view = memoryview(keeper)
        else:
            view, keeper = blank_bytes(size)
        self._starts.append(start)
        self._views.append(view)
        self._keepers.append(keeper)

    def payload(self, limit: int) -> Payload:
        """What came: bytes, or a pickle and its buffers. Raises MessageTooLong."""
        if self._is_over:
            raise MessageTooLong(self.size - len(self._table), limit)
        for view in self._views:
            view.release()
        parts = [keeper if isinstance(keeper, bytearray) else keeper.getvalue() for keeper in self._keepers]
        return parts if self.kind == PARTS else bytes(parts[0])
