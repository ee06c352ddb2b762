"""In a child that the host program forks (os.fork, multiprocessing), objects close their copies of descriptors: a
copy of a pipe's end that stays open there would keep a rank, or the launcher, waiting for the end of the pipe.

Two rules: an object that opens descriptors is registered here before it starts anything; and a socket that may be
closed while another thread forks is announced to `before_close`, as the core does by itself (csrc/sys/fd.c).
"""

from __future__ import annotations

from _collections import deque  # type: ignore[import-not-found]  # the C module: `collections` costs a head 3 ms
from _weakref import ref

import infini_run.lean_os as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class ForkAware(Protocol):
        def after_fork_in_child(self) -> None:
            """Close the copies, and touch nothing of the parent. Safe twice, and on an object that is half made."""


_known: set[ref[ForkAware]] = set()
_closings: deque[tuple[int, int]] = deque(maxlen=1024)  # descriptors with their inode numbers, which never come again


def call_in_forked_children(owner: ForkAware) -> None:
    """Call `owner.after_fork_in_child` in every forked child, as long as the owner exists.

    Args:
        owner: only a weak reference is held.
    """
    _known.add(ref(owner, _known.discard))


def before_close(fd: int) -> None:
    """Call right before a socket, or the end of a pipe, that this process made is closed.

    The kernel copies descriptors before memory, so a child that another thread is forking may have it open, and its
    memory say that it is closed: it is closed there once more.

    Args:
        fd: -1: none.
    """
    if fd >= 0:
        _closings.append((fd, os.fstat(fd).st_ino))


def _close_again() -> None:
    for fd, inode in _closings:
        try:
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
        except OSError:  # it is closed, as nearly all of them
            continue
    _closings.clear()


def _after_fork_in_child() -> None:
    _close_again()
    error = None
    for known in list(_known):
        owner = known()
        try:
            if owner is not None:
                owner.after_fork_in_child()
        except BaseException as of_this_one:  # the others have their turn
            error = of_this_one
    _known.clear()
    if error is not None:
        raise error


os.register_at_fork(after_in_child=_after_fork_in_child)
