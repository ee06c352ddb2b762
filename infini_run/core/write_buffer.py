"""Bytes for a reader that may be slow: write what fits, keep the rest."""

from __future__ import annotations

from infini_run.core.quiet_write import write
from infini_run.system.io_sizes import LARGE_CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def write_pending(fd: int, pending: bytearray) -> bool:
    """Write as much of `pending` as a non-blocking descriptor takes, and remove it from `pending`. Never raises
    SIGPIPE.

    Args:
        fd: a pipe or socket.
        pending: the bytes that wait; changed in place.

    Returns:
        False if the reader has gone: then nothing is pending any more.
    """
    return flush(pending, lambda data: write(fd, data, LARGE_CHUNK)) is None


def flush(pending: bytearray, write_some: Callable[[bytearray], int]) -> OSError | None:
    """Call `write_some` until it has written all of `pending` or finds no room.

    Args:
        pending: the waiting bytes; this removes what it wrote.
        write_some: writes from the start of its argument, and returns the number of bytes. Raises BlockingIOError
            without room, and another OSError at the end of all writing.

    Returns:
        That other OSError, and nothing is pending any more; None otherwise.
    """
    while pending:
        try:
            written = write_some(pending)
        except BlockingIOError:
            return None
        except OSError as error:
            pending.clear()
            return error
        del pending[:written]
    return None
