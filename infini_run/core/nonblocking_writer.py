"""Writes to a descriptor that other processes share: never blocks, and changes nothing for them.

csrc/io/nonblocking_writer.c says how. A reader that does not read must not delay a stop. So the writer keeps bytes
that find no room, and the caller waits as long as it likes, or not at all.
"""

from __future__ import annotations

import os
import select  # before a writer takes the last descriptors
import time

from infini_run._irun import ffi, lib
from infini_run.core.quiet_write import write
from infini_run.core.write_buffer import flush
from infini_run.system.io_sizes import LARGE_CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_EAGAIN, _EINTR = 11, 4  # not from `errno`: making its 130 names takes long
CONSOLE_WAIT_S = lib.IR_CONSOLE_WAIT_MS / 1000  # after a stop, how long for a reader that does not read


class NonblockingWriter:
    """One stream. It keeps bytes until there is room."""

    def __init__(self, fd: int) -> None:
        self._pending = bytearray()
        self._has_finished = False
        self.problem: OSError | None = None  # it takes no more: what comes is dropped
        self.is_lossy = False  # something was dropped
        handle = ffi.new("struct ir_writer **")
        error = lib.ir_writer_new(fd, handle)
        self._handle = handle[0]
        if error < 0:
            self.problem = OSError(-error, os.strerror(-error))

    def fileno(self) -> int:
        """Return the descriptor, which polls writable when there is room, and readable when `finish` has something
        new to say; -1: a file."""
        return int(lib.ir_writer_fd(self._handle)) if self._handle else -1

    @property
    def waiting(self) -> int:
        """Bytes that found no room yet."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Write it, or keep it until there is room."""
        if self.problem is None and not self._has_finished:
            self._pending += data
            self.flush()
        self.is_lossy = self.is_lossy or (self.problem is not None and bool(data))

    def flush(self) -> None:
        """Write the kept bytes, as far as there is room."""
        problem = flush(self._pending, self._write_some) if self._handle else None
        if problem is not None:
            self.problem, self.is_lossy = problem, True

    def _write_some(self, data: bytearray) -> int:
        """Write from the start of `data`; return the number of bytes. Raises OSError."""
        sent = -_EINTR
        while sent == -_EINTR:
            with ffi.from_buffer(data) as view:  # released here, so that `data` may shrink
                sent = int(lib.ir_writer_write(self._handle, view, min(len(data), LARGE_CHUNK)))
        if sent < 0:
            raise OSError(-sent, os.strerror(-sent))
        return sent

    def finish(self) -> bool:
        """End the writing. Return whether the reader's side has all of it."""
        self.flush()
        if self._pending:
            return False
        if self.problem is not None or not self._handle:
            return True
        self._has_finished = True
        error = int(lib.ir_writer_finish(self._handle))
        if error < 0 and error != -_EAGAIN:
            self.problem, self.is_lossy = OSError(-error, os.strerror(-error)), True
        return error != -_EAGAIN

    def give_up(self) -> bool:
        """Stop writing. Return whether something was lost by that."""
        was_waiting = bool(self._pending) or (self._has_finished and not self.finish())
        if was_waiting:
            self._pending.clear()
            self.problem = BlockingIOError()
        return was_waiting

    def close(self) -> None:
        """Stop writing. Safe twice; the descriptor itself stays."""
        self._handle = self._handle and lib.ir_writer_free(self._handle)


def write_all(fd: int, data: bytes, wait_s: float | None, also: Callable[[], int] | None = None) -> OSError | None:
    """Write all of it. Wait at most `wait_s` seconds for the reader (None: for ever), or until the descriptor that
    `also` returns is readable. This calls `also` only if there is something to wait for. Return another error, or
    None."""
    writer = NonblockingWriter(fd)
    try:
        if writer.problem is not None:
            return _write_pieces(fd, data, wait_s, also)
        writer.write(data)
        if not writer.finish():
            wait(writer, wait_s, also)
        return writer.problem
    finally:
        writer.close()


def _write_pieces(fd: int, data: bytes, wait_s: float | None, also: Callable[[], int] | None) -> OSError | None:
    """Do the same without a writer, for which there are too few threads or descriptors: the data may be the line that
    names the limit. Where a pipe polls writable, it has room for a piece (pipe(7))."""
    poll, stop_fd = select.poll(), -1 if also is None else also()
    poll.register(fd, select.POLLOUT)
    if stop_fd >= 0:
        poll.register(stop_fd, select.POLLIN)
    elif wait_s is None:  # no signal could end it
        wait_s = CONSOLE_WAIT_S
    end_s = None if wait_s is None else time.monotonic() + wait_s
    while data:
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        ready = dict(poll.poll(None if left_s is None else left_s * 1000))
        if not ready or stop_fd in ready:
            return None
        try:
            data = data[write(fd, data, select.PIPE_BUF) :]
        except BlockingIOError:
            continue
        except OSError as error:
            return error
    return None


def wait(writer: NonblockingWriter, wait_s: float | None, also: Callable[[], int] | None = None) -> None:
    """Wait in the same way for earlier bytes, and write no more."""
    poll, stop_fd = select.poll(), -1 if also is None else also()
    if stop_fd >= 0:
        poll.register(stop_fd, select.POLLIN)
    end_s = None if wait_s is None else time.monotonic() + wait_s
    while not writer.finish():
        poll.register(writer.fileno(), select.POLLOUT if writer.waiting else select.POLLIN)
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        ready = dict(poll.poll(None if left_s is None else left_s * 1000))
        if not ready or stop_fd in ready:
            return
