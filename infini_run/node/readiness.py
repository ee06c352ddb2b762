"""READY=1, seen from above: whether all ranks have said it, and our own word to who started us (sd_notify(3))."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from infini_run.report.exit import Exit


def all_ready(exits: Iterable[Exit], *, may_restart: bool = False) -> bool | None:
    """True: every rank has said READY=1. False: one ended without. None: that is still open. may_restart: one that
    has failed, or was stopped, may come back."""
    answer: bool | None = True
    for exit_ in exits:
        if exit_.ready_s is None:
            if exit_.end_s is not None and not (may_restart and exit_.shell_code):
                return False
            answer = None
    return answer


def notify_ready(address: str) -> str:
    """Say READY=1 at NOTIFY_SOCKET's address, without waiting; why that was not possible, or ""."""
    import socket

    path = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(b"READY=1", os.fsencode(path))
    except OSError as error:  # a name that is too long has no errno
        return f"READY=1 cannot be told to NOTIFY_SOCKET={address}: {error.strerror or error}"
    return ""
