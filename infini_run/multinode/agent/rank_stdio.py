"""An agent's stdio, given to its ranks: pipes that the agent reads and writes, with the Link behind them.

Lines of the agent itself go between the lines of its ranks. They do not go through the ranks' pipe: the agent reads
that pipe, so if it is full a write would never end.
"""

from __future__ import annotations

import fcntl
from _functools import partial  # the C module: `functools` costs 3 ms

import infini_run.lean_os as os
from infini_run.core.write_buffer import write_pending
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack
from infini_run.system.io_sizes import READ_CHUNK
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.multinode.link.connection import Connection
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.system.poller import Poller


class RankStdio:
    """Replaces descriptors 0, 1 and 2 of this process, which the ranks inherit.

    Args:
        connection: the Link. It gets what ranks write as OUT and ERR frames.
        with_input: whether ranks read stdin; else it is /dev/null.
        keywords: renames flags in the agent's lines, for a head in the Python API; None: the command's.

    Raises:
        OSError: too few descriptors; then nothing has changed.
    """

    def __init__(
        self, connection: Connection, poller: Poller, *, with_input: bool, keywords: KeywordErrors | None = None
    ) -> None:
        self._keywords = keywords
        self._connection = connection
        self._poller = poller
        opened = []
        try:
            opened.append(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3))
            opened += os.pipe()
            opened += os.pipe()
            opened += os.pipe() if with_input else (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1)
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        self.own_stderr, self.out_fd, out, self.err_fd, err, source, self.in_fd = opened
        for theirs, number in ((source, 0), (out, 1), (err, 2)):
            os.dup2(theirs, number)
            os.close(theirs)
        for fd in (self.out_fd, self.err_fd, self.in_fd):
            if fd >= 0:
                os.set_blocking(fd, False)
        self._pending_input = bytearray()
        self._input_ends = False
        self._own_lines = b""  # of the agent, until a line of the ranks ends
        self._is_in_line = False  # the last piece of the ranks' stderr that was sent did not end a line

    def close(self) -> None:
        """Give this process its own stderr back, and close the pipes that replaced it."""
        os.dup2(self.own_stderr, 2)
        for fd in (self.own_stderr, self.out_fd, self.err_fd, self.in_fd):
            if fd >= 0:
                self._poller.unwatch(fd)
                os.close(fd)

    def watch(self) -> None:
        """Tell the poller what to wait for next."""
        watch, read = self._poller.watch, READ if self._connection.has_room else 0
        watch(self.out_fd, read, partial(self._forward, self.out_fd, protocol.OUT))
        watch(self.err_fd, read, partial(self._forward, self.err_fd, protocol.ERR))
        if self.in_fd >= 0:
            watch(self.in_fd, WRITE if self._pending_input else 0, self._write_input)

    # ---- stdin

    def feed(self, data: bytes) -> None:
        """Write bytes to the ranks that read stdin, or keep them until there is room; empty: the end of the file."""
        self._pending_input += data
        self._input_ends = self._input_ends or not data
        self._write_input()

    def _write_input(self) -> None:
        if self.in_fd < 0:
            return
        if not write_pending(self.in_fd, self._pending_input):
            self._input_ends = True
        if self._input_ends and not self._pending_input:
            self._poller.unwatch(self.in_fd)
            os.close(self.in_fd)
            self.in_fd = -1

    # ---- stdout and stderr

    def print_line(self, text: str) -> None:
        """Send a line of the agent, between two lines of its ranks."""
        if self._keywords is not None:
            text = "\n".join(self._keywords.rename_lines(text.split("\n")))
        self._own_lines += os.encode_text(text + "\n")
        if not self._is_in_line:
            self._connection.send(pack(protocol.ERR, self._with_own_lines(b"")))

    def drain(self) -> None:
        """Send the rest of the pipes: all ranks exited."""
        self.send_waiting()
        if self._own_lines:
            self._connection.send(pack(protocol.ERR, b"\n" + self._with_own_lines(b"")))
        self._is_in_line = False  # the head ends every line that a launch leaves open

    def send_waiting(self) -> None:
        """Send what is in the pipes."""
        for fd, kind in ((self.out_fd, protocol.OUT), (self.err_fd, protocol.ERR)):
            while self._forward(fd, kind):
                pass

    def _forward(self, fd: int, kind: bytes) -> bool:
        """Send one piece of what ranks have written; whether there was any."""
        try:
            data = os.read(fd, READ_CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._connection.send(pack(kind, self._with_own_lines(data) if kind == protocol.ERR else data))
        return bool(data)

    def _with_own_lines(self, data: bytes) -> bytes:
        """Return a piece of the ranks' stderr, with the agent's lines behind its first line."""
        self._is_in_line = not data.endswith(b"\n") if data else self._is_in_line
        at = data.find(b"\n") + 1
        if self._own_lines and (at or not data):
            data, self._own_lines = data[:at] + self._own_lines + data[at:], b""
        return data
