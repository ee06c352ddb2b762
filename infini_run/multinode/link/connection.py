"""The Link: one connection between the head and an agent, as frames.

It goes over the two pipes of an ssh that the head started, or over TCP. Over TCP a handshake (handshake.py) comes
first, and every later frame is authenticated. A connection never blocks: it keeps bytes that find no room. The
agent's side of a pipe begins with a separate line (MAGIC), because a login script may print something before the
agent starts.
"""

from __future__ import annotations

from _functools import partial

import infini_run.lean_os as os
from infini_run.core.write_buffer import write_pending
from infini_run.errors import LinkError
from infini_run.multinode.link.protocol import LIMIT, Decoder, with_tags
from infini_run.system.fork_hooks import close_fd
from infini_run.system.io_sizes import BACKLOG_LIMIT, LARGE_CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from infini_run.multinode.link.frame_authentication import FrameAuthenticator

TOKEN = "INFINI_RUN_TOKEN"  # the variable with the secret that both sides know
MAGIC = b"\0infini-run link 1\n"
_PREAMBLE_LIMIT = 1 << 20  # bytes that a login script may print
_LEAST_CHUNK = 1 << 12  # bytes of one read, at first
_UNAUTHENTICATED_LIMIT = 64  # bytes of a payload before the end of the handshake
_UNAUTHENTICATED_CHUNK = 1 << 9  # bytes of one read until then


class Connection:
    """Frames over two descriptors, which the connection owns.

    Args:
        read_fd, write_fd: two pipes, or twice the same socket. They become non-blocking.
        awaits_magic: drop what comes before MAGIC.
        limit: bytes of the longest payload to accept.
    """

    def __init__(self, read_fd: int, write_fd: int, *, awaits_magic: bool = False, limit: int = LIMIT) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._decoder = Decoder(limit)
        self._sender: FrameAuthenticator | None = None  # makes the tags of this side's frames
        self._read_chunk, self._most_chunk = _LEAST_CHUNK, LARGE_CHUNK
        self._pending = bytearray()
        self._preamble: bytearray | None = bytearray() if awaits_magic else None
        self.has_ended = False  # the other side sends no more
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor to wait for, to read."""
        return self._read_fd

    @property
    def write_fd(self) -> int:
        return self._write_fd

    @property
    def wants_write(self) -> bool:
        return bool(self._pending)

    @property
    def has_room(self) -> bool:
        """Whether there is room to send output or input: its source waits while the other side is behind."""
        return len(self._pending) < BACKLOG_LIMIT

    @property
    def send_state(self) -> tuple[int, bytes]:
        """The number of authenticated pieces sent, and the bytes that wait for room. A forked copy of this process
        can continue from there, and give its own state back (heartbeat_process.py)."""
        return (0 if self._sender is None else self._sender.count), bytes(self._pending)

    @send_state.setter
    def send_state(self, state: tuple[int, bytes]) -> None:
        if self.has_ended:
            return
        count, pending = state
        self._pending[:] = pending
        if self._sender is not None:
            self._sender.count = count

    def restrict(self) -> None:
        """Accept only short frames, and read little at a time: the other side has proved nothing."""
        self._decoder.limit = _UNAUTHENTICATED_LIMIT
        self._read_chunk = self._most_chunk = _UNAUTHENTICATED_CHUNK

    def authenticate(self, sender: FrameAuthenticator, receiver: FrameAuthenticator) -> None:
        """Tag this side's frames, check the tags of the other's, and accept frames of full length: the handshake
        succeeded."""
        self._sender, self._decoder.authenticator = sender, receiver
        self._decoder.limit = LIMIT
        self._read_chunk, self._most_chunk = _LEAST_CHUNK, LARGE_CHUNK

    def send(self, frame: bytes) -> None:
        """Send one frame, or keep it until there is room. After the end it does nothing: the reader learns of it."""
        if self.has_ended or self._write_fd < 0:
            return
        if self._sender is None:
            self._pending += frame
        else:
            for piece in with_tags(frame, self._sender):
                self._pending += piece
        self.flush()

    def flush(self) -> None:
        """Send what there is room for. After the other side has gone, its last frames are still readable."""
        if self._pending:
            write_pending(self._write_fd, self._pending)

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Read once, and yield kind and payload of each complete frame. Raises LinkError: the bytes are no frame, or
        the connection ended within one."""
        try:
            data = os.read(self._read_fd, self._read_chunk)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.has_ended = True
            if not self._decoder.is_empty:
                raise LinkError("the link broke in the middle of a frame")
            return
        if len(data) == self._read_chunk:  # there may be more
            self._read_chunk = min(8 * self._read_chunk, self._most_chunk)
        elif len(data) < _LEAST_CHUNK < self._read_chunk:
            self._read_chunk = _LEAST_CHUNK
        if self._preamble is not None:
            data = self._after_magic(self._preamble, data)
        yield from self._decoder.feed(data)

    def _after_magic(self, preamble: bytearray, data: bytes) -> bytes:
        preamble += data
        at = preamble.find(MAGIC)
        if at >= 0:
            self._preamble = None
            return bytes(preamble[at + len(MAGIC) :])
        if len(preamble) > _PREAMBLE_LIMIT:
            raise LinkError(
                f"{_PREAMBLE_LIMIT >> 20} MiB of other output came before the agent's first message; "
                "find what prints it"
            )
        return b""

    @property
    def preamble(self) -> str:
        """What came before MAGIC, as text: the output of a login script, or the error of a shell."""
        return "" if self._preamble is None else self._preamble.decode("utf-8", "replace")

    def close(self) -> None:
        """Close both descriptors. Safe twice."""
        if self._write_fd != self._read_fd:
            close_fd(self._write_fd, partial(setattr, self, "_write_fd", self._read_fd))
        if self._read_fd >= 0:
            close_fd(self._read_fd, self._mark_closed)
        self.has_ended = True
        self._pending = (
            bytearray()
        )  # not cleared: in a forked child a write of the parent's may still hold the old one

    def _mark_closed(self) -> None:
        self._read_fd = self._write_fd = -1


def from_socket(socket: object) -> Connection:
    """Return a connection over a connected socket, and own its descriptor."""
    fd: int = socket.detach()  # type: ignore[attr-defined]
    return Connection(fd, fd)
