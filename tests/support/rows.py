"""Large matrices: which of their rows run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


# Workers of pytest-xdist inherit the seed: all of them have to choose the same rows.
SEED = int(os.environ.setdefault("TEST_SEED", str(random.SystemRandom().randrange(2**32))))


TAKES_ALL = os.environ.get("TEST_ROWS") == "all"  # make test-all


def sample(rows: Iterable[T], count: int) -> list[T]:
    """`count` of the rows in their order, chosen by TEST_SEED; all of them under TEST_ROWS=all (make test-all)."""
    rows = list(rows)
    if TAKES_ALL or len(rows) <= count:
        return rows
    return [rows[i] for i in sorted(random.Random(SEED).sample(range(len(rows)), count))]
