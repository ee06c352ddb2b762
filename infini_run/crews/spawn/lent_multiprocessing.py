"""What a process lends to the workers that it starts: the resource tracker and the authkey of its multiprocessing.

A worker is no child of multiprocessing, which would hand both down. Without them its own tracker would, at the
worker's end, unlink a SharedMemory block that it has only attached to. A manager of the caller's would reject it. So
workers ask, over a socket that comes with the first byte of their channel, when they need one of the two
(borrowed_multiprocessing.py). Nothing of multiprocessing starts, or costs an import, for those that don't. Decision
56.
"""

from __future__ import annotations

import _signal
import os
import socket
from contextlib import suppress

from infini_run.core.group import forking
from infini_run.crews.capture import capture_exception
from infini_run.crews.worker.borrowed_multiprocessing import (
    AUTHKEY,
    GRANTED,
    HANDOVER,
    NO_WAIT,
    TRACKER,
    receive_fds,
    send_fd,
)
from infini_run.system.fork_hooks import close_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_LOCK_S = 1.0  # starting a tracker takes some milliseconds


class Lender:
    """The answers to the workers of one group. `poll` has something to do when `fileno` is readable. Create it where
    no fork runs meanwhile (`forking`)."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)

    def fileno(self) -> int:
        """Return the socket of the questions; -1: no worker is left that could ask."""
        return self._ours.fileno()

    def endow(self, channel: socket.socket) -> None:
        """Send a worker the socket that it asks over, ahead of all else. channel: this side of the worker's.

        Without it, the worker has a separate tracker and key: a user may have only a limited number of descriptors on
        their way (ETOOMANYREFS of unix(7)).
        """
        with suppress(OSError):
            send_fd(channel, HANDOVER, self._theirs.fileno())

    def close_theirs(self) -> None:
        """Close this process's copy of what the workers have."""
        close_link(self._theirs)

    def poll(self) -> None:
        """Answer what workers asked; never block."""
        while self._ours.fileno() >= 0:
            try:
                question, fds = receive_fds(self._ours)
            except BlockingIOError:
                return
            except OSError:
                question, fds = b"", []
            if not question and not fds:  # every worker is gone
                close_link(self._ours)
                return
            self._answer(question, fds)

    def _answer(self, question: bytes, fds: list[int]) -> None:
        """Answer a worker. What a worker sends is its own user's affair: the worst case of a question is a
        refusal."""
        answer = _ANSWERS.get(question)
        try:
            if answer is not None and len(fds) == 1:
                capture_exception(answer, fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Answer no more. Safe twice."""
        close_link(self._ours)
        close_link(self._theirs)

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child."""
        self._ours.close()
        self._theirs.close()


def _lend_tracker(fd: int) -> None:
    """Lend the tracker. multiprocessing's own children get it in the same way, and start it in the same way where it
    does not run. `forking`: a child of a fork meanwhile would hold locks of these modules for ever. But whoever has
    the tracker's lock may be forking, in a signal handler, and wait for this thread: then there is no answer."""
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    try:
        with forking:
            from multiprocessing import resource_tracker

            lock = resource_tracker._resource_tracker._lock  # type: ignore[attr-defined]
            if not lock.acquire(timeout=_LOCK_S):
                return
            lock.release()
            tracker: Any = resource_tracker.getfd()
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)  # it unblocks SIGINT and SIGTERM in this thread
    with _reply_socket(fd) as reply:
        send_fd(reply, GRANTED, tracker)


def _lend_authkey(fd: int) -> None:
    with forking:
        from multiprocessing.process import current_process
    with _reply_socket(fd) as reply:
        reply.sendall(GRANTED + bytes(current_process().authkey), NO_WAIT)


_ANSWERS: dict[bytes, Callable[[int], None]] = {TRACKER: _lend_tracker, AUTHKEY: _lend_authkey}


def _reply_socket(fd: int) -> socket.socket:
    """Return a copy of the reply socket as an object. Raises OSError if it is no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
