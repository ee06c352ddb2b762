"""The lines of a running launch, printed as they come, with the rank before each.

The lines of another user's launch cannot steer the terminal of whoever looks, and no log is read that this user could
not read.
"""

from __future__ import annotations

import os
import re

from infini_run.control.client import Conversation, dicts_in
from infini_run.control.line_frames import END, LINES, LOST, SHOWN, read_lines, read_loss
from infini_run.errors import InfiniRunError, LinkError, counted, printable
from infini_run.lean_os import encode_text
from infini_run.plan.labels import is_colored, label
from infini_run.report.hang_groups import ranks_text
from infini_run.system.file_tail import start_of_last
from infini_run.system.secure_files import open_of_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from infini_run.control.launches import FoundLaunch

_LONGEST = 1 << 18  # bytes of a line that is printed in one piece
_ERROR_MARK = b"err: "  # csrc/io/output_pump.c
_CLOCK_ERROR_S = 60.0  # of a file server
_LONGEST_LABEL = 300  # characters
_MOST_EARLIER = 64 << 20  # bytes of a log
_COLOR = re.compile(r"(\x1b\[[0-9;:]*m)")  # SGR of ECMA-48


def print_lines(launch: FoundLaunch, ranks: Sequence[int | str] | None, tail: int, environ: Mapping[str, str]) -> int:
    """Print the lines of a launch until it ends, and return the exit code: 1 if some at the end are missing.

    Args:
        launch: The launch.
        ranks: Its ranks. None: all.
        tail: How many earlier lines of each to print first.
        environ: The environment, for colors.

    Raises:
        UsageError, InfiniRunError: It cannot be followed.
    """
    chosen = None if ranks is None else list(ranks)
    begin_s = 0.0 if launch.facts is None else launch.facts.start_s
    printer = _Printer(launch.uid, colored=is_colored("auto", (1,), environ), begin_s=begin_s)
    with Conversation(launch, "follow", ranks=chosen, tail=tail) as conversation:
        answer = conversation.answer()
        printer.names = _names(answer)
        for note in _notes(answer, tail):
            printer.note(note)
        printer.note(f"following {launch.launch_id}; Ctrl-C ends this view, not the job")
        if tail:
            printer.print_earlier(dicts_in(answer.get("earlier")), tail)
        is_whole = _print_frames(conversation, printer, launch.launch_id)
    if not is_whole:
        printer.note(f"{launch.launch_id}: the last lines are lost: it was killed, or they were not read in time")
    return 0 if is_whole else 1


def _print_frames(conversation: Conversation, printer: _Printer, name: str) -> bool:
    """Print what comes. Return whether it is whole up to the end of the launch."""
    try:
        for kind, payload in conversation.frames(None, output_fd=1):
            if kind == LINES:
                printer.add(*read_lines(payload))
            elif kind == SHOWN:
                printer.show(payload)
            elif kind == LOST:
                printer.end_lines()
                lost = read_loss(payload)
                printer.note(f"dropped {counted(lost, 'line')} here, which this view did not read in time")
            elif kind == END:
                return True
    except LinkError:
        raise InfiniRunError(f"{name}: its answer is not what infini-run sends") from None
    finally:
        printer.end_lines()
    return False


def _notes(answer: Mapping[str, Any], tail: int) -> Iterator[str]:
    """What the launch cannot show."""
    unseen = answer.get("unseen")
    for stream, found in unseen.items() if type(unseen) is dict else ():
        ranks = [rank for rank in found if type(rank) is int] if type(found) is list else []
        if ranks:
            who = ranks_text(ranks)
            yield f"cannot show {printable(stream)} of {who}: it bypasses infini-run; start with --console=lines"
    if answer.get("is_hidden"):
        yield "cannot show output that the launch keeps from its own console"
    problems = answer.get("problems")
    for problem in problems if type(problems) is list else ():
        yield f"--tail: no earlier lines of {printable(str(problem))}"
    if tail and any("text" in each for each in dicts_in(answer.get("earlier"))):
        yield "--tail: without --log_dir, a launch keeps only the last 16 KiB of stderr"


def _names(answer: Mapping[str, Any]) -> dict[int, str]:
    """Return what people call the ranks of several programs, by the numbers that their lines have."""
    found, names = answer.get("names"), {}
    for each in found if type(found) is list else ():
        if type(each) is list and len(each) == 2 and type(each[0]) is int and type(each[1]) is str:
            names[each[0]] = printable(each[1])
    return names


