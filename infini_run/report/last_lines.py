"""Which of a program's last lines say what happened, where a stack comes after its message. Pure.

A program may print its stack behind the message: c10 and glibc in C++, Node, Java, Go, Rust, Julia, faulthandler and
the sanitizers do; Python does not. A shape that is not known here costs nothing: then the last lines are shown.
Patterns match from the start of a line and have no nested repetition: a rank chooses what they are applied to.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_LABEL = r"(?:\[rank\d+\]: ?)?[\s|]*"  # torch's excepthook; the bars of an exception group
_STACK = re.compile(
    _LABEL
    + r"""(?:
    frame\ \#\d+:                                   # c10::Error
    |\#\d+\ +0x[0-9a-f]+                            # sanitizers, gdb
    |at\ .*(?::\d+|<anonymous>|native(?:\ code)?|Native\ Method|Unknown\ Source)\)$   # Node, Java
    |at\ (?:async\ )?\S*[/.]\S*:\d+$|at\ async\ |\.\.\.\ \d+\ (?:more|lines\ matching)   # Node, Java, Rust's places
    |\d+:\ +(?:0x[0-9a-f]+\ -\ )?(?:<unknown>|\S*(?:::|_start|rust_\w)|<.*>::|(?:main|clone)$)   # Rust
    |stack\ backtrace:$|Stacktrace:$|\*\*\*\ Check\ failure\ stack\ trace|\*\*\*\ End\ of\ error\ message
    |note:\ (?:run\ with|[Ss]ome\ details\ are\ omitted).*BACKTRACE
    |goroutine\ \d+\ .*\[.*\]:$|exit\ status\ \d+$  # Go
    |\[\d+\]\ (?:\S+\(.*\)$|top-level\ scope)|@\ (?:0x[0-9a-f]+\ |\S+\ +\S+:\d+$)   # Julia; glog, absl
    |(?:\[[^\[\]]+:\d+\]\ )?\[\ ?\d+\]\ .*\[0x[0-9a-f]+\]   # Open MPI
    |\S+\(\S*\+0x[0-9a-f]+\)\ ?\[0x[0-9a-f]+\]      # backtrace_symbols(3)
    |(?:Current\ thread|Thread)\ 0x[0-9a-f]+.*:$|Extension\ modules:\ |<no\ Python\ frame>   # faulthandler
    |Exception\ raised\ from\ .*\(most\ recent\ call\ first\):$   # c10::Error
    )""",
    re.VERBOSE,
)
_GO_PLACE = re.compile(r"\s*\S+\.go:\d+(?: \+0x[0-9a-f]+)?$")  # below each function's line
_FAULT_FRAME = re.compile(r'\s*File ".*", line \d+ in ')  # faulthandler's, innermost first; a traceback has a comma
_MESSAGE = re.compile(
    _LABEL
    + r"""(?:
    what\(\):|panic:|fatal\ error:|Fatal\ Python\ error:|ERROR:\ |terminate\ called
    |thread\ '.*'\ (?:\(\d+\)\ )?panicked\ at
    |Uncaught\ |Exception\ in\ thread\ |Caused\ by:
    |(?:[A-Za-z_][\w.$]*)?(?:Error|Exception|Interrupt)(?:\ \[\w+\])?(?::|$)
    |==\d+==\ ?ERROR:
    |\S+:\ .*Assertion\ .*failed
    |.*Watchdog\ caught\ collective\ operation\ timeout
    )""",
    re.VERBOSE,
)
_CHAIN = "During handling of the above exception, another exception occurred:"
_TRACE = "Traceback (most recent call last):"
_RECORDER = "elastic/multiprocessing/errors/error_handler.py"  # of torch, which writes the error file
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
    """Without the exceptions of torch's `record`, which could not write the error file: the rank's own comes first.

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
    """The lines that are not only a stack, with their indices; of faulthandler's the first two frames are left."""
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
    """The last line that is a message, and the next one if it is announced (Rust's place ends with a colon)."""
    for at in range(len(text) - 1, -1, -1):
        if _MESSAGE.match(text[at][1], 0, _MOST):
            return list(text[at : at + 1 + text[at][1].endswith(":")])
    return []
