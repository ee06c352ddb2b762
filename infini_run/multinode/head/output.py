"""The head's stdio: whole lines of many nodes to stdout and stderr, and stdin, without ever waiting for the other
side.

While `is_backlogged`, the head reads no more from the nodes.
"""

from __future__ import annotations

import os
import stat
from _signal import SIG_BLOCK, SIG_SETMASK, SIGTTIN, SIGTTOU, pthread_sigmask

from infini_run.core.nonblocking_writer import NonblockingWriter
from infini_run.multinode.link import protocol
from infini_run.system.io_sizes import CONSOLE_BACKLOG_LIMIT, READ_CHUNK
from infini_run.system.poller import EDGE, READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.system.poller import Poller

_LONGEST_LINE = 1 << 18  # bytes; agents send pieces of 64 KiB and a label as lines, at most


class ConsoleWriters:
    """The head's stdout and stderr, by the kind of frame (OUT, ERR) that goes there."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        out = NonblockingWriter(1)
        self._writers = {protocol.OUT: out, protocol.ERR: out if _are_one(1, 2) else NonblockingWriter(2)}
        self._has_reported = False

    def write(self, kind: bytes, data: bytes) -> None:
        """Write lines, or keep them until there is room."""
        self._writers[kind].write(data)
        self._watch(self._writers[kind])

    def _watch(self, writer: NonblockingWriter) -> None:
        def go_on() -> None:
            writer.flush()
            self._watch(writer)

        if writer.fileno() >= 0:
            self._poller.watch(writer.fileno(), WRITE if writer.waiting else 0, go_on)

    def _watch_end(self, writer: NonblockingWriter) -> bool:
        """Return whether the reader has all of it, at the end of writing; if not, the poller reports when to look
        again."""
        is_done = writer.finish()
        if not is_done and not writer.waiting:
            self._poller.watch(writer.fileno(), READ, lambda: None)
        return is_done

    def take_problem(self) -> str:
        """Return the system's message after a loss of output, the first time; else ""."""
        if self._has_reported:
            return ""
        problem = next((writer.problem for writer in self._writers.values() if writer.is_lossy), None)
        self._has_reported = problem is not None
        return "" if problem is None else os.strerror(problem.errno or 0)

    def give_up(self) -> bool:
        """Stop waiting for a reader that does not read. Return whether that lost output; the caller reports it."""
        self._has_reported = True
        lost = [writer.give_up() for writer in self._writers.values()]
        return any(lost)

    @property
    def is_backlogged(self) -> bool:
        """Whether the head's own reader is far behind."""
        return any(writer.waiting > CONSOLE_BACKLOG_LIMIT for writer in self._writers.values())

    @property
    def is_done(self) -> bool:
        """Whether the head's own reader has all of it. Ask only at the end of writing."""
        if any(writer.waiting for writer in self._writers.values()):
            return False
        left = [writer for writer in self._writers.values() if not self._watch_end(writer)]
        return not left

    def close(self) -> None:
        """Close the writers. Safe twice."""
        for writer in self._writers.values():
            if writer.fileno() >= 0:
                self._poller.unwatch(writer.fileno())
            writer.close()


def _are_one(first: int, second: int) -> bool:
    """Return whether two descriptors are one pipe, file, or terminal. Then they share a writer, so that neither
    splits a line of the other."""
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


class LineBuffer:
    """Makes whole lines of the pieces of one stream of one node."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Add a piece, and return the lines that are complete."""
        at = data.rfind(b"\n") + 1
        if not at:
            self._rest += data
            if len(self._rest) < _LONGEST_LINE:
                return b""
            whole, self._rest = self._rest, b""
            return whole
        whole, self._rest = self._rest + data[:at], data[at:]
        return whole

    def end(self) -> bytes:
        """Return the rest, without an end of line."""
        rest, self._rest = self._rest, b""
        return rest


class StdinReader:
    """The head's stdin, read without ever waiting for it. It reads a terminal only in the foreground. In the
    background, typed lines are for others, and reading does not suspend this process (SIGTTIN).

    Args:
        fd: the descriptor.
        wanted: whether any rank reads stdin.
    """

    def __init__(self, fd: int, *, wanted: bool) -> None:
        self._fd = fd
        self._own = -1
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            wanted, mode = False, 0
        self.has_ended = not wanted
        self.is_terminal = stat.S_ISCHR(mode) and os.isatty(fd)
        # epoll(7) takes neither files nor /dev/null: they are always ready
        self.never_waits = stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not self.is_terminal)
        if wanted and (self.is_terminal or stat.S_ISFIFO(mode)):
            self._own = _reopened(fd)

    def fileno(self) -> int:
        return self._fd if self._own < 0 else self._own

    @property
    def events(self) -> int:
        """What to wait for. A terminal stays readable until the job in its foreground has read the line, and no event
        reports the return to the foreground. So the poller reports each new line once."""
        return READ | (EDGE if self.is_terminal else 0)

    def read(self) -> bytes | None:
        """Return a piece; empty once, at the end; None if there is nothing now, or nothing any more."""
        if self.has_ended:
            return None
        try:
            data = self._read()
        except BlockingIOError:
            return None
        except OSError:  # EIO: in the background; after a hang-up it is no terminal any more
            if os.isatty(self._fd):
                return None
            data = b""
        self.has_ended = not data
        return data

    def _read(self) -> bytes:
        with unstopped():
            if not self.never_waits and self._own < 0 and not is_readable(self._fd):
                raise BlockingIOError  # another process that shares the pipe was quicker
            return os.read(self.fileno(), READ_CHUNK)

    def close(self) -> None:
        """Close the own descriptor; the given one stays open. Safe twice."""
        self.has_ended = True
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


class unstopped:
    """A block in which a terminal does not suspend this process. In the background reading fails with EIO, and
    writing succeeds in spite of `stty tostop` (termios(3), job control: a thread that blocks SIGTTIN and SIGTTOU)."""

    def __enter__(self) -> None:
        self._before = pthread_sigmask(SIG_BLOCK, (SIGTTIN, SIGTTOU))

    def __exit__(self, *_: object) -> None:
        pthread_sigmask(SIG_SETMASK, self._before)


def _reopened(fd: int) -> int:
    """Open the same file again, non-blocking. Return -1 without the permission: a terminal of another user, after
    su."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1


def is_readable(fd: int) -> bool:
    """Return whether a read would not wait."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
