"""The last word of a node: its launcher is dead, and so is all that this started.

The guard sends it after a SIGKILL of the launcher (csrc/guard/main.c). So the head need not wait until the end of the
lease. The word is random. Before the ranks of an attempt start, the agent sends its hash over the authenticated link,
so who listens there learns nothing. Who hears the word itself, and repeats it, says only what is true.
"""

from __future__ import annotations

import os
from _blake2 import blake2b

from infini_run.errors import LinkError
from infini_run.multinode.link.protocol import LAST_WORD, LAST_WORD_HASH, pack

_SIZE = 32  # bytes of the word, and of its hash


def make_last_word() -> tuple[bytes, bytes]:
    """Return two frames: the word for the guard of one attempt, and its hash for the head."""
    word = os.urandom(_SIZE)
    return pack(LAST_WORD, word), pack(LAST_WORD_HASH, hash_of(word))


def hash_of(word: bytes) -> bytes:
    """Return the hash of a word, from anybody."""
    return blake2b(word, digest_size=_SIZE, person=b"last word").digest()


def read_hash(payload: bytes) -> bytes:
    """Return the hash that an agent has sent. Raises LinkError."""
    if len(payload) != _SIZE:
        raise LinkError("what came over the link is not what infini-run sends")
    return payload
