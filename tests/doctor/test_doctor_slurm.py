"""--doctor --engine=slurm in an allocation of a real Slurm: a task of its own on each node."""

from __future__ import annotations

import pytest

from infini_run.doctor.finding import OK, PROBLEM
from infini_run.version import VERSION
from tests.multinode.test_many_slurm import Allocation, Slurm
from tests.support.cluster import need
from tests.support.processes import OURS

pytestmark = pytest.mark.xdist_group(__name__)


@pytest.fixture(scope="module")
def two():
    need("slurm-wlm", "munge")
    slurm = Slurm(nodes=2)
    allocation = Allocation(slurm, "-N2")
    yield allocation
    allocation.close()
    slurm.close()


@pytest.fixture
def over_slurm(two, case, doctor):
    def ask(*words, **more):
        environ = {**two.env, **case.env, OURS[0]: OURS[1], **more}
        return doctor("--engine=slurm", *words, env=environ, cwd="/tmp")

    return ask


def test_every_node_of_the_allocation_is_looked_at(over_slurm, case):
    answer = over_slurm()
    assert len(answer.machines) == 3
    for name in list(answer.machines)[1:]:
        assert answer.of("reach", name) == (OK, f"reached; infini-run there is {VERSION}, as here")
        assert answer.of("launch", name) == answer.of("launch")
    case.end()


def test_a_python_that_is_not_on_the_nodes_is_named_for_each(over_slurm, case):
    answer = over_slurm("--remote_python=/nosuch/python")
    assert answer.code == 1
    for name in list(answer.machines)[1:]:
        grade, text = answer.of("reach", name)
        assert grade == PROBLEM
        assert text.startswith("srun exited with ")
        assert text.endswith("add --remote_python=PATH, a Python there with infini-run")
    case.end()
