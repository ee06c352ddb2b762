"""What follows from an event of membership.py: the next Membership, and actions. Pure; docs/decisions/0052 has the
table of states and the reasons.

The one rule: no rank of an old world lives when a rank of the new one starts. A lost node has a fence, the time until
which ranks may still live there, and no world starts before the end of all fences. So every event ends in a world
that runs, in a wait with a bound, or in the end of the job.
"""

from __future__ import annotations

from infini_run.errors import counted
from infini_run.multinode.head.membership import (
    Began,
    Check,
    Checked,
    Dismiss,
    End,
    Failed,
    Gone,
    Joined,
    Leaving,
    Lost,
    Membership,
    Notice,
    Over,
    Refused,
    Rules,
    Start,
    Stop,
    TimePassed,
)
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

CHECK_AGAIN_S = 300.0  # the interval between checks of a waiting spare
CHECK_OUT_S = 60.0  # a node that has failed its check
GROW_S = 600.0  # between two stops of a world that only let it grow
_EXCLUDED = "is excluded"
_NEVER = float("inf")


class _Turn:
    """What follows from one event: the places and the rest while they change, and the actions so far.

    One list has the places of the whole turn: an event may change all of them, and copies would cost their square.
    """

    def __init__(self, before: Membership, now_s: float, rules: Rules) -> None:
        self._places = list(before.places)
        self.m = replace(before, places=self._places)
        self.now_s = now_s
        self.rules = rules
        self.actions: list[object] = []
        self.changes = 0  # so far

    def set(self, **changes: object) -> None:
        self.m = replace(self.m, **changes)
        self.changes += 1

    def set_place(self, at: int, **changes: object) -> None:
        self._places[at] = replace(self._places[at], **changes)
        self.changes += 1

    def notice(self, text: str) -> None:
        self.actions.append(Notice(text=text))


def advance(before: Membership, event: object, now_s: float, rules: Rules) -> tuple[Membership, tuple[object, ...]]:
    """Return what follows from an event.

    Args:
        before: the state before the event.
        event: one of the classes above.
        now_s: by the head's monotonic clock.
        rules: what the user asked for.

    Returns:
        The state after it, and the actions, in their order.
    """
    if before.phase == "ended":
        return before, ()
    turn = _Turn(before, now_s, rules)
    _EVENTS[type(event)](turn, event)
    if turn.m.phase == "gathering":
        _gather(turn)
    _check_due(turn)
    if turn.m.phase == "running" and rules.grows:
        _grow(turn)
    return replace(turn.m, places=tuple(turn.m.places)), tuple(turn.actions)


def next_due_s(m: Membership, now_s: float, rules: Rules) -> float:
    """Return when TimePassed is due after `now_s`: at the next bound of a wait; infinite: only an event can change
    anything."""
    due = []
    if m.phase == "gathering":
        due += [m.wait_end_s, m.window_end_s, m.due_s]
        due += [place.fence_s for place in m.places]
    if rules.has_check and m.phase != "ended":
        due += [m.places[at].check_end_s for at in m.having("checking")]
        due += [m.places[at].checked_s + CHECK_AGAIN_S for at in m.having("spare")]
        due += [m.places[at].checked_s + CHECK_OUT_S for at in m.having("out") if not m.places[at].is_banned]
    if m.phase == "running" and rules.grows and m.size < rules.most and m.having("spare"):
        due.append(max(m.window_end_s, m.grown_s + GROW_S))
    return min((due_s for due_s in due if due_s > now_s), default=_NEVER)


def _on_began(turn: _Turn, event: Began) -> None:
    turn.set(wait_end_s=turn.now_s + turn.rules.join_s)


def _on_joined(turn: _Turn, event: Joined) -> None:
    for at in event.places:
        place = turn.m.places[at]
        if place.state != "absent":
            continue
        if place.is_banned:
            turn.set_place(at, state="out")
            times = attempts(place.failures)
            why = f"its ranks were the first to fail in {times}" if place.failures else "it refused to run"
            turn.notice(f"{place.name} is back, but stays excluded: {why}")
            continue
        turn.set_place(at, state="joined", is_leaving=False)
        if turn.m.phase == "running":
            turn.notice(f"{place.name} joined as a spare")


