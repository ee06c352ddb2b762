"""A stream of bytes between the head and the one process that its agent runs on a node: descriptor 0 of that process,
a socket, at the node's end; frames DOWN and UP over the Link.

What comes down is written as the process reads it, and kept until then: who sends it has a bound of his own for that
(crews/stream_multiplexer.py). What it writes is read as the Link has room.
"""

from __future__ import annotations

from infini_run.multinode import protocol
from infini_run.multinode.protocol import pack
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.connection import Connection
    from infini_run.system.poller import Poller

_PIECE = 1 << 18


class AgentStream:
    """The agent's end. theirs: the socket for the process; close it once it has it."""

    def __init__(self, poller: Poller, wire: Connection) -> None:
        from _socket import socketpair  # the C module: `socket` costs 5 ms

        self._poller = poller
        self._wire = wire
        self._ours, self.theirs = socketpair()
        self._ours.setblocking(False)
        self._pending = bytearray()
        self._ends = False  # no more comes down
        self._is_over = False

    def watch(self, *, has_room: bool) -> None:
        """Tell the poller what to wait for. has_room: whether the Link takes what the process says."""
        if not self._is_over:
            events = (READ if has_room else 0) | (WRITE if self._pending else 0)
            self._poller.watch(self._ours.fileno(), events, self._turn)

    def _turn(self) -> None:
        self._write()
        self._carry()

    def feed(self, data: bytes) -> None:
        """What comes down; nothing: no more does."""
        self._pending += data
        self._ends = self._ends or not data
        self._write()

    def _write(self) -> None:
        while self._pending and not self._is_over:
            try:
                sent = self._ours.send(memoryview(self._pending)[:_PIECE])
            except BlockingIOError:
                return
            except OSError:  # it reads no more
                self._pending.clear()
                return
            del self._pending[:sent]
        if self._ends and not self._is_over:
            self._ends = False
            self._shut()

    def _shut(self) -> None:
        try:
            self._ours.shutdown(1)  # SHUT_WR
        except OSError:
            return  # it has closed its end

    def _carry(self) -> bool:
        """A piece of what it says; whether there was one."""
        if self._is_over:
            return False
        try:
            data = self._ours.recv(_PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._wire.send(pack(protocol.STREAM_UP, data))
        if not data:
            self._poller.unwatch(self._ours.fileno())
            self._ours.close()
            self._is_over = True
        return bool(data)

    def finish(self) -> None:
        """The process has ended: what it said last."""
        while self._carry():
            pass
        if not self._is_over:  # a process that it has left behind, and that is gone by now, had it open
            self._poller.unwatch(self._ours.fileno())
            self._ours.close()
            self._is_over = True
