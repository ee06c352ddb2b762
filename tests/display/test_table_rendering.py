"""The table as text: who is shown, and that every size and every content makes lines that fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.display.table_rendering import (
    FAILED,
    HUNG,
    LIVE,
    OVER,
    Row,
    TableRenderer,
    count_text,
    plain,
    select_rows,
    share_text,
    size_text,
    up_text,
)
from infini_run.errors import printable

cell_len = pytest.importorskip("rich.cells").cell_len
PAINTER = TableRenderer({"TERM": "xterm", "NO_COLOR": "1"})


def row(rank, kind=LIVE, state="running", **fields):
    return Row(rank=rank, state=state, kind=kind, **fields)


def bare(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def test_where_there_is_room_all_are_shown_by_rank():
    rows = [row(2), row(0, FAILED), row(1, OVER)]
    assert [r.rank for r in select_rows(rows, 3)[0]] == [0, 1, 2]


def test_else_those_that_failed_then_those_that_hang_then_the_busiest_are():
    rows = [
        row(0, OVER, "done"),
        row(1, cpu=0.01),
        row(2, cpu=1.9),
        row(3, HUNG, "hung"),
        row(4, FAILED, "exit 1", since_s=9.0),
        row(5, FAILED, "exit 2", since_s=8.0),
        row(6, cpu=0.1),
        row(7, cpu=0.2),
    ]
    shown, others = select_rows(rows, 7)
    assert [r.rank for r in shown] == [5, 4, 3, 2, 6, 7, 1]  # the first to fail in front; 6 and 7 keep their places
    assert [r.rank for r in others] == [0]


def test_ranks_that_have_ended_stand_in_order():
    rows = [row(rank, OVER, "stopped", since_s=9.0 - rank) for rank in range(9)]
    assert [r.rank for r in select_rows(rows, 5)[0]] == [0, 1, 2, 3, 4]


def test_the_rest_is_counted_in_one_line():
    rows = [row(i) for i in range(1000)] + [row(1000, FAILED, "exit 1"), row(1001, FAILED, "SIGSEGV")]
    lines = bare(PAINTER.frame(rows, "title", (80, 10), lambda rank: ""))
    assert len(lines) == 10
    assert lines[0] == "title: 2 failed, 1000 running"
    assert [line.split()[0] for line in lines[2:5]] == ["1000", "1001", "0"]
    assert lines[-1] == "... and 995 more: 995 running"


def test_programs_have_a_column_and_ranks_of_their_own():
    rows = [row(0, program="trainer", program_rank=0), row(1, program="rollout", program_rank=0)]
    lines = bare(PAINTER.frame(rows, "title", (80, 10), lambda rank: ""))
    assert [line.split()[:3] for line in lines[1:]] == [
        ["PROGRAM", "RANK", "STATE"], ["trainer", "0", "running"], ["rollout", "0", "running"],
    ]  # fmt: skip
    assert "PROGRAM" not in bare(PAINTER.frame([row(0)], "title", (80, 10), lambda rank: ""))[1]


def test_names_cannot_steer_the_terminal():
    rows = [row(0, program="a\u202eb", host="c\x1b[2J"), row(1, program="z", host="d")]
    first = PAINTER.frame(rows, "up", (100, 10), lambda rank: "")[2]
    assert first.split()[:3] == [r"a\u202eb", "0", r"c\x1b[2J"]


def test_narrow_windows_lose_columns_that_matter_less_first():
    rows = [row(0, pid=12345, up_s=5.0, cpu=0.5, memory=1 << 30)]
    lines = {w: bare(PAINTER.frame(rows, "t", (w, 9), lambda rank: "x" * 300)) for w in (90, 60, 52, 44, 30, 24)}
    assert {width: frame[1].replace("LAST LINE", "LINE").split() for width, frame in lines.items()} == {
        90: ["RANK", "STATE", "PID", "UP", "CPU", "MEM", "LINE"],
        60: ["RANK", "STATE", "PID", "CPU", "MEM", "LINE"],
        52: ["RANK", "STATE", "CPU", "MEM", "LINE"],
        44: ["RANK", "STATE", "CPU", "LINE"],
        30: ["RANK", "STATE", "LINE"],
        24: ["RANK", "STATE"],
    }


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 120), st.integers(0, 30), st.integers(0, 40), st.text(max_size=200), st.booleans(), st.booleans()
)
def test_every_frame_fits(columns, lines, count, text, has_gpu, is_coloured):
    gpu = {"gpu_memory": 5 << 30, "gpu": 0.5} if has_gpu else {}
    rows = [row(i, i % 4, "exit 127", pid=4000000, up_s=1e7, cpu=123.4, memory=5 << 40, **gpu) for i in range(count)]
    painter = TableRenderer({"TERM": "xterm-256color", "COLORTERM": "truecolor"}) if is_coloured else PAINTER
    frame = painter.frame(rows, "infini-run", (columns, lines), lambda rank: plain(text.encode("utf-8", "replace")))
    assert len(frame) <= lines
    for line in bare(frame):
        assert "\x1b" not in line
        assert cell_len(line) <= columns
        assert printable(line) == line


@given(st.binary(max_size=600))
def test_what_was_written_becomes_one_line_that_is_printable(data):
    line = plain(data)
    assert line == printable(line)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", ""),
        (b"\n\n", ""),
        (b"one\ntwo\n", "two"),
        (b"one\n   \n", "one"),
        (b" 10%\r 20%\r", " 20%"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"a\tb", "a   b"),
        (b"\x07bell\xc2\x9d", "bell\\x9d"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_last_lines(data, line):
    assert plain(data) == line


def test_quantities():
    assert [up_text(s) for s in (None, 0.0, 67.9, 3723, 200000)] == ["", "0:00", "1:07", "1:02:03", "2d07h"]
    sizes = [size_text(n) for n in (None, 0, 5 << 10, 999 << 10, 1023 << 10, 12 << 20, 3 << 40)]
    assert sizes == ["", "0.0K", "5.0K", "999K", "1.0M", "12M", "3.0T"]
    assert [share_text(s) for s in (None, 0.0, 0.456, 12.0)] == ["", "0%", "46%", "1200%"]
    assert (
        count_text([row(0), row(1, FAILED, "exit 3"), row(2, OVER, "done"), row(3)]) == "1 failed, 2 running, 1 done"
    )
