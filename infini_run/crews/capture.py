"""The user's code, where whatever it raises is an answer and no error of ours.

Tasks, and the methods that pickle, print and compare: they may raise anything. This is the one place that catches it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def capture_exception(what: Callable[..., T], *args: object) -> tuple[T | None, BaseException | None]:
    """What it returned, or what it raised; SystemExit and KeyboardInterrupt are not held up."""
    try:
        return what(*args), None
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        return None, error
