"""An environment with the extra test-core alone collects all tests."""

from __future__ import annotations

import ast
import sys

from tests.support.paths import ROOT

OURS = {"infini_run", "tests", *(file.stem for file in (ROOT / "tests/support").glob("*/*.py"))}
# An sdist has no bench: tests/soak/conftest.py.
OF_BENCH = {"bed", "cabled", "elastic", "membership", "provision", "sample"}
CORE = {"pytest", "hypothesis", "pyte", "cffi", "_cffi_backend", "cloudpickle", "pynvml"}


def imported_at_once(text):
    """The packages that a module imports, up to where it asks for one (pytest.importorskip)."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if "importorskip" in lines[node.lineno - 1]:
            return
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_modules_of_tests_import_nothing_beyond_test_core():
    files = [file for part in ("test_*.py", "conftest.py", "support/*.py") for file in (ROOT / "tests").rglob(part)]
    beyond = {file.name: set(imported_at_once(file.read_text())) - CORE - OURS - OF_BENCH for file in files}
    assert {name: left for name, packages in beyond.items() if (left := packages - sys.stdlib_module_names)} == {}
