"""Two faults close together, thousands of times, in time that is counted, not waited for: the decisions of
membership_transitions.py, beside a simulation of what they are about.

A node's ranks end with the world, with their agent (0.1 s later: the guard), or with their lease: 0.9 of the timeout
after the last question of theirs that the head has heard. The head learns of a killed agent at once, and of silence
after the timeout. The simulation knows what lives; the decisions know only what the head is told.

SOAK_PAIRS=N says how many (make soak: 100,000), TEST_SEED=N repeats them.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable
from functools import partial

import pytest

from infini_run.multinode.head import membership as m
from infini_run.multinode.head import membership_transitions as t
from tests.support.rows import SEED

PAIRS = int(os.environ.get("SOAK_PAIRS", "2000"))
TIMEOUT_S, GRACE_S, WINDOW_S, JOIN_S, CHECK_S = 2.0, 1.0, 0.5, 60.0, 0.5
GUARD_S, BACK_S, FENCE_S = 0.1, 0.7, 1.0  # ranks of a killed agent; until another one is there; beyond the timeout
BOUND_S = TIMEOUT_S + GRACE_S + 5.0  # until all is well again
END_S = 300.0  # of a run, which hangs if it is not over then
FAULTS = ("killed", "link reset", "cut", "suspended", "told to stop", "rank fails", "check fails")
NEVER = float("inf")


class Wrong(Exception):
    """What must not happen has happened."""


class Job:
    """One job of three nodes, or down to two of them, and one or two that wait."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rules = m.Rules(
            least=chance.choice((2, 3)),
            most=3,
            window_s=WINDOW_S,
            join_s=JOIN_S,
            grows=chance.random() < 0.2,
            has_check=chance.random() < 0.5,
        )
        self.count = chance.choice((4, 5))
        self.state = m.begin([f"host{at}" for at in range(self.count)])
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.lives_until_s = [-NEVER] * self.count  # the ranks of each node
        self.is_cut = [False] * self.count
        self.incarnation = [0] * self.count  # of the agent: what is said of an older one is not heard
        self.fault_s, self.right_s = 0.0, NEVER
        self.ended = ""
        self.handle(m.Began())
        for at in range(self.count):
            self.after(chance.uniform(0.1, 0.4), partial(self.join, at))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + seconds, len(self.queue) + self.chance.getrandbits(30), what))

    # ---- what the head does

    def handle(self, event: object) -> None:
        self.state, actions = t.advance(self.state, event, self.now_s, self.rules)
        for action in actions:
            if isinstance(action, m.Start):
                self.start(action)
            elif isinstance(action, m.Stop):
                self.stop()
            elif isinstance(action, m.Check):
                at = action.place_index
                self.after(self.chance.uniform(0.0, CHECK_S), partial(self.check, at, self.incarnation[at]))
            elif isinstance(action, m.Dismiss):
                self.incarnation[action.place_index] += 1
                self.after(BACK_S, partial(self.join, action.place_index))
            elif isinstance(action, m.End):
                self.ended = action.reason

    def start(self, action: m.Start) -> None:
        living = [at for at, until_s in enumerate(self.lives_until_s) if until_s > self.now_s]
        if living:
            raise Wrong(f"world {action.world} starts while ranks of an old one live on places {living}")
        if len(set(action.places)) != len(action.places) or not self.rules.least <= len(action.places) <= 3:
            raise Wrong(f"world {action.world} is on places {action.places}")
        for at in action.places:
            if not self.is_cut[at]:
                self.lives_until_s[at] = NEVER

    def stop(self) -> None:
        """All ranks are told to end; which takes as long as the grace at most."""
        for at in self.state.members:
            what = partial(self.end_ranks, at, self.state.world, self.incarnation[at])
            self.after(self.chance.uniform(0.0, GRACE_S), what)
        self.look_for_end(self.state.world)

    def end_ranks(self, at: int, world: int, incarnation: int) -> None:
        if world == self.state.world and incarnation == self.incarnation[at] and not self.is_cut[at]:
            self.lives_until_s[at] = min(self.lives_until_s[at], self.now_s)

    def look_for_end(self, world: int) -> None:
        if self.state.phase != "stopping" or self.state.world != world:
            return
        if any(self.lives_until_s[at] > self.now_s or self.is_cut[at] for at in self.state.members):
            self.after(0.05, partial(self.look_for_end, world))
        else:
            self.handle(m.Over(due_s=-NEVER if self.state.reason else self.now_s + 0.2))

    def check(self, at: int, incarnation: int) -> None:
        if incarnation == self.incarnation[at] and not self.is_cut[at]:
            self.handle(m.Checked(place_index=at))

    def join(self, at: int) -> None:
        if self.state.places[at].state == "absent" and not self.is_cut[at]:
            if self.lives_until_s[at] > self.now_s:  # the agent waits until it finds none
                self.after(0.05, partial(self.join, at))
                return
            self.handle(m.Gone(places=(at,), fence_s=self.now_s))
            self.handle(m.Joined(places=(at,)))

    # ---- what happens

    def strike(self) -> None:
        at, what = self.chance.randrange(self.count), self.chance.choice(FAULTS)
        place = self.state.places[at]
        if place.state == "absent" or self.is_cut[at]:
            return
        self.fault_s, self.right_s = self.now_s, NEVER
        if what == "killed":
            self.lives_until_s[at] = min(self.lives_until_s[at], self.now_s + GUARD_S)
            self.lose(at, self.now_s)
            self.after(BACK_S, partial(self.join, at))
        elif what == "link reset":  # and the node does not hear of it
            self.lives_until_s[at] = min(self.lives_until_s[at], self.now_s + 0.9 * TIMEOUT_S)
            self.lose(at, self.now_s)
            self.after(self.chance.uniform(BACK_S, TIMEOUT_S), partial(self.join, at))
        elif what in ("cut", "suspended"):
            heard_s = self.now_s - self.chance.uniform(0.0, TIMEOUT_S / 5)
            self.is_cut[at] = True
            self.lives_until_s[at] = min(self.lives_until_s[at], heard_s + 0.9 * TIMEOUT_S)
            seconds = self.chance.uniform(0.0, TIMEOUT_S / 3) + heard_s + TIMEOUT_S - self.now_s
            self.after(seconds, partial(self.lose, at, heard_s))
            self.after(seconds + self.chance.uniform(0.5, 20.0), partial(self.heal, at))
        elif what == "told to stop":
            self.handle(m.Leaving(place_index=at, reason="told to stop"))
        elif what == "rank fails" and place.state == "active" and self.state.phase == "running":
            self.lives_until_s[at] = min(self.lives_until_s[at], self.now_s)
            self.handle(m.Failed(place_index=at))
            self.stop()
        elif what == "check fails" and place.state == "checking":
            self.handle(m.Checked(place_index=at, reason="bad"))

    def lose(self, at: int, heard_s: float) -> None:
        self.incarnation[at] += 1
        self.handle(m.Lost(place_index=at, fence_s=heard_s + TIMEOUT_S + FENCE_S, reason=f"host{at} was lost"))

    def heal(self, at: int) -> None:
        self.is_cut[at] = False
        self.join(at)

    # ---- time

    def is_right(self) -> bool:
        members = self.state.members
        return self.state.phase == "running" and all(self.lives_until_s[at] == NEVER for at in members)

    def run(self) -> float:
        """One job, two faults, until all is well again. Returns seconds since the last of them; infinite: too few
        nodes were left, and the job ended or waited for one."""
        first_s = self.chance.uniform(0.0, 3.0)
        self.after(first_s, self.strike)
        self.after(first_s + self.chance.uniform(0.0, 2 * TIMEOUT_S), self.strike)
        waited = False
        while not self.ended:
            due_s = t.next_due_s(self.state, self.now_s, self.rules)
            next_s = self.queue[0][0] if self.queue else NEVER
            if min(due_s, next_s) > END_S:
                break
            if next_s <= due_s:
                self.now_s, _, what = heapq.heappop(self.queue)
                what()
            else:
                self.now_s = due_s
                self.handle(m.TimePassed())
            here = self.state.having("joined", "checking", "spare", "active")
            there = sum(not self.is_cut[at] for at in here)
            waited = waited or (self.fault_s > 0 and there < self.rules.least)
            if self.right_s == NEVER and self.is_right():
                self.right_s = self.now_s
        if not self.ended and not self.is_right():
            raise Wrong(f"it hangs: {self.state.phase}, {[place.state for place in self.state.places]}")
        if self.ended and not waited:
            raise Wrong(f"it ended: {self.ended}")
        return NEVER if waited or self.ended else self.right_s - self.fault_s


def test_two_faults_close_together_leave_no_old_rank_and_no_hang():
    took_s = []
    for number in range(PAIRS):
        seed = SEED * PAIRS + number
        try:
            took_s.append(Job(random.Random(seed)).run())
        except Wrong as error:
            pytest.fail(f"pair {number}: {error}")
    assert max((each for each in took_s if each != NEVER), default=0.0) <= BOUND_S
