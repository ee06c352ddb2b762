"""The head's stdout and stderr: whole lines of many nodes, without ever waiting for the reader
(core/nonblocking_writer.py).

The caller reads no more from the nodes until `waiting` is small again.
"""

from __future__ import annotations

import os
import stat
from _signal import SIG_BLOCK, SIG_SETMASK, SIGTTIN, SIGTTOU, pthread_sigmask

from infini_run.core.nonblocking_writer import NonblockingWriter
from infini_run.multinode import protocol
from infini_run.system.poller import EDGE, READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.system.poller import Poller

_HELD = 4 << 20  # bytes that our own reader has not taken: then the nodes wait
_LONGEST = 1 << 18  # of a line that is held for its end; agents send pieces of 64 KiB and a label as lines, at most


class ConsoleWriters:
    """Both, by the kind of frame that is written there."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        out = NonblockingWriter(1)
        self._outlets = {protocol.OUT: out, protocol.ERR: out if _are_one(1, 2) else NonblockingWriter(2)}
        self._is_told = False

    def write(self, kind: bytes, data: bytes) -> None:
        """Lines of a node."""
        self._outlets[kind].write(data)
        self._watch(self._outlets[kind])

    def _watch(self, outlet: NonblockingWriter) -> None:
        def go_on() -> None:
            outlet.flush()
            self._watch(outlet)

        if outlet.fileno() >= 0:
            self._poller.watch(outlet.fileno(), WRITE if outlet.waiting else 0, go_on)

    def _watch_end(self, outlet: NonblockingWriter) -> bool:
        """No more is written there: whether the reader's side has all of it."""
        is_done = outlet.finish()
        if not is_done and not outlet.waiting:
            self._poller.watch(outlet.fileno(), READ, lambda: None)
        return is_done

    def take_problem(self) -> str:
        """Why something that was written is lost, in the system's words, once; "" where nothing is."""
        if self._is_told:
            return ""
        problem = next((outlet.problem for outlet in self._outlets.values() if outlet.is_lossy), None)
        self._is_told = problem is not None
        return "" if problem is None else os.strerror(problem.errno or 0)

    def give_up(self) -> bool:
        """Wait no more for a reader that does not read; whether something was lost by that. Who asks tells it."""
        self._is_told = True
        lost = [outlet.give_up() for outlet in self._outlets.values()]
        return any(lost)

    @property
    def are_behind(self) -> bool:
        """Our own reader has not taken much of it."""
        return any(outlet.waiting > _HELD for outlet in self._outlets.values())

    @property
    def are_done(self) -> bool:
        """Our own reader has all that there was, and no more comes."""
        if any(outlet.waiting for outlet in self._outlets.values()):
            return False
        left = [outlet for outlet in self._outlets.values() if not self._watch_end(outlet)]
        return not left

    def close(self) -> None:
        """Safe twice."""
        for outlet in self._outlets.values():
            if outlet.fileno() >= 0:
                self._poller.unwatch(outlet.fileno())
            outlet.close()


def _are_one(first: int, second: int) -> bool:
    """Whether two descriptors are one pipe, file or terminal: a line of one must not land in one of the other."""
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


class LineBuffer:
    """Whole lines out of pieces of one stream of one node."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now."""
        at = data.rfind(b"\n") + 1
        if not at:
            self._rest += data
            if len(self._rest) < _LONGEST:
                return b""
            whole, self._rest = self._rest, b""
            return whole
        whole, self._rest = self._rest + data[:at], data[at:]
        return whole

    def end(self) -> bytes:
        """What is left without an end of line."""
        rest, self._rest = self._rest, b""
        return rest


class StdinReader:
    """Our stdin, read as there are readers, without ever waiting for it. A terminal is read while we are in its
    foreground; in the background what is typed is for others, and no read of ours stops us (SIGTTIN)."""

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
        """What to wait for. A terminal stays readable as long as another job does not take what was typed for it, and
        nothing tells us when we come to the foreground: we look at each new line."""
        return READ | (EDGE if self.is_terminal else 0)

    def read(self) -> bytes | None:
        """A piece; empty at its end, once; None: nothing now, or nothing any more."""
        if self.has_ended:
            return None
        try:
            data = self._read()
        except BlockingIOError:
            return None
        except OSError:  # EIO: in the background just then; a terminal that has hung up is none any more
            if os.isatty(self._fd):
                return None
            data = b""
        self.has_ended = not data
        return data

    def _read(self) -> bytes:
        with unstopped():
            if not self.never_waits and self._own < 0 and not is_readable(self._fd):
                raise BlockingIOError  # who shares it with us was quicker
            return os.read(self.fileno(), 1 << 16)

    def close(self) -> None:
        """Safe twice; our stdin itself stays."""
        self.has_ended = True
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


class unstopped:
    """While it lasts a terminal does not stop us: in the background reading fails with EIO, and writing (stty tostop)
    goes through (termios(3), job control: a thread that blocks SIGTTIN and SIGTTOU)."""

    def __enter__(self) -> None:
        self._before = pthread_sigmask(SIG_BLOCK, (SIGTTIN, SIGTTOU))

    def __exit__(self, *_: object) -> None:
        pthread_sigmask(SIG_SETMASK, self._before)


def _reopened(fd: int) -> int:
    """A description of its own that does not block; -1: another user's terminal, after su."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1


def is_readable(fd: int) -> bool:
    """Whether a read would not wait."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
