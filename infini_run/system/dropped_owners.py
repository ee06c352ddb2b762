"""The close of what a program dropped. A finalizer runs anywhere: in a thread that has any lock, of logging or of an
import for instance. Another thread may wait for that lock while it forks, and then a close waits for that fork
(core/group.py). So no finalizer waits: a thread closes."""

from __future__ import annotations

import sys

from infini_run.errors import StartError
from infini_run.system.exit_hooks import close_at_exit
from infini_run.system.fork_hooks import call_in_forked_children
from infini_run.system.joinable_thread import JoinableThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.system.fork_hooks import ForkAware


class _Closing:
    """A close in a thread, for which the exit of the interpreter waits."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._thread = JoinableThread(self._run, "infini-run: closing")

    def _run(self) -> None:
        self._close()

    def start(self) -> None:
        close_at_exit(self)
        self._thread.start()

    def close_at_exit(self) -> None:
        self._thread.join()


def close_dropped(close: Callable[[], None], part: ForkAware | None = None) -> None:
    """Close what nothing refers to any more, without a wait.

    Args:
        close: called once, in a thread; where there can be none, at once.
        part: what has copies of descriptors in forked children, if it does not know of forks itself.
    """
    if part is not None:
        call_in_forked_children(part)
    if sys.is_finalizing():  # a thread would never begin, and its start would wait for that
        close()
        return
    try:
        _Closing(close).start()
    except (StartError, RuntimeError):  # there is no room for a thread, or it is too late for one
        close()
