"""The user's code, where whatever it raises is an answer and no error of this package.

Tasks, and the methods that pickle, print and compare: they may raise anything. This is the one place that catches it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def capture_exception(what: Callable[..., T], *args: object) -> tuple[T | None, BaseException | None]:
    """Return what it returned, and what it raised. SystemExit and KeyboardInterrupt pass through."""
    try:
        return what(*args), None
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        return None, error


def capture_foreign(what: Callable[..., T], *args: object) -> tuple[T | None, BaseException | None]:
    """Return as capture_exception does, for methods of an object from another process. SystemExit and
    KeyboardInterrupt are answers too, unless a signal was their cause."""
    try:
        return what(*args), None
    except BaseException as error:
        from infini_run.system.signal_origin import came_by_signal

        if came_by_signal(error):
            raise
        return None, error
