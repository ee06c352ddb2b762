"""Where the last lines of a file begin."""

from __future__ import annotations

import os

from infini_run.system.io_sizes import READ_CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import FileIO


def start_of_last(file: FileIO, count: int, end: int = -1) -> int:
    """Return where the last lines of a file begin, read from its end; a last line without an end is one.

    Args:
        file: The file.
        count: How many lines.
        end: Where the last line ends. -1: at the end of the file.
    """
    at = file.seek(0, os.SEEK_END) if end < 0 else end
    left = count
    if at:
        file.seek(at - 1)
        left += file.read(1) == b"\n"
    while at and left:
        size = min(at, READ_CHUNK)
        file.seek(at - size)
        piece = file.read(size)
        at -= size
        found = len(piece)
        while left and (found := piece.rfind(b"\n", 0, found)) >= 0:
            left -= 1
        if not left:
            return at + found + 1
    return at
