"""docs/architecture/launch-end.md shows the timetable of csrc/group/stop_state.c, and names tests that exist."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "architecture" / "launch-end.md").read_text()
WORDS = {"stay": "-", "impossible": "never"}


def table_of_the_code():
    source = (ROOT / "csrc" / "group" / "stop_state.c").read_text()
    body = source[source.index("[IDLE]", source.index("static const action table")) :]
    rows = re.findall(r"\[(\w+)\]\s*= \{([^}]*)\}", body[: body.index("};")])
    return {state: [WORDS.get(cell, cell) for cell in re.findall(r"\w+", cells)] for state, cells in rows}


def test_the_documented_table_is_that_of_the_code():
    lines = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| [A-Z]+ \|", line)]
    documented = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert len(documented) == 9
    assert documented == table_of_the_code()


def test_every_test_that_is_named_exists():
    named, file = [], ""
    for in_file, name in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", PAGE):
        file = in_file or file
        named.append((file, name))
    assert len(named) > 70
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^def {name}\(", next((ROOT / "tests").rglob(file)).read_text(), re.M)
    ]
    assert not missing
