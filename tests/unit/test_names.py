"""A word has one meaning in the whole repository: the words that were given up for the field's own do not come back.

docs/reference/glossary.md has the words that stand for them. A name is compared part by part: `is_told` has the
part `told`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]

# Not as a part of any name: of a file, class, function, method, field, parameter, variable or constant.
RETIRED = frozenset(
    {
        "beat", "bell", "birth", "blame", "blamed", "blames", "bury", "complaint", "culprit", "fleet", "gang", "gift",
        "hasten", "hear", "heard", "hurry", "inquest", "joint", "judge", "lends", "lobby", "lone", "looks", "meeting",
        "muster", "noise", "outlet", "outpost", "revival", "roster", "said", "say", "says", "scene", "scratch",
        "seat", "seeing", "shortage", "strays", "surroundings", "tally", "tell", "tells", "told", "unsaid", "untold",
        "verdict", "vigil", "withhold",
    }
)  # fmt: skip
# Not as the whole name of a function or method, where they have said many things: on_event, run_due, run_once, ...
RETIRED_FUNCTIONS = frozenset({"act", "follow", "forget", "happen", "look", "lose", "settle", "step", "take"})

# Words of the user's, or of another program's: `infini-job forget`, a step of Slurm.
KEPT = frozenset({("jobs", "forget"), ("environments", "step")})
KEPT_IN_C = frozenset({"step", "strays"})  # docs/reference/glossary.md has the words


def parts_of(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_"))


def names_in(path: Path) -> set[tuple[str, str]]:
    """What a module defines, as (kind, name)."""
    found = {("file", path.stem)}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found.add(("class", node.name))
            found |= {("field", name) for name in assigned_in(node.body)}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(("function", node.name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(("field", node.attr))
        elif isinstance(node, ast.arg):
            found.add(("parameter", node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(("variable", node.id))
    return found | {("constant", name) for name in assigned_in(tree.body)}


def assigned_in(body: list[ast.stmt]) -> set[str]:
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def c_functions_in(text: str) -> set[str]:
    """The functions that a C file defines or declares: a name before a parenthesis in a line that is not indented."""
    lines = re.findall(r"^[a-z][\w *]*?\b(\w+)\(", text, flags=re.MULTILINE)
    return {name for name in lines if not name.startswith("__")}


def class_homes() -> dict[str, list[str]]:
    """The modules that define each class, by the class's name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "infini_run").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return found


def is_retired(kind: str, name: str) -> bool:
    """kind: file, class, field, parameter, variable, constant, function, or c (a function of the core)."""
    if kind == "c":
        return bool(parts_of(name.replace("take_over", "")) & (RETIRED | RETIRED_FUNCTIONS) - KEPT_IN_C)
    return bool(parts_of(name) & RETIRED) or (kind == "function" and name.strip("_") in RETIRED_FUNCTIONS)


def retired_in(paths: Iterable[Path], package: str = "") -> set[str]:
    found = {(kind, name) for path in paths for kind, name in names_in(path)}
    return {name for kind, name in found if is_retired(kind, name) and (package, name.strip("_")) not in KEPT}


PACKAGES = sorted(path.name for path in (ROOT / "infini_run").iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_of_a_package_has_a_retired_word(package):
    assert not retired_in((ROOT / "infini_run" / package).rglob("*.py"), package)


def test_no_name_of_a_module_beside_the_packages_has_a_retired_word():
    assert not retired_in((ROOT / "infini_run").glob("*.py"))


def test_no_class_name_stands_twice():
    assert not {name: homes for name, homes in class_homes().items() if len(homes) > 1}


def test_no_file_of_tests_has_a_retired_word():
    assert not {path.stem for path in (ROOT / "tests").rglob("*.py") if is_retired("file", path.stem)}


def test_no_file_and_no_function_of_the_core_has_a_retired_word():
    files = list((ROOT / "csrc").rglob("*.[ch]"))
    assert not {path.stem for path in files if is_retired("file", path.stem)}
    assert not {name for path in files for name in c_functions_in(path.read_text()) if is_retired("c", name)}


@pytest.mark.parametrize(
    ("kind", "name", "retired"),
    [
        ("function", "is_told", True), ("class", "HangVerdict", True), ("function", "_take", True),
        ("function", "take_over_process", False), ("field", "step", False), ("constant", "ESSAY", False),
    ],
)  # fmt: skip
def test_a_name_is_compared_part_by_part(kind, name, retired):
    assert is_retired(kind, name) == retired
