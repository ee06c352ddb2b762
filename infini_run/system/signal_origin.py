"""Whether a signal (Ctrl-C, for instance) raised an exception, or the code that ran.

Unpickling runs code that another process has chosen. What that raises must not end this program; a signal still may.
"""

from __future__ import annotations

import signal
import threading
from functools import partial
from types import CodeType, TracebackType


def came_by_signal(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`.

    Handlers run in the main thread, between two instructions of the code that they interrupt. A handler in Python has
    a frame in the traceback. Python's own for SIGINT has none: then the traceback ends where no `raise` statement is.

    Args:
        error: a caught exception, with its traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    last = trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        last, trace = trace, trace.tb_next
    return isinstance(error, KeyboardInterrupt) and (last is None or not _is_raise(last))


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a signal handler; None if it is not in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004  its code is looked at
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_raise(last: TracebackType) -> bool:
    from dis import opname

    return opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
