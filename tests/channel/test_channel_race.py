"""The seed's race (EXO): a queue that two processes own and close. Over a channel the same schedules are harmless."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.command import CHILDREN
from tests.support.waiting import LIMIT_S


def play(how, case):
    words = [sys.executable, str(CHILDREN / "race.py"), how, case]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return json.loads(done.stdout)


ERROR = "error: out of memory"


def test_a_worker_that_closes_takes_its_last_words_with_it_when_it_shares_a_queue():
    assert play("queue", "busy") == {"got": [0], "end": "ClosedResourceError"}


def test_the_same_schedule_loses_nothing_over_a_channel():
    assert play("channel", "busy") == {"got": [*range(20), ERROR], "end": "ChannelEnd"}


def test_a_queue_that_both_close_is_an_error_and_a_channel_is_not():
    assert play("queue", "twice")["end"][0].endswith("is closed")
    assert play("channel", "twice") == {"end": []}


@pytest.mark.parametrize(("how", "end"), [("queue", "never"), ("channel", "ChannelBroken")])
def test_the_stream_of_a_worker_that_was_killed_ends_where_no_one_else_can_write_it(how, end):
    assert play(how, "killed") == {"end": end}
