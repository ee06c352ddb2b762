"""A PyTorch training on a real Slurm that loses ten agents, one after the other, and then a node, and ends as if it
had not."""

# ruff: noqa: F811

from __future__ import annotations

import pytest

from tests.multinode.test_elastic_slurm import bed, run  # noqa: F401
from tests.multinode.test_elastic_ssh import launcher_of
from tests.support.elastic_training import LOSSES, NODES, await_start, final_loss, lose_nodes, training

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group(__name__)]


def test_ten_losses_and_a_node_that_goes_down_change_no_digit_of_the_final_loss(run, case, bed, infini_run, tmp_path):
    """The loss is that of as many ranks on one machine, which nobody has disturbed."""
    flags = ("--spares=1", "--node_timeout=5", "--join_window=60")
    command = run(*flags, *training(tmp_path / "lost"))
    lose_nodes(command, launcher_of)
    await_start(command, LOSSES)
    bed.call("node-down", "2")
    try:
        found = final_loss(command)
        case.end()
    finally:
        bed.call("node-up", "2")
    whole = infini_run("--standalone", f"--nproc_per_node={NODES}", *training(tmp_path / "whole"))
    assert found == final_loss(whole)
