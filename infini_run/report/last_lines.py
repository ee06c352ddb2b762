"""Which of a program's last lines say what happened, where a stack comes after its message. Pure.

A program may print its stack behind the message: c10 and glibc in C++, Node, Java, Go, Rust, Julia, faulthandler and
the sanitizers do; Python does not. A shape that is not known here costs nothing: then the last lines are shown.
Patterns match from the start of a line and have no nested repetition: a rank chooses what they are applied to.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LABEL = r"(?:\[rank\d+\]: ?)?[\s|]*"  # torch's excepthook; the bars of an exception group
# Who prints it; how a message begins; how a line begins that is only a part of a stack.
_TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "Python, Java, Node",
        (r"(?:[A-Za-z_][\w.$]*)?(?:Error|Exception|Interrupt)(?: \[\w+\])?(?::|$)", r"Exception in thread "),
        (),
    ),
    (
        "faulthandler",
        (r"Fatal Python error:",),
        (r"(?:Current thread|Thread) 0x[0-9a-f]+.*:$", r"Extension modules: ", r"<no Python frame>"),
    ),
    ("C++", (r"what\(\):", r"terminate called", r"libc\+\+abi: "), ()),
    (
        "glog, absl",
        (r"F\d{4} \d.*\] ",),  # F: fatal
        (r"\*\*\* Check failure stack trace", r"@ (?:0x[0-9a-f]+ |\S+ +\S+:\d+$)"),
    ),
    (
        "c10",
        (r".*Watchdog caught collective operation timeout",),
        (r"frame #\d+:", r"Exception raised from .*\(most recent call first\):$"),
    ),
    (
        "glibc",
        (
            r"\S+: .*Assertion .*failed",
            r"\*\*\* .*detected \*\*\*:",
            r"(?:free|malloc|realloc|munmap_chunk)\(\): ",
            r"double free or corruption",
            r"corrupted (?:size|double-linked)",
            r"\S+: (?:error while loading shared libraries|symbol lookup error):",
        ),
        (r"\S+\(\S*\+0x[0-9a-f]+\) ?\[0x[0-9a-f]+\]",),  # backtrace_symbols(3)
    ),
    (
        "Go",
        (r"panic:", r"fatal error:", r"SIG(?:SEGV|BUS|ILL|FPE|ABRT|QUIT): "),
        (
            r"goroutine \d+ .*\[.*\]:$",
            r"exit status \d+$",
            r"(?:r[a-z0-9]+|[cfg]s) +0x[0-9a-f]+$",  # registers
            r"PC=0x",
            r"created by \S+(?: in goroutine \d+)?$",
        ),
    ),
    (
        "Rust",
        (
            r"thread '.*' (?:\(\d+\) )?(?:panicked at|has overflowed)",
            r"fatal runtime error:",
            r"memory allocation of \d",
        ),
        (
            r"\d+: +(?:0x[0-9a-f]+ - )?(?:<unknown>|\S*(?:::|_start|rust_\w)|<.*>::|(?:main|clone)$)",
            r"stack backtrace:$",
            r"note: (?:run with|[Ss]ome details are omitted).*BACKTRACE",
        ),
    ),
    ("Java", (r"Caused by:",), (r"at .*(?::\d+|Native Method|Unknown Source)\)$", r"\.\.\. \d+ more")),
    (
        "Node",
        (r"Uncaught ", r"FATAL ERROR:"),
        (
            r"at .*(?:<anonymous>|native(?: code)?)\)$",
            r"at (?:async )?\S*[/.\]]\S*:\d+(?:\) \{)?$",
            r"at async ",
            r"at .*:\d+\) \{$",  # the error's own fields follow
            r"\.\.\. \d+ lines matching",
            r"\d+: 0x[0-9a-f]+ ",
            r"-----+ Native stack trace|<--- |\[\d+:0x[0-9a-f]+\]",  # of V8
        ),
    ),
    ("Julia", (r"ERROR: ",), (r"Stacktrace:$", r"\[\d+\] (?:\S+\(.*\)$|top-level scope)")),
    ("a sanitizer, gdb", (r"==\d+== ?ERROR:",), (r"#\d+ +0x[0-9a-f]+",)),
    (
        "Open MPI",
        (),
        (
            r"(?:\[[^\[\]]+:\d+\] )?\[ ?\d+\] .*\[0x[0-9a-f]+\]",
            r"(?:\[[^\[\]]+:\d+\] )?\*\*\* (?:End of error message|Process received signal)",
        ),
    ),
)
# What may come beside a message: one only where there is no other.
_BESIDE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("NCCL", (r".*\bNCCL (?:WARN|error|failure)", r".*\bnccl[A-Z]\w*Error\b")),
    (
        "CUDA",
        (r".*\bCUDA (?:driver |runtime )?(?:error|failure)", r".*\bcuda(?:Error[A-Z]|\w*Failure\b)", r"GPUassert:"),
    ),
)


def _pattern(rows: Iterable[tuple[str, ...]]) -> re.Pattern[str]:
    return re.compile(_LABEL + "(?:" + "|".join(each for row in rows for each in row) + ")")


_MESSAGE = _pattern(message for _, message, _ in _TABLE)
_STACK = _pattern(stack for _, _, stack in _TABLE)
_MESSAGE_BESIDE = _pattern(message for _, message in _BESIDE)
_GO_PLACE = re.compile(r"\s*\S+\.go:\d+(?: \+0x[0-9a-f]+)?$")  # below each function's line
_FAULT_FRAME = re.compile(r'\s*File ".*", line \d+ in ')  # faulthandler's, innermost first; a traceback has a comma
_FRAME = re.compile(_LABEL + r'File ".*", line \d+(?:, in |$)')
_INDENTED = re.compile(r"(?:\[rank\d+\]: ?)?(?:\s+\| )?\s+\S")
_CHAIN = "During handling of the above exception, another exception occurred:"
_TRACE = "Traceback (most recent call last):"
_RECORDER = "elastic/multiprocessing/errors/error_handler.py"  # of torch, which writes the error file
_IGNORED = "Exception ignored "  # at the end of an interpreter, and in __del__: it ends nothing
_MOST = 1000  # characters of a line that are looked at
_FRAMES = 2  # of faulthandler's, that are shown


def choose_lines(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the lines that say what happened, in their order.

    All of them, if they fit. Else the last ones that are not only a stack, and among them the message: it may come
    long before the end.

    Args:
        lines: The last lines of a program, none of them empty.
        most: How many are wanted.
    """
    if len(lines) <= most:
        return tuple(lines)
    if most <= 0:
        return ()
    lines = _without_recorder(lines)
    text = _without_stack(lines)
    if not text:
        return tuple(lines[-most:])
    message = _last_message(text)
    chosen = text[-most:]
    if message and message[0] not in chosen:
        message = [*_place(text, message[0], most), *message]
        chosen = [*message, *chosen[len(message) :]][:most]
    return tuple(lines[at] for at, _ in chosen)


