"""--console=fold on many nodes: the head shows once what ranks of several nodes write alike.

Agents send lines with a label, as for --console=prefix. A line whose label is not that of a rank of its agent is
passed on as it is, behind all that is held.
"""

from __future__ import annotations

import os
import re
import time

from infini_run.core.line_fold import ALL, LineFold
from infini_run.multinode.link import protocol
from infini_run.plan.labels import fold_label, label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from infini_run.core.line_fold import FoldedLine

_KINDS = (protocol.OUT, protocol.ERR)
_LABEL = re.compile(rb"\[((?:rank |[^\]\s]{0,255}:)(\d{1,9}))(?: err)?\] ")  # of plan/labels.py


class FoldedOutput:
    """Lines of all nodes, on their way to the console.

    Args:
        world_size: how many ranks there are.
        expected: how many of them are shown.
        colored: whether labels are.
        has_time: whether lines begin with the time at which they came here.
        write: called with a kind (OUT, ERR) and whole lines.
    """

    def __init__(
        self, world_size: int, expected: int, *, colored: bool, has_time: bool, write: Callable[[bytes, bytes], None]
    ) -> None:
        self._fold = LineFold(world_size, expected)
        self._colored, self._has_time, self._write = colored, has_time, write
        self._shared_label = fold_label(colored=colored)
        self._own_labels: dict[int, tuple[bytes, ...]] = {}
        self._kind, self._lines = protocol.OUT, bytearray()  # that are written together

    def add(self, kind: bytes, lines: bytes, ranks: Container[int]) -> None:
        """Take whole lines of an agent with these ranks."""
        now_ns, stream = time.monotonic_ns(), _KINDS.index(kind)
        for line in lines.splitlines(keepends=True):
            found = _LABEL.match(line)
            if found is None or int(found[2]) not in ranks:
                self._put_all(self._fold.due(ALL))
                self._put(kind, line)
                continue
            rank = int(found[2])
            if rank not in self._own_labels:
                labels = label(os.fsdecode(found[1]), colored=self._colored)
                self._own_labels[rank] = tuple(first for first, _ in labels)
            self._put_all(self._fold.add(rank, stream, line[found.end() :], now_ns))
        self.flush(now_ns)

    def flush(self, now_ns: int = ALL) -> None:
        """Write the lines that are due at `now_ns` (monotonic); by default all."""
        self._put_all(self._fold.due(now_ns))
        self._write_lines()

    @property
    def due_s(self) -> float:
        """When `flush` has something to write, by time.monotonic(); inf: never."""
        return self._fold.due_s

    def _put_all(self, lines: Iterable[FoldedLine]) -> None:
        for each in lines:
            stream = each.stream
            before, after = self._shared_label[stream]
            own = before + each.ranks + after if each.ranks else self._own_labels[each.rank][stream]
            stamp = _stamp(each.time_ns) if self._has_time else b""
            end = b"" if each.line[-1:] in (b"\n", b"\r") else b"\n"
            self._put(_KINDS[stream], stamp + own + each.line + end)

    def _put(self, kind: bytes, line: bytes) -> None:
        if kind != self._kind:
            self._write_lines()
            self._kind = kind
        self._lines += line

    def _write_lines(self) -> None:
        if self._lines:
            self._write(self._kind, bytes(self._lines))
            self._lines.clear()


def _stamp(time_ns: int) -> bytes:
    """Return the time of a line, in the form of csrc/io/console_lines.c."""
    then_ns = time.time_ns() - (time.monotonic_ns() - time_ns)
    second, rest = divmod(then_ns, 1_000_000_000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
    return f"{text}.{rest // 1_000_000:03d}Z ".encode()
