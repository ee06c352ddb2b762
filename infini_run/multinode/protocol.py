"""Frames of the Link: a kind, a length, a payload. Pure: bytes in, frames out, under any chunking.

A frame is one byte of kind, four of length (big endian), the payload: JSON for words, raw bytes for output. JSON
carries any text that an environment or a file name can hold (surrogateescape), and no code, as a pickle would.

After a handshake each frame is authenticated (frame_authentication.py): a tag follows the head of a frame, and
another tag follows its payload. The head has a separate tag, so that a length costs no memory before its sender has
proved it.
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
TAG = 16  # bytes of a tag
HANDSHAKE_S = 10.0  # the longest time for a handshake, if nobody waits for this connection

# head to agent
SPEC, LAUNCH, STOP, KILL, SIGNAL, INPUT, STREAM_DOWN, GOODBYE = b"S", b"G", b"T", b"K", b"N", b"I", b"d", b"Q"
USAGE_REQUEST, CHECK = b"L", b"c"
# agent to head
IDENTITY, HELLO, EVENT, OUT, ERR, STREAM_UP, DONE = b"M", b"A", b"E", b"o", b"e", b"u", b"D"
OBSERVATIONS, CHECKED, NOTHING_OLD_LIVES = b"V", b"k", b"r"
# both ways
CHALLENGE, PROOF, HEARTBEAT, LEASE = b"C", b"P", b"H", b"W"
_DOWN = (SPEC, LAUNCH, STOP, KILL, SIGNAL, INPUT, STREAM_DOWN, GOODBYE, USAGE_REQUEST, CHECK)
_UP = (IDENTITY, HELLO, EVENT, OUT, ERR, STREAM_UP, DONE, OBSERVATIONS, CHECKED, NOTHING_OLD_LIVES)
KINDS = frozenset((*_DOWN, *_UP, CHALLENGE, PROOF, HEARTBEAT, LEASE))


def with_tags(frame: bytes, authenticator: FrameAuthenticator) -> tuple[bytes | memoryview, ...]:
    """Return the pieces of an authenticated frame: head, tag, payload, tag; without a payload the first two."""
    head = frame[: _HEAD.size]
    if len(frame) == _HEAD.size:
        return head, authenticator.tag(head)
    payload = memoryview(frame)[_HEAD.size :]
    return head, authenticator.tag(head), payload, authenticator.tag(payload)


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return _HEAD.pack(kind, len(payload)) + payload


def pack_json(kind: bytes, content: object) -> bytes:
    """Return one frame whose payload is JSON."""
    return pack(kind, encode(content))


def unpack_json(payload: bytes) -> Any:
    """Return what the JSON of a payload says. Raises LinkError."""
    try:
        return decode(payload)
    except (ValueError, RecursionError):
        raise LinkError("what came over the link is not what infini-run sends") from None


class Decoder:
    """Turns bytes into frames.

    Args:
        limit: bytes of the longest payload to accept. It may change between two frames.

    `authenticator` checks every frame after its assignment.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.authenticator: FrameAuthenticator | None = None
        self._buffer = bytearray()
        self._kind = b""  # of the frame whose head is here, and whose payload is not
        self._size = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no part of a frame."""
        return not self._buffer and not self._kind

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Add bytes, and yield kind and payload of each frame that is complete. Raises LinkError: the bytes are no
        frame, or not the one that the other side sent."""
        self._buffer += data
        while self._kind or self._has_head():
            payload = self._next_piece(self._size) if self._size else b""
            if payload is None:
                return
            kind, self._kind = self._kind, b""
            yield kind, payload

    def _has_head(self) -> bool:
        head = self._next_piece(_HEAD.size)
        if head is None:
            return False
        kind, size = _HEAD.unpack(head)
        if kind not in KINDS or size > self.limit:
            raise LinkError("what came over the link is not what infini-run sends")
        self._kind, self._size = kind, size
        return True

    def _next_piece(self, size: int) -> bytes | None:
        """Remove and return the next bytes, with their tag checked; None: they have not all come."""
        end = size if self.authenticator is None else size + TAG
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view:
            data = bytes(view[:size])
            tag = bytes(view[size:end])
        del self._buffer[:end]
        if self.authenticator is not None:
            self.authenticator.check(data, tag)
        return data
