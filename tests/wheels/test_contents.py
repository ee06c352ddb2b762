"""What is in dist/: one wheel for each libc and architecture, that needs what its name says and no more."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from infini_run.version import VERSION
from tests.support.paths import ROOT
from tests.wheels.conftest import DIST, run, wheel_of

pytestmark = pytest.mark.wheels
TOOLS = next((path.parent for path in (ROOT / ".venv").glob("wheels-*/bin/auditwheel")), Path())
TAGS = [f"{libc}_{machine}" for libc in ("manylinux_2_17", "musllinux_1_2") for machine in ("x86_64", "aarch64")]
MACHINE = {"x86_64": 62, "aarch64": 183}  # elf.h: EM_X86_64, EM_AARCH64
PROGRAMS = [
    "infini_run/irun-guard",
    *(f"infini_run-{VERSION}.data/scripts/{name}" for name in ("infini-run", "infini-job")),
]


def test_there_is_the_sdist_and_a_wheel_for_each_libc_and_architecture():
    names = [f"infini_run-{VERSION}-cp310-abi3-{tag}.whl" for tag in TAGS]
    assert sorted(path.name for path in DIST.glob("*infini*")) == sorted([*names, f"infini_run-{VERSION}.tar.gz"])


@pytest.mark.parametrize("tag", TAGS)
def test_auditwheel_agrees_with_the_name(tag):
    """Every symbol that the extension takes from a libc is in the oldest one that the name promises."""
    said = run(TOOLS / "auditwheel", "show", wheel_of(tag))
    assert re.search(rf'is\s+consistent\s+with\s+the\s+following\s+platform\s+tag:\s+"{tag}"', said), said


@pytest.mark.parametrize("tag", TAGS)
def test_nothing_is_used_that_is_not_in_the_limited_api_of_3_10(tag):
    run(TOOLS / "abi3audit", "--strict", "--assume-minimum-abi3", "3.10", wheel_of(tag))


@pytest.mark.parametrize("tag", TAGS)
def test_the_programs_in_it_are_static_and_of_its_architecture(tag, tmp_path):
    with zipfile.ZipFile(wheel_of(tag)) as archive:
        for name in PROGRAMS:
            program = archive.read(name)
            assert program[:4] == b"\x7fELF"
            assert (
                int.from_bytes(program[18:20], "little")
                == MACHINE[tag.rpartition("_")[2] if "x86" not in tag else "x86_64"]
            )
            headers, size, count = (
                int.from_bytes(program[at : at + n], "little") for at, n in ((32, 8), (54, 2), (56, 2))
            )
            kinds = [int.from_bytes(program[headers + i * size :][:4], "little") for i in range(count)]
            assert not {2, 3} & set(kinds), f"{name} has PT_DYNAMIC or PT_INTERP: it would need a loader"
