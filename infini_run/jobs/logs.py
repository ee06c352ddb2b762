"""What a job's ranks have written: one file for each attempt, in whole lines with the name of the rank in front.

The one rule: lines come out as they are in the file, in its order. Who asks for one rank or node gets its lines only.
"""

from __future__ import annotations

import contextlib
import os
import re
import select

from infini_run.errors import UsageError
from infini_run.jobs.follow import Follow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from infini_run.jobs.folder import Folder
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.state import Status

_PIECE = 1 << 16
# of plan.py: one node's, or one of many; stderr has its own word
_LABEL = re.compile(rb"\[(?:rank (\d+)|([^\]\s]*):(\d+))(?: ERROR)?\] ")


class Chosen:
    """Which lines: of one rank, of one node, or all. nodes: hosts, in the order of their node ranks."""

    def __init__(self, rank: int, node: str, nodes: Sequence[str], nproc: int) -> None:
        """rank: -1: all. node: its index or its host; "": all. Raises UsageError: there is no such rank or node."""
        self._rank, self._host = rank, b""
        self.is_sure = bool(nodes)
        if nodes and nproc and rank >= len(nodes) * nproc:
            raise UsageError(f"--rank={rank}: there are ranks 0 to {len(nodes) * nproc - 1}")
        if node and nodes:
            index = int(node) if node.isdecimal() else nodes.index(node) if node in nodes else -1
            if not 0 <= index < len(nodes):
                raise UsageError(f"--node={node}: the nodes are {', '.join(nodes)}, or 0 to {len(nodes) - 1}")
            self._host = os.fsencode(nodes[index])
        self._is_lone = len(nodes) == 1

    def has(self, line: bytes) -> bool:
        if self._rank < 0 and not self._host:
            return True
        label = _LABEL.match(line)
        if label is None:
            return False
        rank = label[1] or label[3]
        if self._rank >= 0 and int(rank) != self._rank:
            return False
        return not self._host or self._is_lone or label[2] == self._host


class Reader:
    """A log file that may still grow, in whole lines."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self) -> Iterator[bytes]:
        """Those that have come since the last call."""
        if self._file is None:
            try:
                self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
            except FileNotFoundError:
                return
        while piece := self._file.read(_PIECE):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                yield line + b"\n"

    def end(self) -> bytes:
        """What stands there without an end of line. Safe twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


def attempts_of(folder: Folder, asked: int) -> list[int]:
    """asked: one, or -1: all. Raises UsageError: it has not run so often."""
    count = folder.attempts()
    if asked >= count:
        was = "has not begun" if not count else f"ran {count} time{'s' * (count > 1)}, counted from 0"
        raise UsageError(f"--attempt={asked}: job {folder.name} {was}")
    return list(range(count)) if asked < 0 else [asked]


def check(folder: Folder, *, rank: int, node: str, attempt: int) -> None:
    """Raises UsageError: as far as it is known by now, there is no such rank, node or attempt."""
    for number in attempts_of(folder, attempt)[-1:]:
        phase = folder.phase(number)
        if phase is not None:
            Chosen(rank, node, phase.nodes, phase.nproc)


def blocks(
    folder: Folder,
    scheduler: Scheduler | None,
    *,
    rank: int = -1,
    node: str = "",
    attempt: int = -1,
    stop: int = -1,
    changed: Callable[[Status], None] | None = None,
) -> Iterator[bytes]:
    """Whole lines, many at a time. scheduler: of a job that is to be followed until it has ended; None: what there
    is now. attempt: -1: all of them. stop: a descriptor; following ends when it can be read. changed: is called with
    each new status of a job that is followed. Raises UsageError: there is no such rank, node or attempt."""
    is_known = scheduler is None or attempt < folder.attempts()
    check(folder, rank=rank, node=node, attempt=attempt if is_known else -1)
    at = None if scheduler is None else Follow(folder, scheduler)
    number, log = max(attempt, 0), None
    try:
        if at is not None and changed is not None:
            changed(at.status)
        while True:
            is_over, count = at is None or at.has_ended, folder.attempts()
            while number < count and attempt in (-1, number):
                log = log or _Log(folder, number, rank, node)
                yield from log.blocks()
                if number == count - 1 and not is_over:
                    break
                yield from log.end()
                number, log = number + 1, None
            if is_over or number > attempt >= 0:
                break
            assert at is not None
            if at.step(also=[stop] if stop >= 0 else []) and changed is not None:
                changed(at.status)
            if stop >= 0 and select.select([stop], [], [], 0)[0]:
                return
        if not folder.attempts():
            yield scheduler_log(folder)
    finally:
        if at is not None:
            at.close()
        if log is not None:
            log.close()


class _Log:
    """One attempt's. Its nodes may become known while it is read."""

    def __init__(self, folder: Folder, number: int, rank: int, node: str) -> None:
        self._folder, self._number, self._rank, self._node = folder, number, rank, node
        self._reader = Reader(folder.log(number))
        self._chosen: Chosen | None = None

    def blocks(self) -> Iterator[bytes]:
        phase = self._folder.phase(self._number)
        if self._chosen is None or not self._chosen.is_sure:
            nodes, nproc = (phase.nodes, phase.nproc) if phase else ((), 0)
            self._chosen = Chosen(self._rank, self._node, nodes, nproc)
        if self._node and not self._chosen.is_sure:
            return  # nobody has written anything
        held, size = [], 0
        for line in self._reader.lines():
            if self._chosen.has(line):
                held.append(line)
                size += len(line)
            if size >= _PIECE:
                yield b"".join(held)
                held, size = [], 0
        if held:
            yield b"".join(held)

    def end(self) -> Iterator[bytes]:
        """What stands there without an end of line."""
        rest = self._reader.end()
        if rest and self._chosen is not None and self._chosen.has(rest):
            yield rest

    def close(self) -> None:
        self._reader.end()


def scheduler_log(folder: Folder) -> bytes:
    """What the job's script and its scheduler have said, of all its runs. Of a job that never began, why may be in
    there."""
    said = b""
    for path in folder.scheduler_logs:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            said += file.read()
    return said
