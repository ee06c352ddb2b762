"""Whether a failed worker of a crew can restart, as far as that depends on its host."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from infini_run.crews.spawn.spawner import WorkerProcess
    from infini_run.errors import InfiniRunError

NEVER = float("inf")


class PendingRestart:
    """Ranks that are to restart together, at a time, once all of them are settled."""

    def __init__(self, ranks: set[int], due_s: float) -> None:
        self.ranks = ranks
        self.due_s = due_s


class CrewPlacement:
    """A placement in which every worker stays on its host: it can restart there at once, or not at all.

    Attributes:
        wait_end_s: When a worker has waited for a host for too long (monotonic); infinite: none waits.
    """

    wait_end_s = NEVER

    def add_watcher(self, wake: Callable[[], None]) -> None:
        """Call this, from now on, when a host comes or goes."""

    def remove_watcher(self, wake: Callable[[], None]) -> None:
        """Call it no more."""

    def spend(
        self, failed: WorkerProcess, processes: Iterable[WorkerProcess | None], spend: Callable[[], float | None]
    ) -> float | None:
        """Use up one restart of a worker, of all these, by `spend`. Return its result."""
        return spend()

    def start_due_s(self, ranks: Sequence[int]) -> float:
        """Return when these workers can restart (monotonic); infinite: there is no host for them yet."""
        return 0.0

    def may_retry(self, ranks: Sequence[int], error: InfiniRunError) -> bool:
        """Return whether a start of them that failed so has another try."""
        return False

    def check_waits(self, waiting: Sequence[PendingRestart]) -> InfiniRunError | None:
        """Return why those that wait for a host, all of them, wait no longer; None: they do."""
        return None
