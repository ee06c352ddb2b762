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
COLOURS = {"done": "#2a9d5c", "failed": "#d62828", "stopped": "#9aa0a6", "unknown": "#4a7fb5"}
_WORDS = {"done": "done", "failed": "failed", "stopped": "stopped by us", "unknown": "end not known"}
_NAMED = 40  # ranks up to which each has its tick
_LABELS = 12  # failures that are described in words, where there is room; all are marked
_LOW, _HIGH, _EACH = 2.4, 12.0, 0.24  # inches: of a picture, for each rank
_DPI = 120


def plot(target: str, sources: Sequence[str]) -> None:
    """Draw timelines into a file, whole or not at all.

    Args:
        target: The file. Its ending says the format, such as `.png` or `.svg`.
        sources: Reports or directories of logs, as for `read_timeline`.

    Raises:
        UsageError: A source cannot be read, the target cannot be written, or matplotlib is missing.
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
    """Return a matplotlib figure: a bar for each rank, time from the first start to the right, a cross at each
    failure.

    Args:
        timeline: What is drawn.
    """
    from matplotlib.figure import Figure

    bars = timeline.bars
    origin_s = min(bar.start_s for bar in bars)
    ranks = sorted({bar.rank for bar in bars})
    rows = {rank: row for row, rank in enumerate(ranks)}
    figure = Figure(figsize=(10, min(_HIGH, max(_LOW, 1.5 + _EACH * len(ranks)))), layout="constrained")
    axes = figure.add_subplot()
    span_s = max(bar.end_s for bar in bars) - origin_s or 1.0
    for kind, colour in COLOURS.items():
        _draw_kind(axes, [bar for bar in bars if bar.kind == kind], kind, colour, rows, origin_s)
    _draw_ready(axes, bars, rows, origin_s)
    _draw_failures(axes, bars, rows, origin_s)
    axes.set_title(timeline.title.replace("$", r"\$"), loc="left", fontsize=10)
    axes.set_xlabel("seconds since the first start")
    axes.set_xlim(-0.01 * span_s, span_s * 1.04)
    _name_ranks(axes, ranks)
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


def _draw_failures(axes: Any, bars: Sequence[Bar], rows: dict[int, int], origin_s: float) -> None:
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
        if len(described) == _LABELS or any(abs(row - other) < apart for other in described):
            continue
        described.append(row)
        words = f"rank {bar.rank}{', first' if bar.is_first else ''}: {bar.end}"
        is_late = time_s > far / 2  # the words go where there is room
        axes.annotate(
            words.replace("$", r"\$"), (time_s, row), xytext=(-10 if is_late else 10, 0), textcoords="offset points",
            ha="right" if is_late else "left", va="center", fontsize=8, zorder=5,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )  # fmt: skip


def _name_ranks(axes: Any, ranks: list[int]) -> None:
    """Rank 0 at the top."""
    step = max(1, -(-len(ranks) // _NAMED))
    ticks = range(0, len(ranks), step)
    axes.set_yticks(list(ticks), [f"rank {ranks[row]}" for row in ticks], fontsize=8)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
