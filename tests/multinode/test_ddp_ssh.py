"""A PyTorch training over real sshd that loses ten nodes, one after the other, and ends as if it had not."""

# ruff: noqa: F811

from __future__ import annotations

import json

import pytest

from tests.multinode.test_elastic_ssh import launcher_of
from tests.multinode.test_many_ssh import bed, many, no_agent_left  # noqa: F401
from tests.support.elastic_training import LOSSES, NODES, final_loss, lose_nodes, training
from tests.support.processes import marked
from tests.support.waiting import until

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group(__name__)]


def test_ten_losses_replaced_by_spares_change_no_digit_of_the_final_loss(many, infini_run, tmp_path):
    """The loss is that of as many ranks on one machine, which nobody has disturbed."""
    command = many(f"--nnodes={NODES}", "--spares=1", f"--report={tmp_path}/r", *training(tmp_path / "lost"), nproc=1)
    lose_nodes(command, launcher_of)
    found = final_loss(command)
    until(lambda: not marked())
    whole = infini_run("--standalone", f"--nproc_per_node={NODES}", *training(tmp_path / "whole"))
    assert found == final_loss(whole)
    report = json.loads((tmp_path / "r").read_text())
    assert (report["restarts"], report["world_size"]) == (LOSSES, NODES)