def choose_line(lines: Sequence[str]) -> str:
    """Return the one line that says what happened: the last, or the message that a stack comes after; "" if none.

    Args:
        lines: The last lines of a program, none of them empty.
    """
    if not lines:
        return ""
    lines = _without_recorder(lines)
    text = _without_stack(lines)
    message = _last_message(text)
    stacks = {*range(len(lines))}.difference(at for at, _ in text)
    if message and any(at > message[0][0] for at in stacks):
        return " ".join(line.strip() for _, line in message)
    return text[-1][1] if text else lines[-1]


def _without_recorder(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines without exceptions of torch's `record`, which could not write the error file. The rank's own
    comes first.

    Closing the file of a full disk raises once more, and that exception has no traceback.
    """
    end = len(lines)
    for at in [at for at, line in enumerate(lines) if _CHAIN in line][::-1]:
        block = lines[at:end]
        if not any(_RECORDER in line for line in block) and (
            end == len(lines) or any(_TRACE in line for line in block)
        ):
            break
        end = at
    return lines[:end]


def _without_stack(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Return the lines that are more than a stack, with their indices. Two frames of a faulthandler's stack stay."""
    found: list[tuple[int, str]] = []
    frames = 0
    for index, line in enumerate(lines):
        if _FAULT_FRAME.match(line, 0, _MOST):
            frames += 1
            if frames > _FRAMES:
                continue
        elif _STACK.match(line[:_MOST]):
            frames = 0
            continue
        elif _GO_PLACE.match(line[:_MOST]):
            if found and found[-1][0] == index - 1:
                found.pop()
            continue
        found.append((index, line))
    return found


def _last_message(text: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the last line that is a message, and the next one if the message announces it (Rust's place ends with a
    colon).

    What Python ignores at its end is no message, and what NCCL and CUDA print beside others only where there is none.
    """
    ignored = _ignored(text)
    for pattern in (_MESSAGE, _MESSAGE_BESIDE):
        for at in range(len(text) - 1, -1, -1):
            line = text[at][1][:_MOST]
            is_message = pattern.match(line) or (pattern is _MESSAGE and _ends_traceback(text, at))
            if is_message and at not in ignored:
                return list(text[at : at + 1 + text[at][1].endswith(":")])
    return []


def _ends_traceback(text: Sequence[tuple[int, str]], at: int) -> bool:
    """Return whether the line comes after the frames of a traceback: an exception may have any name."""
    if at == 0 or _INDENTED.match(text[at][1], 0, _MOST):
        return False
    frame = at - 1  # a frame has its line of source, and perhaps a mark below it
    while frame >= max(0, at - 3) and not _FRAME.match(text[frame][1], 0, _MOST):
        if not _INDENTED.match(text[frame][1], 0, _MOST):
            return False
        frame -= 1
    return frame >= max(0, at - 3) and not _FAULT_FRAME.match(text[frame][1], 0, _MOST)


def _ignored(text: Sequence[tuple[int, str]]) -> set[int]:
    """Return the lines about exceptions that Python ignored, each with its traceback."""
    found: set[int] = set()
    for start, (_, line) in enumerate(text):
        if line.startswith(_IGNORED):
            end = start + 1
            if end < len(text) and text[end][1].startswith(_TRACE):
                end += 1
            while end < len(text) and _INDENTED.match(text[end][1], 0, _MOST):
                end += 1
            found.update(range(start, end + 1))
    return found


def _place(text: Sequence[tuple[int, str]], message: tuple[int, str], most: int) -> list[tuple[int, str]]:
    """Return where the program raised it: the lines of the last frame before a message, as many as there is room
    for."""
    end = text.index(message)
    for start in range(end - 1, max(-1, end - 4), -1):
        if _FRAME.match(text[start][1], 0, _MOST):
            return list(text[start:end][: max(0, most - 2)])
        if not _INDENTED.match(text[start][1], 0, _MOST):
            break
    return []
