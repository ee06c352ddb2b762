"""A stream of bytes between the head and the one process that its agent runs on a node.

At the node's end it is a socket, descriptor 0 of that process; between head and agent it is STREAM_DOWN and STREAM_UP
frames. The agent keeps bytes for the process until it reads them: their sender has its own limit
(crews/spawn/stream_multiplexer.py). It reads bytes from the process as the Link has room.
"""

from __future__ import annotations

from _socket import SHUT_WR, socketpair  # the C module: `socket` costs 5 ms

from infini_run.core.write_buffer import write_pending
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack
from infini_run.system.io_sizes import LARGE_CHUNK
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.link.connection import Connection
    from infini_run.system.poller import Poller


class AgentStream:
    """The agent's end. `child_socket` is the process's; close it as soon as the process has it. is_closed: no bytes
    pass any more, in either direction."""

    def __init__(self, poller: Poller, connection: Connection) -> None:
        self._poller = poller
        self._connection = connection
        self._socket, self.child_socket = socketpair()
        self._socket.setblocking(False)
        self._pending = bytearray()
        self._ends = False  # no more comes from the head
        self.is_closed = False

    def watch(self) -> None:
        """Tell the poller what to wait for next."""
        if not self.is_closed:
            events = (READ if self._connection.has_room else 0) | (WRITE if self._pending else 0)
            self._poller.watch(self._socket.fileno(), events, self._move)

    def feed(self, data: bytes) -> None:
        """Pass bytes on to the process, or keep them until it reads; empty: no more come."""
        if self.is_closed:
            return
        self._pending += data
        self._ends = self._ends or not data
        self._write()

    def finish(self) -> None:
        """Send the last bytes of the process that exited, and close."""
        while self._forward():
            pass
        self._close()  # a process that it has left behind may still have the other end

    def _move(self) -> None:
        self._write()
        self._forward()

    def _write(self) -> None:
        if self.is_closed:
            return
        write_pending(self._socket.fileno(), self._pending)
        if self._ends and not self._pending:
            self._ends = False
            try:
                self._socket.shutdown(SHUT_WR)
            except OSError:  # the process has closed its end
                return

    def _forward(self) -> bool:
        """Send one piece of what the process has written; whether there was any."""
        if self.is_closed:
            return False
        try:
            data = self._socket.recv(LARGE_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._connection.send(pack(protocol.STREAM_UP, data))
        if not data:
            self._close()
        return bool(data)

    def _close(self) -> None:
        if not self.is_closed:
            self._poller.unwatch(self._socket.fileno())
            self._socket.close()
            self.is_closed = True
