"""What a rank says of itself: how far it is, that it is ready, what it does. For any program that a launch runs.

In a rank of a command the words go to NOTIFY_SOCKET (sd_notify(3)); in a worker of a function or a crew, to its
supervisor; outside of a launch, nowhere. A training imports this, so it imports nothing but `_socket`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_PROGRESS = 2**63 - 1
_STATUS = 512  # bytes that the launcher keeps
READY_WAIT_S = 10.0  # for a launcher that does not read: without the message it may stop the job


def progress(done: float, of: float | None = None) -> None:
    """Report the progress of the job, or of a task.

    Call it in each step, on any rank: it takes microseconds, and never waits. Outside of a launch it does nothing.

    Args:
        done: A whole number (a step, a sample) that continues where the last attempt ended. It is the rank's
            PROGRESS=, for `--progress_timeout` and `--max_no_progress`. To find slow ranks, report it on
            every rank, before the first collective of the step.
        of: All of it, in the same unit. Then `done` is any number, which is only shown: as the rank's status, or as
            the bar of a function.

    Raises:
        UsageError: Without `of`, `done` is not a whole number from 0 to 2**63 - 1.
    """
    worker = _worker()
    if worker is not None:
        worker.progress(done, of)
        return
    if of is not None:
        send_status(f"{done:.15g} of {of:.15g}")
        return
    if type(done) is not int or not 0 <= done <= MOST_PROGRESS:
        from infini_run.errors import UsageError

        raise UsageError(f"progress({done!r}): expected a whole number from 0 to 2**63 - 1, or progress(done, of)")
    notify_launcher(f"PROGRESS={done}")


def ready() -> None:
    """Report that this rank is ready, for `--ready_timeout`. Outside of a launch it does nothing."""
    worker = _worker()
    if worker is not None:
        worker.ready()
        return
    notify_launcher("READY=1", READY_WAIT_S)


def status_text(text: str) -> None:
    """Report what this rank is doing: one line, which the table and the report show.

    Args:
        text: The line; 512 bytes of it are kept. Outside of a launch nothing is done with it.
    """
    worker = _worker()
    if worker is not None:
        worker.status(text)
        return
    send_status(text)


def send_status(text: str) -> None:
    """Send a status to the launcher of this rank.

    Args:
        text: One line of it is kept, of at most 512 bytes.
    """
    line = " ".join(str(text).splitlines()).encode("utf-8", "replace")[:_STATUS]
    notify_launcher(f"STATUS={line.decode('utf-8', 'ignore')}")


def send(address: str, message: str, wait_s: float = 0.0) -> None:
    """Send a message of sd_notify(3) to a socket. Raises OSError: it cannot be sent.

    Args:
        address: The value of NOTIFY_SOCKET: a path, or an abstract name after `@`.
        message: The text.
        wait_s: How long to wait for room. 0: not at all.
    """
    import _socket

    sender = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        sender.settimeout(wait_s)
        sender.sendto(message.encode(), os.fsencode("\0" + address[1:] if address.startswith("@") else address))
    finally:
        sender.close()


def notify_launcher(message: str, wait_s: float = 0.0) -> None:
    """Send a message to the launcher of this rank. A NOTIFY_SOCKET without a launch is a service manager's.

    Args:
        message: Of sd_notify(3).
        wait_s: How long to wait for room. 0: not at all.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address and "INFINI_RUN_ID" in os.environ:
        try:
            send(address, message, wait_s)
        except OSError:
            return  # the launcher is gone or busy, and a training does not fail for that


def _worker() -> Any:
    """Return the Context of this process if it is a worker, else None."""
    module = sys.modules.get("infini_run.crews.worker.context")
    return getattr(module, "_current", None)
