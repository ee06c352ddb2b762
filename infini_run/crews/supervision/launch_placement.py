"""Where the ranks of a launch of a function run in each attempt."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.crews.spawn.spawner import WorkerProcess


class LaunchPlacement:
    """All attempts have the same ranks in the same places.

    Attributes:
        may_move: Another attempt may follow on other nodes, though no failure allows one.
    """

    may_move = False

    def add_watcher(self, wake: Callable[[], None]) -> None:
        """Call this, from now on, when a node comes or goes."""

    def remove_watcher(self, wake: Callable[[], None]) -> None:
        """Call it no more."""

    def find_size(self, before: int) -> int | None:
        """Return how many ranks the next attempt has, where the last one had `before`; None: it cannot start yet.
        Raises InfiniRunError: it never will."""
        return before

    def begin(self, process: WorkerProcess) -> None:
        """Note that the attempt has started, with this process for one."""

    def is_superseded(self) -> bool:
        """Return whether the start has failed because its nodes changed, so that another one may do better."""
        return False

    def why_ended(self) -> str:
        """Return which node came or went, if the attempt ended for that; "" for another reason."""
        return ""

    def moves_after(self, error: object) -> bool:
        """Return whether the attempt after this failure begins on a new choice of nodes."""
        return False

    def request_next(self, process: WorkerProcess | None, due_s: float) -> None:
        """Have nodes chosen anew, not before `due_s` (monotonic). process: the one that failed first."""

    def leave(self) -> None:
        """Leave the nodes after the end of all ranks; the next attempt begins on a new choice of nodes."""
