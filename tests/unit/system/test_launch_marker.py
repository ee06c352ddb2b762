"""csrc/sys/procfs.c: whether a process has the mark of a launch, while it executes one program after the other."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.build_c import WITH_CORE, build
from tests.support.waiting import LIMIT_S

MARK = "INFINI_RUN_ID=0123456789abcdef"
LOOKS = 3000


@WITH_CORE
@pytest.mark.parametrize("size", [0, 9_000, 100_000])
def test_a_mark_is_never_missed_in_a_process_that_executes_itself_again_and_again(size):
    """The memory that is read goes away at an execve, and the rest of it reads as its end."""
    name, _, value = MARK.partition("=")
    filler = {"FILLER": "x" * size} if size else {}
    program = build("marks.c")
    with subprocess.Popen([program], env={**filler, name: value}) as process:
        try:
            done = subprocess.run(
                [program, str(process.pid), MARK, str(LOOKS)],
                capture_output=True, text=True, timeout=LIMIT_S, check=True,
            )  # fmt: skip
        finally:
            process.kill()
    found, none, _ = map(int, done.stdout.split())
    assert none == 0
    assert found > 0
