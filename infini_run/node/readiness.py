"""READY=1, from above: whether all ranks have sent it, and the launcher's own message to its parent
(sd_notify(3)). Imported where somebody waits for that."""

from __future__ import annotations

from infini_run.rank_messages import send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infini_run.report.exit import Exit


def all_ready(exits: Iterable[Exit], *, may_restart: bool = False) -> bool | None:
    """Return whether all ranks have sent READY=1 (sd_notify(3)).

    Args:
        exits: The state of every rank.
        may_restart: A rank that failed, or was stopped, may come back.

    Returns:
        True: every rank has. False: one exited without it. None: neither is so yet.
    """
    answer: bool | None = True
    for exit_ in exits:
        if exit_.ready_s is None:
            if exit_.end_s is not None and not (may_restart and exit_.shell_code):
                return False
            answer = None
    return answer


def notify_ready(address: str) -> str:
    """Send READY=1 to the service manager that started this process, without waiting.

    Args:
        address: The value of NOTIFY_SOCKET.

    Returns:
        Why that failed. Empty: it is sent.
    """
    try:
        send(address, "READY=1")
    except OSError as error:  # a name that is too long has no errno
        return f"READY=1 cannot be sent to NOTIFY_SOCKET={address}: {error.strerror or error}"
    return ""


class ReadyRanks:
    """The ranks of a launch that have sent READY=1, for the service manager that started the launcher.

    Args:
        count: How many ranks there are.
        address: The manager's NOTIFY_SOCKET.
    """

    def __init__(self, count: int, address: str) -> None:
        self._count = count
        self._address = address
        self._ready: set[int] = set()  # by index
        self._is_notified = False

    def add(self, index: int) -> str:
        """Add a rank. When all are ready, notify the manager, once.

        Args:
            index: The rank's index in the plan.

        Returns:
            Why the manager could not be notified. Empty: it is, or is to be later.
        """
        self._ready.add(index)
        if self._is_notified or len(self._ready) < self._count:
            return ""
        self._is_notified = True
        return notify_ready(self._address)

    def remove(self, indexes: Sequence[int]) -> None:
        """Remove ranks that restart.

        Args:
            indexes: Their indexes in the plan.
        """
        self._ready.difference_update(indexes)
