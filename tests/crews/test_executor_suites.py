"""The suites of CPython and loky run an Executor; executor_suites.md names each case that does not pass."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TABLE = Path(__file__).with_name("executor_suites.md")
SDIST = os.environ.get("LOKY_SDIST", "")  # make executor-suites downloads and unpacks it
pytestmark = pytest.mark.slow


def named(suite):
    """The cases of a section of the table."""
    section = re.split(r"^## ", TABLE.read_text(), flags=re.M)
    [text] = [text for text in section if text.startswith(f"{suite}\n")]
    return set(re.findall(r"^\| (\S*test_\S+) \|", text, re.M))


def test_cpython_cases_pass_or_are_named(tmp_path):
    if sys.version_info < (3, 12) or find_spec("test") is None or find_spec("test.test_concurrent_futures") is None:
        pytest.skip("this interpreter has no package test.test_concurrent_futures")
    report = tmp_path / "report.json"
    program = [sys.executable, "-m", "tests.support.cpython_executor_suite", str(report)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert report.exists(), done.stderr
    outcomes = json.loads(report.read_text())
    assert len(outcomes) >= 81
    assert {name for name, how in outcomes.items() if how != "ok"} == named("CPython"), outcomes


def test_loky_cases_pass_or_are_named():
    if not SDIST:
        pytest.skip("make executor-suites")
    suite = "tests/test_process_executor_loky.py"
    program = [sys.executable, "-m", "pytest", "-v", "-p", "loky_executor_suite", "-p", "no:cacheprovider"]
    program += ["-W", "ignore", "--skip-high-memory", suite]
    program += ["-o", "faulthandler_exit_on_timeout=false"]  # its own: after 60 s, with no word of the other cases
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    done = subprocess.run(program, cwd=SDIST, env=env, capture_output=True, text=True, timeout=900, check=False)
    ends = re.findall(r"^\S+::TestsProcessPoolLoky(\w+)::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", done.stdout, re.M)
    passed = {f"{kind}.{name}" for kind, name, how in ends if how == "PASSED"}
    others = {f"{kind}.{name}" for kind, name, _ in ends} - passed
    assert len(passed) >= 42, done.stdout[-3000:]
    assert others <= named("loky")
