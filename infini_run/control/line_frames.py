"""The frames that a process which follows a launch gets: lines of ranks, and how many were lost. Pure.

The core writes those of one node (csrc/io/followers.c), a head its own.
"""

from __future__ import annotations

from struct import Struct

from infini_run.errors import LinkError
from infini_run.value_types import MAX_INT

LINES, SHOWN, LOST, END = (
    b"o",
    b"t",
    b"l",
    b"e",
)  # of one rank, as a head shows them, how many are lost, the last frame
_OF_RANK = Struct(">IB")
_COUNT = Struct(">Q")


def read_lines(payload: bytes) -> tuple[int, int, bytes]:
    """Return the rank, the stream (0 stdout, 1 stderr), and what the rank wrote. Raises LinkError: it is no such
    frame."""
    if len(payload) <= _OF_RANK.size:
        raise LinkError("what came over the link is not what infini-run sends")
    rank, stream = _OF_RANK.unpack_from(payload)
    if rank > MAX_INT or stream > 1:
        raise LinkError("what came over the link is not what infini-run sends")
    return rank, stream, payload[_OF_RANK.size :]


def pack_loss(count: int) -> bytes:
    """Return the payload that says how many lines were lost."""
    return _COUNT.pack(count)


def read_loss(payload: bytes) -> int:
    """Return how many lines were lost. Raises LinkError: it is no such frame."""
    if len(payload) != _COUNT.size:
        raise LinkError("what came over the link is not what infini-run sends")
    return int(_COUNT.unpack(payload)[0])
