"""Tags for the frames of the Link. Only a side that knows the key can make one, and each fits one place in the
stream.

A tag is BLAKE2b with a key (RFC 7693) over the number of the piece in its direction and the piece itself. It comes
from the interpreter's own C module, because `hashlib` loads OpenSSL, which would lengthen an agent's start
(docs/decisions/0028).
"""

from __future__ import annotations

from _blake2 import blake2b
from _operator import _compare_digest  # hmac.compare_digest, without hashlib

from infini_run.errors import LinkError
from infini_run.system.frames import TAG

TYPE_CHECKING = False
if TYPE_CHECKING:
    Piece = bytes | memoryview


class FrameAuthenticator:
    """The tags of one direction of one connection, in order: the sender makes them, the receiver checks them.
    `count` is the number of pieces so far."""

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=TAG)
        self.count = 0

    def tag(self, piece: Piece) -> bytes:
        """Return the tag of the next piece."""
        hashed = self._keyed.copy()
        hashed.update(self.count.to_bytes(8, "big"))
        hashed.update(piece)
        self.count += 1
        return hashed.digest()

    def check(self, piece: Piece, tag: bytes) -> None:
        """Check the tag of the next piece. Raises LinkError: it is not the one that the sender made."""
        if not _compare_digest(self.tag(piece), tag):
            raise LinkError("a frame of the link was changed, dropped, repeated, or reordered on its way")


def derive(token: bytes, nonces: bytes, use: bytes) -> bytes:
    """Return 32 bytes that nobody can compute without the token. `use`: at most 16 bytes; each use has other
    bytes."""
    return blake2b(nonces, key=blake2b(token).digest(), person=use, digest_size=32).digest()
