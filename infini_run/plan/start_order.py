"""Which programs start when which others are up (--after). Pure.

A program is up once each of its ranks is ready or exited with code 0; with --ready_port, once that port answers on
each of its nodes. One node counts ranks, a head nodes.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.options.launch_options import OneProgram


def awaited(programs: Sequence[OneProgram]) -> frozenset[str]:
    """Return the programs that others wait for."""
    return frozenset(name for each in programs for name in each.after)


class StartOrder:
    """The programs that have not started, in one attempt.

    Args:
        programs: All programs.
    """

    def __init__(self, programs: Sequence[OneProgram]) -> None:
        self._waits = {each.name: set(each.after) for each in programs if each.after}

    @property
    def is_over(self) -> bool:
        """Whether all programs may start."""
        return not self._waits

    def is_held(self, name: str) -> bool:
        """Return whether a program may not start yet."""
        return name in self._waits

    def on_up(self, name: str) -> list[str]:
        """Return the programs that may start because one is up."""
        for others in self._waits.values():
            others.discard(name)
        free = [each for each, others in self._waits.items() if not others]
        for each in free:
            del self._waits[each]
        return free


class UpCount:
    """How many ranks, or nodes, of each awaited program are not up.

    Args:
        counts: All of them.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._left = {name: count for name, count in counts.items() if count}
        self._seen: set[tuple[str, object]] = set()

    def note(self, name: str, who: object) -> bool:
        """Note that a rank or node of a program is up, once. Return whether the program is, by that."""
        if name not in self._left or (name, who) in self._seen:
            return False
        self._seen.add((name, who))
        self._left[name] -= 1
        return not self._left[name]

    def renew(self, name: str, count: int) -> None:
        """Count a program anew, as its ranks restart.

        Args:
            name: The program.
            count: How many ranks, or nodes, it has.
        """
        if name in self._left:
            self._left[name] = count
            self._seen = {each for each in self._seen if each[0] != name}

    def waits_for(self, name: str) -> bool:
        """Return whether a program is not up."""
        return self._left.get(name, 0) > 0

    def note_all(self, name: str) -> bool:
        """As `note`, for all that are left."""
        is_news = self.waits_for(name)
        if is_news:
            self._left[name] = 0
        return is_news
