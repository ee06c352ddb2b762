"""What a job's ranks have written: one file for each run, in whole lines with the name of the rank in front.

The one rule: lines come out as they are in the file, in its order. Who asks for one rank or node gets its lines only.
"""

from __future__ import annotations

import os
import re
from collections import deque

from infini_run.errors import InfiniRunError, UsageError, printable
from infini_run.jobs.folder.task import task_of, tasks_of
from infini_run.jobs.status.watch import JobWatcher
from infini_run.plan.rank_numbers import RankNumbers
from infini_run.system.file_tail import start_of_last
from infini_run.system.io_sizes import READ_CHUNK
from infini_run.system.secure_files import open_regular
from infini_run.value_types import MAX_INT, number, one_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.folder.records import Phase
    from infini_run.jobs.folder.task import Task
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.status.job_status import Status

# a label of plan/planner.py, of one node or of many; stderr has its own word (ERROR in 0.2 and before). Bounded: the
# output of a rank is no label
_BEFORE = rb"(?:[\d-]{10}T[\d:.]{12}Z )?(?:\033\[3\dm)?"  # --timestamps, --color
_LABEL = re.compile(
    _BEFORE + rb"\[(?:rank |([^\]\s]{0,255}):(?:([\w-]{1,64}) )?|([\w-]{1,64}) )(\d{1,9})(?: err| ERROR)?(?: \+)?\]"
)
_FOLDED = re.compile(_BEFORE + rb"\[ranks ([\d,-]{1,200})( and \d+ more)?(?: err)?\]")  # --console=fold


def split_label(line: str) -> tuple[str, str]:
    """Return the stream of a line, "stdout" or "stderr", and what the rank wrote."""
    data = line.encode("utf-8", "surrogateescape")
    label = _LABEL.match(data) or _FOLDED.match(data)
    if label is None:
        return "stdout", line
    name = "stderr" if label[0].removesuffix(b"]").removesuffix(b" +").endswith((b" err", b" ERROR")) else "stdout"
    text = data[label.end() :].removeprefix(b"\033[0m").removeprefix(b" ")
    return name, text.decode("utf-8", "surrogateescape")


def read_rank(rank: int | str) -> int | str:
    """Return a rank that a program or a client names: 5, "5", or "trainer:0". Raises UsageError: it is none."""
    try:
        return one_rank(str(rank))
    except ValueError as error:
        raise UsageError(f"rank={printable(str(rank))}: {error}") from None


class Chosen:
    """Which lines: of one rank, of one node, or all."""

    def __init__(self, rank: int | str, node: str, phase: Phase | None, *, may_lack_node: bool = False) -> None:
        """Choose lines.

        Args:
            rank: its number through all programs, or "trainer:0"; -1: all.
            node: its index or its host; "": all.
            phase: None: not known yet.
            may_lack_node: a node of another job is no error, and has no lines.

        Raises:
            UsageError: there is no such rank or node.
        """
        nodes, nproc = (phase.nodes, phase.nproc) if phase else ((), 0)
        hosts = (*nodes, *phase.spares, *phase.lost) if phase else ()  # some may have run ranks before
        programs = phase.programs if phase else ()
        if nodes and nproc:
            programs = (("", len(nodes) * nproc),)
        self._program, self._rank = b"", -1
        if rank != -1 and programs:
            names, sizes = zip(*programs, strict=True)
            numbers = RankNumbers(names, sizes)
            program, self._rank = numbers.place(numbers.number(rank, "--rank"))
            self._program = program.encode()
        self._lacks_rank = rank != -1 and not programs  # so far
        self._host, self.lacks_node = b"", False
        self.is_sure = bool(nodes)
        if node and nodes:
            known = nodes if node.isdecimal() else hosts
            at = number(node) if node.isdecimal() else hosts.index(node) if node in hosts else None
            index = -1 if at is None else at
            self.lacks_node = not 0 <= index < len(known)
            if self.lacks_node and not may_lack_node:
                raise _no_node(node, hosts, len(nodes))
            self._host = b"" if self.lacks_node else os.fsencode(known[index])
        self._is_single = len(hosts) == 1

    def has(self, line: bytes) -> bool:
        if self.lacks_node or self._lacks_rank:
            return False
        if self._rank < 0 and not self._host:
            return True
        label = _LABEL.match(line)
        if label is None:
            return self._has_folded(line)
        if self._rank >= 0 and int(label[4]) != self._rank:
            return False
        if self._rank >= 0 and (label[2] or label[3] or b"") != self._program:
            return False
        return not self._host or self._is_single or label[1] == self._host

    def _has_folded(self, line: bytes) -> bool:
        """Return whether it is a line of several ranks, theirs among them. Their nodes are unknown, so any node
        counts."""
        label = _FOLDED.match(line)
        if label is None:
            return False
        bounds = [[int(rank) for rank in part.split(b"-") if rank] for part in label[1].split(b",")]
        return self._rank < 0 or bool(label[2]) or any(each and each[0] <= self._rank <= each[-1] for each in bounds)


