"""The files of the C core: none needs another that needs it, and a folder needs only those below it."""

from __future__ import annotations

import subprocess
from graphlib import TopologicalSorter
from itertools import product

from tests.support.build_c import CORE, compiler

ORDER = ("sys", "spawn", "io", "teardown", "children", "group")  # as csrc/group/group.h has it


def symbols(path, made):
    """What a file defines, and what it asks for."""
    words = [compiler(), "-std=c11", "-D_GNU_SOURCE", f"-I{CORE}", "-c", str(path), "-o", str(made)]
    subprocess.run(words, check=True)
    lines = subprocess.run(["nm", made], check=True, capture_output=True, text=True).stdout.splitlines()
    kinds = [line.split()[-2:] for line in lines]
    return {name for kind, name in kinds if kind in "TDBR"}, {name for kind, name in kinds if kind == "U"}


def test_files_need_only_those_below_them(tmp_path):
    found = {path: symbols(path, tmp_path / "made.o") for name in ORDER for path in (CORE / name).glob("*.c")}
    assert len(found) > 20
    needs = {path: set() for path in found}
    for one, other in product(found, found):
        if one != other and found[one][1] & found[other][0]:
            needs[one].add(other)
    assert list(TopologicalSorter(needs).static_order())  # CycleError names a cycle
    upwards = [
        (one.name, other.name)
        for one, others in needs.items()
        for other in others
        if ORDER.index(one.parent.name) < ORDER.index(other.parent.name)
    ]
    assert upwards == []
