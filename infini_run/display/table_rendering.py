"""The table of --live: the facts of each rank in, lines for a terminal of this size out. Pure; rich draws it.

More ranks than lines: those that failed come first, then those that hang, those that are slow, and the busiest; one
line counts the rest.
"""

from __future__ import annotations

import io

from infini_run.errors import printable
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

FAILED, HUNG, SLOW, LIVE, OVER = range(5)  # kinds of rows, in the order of what to see first
_STYLES = {FAILED: "bold red", HUNG: "bold yellow", SLOW: "yellow", LIVE: "green", OVER: "dim"}
_FOOTED = 4  # lines for ranks, below which a footer goes
_HOST = 16  # columns of a host's name, at most
_PROGRESS = 20  # columns of a rank's progress, at most
_LINE = 16  # columns below which a last line says nothing
_IDLE, _STEP = 0.02, 0.25  # of a CPU: below, a rank does nothing; ranks within a step do not change places


@record
class Row:
    """One rank in the table. None: not known.

    Attributes:
        state: One or two words.
        kind: FAILED, HUNG, SLOW, LIVE, or OVER, which decides the order and the color.
        since_s: When the state began, for the order of those that failed or hang.
        host: Empty if there is one node.
        progress: Its highest PROGRESS=.
        rate: By how much that rises in a second.
        program, program_rank: As in Exit.
    """

    rank: int
    state: str
    kind: int
    pid: int | None = None
    up_s: float | None = None
    since_s: float = 0.0
    cpu: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    gpu: float | None = None
    host: str = ""
    progress: int | None = None
    rate: float | None = None
    program: str = ""
    program_rank: int = 0


def select_rows(rows: Sequence[Row], room: int) -> tuple[list[Row], list[Row]]:
    """Return the visible rows, and the others.

    Args:
        rows: All rows.
        room: The most visible rows. If all fit, they are in the order of ranks; else by urgency.
    """
    if len(rows) <= room:
        return sorted(rows, key=lambda row: row.rank), []
    ordered = sorted(rows, key=_urgency)
    return ordered[:room], ordered[room:]


def _urgency(row: Row) -> tuple[int, float, int]:
    if row.kind == LIVE:
        cpu = row.cpu or 0.0
        return LIVE, 0.0 if cpu < _IDLE else -1.0 - cpu // _STEP, row.rank
    if row.kind == OVER:
        return OVER, 0.0, row.rank
    return row.kind, row.since_s, row.rank


def count_text(rows: Iterable[Row]) -> str:
    """Return how many ranks are in which state, such as `6 running, 1 exit code 3, 1 done`; the most urgent state
    comes first."""
    counts: dict[tuple[int, str], int] = {}
    for row in rows:
        word = "failed" if row.kind == FAILED else row.state
        counts[row.kind, word] = counts.get((row.kind, word), 0) + 1
    return ", ".join(f"{count} {word}" for (_, word), count in sorted(counts.items()))


def up_text(seconds: float | None) -> str:
    """Return a duration in seconds as `0:07`, `12:34`, `1:02:03` or `3d04h`. None: empty."""
    if seconds is None:
        return ""
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def size_text(size: int | None) -> str:
    """Return a size in bytes as `940K` or `1.2G`. None: empty."""
    if size is None:
        return ""
    value = size / 1024
    for unit in "KMGT":
        if value < 999.5 or unit == "T":
            break
        value /= 1024
    return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"


def share_text(share: float | None) -> str:
    """Return a share of 1 in percent, such as `97%`. None: empty."""
    return "" if share is None else f"{share * 100:.0f}%"


def progress_text(progress: int | None, rate: float | None) -> str:
    """Return a PROGRESS= and its rate, such as `1200 4.1/s`. None: empty, or without the rate."""
    if progress is None:
        return ""
    if rate is None:
        return str(progress)
    return f"{progress} {rate:.0f}/s" if rate >= 99.5 else f"{progress} {rate:.2g}/s"