def _no_node(node: str, nodes: Iterable[str], count: int) -> UsageError:
    return UsageError(f"--node={node}: unknown node; use {', '.join(nodes)}, or 0 to {count - 1}")


class Reader:
    """A log file that may still grow, in whole lines. tail: at first at most this many last lines; -1: all."""

    def __init__(self, path: str, tail: int = -1) -> None:
        self._path = path
        self._tail = tail
        self._offset = 0  # the file is not held open: an array may have a thousand logs
        self._rest: list[bytes] = []  # of a line without an end: a long one is not put together for each piece of it

    def lines(self) -> Iterator[bytes]:
        """Return the lines since the last call."""
        try:
            file = open(open_regular(self._path, follows_links=True), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            return
        except OSError as error:
            raise InfiniRunError(f"{self._path} cannot be read: {error.strerror}") from None
        with file:
            if self._tail >= 0:
                self._offset, self._tail = start_of_last(file, self._tail), -1
            file.seek(self._offset)
            while piece := file.read(READ_CHUNK):
                self._offset += len(piece)
                if (size := piece.rfind(b"\n") + 1) > 0:
                    text = b"".join([*self._rest, piece[:size]])
                    self._rest.clear()
                    yield from (line + b"\n" for line in text.split(b"\n")[:-1])
                if size < len(piece):
                    self._rest.append(piece[size:])

    def end(self) -> bytes:
        """Return the rest, without an end of line. Safe twice."""
        rest, self._rest = self._rest, []
        return b"".join([*rest, b"\n"]) if rest else b""


def narrow(folder: JobDir, tasks: Sequence[int]) -> tuple[JobDir, Sequence[int]]:
    """Turn the one chosen task into a job, whose lines have no task in front.

    Args:
        folder: Of the array.
        tasks: Indices; empty: all.

    Returns:
        The directory to read, and which tasks of it.

    Raises:
        UsageError: There is no such task.
    """
    return (task_of(folder, tasks[0]), ()) if len(tasks) == 1 else (folder, tasks)


def attempts_of(folder: JobDir, asked: int, tasks: Sequence[int] = ()) -> list[int]:
    """Return the runs to read. asked: one, or -1: all. Those of an array are those of the task that ran most
    often. Raises UsageError if there was no such run."""
    count = max(one.attempts() for one in tasks_of(folder, tasks) or (folder,))
    if asked >= count:
        was = "has not begun" if not count else f"ran {count} time{'s' * (count > 1)}, counted from 0"
        raise UsageError(f"--attempt={asked}: job {folder.name} {was}")
    return list(range(count)) if asked < 0 else [asked]


def check(folder: JobDir, *, rank: int | str, node: str, attempt: int, tasks: Sequence[int] = ()) -> None:
    """Check that the choice can exist, as far as is known by now. A task of an array may lack the runs or nodes of
    another.

    Raises:
        UsageError: There is no such task, rank, node or run.
    """
    numbers = attempts_of(folder, attempt, tasks)
    if found := tasks_of(folder, tasks):
        _check_tasks(found, rank, node)
        return
    for each in numbers[-1:]:
        phase = folder.phase(each)
        if phase is not None:
            Chosen(rank, node, phase)


def _check_tasks(tasks: Sequence[Task], rank: int | str, node: str) -> None:
    """Raises UsageError: no task has the rank or the node, nor can one that is still to begin."""
    each = [
        [phase for number in range(task.attempts()) if (phase := task.phase(number)) and phase.nodes]
        for task in tasks
    ]
    known = [phase for phases in each for phase in phases]
    chosen = [Chosen(rank, node, phase, may_lack_node=True) for phase in known]
    is_open = any(not phases and task.result() is None for task, phases in zip(tasks, each, strict=True))
    if known and not is_open and all(one.lacks_node for one in chosen):
        hosts = dict.fromkeys(host for phase in known for host in (*phase.nodes, *phase.spares, *phase.lost))
        raise _no_node(node, hosts, max(len(phase.nodes) for phase in known))


def blocks(
    folder: JobDir,
    scheduler: Scheduler | None,
    *,
    rank: int | str = -1,
    node: str = "",
    attempt: int = -1,
    tasks: Sequence[int] = (),
    tail: int = -1,
    stop: int = -1,
    changed: Callable[[Status], None] | None = None,
) -> Iterator[bytes]:
    """Read whole lines, many at a time.

    Args:
        folder: Of the job, array or task.
        scheduler: The scheduler of a job to follow until its end; None: do not follow.
        rank: Its lines only, by its number through all programs, or as "trainer:0"; -1: all.
        node: Its index or host; "": all.
        attempt: This run only, counted from 0; -1: all.
        tasks: Of an array, these only; empty: all.
        tail: At first at most this many last lines; -1: all.
        stop: A descriptor, which ends the following when it is readable; -1: none.
        changed: Gets each new status of a followed job.

    Raises:
        UsageError: There is no such task, rank, node or attempt.
    """
    is_known = scheduler is None or attempt < folder.attempts()
    check(folder, rank=rank, node=node, attempt=attempt if is_known else -1, tasks=tasks)
    at = None if scheduler is None else JobWatcher(folder, scheduler)
    chosen = tasks_of(folder, tasks)
    all_runs = [_Runs(one, rank, node, attempt, len(chosen) > 0, tail) for one in chosen or (folder,)]
    try:
        if at is not None and changed is not None:
            changed(at.status)
        while True:
            is_over = at is None or at.has_ended
            ended = {one.name for one in at.status.tasks if one.is_final} if at is not None else set()
            found = (block for runs in all_runs for block in runs.blocks(is_over or runs.folder.name in ended))
            yield from found if tail < 0 else _last_of(found, tail)
            tail = -1
            all_runs = [runs for runs in all_runs if not runs.is_over]
            if is_over or not all_runs:
                break
            assert at is not None
            if at.poll(also=[stop] if stop >= 0 else []) and changed is not None:
                changed(at.status)
            if at.is_interrupted:
                return
    finally:
        if at is not None:
            at.close()


def _last_of(found: Iterable[bytes], count: int) -> Iterator[bytes]:
    lines = deque((line for block in found for line in block.split(b"\n")[:-1]), min(count, MAX_INT))
    if lines:
        yield b"".join(line + b"\n" for line in lines)


def last_lines(text: bytes, count: int) -> bytes:
    """Return at most this many last lines of a text; -1: all."""
    return text if count < 0 else b"".join(deque(text.splitlines(keepends=True), min(count, MAX_INT)))


class _Runs:
    """The runs of a job, or of a task, read one after the other. is_labelled: each line says which task it is of."""

    def __init__(
        self, folder: JobDir, rank: int | str, node: str, attempt: int, is_labelled: bool, tail: int = -1
    ) -> None:
        self.folder = folder
        self._tail = tail
        self.is_over = False
        self._rank, self._node, self._attempt = rank, node, attempt
        self._label = f"[task {folder.index}] ".encode() if is_labelled else b""
        self._number = max(attempt, 0)
        self._log: _Log | None = None

    def blocks(self, is_over: bool) -> Iterator[bytes]:
        """Return the text since the last call. is_over: nothing more will come."""
        for block in self._blocks(is_over):
            yield b"".join(self._label + line for line in block.splitlines(keepends=True)) if self._label else block

    def _blocks(self, is_over: bool) -> Iterator[bytes]:
        count = self.folder.attempts()
        while self._number < count and self._attempt in (-1, self._number):
            self._log = self._log or _Log(
                self.folder, self._number, self._rank, self._node, bool(self._label), self._tail
            )
            yield from self._log.blocks()
            if self._number == count - 1 and not is_over:
                break
            yield from self._log.end()
            self._number, self._log = self._number + 1, None
        self.is_over = is_over or self._number > self._attempt >= 0
        if is_over and not count:
            yield scheduler_log(self.folder)
        self._tail = -1  # what comes from now on is new


class _Log:
    """The log of one run, whose nodes may become known during the reading."""

    def __init__(
        self, folder: JobDir, number: int, rank: int | str, node: str, may_lack_node: bool, tail: int = -1
    ) -> None:
        self._folder, self._number, self._rank, self._node = folder, number, rank, node
        self._may_lack_node = may_lack_node
        self._reader = Reader(folder.log(number), tail if rank == -1 and not node else -1)
        self._chosen: Chosen | None = None

    def blocks(self) -> Iterator[bytes]:
        phase = self._folder.phase(self._number)
        if self._chosen is None or not self._chosen.is_sure:
            self._chosen = Chosen(self._rank, self._node, phase, may_lack_node=self._may_lack_node)
        if (self._node or self._rank != -1) and not self._chosen.is_sure:
            return  # no rank has written so far
        held, size = [], 0
        for line in self._reader.lines():
            if self._chosen.has(line):
                held.append(line)
                size += len(line)
            if size >= READ_CHUNK:
                yield b"".join(held)
                held, size = [], 0
        if held:
            yield b"".join(held)

    def end(self) -> Iterator[bytes]:
        """Return the rest, without an end of line. Safe twice."""
        rest = self._reader.end()
        if rest and self._chosen is not None and self._chosen.has(rest):
            yield rest


def scheduler_log(folder: JobDir, tasks: Sequence[int] = ()) -> bytes:
    """Return what the job's script and its scheduler have said, of all its runs, task by task.

    Args:
        folder: Of the job, array or task.
        tasks: Indices of the tasks; empty: all.
    """
    found_lines = b"".join(map(scheduler_log, tasks_of(folder, tasks)))
    for path in () if tasks else folder.scheduler_logs:
        try:
            with open(open_regular(path, follows_links=True), "rb") as file:
                found_lines += file.read()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InfiniRunError(f"{path} cannot be read: {error.strerror}") from None
    return found_lines
