"""A table in HTML, which a notebook shows in place of an object's repr."""

from __future__ import annotations

from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROWS = 256
_CHARACTERS = 500  # of a cell
_TEXT = ' style="text-align:left"'  # notebooks put all cells to the right


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the table. Long cells are cut, and rows beyond a limit counted.

    Args:
        title: the line above the table.
        columns: their names.
        rows: the cells of each row, as objects whose `str` is shown.
    """
    all_rows = iter(rows)
    shown = list(islice(all_rows, _ROWS))
    left = sum(1 for _ in all_rows)
    styles = [_TEXT if any(isinstance(row[n], str) and row[n] for row in shown) else "" for n in range(len(columns))]
    lines = [_row("th", columns, styles), *(_row("td", row, styles) for row in shown)]
    more = f"<p>and {left} more</p>" if left else ""
    return f'<p>{_escaped(title)}</p><div style="overflow-x:auto"><table>{"".join(lines)}</table></div>{more}'


def _row(tag: str, cells: Iterable[object], styles: Iterable[str]) -> str:
    pairs = zip(cells, styles, strict=True)
    return f"<tr>{''.join(f'<{tag}{style}>{_escaped(str(cell))}</{tag}>' for cell, style in pairs)}</tr>"


def _escaped(text: str) -> str:
    from html import escape  # it imports re

    return escape(text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…")
