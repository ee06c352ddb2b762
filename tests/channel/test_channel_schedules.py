"""Every order of send, receive, close and die, from both sides, across real processes: no hang, no leak, and no
message lost, doubled or torn. What must come out of each step is known beforehand, from the steps before it."""

from __future__ import annotations

from collections import deque

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.support.channel_players import two_players
from tests.support.rows import SEED, TAKES_ALL

SMALL, LARGE = 40, 300_000  # bytes; of the large ones not two fit into the kernel's buffer
STEPS = ("send", "send", "send", "recv", "recv", "recv", "send large", "bomb", "mute", "close tx", "close rx", "die")


class Way:
    """One direction, as it ought to be."""

    def __init__(self):
        self.messages = deque()
        self.sender, self.receiver = "open", "open"
        self.may_be_full = self.may_be_torn = False

    def expect_send(self, is_large):
        if self.sender != "open":
            return {"ChannelClosed"}
        if self.receiver != "open":
            return {"ChannelBroken"}
        return {"ok", "TimeoutError"} if is_large or self.may_be_full else {"ok"}

    def sent(self, message, is_large, outcome):
        if outcome == "ok":
            self.messages.append(message)
            self.may_be_torn = False  # what was before it has been finished
        self.may_be_torn |= outcome == "TimeoutError"
        self.may_be_full |= is_large

    def expect_recv(self):
        if self.receiver != "open":
            return {("ChannelClosed", None)}
        if self.messages:
            first = self.messages[0]
            return {("CannotUnpickle", None)} if first == "bomb" else {("ok", first)}
        ends = {"open": "TimeoutError", "closed": "ChannelEnd", "dead": "ChannelBroken"}
        expected = {(ends[self.sender], None)}
        if self.may_be_torn and self.sender == "closed":
            expected.add(("ChannelBroken", None))  # in the middle of what was given up, with no room for its rest
        return expected


class Table:
    """Two players and what is known of them."""

    def __init__(self):
        self.players = two_players()
        self.ways = Way(), Way()  # way i: from player i to the other
        self.number = 0

    def step(self, side, what):
        player, out, back = self.players[side], self.ways[side], self.ways[1 - side]
        if not player.is_alive:
            return
        if what in ("send", "send large", "bomb"):
            self.send(player, out, what)
        elif what == "mute":
            assert player.ask("mute")[0] == "UnpicklableError"
        elif what == "recv":
            self.recv(player, back)
        elif what == "close tx":
            assert player.ask(what) == ("ok", None)
            out.sender = "closed"
        elif what == "close rx":
            assert player.ask(what) == ("ok", None)
            back.receiver = "closed"
        else:
            player.kill()
            out.sender = "dead" if out.sender == "open" else out.sender
            back.receiver = "dead" if back.receiver == "open" else back.receiver

    def send(self, player, way, what):
        self.number += 1
        is_large = what == "send large"
        words = ("bomb",) if what == "bomb" else ("send", self.number, LARGE if is_large else SMALL, 0)
        expected = way.expect_send(is_large)
        outcome = player.ask(*words)[0]
        assert outcome in expected
        way.sent("bomb" if what == "bomb" else self.number, is_large, outcome)

    def recv(self, player, way):
        expected = way.expect_recv()
        outcome, value = player.ask("recv")
        assert (outcome, value if outcome == "ok" else None) in expected
        if outcome in ("ok", "CannotUnpickle"):
            way.messages.popleft()
        return outcome

    def end(self):
        """All that was sent comes, then the end; closing in any state leaves no descriptor."""
        for side, player in enumerate(self.players):
            while player.is_alive and self.recv(player, self.ways[1 - side]) in ("ok", "CannotUnpickle"):
                pass
        for side in (0, 1):
            for what in ("close tx", "close rx", "close tx"):
                self.step(side, what)
        for player in self.players:
            if player.is_alive:
                assert player.ask("leaks") == ("ok", [])
                player.tell("leave")
                assert player.reap() == 0

    def clear(self):
        for player in self.players:
            player.kill()


@settings(max_examples=1000 if TAKES_ALL else 150, database=None)
@seed(SEED)
@given(st.lists(st.tuples(st.sampled_from((0, 1)), st.sampled_from(STEPS)), max_size=16))
def test_no_schedule_hangs_leaks_or_loses_or_doubles_a_message(steps):
    table = Table()
    try:
        for side, what in steps:
            table.step(side, what)
        table.end()
    finally:
        table.clear()


SIZES = (0, 60, 20_000, 400_000)
SCRIPT = st.tuples(
    st.lists(st.sampled_from(SIZES), max_size=8),  # what it sends, from one thread
    st.none() | st.integers(0, 8),  # after so many messages it closes its receiver; None: it reads to the end
    st.sampled_from(("close", "leave", "die")),  # how it ends, when it has sent all
)


@settings(max_examples=200 if TAKES_ALL else 60, database=None)
@seed(SEED)
@given(SCRIPT, SCRIPT)
def test_both_sides_talk_at_once_and_neither_waits_for_ever(first, second):
    """Each sends from one thread and receives in another; what came is a beginning of what was sent, and all of it
    where it ended with End."""
    scripts = first, second
    players = two_players()
    try:
        for player, script in zip(players, scripts, strict=True):
            player.tell("play", *script)
        stories = [player.hear_last() for player in players]
    finally:
        for player in players:
            player.kill()
    for side, story in enumerate(stories):
        sizes, _, how = scripts[1 - side]
        if story is None:
            assert scripts[side][2] == "die"
            continue
        assert story["came"] == list(range(len(story["came"])))
        assert len(story["came"]) <= len(sizes)
        assert story["end"] in {
            "ChannelEnd",
            "ChannelBroken",
            "closed",
            "ChannelClosed" if scripts[side][2] == "leave" else "",
        }
        if story["end"] == "ChannelEnd":
            assert how != "die"
            assert len(story["came"]) == stories[1 - side]["sent"]
        if story["sent"] < len(scripts[side][0]):
            assert scripts[1 - side][1] is not None or how != "close"  # nobody read to the end
        assert story["leaks"] == []
