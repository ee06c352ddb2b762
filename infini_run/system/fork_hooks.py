"""What is let go of in a child that the host program forks (os.fork, multiprocessing): a copy of a pipe's end that
stays open there would keep a rank, or us, waiting for an end that never comes.

The one rule: whoever opens descriptors is known here before it starts anything.
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
            """Close the copies, and touch nothing that is the parent's. Safe twice, and on what is half made."""


_known: WeakSet[ForkAware] = WeakSet()


def call_in_forked_children(owner: ForkAware) -> None:
    """Call its `after_fork_in_child` in every child that is forked as long as it is there."""
    _known.add(owner)


def _after_fork_in_child() -> None:
    with ExitStack() as all_of_them:  # whatever one of them raises
        for owner in list(_known):
            all_of_them.callback(owner.after_fork_in_child)
        _known.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