def _on_checked(turn: _Turn, event: Checked) -> None:
    place = turn.m.places[event.place_index]
    if place.state != "checking":
        return
    turn.set_place(event.place_index, checked_s=turn.now_s, state="out" if event.reason else "spare")
    if event.reason:
        turn.set_place(event.place_index, gone=_EXCLUDED)
        turn.notice(f"excluded {place.name}: {event.reason}")
        failed = [at for at in turn.m.having("out") if not turn.m.places[at].is_banned]
        count = _count_asked(turn.m)
        if turn.m.phase == "gathering" and len(failed) > 1 and 2 * len(failed) > count:
            _end(
                turn, f"the check of {len(failed)} of {count} nodes failed, so the check may be wrong; {event.reason}"
            )


def _count_asked(m: Membership) -> int:
    """Return the number of nodes whose checks count: those that are here. Before the first world also those that the
    head has yet to reach, or a check that fails at once would be judged by the few that were quick to join."""
    coming = [at for at in m.having("absent") if m.places[at].name and not m.places[at].gone] if m.world < 0 else []
    return len(m.places) - len(m.having("absent")) + len(coming)


def _on_lost(turn: _Turn, event: Lost) -> None:
    place = turn.m.places[event.place_index]
    was_in_world = place.state == "active"
    if place.state == "absent":
        return
    # what joined after the loss and ran nothing proves nothing about ranks of before
    fence_s = event.fence_s if was_in_world else place.fence_s
    turn.set_place(event.place_index, state="absent", fence_s=fence_s, gone="was lost")
    if not was_in_world:
        turn.notice(f"{event.reason}; no rank ran there")
        return
    turn.set(lost=(*turn.m.lost, event.place_index))
    if turn.m.phase == "running":
        turn.set(phase="stopping", reason=event.reason)
        turn.actions.append(Stop(reason=event.reason))
        return
    if event.reason:
        turn.notice(event.reason)
    if not turn.m.reason:
        turn.set(reason=event.reason)


def _on_gone(turn: _Turn, event: Gone) -> None:
    for at in event.places:
        place = turn.m.places[at]
        if place.state == "absent":
            turn.set_place(at, fence_s=min(place.fence_s, event.fence_s))


def _on_refused(turn: _Turn, event: Refused) -> None:
    place = turn.m.places[event.place_index]
    if place.state == "absent":
        return
    if place.state != "active":  # it has yet to run any, and its next agent would refuse, too
        turn.set_place(event.place_index, state="out", is_banned=True, gone=_EXCLUDED)
        if place.state != "out":
            turn.notice(f"excluded {place.name}: it refused to run")
        return
    turn.set_place(event.place_index, state="absent", is_banned=True, gone="cannot run its ranks")
    turn.set(lost=(*turn.m.lost, event.place_index), reason=turn.m.reason or event.reason)
    if turn.m.phase == "running":
        turn.set(phase="stopping")
        turn.actions.append(Stop(reason=event.reason))
    else:
        turn.notice(event.reason)


def _on_leaving(turn: _Turn, event: Leaving) -> None:
    if turn.m.places[event.place_index].state == "absent" or turn.m.places[event.place_index].is_leaving:
        return
    turn.set_place(event.place_index, is_leaving=True)
    if turn.m.places[event.place_index].state != "active" or turn.m.phase != "running":
        turn.notice(event.reason)
    if turn.m.places[event.place_index].state != "active":
        _let_go(turn, event.place_index, event.reason)
    elif turn.m.phase == "running":
        turn.set(phase="stopping", reason=event.reason)
        turn.actions.append(Stop(reason=event.reason))


def _on_failed(turn: _Turn, event: Failed) -> None:
    if turn.m.phase == "running":
        turn.set(phase="stopping", failed=event.place_index)


def _count_failure(turn: _Turn) -> None:
    """Count a failure: the first rank of the world that failed was at this place, and no lost node is the reason."""
    place = turn.m.places[turn.m.failed]
    before, rank = turn.m.banned
    if before >= 0 and rank == place.node_rank:  # it was not the node
        turn.set_place(before, is_banned=False, failures=0)
        name = turn.m.places[before].name
        turn.notice(f"{name} is allowed again: node {rank} is also the first to fail on {place.name}")
    elif place.state == "active":
        turn.set_place(turn.m.failed, failures=place.failures + 1)
    turn.set(banned=(-1, -1))


