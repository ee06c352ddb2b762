"""Which ranks are slow, from the times of PROGRESS= alone: with collectives and without, and of many nodes."""

from __future__ import annotations

import random

import pytest

from infini_run.report.pace import Pace

SEEDS = range(20)


def reports(*, nproc=4, steps=60, step_s=0.2, slow=None, late_s=None, meet=True, before=True, seed=0):
    """Return (time, rank, value) of each PROGRESS=, in the order of time.

    Args:
        slow: A factor for the steps of a rank.
        late_s: How much later a rank starts.
        meet: The ranks wait for each other in each step.
        before: They report before that, not after.
    """
    chance, sent = random.Random(seed), []
    now_s = {rank: 100.0 + (late_s or {}).get(rank, 0.0) for rank in range(nproc)}
    for value in range(1, steps + 1):
        for rank in now_s:
            now_s[rank] += step_s * (slow or {}).get(rank, 1.0) * chance.uniform(0.95, 1.1)
            if before:
                sent.append((now_s[rank] + chance.uniform(0, 3e-4), rank, value))
        if meet:
            now_s = dict.fromkeys(now_s, max(now_s.values()) + 0.002)
        if not before:
            sent += [(at_s + chance.uniform(0, 3e-4), rank, value) for rank, at_s in now_s.items()]
    return sorted(sent)


def constant(*, nproc=4, steps=60, step_s=0.1, slow=2, every=1, late_s=0.0, jitter_s=1e-4, drift=0.9, seed=0):
    """Return the same of ranks whose steps differ by little, and much like the step before: sleeps.

    Args:
        every: They meet in each step that this divides. 0: never.
        drift: What the difference of a step has in common with that of the one before.
    """
    chance, sent = random.Random(seed), []
    now_s = {rank: 100.0 + chance.uniform(0, 0.01) + late_s * (rank == slow) for rank in range(nproc)}
    more_s = {rank: chance.gauss(0, jitter_s) for rank in now_s}
    for value in range(1, steps + 1):
        for rank in now_s:
            more_s[rank] = drift * more_s[rank] + (1 - drift**2) ** 0.5 * chance.gauss(0, jitter_s)
            now_s[rank] += step_s * (2.0 if rank == slow and not late_s else 1.0) + more_s[rank]
            sent.append((now_s[rank] + chance.expovariate(1e4), rank, value))
        if every and value % every == 0:
            now_s = {rank: max(now_s.values()) + 1e-3 + chance.expovariate(2e4) for rank in now_s}
    return sorted(sent)


def of_nodes(sent):
    """Return (time, rank, value, count) as a head gets it: the latest of each rank once a second."""
    messages, latest = [], {}
    for at_s, rank, value in sent:
        due_s = (latest.get(rank) or (at_s + rank / 10, 0, 0, 0))[0]
        if at_s > due_s and latest[rank][3]:
            messages.append((due_s, (latest[rank][1], rank, *latest[rank][2:])))
            latest[rank] = (due_s + 1.0, at_s, value, 1)
        else:
            latest[rank] = (due_s, at_s, value, latest.get(rank, (0, 0, 0, 0))[3] + 1)
    return [message for _, message in sorted(messages)]


def measured(sent, **given):
    pace = Pace()
    for at_s, rank, value, *count in sent:
        pace.note(rank, value, at_s, reports=count[0] if count else 1, **given)
    return pace


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_slow_rank_is_found_when_ranks_meet_in_each_step(rank, seed):
    """All steps take equally long: the slow one is the last to report, and the others wait for it."""
    (slow,) = measured(reports(slow={rank: 2.0}, seed=seed)).slow_ranks()
    assert slow.rank == rank
    assert slow.step_s == pytest.approx(0.41, rel=0.1)
    assert slow.others_s == pytest.approx(0.21, rel=0.1)
    assert slow.waited_s == pytest.approx(slow.steps * 0.2, rel=0.2)
    assert slow.steps > 30
    assert slow.is_costly


@pytest.mark.parametrize(
    "given",
    [{"steps": 30}, {}, {"drift": 0.0, "steps": 30}, {"jitter_s": 2e-3}, {"nproc": 8}],
    ids=["short", "long", "noise", "more", "many"],
)
def test_slow_rank_is_found_though_steps_are_constant(given):
    """Their small differences drift, as lags of ranks that don't meet do."""
    found = [[slow.rank for slow in measured(constant(**given, seed=seed)).slow_ranks()] for seed in SEEDS]
    assert found == [[2]] * len(SEEDS)


@pytest.mark.parametrize("given", [{}, {"drift": 0.0}, {"jitter_s": 2e-3}, {"nproc": 8}])
def test_rank_that_started_late_is_not_slow_though_steps_are_constant(given):
    runs = [constant(every=0, late_s=0.06, **given, seed=seed) for seed in SEEDS]
    assert [measured(sent).slow_ranks() for sent in runs] == [()] * len(SEEDS)


