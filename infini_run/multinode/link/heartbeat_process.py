"""A fork of the head, or of an agent, that sends heartbeats while Ctrl-Z has suspended its parent.

The other side sees no difference, so if the network fails meanwhile, it notices the silence as usual. The fork ends
when its parent, continued, closes a pipe, and reports how far it has written; or when its parent dies.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
from contextlib import suppress

from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack
from infini_run.system.io_sizes import READ_CHUNK
from infini_run.system.poller import poll_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.multinode.link.connection import Connection


class HeartbeatProcess:
    """Sends heartbeats from now until `end`.

    Args:
        targets: where to, and what gives the frame that goes there beside each heartbeat; b"": none.
        every_s: time between two heartbeats.

    Raises:
        OSError: too few processes or descriptors.
    """

    def __init__(self, targets: Mapping[Connection, Callable[[], bytes]], every_s: float) -> None:
        self._connections = list(targets)
        end_fd, self._end_fd = os.pipe()
        try:
            self._result_fd, result_fd = os.pipe()
        except OSError:
            os.close(end_fd)
            os.close(self._end_fd)
            raise
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, signal.valid_signals()
        )  # the handlers would write to the parent's pipe
        try:
            self._pid = os.fork()
            if not self._pid:
                os.setpgid(0, 0)  # a shell suspends and ends groups
                os.close(self._end_fd)
                os.close(self._result_fd)
                _send_heartbeats(targets, every_s, end_fd, result_fd)
        except OSError:
            os.close(self._end_fd)
            os.close(self._result_fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(end_fd)
            os.close(result_fd)

    def end(self) -> None:
        """End the fork, and continue the stream where it stopped. After SIGKILL of the fork that place is unknown,
        and the next write may end a connection."""
        os.close(self._end_fd)
        result = b""
        while piece := os.read(self._result_fd, READ_CHUNK):
            result += piece
        os.close(self._result_fd)
        with suppress(ChildProcessError):  # if SIGCHLD is ignored, the kernel reaps it
            os.waitpid(self._pid, 0)
        try:
            states = marshal.loads(result)
        except (EOFError, ValueError, TypeError):  # it was killed, perhaps while it wrote
            return
        for connection, state in zip(self._connections, states, strict=True):
            connection.send_state = state


def no_frame() -> bytes:
    """Return no frame: beside a heartbeat nothing goes out."""
    return b""


def _send_heartbeats(
    targets: Mapping[Connection, Callable[[], bytes]], every_s: float, end_fd: int, result_fd: int
) -> None:
    """Send heartbeats in the fork, which ends here. A connection that takes nothing gets no more: its backlog must
    not grow for days."""
    try:
        poller = select.poll()
        poller.register(end_fd, select.POLLIN)
        while True:
            for connection, make_frame in targets.items():
                connection.flush()
                if not connection.wants_write:
                    for frame in filter(None, (pack(protocol.HEARTBEAT), make_frame())):
                        connection.send(frame)
            if poller.poll(poll_ms(every_s)):
                break
        with open(result_fd, "wb") as file:
            file.write(marshal.dumps([connection.send_state for connection in targets]))
    finally:
        os._exit(0)
