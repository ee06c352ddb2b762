"""One place decides which Python is started."""

from __future__ import annotations

import ast
import sys

import pytest

from infini_run.system import python_probe
from infini_run.system.interpreter import _is_name_of_python, foreign_words
from tests.support.paths import ROOT

HOME = "system/interpreter.py"
# What says which Python runs without a look at sys.executable is as bad.
OTHERS = {"_base_executable", "_base_exec_prefix"}


def reads_executable(tree):
    """The lines that read sys.executable, by whatever way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"executable", *OTHERS}:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "sys":
            if {alias.name for alias in node.names} & {"executable", *OTHERS}:
                yield node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if {"executable", *OTHERS}.intersection(filter(lambda word: isinstance(word, str), words)):
                yield node.lineno


def test_only_one_module_reads_executable():
    package = ROOT / "infini_run"
    found = {
        str(path.relative_to(package)): lines
        for path in package.rglob("*.py")
        if (lines := list(reads_executable(ast.parse(path.read_text()))))
    }
    # without a core no module of ours can be imported, and its message names this Python alone
    assert found.keys() == {HOME, "source_checkout.py"}


@pytest.mark.parametrize(
    "name", ["python", "python3", "python3.13", "python3.13t", "python3-dbg", "pypy3.10", "graalpy"]
)
def test_name_of_interpreter_is_known(name):
    assert _is_name_of_python(name)


def test_wrapper_that_leaves_process_behind_answers_at_once(tmp_path, monkeypatch):
    """What has its output keeps it open."""
    monkeypatch.setattr(python_probe, "LIMIT_S", 1e6)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nsleep 1000 &\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert python_probe.find_answering(str(wrapper), foreign_words, is_frozen=False) == str(wrapper)


@pytest.mark.parametrize(
    "name", ["", "blender", "uwsgi", "pythonista", "python-app", "python3.11 (deleted)", "ipython"]
)
def test_name_of_other_program_is_not(name):
    assert not _is_name_of_python(name)
