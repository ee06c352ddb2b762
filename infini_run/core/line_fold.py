"""Lines that several ranks write alike, once: csrc/io/line_fold.c, for a head, which writes the lines of many nodes.

Where the ranks are of this process, the core does it itself (csrc/io/console_lines.c).
"""

from __future__ import annotations

from infini_run._irun import ffi, lib
from infini_run.errors import StartError
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_ENOMEM, _ENOSPC = 12, 28
ALL = (1 << 63) - 2  # a time at which every line is due


@record
class FoldedLine:
    """A line that is to be written now. `ranks`: as text, for several; `rank`: the lowest."""

    stream: int
    line: bytes
    rank: int
    ranks: bytes
    time_ns: int


class LineFold:
    """What waits for equal lines. Times are nanoseconds of CLOCK_MONOTONIC.

    Args:
        ranks: how many there are; they are numbered from 0.
        expected: how many of them write here: a line that all of those have written waits no longer.
    """

    def __init__(self, ranks: int, expected: int) -> None:
        handle = ffi.new("struct ir_fold **")
        error = lib.ir_fold_new(ranks, [expected, expected], handle)
        if error < 0:
            raise StartError(f"{ranks} ranks: out of memory for --console=fold", "folding lines", _ENOMEM)
        self._handle = ffi.gc(handle[0], lib.ir_fold_free)
        self._first = ffi.new("struct ir_folded *")
        self._text = ffi.new("char[]", lib.IR_FOLD_RANKS)

    def add(self, rank: int, stream: int, line: bytes, now_ns: int) -> Iterator[FoldedLine]:
        """Hold a line of a rank. Yield lines that had to make room for it, and itself if it cannot be held, behind
        all others."""
        error = lib.ir_fold_add(self._handle, rank, stream, line, len(line), now_ns)
        while error == -_ENOSPC:
            yield self._pop()
            error = lib.ir_fold_add(self._handle, rank, stream, line, len(line), now_ns)
        if error < 0:
            yield from self.due(ALL)
            yield FoldedLine(stream=stream, line=line, rank=rank, ranks=b"", time_ns=now_ns)

    def due(self, now_ns: int) -> Iterator[FoldedLine]:
        """Take out the lines that are due at `now_ns`."""
        while lib.ir_fold_due_ns(self._handle) <= now_ns:
            yield self._pop()

    def _pop(self) -> FoldedLine:
        first = self._first
        lib.ir_fold_first(self._handle, first)
        size = lib.ir_fold_ranks(self._handle, 0, self._text) if first.count > 1 else 0
        line = FoldedLine(
            stream=first.stream,
            line=ffi.unpack(first.line, first.size),
            rank=first.rank,
            ranks=ffi.unpack(self._text, size) if size else b"",
            time_ns=first.time_ns,
        )
        lib.ir_fold_drop(self._handle)
        return line

    @property
    def due_s(self) -> float:
        """When the first line is due, by time.monotonic(); inf: none is held."""
        due_ns = lib.ir_fold_due_ns(self._handle)
        return float("inf") if due_ns > ALL else due_ns / 1e9