class _Printer:
    """stdout, to which lines go whole.

    Args:
        uid: The user of the launch. What another user's sends is made harmless for a terminal.
        colored: Labels have colors.
        begin_s: When the launch began, since the epoch.
    """

    def __init__(self, uid: int, *, colored: bool, begin_s: float) -> None:
        self._uid = uid
        self._is_strange = uid != os.geteuid() and os.isatty(1)
        self._colored = colored
        self._begin_s = begin_s
        self.names: dict[int, str] = {}  # of ranks of programs
        self._labels: dict[int, tuple[bytes, bytes]] = {}
        self._rests: dict[tuple[int, int], bytes] = {}  # by rank and stream: a line without its end
        self._returned: set[tuple[int, int]] = set()  # where the last line ended in \r, and \n may be on its way

    def note(self, text: str) -> None:
        """Print a line of this command's own."""
        try:
            os.write(2, encode_text(f"infini-run: {text}\n"))
        except OSError:  # nobody reads notes; the lines continue
            return

    def show(self, text: bytes) -> None:
        """Print whole lines that have labels."""
        self.write(b"\n".join(map(harmless, text.split(b"\n"))) if self._is_strange else text)

    def write(self, text: bytes) -> None:
        """Print these bytes. Raises InfiniRunError, and BrokenPipeError: the reader has gone."""
        try:
            while text:
                text = text[os.write(1, text) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InfiniRunError(f"the answer cannot be written: {error.strerror}") from None

    def add(self, rank: int, stream: int, text: bytes) -> None:
        """Print what a rank wrote, up to the last end of a line."""
        if (rank, stream) in self._returned and text:
            self._returned.discard((rank, stream))
            text = text.removeprefix(b"\n")
        text = self._rests.pop((rank, stream), b"") + text
        size = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not size and len(text) >= _LONGEST:
            size = len(text)
        if size < len(text):
            self._rests[rank, stream] = text[size:]
        elif text.endswith(b"\r"):
            self._returned.add((rank, stream))
        self._print(rank, stream, text[:size])

    def end_lines(self) -> None:
        """Print lines without an end: nothing more of them comes."""
        for (rank, stream), text in sorted(self._rests.items()):
            self._print(rank, stream, text)
        self._rests.clear()
        self._returned.clear()

    def _print(self, rank: int, stream: int, text: bytes) -> None:
        if rank not in self._labels:
            self._label(rank, self.names.get(rank, f"rank {rank}"))
        first = self._labels[rank][stream]
        lines = text.splitlines()
        if self._is_strange:
            lines = [harmless(line) for line in lines]
        self.write(b"".join(first + line + b"\n" for line in lines))

    def _label(self, rank: int, text: str) -> None:
        (out, _), (err, _) = label(printable(text[:_LONGEST_LABEL]), colored=self._colored)
        self._labels[rank] = out, err

    # ---- from before

    def print_earlier(self, found: Sequence[Mapping[str, Any]], count: int) -> None:
        """Print the last lines of logs, or last words."""
        for each in found:
            rank, stream, path, end = (each.get(name) for name in ("rank", "stream", "path", "end"))
            if type(rank) is not int or stream not in (0, 1):
                continue
            if type(each.get("label")) is str:  # of another node, whose later lines have it, too
                self._label(rank, each["label"])
            if type(each.get("text")) is str:
                self._print_last(rank, stream, each["text"].encode(), count, has_both=False)
            elif type(path) is str and type(end) is int and end > 0:
                self._print_last(
                    rank, stream, self._read(path, end, count), count, has_both=bool(each.get("has_both"))
                )

    def _read(self, path: str, end: int, count: int) -> bytes:
        try:
            with open(open_of_user(path, self._uid), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_size < end or status.st_mtime < self._begin_s - _CLOCK_ERROR_S:
                    self.note(f"--tail: {printable(path)} is the log of an older launch here")
                    return b""
                start = max(start_of_last(file, count, end), end - _MOST_EARLIER)
                file.seek(start)
                return file.read(end - start)
        except OSError as error:
            self.note(f"--tail: cannot read {printable(path)}: {error.strerror}")
            return b""

    def _print_last(self, rank: int, stream: int, text: bytes, count: int, *, has_both: bool) -> None:
        for line in text.splitlines(keepends=True)[-count:]:
            is_error = has_both and line.startswith(_ERROR_MARK)
            self._print(rank, 1 if is_error else stream, line[len(_ERROR_MARK) :] if is_error else line)


def harmless(line: bytes) -> bytes:
    """Return a line that cannot steer a terminal: it keeps tabs, carriage returns, and colors, which end with it."""
    parts = _COLOR.split(line.decode("utf-8", "surrogateescape"))
    parts[::2] = ["".join(c if c in "\t\r" else printable(c) for c in part) for part in parts[::2]]
    return "".join([*parts, "\x1b[m" if parts[1:] else ""]).encode("utf-8", "surrogateescape")
