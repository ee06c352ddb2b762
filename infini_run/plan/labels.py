"""The labels of lines on the console: what they say, and their color."""

from __future__ import annotations

import infini_run.lean_os as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STREAMS = ("", " err")  # what a label says of stdout, and of stderr
_COLORS = ("\033[36m", "\033[33m")  # cyan, and yellow: what goes to stderr is seldom an error
_PLAIN = "\033[0m"


def is_colored(color: str, console: Sequence[int], environ: Mapping[str, str]) -> bool:
    """Return whether labels have a color.

    Args:
        color: The value of --color.
        console: The descriptors of stdout and stderr.
        environ: The environment of the launcher (https://no-color.org).
    """
    if color != "auto":
        return color == "always"
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return all(os.isatty(fd) for fd in console)


def label(name: str, *, colored: bool) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Return for each stream what stands before a line, and before a further piece of an overlong one."""

    def of(k: int) -> tuple[bytes, bytes]:
        first, more = (_painted(f"[{name}{STREAMS[k]}{rest}]", k, colored=colored) for rest in ("", " +"))
        return first, more

    return of(0), of(1)


def fold_label(*, colored: bool) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Return for each stream what stands before, and after, the numbers of ranks that wrote the same line."""

    def of(k: int) -> tuple[bytes, bytes]:
        before, _, after = _painted(f"[ranks \0{STREAMS[k]}]", k, colored=colored).partition(b"\0")
        return before, after

    return of(0), of(1)


def _painted(text: str, k: int, *, colored: bool) -> bytes:
    """k: the stream whose color it has."""
    return os.fsencode(f"{_COLORS[k]}{text}{_PLAIN} " if colored else f"{text} ")
