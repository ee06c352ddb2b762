"""Where things lie that tests use."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
C = SUPPORT.parent / "c"  # small C programs and libraries
