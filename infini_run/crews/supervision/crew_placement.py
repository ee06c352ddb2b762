"""Whether a worker of a crew that has failed can be started again, as far as that depends on its host."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from infini_run.crews.spawn.spawner import WorkerProcess
    from infini_run.errors import InfiniRunError

NEVER = float("inf")


class PendingRestart:
    """Ranks that are to be started again together, at a time, once all of them are settled."""

    def __init__(self, ranks: set[int], due_s: float) -> None:
        self.ranks = ranks
        self.due_s = due_s


class CrewPlacement:
    """Every worker stays on its host: it can be started there again at once, or not at all.

    Attributes:
        wait_end_s: When a worker has waited for a host for too long (monotonic); infinite: none waits.
    """

    wait_end_s = NEVER

    def add_watcher(self, wake: Callable[[], None]) -> None:
        """From now on, call this when a host has come or gone."""

    def remove_watcher(self, wake: Callable[[], None]) -> None:
        """Call it no more."""

    def spend(
        self, failed: WorkerProcess, processes: Iterable[WorkerProcess | None], spend: Callable[[], float | None]
    ) -> float | None:
        """Take a restart of a worker, of all these, from the budget: by `spend`, whose result is returned."""
        return spend()

    def start_due_s(self, ranks: Sequence[int]) -> float:
        """Return when these workers can be started again (monotonic); infinite: there is no host for them yet."""
        return 0.0

    def may_retry(self, ranks: Sequence[int], error: InfiniRunError) -> bool:
        """Whether a start of them that has failed so is tried again."""
        return False

    def check_waits(self, waiting: Sequence[PendingRestart]) -> InfiniRunError | None:
        """Return why those that wait for a host, all of them, wait no longer; None: they do."""
        return None
