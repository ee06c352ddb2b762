"""What is open when the interpreter exits: its work is finished, then it is closed.

Work is finished where the executors of concurrent.futures finish theirs, in a hook of `threading`, before any atexit
handler: the program's own handlers may delete what the work needs, and from Python 3.12 on neither a thread nor a
fork can be started once they run. Threads of the program that are no daemons may still use what is open; it is closed
after they have ended, by atexit. Ctrl-C that ends the program, or comes while the work is being finished, closes
everything at once.

The one rule: an object that starts processes is registered here as long as some of them may run. Only weak references
are held; the class of an object that its users have dropped ends its processes.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from itertools import count
from weakref import WeakValueDictionary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Closable(Protocol):
        def close_at_exit(self) -> None:
            """End the processes, and wait until none is left. Called once, in the main thread. An owner that accepts
            work may have a method `finish_at_exit` too, which is called before: it waits until that work is done. Its
            attribute `has_work` says whether more has come meanwhile."""


_numbers = count()
_open: WeakValueDictionary[int, Closable] = WeakValueDictionary()


def close_at_exit(owner: Closable) -> int:
    """Finish and close `owner` when the interpreter exits.

    Args:
        owner: only a weak reference is held.

    Returns:
        A number for `closed`.
    """
    number = next(_numbers)
    _open[number] = owner
    return number


def closed(number: int) -> None:
    """Do nothing more for an owner that was closed before the exit. Safe twice.

    Args:
        number: as `close_at_exit` returned it.
    """
    _open.pop(number, None)


def _finish_all() -> None:
    """Again while there is work: what one owner has done may bring work to another."""
    try:
        if _is_interrupted():
            _close_all()
        owners = _latest_first()
        while owners:
            for owner in owners:
                finish = getattr(owner, "finish_at_exit", None)
                if finish is not None:
                    finish()
            owners = [owner for owner in _latest_first() if getattr(owner, "has_work", False)]
    except BaseException:  # Ctrl-C
        _close_all()
        raise


def _is_interrupted() -> bool:
    """Whether Ctrl-C, which nothing has caught, ends the program. An interactive interpreter goes on after one."""
    error = getattr(sys, "last_value", None)  # what Python has printed a traceback of, and then exits
    return isinstance(error, KeyboardInterrupt) and not hasattr(sys, "ps1")


def _latest_first() -> list[Closable]:
    """What is open now. Another thread may close some of it meanwhile."""
    return [owner for ref in reversed(_open.valuerefs()) if (owner := ref()) is not None]


def _close_all() -> None:
    """Close every owner, the latest first, even if the close of one fails or is interrupted."""
    try:
        _, owner = _open.popitem()
    except KeyError:
        return
    try:
        owner.close_at_exit()
    finally:
        _close_all()


@atexit.register
def _finish_and_close_all() -> None:
    """Threads may have had more done since the first time."""
    _finish_all()
    _close_all()


with suppress(RuntimeError):  # first imported by a thread, after the end of the main one: only atexit is left
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]

os.register_at_fork(after_in_child=_open.clear)
