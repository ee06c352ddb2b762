"""Whether ranks of an earlier attempt live on a node is not claimed where it cannot be seen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.hidden_proc import HIDING, hidden
from tests.support.launch_shapes import as_root, strace, with_strace

ASK = """
from infini_run.multinode.agent.old_world import wait_until_gone
from infini_run.system.procfs import ProcessTable
print(wait_until_gone("ir-none", 1.0), bool(ProcessTable()._processes))
"""


def ask(*under):
    done = subprocess.run([*under, sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_old_ranks_are_gone_where_none_is_seen():
    assert ask() == ["True", "True"]


@as_root
@pytest.mark.parametrize("hiding", HIDING)
def test_old_ranks_are_not_gone_without_proc(hiding):
    assert ask(*hidden(hiding)) == ["False", "False"]


@with_strace
def test_old_ranks_are_not_gone_without_descriptors(tmp_path):
    """The list of processes can be read, and the file of one cannot."""
    failing = ("-P", "/proc/1/environ", "-e", "trace=openat", "-e", "inject=openat:error=EMFILE")
    assert ask(*strace(tmp_path / "trace", *failing)) == ["False", "True"]
