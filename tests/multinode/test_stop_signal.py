"""What a signal that asks for the end means to a head: who got it, and what came before. Pure."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

import pytest

from infini_run.multinode.head.stop_signal import (
    AGENT,
    ENDING_AGENT,
    HEAD,
    IGNORE,
    KILL,
    LAUNCHER,
    LOSABLE_AGENT,
    MEANINGS,
    NOTE,
    STOP,
    STOP_OR_FAIL,
    meaning,
)


def test_no_pair_is_forgotten():
    assert set(MEANINGS) == {HEAD, LAUNCHER, AGENT, LOSABLE_AGENT, ENDING_AGENT}
    assert all(len(row) == 4 for row in MEANINGS.values())


@pytest.mark.parametrize(
    ("who", "found"),
    [(HEAD, STOP), (LAUNCHER, STOP), (LOSABLE_AGENT, STOP), (AGENT, STOP_OR_FAIL), (ENDING_AGENT, IGNORE)],
)
def test_the_first_asks_for_the_end(who, found):
    assert meaning(who, SIGTERM, first=0, since_s=1e9, was_signalled=False) == found


@pytest.mark.parametrize("who", [HEAD, LAUNCHER])
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_the_second_kills_where_somebody_can_mean_it(who, number):
    assert meaning(who, number, first=number, since_s=1.0, was_signalled=True) == KILL


@pytest.mark.parametrize("who", [AGENT, LOSABLE_AGENT])
def test_a_scheduler_that_signals_an_agent_twice_has_meant_it_once(who):
    assert meaning(who, SIGTERM, first=SIGTERM, since_s=1.0, was_signalled=True) == NOTE


@pytest.mark.parametrize("who", [HEAD, LAUNCHER, AGENT, LOSABLE_AGENT])
def test_one_elsewhere_is_the_first_there(who):
    assert meaning(who, SIGTERM, first=SIGTERM, since_s=1.0, was_signalled=False) == NOTE


def test_a_term_at_once_is_the_same_request_and_a_key_is_another():
    """timeout(1) sends TERM to the process, and then to its group."""
    assert meaning(HEAD, SIGTERM, first=SIGTERM, since_s=0.1, was_signalled=True) == IGNORE
    assert meaning(LAUNCHER, SIGTERM, first=SIGTERM, since_s=0.1, was_signalled=True) == NOTE
    assert meaning(HEAD, SIGINT, first=SIGINT, since_s=0.1, was_signalled=True) == KILL
    assert meaning(HEAD, SIGTERM, first=SIGINT, since_s=0.1, was_signalled=True) == KILL