def _on_over(turn: _Turn, event: Over) -> None:
    """Check the members of a finished world again before the next one."""
    if turn.m.failed >= 0 and not turn.m.reason:
        if event.failed >= 0:
            turn.set(failed=event.failed)
        _count_failure(turn)
    for at in turn.m.having("active"):
        place = turn.m.places[at]
        turn.set_place(at, state="joined", gone="")
        if place.is_leaving:
            _let_go(turn, at, "it was asked to stop")
        elif 0 < turn.rules.max_failures <= place.failures and _can_spare(turn, at):
            turn.set_place(at, state="out", is_banned=True, gone=_EXCLUDED)
            turn.set(banned=(at, place.node_rank))
            turn.notice(f"excluded {place.name}: its ranks were the first to fail in {attempts(place.failures)}")
    for at in turn.m.having("spare"):
        turn.set_place(at, state="joined")
    turn.set(phase="gathering", wait_end_s=_NEVER, window_end_s=_NEVER, due_s=event.due_s)


def attempts(count: int) -> str:
    """Return the words for a number of attempts, which is what a user calls a world."""
    return f"{count} attempt{'s' * (count != 1)}"


def _can_spare(turn: _Turn, at: int) -> bool:
    if turn.m.places[at].is_needed:
        return False
    others = [other for other in turn.m.having("joined", "checking", "spare", "active") if other != at]
    return len(others) >= turn.rules.least


def _let_go(turn: _Turn, at: int, reason: str) -> None:
    turn.set_place(at, state="absent", is_leaving=False, gone="was asked to stop")
    turn.actions.append(Dismiss(place_index=at, reason=reason))


def _on_time_passed(turn: _Turn, event: TimePassed) -> None:
    """Do nothing here: what is due follows every event."""


def _grow(turn: _Turn) -> None:
    """Stop a world for nodes that make it larger. Others have time to join from the first one on, and the world stops
    for that once in GROW_S."""
    m = turn.m
    spares = m.having("spare")
    if m.size >= turn.rules.most or not spares:
        turn.set(window_end_s=_NEVER)
        return
    if m.window_end_s == _NEVER:
        turn.set(window_end_s=turn.now_s + turn.rules.window_s)
    if turn.now_s >= max(turn.m.window_end_s, m.grown_s + GROW_S):
        names = ", ".join(m.places[at].name for at in spares[: turn.rules.most - m.size])
        turn.set(phase="stopping", grown_s=turn.now_s, reason=f"{names} joined")
        turn.actions.append(Stop(reason=f"{names} joined (--on_join=restart)"))


def _check_due(turn: _Turn) -> None:
    """Start the checks that are due: of who has joined, before a world and while it waits."""
    rules, now_s, before = turn.rules, turn.now_s, turn.changes
    if turn.m.phase == "ended" or (turn.m.phase == "stopping" and not rules.has_check):
        return
    for at in turn.m.having("checking"):
        if now_s >= turn.m.places[at].check_end_s:
            _on_checked(turn, Checked(place_index=at, reason=f"its check did not end within {rules.check_s:g} s"))
    m = turn.m
    for at, place in enumerate(m.places):
        if place.state == "joined" and m.phase != "stopping":
            if not rules.has_check:
                turn.set_place(at, state="spare", checked_s=now_s)
                continue
        elif not rules.has_check or place.is_banned:
            continue
        elif place.state == "spare":
            if now_s < place.checked_s + CHECK_AGAIN_S:
                continue
        elif place.state != "out" or now_s < place.checked_s + CHECK_OUT_S:
            continue
        turn.set_place(at, state="checking", check_end_s=now_s + rules.check_s)
        turn.actions.append(Check(place_index=at))
    if turn.m.phase == "gathering" and turn.changes > before:
        _gather(turn)


def _gather(turn: _Turn) -> None:
    """Start a world, if there are enough nodes and nothing of the old one can live."""
    m, rules, now_s = turn.m, turn.rules, turn.now_s
    ready = m.having("spare")
    if len(ready) < rules.least or m.missed:
        _wait_for_least(turn)
        return
    if m.wait_end_s != _NEVER:
        turn.set(wait_end_s=_NEVER)
    # the first world waits for its spares, too: so those that are listed last are the spares
    if len(ready) < (len(m.places) if m.world < 0 else rules.most):
        if m.window_end_s == _NEVER:
            turn.set(window_end_s=now_s + rules.window_s)
        if now_s < turn.m.window_end_s:
            return
    if max(m.due_s, *(place.fence_s for place in m.places)) > now_s:
        return
    if not _awaited(m, rules) and (len(ready) >= rules.most or not m.having("checking")):
        _start(turn, ready)


