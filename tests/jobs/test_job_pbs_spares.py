"""Jobs on a real OpenPBS that lose a node and go on: `make pbs`, as test_job_pbs_real.py."""

from __future__ import annotations

import sys

import pytest

from tests.jobs.test_job_pbs_real import RealPbs, clear, pytestmark, started  # noqa: F401
from tests.support.waiting import LIMIT_S, until

SPARE = (
    "--slots=2",
    "--slots_per_node=1",
    "--slot_type=cpu",
    "--spares=1",
    "--run_options=--node_timeout=3 --grace=1",
)
TELLS = """
at={save}/$INFINI_JOB_NAME.$TORCHELASTIC_RESTART_COUNT.$RANK.$(uname -n)
echo $PPID > $at.new && mv $at.new $at
[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 1000
until [ -e {save}/go ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def bed():
    with started() as bed:
        (bed.home / "tells.sh").write_text(TELLS.format(save=bed.save))
        yield bed


@pytest.fixture
def pbs(bed):
    yield bed
    clear(bed)
    for path in bed.save.iterdir():
        path.unlink()


def ran(pbs: RealPbs, name: str, attempt: int, size: int = 2) -> dict[str, int]:
    """The hosts of an attempt, by its ranks, with the agents there, as the hosts number them."""

    def paths():
        return sorted(pbs.save.glob(f"{name}.{attempt}.?.node?"))

    until(lambda: len(paths()) == size, LIMIT_S)
    return {path.suffix[1:]: int(path.read_text()) for path in paths()}


@pytest.mark.parametrize("how", ["killed", "suspended", "cut"])
def test_a_node_that_is_lost_is_replaced_by_the_spare_and_serves_as_one_when_it_is_back(pbs, how):
    name = pbs.submit(*SPARE, "--", "sh", pbs.home / "tells.sh")
    agents = ran(pbs, name, 0)
    assert list(agents) == ["node1", "node2"]
    if how == "cut":
        pbs.tell("cable", 2, "down")
    else:
        pbs.tell("on", "node2", "kill", "-KILL" if how == "killed" else "-STOP", agents["node2"])
    try:
        hosts = list(ran(pbs, name, 1))
    finally:
        pbs.tell("cable", 2, "up")
    assert hosts == ["node1", "node3"] or (how != "cut" and hosts == ["node1", "node2"])  # it may be back before
    (other,) = {"node2", "node3"} - set(hosts)
    until(lambda: pbs.status(name)[0]["spares"] == [other], LIMIT_S)
    (pbs.save / "go").touch()
    assert pbs.wait(name)[0]["headline"] == "COMPLETED"
    assert "lost node 1 (node2)" in pbs.logs(name)


def test_a_script_by_hand_goes_on_without_a_node(pbs):
    """There is no spare, and the world shrinks."""
    flags = "--nnodes=1:2 --join_window=1 --node_timeout=3 --grace=1 --export=INFINI_JOB_NAME"
    words = f"{sys.executable} -m infini_run --engine=pbs {flags} sh {pbs.home}/tells.sh"
    lines = ("-l select=2:ncpus=1", "-l place=scatter", "-W tolerate_node_failures=all", "-j oe")
    text = "".join(f"#PBS {line}\n" for line in lines)
    script = pbs.home / "by-hand.sh"
    script.write_text(f"#!/bin/sh\n{text}cd {pbs.save}; export INFINI_JOB_NAME=hand\n{words} && touch well\n")
    assert pbs.user("qsub", script).returncode == 0
    assert list(ran(pbs, "hand", 0)) == ["node1", "node2"]
    pbs.tell("cable", 2, "down")
    try:
        assert list(ran(pbs, "hand", 1, size=1)) == ["node1"]
    finally:
        pbs.tell("cable", 2, "up")
    (pbs.save / "go").touch()
    until(lambda: (pbs.save / "well").exists(), LIMIT_S)


def test_a_node_that_goes_down_is_replaced_by_the_spare(bed):
    """The last one here: the bed has lost that node for good, and PBS waits for it at the end of the job."""
    name = bed.submit(*SPARE, "--", "sh", bed.home / "tells.sh")
    assert list(ran(bed, name, 0)) == ["node1", "node2"]
    bed.tell("node-down", 2)
    assert list(ran(bed, name, 1)) == ["node1", "node3"]
    (bed.save / "go").touch()
    (end,) = bed.wait(name)
    assert (end["headline"], end["nodes"], end["lost"]) == ("COMPLETED", ["node1", "node3"], ["node2"])
