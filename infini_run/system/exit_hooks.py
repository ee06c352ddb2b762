"""Objects that own processes are closed when the interpreter exits, the latest first.

The one rule: an object that starts processes is registered here as long as some of them may run. Only weak references
are held; the class of an object that its users have dropped ends its processes.
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
            """End the processes, and wait until none is left. Called once, in the main thread."""


_numbers = count()
_open: WeakValueDictionary[int, Closable] = WeakValueDictionary()


def close_at_exit(owner: Closable) -> int:
    """Call `owner.close_at_exit` when the interpreter exits. Return a number for `closed`."""
    number = next(_numbers)
    _open[number] = owner
    return number


def closed(number: int) -> None:
    """Take the owner with this number out, because it was closed before. Safe twice."""
    _open.pop(number, None)


@atexit.register
def _close_all() -> None:
    """Close every owner, even if the close of one fails or is interrupted."""
    try:
        _, owner = _open.popitem()  # the latest
    except KeyError:
        return
    try:
        owner.close_at_exit()
    finally:
        _close_all()


os.register_at_fork(after_in_child=_open.clear)