class TableRenderer:
    """Makes frames of the table.

    Args:
        environ: The environment, whose TERM, COLORTERM, and NO_COLOR say which colors the terminal has.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)

    def frame(
        self,
        rows: Sequence[Row],
        title: str,
        size: tuple[int, int],
        last_line: Callable[[int], str],
        footer: str = "",
    ) -> list[str]:
        """Return the lines of one frame, with colors.

        Args:
            rows: The rows of all ranks.
            title: The start of the first line.
            size: Columns and lines of the terminal; the frame has no more.
            last_line: Returns a rank's last line; called only for visible ranks.
            footer: The last line, if the ranks leave room for it. Empty: none.
        """
        columns, lines = size
        if columns < 1 or lines < 1:
            return []
        room = lines - 2
        if footer and room > _FOOTED:
            room -= 1
        else:
            footer = ""
        if len(rows) > room:
            room -= 1
        shown, others = select_rows(rows, room) if room > 0 else ([], [])
        parts: list[Any] = [self._text(f"{title}: {count_text(rows)}", "bold")]
        if shown:
            parts.append(_grid(shown, columns, last_line))
        if others:
            parts.append(self._text(f"... and {len(others)} more: {count_text(others)}", "dim"))
        if footer:
            parts.append(self._text(footer, "dim"))
        return self._render(parts, columns)

    def _text(self, text: str, style: str) -> Any:
        from rich.text import Text

        return Text(text, style=style)

    def _render(self, parts: list[Any], columns: int) -> list[str]:
        from rich.console import Console

        console = Console(
            file=io.StringIO(), force_terminal=True, width=columns, _environ=self._environ, legacy_windows=False
        )
        with console.capture() as capture:
            for part in parts:
                console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
        return [line.rstrip() for line in capture.get().splitlines()]


def plain(text: bytes) -> str:
    """Return bytes that a rank wrote as one line that cannot steer a terminal.

    This drops colors, and escapes unprintable bytes. Of several lines the last one that is not blank counts.

    Args:
        text: Any bytes.
    """
    from rich.text import Text

    lines = [line for line in text.decode("utf-8", "replace").replace("\r", "\n").split("\n") if line.strip()]
    return printable(Text.from_ansi(lines[-1].expandtabs(4)).plain) if lines else ""


def is_of_interrupt(line: str) -> bool:
    """Return whether a line is the first or the last of what Python prints when Ctrl-C ends it. The rank may precede
    it, as torch prints tracebacks."""
    if line.startswith("[rank"):
        line = line.partition("]: ")[2]
    return line.startswith(("KeyboardInterrupt", "Traceback (most recent call last)"))


_COLUMNS: tuple[tuple[str, int, int, Callable[[Row], str]], ...] = (  # title, width, how soon it goes, what it shows
    ("PROGRAM", _HOST, 0, lambda row: row.program),
    ("RANK", 5, 0, lambda row: str(row.program_rank if row.program else row.rank)),
    ("HOST", _HOST, 1, lambda row: row.host),
    ("STATE", 11, 0, lambda row: row.state),
    ("PID", 7, 3, lambda row: "" if row.pid is None else str(row.pid)),
    ("UP", 8, 4, lambda row: up_text(row.up_s)),
    ("CPU", 6, 1, lambda row: share_text(row.cpu)),
    ("PROGRESS", _PROGRESS, 1, lambda row: progress_text(row.progress, row.rate)),
    ("MEM", 5, 2, lambda row: size_text(row.memory)),
    ("GPUMEM", 6, 2, lambda row: size_text(row.gpu_memory)),
    ("GPU", 4, 1, lambda row: share_text(row.gpu)),
)


def _grid(rows: Sequence[Row], columns: int, last_line: Callable[[int], str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    has_gpu = any(row.gpu_memory is not None or row.gpu is not None for row in rows)
    fitted = {
        "PROGRAM": max(len(printable(row.program)) for row in rows),
        "HOST": max(len(printable(row.host)) for row in rows),
        "PROGRESS": max(len(progress_text(row.progress, row.rate)) for row in rows),
    }
    wanted = [
        (title, min(width, max(len(title), fitted[title])) if title in fitted else width, goes, show)
        for title, width, goes, show in _COLUMNS
        if (has_gpu or not title.startswith("GPU")) and fitted.get(title, 1)
    ]
    while sum(width + 1 for _, width, _, _ in wanted) + _LINE > columns and max(column[2] for column in wanted):
        wanted.remove(max(wanted, key=lambda column: column[2]))
    rest = columns - sum(width + 1 for _, width, _, _ in wanted)
    grid = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", width=columns, collapse_padding=True
    )
    for title, width, _, _ in wanted:
        left = title in ("STATE", "HOST", "PROGRAM")
        grid.add_column(title, width=width, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    if rest >= _LINE // 2:
        grid.add_column("LAST LINE", width=rest, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = [
            Text(printable(show(row)), style=_STYLES[row.kind] if title == "STATE" else "")
            for title, _, _, show in wanted
        ]
        if rest >= _LINE // 2:
            cells.append(Text(last_line(row.rank)))
        grid.add_row(*cells)
    return grid
