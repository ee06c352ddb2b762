"""The exit of the interpreter: finish the work of what is open, then close it.

Work finishes where the executors of concurrent.futures finish theirs: in a hook of `threading`, before any atexit
handler. The program's own handlers may delete what the work needs. From Python 3.12 on, neither a thread nor a fork
can start once they run. Threads of the program that are no daemons may still use what is open, so atexit closes it
after they exited. Ctrl-C that ends the program, or comes while work finishes, closes everything at once.

The one rule: an object that starts processes stays registered as long as some of them may run. The registry holds
weak references only: a class ends its own processes when its users drop the object.
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
            """End the processes, and wait until none is left. The main thread calls it once. An owner that accepts
            work may also have a method `finish_at_exit`, which waits until that work is done, and runs first. Its
            attribute `has_work` says whether more arrived meanwhile."""


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
    """Forget an owner that closed before the exit. Safe twice.

    Args:
        number: as `close_at_exit` returned it.
    """
    _open.pop(number, None)


def _finish_all() -> None:
    """Finish the work of all owners, and repeat while there is work: one owner may bring work to another."""
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
    """Return whether a Ctrl-C that nothing caught ends the program. An interactive interpreter continues after
    one."""
    error = getattr(sys, "last_value", None)  # what Python has printed a traceback of, and then exits
    return isinstance(error, KeyboardInterrupt) and not hasattr(sys, "ps1")


def _latest_first() -> list[Closable]:
    """Return what is open, the latest first. Another thread may close some of it meanwhile."""
    return [owner for ref in reversed(_open.valuerefs()) if (owner := ref()) is not None]


def _close_all() -> None:
    """Close every owner, the latest first, even if the close of one raises or a signal interrupts it."""
    failure: BaseException | None = None
    while _open:
        try:
            _close_latest()
        except BaseException as error:
            failure = error
    if failure is not None:
        raise failure


def _close_latest() -> None:
    try:
        _, owner = _open.popitem()
    except KeyError:  # a thread has just dropped the last one
        return
    owner.close_at_exit()


@atexit.register
def _finish_and_close_all() -> None:
    """Finish work that threads added since the first time, then close all."""
    _finish_all()
    _close_all()


with suppress(RuntimeError):  # a thread imported this first, after the end of the main one: only atexit is left
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]

os.register_at_fork(after_in_child=_open.clear)
