"""Frames of the Link: a kind, a length, a payload. Pure: bytes in, frames out, under any chunking.

A frame is one byte of kind, four of length (big endian), the payload: JSON for words, raw bytes for output. JSON
carries any text that an environment or a file name can hold (surrogateescape), and no code, as a pickle would.

On a link that a handshake opened each frame is sealed (frame_authentication.py): a tag follows the head, and another
one the payload. The head has a tag of its own so that no length is believed, and no memory is taken for it, before it
is known to be the sender's.
"""

from __future__ import annotations

from struct import Struct

from infini_run.errors import LinkError
from infini_run.system.json_codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from infini_run.multinode.frame_authentication import FrameAuthenticator

LIMIT = 64 << 20  # bytes of one payload; output comes in pieces far below it
_HEAD = Struct(">cI")
TAG = 16  # bytes of a seal's tag

# head to agent
SPEC, LAUNCH, STOP, KILL, SIGNAL, INPUT, STREAM_DOWN, GOODBYE = b"S", b"G", b"T", b"K", b"N", b"I", b"d", b"Q"
LOOK = b"L"
# agent to head
IDENTITY, HELLO, EVENT, OUT, ERR, STREAM_UP, DONE = b"M", b"A", b"E", b"o", b"e", b"u", b"D"
VIEW = b"V"
# both ways
CHALLENGE, PROOF, HEARTBEAT = b"C", b"P", b"H"
_DOWN = (SPEC, LAUNCH, STOP, KILL, SIGNAL, INPUT, STREAM_DOWN, GOODBYE, LOOK)
_UP = (IDENTITY, HELLO, EVENT, OUT, ERR, STREAM_UP, DONE, VIEW)
KINDS = frozenset((*_DOWN, *_UP, CHALLENGE, PROOF, HEARTBEAT))


def sealed(frame: bytes, seal: FrameAuthenticator) -> tuple[bytes | memoryview, ...]:
    """One frame that is packed, as the pieces that go over a sealed link."""
    head = frame[: _HEAD.size]
    if len(frame) == _HEAD.size:
        return head, seal.tag(head)
    payload = memoryview(frame)[_HEAD.size :]
    return head, seal.tag(head), payload, seal.tag(payload)


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(payload)) + payload


def pack_json(kind: bytes, content: object) -> bytes:
    """One frame of plain types."""
    return pack(kind, encode(content))


def unpack_json(payload: bytes) -> Any:
    """The plain types of a payload. Raises LinkError."""
    try:
        return decode(payload)
    except (ValueError, RecursionError):
        raise LinkError("what came over the link is not what infini-run sends") from None


class Decoder:
    """Frames out of what comes in. `limit`: the longest payload that is let in; a stranger gets little. `seal`: what
    checks the frames that come after it was set."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.seal: FrameAuthenticator | None = None
        self._buffer = bytearray()
        self._kind = b""  # of the frame whose head has come, and whose payload has not
        self._size = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing stands in mid-frame."""
        return not self._buffer and not self._kind

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take bytes in; the frames that are complete. Raises LinkError: this is no frame, or not the one that the
        other side sent."""
        self._buffer += data
        while self._kind or self._has_head():
            payload = self._take(self._size) if self._size else b""
            if payload is None:
                return
            kind, self._kind = self._kind, b""
            yield kind, payload

    def _has_head(self) -> bool:
        head = self._take(_HEAD.size)
        if head is None:
            return False
        kind, size = _HEAD.unpack(head)
        if kind not in KINDS or size > self.limit:
            raise LinkError("what came over the link is not what infini-run sends")
        self._kind, self._size = kind, size
        return True

    def _take(self, size: int) -> bytes | None:
        """The next bytes, and their tag checked; None: they have not all come."""
        end = size if self.seal is None else size + TAG
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            data = bytes(view[:size])
            tag = bytes(view[size:end])
        del self._buffer[:end]
        if self.seal is not None:
            self.seal.check(data, tag)
        return data
