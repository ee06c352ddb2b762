"""Tags for the frames of a link: who does not know the key can make none, and each fits one place in the stream.

BLAKE2b with a key (RFC 7693) over the number of the piece in its direction and the piece itself. The C module of the
interpreter's own: `hashlib` brings in OpenSSL, which is a part of an agent's start (docs/decisions/0028).
"""

from __future__ import annotations

from _blake2 import blake2b
from _operator import _compare_digest  # hmac.compare_digest, without hashlib

from infini_run.errors import LinkError
from infini_run.multinode.protocol import TAG

TYPE_CHECKING = False
if TYPE_CHECKING:
    Piece = bytes | memoryview


class FrameAuthenticator:
    """One direction of one link: the tags of its pieces, in their order. The sender's makes them, the receiver's
    checks them. count: of those so far."""

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=TAG)
        self.count = 0

    def tag(self, piece: Piece) -> bytes:
        """Of the next piece."""
        hashed = self._keyed.copy()
        hashed.update(self.count.to_bytes(8, "big"))
        hashed.update(piece)
        self.count += 1
        return hashed.digest()

    def check(self, piece: Piece, tag: bytes) -> None:
        """Raises LinkError: this is not the next piece that the sender made."""
        if not _compare_digest(self.tag(piece), tag):
            raise LinkError("a frame of the link was changed, dropped, repeated or moved on its way")


def derive(token: bytes, nonces: bytes, use: bytes) -> bytes:
    """32 bytes that nobody can compute without the token, and that are others for each use (16 bytes at most)."""
    return blake2b(nonces, key=blake2b(token).digest(), person=use, digest_size=32).digest()
