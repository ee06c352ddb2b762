"""The Link: one authenticated connection between the head and an agent.

Over the two pipes of an ssh that we started, or over TCP, where both sides prove that they know the launch's token
(a keyed hash of both sides' random numbers) before anything else is read, and seal every frame after that: a relay
that does not know the token can change, drop, repeat or move none of them unnoticed. Never blocks: what finds no room
is kept, and `wants_write` says so. A line of its own opens the agent's side of a pipe: what a login script printed
before it is none of ours.
"""

from __future__ import annotations

import os

from infini_run.core.group import write
from infini_run.errors import LinkError
from infini_run.multinode.protocol import CHALLENGE, LIMIT, PROOF, Decoder, pack, sealed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from infini_run.multinode.frame_authentication import FrameAuthenticator

TOKEN = "INFINI_RUN_TOKEN"  # the variable that both sides know it by
TOKEN_FILE = "INFINI_RUN_TOKEN_FILE"  # or a file that has it, by hand
MAGIC = b"\0infini-run link 1\n"
_NOISE_LIMIT = 1 << 20  # that a login script may print
_STRANGER_LIMIT = 64  # bytes of a payload, until it has proved who it is
_PIECE = 1 << 18
_STRANGER_PIECE = 1 << 9  # bytes of one read, until then
_NONCE = 32


class Unheard(LinkError):
    """Who listens there let us go before he said a word."""


class Connection:
    """Frames over two descriptors (or twice the same), which it owns and which do not block."""

    def __init__(self, read_fd: int, write_fd: int, *, awaits_opening: bool = False, limit: int = LIMIT) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._decoder = Decoder(limit)
        self._seal: FrameAuthenticator | None = None  # of what we send
        self._piece = _PIECE
        self._out = bytearray()
        self._noise: bytearray | None = bytearray() if awaits_opening else None
        self.has_ended = False  # the other side will say no more
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """What to wait for, to read."""
        return self._read_fd

    @property
    def write_fd(self) -> int:
        return self._write_fd

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    @property
    def waiting(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._out)

    @property
    def position(self) -> tuple[int, bytes]:
        """Where we are in what we send: how many pieces were sealed, and what still waits for room. To be given to
        whoever goes on with a copy of us (heartbeat_process.py)."""
        return (0 if self._seal is None else self._seal.count), bytes(self._out)

    @position.setter
    def position(self, position: tuple[int, bytes]) -> None:
        if self.has_ended:
            return
        count, rest = position
        self._out[:] = rest
        if self._seal is not None:
            self._seal.count = count

    def keep_small(self) -> None:
        """It has not proved who it is: little of what it says is read."""
        self._decoder.limit, self._piece = _STRANGER_LIMIT, _STRANGER_PIECE

    def let_in(self, ours: FrameAuthenticator, theirs: FrameAuthenticator) -> None:
        """It has proved who it is: from here on frames are sealed, ours and theirs."""
        self._seal, self._decoder.seal = ours, theirs
        self._decoder.limit, self._piece = LIMIT, _PIECE

    def send(self, frame: bytes) -> None:
        """Send one frame, or keep it until there is room. After the end nothing is sent, and nothing is said: the
        reader learns of the end."""
        if self.has_ended or self._write_fd < 0:
            return
        if self._seal is None:
            self._out += frame
        else:
            for piece in sealed(frame, self._seal):
                self._out += piece
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        while self._out:
            try:
                sent = write(self._write_fd, self._out, _PIECE)
            except BlockingIOError:
                return
            except OSError:  # it has gone; what it said before that is still to be read
                self._out.clear()
                return
            del self._out[:sent]

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """The frames that have come, of one read. Raises LinkError: not a frame, or the end in mid-frame."""
        try:
            data = os.read(self._read_fd, self._piece)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.has_ended = True
            if not self._decoder.is_empty:
                raise LinkError("the link broke in mid-frame")
            return
        if self._noise is not None:
            data = self._after_opening(self._noise, data)
        yield from self._decoder.feed(data)

    def _after_opening(self, noise: bytearray, data: bytes) -> bytes:
        noise += data
        at = noise.find(MAGIC)
        if at >= 0:
            self._noise = None
            return bytes(noise[at + len(MAGIC) :])
        if len(noise) > _NOISE_LIMIT:
            raise LinkError(f"{_NOISE_LIMIT >> 20} MiB came before the agent's first word: what prints it?")
        return b""

    @property
    def noise(self) -> str:
        """What came before the opening, as text: a login script's words, or a shell's complaint."""
        return "" if self._noise is None else self._noise.decode("utf-8", "replace")

    def close(self) -> None:
        """Safe twice."""
        for fd in {self._read_fd, self._write_fd} - {-1}:
            os.close(fd)
        self._read_fd = self._write_fd = -1
        self.has_ended = True
        self._out = bytearray()  # not cleared: in a forked child it may be in the midst of being written


class Handshake:
    """Each side sends a random number, and proves that it knows the token by the other's and its own. Feed frames
    until `done`. Raises LinkError: the other side does not know it, or is no infini-run at all."""

    def __init__(self, wire: Connection, token: bytes, *, is_head: bool) -> None:
        self._wire = wire
        self._token = token
        self._is_head = is_head
        self._ours = os.urandom(_NONCE)
        self._theirs = b""
        self.done = False
        wire.keep_small()
        wire.send(pack(CHALLENGE, self._ours))

    @property
    def is_heard(self) -> bool:
        """The other side has said something."""
        return bool(self._theirs)

    def take(self, kind: bytes, payload: bytes) -> None:
        if kind == CHALLENGE and not self._theirs and len(payload) == _NONCE and payload != self._ours:
            self._theirs = payload
            if not self._is_head:  # who dials proves it first: the head tells a stranger nothing
                self._wire.send(pack(PROOF, self._derive(b"agent's proof")))
        elif kind == PROOF and self._theirs and self._is_proof(payload):
            if self._is_head:
                self._wire.send(pack(PROOF, self._derive(b"head's proof")))
            self._let_in()
            self.done = True
        elif kind == PROOF:
            raise LinkError("the other side has another token, or something changed its bytes on the way")
        else:
            raise LinkError("what came over the link is not what infini-run sends")

    def _is_proof(self, payload: bytes) -> bool:
        from _operator import _compare_digest  # hmac's own, without hashlib

        return _compare_digest(payload, self._derive(b"agent's proof" if self._is_head else b"head's proof"))

    def _let_in(self) -> None:
        """A key for each direction, which nobody can make who does not know the token, and no other link has."""
        from infini_run.multinode.frame_authentication import FrameAuthenticator

        head, agent = (
            FrameAuthenticator(self._derive(b"head's frames")),
            FrameAuthenticator(self._derive(b"agent's frames")),
        )
        self._wire.let_in(*((head, agent) if self._is_head else (agent, head)))

    def _derive(self, use: bytes) -> bytes:
        """What only both sides can compute, each for one use."""
        from infini_run.multinode.frame_authentication import derive

        head, agent = (self._ours, self._theirs) if self._is_head else (self._theirs, self._ours)
        return derive(self._token, head + agent, use)


def socket_wire(connection: object) -> Connection:
    """Of a connected socket, whose descriptor becomes the wire's."""
    fd: int = connection.detach()  # type: ignore[attr-defined]
    return Connection(fd, fd)
