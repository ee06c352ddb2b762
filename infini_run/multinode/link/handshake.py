"""The start of the Link over TCP: both sides prove that they know the token, before they read anything else.

Each side sends a random number, and then a keyed hash of both numbers. The token and both numbers give the keys of
all later frames. A relay without the token can change, drop, repeat, or move none unnoticed.

An agent adds a keyed hash of its number alone. That proves nothing, since whoever has got it once can send it again.
But with it the head knows whose connection to keep when strangers take all the room. An agent of version 0.1 adds
none: the head accepts it, and it ends when it learns the head's version.
"""

from __future__ import annotations

import os
from _operator import _compare_digest  # hmac.compare_digest, without hashlib

from infini_run.errors import LinkError
from infini_run.multinode.link.frame_authentication import FrameAuthenticator, derive
from infini_run.multinode.link.protocol import CHALLENGE, PROOF, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.link.connection import Connection

_NONCE = 32  # bytes
_GREETING = 32  # bytes, of an agent's keyed hash of its nonce


class Unheard(LinkError):
    """A head without room. Its list of unauthenticated connections was full and it dropped this one, or its kernel's
    queue was full and no connection came about."""


class Silent(LinkError):
    """What listens in the head's place has said nothing: it may be another program."""


class Handshake:
    """One side of the handshake. Pass it frames until `is_done`.

    Args:
        connection: restricted until the end of the handshake.
        token: the secret.
        is_head: the agent proves itself first, so the head reveals nothing to a stranger.
    """

    def __init__(self, connection: Connection, token: bytes, *, is_head: bool) -> None:
        self._connection = connection
        self._token = token
        self._is_head = is_head
        self._own_nonce = os.urandom(_NONCE)
        self._other_nonce = b""
        self.is_likely_agent = False  # to the head: somebody who knows the token once sent this
        self.is_done = False
        connection.restrict()
        connection.send(pack(CHALLENGE, self._own_nonce + (b"" if is_head else self._greeting(self._own_nonce))))

    @property
    def has_received(self) -> bool:
        """Whether the other side has sent anything."""
        return bool(self._other_nonce)

    def handle_frame(self, kind: bytes, payload: bytes) -> None:
        """Act on one frame. Raises LinkError: the other side does not know the token, or is no infini-run."""
        nonce, greeting = payload[:_NONCE], payload[_NONCE:]
        is_whole = len(nonce) == _NONCE and len(greeting) in ((0, _GREETING) if self._is_head else (0,))
        if kind == CHALLENGE and not self._other_nonce and is_whole and nonce != self._own_nonce:
            self._other_nonce = nonce
            if self._is_head:
                self.is_likely_agent = _compare_digest(greeting, self._greeting(nonce))
            else:
                self._connection.send(pack(PROOF, self._derive(b"agent's proof")))
        elif kind == PROOF and self._other_nonce and self._is_proof(payload):
            if self._is_head:
                self._connection.send(pack(PROOF, self._derive(b"head's proof")))
            self._authenticate()
            self.is_done = True
        elif kind == PROOF:
            raise LinkError("the other side has another token, or something changed its bytes on the way")
        else:
            raise LinkError("what came over the link is not what infini-run sends")

    def _is_proof(self, payload: bytes) -> bool:
        return _compare_digest(payload, self._derive(b"agent's proof" if self._is_head else b"head's proof"))

    def _authenticate(self) -> None:
        head, agent = (FrameAuthenticator(self._derive(use)) for use in (b"head's frames", b"agent's frames"))
        sender, receiver = (head, agent) if self._is_head else (agent, head)
        self._connection.authenticate(sender, receiver)

    def _greeting(self, agents_nonce: bytes) -> bytes:
        return derive(self._token, agents_nonce, b"agent's greeting")

    def _derive(self, use: bytes) -> bytes:
        """Return a key or proof that only the two sides can compute; each use has another one."""
        head, agent = (self._own_nonce, self._other_nonce)
        if not self._is_head:
            head, agent = agent, head
        return derive(self._token, head + agent, use)
