"""--plot: the timeline of the ranks as a picture, drawn by matplotlib without a display.

One collection of polygons for each kind of end, whatever the number of ranks: a thousand take as long as ten.
"""

from __future__ import annotations

import io
import os
import warnings

from infini_run.display.timeline import read_timeline
from infini_run.errors import UsageError, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.display.timeline import Bar, Timeline

_EXTRA = "--plot: needs matplotlib; run pip install 'infini-run[plot]'"
_BAND = "#e4e7eb"
COLOURS = {"done": "#2a9d5c", "failed": "#d62828", "stopped": "#9aa0a6", "unknown": "#4a7fb5"}
_WORDS = {"done": "done", "failed": "failed", "stopped": "stopped by infini-run", "unknown": "end unknown"}
_NAMED = 40  # ranks up to which each has its tick
_LABELS = 12  # failures that are described in words, where there is room; all are marked
_APART = 0.08  # of the picture's width, between the names of two attempts
_LOW, _HIGH, _EACH, _LINE = 2.4, 12.0, 0.24, 0.17  # inches: of a picture, per rank, per line below it
_DPI = 120


def plot(target: str, sources: Sequence[str]) -> None:
    """Draw timelines into a file, whole or not at all.

    Args:
        target: The file. Its ending says the format, such as `.png` or `.svg`.
        sources: Reports or directories of logs, as for `read_timeline`.

    Raises:
        UsageError: A source is unreadable, the target is not writable, or matplotlib is missing.
    """
    timeline = read_timeline(sources)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError(_EXTRA) from None
    figure = draw(timeline)
    canvas, form = FigureCanvasAgg(figure), os.path.splitext(target)[1][1:].lower()
    known = canvas.get_supported_filetypes()
    if form not in known:
        raise UsageError(f"--plot={printable(target)}: expected a name that ends in .{', .'.join(sorted(known))}")
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that no font has: they are drawn as boxes
        canvas.print_figure(picture, format=form, dpi=_DPI)
    _write(target, picture.getvalue())


def _write(target: str, data: bytes) -> None:
    from infini_run.system.secure_files import write_atomic

    if os.path.exists(target) and not os.path.isfile(target):
        raise UsageError(f"--plot={printable(target)} is not a regular file")
    try:
        write_atomic(target, data)
    except OSError as error:
        raise UsageError(f"--plot={printable(target)} cannot be written: {error.strerror}") from None


def draw(timeline: Timeline) -> Any:
    """Return a matplotlib figure: a bar per rank, time from the first start to the right, a cross at each failure.

    Earlier attempts are bands behind the bars, since a report has only their first failure. The text below the
    picture has that failure: beside its bar is that of the next attempt.
    """
    from matplotlib.figure import Figure

    bars = timeline.bars
    origin_s = min(bar.start_s for bar in bars)
    ranks = sorted({bar.rank for bar in bars})
    rows = {rank: row for row, rank in enumerate(ranks)}
    restarts = [bar for bar in bars if bar.end_s <= _last_start(timeline) and bar.is_first][:_LABELS]
    height = max(_LOW, 1.5 + _EACH * len(ranks)) + _LINE * len(restarts)
    figure = Figure(figsize=(10, min(_HIGH, height)), layout="constrained")
    axes = figure.add_subplot()
    span_s = max(bar.end_s for bar in bars) - origin_s or 1.0
    _draw_attempts(axes, timeline.attempts, origin_s, span_s)
    for kind, colour in COLOURS.items():
        _draw_kind(axes, [bar for bar in bars if bar.kind == kind], kind, colour, rows, origin_s)
    _draw_ready(axes, bars, rows, origin_s)
    _draw_failures(axes, bars, rows, origin_s, [id(bar) for bar in restarts])
    axes.set_title(_plain(timeline.title), loc="left", fontsize=10, pad=16 if timeline.attempts else None)
    lines = [_restart_line(bar, timeline) for bar in sorted(restarts, key=lambda bar: bar.start_s)]
    axes.set_xlabel(_plain("\n".join(["seconds since the first start", *lines])))
    axes.set_xlim(-0.01 * span_s, span_s * 1.04)
    names = {bar.rank: bar.name for bar in bars if bar.name}
    _name_ranks(axes, [names.get(rank, f"rank {rank}") for rank in ranks])
    figure.legend(loc="outside lower right", ncols=6, fontsize=8, frameon=False)
    return figure


