"""Processes that follow a launch of many nodes: they get the lines that its nodes send to the head.

Nothing here waits. What a follower does not read is dropped beyond a bound, and it gets the number of dropped lines.
"""

from __future__ import annotations

import re

from infini_run.control.line_frames import END, LOST, SHOWN, pack_loss
from infini_run.control.server import BACKLOG
from infini_run.errors import UsageError
from infini_run.multinode.link.agent_options import options_of_agents
from infini_run.plan.model import LABELLED
from infini_run.value_types import RankStreams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

    from infini_run.control.server import Client
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.plan.rank_numbers import NodeRanks

_LABEL = re.compile(
    rb"(?:[\d-]{10}T[\d:.]{12}Z )?(?:\033\[3\dm)?"  # --timestamps, --color
    rb"\[(?:rank |[^\]\s]{0,255}:)(?:([\w-]{1,64}) )?(\d{1,9})(?: err)?(?: \+)?\]"  # of plan/labels.py
)


class HeadFollower:
    """A client, and what it follows. An Asker: the nodes say what their ranks have written so far.

    Args:
        client: The client.
        state: The head's.
        ranks: Its ranks. None: all.
        about: The answer to its request.
    """

    def __init__(
        self, client: Client, state: HeadState, ranks: Container[int] | None, about: dict[str, object]
    ) -> None:
        self.client = client
        self.who = client.who
        self._state = state
        self.ranks = ranks
        self.lost = 0
        self._about = about
        self._held = b""  # lines of nodes that have answered, until all have
        self._answered: set[int] | None = set()  # the first ranks of those nodes. None: all have

    @property
    def is_closed(self) -> bool:
        """Whether the client has gone."""
        return self.client.is_closed

    def note_answered(self, ranks: NodeRanks) -> None:
        """Take the lines of a node from now on: the earlier ones are in its answer."""
        if self._answered is not None:
            self._answered.add(next(iter(ranks), -1))

    def finish(self, content: dict[str, object]) -> None:
        """Send the answer, and the lines since then."""
        if self._answered is None:
            return
        self._answered = None
        self.client.begin({**self._about, **content})
        self._send(self._held)
        self._held = b""

    def add(self, lines: bytes, ranks: NodeRanks) -> None:
        """Send lines of a node, hold them until the answer is sent, or count them."""
        if self._answered is None:
            self._send(lines)
        elif next(iter(ranks), -1) in self._answered:
            if len(self._held) + len(lines) <= BACKLOG:
                self._held += lines
            else:
                self.lost += lines.count(b"\n")

    def _send(self, lines: bytes) -> None:
        chosen = lines
        if self.ranks is not None:
            chosen = b"".join(line for line in lines.splitlines(keepends=True) if self._is_wanted(line))
        if not chosen:
            return
        if self.lost and self.client.send(LOST, pack_loss(self.lost)):
            self.lost = 0
        if self.lost or not self.client.send(SHOWN, chosen):
            self.lost += max(1, chosen.count(b"\n"))

    def _is_wanted(self, line: bytes) -> bool:
        found = _LABEL.match(line)
        if found is None or self.ranks is None:
            return False
        return self._state.numbers.find((found[1] or b"").decode(), int(found[2])) in self.ranks

    def end(self) -> None:
        """Send the last frame, if nothing is missing before it."""
        self.finish({})
        if not self.lost or self.client.send(LOST, pack_loss(self.lost)):
            self.client.send(END, b"")


class HeadFollowers:
    """The followers of a head.

    Args:
        state: The head's.
    """

    def __init__(self, state: HeadState) -> None:
        self._state = state
        self._followers: list[HeadFollower] = []

    def add(self, client: Client, ranks: Container[int] | None) -> HeadFollower:
        """Return who gets the lines of these ranks; None: of all. Nothing is sent before its `finish`. Raises
        UsageError: lines have no rank."""
        options = self._state.options
        console = options_of_agents(options).console
        if ranks is not None and console not in LABELLED:
            raise UsageError(f"--ranks: lines have no labels with --console={console}; drop it")
        is_filtered = options.ranks_on_console is not None or options.local_ranks_filter is not None
        is_hidden = console == "none" or options.live == "on" or is_filtered or options.redirects != RankStreams()
        follower = HeadFollower(client, self._state, ranks, {"is_hidden": is_hidden})
        self._followers.append(follower)
        self._state.on_lines = self._on_lines
        return follower

    def _on_lines(self, lines: bytes, ranks: NodeRanks) -> None:
        self._followers = [follower for follower in self._followers if not follower.is_closed]
        for follower in self._followers:
            follower.add(lines, ranks)
        if not self._followers:
            self._state.on_lines = None

    def end(self) -> None:
        """Tell them that nothing more comes."""
        for follower in self._followers:
            follower.end()
        self._followers.clear()
