"""Nodes that are cut off or stopped: after a loss no rank of the old world writes beside one of the new world, and
what is shorter than --node_timeout restarts nothing.
"""

from __future__ import annotations

import random
import signal
import time
from functools import partial

import pytest

from bed import scratch
from cabled import cabled_hosts
from elastic import kill
from membership import LOST, TIMEOUT_S, WITHIN_S, Lab, check_end, cut, healed, one_way, ours, unreached
from tests.support.rows import SEED

pytestmark = [pytest.mark.slow, pytest.mark.root]

SHORT_CUTS = 3  # turns, of four faults each; a timeout passes between two
BY_HAND = pytest.mark.parametrize("by_hand", [False, True], ids=["ssh", "manual"])


@pytest.fixture(scope="module")
def lab(bed):
    with scratch() as folder, cabled_hosts(folder) as hosts:
        yield Lab(bed, hosts, folder)


def kind_of(lab, by_hand):
    return ours(lab.bed, f"--node_timeout={TIMEOUT_S:g}")[by_hand]


@BY_HAND
@pytest.mark.parametrize("how", unreached())
def test_no_rank_of_an_old_world_writes_after_a_loss(lab, how, by_hand):
    assert lab.count_late_writes(kind_of(lab, by_hand), unreached()[how], WITHIN_S) == 0


@BY_HAND
def test_short_cuts_and_stops_restart_nothing(lab, by_hand):
    """Nodes are cut off, both ways and one way, and the head is stopped, each for up to a third of the timeout."""
    kind, chance = kind_of(lab, by_hand), random.Random(SEED)
    with lab.job(kind) as job:
        world = job.first_world()
        head = job.agent_of(world[0]) if by_hand else job.head()
        for turn in range(SHORT_CUTS):
            lost, short_s = chance.choice(world[LOST:]), TIMEOUT_S / 3 * (1.0 if turn % 2 else chance.random())
            for loss in (cut, partial(one_way, "INPUT"), partial(one_way, "OUTPUT")):
                with healed(lab.hosts, lost):
                    loss(job, lost)
                    time.sleep(short_s)
                time.sleep(TIMEOUT_S)
            kill([head], signal.SIGSTOP)
            time.sleep(short_s)
            kill([head], signal.SIGCONT)
            time.sleep(TIMEOUT_S)
        assert len(job.starts()) == len(world), job.said()
        check_end(job)
