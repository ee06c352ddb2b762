"""A terminal on which some lines are drawn again and again, in place, below what was there before.

No mode of the terminal is ever changed, and between two frames the cursor stands below the last one: whatever ends
us, SIGKILL too, leaves a terminal in order. Never blocks: who has pressed Ctrl-S must not hold a job up.
"""

from __future__ import annotations

import os

from infini_run.core.nonblocking_writer import NonblockingWriter, wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence

BACKLOG_LIMIT = 1 << 16  # of lines for a terminal that takes none
_READER_S = 1.0  # as CONSOLE_WAIT_MS of csrc/group/group.h: how long for who does not read, at the end


class TerminalArea:
    """fd: the terminal's, which stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = NonblockingWriter(fd)
        self._height = self._width = 0  # of what is drawn
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

    def print_above(self, text: str) -> None:
        """Lines that stay, where the drawn ones were; those are drawn anew below."""
        if self._writer.waiting < BACKLOG_LIMIT:
            self._put(f"{self._above()}\x1b[J{text.rstrip()}\n".replace("\n", "\r\n"))
            self.leave_in_place()

    def leave_in_place(self) -> None:
        """What is drawn stays, and the next frame comes below it."""
        self._height = self._width = 0

    def close(self) -> None:
        """Wait a little for a terminal that has not taken everything."""
        if not self._writer.finish():
            wait(self._writer, _READER_S)
        self._writer.close()
        self.is_gone = True

    def _above(self) -> str:
        return f"\r\x1b[{self._height}A" if self._height else "\r"

    def _put(self, text: str) -> None:
        if not self.is_gone:
            self._writer.write(text.encode("utf-8", "replace"))
        self._flush()

    def _flush(self) -> bool:
        """Whether everything is written, as much as the terminal takes now."""
        self._writer.flush()
        self.is_gone = self.is_gone or self._writer.problem is not None  # EIO: it hung up
        return not self.is_gone and not self._writer.waiting