def _draw_kind(axes: Any, bars: list[Bar], kind: str, colour: str, rows: dict[int, int], origin_s: float) -> None:
    from matplotlib.collections import PolyCollection

    if not bars:
        return
    half = 0.4 if len(rows) <= _NAMED else 0.5  # of many ranks, no gap between them
    boxes = [_box(bar, rows[bar.rank], origin_s, half) for bar in bars]
    label = f"{len(bars)} {_WORDS[kind]}"
    axes.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors="none", label=label, gid=kind))


def _box(bar: Bar, row: int, origin_s: float, half: float) -> list[tuple[float, float]]:
    left, right = bar.start_s - origin_s, bar.end_s - origin_s
    return [(left, row - half), (right, row - half), (right, row + half), (left, row + half)]


def _draw_ready(axes: Any, bars: Sequence[Bar], rows: dict[int, int], origin_s: float) -> None:
    ready = [(bar.ready_s - origin_s, rows[bar.rank]) for bar in bars if bar.ready_s is not None]
    if ready:
        times, at = zip(*ready, strict=True)
        axes.plot(times, at, "|", color="black", markersize=8, label=f"{len(ready)} ready", gid="ready")


def _draw_attempts(axes: Any, attempts: Sequence[tuple[float, float]], origin_s: float, span_s: float) -> None:
    named_s = -span_s
    for number, (start_s, end_s) in enumerate(attempts, start=1):
        left = start_s - origin_s
        if number < len(attempts):
            label = "earlier attempt, of which only the first failure may be known" if number == 1 else None
            axes.axvspan(left, end_s - origin_s, color=_BAND, lw=0, zorder=0, label=label, gid=f"attempt {number}")
        if 0 <= left <= span_s and left - named_s >= _APART * span_s:
            named_s = left
            axes.annotate(f"attempt {number}", (left, 1), xytext=(0, 3), xycoords=("data", "axes fraction"),
                          textcoords="offset points", fontsize=8, gid="attempt")  # fmt: skip


def _draw_failures(
    axes: Any, bars: Sequence[Bar], rows: dict[int, int], origin_s: float, described_below: Sequence[int]
) -> None:
    failed = sorted((bar for bar in bars if bar.kind == "failed"), key=lambda bar: (not bar.is_first, bar.end_s))
    if not failed:
        return
    times = [bar.end_s - origin_s for bar in failed]
    at = [rows[bar.rank] for bar in failed]
    axes.plot(
        times, at, "X", color=COLOURS["failed"], markeredgecolor="black", markersize=9, gid="failures", zorder=4
    )
    far = max(bar.end_s for bar in bars) - origin_s
    described: list[int] = []
    apart = len(rows) * _EACH / _HIGH  # rows that words are high
    for bar, time_s, row in zip(failed, times, at, strict=True):
        is_close = any(abs(row - other) < apart for other in described)
        if id(bar) in described_below or is_close or len(described) == _LABELS:
            continue
        described.append(row)
        is_late = time_s > far / 2  # the words go where there is room
        axes.annotate(
            _plain(_describe(bar)), (time_s, row), xytext=(-10 if is_late else 10, 0), textcoords="offset points",
            ha="right" if is_late else "left", va="center", fontsize=8, zorder=5,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )  # fmt: skip


def _describe(bar: Bar) -> str:
    return f"{bar.name or f'rank {bar.rank}'}{', first' if bar.is_first else ''}: {bar.end}"


def _restart_line(bar: Bar, timeline: Timeline) -> str:
    """Return what ended an earlier attempt."""
    number = sum(start_s <= bar.start_s for start_s, _ in timeline.attempts)
    return (
        f"attempt {number} failed after {bar.end_s - bar.start_s:.1f} s: {bar.name or f'rank {bar.rank}'}: {bar.end}"
    )


def _plain(text: str) -> str:
    """Return text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


def _last_start(timeline: Timeline) -> float:
    """Return when the last attempt of several started; before any time if there was one."""
    return timeline.attempts[-1][0] if timeline.attempts else float("-inf")


def _name_ranks(axes: Any, names: list[str]) -> None:
    """Rank 0 at the top."""
    step = max(1, -(-len(names) // _NAMED))
    ticks = range(0, len(names), step)
    axes.set_yticks(list(ticks), [_plain(names[row]) for row in ticks], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
