"""Between a launcher and its zygote: whole messages over a socket, descriptors with the first byte of one.

Both sides are infini-run, of one machine and one start, so messages are pickles. A sender never waits: it keeps what
the kernel does not take, and sends that when there is room.
"""

from __future__ import annotations

import _pickle
import array
import socket
from struct import Struct

from infini_run.core.write_buffer import write_pending
from infini_run.system.fork_hooks import close_link
from infini_run.system.io_sizes import READ_CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD = Struct(">QI")  # bytes of the message, descriptors that come with it
_MOST = 200  # descriptors at a time; the kernel takes 253 (SCM_MAX_FD)
_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC
_QUIET = socket.MSG_NOSIGNAL  # the host program's SIGPIPE is its own


class MessageSocket:
    """Messages to and fro, without waiting. `has_ended`: the other side is gone, and `receive` has returned all that
    it sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._in = bytearray()
        self._out = bytearray()
        self.has_ended = False

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there is something to `receive`."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something waits for room: call `flush` when the socket is writable."""
        return bool(self._out)

    def send(self, message: object) -> None:
        """Send, or keep what finds no room now."""
        data = _pickle.dumps(message, 5)
        self._out += _HEAD.pack(len(data), 0)
        self._out += data
        self.flush()

    def send_with_fds(self, message: object, fds: Sequence[int]) -> None:
        """Send the first message, with descriptors, and wait for room. Raises OSError without a receiver."""
        self._socket.setblocking(True)
        send_with_fds(self._socket, message, fds)
        self._socket.setblocking(False)

    def flush(self) -> None:
        """Send the kept bytes, as far as there is room."""
        if self._out:
            write_pending(self._socket.fileno(), self._out)

    def receive(self) -> list[object]:
        """Return the messages that have arrived."""
        while not self.has_ended:
            try:
                data = self._socket.recv(READ_CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._in += data
            self.has_ended = not data
        found: list[object] = []
        while len(self._in) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._in)[0]
            if len(self._in) < end:
                break
            found.append(_pickle.loads(bytes(self._in[_HEAD.size : end])))
            del self._in[:end]
        return found

    def close(self) -> None:
        """Close the socket. Safe twice."""
        close_link(self._socket)


def send_with_fds(sock: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors, over a socket that blocks. Raises OSError without a receiver."""
    data = _pickle.dumps(message, 5)
    sock.sendall(_HEAD.pack(len(data), len(fds)), _QUIET)
    for at in range(0, len(fds), _MOST):
        rights = array.array("i", fds[at : at + _MOST])
        sock.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], _QUIET)
    sock.sendall(data, _QUIET)


def send_link(sock: socket.socket, link: socket.socket) -> None:
    """Send one end of a link, on which a request follows: one byte, of which an interrupt leaves no half. Raises
    OSError without a receiver."""
    rights = array.array("i", [link.fileno()])
    sock.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], _QUIET)


def receive_link(sock: socket.socket) -> socket.socket | None:
    """Return the next link. None: the other side is gone."""
    byte, fds = _receive_some(sock, 1)
    return socket.socket(fileno=fds[0]) if byte else None


def receive_with_fds(sock: socket.socket) -> tuple[object, list[int]] | None:
    """Return the next message; its descriptors are the caller's to close. They are the first of those sent, and fewer
    where this process may open no more (unix(7), MSG_CTRUNC). None: the other side is gone."""
    head = _receive(sock, _HEAD.size)
    if head is None:
        return None
    size, count = _HEAD.unpack(head)
    fds: list[int] = []
    for at in range(0, count, _MOST):
        byte, some = _receive_some(sock, min(_MOST, count - at))
        if len(fds) == at:
            fds += some
        else:
            _close_all(some)  # some before these are missing
        if not byte:
            _close_all(fds)
            return None
    data = _receive(sock, size)
    if data is None:
        _close_all(fds)
        return None
    return _pickle.loads(data), fds


def _receive_some(sock: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive without socket.recv_fds, which forgets its flags (3.9 to 3.13)."""
    fds = array.array("i")
    byte, rights, _, _ = sock.recvmsg(1, socket.CMSG_LEN(count * fds.itemsize), _CLOEXEC)
    for _, _, data in rights:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return byte, list(fds)


def _receive(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _close_all(fds: Sequence[int]) -> None:
    import os

    for fd in fds:
        os.close(fd)
