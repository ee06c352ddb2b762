"""Each wheel, installed by pip where it is made for, and our tests of a launch against it, run from the sdist.

The tests of the launch go through every way in which the core can start and wait for processes: clone and fork,
pidfds, pidfds as Linux 5.3 has them, and none, as Linux 4.18 (INFINI_RUN_DEBUG).
"""

from __future__ import annotations

import os

import pytest

from tests.wheels.conftest import run

pytestmark = pytest.mark.wheels
LAUNCH = ["exit_code", "orphan", "guard", "signal", "output", "stdin", "pid1", "group"]
TESTS = [f"tests/launch/test_{name}.py" for name in LAUNCH]
TESTS += ["tests/installation/test_installed.py", "tests/api/test_launch.py", "tests/crews/test_function.py"]


def env():
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_", "INFINI_"))}


def check(tree, *python):
    flags = ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    print(run(*python, "-m", "pytest", *flags, *TESTS, cwd=tree, env=env()))


def test_on_glibc(glibc, tree):
    check(tree, glibc)


def test_on_musl(musl, tree):
    said = run(musl, "-c", "import sysconfig; print(sysconfig.get_config_var('SOABI'))")
    assert "musl" in said
    check(tree, musl)
