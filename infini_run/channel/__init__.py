"""Channels: typed messages between two processes, in two directions, each with one owner of either end.

A socketpair whose two directions are two half-streams. A process owns one end of each: it sends into one, receives
from the other, and closes nothing else. So the end of a stream is a place in it. END means that the sender closed it;
end of file without END means that the sender died. No flag reports it, which two could set.

    parent, child = channel.pair()    # each a Sender and a Receiver
    tx, rx = channel.connect(fd)      # in the process that inherited child's socket
"""

from __future__ import annotations

import _socket
import os
import sys

from infini_run.channel.endpoint import LIMIT, SharedSocket
from infini_run.channel.receiver import Receiver
from infini_run.channel.sender import LINGER_S, Sender
from infini_run.number_arguments import read_count
from infini_run.system.monkey_patches import check_waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

__all__ = ["LIMIT", "LINGER_S", "Receiver", "Sender", "connect", "pair"]


def pair(limit: int = LIMIT) -> tuple[tuple[Sender, Receiver], tuple[Sender, Receiver]]:
    """Return two connected sides, each a Sender and a Receiver. `limit`: bytes of one message.

    Hand one side's `fileno()` to another process (pass_fds=, stdin), then `close_copy()` that side here."""
    check_waits("a channel")
    limit = read_count("limit", limit)
    here, there = _of_sockets("socketpair")(_socket.AF_UNIX, _socket.SOCK_STREAM)
    return _side(here, limit), _side(there, limit)


def connect(fd: int, limit: int = LIMIT) -> tuple[Sender, Receiver]:
    """Return the side whose socket this process inherited as `fd`, and own `fd`. Raises OSError if it is no
    socket."""
    check_waits("a channel")
    limit = read_count("limit", limit)
    sock = _of_sockets("socket")(fileno=fd)
    sock.setblocking(True)
    os.set_inheritable(fd, False)
    return _side(sock, limit)


def _of_sockets(name: str) -> Any:
    """Return what `socket` calls so, if that is loaded: gevent may have patched it. Else return that of the C module
    behind it, which has all that a channel needs. The import of `socket` was a quarter of a worker's start."""
    return getattr(sys.modules.get("socket"), name, None) or getattr(_socket, name)


def _side(sock: socket.socket, limit: int) -> tuple[Sender, Receiver]:
    line = SharedSocket(sock)
    return Sender(line, limit), Receiver(line, limit)
