"""The list of changed messages shows texts of this version, and old ones that no longer exist."""

from __future__ import annotations

import re

import pytest

from tests.support.messages import ANY, all_texts, messages
from tests.support.paths import ROOT

pytestmark = pytest.mark.xdist_group("messages")  # as in test_troubleshooting.py
PAIRS = re.findall(r"^- (.*)\n\+ (.*)$", (ROOT / "docs/changed-messages.md").read_text(), re.MULTILINE)


def holds(text: str, line: str) -> bool:
    """Return whether the fixed words of the line stand in the text, in their order."""
    end = 0
    for part in line.split(ANY):
        start = text.find(part.strip(), end)
        if start < 0:
            return False
        end = start + len(part.strip())
    return True


def test_every_line_has_an_old_and_a_new_text():
    marked = re.findall(r"^[-+] ", (ROOT / "docs/changed-messages.md").read_text(), re.MULTILINE)
    assert len(marked) == 2 * len(PAIRS) > 0


def test_new_texts_are_printed_and_old_ones_are_not():
    known = {message.text for message in messages()}
    texts = all_texts() | known
    assert [new for _, new in PAIRS if not any(holds(text, new) for text in texts)] == []
    assert [old for old, _ in PAIRS if any(holds(text, old) for text in known)] == []
