"""What is open when the interpreter exits: it is closed then, the latest first.

The one rule: an object that starts processes is known here as long as some of them may run. Only weak references are
held; an object that its users have dropped ends as its own class says.
"""

from __future__ import annotations

import atexit
import os
from itertools import count
from weakref import WeakValueDictionary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Closable(Protocol):
        def close_at_exit(self) -> None:
            """End what runs, and wait until nothing is left. Called once, in the main thread."""


_numbers = count()
_open: WeakValueDictionary[int, Closable] = WeakValueDictionary()


def close_at_exit(owner: Closable) -> int:
    """Have it closed when the interpreter exits. Return a number for `closed`."""
    number = next(_numbers)
    _open[number] = owner
    return number


def closed(number: int) -> None:
    """It was closed before. Safe twice."""
    _open.pop(number, None)


@atexit.register
def _close_all() -> None:
    while _open:
        try:
            _, owner = _open.popitem()  # the latest
        except KeyError:
            return
        owner.close_at_exit()


os.register_at_fork(after_in_child=_open.clear)
