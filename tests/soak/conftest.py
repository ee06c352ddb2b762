"""Faults for a long time, at random or one of each, and what must hold after each: `make soak`, and only that.

The hosts whose cables can be cut and the jobs on them are those of bench/membership.py.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

collect_ignore = [] if (ROOT / "bench").exists() else ["test_losses.py", "test_cuts.py"]  # an sdist has no bench
sys.path.append(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    """Where the jobs of bench/ run: this environment."""
    from bed import Bed, child_env
    from provision import compile_programs

    programs = tmp_path_factory.mktemp("programs")
    compile_programs(programs)
    return Bed(venv=Path(sys.prefix), programs=programs, env=child_env(os.environ))
