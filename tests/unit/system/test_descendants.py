"""Who is a descendant: on tables of processes that no test could start, against a model that takes its time."""

from __future__ import annotations

import subprocess

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.build_c import WITH_CORE, build
from tests.support.waiting import LIMIT_S

pytestmark = WITH_CORE
SELF, SPAWN = 10, 1000


def ours_of(table):
    """table: {pid: (parent, start, is_foreign)}"""
    lines = [f"{SELF} {SPAWN}", *(f"{pid} {p} {start} {f:d}" for pid, (p, start, f) in sorted(table.items()))]
    program = build("descendants.c", instead_of="leftovers.c")
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return set(map(int, done.stdout.split()))


def model(table):
    ours, before = set(), None
    while ours != before:
        before = set(ours)
        for pid, (parent, start, foreign) in table.items():
            if start >= SPAWN and not foreign and (parent == SELF or parent in ours):
                ours.add(pid)
    return ours


pids = st.integers(1, 40)
starts = st.sampled_from([SPAWN - 1, SPAWN, SPAWN + 1])
process = st.tuples(pids, starts, st.sampled_from([False, False, False, True]))


@given(st.dictionaries(pids.filter(lambda pid: pid != SELF), process))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_descendants_are_those_whose_parents_lead_to_us_whatever_the_table(table):
    """Circles too: the table is not read in one moment, and a number may be given again meanwhile."""
    table[SELF] = (1, 0, False)
    assert ours_of(table) == model(table)


def test_the_deepest_tree_of_a_full_node_is_found_in_any_order_of_numbers():
    """20,000 deep: a search whose time grows with the square of that would not end here."""
    depth = 20_000
    up = {SELF: (1, 0, False)} | {SELF + n: (SELF + n - 1, SPAWN, False) for n in range(1, depth)}
    assert len(ours_of(up)) == depth - 1
    top = SELF + depth
    down = {SELF: (1, 0, False), top: (SELF, SPAWN, False)}
    down |= {pid: (pid + 1, SPAWN, False) for pid in range(SELF + 1, top)}
    assert len(ours_of(down)) == depth
