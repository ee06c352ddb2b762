"""What the fuzzers once went through, and found, holds with any compiler: tests/c/fuzz; `make fuzz` looks for
more."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.build_c import WITH_CORE, build
from tests.support.paths import C
from tests.support.waiting import LIMIT_S

CORPUS = C / "fuzz"


@WITH_CORE
@pytest.mark.parametrize(("target", "instead_of"), [("pump", ""), ("stat", "*")])
def test_every_input_that_a_fuzzer_kept_is_still_handled(target, instead_of):
    inputs = sorted(map(str, (CORPUS / target).iterdir()))
    program = build(f"fuzz/{target}.c", "fuzz/replay.c", instead_of=instead_of)
    done = subprocess.run([program, *inputs], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(inputs)} inputs\n"), done.stderr
