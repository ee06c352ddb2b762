"""Lines at the bottom of a terminal, with each frame in place of the last one.

No mode of the terminal is ever changed, and between two frames the cursor stands below the last one: so even after
SIGKILL the terminal is in order. Nothing blocks: a user who has pressed Ctrl-S does not delay the job.
"""

from __future__ import annotations

import os

from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S, NonblockingWriter, wait
from infini_run.system.io_sizes import TERMINAL_BACKLOG_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence


class TerminalArea:
    """The lines on one terminal.

    Args:
        fd: The descriptor of the terminal, which stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = NonblockingWriter(fd)
        self._height = self._width = 0  # of the drawn lines
        self.is_gone = False  # hung up: nothing more is drawn

    def size(self) -> tuple[int, int]:
        """Return columns and lines; 80 and 24 if the terminal does not know them."""
        try:
            columns, lines = os.get_terminal_size(self._fd)
        except OSError:
            columns = lines = 0
        return columns or 80, lines or 24

    def is_ours(self, groups: Container[int]) -> bool:
        """Return whether this process or one of `groups` is in the foreground.

        It counts as so on a terminal that is not the controlling one.
        """
        try:
            front = os.tcgetpgrp(self._fd)
        except OSError:
            return True
        return front == os.getpgrp() or front in groups

    def draw(self, lines: Sequence[str], width: int) -> bool:
        """Draw these lines over the last ones.

        Args:
            lines: The lines; none is wider than `width`, and all fit.
            width: The columns of the frame.

        Returns:
            False if the terminal has not taken all of the last frame; then this draws nothing.
        """
        if not self._flush():
            return False
        columns, _ = self.size()
        # A narrower window may have wrapped the lines (most terminals do, xterm does not), so their height is
        # unknown.
        start = self._above() if self._width < columns else "\x1b[H\x1b[J"
        self._put(start + "".join(f"\x1b[2K{line}\r\n" for line in lines) + "\x1b[J")
        self._height, self._width = len(lines), width
        return True

    def print_above(self, text: str) -> None:
        """Print lines that stay, at the place of the drawn ones, which come below with the next frame."""
        if self._writer.waiting < TERMINAL_BACKLOG_LIMIT:
            self._put(f"{self._above()}\x1b[J{text.rstrip()}\n".replace("\n", "\r\n"))
            self.leave_in_place()

    def leave_in_place(self) -> None:
        """Leave the drawn lines as they are; the next frame comes below them."""
        self._height = self._width = 0

    def close(self) -> None:
        """Wait for a slow terminal, one second at most, and draw nothing more."""
        if not self._writer.finish():
            wait(self._writer, CONSOLE_WAIT_S)
        self._writer.close()
        self.is_gone = True

    def _above(self) -> str:
        return f"\r\x1b[{self._height}A" if self._height else "\r"

    def _put(self, text: str) -> None:
        if not self.is_gone:
            self._writer.write(text.encode("utf-8", "replace"))
        self._flush()

    def _flush(self) -> bool:
        """Write as much as the terminal takes. Return whether that is everything."""
        self._writer.flush()
        self.is_gone = self.is_gone or self._writer.problem is not None  # EIO: it hung up
        return not self.is_gone and not self._writer.waiting
