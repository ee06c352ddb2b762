"""Who sends the heartbeats while the head, or an agent, is itself stopped by Ctrl-Z: a fork of it, for as long as
that lasts.

The other side need not know of it, so a network that dies meanwhile is silence as ever, and bounded as ever. It ends
when it is told to, and gives back how far it has written; or with its parent, whose end of a pipe it holds the other
end of.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
from contextlib import suppress

from infini_run.multinode import protocol
from infini_run.multinode.protocol import pack
from infini_run.system.poller import poll_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.multinode.connection import Connection


class HeartbeatProcess:
    """For these wires, with a heartbeat every so many seconds, from now to `end`. Raises OSError: no process or no
    descriptor is left."""

    def __init__(self, wires: Sequence[Connection], every_s: float) -> None:
        self._wires = list(wires)
        told_fd, self._tell_fd = os.pipe()
        try:
            self._fd, say_fd = os.pipe()
        except OSError:
            os.close(told_fd)
            os.close(self._tell_fd)
            raise
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # ours tell our parent by a pipe
        try:
            self._pid = os.fork()
            if not self._pid:
                os.setpgid(0, 0)  # a shell stops and ends groups
                os.close(self._tell_fd)
                os.close(self._fd)
                _stand_in(self._wires, every_s, told_fd, say_fd)
        except OSError:
            os.close(self._tell_fd)
            os.close(self._fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(told_fd)
            os.close(say_fd)

    def end(self) -> None:
        """We are there again, and go on writing where it has stopped. Where it was killed, we do not know how far
        that is: what we then write may end a link."""
        os.close(self._tell_fd)
        said = b""
        while piece := os.read(self._fd, 1 << 20):
            said += piece
        os.close(self._fd)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored the kernel takes it
            os.waitpid(self._pid, 0)
        try:
            positions = marshal.loads(said)
        except (EOFError, ValueError, TypeError):  # it was killed, perhaps while it wrote
            return
        for wire, position in zip(self._wires, positions, strict=True):
            wire.position = position


def _stand_in(wires: Sequence[Connection], every_s: float, told_fd: int, say_fd: int) -> None:
    """In the fork, which ends here. A wire that takes nothing gets no more: what is kept must not grow for days."""
    try:
        poller = select.poll()
        poller.register(told_fd, select.POLLIN)
        while True:
            for wire in wires:
                wire.flush()
                if not wire.wants_write:
                    wire.send(pack(protocol.HEARTBEAT))
            if poller.poll(poll_ms(every_s)):
                break
        with open(say_fd, "wb") as file:
            file.write(marshal.dumps([wire.position for wire in wires]))
    finally:
        os._exit(0)
