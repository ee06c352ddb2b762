"""Membership: the nodes that run ranks, each with its node rank; its events, and its actions. Data only:
membership_transitions.py has the rules.

A world is all ranks of one attempt. A place is a node of the job: a host of the list, or a number that a manual
launcher gets. Its state is one of

    absent    nobody has joined from there, or its agent is lost
    joined    its agent is here; no check has passed since the last world, so it is in none
    checking  its check runs
    spare     its check passed, and it runs no rank
    active    it runs ranks of the world
    out       its check failed, or its ranks were the first to fail too often
"""

from __future__ import annotations

import re

from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NEVER = float("inf")


@record
class Rules:
    """What the user asked for.

    Args:
        least, most: nodes of a world.
        window_s: how long `least` nodes wait for more, and the first world for the spares.
        join_s: how long fewer than `least` nodes wait.
        max_failures: exclude a node whose ranks were the first to fail in this many worlds; 0: exclude none.
        grows: stop a world with fewer than `most` nodes for one that joins.
        has_check: nodes get a check.
        check_s: the longest time that a check takes; the agents see to that, unless they do nothing any more.
    """

    least: int
    most: int
    window_s: float = 10.0
    join_s: float = 300.0
    max_failures: int = 2
    grows: bool = False
    has_check: bool = False
    check_s: float = 75.0


@record
class NodePlace:
    """One node of the job.

    Attributes:
        name: For messages.
        order: Places with less get lower node ranks, where nobody has one yet.
        state: See above.
        node_rank: In the world that runs, or ran last; -1: none.
        fence_s: Until then ranks of an old world may live there, by the head's monotonic clock.
        failures: Worlds in which its ranks were the first to fail.
        checked_s: When its last check ended.
        check_end_s: A check that runs has failed if it has not ended by then.
        is_banned: Out for its failures, whatever its check says.
        is_leaving: It was asked to stop, and is not for the next world.
        is_needed: There is no world without it: in a manual launch rank 0 is where the head is, whose address is
            known.
        gone: Why the next world may be without it, as words after its name; empty: the last world ended with it.
    """

    name: str
    order: tuple[object, ...] = ()
    state: str = "absent"
    node_rank: int = -1
    fence_s: float = -_NEVER
    failures: int = 0
    checked_s: float = -_NEVER
    check_end_s: float = _NEVER
    is_banned: bool = False
    is_leaving: bool = False
    is_needed: bool = False
    gone: str = ""


@record
class Membership:
    """The known state of all places and worlds.

    Attributes:
        places: All of them, whether anybody is there or not.
        phase: gathering, running, stopping or ended.
        world: Number of the world that runs, or ran last; -1: none has.
        size: How many nodes it has, or had.
        wait_end_s: When fewer nodes than needed have waited long enough. Infinite: nobody waits.
        window_end_s: When those that suffice have waited long enough for more.
        grown_s: When a world was last stopped to grow.
        due_s: No world starts before.
        lost: Places that the world has lost.
        failed: The place whose rank was the first of the world to fail; -1: none has.
        reason: Which node came or went, so that the next world costs nothing; empty: it follows from a failure.
        banned: The place that was excluded last, and the node rank that it had. If the same rank fails first in the
            next world, it was not the place.
    """

    places: Sequence[NodePlace]
    phase: str = "gathering"
    world: int = -1
    size: int = 0
    wait_end_s: float = _NEVER
    window_end_s: float = _NEVER
    grown_s: float = -_NEVER
    due_s: float = -_NEVER
    lost: tuple[int, ...] = ()
    failed: int = -1
    reason: str = ""
    banned: tuple[int, int] = (-1, -1)

    def having(self, *states: str) -> list[int]:
        """Return the places in these states."""
        return [at for at, place in enumerate(self.places) if place.state in states]

    @property
    def missed(self) -> list[int]:
        """The places that are not ready, and without which there is no world."""
        return [at for at, place in enumerate(self.places) if place.is_needed and place.state != "spare"]

    @property
    def members(self) -> list[int]:
        """The places of the world that runs, by node rank."""
        return sorted(self.having("active"), key=lambda at: self.places[at].node_rank)


