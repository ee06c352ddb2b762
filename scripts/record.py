"""Run commands on a terminal, and draw what a person would see as an SVG: a panel per command, each below the last.

    record.py OUT.svg [--columns=80] [--still] [--most=LINES] -- TITLE COMMAND... [-- TITLE COMMAND...]

With --still a panel shows what is on the terminal at the end; otherwise the picture moves as the run did. Those of
the documentation are made by scripts/pictures.sh, from real runs.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

ROWS = 120  # of the terminal of a still: all that a short run writes
MOVING_ROWS = 14
LIMIT_S = 120.0
LEAST_S = 0.1  # between two frames
REST_S = 4.0  # for the last frame
CHARACTER, LINE = 7.2, 16  # px, at 12 px of a monospaced font
COLORS = {
    "default": "#d4d4d4", "black": "#808080", "red": "#f48771", "green": "#89d185", "brown": "#e5c07b",
    "blue": "#75beff", "magenta": "#d7a5e0", "cyan": "#7fd6e0", "white": "#ffffff",
}  # fmt: skip


class Panel:
    """A command's terminal.

    Attributes:
        title: Above it.
        frames: When the terminal looked how: seconds since the start, and its lines.
    """

    def __init__(self, title: str, command: list[str], columns: int, rows: int) -> None:
        self.title, self._command = title, command
        self._screen = pyte.Screen(columns, rows)
        self.columns, self.frames = columns, []
        self._run()

    def _run(self) -> None:
        stream, (ours, theirs) = pyte.ByteStream(self._screen), os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self._screen.lines, self.columns, 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(self.columns)}
        start_s = time.monotonic()
        process = subprocess.Popen(
            self._command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)
        while True:
            ready, _, _ = select.select([ours], [], [], LIMIT_S)
            try:
                data = os.read(ours, 65536) if ready else b""
            except OSError:  # the last one that had the terminal has ended
                data = b""
            if not data:
                break
            stream.feed(data)
            at_s = time.monotonic() - start_s
            if not self.frames or at_s - self.frames[-1][0] >= LEAST_S:
                self.frames.append((at_s, self._lines()))
        self.frames.append((time.monotonic() - start_s, self._lines()))
        process.wait(LIMIT_S)
        os.close(ours)

    def _lines(self) -> list[str]:
        return [self._line(y) for y in range(self._screen.lines)]

    def _line(self, y: int) -> str:
        """The line as SVG: a tspan for each run of one colour."""
        row = self._screen.buffer[y]
        cells = [row[x] for x in range(self.columns)]
        while cells and cells[-1].data == " ":
            cells.pop()
        parts = []
        for (color, is_bold), run in groupby(cells, key=lambda cell: (COLORS.get(cell.fg, "#d4d4d4"), cell.bold)):
            weight = ' font-weight="bold"' if is_bold else ""
            parts.append(f'<tspan fill="{color}"{weight}>{escape("".join(cell.data for cell in run))}</tspan>')
        return "".join(parts)


def shorten(lines: list[str], most: int) -> list[str]:
    """Return the lines, with the middle replaced by one that counts what it stands for."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    if len(lines) <= most:
        return lines
    count = f'<tspan fill="#9cdcfe">… {len(lines) - most + 1} lines …</tspan>'
    return [*lines[: most // 2], count, *lines[most // 2 + len(lines) - most + 1 :]]


def draw(panels: list[Panel], *, is_still: bool, most: int) -> str:
    """Return the SVG: the panels, one below the other, so that a page shows them at their own size."""
    width = max(panel.columns for panel in panels) * CHARACTER + 24
    parts, at = [], 0
    for number, panel in enumerate(panels):
        frames = [(at_s, shorten(lines, most)) for at_s, lines in (panel.frames[-1:] if is_still else panel.frames)]
        height = max(1, *(len(lines) for _, lines in frames)) * LINE + 48
        parts.append(f'<g transform="translate(0 {at})">')
        parts.append(f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1e1e1e"/>')
        parts.append(f'<text x="12" y="22" fill="#9cdcfe">$ {escape(panel.title)}</text>')
        parts += [*_frames(number, frames), "</g>"]
        at += height + 12
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {at - 12}" {font}>'
    return "\n".join([head, "<style>text { white-space: pre; }</style>", *parts, "</svg>", ""])


def _frames(number: int, frames: list[tuple[float, list[str]]]) -> list[str]:
    if len(frames) == 1:
        return [_text(frames[0][1])]
    whole_s = frames[-1][0] + REST_S
    parts = ["<style>"]
    for index, (start_s, _) in enumerate(frames):
        end_s = frames[index + 1][0] if index + 1 < len(frames) else whole_s
        first, last = 100 * start_s / whole_s if index else 0.0, 100 * end_s / whole_s
        parts.append(f"#p{number}f{index} {{ animation: p{number}k{index} {whole_s:.1f}s step-end infinite; }}")
        shown = f"{first:.3f}% {{ visibility: visible; }}"
        begin = "" if index == 0 else "0% { visibility: hidden; }"
        end = "" if last >= 100 else f"{last:.3f}% {{ visibility: hidden; }}"
        parts.append(f"@keyframes p{number}k{index} {{ {begin} {shown} {end} }}")
    parts.append("</style>")
    for index, (_, lines) in enumerate(frames):
        is_last = index + 1 == len(frames)  # what a viewer shows that has no animations
        hidden = "" if is_last else ' visibility="hidden"'
        parts.append(f'<g id="p{number}f{index}"{hidden}>{_text(lines)}</g>')
    return parts


def _text(lines: list[str]) -> str:
    return "\n".join(f'<text x="12" y="{44 + LINE * y}">{line}</text>' for y, line in enumerate(lines) if line)


def main() -> None:
    """Record the commands of the command line."""
    words = sys.argv[1:]
    cut = words.index("--")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--still", action="store_true")
    parser.add_argument("--most", type=int, default=ROWS, help="lines of a panel; those in the middle are counted")
    asked = parser.parse_args(words[:cut])
    groups = [list(group) for is_cut, group in groupby(words[cut + 1 :], key=lambda word: word == "--") if not is_cut]
    rows = ROWS if asked.still else MOVING_ROWS
    panels = [Panel(title, command, asked.columns, rows) for title, *command in groups]
    asked.out.write_text(draw(panels, is_still=asked.still, most=asked.most), encoding="utf-8")


if __name__ == "__main__":
    main()
