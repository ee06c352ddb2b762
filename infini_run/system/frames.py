"""Frames: a kind, a length, a payload. Pure: bytes in, frames out, under any chunking.

A frame is one byte of kind, four of length (big endian), the payload. The Link and the control socket speak them.
"""

from __future__ import annotations

from _struct import Struct

from infini_run.errors import LinkError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Authenticator(Protocol):
        """Checks the pieces of frames against their tags."""

        def check(self, data: bytes, tag: bytes) -> None:
            """Raise LinkError if the tag is not that of the next piece."""


HEAD = Struct(">cI")
TAG = 16  # bytes of a tag


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return HEAD.pack(kind, len(payload)) + payload


class WireDecoder:
    """Turns bytes into frames.

    Args:
        kinds: kinds of frames to accept.
        limit: bytes of the longest payload to accept. It may change between two frames.

    `authenticator` checks every frame after its assignment.
    """

    def __init__(self, kinds: frozenset[bytes], limit: int) -> None:
        self._kinds = kinds
        self.limit = limit
        self.authenticator: Authenticator | None = None
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
        head = self._next_piece(HEAD.size)
        if head is None:
            return False
        kind, size = HEAD.unpack(head)
        if kind not in self._kinds or size > self.limit:
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