def _awaited(m: Membership, rules: Rules) -> list[int]:
    """Return the places whose check decides whether the next world has them: the members of the last one that it did
    not lose. Before the first world, those that are listed before a spare. Each check has a limit."""
    running = [at for at in m.having("joined", "checking") if at not in m.lost]
    if m.world >= 0:
        return [at for at in running if m.places[at].node_rank >= 0]
    first = sorted([*running, *m.having("spare")], key=lambda at: m.places[at].order)[: rules.most]
    return [at for at in running if at in first]


def _wait_for_least(turn: _Turn) -> None:
    m, rules, now_s = turn.m, turn.rules, turn.now_s
    if m.wait_end_s == _NEVER:
        turn.set(wait_end_s=now_s + rules.join_s)
    elif now_s >= m.wait_end_s and not awaits_checks(m, rules):
        _end(turn, describe_missing(m, rules, f" after {rules.join_s:g} s (--join_timeout)"))


def awaits_checks(m: Membership, rules: Rules) -> bool:
    """Return whether a world starts if the running checks pass; each of them has its own limit."""
    are_unchecked = bool(m.having("joined", "checking"))
    coming = m.having("spare", "joined", "checking")
    return are_unchecked and len(coming) >= rules.least and set(m.missed) <= set(coming)


def describe_missing(m: Membership, rules: Rules, when: str = "") -> str:
    """Return why no world can start, as words. when: words for the time."""
    here = len(m.having("spare", "joined", "checking"))
    if here >= rules.least and m.missed:
        missed = m.places[m.missed[0]]
        name = missed.name or "the node of the head"
        how = "excluded" if missed.state == "out" else "missing"
        return f"{name} is {how}{when}, and no attempt starts without it"
    missing = ", ".join([m.places[at].name for at in m.having("absent", "out") if m.places[at].name][:8])
    text = f"{here} of at least {counted(rules.least, 'node')} joined{when}"
    return text + (f"; missing: {missing}" if missing else "")


def _end(turn: _Turn, reason: str) -> None:
    turn.set(phase="ended")
    turn.actions.append(End(reason=reason))


def _start(turn: _Turn, ready: Sequence[int]) -> None:
    chosen = choose(turn.m, ready, turn.rules.most)
    for rank, at in enumerate(chosen):
        turn.set_place(at, state="active", node_rank=rank)
    for at, place in enumerate(turn.m.places):
        if place.state != "active" and place.node_rank >= 0:
            turn.set_place(at, node_rank=-1)
    turn.set(
        phase="running",
        world=turn.m.world + 1,
        size=len(chosen),
        lost=(),
        failed=-1,
        reason="",
        wait_end_s=_NEVER,
        window_end_s=_NEVER,
    )
    turn.actions.append(Start(world=turn.m.world, places=tuple(chosen)))


def choose(m: Membership, ready: Iterable[int], most: int) -> list[int]:
    """Return the places of the next world, by node rank.

    The members of the last world stay. They keep their node ranks if the world has as many nodes as before: another
    place takes the rank of a lost one. A world of another size is in the order of the places.
    """
    by_order = sorted(ready, key=lambda at: (m.places[at].node_rank < 0, m.places[at].order))
    chosen = by_order[:most]
    if len(chosen) != m.size:
        return sorted(chosen, key=lambda at: m.places[at].order)
    kept = {m.places[at].node_rank: at for at in chosen if m.places[at].node_rank >= 0}
    newcomers = iter(sorted((at for at in chosen if m.places[at].node_rank < 0), key=lambda at: m.places[at].order))
    return [kept[rank] if rank in kept else next(newcomers) for rank in range(m.size)]


_EVENTS: dict[type, Callable[[_Turn, Any], None]] = {
    Began: _on_began,
    Joined: _on_joined,
    Checked: _on_checked,
    Lost: _on_lost,
    Gone: _on_gone,
    Refused: _on_refused,
    Leaving: _on_leaving,
    Failed: _on_failed,
    Over: _on_over,
    TimePassed: _on_time_passed,
}
