"""Membership as data: whatever joins, is lost, fails or comes back, every event ends in a world that runs, a wait
with a bound, or the end; and no world starts while ranks of an old one may live."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_run.multinode.head import membership as m
from infini_run.multinode.head import membership_transitions as t
from infini_run.multinode.head.membership import Rules

NEVER = float("inf")


class Job:
    """A membership and a clock; the actions are done as the head does them, and checked."""

    def __init__(self, places=4, rules=None, needed=-1):
        self.rules = rules or Rules(least=3, most=3)
        self.state = m.begin([f"host{at}" for at in range(places)], needed=needed)
        self.now_s = 100.0
        self.said: list[str] = []
        self.worlds: list[tuple[int, ...]] = []
        self.checking: set[int] = set()
        self.dismissed: list[int] = []
        self.ended = ""
        self.is_stopped = False
        self.alive_until: dict[int, float] = {}  # ranks of lost nodes, as badly as can be
        self.handle(m.Began())

    def handle(self, event):
        before = self.state
        self.state, actions = t.advance(before, event, self.now_s, self.rules)
        for action in actions:
            if isinstance(action, m.Start):
                self.check_start(action)
            elif isinstance(action, m.Stop):
                assert before.phase == "running"
                self.is_stopped = True
            elif isinstance(action, m.Check):
                self.checking.add(action.place_index)
            elif isinstance(action, m.Dismiss):
                self.dismissed.append(action.place_index)
            elif isinstance(action, m.Notice):
                self.said.append(action.text)
            elif isinstance(action, m.End):
                self.ended = action.reason
        return actions

    def check_start(self, start):
        assert start.world == len(self.worlds), "worlds are numbered without a gap"
        assert len(set(start.places)) == len(start.places), "no two node ranks on one place"
        assert self.rules.least <= len(start.places) <= self.rules.most
        assert all(until_s <= self.now_s for until_s in self.alive_until.values()), "ranks of an old world may live"
        ranks = [self.state.places[at].node_rank for at in start.places]
        assert ranks == list(range(len(ranks)))
        assert self.state.members == list(start.places)
        left = set(self.worlds[-1] if self.worlds else ()) - set(start.places)
        assert all(self.state.places[at].gone for at in left), "a member that is well stays"
        self.worlds.append(start.places)
        self.is_stopped = False
        self.alive_until.clear()

    def join(self, *places):
        for at in places:
            self.handle(m.Joined(places=(at,)))

    def answer_checks(self, *places, reason=""):
        """The checks there end, as far as any run."""
        for at in places:
            if at in self.checking:
                self.checking.discard(at)
                self.handle(m.Checked(place_index=at, reason=reason))

    def lose(self, at, lease_s=11.0):
        if self.state.places[at].state == "active":
            self.alive_until[at] = self.now_s + lease_s
        self.handle(m.Lost(place_index=at, fence_s=self.now_s + lease_s, reason=f"host{at} was lost"))

    def stop_others(self, due_s=-NEVER):
        """The ranks that were told to end have ended."""
        self.handle(m.Over(due_s=due_s))

    def wait(self, seconds=None):
        """Until the next bound, or for so long."""
        due_s = t.next_due_s(self.state, self.now_s, self.rules)
        assert due_s > self.now_s
        if seconds is not None:
            due_s = min(due_s, self.now_s + seconds)
        if due_s == NEVER:
            return
        self.now_s = due_s
        self.handle(m.TimePassed())

    def here(self):
        return self.state.having("joined", "checking", "spare", "active")


# ---- one thing at a time


def test_the_nodes_that_are_listed_last_are_the_spares_however_late_the_others_come():
    job = Job()
    job.join(3, 0, 2)
    assert job.worlds == []
    job.join(1)
    assert job.worlds == [(0, 1, 2)]
    assert job.state.places[3].state == "spare"


def test_nodes_that_join_together_are_in_one_world():
    job = Job(places=6, rules=Rules(least=2, most=4))
    job.handle(m.Joined(places=(5, 1, 3, 0, 4, 2)))
    assert job.worlds == [(0, 1, 2, 3)]
    for at in job.worlds[0]:
        job.lose(at)
    job.stop_others()
    job.alive_until.clear()
    job.handle(m.Gone(places=(0, 1, 2, 3), fence_s=job.now_s))
    job.handle(m.Joined(places=(3, 2, 1, 0)))
    assert job.worlds == [(0, 1, 2, 3)] * 2


def test_a_node_that_does_not_come_delays_the_first_world_by_the_window_only():
    job = Job()
    job.join(3, 0, 2)
    job.wait()
    assert job.now_s == 110.0
    assert job.worlds == [(0, 2, 3)]
    job.join(1)
    assert job.said == ["host1 joined as a spare"]


def test_a_spare_takes_the_rank_of_the_node_that_was_lost_and_only_when_nothing_of_it_can_live():
    job = Job()
    job.join(0, 1, 2, 3)
    job.lose(1)
    assert job.is_stopped
    job.stop_others()
    assert len(job.worlds) == 1
    job.wait(10.9)
    assert len(job.worlds) == 1
    job.wait()
    assert job.worlds[1] == (0, 3, 2)


def test_a_lost_node_that_is_known_to_be_dead_is_not_waited_for():
    job = Job()
    job.join(0, 1, 2, 3)
    job.lose(1)
    job.stop_others()
    job.alive_until.clear()
    job.handle(m.Gone(places=(1,), fence_s=job.now_s))
    assert job.worlds[1] == (0, 3, 2)


@pytest.mark.parametrize("goes", ["lost", "leaving"])
def test_ranks_of_a_node_that_was_lost_are_waited_for_though_a_newcomer_there_goes_too(goes):
    job = Job()
    job.join(0, 1, 2, 3)
    job.lose(1)
    job.stop_others()
    job.join(1)
    if goes == "lost":
        job.lose(1, lease_s=0)
    else:
        job.handle(m.Leaving(place_index=1, reason="told to stop"))
    assert len(job.worlds) == 1
    job.wait(10.9)
    assert len(job.worlds) == 1
    job.wait()
    assert job.worlds[1] == (0, 3, 2)


def test_a_node_that_returns_before_the_next_world_has_its_rank_again():
    job = Job()
    job.join(0, 1, 2, 3)
    job.lose(1)
    job.stop_others()
    job.join(1)
    job.wait()
    assert job.worlds[1] == (0, 1, 2)


def test_a_node_that_returns_later_is_a_spare():
    job = Job()
    job.join(0, 1, 2, 3)
    job.lose(1)
    job.stop_others()
    job.wait()
    job.join(1)
    assert job.state.places[1].state == "spare"
    job.lose(0)
    job.stop_others()
    job.wait()
    assert job.worlds[2] == (1, 3, 2)


def test_without_a_spare_the_world_shrinks_in_the_order_of_the_places():
    job = Job(rules=Rules(least=2, most=4, window_s=5))
    job.join(0, 1, 2, 3)
    job.lose(1, lease_s=2)
    job.stop_others()
    job.wait()
    assert len(job.worlds) == 1, "the window is not over"
    job.wait()
    assert job.worlds[1] == (0, 2, 3)


def test_least_nodes_wait_for_more_as_long_as_the_window_and_no_longer():
    job = Job(rules=Rules(least=2, most=4, window_s=5))
    job.join(2, 1)
    job.wait(4.9)
    assert job.worlds == []
    job.wait()
    assert job.worlds == [(1, 2)]


def test_too_few_nodes_end_the_job_after_the_join_timeout_and_are_named():
    job = Job(rules=Rules(least=3, most=3, join_s=60))
    job.join(0, 2)
    job.wait()
    assert job.now_s == 160.0
    assert job.ended == "2 of at least 3 nodes joined after 60 s (--join_timeout); missing: host1, host3"


def test_a_loss_without_enough_nodes_waits_for_the_join_timeout_too():
    job = Job(places=3, rules=Rules(least=3, most=3, join_s=60))
    job.join(0, 1, 2)
    job.now_s = 1000.0
    job.lose(2)
    job.stop_others()
    while not job.ended:
        job.wait()
    assert job.now_s == 1060.0


def test_a_further_loss_while_ranks_stop_is_part_of_the_same_change():
    job = Job(places=5)
    job.join(0, 1, 2, 3, 4)
    job.lose(1)
    job.lose(2)
    job.stop_others()
    job.wait()
    assert job.worlds[1] == (0, 3, 4)
    assert len(job.worlds) == 2


def test_a_failed_rank_waits_for_its_delay_and_keeps_the_places():
    job = Job()
    job.join(0, 1, 2, 3)
    job.handle(m.Failed(place_index=1))
    job.stop_others(due_s=job.now_s + 2)
    assert len(job.worlds) == 1
    job.wait()
    assert job.now_s == 102.0
    assert job.worlds[1] == (0, 1, 2)


@pytest.mark.parametrize("has_check", [False, True])
@pytest.mark.parametrize(("least", "most", "needed"), [(1, 1, -1), (2, 2, -1), (1, 2, -1), (2, 2, 0)])
def test_after_a_failure_no_spare_is_faster_than_a_member(least, most, needed, has_check):
    """Both are checked again, and the spares answer first."""
    job = Job(places=4, rules=Rules(least=least, most=most, has_check=has_check), needed=needed)
    job.join(0, 1, 2, 3)
    job.answer_checks(0, 1, 2, 3)
    job.handle(m.Failed(place_index=0))
    job.stop_others()
    job.answer_checks(3, 2, 1)
    assert len(job.worlds) == (1 if has_check else 2)
    job.answer_checks(0)
    assert job.worlds[1] == job.worlds[0] == tuple(range(most))


@pytest.mark.parametrize("reason", ["", "no GPU"])
def test_a_member_whose_check_is_slow_is_awaited_and_only_one_that_fails_it_replaced(reason):
    job = Job(rules=Rules(least=3, most=3, window_s=1, has_check=True, check_s=30))
    job.join(0, 1, 2, 3)
    job.answer_checks(0, 1, 2, 3)
    job.handle(m.Failed(place_index=1))
    job.stop_others()
    job.answer_checks(0, 2, 3)
    job.wait(29)
    assert len(job.worlds) == 1
    job.handle(m.Checked(place_index=1, reason=reason))
    assert job.worlds[1] == ((0, 3, 2) if reason else (0, 1, 2))
    assert job.state.places[1].gone == ("is excluded" if reason else "")


def test_a_lost_node_that_is_back_and_slow_to_be_checked_is_not_awaited():
    job = Job(rules=Rules(least=3, most=3, has_check=True))
    job.join(0, 1, 2, 3)
    job.answer_checks(0, 1, 2, 3)
    job.lose(1, lease_s=0)
    job.stop_others()
    job.join(1)
    job.answer_checks(0, 2, 3)
    assert job.worlds[1] == (0, 3, 2)
    assert job.state.places[1].gone == "was lost"


def test_the_first_world_waits_for_the_check_of_a_node_that_is_listed_before_a_spare():
    job = Job(rules=Rules(least=3, most=3, window_s=5, has_check=True, check_s=30))
    job.join(0, 1, 2, 3)
    job.answer_checks(1, 2, 3)
    job.wait(20)
    assert job.worlds == []
    job.answer_checks(0)
    assert job.worlds == [(0, 1, 2)]


def test_the_first_failure_is_that_by_the_clocks_not_the_one_that_was_heard_first():
    job = Job()
    job.join(0, 1, 2, 3)
    for _ in range(2):
        job.handle(m.Failed(place_index=0))
        job.handle(m.Over(failed=1))
    assert job.worlds[-1] == (0, 3, 2)
    assert job.state.places[0].failures == 0


def test_a_rank_that_failed_because_a_node_was_lost_is_nobodys_fault():
    """The usual order: a collective fails on another node before the loss is known."""
    job = Job()
    job.join(0, 1, 2, 3)
    for lost in (2, 1):
        job.handle(m.Failed(place_index=0))
        job.lose(lost, lease_s=1)
        assert job.state.reason == f"host{lost} was lost"
        job.stop_others()
        job.join(lost)
        job.wait()
    assert job.worlds[1:] == [(0, 1, 2), (0, 1, 2)]
    assert job.state.places[0].failures == 0


def test_a_node_that_fails_first_twice_is_left_out_if_enough_others_are_there():
    job = Job()
    job.join(0, 1, 2, 3)
    for _ in range(2):
        job.handle(m.Failed(place_index=1))
        job.stop_others()
    assert job.worlds[-1] == (0, 3, 2)
    assert "excluded host1: its ranks were the first to fail in 2 attempts" in job.said
    job.lose(1)
    job.join(1)
    assert job.state.places[1].state == "out"


def test_a_node_is_in_again_if_the_failure_follows_the_rank():
    job = Job()
    job.join(0, 1, 2, 3)
    for _ in range(3):
        job.handle(m.Failed(place_index=job.worlds[-1][1]))
        job.stop_others()
    assert not job.state.places[1].is_banned
    assert job.said[-1] == "host1 is allowed again: node 1 is also the first to fail on host3"


def test_a_node_that_fails_often_stays_if_nobody_can_take_its_place():
    job = Job(places=3)
    job.join(0, 1, 2)
    for _ in range(4):
        job.handle(m.Failed(place_index=1))
        job.stop_others()
    assert job.worlds[-1] == (0, 1, 2)


def test_the_node_of_the_head_is_not_left_out_for_its_failures():
    """By hand there is no world without it."""
    job = Job(needed=0)
    job.join(0, 1, 2, 3)
    for _ in range(4):
        job.handle(m.Failed(place_index=0))
        job.stop_others()
    assert job.worlds[-1] == (0, 1, 2)
    assert len(job.worlds) == 5


def test_a_node_that_cannot_run_its_ranks_is_replaced_and_stays_out():
    """It would refuse again, and a lost node costs no restart."""
    job = Job()
    job.join(0, 1, 2, 3)
    job.handle(m.Refused(place_index=1, reason="host1 cannot run its ranks"))
    assert job.is_stopped
    job.join(1)
    assert job.state.places[1].state == "out"
    job.stop_others()
    assert job.worlds[1] == (0, 3, 2)


def test_spare_that_refuses_is_in_no_later_world():
    job = Job(rules=Rules(least=2, most=3))
    job.join(0, 1, 2, 3)
    job.handle(m.Refused(place_index=3, reason="host3 cannot run its ranks"))
    assert not job.is_stopped
    job.join(3)
    assert job.state.places[3].state == "out"
    job.lose(1)
    job.stop_others()
    while len(job.worlds) < 2:
        job.wait()
    assert job.worlds[1] == (0, 2)


def test_other_host_in_place_of_refusing_one_may_run():
    job = Job(rules=Rules(least=2, most=3))
    job.join(0, 1, 2, 3)
    job.handle(m.Refused(place_index=3, reason="host3 cannot run its ranks"))
    job.state = m.rename(job.state, 3, "host9", (3,))
    job.join(3)
    assert job.state.places[3].state == "spare"


def test_suspension_of_head_ends_no_wait():
    job = Job(rules=Rules(least=2, most=3, has_check=True, join_s=300, check_s=30))
    job.join(0, 1)
    job.now_s += 1000
    job.state = m.postpone(job.state, 1000)
    job.answer_checks(0, 1)
    assert job.ended == ""
    while not job.worlds:
        job.wait()
    assert job.worlds == [(0, 1)]


def test_a_check_that_nobody_ends_is_one_that_failed():
    job = Job(rules=Rules(least=3, most=3, has_check=True, check_s=30))
    job.join(0, 1, 2, 3)
    for at in (0, 2, 3):
        job.handle(m.Checked(place_index=at))
    assert job.worlds == []
    job.wait()
    job.wait()
    assert job.worlds == [(0, 2, 3)]
    job.handle(m.Checked(place_index=1))
    assert job.state.places[1].state in ("out", "checking")


def test_a_node_that_is_told_to_stop_leaves_and_the_others_go_on():
    job = Job()
    job.join(0, 1, 2, 3)
    job.handle(m.Leaving(place_index=2, reason="told SIGTERM there"))
    assert job.is_stopped
    job.stop_others()
    assert job.worlds[1] == (0, 1, 3)
    assert job.dismissed == [2]


def test_a_spare_that_is_told_to_stop_just_leaves():
    job = Job()
    job.join(0, 1, 2, 3)
    job.handle(m.Leaving(place_index=3, reason="told SIGTERM there"))
    assert not job.is_stopped
    assert job.dismissed == [3]


def test_a_world_below_its_size_grows_only_when_that_was_asked_for_and_not_often():
    for grows in (False, True):
        job = Job(rules=Rules(least=2, most=3, window_s=5, grows=grows))
        job.join(0, 1)
        job.wait()
        job.join(2)
        if not grows:
            assert t.next_due_s(job.state, job.now_s, job.rules) == NEVER
            continue
        job.wait()
        assert job.is_stopped
        job.stop_others()
        assert job.worlds[1] == (0, 1, 2)


def test_without_a_join_window_a_world_grows_with_the_first_node_and_then_ten_minutes_later():
    job = Job(rules=Rules(least=1, most=3, window_s=0, grows=True))
    job.join(0)
    job.wait()
    assert job.worlds == [(0,)]
    job.join(1)
    assert job.is_stopped
    job.stop_others()
    assert job.worlds[1] == (0, 1)
    grown_s = job.now_s
    job.join(2)
    assert not job.is_stopped
    job.wait()
    assert (job.is_stopped, job.now_s) == (True, grown_s + t.GROW_S)


def test_nodes_are_checked_when_they_join_before_each_world_and_while_they_wait():
    job = Job(rules=Rules(least=3, most=3, has_check=True))
    job.join(0, 1, 2, 3)
    assert job.worlds == []
    for at in (0, 1, 2, 3):
        job.handle(m.Checked(place_index=at))
    assert job.worlds == [(0, 1, 2)]
    job.checking.clear()
    job.wait()
    assert job.now_s == 100 + t.CHECK_AGAIN_S
    assert job.checking == {3}
    job.handle(m.Checked(place_index=3, reason="check ended with 3: no GPU"))
    assert job.said[-1] == "excluded host3: check ended with 3: no GPU"
    job.checking.clear()
    job.handle(m.Failed(place_index=0))
    job.stop_others()
    assert job.checking == {0, 1, 2}


def test_checks_that_run_are_waited_for_beyond_the_join_timeout():
    """They have a bound of their own."""
    job = Job(rules=Rules(least=3, most=3, join_s=60, has_check=True))
    job.join(0, 1, 2)
    job.now_s += 70
    job.handle(m.TimePassed())
    assert not job.ended
    job.handle(m.Checked(place_index=0))
    job.handle(m.Checked(place_index=1, reason="no GPU"))
    assert job.ended == "2 of at least 3 nodes joined after 60 s (--join_timeout); missing: host1, host3"


def test_a_check_that_fails_on_most_nodes_ends_the_job():
    job = Job(rules=Rules(least=3, most=3, has_check=True))
    job.join(0, 1, 2, 3)
    for at in (0, 1, 2):
        job.handle(m.Checked(place_index=at, reason="no such program"))
    assert job.ended == "the check of 3 of 4 nodes failed, so the check may be wrong; no such program"


def test_checks_that_fail_before_all_nodes_have_joined_do_not_end_the_job():
    """Two of four are not most, however late the others come."""
    job = Job(rules=Rules(least=2, most=2, has_check=True))
    job.join(0, 2, 3)
    job.answer_checks(2, 3, reason="no GPU")
    assert not job.ended
    job.join(1)
    job.answer_checks(0, 1)
    job.wait(20)
    assert job.worlds == [(0, 1)]


def test_a_node_that_was_lost_before_its_check_does_not_count():
    job = Job(rules=Rules(least=2, most=2, has_check=True))
    job.join(0, 1, 2, 3)
    job.lose(1)
    job.answer_checks(2, 3, reason="no GPU")
    assert job.ended == "the check of 2 of 3 nodes failed, so the check may be wrong; no GPU"


def test_by_hand_there_is_no_world_without_the_place_of_the_head():
    job = Job(rules=Rules(least=2, most=2), needed=0)
    job.join(1, 2, 3)
    job.wait(20)
    assert job.worlds == []
    job.join(0)
    job.wait(20)
    assert job.worlds == [(0, 1)]


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        (["node10", "node2", "node1"], ["node1", "node2", "node10"]),
        (["b", "a10c2", "a9"], ["a9", "a10c2", "b"]),
        (["n" + 5000 * "9", "n10", "n007", "n"], ["n", "n007", "n10", "n" + 5000 * "9"]),
    ],
)
def test_names_are_ordered_as_people_count(names, ordered):
    assert sorted(names, key=m.natural_key) == ordered


# ---- anything, in any order

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "join", "join two", "lose", "lose", "fail", "over", "wait", "check", "refuse", "leave", "gone"]
        ),
        st.sampled_from([0, 1, 1, 1, 2, 3, 4, 5]),  # one of them often: what it went through must not be forgotten
        st.floats(0.0, 30.0),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=300)
@given(
    EVENTS,
    st.integers(0, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([-1, 0]),
)
def test_whatever_happens_no_two_worlds_live_and_every_wait_has_a_bound(
    events, here, least, more, has_check, grows, needed
):
    rules = Rules(least=least, most=least + more, window_s=5, join_s=60, grows=grows, has_check=has_check)
    job = Job(places=6, rules=rules, needed=needed)
    job.join(*range(here))
    for at in sorted(job.checking):
        job.checking.discard(at)
        job.handle(m.Checked(place_index=at))
    if job.state.phase == "gathering":
        job.wait()
    for kind, at, seconds in events:
        if job.ended:
            return
        happen(job, kind, at, seconds)
        assert job.state.phase in ("gathering", "running", "stopping", "ended")
        assert len(job.state.members) == len({job.state.places[at].node_rank for at in job.state.members})
    settle(job)


def happen(job, kind, at, seconds):
    place = job.state.places[at]
    if kind == "join":
        job.join(at)
    elif kind == "join two":
        job.handle(m.Joined(places=(at, (at + 1) % len(job.state.places))))
    elif kind == "lose":
        job.lose(at, lease_s=seconds)
    elif kind == "fail" and place.state == "active":
        job.handle(m.Failed(place_index=at))
    elif kind == "over" and job.state.phase == "stopping":
        job.stop_others(due_s=job.now_s + seconds)
    elif kind == "wait":
        job.wait(seconds)
    elif kind in ("check", "refuse") and at in job.checking:
        job.checking.discard(at)
        job.handle(m.Checked(place_index=at, reason="bad" if kind == "refuse" else ""))
    elif kind == "leave":
        job.handle(m.Leaving(place_index=at, reason="told to stop"))
    elif kind == "gone":
        job.alive_until.pop(at, None)
        job.handle(m.Gone(places=(at,), fence_s=job.now_s))


def settle(job):
    """Nothing more happens but what the head does, and time: a world runs, or the job ends, within the bounds."""
    end_s = job.now_s + 30 + 60 + 60 + 2 * t.CHECK_OUT_S
    while not job.ended and job.now_s <= end_s:
        for at in sorted(job.checking):
            job.checking.discard(at)
            job.handle(m.Checked(place_index=at))
        if job.state.phase == "running":
            return
        if job.state.phase == "stopping":
            job.stop_others()
        elif not job.checking:
            job.wait()
    assert job.ended or job.state.phase == "running", "it waits without a bound"
