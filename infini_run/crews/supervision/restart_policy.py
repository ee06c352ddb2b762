"""The choice of the workers that restart after a failure, when, and how often. Pure: times are arguments.

Like Erlang's supervisors (supervisor(3)): a strategy chooses the affected workers, an intensity how many restarts
within how long are too many. After that the crew itself fails.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.number_arguments import read_count, read_seconds
from infini_run.plan.restart_policy import delay_of
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

STRATEGIES = ("one_for_one", "one_for_all", "rest_for_one")


@record
class Restart:
    """The restarts of workers after a failure.

    Args:
        strategy: one_for_one (the one that failed), one_for_all (all of them; the others stop first), rest_for_one
            (it, and those of higher rank).
        max_restarts: the most restarts within `within_s`; one more failure fails the crew. A failure counts once,
            however many workers restart.
        within_s: the time in which restarts count, in seconds.
        delay_s: the delay before the first restart, in seconds. It doubles with each restart within `within_s`. 0: no
            delay.
        max_delay_s: the longest delay, in seconds.

    Raises:
        UsageError: a value is invalid.
    """

    strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] = "one_for_one"
    max_restarts: int = 3
    within_s: float = 60.0
    delay_s: float = 0.0
    max_delay_s: float = 30.0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"Restart(strategy={self.strategy!r}): expected {', '.join(STRATEGIES)}")
        read_count("Restart: max_restarts", self.max_restarts, least=0)
        read_seconds("Restart: within_s", self.within_s, above_zero=True)
        delay_s = read_seconds("Restart: delay_s", self.delay_s)
        if read_seconds("Restart: max_delay_s", self.max_delay_s) < delay_s:
            raise UsageError(f"Restart: max_delay_s={self.max_delay_s!r}: expected at least delay_s={self.delay_s!r}")


NEVER = Restart(max_restarts=0)


def check(restart: Restart) -> Restart:
    """Check the value. Raises UsageError if it is no Restart."""
    if not isinstance(restart, Restart):
        raise UsageError(f"restart={restart!r}: expected a Restart, or None for no restarts")
    return restart


class Budget:
    """How many restarts there were, and whether there may be one more."""

    def __init__(self, restart: Restart) -> None:
        self._restart = restart
        self._spent: list[float] = []  # when each was, of those within the time

    def spend(self, now_s: float) -> float | None:
        """Use up one restart. Return the delay in seconds, or None if no restart is left."""
        restart = self._restart
        self._spent = [at for at in self._spent if now_s - at < restart.within_s]
        if len(self._spent) >= restart.max_restarts:
            return None
        self._spent.append(now_s)
        return delay_of(restart.delay_s, len(self._spent), restart.max_delay_s)


def ranks_to_restart(strategy: str, rank: int, world_size: int) -> range:
    """Return the ranks that restart after the failure of this one."""
    if strategy == "one_for_all":
        return range(world_size)
    return range(rank, world_size if strategy == "rest_for_one" else rank + 1)