# ---- events


@record
class Began:
    """The head begins to reach the first nodes."""


@record
class Joined:
    """The agents at these places are ready."""

    places: tuple[int, ...]


@record
class Checked:
    """The check at a place is complete. reason: why it failed; empty: it passed."""

    place_index: int
    reason: str = ""


@record
class Lost:
    """The agent of a place has gone, or the head gave it up.

    Args:
        place_index: which.
        fence_s: until then its ranks may live.
        reason: a sentence; empty: a line has said it.
    """

    place_index: int
    fence_s: float
    reason: str


@record
class Gone:
    """Ranks may live at these lost places until this time: earlier than before."""

    places: tuple[int, ...]
    fence_s: float


@record
class Refused:
    """The agent of a place cannot run ranks, and has gone; it would refuse again."""

    place_index: int
    reason: str


@record
class Leaving:
    """The launcher of a place got a stop signal there."""

    place_index: int
    reason: str


@record
class Failed:
    """A rank at this place was the first of the world to fail, and the others stop."""

    place_index: int


@record
class Over:
    """No rank of the world lives at any place that is not lost, and another world follows.

    Args:
        due_s: not before; a failure of a rank has a delay.
        failed: the place whose rank was the first to fail, by the clocks; -1: as Failed had it, which came first.
    """

    due_s: float = -_NEVER
    failed: int = -1


@record
class TimePassed:
    """Time has passed."""


# ---- actions


@record
class Start:
    """Start a world.

    Args:
        world: its number.
        places: of its nodes, in the order of their node ranks.
    """

    world: int
    places: tuple[int, ...]


@record
class Stop:
    """Stop the ranks of the world: the next one follows."""

    reason: str


@record
class Check:
    """Check the node of a place."""

    place_index: int


@record
class Dismiss:
    """Let the agent of a place go."""

    place_index: int
    reason: str


@record
class Notice:
    """Tell the user a line."""

    text: str


@record
class End:
    """The job cannot continue."""

    reason: str


# ---- a new one


def begin(names: Sequence[str], *, needed: int = -1) -> Membership:
    """Return the membership of a job whose nodes nobody has reached yet.

    Args:
        names: of the places; "" until somebody joins there.
        needed: the place without which there is no world; -1: there is none.
    """
    places = (NodePlace(name=name, order=(at,), is_needed=at == needed) for at, name in enumerate(names))
    return Membership(places=tuple(places))


def rename(m: Membership, at: int, name: str, order: tuple[object, ...]) -> Membership:
    """Return the membership with the name and the order of whoever has just come to a place. Another host than before
    has no failures, and is not excluded. The fence stays: it is that of ranks elsewhere."""
    places, banned = list(m.places), m.banned
    if places[at].name not in ("", name):
        state = "absent" if places[at].state == "out" else places[at].state
        places[at] = replace(places[at], state=state, failures=0, is_banned=False)
        banned = (-1, -1) if banned[0] == at else banned
    places[at] = replace(places[at], name=name, order=order)
    return replace(m, places=tuple(places), banned=banned)


def delay(m: Membership, due_s: float) -> Membership:
    """Return the membership whose next world starts not before a time."""
    return replace(m, due_s=due_s)


def postpone(m: Membership, by_s: float) -> Membership:
    """Return the membership whose waits end later by a suspension of the head. Nobody could join meanwhile, or report
    the end of a check. Fences stay: ranks end without the head."""
    places = [replace(place, check_end_s=place.check_end_s + by_s) for place in m.places]
    return replace(m, places=tuple(places), wait_end_s=m.wait_end_s + by_s, window_end_s=m.window_end_s + by_s)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names as people count: node2 before node10. A number may have any length: the length
    comes first, and then digit by digit."""
    parts = [part.lstrip("0") if at % 2 else part for at, part in enumerate(re.split(r"([0-9]+)", name))]
    return tuple((1, len(part), part) if at % 2 else (0, 0, part) for at, part in enumerate(parts))
