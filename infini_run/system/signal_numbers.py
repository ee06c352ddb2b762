"""The numbers of signals (signal(7)) as plain integers.

They come from the C module of `signal`: the enums of `signal` itself take 2 ms of a start. Code on the plain launch's
path imports `_signal` where it needs it, without this module.
"""

from __future__ import annotations

import _signal

from infini_run.errors import UsageError

SIGINT: int = _signal.SIGINT
SIGQUIT: int = _signal.SIGQUIT
SIGBUS: int = _signal.SIGBUS
SIGKILL: int = _signal.SIGKILL
SIGTERM: int = _signal.SIGTERM
SIGCONT: int = _signal.SIGCONT
SIGSTOP: int = _signal.SIGSTOP
SIGTSTP: int = _signal.SIGTSTP
SIGWINCH: int = _signal.SIGWINCH


def check_signal(number: object) -> int:
    """Return the number of a signal, or 0, from a user's value. Raises UsageError if it is none."""
    if isinstance(number, int) and not isinstance(number, bool) and number in (0, *_signal.valid_signals()):
        return int(number)
    raise UsageError(f"number={number!r}: unknown signal")
