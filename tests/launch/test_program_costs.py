"""What several programs cost: two of 32 ranks what one of 64 costs, in system calls and in user instructions."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys

import pytest

from tests.support.command import COMMAND
from tests.support.launch_shapes import with_strace

WITHIN = 1.05
ONE = ("--standalone", "--nproc_per_node=64", "true")  # with a free port, as programs have
TWO = ("--program=a", "--nproc_per_node=32", "true", ":", "--program=b", "--nproc_per_node=32", "true")


def run(*words, **environ):
    """What a launch writes to stderr."""
    return subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True, check=True).stderr


@with_strace
def test_two_programs_make_the_system_calls_of_one(tmp_path):
    """Each is the middle of five: how often the launcher waits differs from run to run."""
    counts = {ONE: [], TWO: []}
    for _ in range(5):
        for words, found in counts.items():
            run("strace", "-c", "-o", tmp_path / "counts", *COMMAND, "--console=prefix", *words)
            found.append(int((tmp_path / "counts").read_text().splitlines()[-1].split()[3]))
    one, two = (statistics.median(found) for found in counts.values())
    assert two < WITHIN * one, counts


@pytest.mark.skipif(shutil.which("valgrind") is None or "TEST_PYTHON" in os.environ, reason="needs valgrind")
def test_two_programs_execute_the_instructions_of_one(tmp_path):
    """valgrind knows no clone of its own kind, and no pidfd: the core forks, and reaps by SIGCHLD. Each is the
    least of up to six, if need be: on a busy machine the launcher waits more often, for twice the
    instructions."""
    file, debug = tmp_path / "counts", "fork,nopidfd,nocgroup"
    valgrind = ("valgrind", "-q", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={file}")
    counts = {ONE: [], TWO: []}
    for _ in range(6):
        for words, found in counts.items():
            run(*valgrind, sys.executable, "-m", "infini_run", "--console=prefix", *words, INFINI_RUN_DEBUG=debug)
            found.append(int(re.search(r"^summary: (\d+)$", file.read_text(errors="replace"), re.MULTILINE)[1]))
            file.unlink()
        one, two = (min(found) for found in counts.values())
        if two < WITHIN * one:
            break
    assert two < WITHIN * one, counts
