"""What must be reached, in one table, and the rows of the one table that is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bar:
    """`met` takes the row's value and its ratio."""

    text: str
    met: Callable[[float, float], bool]


BARS = {
    "startup": Bar("≤ 1.35x", lambda _, ratio: ratio <= 1.35),
    "core": Bar("≤ 1.15x", lambda _, ratio: ratio <= 1.15),
    "launch64": Bar("< 50 ms", lambda value, _: value < 50),
    "torchrun": Bar("≥ 40x", lambda _, ratio: ratio >= 40),
    "growth": Bar("≤ 1.3x", lambda _, ratio: ratio <= 1.3),
    "teardown": Bar("≤ 40 ms", lambda value, _: value <= 40),
    "snapshots": Bar("≤ 1000 ms", lambda value, _: value <= 1000),
    "output": Bar("≥ 300 MB/s or ≥ 0.5x", lambda value, ratio: value >= 300 or ratio >= 0.5),
    "unread": Bar("≥ 0.9x", lambda _, ratio: ratio >= 0.9),
    "whole": Bar("0 lines", lambda value, _: value == 0),
    "memory": Bar("≤ 1.5x", lambda _, ratio: ratio <= 1.5),
    "engine": Bar("≤ 1.5x", lambda _, ratio: ratio <= 1.5),
    "job": Bar("≤ 1.3x", lambda _, ratio: ratio <= 1.3),
    "job_dead": Bar("≤ 2000 ms", lambda value, _: value <= 2000),
    "one": Bar("1", lambda value, _: value == 1),
    "cancelled": Bar("≤ 1000 ms", lambda value, _: value <= 1000),
    "idle": Bar("0", lambda value, _: value == 0),
    "sooner": Bar("≥ 1.5 s or ≥ 1x", lambda value, ratio: value >= 1.5 or ratio >= 1),
    "lighter": Bar("≥ 15x", lambda _, ratio: ratio >= 15),
    "report": Bar("≤ 10 lines", lambda value, _: value <= 10),
    "named": Bar("all", lambda _, ratio: ratio == 1),
    "many_ssh": Bar("≤ 1.3x", lambda _, ratio: ratio <= 1.3),
    "many_open": Bar("≤ 3x", lambda _, ratio: ratio <= 3),
    "dead": Bar("≤ 200 ms", lambda value, _: value <= 200),
    "joined": Bar("≤ 3000 ms", lambda value, _: value <= 3000),
    "head": Bar("≤ 100 MB", lambda value, _: value <= 100),
    "functions_torchrunx_1": Bar("≥ 2x", lambda _, ratio: ratio >= 2),
    "functions_torchrunx_4": Bar("≥ 5x", lambda _, ratio: ratio >= 5),
    "functions_spawn": Bar("≥ 1x", lambda _, ratio: ratio >= 1),
    "functions_warm_1": Bar("≤ 20 ms", lambda value, _: value <= 20),
    "functions_warm_8": Bar("≤ 100 ms", lambda value, _: value <= 100),
    "functions_loky": Bar("≤ 1.2x", lambda _, ratio: ratio <= 1.2),
    "functions_failure": Bar("≤ 100 ms", lambda value, _: value <= 100),
    "functions_large": Bar("≤ 1.5 s", lambda value, _: value <= 1.5),
    "functions_peak": Bar("≤ 2.5x", lambda value, _: value <= 2.5),
    "trip": Bar("≤ 1.1x", lambda _, ratio: ratio <= 1.1),
    "stream": Bar("≥ 2x", lambda _, ratio: ratio >= 2),
    "told": Bar("≤ 20 ms", lambda value, _: value <= 20),
    "tiny": Bar("≤ 1x", lambda _, ratio: ratio <= 1),
    "large": Bar("≥ 2.4x", lambda _, ratio: ratio >= 2.4),
    "flood": Bar("≤ 0.25x", lambda _, ratio: ratio <= 0.25),
    "lost": Bar("0", lambda value, _: value == 0),
    "seal": Bar("≤ 1.1x", lambda _, ratio: ratio <= 1.1),
    "node_lost": Bar("≤ 1.5 s", lambda value, _: value <= 1.5),
    "lost_deaf": Bar("≤ grace + 1 s", lambda value, _: value <= 2 + 1),
    "lost_cut": Bar("≤ timeout + 2 s", lambda value, _: value <= 3 + 2),
    "crowd_plan": Bar("≤ 0.3 s", lambda value, _: value <= 0.3),
    "crowd_again": Bar("≤ 2 s", lambda value, _: value <= 2),
    "crowd_join": Bar("≤ 1.3 s", lambda value, _: value <= 1.3),
    "lost_none": Bar("0", lambda value, _: value == 0),
    "listed": Bar("≤ 100 ms", lambda value, _: value <= 100),
    "hang_named": Bar("≤ 3 s", lambda value, _: value <= 3),
    "held": Bar("≤ 50 ms", lambda value, _: value <= 50),
    "beats": Bar("< 1 %", lambda value, _: value < 1),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `against` says what the ratio is to."""

    figure: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    bar: str | None = None

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return BARS[self.bar].met(self.value, self.ratio if self.ratio is not None else float("nan"))

    def record(self) -> dict[str, Any]:
        text = BARS[self.bar].text if self.bar else None
        fields = ("figure", "value", "unit", "ratio", "against")
        return {**{name: getattr(self, name) for name in fields}, "bar": text, "met": self.met}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one script found out: rows to print, samples to keep, remarks (a peer that is not usable)."""

    name: str
    rows: Sequence[Row]
    samples: dict[str, Any]
    remarks: Sequence[str] = field(default_factory=tuple)


def format_value(row: Row) -> str:
    digits = 0 if row.value == int(row.value) else 2 if abs(row.value) < 100 else 0
    return f"{row.value:.{digits}f} {row.unit}".strip()


def format_cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x {row.against}"
    bar = BARS[row.bar].text if row.bar else ""
    return row.figure, format_value(row), ratio, bar, {True: "yes", False: "NO", None: ""}[row.met]


def format_table(rows: Sequence[Row]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    cells = [("figure", "value", "ratio", "bar", "met"), *map(format_cells, rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    cells.insert(1, tuple("-" * width for width in widths))
    padded = (map(str.ljust, line, widths) for line in cells)
    lines = ["| " + " | ".join(line) + " |" for line in padded]
    return "\n".join(lines)


def print_figure(figure: Figure) -> None:
    """What a script prints when it is run singly."""
    print(format_table(figure.rows))
    for remark in figure.remarks:
        print(f"- {remark}")
