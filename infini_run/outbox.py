"""What goes out over a channel: a frame as pieces, and how far it has been written. Pure."""

from __future__ import annotations

from infini_run.errors import MessageTooLong
from infini_run.inbox import BYTES, END, HEAD, PARTS, PICKLE, SIZE, VALID, VOID, WRITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.parcel import Buffer, Parcel

END_FRAME = HEAD.pack(END, 0, 0) + VALID
_JOINED = 1 << 15  # bytes of a payload up to which one copy is cheaper than three pieces
_PIECES = 512  # of one sendmsg (IOV_MAX is 1024)
_ZEROS = memoryview(bytes(1 << 16))


class Outgoing:
    """A frame on its way. Put into `counts` how many bytes of it were written."""

    __slots__ = ("counts", "is_filler", "is_live", "pieces", "size")

    def __init__(self, pieces: list[Buffer], *, is_filler: bool = False, is_live: bool = False) -> None:
        self.pieces = pieces
        self.size = sum(map(_size_of, pieces))
        self.counts: list[int] = []
        self.is_filler = is_filler
        self.is_live = is_live  # somebody waits for it: it is to be finished and not given up

    @property
    def written(self) -> int:
        return sum(self.counts)

    @property
    def is_done(self) -> bool:
        return self.written == self.size

    def rest(self) -> list[Buffer]:
        """The next pieces to write."""
        skip = self.written
        if not skip and len(self.pieces) <= _PIECES:
            return self.pieces
        rest: list[Buffer] = []
        for piece in self.pieces:
            size = _size_of(piece)
            if skip >= size:
                skip -= size
                continue
            rest.append(memoryview(piece).cast("B")[skip:] if skip else piece)
            skip = 0
            if len(rest) == _PIECES:
                break
        return rest

    def filler(self) -> Outgoing | None:
        """What makes this frame a void one, if a part of it has been written: its head and table as they are, nothing
        for its payload, and the word that it does not count."""
        written = self.written
        if not 0 < written < self.size or self.is_filler:
            return None if written in (0, self.size) else self
        first = bytes(self.pieces[0])
        if len(self.pieces) == 1:
            return Outgoing([first[written:-1] + VOID], is_filler=True)
        pieces: list[Buffer] = [first[written:]] if written < len(first) else []
        blank = self.size - 1 - max(written, len(first))
        pieces += [_ZEROS] * (blank // len(_ZEROS))
        pieces += [_ZEROS[: blank % len(_ZEROS)], VOID]
        return Outgoing(pieces, is_filler=True)


def _size_of(piece: Buffer) -> int:
    return len(piece) if type(piece) is bytes else memoryview(piece).nbytes


def bytes_frame(data: Buffer | Sequence[Buffer], limit: int) -> list[Buffer]:
    """The pieces of a frame: bytes, or several that are one. Raises MessageTooLong."""
    pieces = data if type(data) is list else [data]
    size = sum(map(_size_of, pieces))
    _check(size, limit)
    head = HEAD.pack(BYTES, 0, size)
    return [b"".join((head, *pieces, VALID))] if size <= _JOINED else [head, *pieces, VALID]


def parcel_frame(parcel: Parcel, limit: int) -> list[Buffer]:
    """The pieces of a frame. Raises MessageTooLong."""
    size = parcel.size
    _check(size, limit)
    if not parcel.buffers:
        head = HEAD.pack(PICKLE, 0, size)
        return [b"".join((head, parcel.head, VALID))] if size <= _JOINED else [head, parcel.head, VALID]
    views = [memoryview(buffer).cast("B") for buffer in parcel.buffers]
    sizes = [len(parcel.head), *(view.nbytes | (0 if view.readonly else WRITABLE) for view in views)]
    table = b"".join(map(SIZE.pack, sizes))
    return [HEAD.pack(PARTS, len(sizes), len(table) + size) + table, parcel.head, *views, VALID]


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise MessageTooLong(size, limit)
