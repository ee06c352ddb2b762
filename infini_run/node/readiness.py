"""READY=1, from above: whether all ranks have sent it, and the launcher's own message to its parent
(sd_notify(3))."""

from __future__ import annotations

from infini_run.rank_messages import send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

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
