"""The lines of --events: one JSON object for each event, while the job runs.

A thread writes them, so a reader that does not read, a full disk, or a hung file server never delays the job. What
cannot be written is dropped, and the next line has the number. Each line is whole: a cut one is continued first.
"""

from __future__ import annotations

import fcntl
import os
import select
import time

from infini_run.core.quiet_write import write
from infini_run.display.background_writer import CLOSE_S, BackgroundWriter
from infini_run.display.event_schema import encode_fact
from infini_run.errors import StartError, UsageError
from infini_run.system.resource_limits import with_limit_hint
from infini_run.system.secure_files import open_stream
from infini_run.value_types import DESCRIPTOR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.display.event_schema import Fact

_WAITING = 10_000  # lines that wait for the thread
_GAP_S = 1.0  # between two lines of one rank's progress
_FIRST_FD = 3  # 0 to 2 are of the launch, even if the caller has closed them
_UNREAD = "they were not read in time"
_PIECE = 4096  # PIPE_BUF: a pipe that polls writable has room for it


class EventStream:
    """The lines of a launch, for all its attempts.

    Args:
        target: The value of --events.
        fd: An open descriptor, which this closes.
    """

    def __init__(self, target: str, fd: int) -> None:
        self._target = target
        self._file = LineFile(fd)
        self._writer = BackgroundWriter(self._file.write, _WAITING, "infini-run: events")
        self._dropped = 0  # that the thread never got
        self._held: dict[int, Fact] = {}  # by rank: its last progress, where a line about it came a moment ago
        self._due_s: dict[int, float] = {}  # by rank: when its next line may come
        self._is_over = False

    def add(self, fact: Fact) -> None:
        """Write a line about a fact; of progress, at most once a second and rank, the last one."""
        rank = fact.get("rank", -1)
        if fact["kind"] == "progress":
            if time.monotonic() < self._due_s.get(rank, 0.0):
                self._held[rank] = fact
                return
            self._due_s[rank] = time.monotonic() + _GAP_S
            self._held.pop(rank, None)  # it was due, and is older
        elif fact["kind"] == "exited":
            self._release(rank)
        elif fact["kind"] in ("restarting", "ended"):
            for other in tuple(self._held):
                self._release(other)
            self._due_s.clear()
        self._put(fact)

    def _release(self, rank: int) -> None:
        if rank in self._held:
            self._put(self._held.pop(rank))

    def _put(self, fact: Fact) -> None:
        if self._is_over:
            return
        is_taken = self._writer.put({**fact, "dropped": self._dropped} if self._dropped else fact)
        self._dropped = 0 if is_taken else self._dropped + 1

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until a line about progress is due, at most `asked_s`. None: there is no limit."""
        if not self._held:
            return asked_s
        wait_s = max(0.0, min(self._due_s[rank] for rank in self._held) - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> None:
        """Write the lines about progress that are due."""
        now_s = time.monotonic()
        for rank in [rank for rank in self._held if now_s >= self._due_s[rank]]:
            self._due_s[rank] = now_s + _GAP_S
            self._release(rank)

    def close(self) -> str:
        """Wait a second for the last lines. Return a sentence if any line was dropped, else "". Safe twice."""
        if self._is_over:
            return ""
        self._is_over = True
        is_written = self._writer.close(CLOSE_S)
        if not is_written:
            self._file.interrupt()
            is_written = self._writer.close(CLOSE_S)
        if is_written:
            self._file.close()
        if is_written and not self._dropped and not self._file.dropped:
            return ""
        return f"--events={self._target}: dropped the last events: {self._file.problem or _UNREAD}"

    def after_fork_in_child(self) -> None:
        """Close the copy of the descriptor in a forked child."""
        self._is_over = True
        self._file.close()


class LineFile:
    """A descriptor that gets whole lines. One thread calls `write`; any may call the rest.

    Args:
        fd: The descriptor, which `close` closes.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rest = b""  # of a line that was cut
        self.dropped = 0  # lines since the last one that was written
        self.problem = ""  # why

    def write(self, fact: Fact) -> None:
        """Write a line, or count it as dropped."""
        earlier = self.dropped + fact.get("dropped", 0)
        data = encode_fact({**fact, "dropped": earlier} if earlier else fact)
        self._rest = self._write_all(self._rest)
        left = data if self._rest else self._write_all(data)
        if left == data:
            self.dropped = earlier + 1
        else:
            self.dropped, self._rest = 0, left

    def _write_all(self, data: bytes) -> bytes:
        """Write it. Return what could not be written."""
        while data:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.register(self._stop_fd, select.POLLIN)
            if self._stop_fd in dict(poll.poll()):
                self.problem = ""  # of an earlier line
                return data
            try:
                data = data[write(self._fd, data, _PIECE) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self.problem = str(error.strerror)
                return data
        return data

    def interrupt(self) -> None:
        """End the wait for a reader."""
        os.eventfd_write(self._stop_fd, 1)

    def close(self) -> None:
        """Close the descriptor. Safe twice."""
        fds, self._fd, self._stop_fd = (self._fd, self._stop_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def open_events(target: str, *, owns_process: bool) -> EventStream:
    """Open the lines of --events.

    Args:
        target: A file, or fd:N.
        owns_process: The descriptors of this process are the launcher's: its ranks do not inherit N.

    Raises:
        UsageError: It cannot be written, or N is no such descriptor.
        StartError: No descriptor is left.
    """
    if not target.startswith(DESCRIPTOR):
        fd = open_stream("events", target)
    else:
        fd = int(target.removeprefix(DESCRIPTOR))
        check_descriptor(target)
        if owns_process and fd >= _FIRST_FD:
            os.set_inheritable(fd, False)
    try:
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
        try:
            return EventStream(target, own)
        except BaseException:  # no descriptor is left for what wakes its thread
            os.close(own)
            raise
    except OSError as error:
        number = error.errno or 0
        raise with_limit_hint(StartError(os.strerror(number), "opening --events", number)) from None
    finally:
        if not target.startswith(DESCRIPTOR):
            os.close(fd)


def check_descriptor(target: str) -> None:
    """Check that fd:N is open for writing, before a descriptor of infini-run may have that number. Raises UsageError:
    it is not."""
    fd = int(target.removeprefix(DESCRIPTOR))
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:
        raise UsageError(f"--events={target}: not an open descriptor; open it, such as {fd}>FILE") from None
    if flags & os.O_ACCMODE == os.O_RDONLY or flags & os.O_PATH:
        raise UsageError(f"--events={target}: not open for writing; open it, such as {fd}>FILE")
