"""docs/security.md names the tests that hold what it promises."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(?:test_\w+\.py)?(?:::)?(test_\w+)`", PAGE))
    assert len(named) > 20
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
    }
    assert named <= defined
