"""Small C programs of the tests, built from the core's own files with the compiler at hand."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import infini_run
from tests.support.paths import ROOT, C

CORE = ROOT / "csrc"
WITH_CORE = pytest.mark.xdist_group("programs_with_core")


def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc"))
    return found if found is not None else pytest.skip("there is no C compiler here")


@functools.cache
def build_guard() -> str:
    """The guard as its sources are, linked so that a library can be loaded before it; the one under test, where it
    was built so."""
    installed = Path(infini_run.__file__).parent / "irun-guard"
    if b"/ld-" in installed.read_bytes():
        return str(installed)
    made = build(
        "../../csrc/guard/main.c",
        "../../csrc/guard/find_leftovers.c",
        "../../csrc/teardown/fork_chase.c",
        "../../csrc/sys/clock.c",
        "../../csrc/sys/procfs.c",
        instead_of="*",
    )
    named = Path(made).with_name("irun-guard")
    os.rename(made, named)
    return str(named)


def _words() -> list[str]:
    return [compiler(), "-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-pthread", f"-I{CORE}"]


@functools.cache
def _core_objects() -> dict[str, str]:
    """Each file of the core, and what it is compiled to. Tests that need it are WITH_CORE, so one worker compiles."""
    sources = sorted(path for path in CORE.glob("*/*.c") if path.parent.name not in ("guard", "start"))
    folder = tempfile.mkdtemp()
    done = subprocess.run(
        [*_words(), "-c", *map(str, sources)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {path.name: f"{folder}/{path.stem}.o" for path in sources}


@functools.cache
def build(source: str, *more: str, instead_of: str = "") -> str:
    """Build tests/c/`source`, and `more` of tests/c/, together with the core; return the path of the program.

    instead_of: a file of the core that the source #includes, to reach what is static in it; "*": no file is added.
    """
    parts = [] if instead_of == "*" else [made for name, made in _core_objects().items() if name != instead_of]
    made = Path(tempfile.mkdtemp()) / Path(source).stem
    words = [*_words(), "-o", str(made), *(str(C / name) for name in (source, *more)), *parts]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(made)
