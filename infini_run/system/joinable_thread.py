"""A thread that allows another join after an exception has interrupted a join.

CPython 3.11 and 3.12 treat a thread as finished after a KeyboardInterrupt in `Thread.join`, although the thread still
runs (threading.py, `_wait_for_tstate_lock`, bpo-45274). Here the thread sets an event at its end.
"""

from __future__ import annotations

import _signal  # signal makes an enum member of each number that these return
import errno
import os
import sys
from threading import Event, Thread, current_thread

from infini_run.errors import StartError
from infini_run.system.resource_limits import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class JoinableThread(Thread):
    """A daemon thread that runs `target`; every thread that somebody waits for is one."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._has_run = Event()
        self._pid = os.getpid()
        self._signals: set[int] = set()  # that the thread unblocks again

    def start(self) -> None:
        """Start the thread. A signal meanwhile is handled once the thread runs. An exception of a handler (Ctrl-C) in
        the middle of Thread.start would leave open whether it does. Raises StartError if there can be no thread."""
        valid = _signal.valid_signals()  # the mask may have others, which Python warns of: glibc's own
        self._signals = valid - _signal.pthread_sigmask(_signal.SIG_BLOCK, valid)
        try:
            super().start()
        except RuntimeError as error:
            if self.ident is not None or sys.is_finalizing() or "shutdown" in str(error):
                raise  # it was started before, or comes too late
            text = f"a thread cannot be started: {LIMITS[errno.EAGAIN]}, or no memory for its stack"
            raise StartError(text, "starting a thread", errno.EAGAIN) from None
        finally:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, self._signals)

    def run(self) -> None:
        """Run the target, then set the event."""
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, self._signals)
        try:
            super().run()
        finally:
            self._has_run.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds (None: without limit) for the target to return. Return at once for a thread
        that never started, and in a forked child, where it does not exist. Raises RuntimeError for this thread
        itself."""
        if self is current_thread() and os.getpid() == self._pid:
            super().join()  # which refuses
        if self.ident is not None and os.getpid() == self._pid and self._has_run.wait(timeout):
            super().join()

    def is_alive(self) -> bool:
        """Return whether the target still runs."""
        return self.ident is not None and os.getpid() == self._pid and not self._has_run.is_set()
