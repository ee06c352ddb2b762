"""Large matrices: which of their rows run, and which never run side by side."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

import pytest

# Numbers of processes are the machine's, and each launcher looks at all that are given: of tests whose processes
# fork and exit without end one runs at a time.
FORK_STORM = pytest.mark.xdist_group("fork_storms")

T = TypeVar("T")


# Workers of pytest-xdist inherit the seed: all of them have to choose the same rows.
SEED = int(os.environ.setdefault("TEST_SEED", str(random.SystemRandom().randrange(2**32))))


TAKES_ALL = os.environ.get("TEST_ROWS") == "all"  # make test-all


def sample(rows: Iterable[T], count: int, of: str = "") -> list[T]:
    """`count` of the rows in their order, chosen by TEST_SEED; all of them under TEST_ROWS=all (make test-all).

    of: whose rows they are. Matrices of one size that have names of their own have not all lost the same rows.
    """
    rows = list(rows)
    if TAKES_ALL or len(rows) <= count:
        return rows
    return [rows[i] for i in sorted(random.Random(f"{SEED} {of}").sample(range(len(rows)), count))]
