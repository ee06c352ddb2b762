"""A terminal on which some lines are drawn again and again, in place, below what was there before.

No mode of the terminal is ever changed, and between two frames the cursor stands below the last one: whatever ends
us, SIGKILL too, leaves a terminal in order. Never blocks: who has pressed Ctrl-S must not hold a job up.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence

_CAREFUL = 512  # bytes that a terminal takes without blocking when it polls writable
_HELD = 1 << 16  # of lines for a terminal that takes none
_READER_S = 1.0  # as CONSOLE_WAIT_MS of csrc/core.h: how long for who does not read, at the end


class Screen:
    """fd: the terminal's, which stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._own = _reopen(fd)  # O_NONBLOCK belongs to the open file, which we share with the shell
        self._height = self._width = 0  # of what is drawn
        self._untaken = b""
        self.is_gone = False  # hung up: nothing more is drawn

    def size(self) -> tuple[int, int]:
        """Columns and lines; 80 and 24 where the terminal does not say."""
        try:
            columns, lines = os.get_terminal_size(self._fd)
        except OSError:
            columns = lines = 0
        return columns or 80, lines or 24

    def is_ours(self, groups: Container[int]) -> bool:
        """Whether we, or one of these process groups, are in the foreground: in the background a shell has the
        terminal. One that is not our controlling terminal is nobody's."""
        try:
            front = os.tcgetpgrp(self._fd)
        except OSError:
            return True
        return front == os.getpgrp() or front in groups

    def draw(self, lines: Sequence[str], width: int) -> bool:
        """Draw these lines over the last ones; none is wider than `width`, and all fit. False: not now, the terminal
        has not taken all of the last frame."""
        if not self._flush():
            return False
        columns, _ = self.size()
        # A window that became narrower may have wrapped what is there (most terminals do, xterm does not), so that
        # nobody knows how high it is now.
        start = self._above() if self._width < columns else "\x1b[H\x1b[J"
        self._put(start + "".join(f"\x1b[2K{line}\r\n" for line in lines) + "\x1b[J")
        self._height, self._width = len(lines), width
        return True

    def say(self, text: str) -> None:
        """Lines that stay, where the drawn ones were; those are drawn anew below."""
        if len(self._untaken) < _HELD:
            self._put(f"{self._above()}\x1b[J{text.rstrip()}\n".replace("\n", "\r\n"))
            self.forget()

    def forget(self) -> None:
        """What is drawn stays, and the next frame comes below it."""
        self._height = self._width = 0

    def close(self) -> None:
        """Wait a little for a terminal that has not taken everything."""
        end_s = time.monotonic() + _READER_S
        while not self._flush() and not self.is_gone and time.monotonic() < end_s:
            self._wait(end_s - time.monotonic())
        if self._own >= 0:
            os.close(self._own)
        self._own, self.is_gone = -1, True

    def _above(self) -> str:
        return f"\r\x1b[{self._height}A" if self._height else "\r"

    def _put(self, text: str) -> None:
        self._untaken += text.encode("utf-8", "replace")
        self._flush()

    def _flush(self) -> bool:
        """Whether everything is written, as much as the terminal takes now."""
        try:
            while self._untaken and not self.is_gone:
                if self._own >= 0:
                    size = os.write(self._own, self._untaken)
                elif self._wait(0.0):
                    size = os.write(self._fd, self._untaken[:_CAREFUL])
                else:
                    return False
                self._untaken = self._untaken[size:]
        except BlockingIOError:
            return False
        except OSError:  # EIO: it hung up
            self.is_gone, self._untaken = True, b""
        return not self.is_gone

    def _wait(self, timeout_s: float) -> bool:
        import select

        poll = select.poll()
        poll.register(self._fd if self._own < 0 else self._own, select.POLLOUT)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _reopen(fd: int) -> int:
    import fcntl

    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        opened = os.open(f"/proc/self/fd/{fd}", flags)
    except OSError:  # another user's, after su
        return -1
    if opened > 2:
        return opened
    own = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # our stdio was closed
    os.close(opened)
    return own
