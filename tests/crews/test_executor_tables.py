"""executor_cases.md names tests that exist, and leaves out no case of CPython 3.13."""

from __future__ import annotations

import ast
import glob
import os
import re

import pytest

from tests.support.paths import ROOT

TABLE = (ROOT / "tests" / "crews" / "executor_cases.md").read_text()
SUITES = glob.glob(os.path.expanduser("~/.pyenv/versions/3.13*/lib/python3.13/test/test_concurrent_futures"))


def names_in(path):
    with open(path) as file:
        return {node.name for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    ours = set().union(*(names_in(path) for path in (ROOT / "tests" / "crews").glob("test_*.py")))
    reasons = [line.split("|")[2] for line in TABLE.splitlines() if line.startswith("| ")]
    named = {name for reason in reasons for name in re.findall(r"(?<![\w.])test_\w+(?!\w|\.py)", reason)}
    theirs = {"test_hang_gh83386"}  # a row refers to another one
    assert sorted(named - ours - theirs) == []


@pytest.mark.skipif(not SUITES, reason="CPython 3.13's own tests are not installed")
def test_no_case_of_cpython_is_missing():
    cases = set()
    for path in glob.glob(f"{SUITES[0]}/*.py"):
        stem = os.path.basename(path)[:-3]
        cases |= {f"{stem}.{name}" for name in names_in(path) if name.startswith("test_")}
    assert sorted(case for case in cases if f"| {case} " not in TABLE) == []
