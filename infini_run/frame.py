"""Frames of the Link: a kind, a length, a payload. Pure: bytes in, frames out, under any chunking.

A frame is one byte of kind, four of length (big endian), the payload: JSON for words, raw bytes for output. JSON
carries any text that an environment or a file name can hold (surrogateescape), and no code, as a pickle would.
"""

from __future__ import annotations

from struct import Struct

from infini_run.errors import LinkError
from infini_run.notation import dump, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LIMIT = 64 << 20  # bytes of one payload; output comes in pieces far below it
_HEAD = Struct(">cI")

# head to agent
SPEC, GO, STOP, KILL, SIGNAL, INPUT, DOWN, BYE = b"S", b"G", b"T", b"K", b"N", b"I", b"d", b"Q"
# agent to head
NAME, HELLO, EVENT, OUT, ERR, UP, DONE = b"M", b"A", b"E", b"o", b"e", b"u", b"D"
# both ways
CHALLENGE, PROOF, BEAT = b"C", b"P", b"H"
KINDS = frozenset(
    (SPEC, GO, STOP, KILL, SIGNAL, INPUT, DOWN, BYE, NAME, HELLO, EVENT, OUT, ERR, UP, DONE, CHALLENGE, PROOF, BEAT)
)


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(payload)) + payload


def pack_json(kind: bytes, content: object) -> bytes:
    """One frame of plain types."""
    return pack(kind, dump(content))


def unpack_json(payload: bytes) -> Any:
    """The plain types of a payload. Raises LinkError."""
    try:
        return load(payload)
    except (ValueError, RecursionError):
        raise LinkError("what came over the link is not what infini-run sends") from None


class Decoder:
    """Frames out of what comes in. `limit`: the longest payload that is let in; a stranger gets little."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in mid-frame."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take bytes in; the frames that are complete. Raises LinkError: this is no frame."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._buffer)
            if kind not in KINDS or size > self.limit:
                raise LinkError("what came over the link is not what infini-run sends")
            if len(self._buffer) < _HEAD.size + size:
                return
            payload = bytes(memoryview(self._buffer)[_HEAD.size : _HEAD.size + size])
            del self._buffer[: _HEAD.size + size]
            yield kind, payload
