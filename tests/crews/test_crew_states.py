"""The table of a crew's states: complete, drawn in the document as it is, and no more than the words say."""

from __future__ import annotations

import pytest

from infini_run.crews.supervision import worker_states
from infini_run.crews.supervision.supervised_worker import SupervisedWorker
from infini_run.crews.supervision.worker_states import EVENTS, IMPOSSIBLE, STATES, TABLE
from tests.support.paths import ROOT

DOC = ROOT / "docs/architecture/crews.md"


def test_no_cell_is_blank():
    assert tuple(TABLE) == STATES
    for state in STATES:
        assert tuple(TABLE[state]) == tuple(EVENTS)


def test_every_cell_leads_somewhere_and_has_an_action_that_is_there():
    for row in TABLE.values():
        for after, action in row.values():
            if action != IMPOSSIBLE:
                assert after in STATES
                assert not action or callable(getattr(SupervisedWorker, f"_{action}"))


def test_what_is_impossible_raises():
    with pytest.raises(AssertionError, match="a worker that is ready cannot have a 'reaped'"):
        worker_states.transition("ready", "reaped")


def test_the_document_draws_the_table_as_it_is():
    assert worker_states.draw() in DOC.read_text()


@pytest.mark.parametrize("state", ["starting", "ready", "busy"])
def test_whatever_ends_unasked_has_failed(state):
    for event in ("channel_end", "channel_broken", "exit"):
        assert TABLE[state][event][0] == "failed"


def test_every_state_reaches_its_end():
    """By what comes of itself once a process is gone, or its time is up."""
    for state in ("starting", "ready", "busy", "stopping", "failed"):
        after = state
        for event in ("channel_broken", "exit", "reaped"):
            after, _ = worker_states.transition(after, event)
        assert after == ("stopped" if state == "stopping" else "failed")


def test_only_one_that_is_gone_is_started():
    assert [state for state in STATES if TABLE[state]["start"][1] != IMPOSSIBLE] == ["stopped", "failed"]
