"""The sending half of a channel: a frame as pieces, and how much of it was written. Pure."""

from __future__ import annotations

from infini_run.channel.decoder import BYTES, END, HEAD, PARTS, PICKLE, SIZE, VALID, VOID, WRITABLE
from infini_run.channel.errors import MessageTooLong

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.channel.serializer import Buffer, Parcel

_JOINED = 1 << 15  # bytes of a payload up to which one copy is cheaper than three pieces
_pack_head, _OVERHEAD = HEAD.pack, HEAD.size + 1
_PIECES = 512  # of one sendmsg (IOV_MAX is 1024)
_ZEROS = memoryview(bytes(1 << 16))


class OutgoingFrame:
    """A frame on its way: `size` bytes in `pieces`. The writer adds to `counts` how many it wrote. The most common
    frame, which is small and goes at once, needs none of this: it is bytes."""

    is_awaited = False  # somebody waits for it: finish it, never give it up
    is_void = False

    def __init__(self, pieces: Sequence[Buffer], size: int, written: int = 0) -> None:
        self.pieces = pieces
        self.size = size
        self.counts = [written]

    @property
    def written(self) -> int:
        return sum(self.counts)

    @property
    def is_done(self) -> bool:
        return self.written == self.size

    def rest(self) -> Sequence[Buffer]:
        """Return the next pieces to write."""
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

    def void_remainder(self) -> OutgoingFrame | None:
        """Return what makes a partly written frame void: the rest of its head and table, zeros for its payload, and
        the byte VOID."""
        written = self.written
        left = self.size - written
        if self.is_void:
            return self if left else None
        if not written or not left:
            return None
        first = bytes(self.pieces[0])
        if len(self.pieces) == 1:
            return _void([first[written:-1] + VOID], left)
        pieces: list[Buffer] = [first[written:]] if written < len(first) else []
        blank = self.size - 1 - max(written, len(first))
        pieces += [_ZEROS] * (blank // len(_ZEROS))
        pieces += [_ZEROS[: blank % len(_ZEROS)], VOID]
        return _void(pieces, left)


if TYPE_CHECKING:
    Frame = bytes | OutgoingFrame


def _void(pieces: Sequence[Buffer], size: int) -> OutgoingFrame:
    out = OutgoingFrame(pieces, size)
    out.is_void = True
    return out


def _size_of(piece: Buffer) -> int:
    return len(piece) if type(piece) is bytes else memoryview(piece).nbytes


def in_pieces(frame: Frame, written: int = 0) -> OutgoingFrame:
    """Return the frame of bytes of which `written` bytes have gone."""
    return OutgoingFrame((frame,), len(frame), written) if isinstance(frame, bytes) else frame


def end_frame() -> OutgoingFrame:
    """Return the last frame of a stream."""
    return in_pieces(_one_piece(END, b"", 0))


def joined(frames: Sequence[Frame]) -> OutgoingFrame:
    """Return several frames as one, which goes with one call of the kernel. It is never given up."""
    pieces: list[Buffer] = []
    for frame in frames:
        pieces.extend((frame,) if isinstance(frame, bytes) else frame.pieces)
    size = sum(map(_size_of, pieces))
    out = OutgoingFrame((b"".join(pieces),) if size <= _JOINED else pieces, size)
    out.is_awaited = True
    return out


def bytes_frame(data: Buffer | list[Buffer], limit: int) -> Frame:
    """Return the frame of bytes, or of a list of them that become one message. Raises MessageTooLong."""
    if type(data) is bytes:
        return _one_piece(BYTES, data, limit)
    parts = data if isinstance(data, list) else [data]
    size = sum(map(_size_of, parts))
    if size > limit:
        raise MessageTooLong(size, limit)
    pieces = (_pack_head(BYTES, 0, size), *parts, VALID)
    return b"".join(pieces) if size <= _JOINED else OutgoingFrame(pieces, size + _OVERHEAD)


def parcel_frame(parcel: Parcel, limit: int) -> Frame:
    """Return the frame of a Parcel. Raises MessageTooLong."""
    if not parcel.buffers:
        return _one_piece(PICKLE, parcel.head, limit)
    size = parcel.size
    if size > limit:
        raise MessageTooLong(size, limit)
    views = [memoryview(buffer).cast("B") for buffer in parcel.buffers]
    sizes = [len(parcel.head), *(view.nbytes | (0 if view.readonly else WRITABLE) for view in views)]
    table = b"".join(map(SIZE.pack, sizes))
    head = HEAD.pack(PARTS, len(sizes), len(table) + size) + table
    return OutgoingFrame([head, parcel.head, *views, VALID], len(head) + size + 1)


def _one_piece(kind: int, data: bytes, limit: int) -> Frame:
    size = len(data)
    if size > limit:
        raise MessageTooLong(size, limit)
    head = _pack_head(kind, 0, size)
    return head + data + VALID if size <= _JOINED else OutgoingFrame((head, data, VALID), size + _OVERHEAD)
