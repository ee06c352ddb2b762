"""In a child that the host program forks (os.fork, multiprocessing), objects close their copies of descriptors: a
copy of a pipe's end that stays open there would keep a rank, or the launcher, waiting for the end of the pipe.

The one rule: an object that opens descriptors is registered here before it starts anything.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from weakref import WeakSet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class ForkAware(Protocol):
        def after_fork_in_child(self) -> None:
            """Close the copies, and touch nothing of the parent. Safe twice, and on an object that is half made."""


_known: WeakSet[ForkAware] = WeakSet()


def call_in_forked_children(owner: ForkAware) -> None:
    """Call `owner.after_fork_in_child` in every forked child, as long as the owner exists.

    Args:
        owner: only a weak reference is held.
    """
    _known.add(owner)


def _after_fork_in_child() -> None:
    with ExitStack() as all_of_them:  # even if one of them raises
        for owner in list(_known):
            all_of_them.callback(owner.after_fork_in_child)
        _known.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