@pytest.mark.parametrize("every", [2, 3, 4, 8, 12])
def test_slow_rank_is_found_when_ranks_meet_in_some_steps(every):
    """Such as in the last one of those whose gradients are accumulated."""
    for seed in range(10):
        (slow,) = measured(constant(every=every, steps=96, jitter_s=2e-3, seed=seed)).slow_ranks()
        assert slow.rank == 2
        assert slow.step_s == pytest.approx(0.2, rel=0.1)
        assert slow.others_s == pytest.approx(0.1, rel=0.1)
        assert slow.waited_s == pytest.approx(slow.steps * 0.1, rel=0.2)


def test_pauses_of_others_are_no_waits():
    """Each rank is as fast as the others on the whole, and pauses at its own time."""
    for seed in SEEDS:
        sent = constant(every=0, steps=100, jitter_s=2e-3, seed=seed)
        paused = [(at_s + 1.1 * ((value + 3 * rank) // 10) * (rank != 2), rank, value) for at_s, rank, value in sent]
        assert measured(sorted(paused)).slow_ranks() == ()


@pytest.mark.parametrize("rank", [0, 2])
def test_slow_rank_is_found_when_ranks_never_meet(rank):
    (slow,) = measured(reports(slow={rank: 2.0}, meet=False)).slow_ranks()
    assert (slow.rank, slow.waited_s) == (rank, 0.0)
    assert slow.step_s == pytest.approx(2 * slow.others_s, rel=0.1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"slow": {2: 1.2}},
        {"slow": {2: 2.0}, "before": False},
        {"meet": False},
        {"meet": False, "slow": {2: 1.05}},
        {"meet": False, "late_s": {1: 0.15}},
        {"step_s": 0.02, "steps": 500},
    ],
    ids=["even", "a little", "after the collective", "apart", "apart, a little", "apart, started late", "fast"],
)
def test_nobody_is_named_where_nobody_is_slow_enough_or_nothing_shows(given):
    assert [measured(reports(**given, seed=seed)).slow_ranks() for seed in SEEDS] == [()] * len(SEEDS)


def test_two_ranks_are_compared_with_each_other():
    assert [slow.rank for slow in measured(reports(nproc=2, slow={1: 2.0})).slow_ranks()] == [1]


def test_rank_alone_is_never_slow():
    assert measured(reports(nproc=1)).slow_ranks() == ()


@pytest.mark.parametrize("step_s", [0.05, 0.3, 2.0])
def test_head_finds_slow_rank_from_message_per_second(step_s):
    sent = of_nodes(reports(step_s=step_s, slow={2: 2.0}, steps=int(100 / step_s)))
    assert len(sent) < 900
    (slow,) = measured(sent, error_s=1e-3).slow_ranks()
    assert slow.rank == 2
    assert slow.step_s == pytest.approx(2.08 * step_s, rel=0.15)


def test_head_names_nobody_where_clocks_are_too_unsure():
    sent = of_nodes(reports(slow={2: 2.0}, steps=300))
    assert measured(sent, error_s=0.15).slow_ranks() == ()
    assert measured(sent, error_s=float("inf")).slow_ranks() == ()


def test_head_names_nobody_where_nobody_is_slow():
    runs = [of_nodes(reports(step_s=0.3, steps=200, seed=seed)) for seed in SEEDS]
    assert [measured(sent).slow_ranks() for sent in runs] == [()] * len(SEEDS)


def test_rank_that_was_slow_for_a_while_stays_in_the_report():
    sent = reports(slow={2: 3.0}, steps=40)
    sent += [(at_s + sent[-1][0] - 99.0, rank, value + 40) for at_s, rank, value in reports(steps=200)]
    pace = measured(sent)
    assert pace.slow == frozenset()
    (slow,) = pace.slow_ranks()
    assert slow.rank == 2
    assert 20 < slow.steps < 100


def test_values_may_be_samples_instead_of_steps():
    sent = [(at_s, rank, value * 128) for at_s, rank, value in reports(slow={2: 2.0})]
    (slow,) = measured(sent).slow_ranks()
    assert (slow.rank, round(slow.step_s, 1)) == (2, 0.4)


def test_rank_that_stops_reporting_leaves_the_comparison_to_the_others():
    sent = [each for each in reports(slow={2: 2.0}, steps=100) if each[1] or each[2] < 10]
    assert [slow.rank for slow in measured(sent).slow_ranks()] == [2]


def test_rate_is_that_of_the_last_samples_and_falls_in_silence():
    pace = Pace()
    for step in range(100):
        pace.note(0, 10 * step, 100.0 + step / 4)
    assert pace.value(0) == 990
    assert pace.rate(0, 124.8) == pytest.approx(40.0)
    assert pace.rate(0, 224.75) < 4.0
    assert (pace.value(1), pace.rate(1, 125.0)) == (None, None)


def test_clock_or_value_that_goes_back_is_ignored():
    pace = Pace()
    pace.note(0, 5, 100.0)
    pace.note(0, 4, 101.0)
    pace.note(0, 6, 99.0)
    assert pace.latest() == {0: (5, 100.0)}


def test_sentence_names_the_times():
    (slow,) = measured(reports(slow={2: 2.0})).slow_ranks()
    assert slow.text().startswith("was slow: 4")
    assert " ms a step, others 2" in slow.text()
    assert "; the others waited " in slow.text()
    assert slow.text(is_one_of_many=True).endswith(" for them")
