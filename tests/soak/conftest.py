"""Faults at random for a long time, and what must hold after each: `make soak`, and only that.

The hosts whose cables can be cut and the jobs on them are those of bench/membership.py.
"""

import sys

from tests.support.paths import ROOT

collect_ignore = [] if (ROOT / "bench").exists() else ["test_losses.py"]  # an sdist has no bench
sys.path.append(str(ROOT / "bench"))
