"""Restarts of a launch of a function: whether all ranks are started again after a failure, and when.

The budget and the delay are the command's (plan/restart_policy.py). Pure, except for the random number.
"""

from __future__ import annotations

from infini_run.errors import LaunchTimeout, NodeLost
from infini_run.options.from_python import read_flags
from infini_run.plan.restart_policy import RestartCount, describe, spend
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.options.options import Options

_FLAGS = ("max_restarts", "restart_delay", "restart_window", "hang_timeout", "stop_signal")


class LaunchRestarts:
    """The restarts of one launch of a function.

    Args:
        options: The command's options. `max_restarts`, `restart_delay_s` and `restart_window_s` are read.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count = RestartCount()

    @property
    def is_possible(self) -> bool:
        """There may be one."""
        return self._options.max_restarts > 0

    @property
    def total(self) -> int:
        """Restarts so far."""
        return self._count.total

    def next_delay_s(self, rank: int, error: object, healthy_s: float) -> float | None:
        """Take one restart; return how long to wait before it, in seconds. None: there is none.

        Args:
            rank: of the first failure; -1: of no rank, so that a restart would not help.
            error: that failure.
            healthy_s: how long all ranks were well before it, in seconds.
        """
        if rank < 0 or isinstance(error, (LaunchTimeout, NodeLost)):
            return None
        decision = spend(self._options, self._count, healthy_s)
        self._count = decision.count
        return decision.delay_s if decision.again else None

    def heading(self, delay_s: float, failure: str) -> str:
        """The line that announces a restart."""
        return f"{describe(self._count, self._options)} in {duration_text(delay_s)}: {failure}"


def read_failure_options(given: Mapping[str, object]) -> Options:
    """The command's options of restarts and hangs among a launcher's flags. Raises UsageError: one makes no sense."""
    request = read_flags({name: given[name] for name in _FLAGS if name in given}, ("true",), {})
    assert request.options is not None
    return request.options
