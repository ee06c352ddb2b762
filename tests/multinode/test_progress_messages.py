"""PROGRESS= of ranks on its way to the head: the latest of each, and few messages, however often ranks send it."""

from __future__ import annotations

import json
import time

from infini_run.core.c_structs import Event
from infini_run.multinode.link import message_schema
from infini_run.multinode.link.clock_offset import ClockOffset
from infini_run.multinode.link.progress_messages import ProgressSender, RankProgress
from infini_run.report.merge import lost_report


def progress(rank, value):
    return Event(kind="progress", worker=rank, rank=rank, value=value, time_ns=time.monotonic_ns())


def test_sender_sends_the_latest_of_each_rank_once_a_period():
    sent = []
    sender = ProgressSender(sent.append, lambda: True, nnodes=1)
    assert sender.wait_s(None) is None
    sender.note(progress(3, 1))
    assert sender.wait_s(None) == 0.0
    sender.run_due()
    for value in range(2, 5000):
        sender.note(progress(value % 2, value))
        sender.run_due()
    assert [[entry[:2] for entry in message] for message in sent] == [[[3, 1]]], "the rest waits for its time"
    assert 0.5 < sender.wait_s(None) <= 1.0
    assert sender.wait_s(0.1) == 0.1


def test_sender_of_many_nodes_sends_less_often():
    sender = ProgressSender([].append, lambda: True, nnodes=1024)
    sender.note(progress(0, 1))
    sender.run_due()
    sender.note(progress(0, 2))
    assert 15.0 < sender.wait_s(None) <= 16.0


def test_sender_waits_for_room():
    sent, room = [], []
    sender = ProgressSender(sent.append, lambda: bool(room), nnodes=1)
    sender.note(progress(0, 1))
    sender.run_due()
    assert (sent, sender.wait_s(5.0)) == ([], 5.0), "the connection wakes the agent"
    room.append(True)
    sender.run_due()
    assert len(sent) == 1


def test_head_keeps_the_progress_of_a_node_that_is_lost():
    known = RankProgress()
    sent_ns = 50 * 10**9  # by a clock that has no offset yet
    entries = [[4, 7, sent_ns, 1], [5, 9, sent_ns - 10**9, 3], [6, 99, sent_ns, 1]]
    content = {"progress": entries, "time_ns": sent_ns}
    message = message_schema.read(json.dumps(content).encode(), message_schema.PROGRESS)
    used = known.update(message["progress"], message["time_ns"], range(4, 6), ClockOffset())
    assert [(rank, value, count) for rank, value, _, count in used] == [(4, 7, 1), (5, 9, 3)], "6 is another node's"
    now_s = time.time()
    ranks = {rank: (rank - 4, "", rank) for rank in range(4, 7)}
    report = lost_report("host2", ranks, {}, known.in_wall_time(), last_received_s=now_s, is_first_failure=False)
    assert [exit_.progress for exit_ in report.exits] == [7, 9, None]
    assert now_s - 0.9 < report.exits[0].progress_s <= time.time()
    assert now_s - 1.9 < report.exits[1].progress_s <= now_s - 0.9


def test_message_without_ranks_of_the_node_is_no_progress():
    assert RankProgress().update([[1, 5, 0, 1]], 0, range(1), ClockOffset()) == []


def test_head_takes_times_by_its_own_clock():
    """A message that was long on its way says when ranks got further, not when it came."""
    clock, now_s = ClockOffset(), time.monotonic()
    clock.add(0.0, 1000.0, 0.001, now_s)
    progress = RankProgress()
    sent_ns = int((now_s + 1000.0 - 5.0) * 1e9)
    ((_, _, time_s, _),) = progress.update([[0, 3, sent_ns - 10**9, 1]], sent_ns, range(1), clock)
    assert abs(time_s - (now_s - 6.0)) < 1e-3
    ((_, _, time_s, _),) = progress.update([[0, 4, sent_ns + 10**11, 1]], sent_ns, range(1), clock)
    assert time_s <= time.monotonic(), "nothing comes from the future"


def test_sender_counts_what_it_leaves_out():
    sent = []
    sender = ProgressSender(sent.append, lambda: True, nnodes=1)
    for value in range(5):
        sender.note(progress(3, value))
    sender.run_due()
    assert [(rank, value, count) for rank, value, _, count in sent[0]] == [(3, 4, 5)]
