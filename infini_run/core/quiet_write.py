"""Writes without SIGPIPE, which a host program may have left at its default: it would end by it."""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run._irun import ffi, lib
from infini_run.lean_os import EINTR


def write(fd: int, data: bytes | bytearray, most: int = 1 << 30) -> int:
    """Write at most the first `most` bytes as os.write does, without SIGPIPE, which a host program may have left at
    its default. Raises OSError."""
    count = -EINTR
    while count == -EINTR:
        with ffi.from_buffer(data) as view:
            count = int(lib.ir_write(fd, view, min(len(data), most)))
    if count < 0:
        raise OSError(-count, os.strerror(-count))
    return count


class Quietly:
    """A `with` block in which nothing that this thread writes raises SIGPIPE: the error is EPIPE alone."""

    def __init__(self) -> None:
        self._held = ffi.new("int *")

    def __enter__(self) -> None:
        lib.ir_sigpipe_hold(self._held)

    def __exit__(self, *_: object) -> None:
        lib.ir_sigpipe_release(self._held)
