"""Bytes for a descriptor that does not block: write what fits, keep the rest."""

from __future__ import annotations

from infini_run.core.group import write

_CHUNK = 1 << 18  # bytes of one write


def write_pending(fd: int, pending: bytearray) -> bool:
    """Write as much of `pending` as the descriptor takes, and remove it from `pending`. Raises no SIGPIPE.

    Returns:
        False if the reader has gone: then nothing is pending any more.
    """
    while pending:
        try:
            written = write(fd, pending, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            pending.clear()
            return False
        del pending[:written]
    return True
