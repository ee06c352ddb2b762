"""Frames of the Link: a kind, a length, a payload. Pure: bytes in, frames out, under any chunking.

system/frames.py has their form. The payload is JSON for words, raw bytes for output. JSON carries any text that an
environment or a file name can hold (surrogateescape), and no code, as a pickle would.

After a handshake each frame is authenticated (frame_authentication.py): a tag follows the head of a frame, and
another tag follows its payload. The head has a separate tag, so that a length costs no memory before its sender has
proved it.
"""

from __future__ import annotations

from infini_run.errors import LinkError
from infini_run.system.frames import HEAD, WireDecoder
from infini_run.system.frames import pack as pack
from infini_run.system.json_codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.multinode.link.frame_authentication import FrameAuthenticator

LIMIT = 64 << 20  # bytes of one payload; output comes in pieces far below it
HANDSHAKE_S = 10.0  # the longest time for a handshake, if nobody waits for this connection

# head to agent
SPEC, LAUNCH, STOP, KILL, SIGNAL, INPUT, STREAM_DOWN, GOODBYE = b"S", b"G", b"T", b"K", b"N", b"I", b"d", b"Q"
USAGE_REQUEST, CHECK, SNAPSHOT_REQUEST, CAUSE, QUESTION, START = b"L", b"c", b"l", b"j", b"q", b"p"
# agent to head
IDENTITY, HELLO, EVENT, OUT, ERR, STREAM_UP, DONE = b"M", b"A", b"E", b"o", b"e", b"u", b"D"
OBSERVATIONS, CHECKED, NOTHING_OLD_LIVES, SNAPSHOTS, ANSWERED = b"V", b"k", b"r", b"x", b"a"
LAST_WORD_HASH = b"h"
# a guard to the head, over a separate connection, without a handshake (last_word.py)
LAST_WORD = b"w"
# both ways
CHALLENGE, PROOF, HEARTBEAT, LEASE = b"C", b"P", b"H", b"W"
_DOWN = (
    SPEC, LAUNCH, STOP, KILL, SIGNAL, INPUT, STREAM_DOWN, GOODBYE, USAGE_REQUEST, CHECK, SNAPSHOT_REQUEST, CAUSE,
    QUESTION, START,
)  # fmt: skip
_UP = (
    IDENTITY,
    HELLO,
    EVENT,
    OUT,
    ERR,
    STREAM_UP,
    DONE,
    OBSERVATIONS,
    CHECKED,
    NOTHING_OLD_LIVES,
    SNAPSHOTS,
    ANSWERED,
    LAST_WORD_HASH,
    LAST_WORD,
)
KINDS = frozenset((*_DOWN, *_UP, CHALLENGE, PROOF, HEARTBEAT, LEASE))


def with_tags(frame: bytes, authenticator: FrameAuthenticator) -> tuple[bytes | memoryview, ...]:
    """Return the pieces of an authenticated frame: head, tag, payload, tag; without a payload the first two."""
    head = frame[: HEAD.size]
    if len(frame) == HEAD.size:
        return head, authenticator.tag(head)
    payload = memoryview(frame)[HEAD.size :]
    return head, authenticator.tag(head), payload, authenticator.tag(payload)


def pack_json(kind: bytes, content: object) -> bytes:
    """Return one frame whose payload is JSON."""
    return pack(kind, encode(content))


def unpack_json(payload: bytes) -> Any:
    """Return what the JSON of a payload says. Raises LinkError."""
    try:
        return decode(payload)
    except (ValueError, RecursionError):
        raise LinkError("what came over the link is not what infini-run sends") from None


class Decoder(WireDecoder):
    """Turns the bytes of a Link into frames.

    Args:
        limit: as for WireDecoder.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__(KINDS, limit)
