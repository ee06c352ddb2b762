"""docs/design.md shows the floors as import-linter has them, and its files and functions exist."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.paths import ROOT

if sys.version_info < (3, 11):
    pytest.skip("tomllib is of Python 3.11", allow_module_level=True)
import tomllib

PAGE = (ROOT / "docs" / "design.md").read_text()
PACKAGE = ROOT / "infini_run"
FILE = re.compile(r"`([\w./-]*(?:/|\.(?:py|c|h|md|toml|yml)))`")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def tables_below(heading):
    """Return the tables of a section: of each its rows, of each row its cells."""
    section = PAGE[PAGE.index(f"{heading}\n") + len(heading) :].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[line.strip("|").split("|") for line in table.splitlines()[2:]] for table in tables]


def path_of(name):
    """Return what a name of the page is in the repository."""
    return next((path for path in (PACKAGE / name, ROOT / name) if path.exists()), None)


def layers(name):
    return next(contract["layers"] for contract in CONTRACTS if contract["name"] == f"{name}: imports go down only")


def test_every_file_of_map_exists():
    named = set(FILE.findall(PAGE))
    assert len(named) > 200
    left_out = () if (ROOT / "bench").exists() else ("bench/",)  # of the sdist
    assert [name for name in sorted(named) if path_of(name) is None and not name.startswith(left_out)] == []


def test_floors_are_those_of_contract():
    contract = next(contract for contract in CONTRACTS if contract["name"] == "imports go down only")
    modules = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    documented = [re.findall(r"`(\w+)(?:/|\.py)`", row[0]) for row in tables_below("## Floors and rooms")[0]]
    assert documented == modules


def test_contracts_list_every_module():
    """import-linter itself then fails for a module that is missing. One contract is about modules of rooms."""
    of_rooms, *others = sorted(CONTRACTS, key=lambda contract: contract.get("exhaustive", False))
    assert all(contract.get("exhaustive") for contract in others)
    assert of_rooms["name"] == "rooms of jobs: imports go down only"
    listed = set(re.findall(r"\w+\.\w+", " ".join(of_rooms["layers"])))
    rooms = {name.partition(".")[0] for name in listed}
    modules = {f"{room}.{path.stem}" for room in rooms for path in (PACKAGE / "jobs" / room).glob("*.py")}
    assert sorted(listed) == sorted(name for name in modules if not name.endswith(".__init__"))


def test_rooms_of_crews_are_those_of_contract():
    rooms = re.findall(r"^\| `crews/(\w+)/` \|", PAGE, re.MULTILINE)
    assert rooms == layers("crews")[: len(rooms)]
    assert len(rooms) == len([path for path in (PACKAGE / "crews").iterdir() if (path / "__init__.py").exists()])


def test_rooms_of_multinode_are_those_of_contract():
    rooms = re.findall(r"^\| `multinode/(\w+)/` \|", PAGE, re.MULTILINE)
    assert rooms == [room for layer in layers("multinode")[1:] for room in layer.split(" | ")]


@pytest.mark.parametrize("package", ["infini_run", "csrc"])
def test_every_folder_is_on_map(package):
    folders = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*") if path.is_dir()]
    sources = [folder for folder in folders if list((ROOT / folder).glob("*.py" if package != "csrc" else "*.[ch]"))]
    names = {str(folder).removeprefix("infini_run/") for folder in sources} - {"csrc/include"}
    assert names
    assert [name for name in sorted(names) if f"`{name}/`" not in PAGE] == []


@pytest.mark.parametrize("heading", [line for line in PAGE.splitlines() if line.startswith("## The path of")])
def test_functions_of_path_are_in_files_of_step(heading):
    steps = [step for table in tables_below(heading) for step in table]
    assert len(steps) > 7
    for _, files, step in steps:
        sources = [path_of(name) for name in FILE.findall(files + step)]
        text = "".join(path.read_text() for path in sources if path)
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", step if sources else ""):
            assert re.search(rf"\b{name}\b", text), f"{name} is in none of {files}"
