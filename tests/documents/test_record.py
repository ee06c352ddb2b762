"""The recordings of a terminal that the documentation shows (scripts/record.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def record(out, *words):
    subprocess.run([sys.executable, ROOT / "scripts/record.py", out, *words], check=True, timeout=60)
    return ElementTree.parse(out).getroot()


def texts(svg):
    return ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]


def test_still_shows_each_command_as_it_ended(tmp_path):
    svg = record(
        tmp_path / "out.svg", "--still", "--columns=20",
        "--", "one <&>", "sh", "-c", r"printf 'gone\rleft \033[31mred\033[0m <b>'",
        "--", "two", "sh", "-c", "seq 3",
    )  # fmt: skip
    assert texts(svg) == ["$ one <&>", "left red <b>", "$ two", "1", "2", "3"]
    colors = {part.text: part.get("fill") for part in svg.iter(f"{SVG}tspan")}
    assert colors["red"] != colors["left "]
    assert not any(style.text and "animation" in style.text for style in svg.iter(f"{SVG}style"))


def test_long_panel_counts_the_lines_in_its_middle(tmp_path):
    svg = record(tmp_path / "out.svg", "--still", "--most=5", "--", "one", "seq", "9", "--", "two", "seq", "5")
    assert texts(svg) == ["$ one", "1", "2", "… 5 lines …", "8", "9", "$ two", "1", "2", "3", "4", "5"]
    _, _, width, height = map(int, svg.get("viewBox").split())
    assert (width, height) == (600, 2 * (5 * 16 + 48) + 12)


def test_a_recording_has_a_frame_for_each_change_and_ends_with_the_last(tmp_path):
    svg = record(
        tmp_path / "out.svg", "--", "count", "sh", "-c", r"for n in 1 2 3; do printf '\r%s' $n; sleep 1; done"
    )
    frames = [group for group in svg.iter(f"{SVG}g") if group.get("id")]
    seen = [texts(frame) for frame in frames]
    assert [shown for at, shown in enumerate(seen) if shown not in seen[:at]] == [["1"], ["2"], ["3"]]
    assert [frame.get("visibility") for frame in frames] == ["hidden"] * (len(frames) - 1) + [None]


@pytest.mark.parametrize("name", ["live", "failure"])
def test_the_pictures_name_no_path_of_who_made_them(name):
    text = (ROOT / f"docs/assets/{name}.svg").read_text()
    assert "infini-run --" in text
    assert not any(folder in text for folder in ("/home/", "/root/", "/work/", "/tmp/"))
