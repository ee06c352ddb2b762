"""Seconds and counts that a Python program gives: checked where they enter, with one sentence about the fault."""

from __future__ import annotations

from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import SupportsFloat, SupportsIndex

LONGEST_S = 2.0**31  # 68 years; what is longer is no limit, since threading.TIMEOUT_MAX and poll(2) have theirs


def read_seconds(name: str, value: SupportsFloat, *, above_zero: bool = False) -> float:
    """Return a time limit in seconds.

    Args:
        name: of the argument, for the message.
        value: any real number but a bool; infinity is no limit.
        above_zero: 0 is refused, too.

    Raises:
        UsageError: it is not a number, is NaN, or is below zero.
    """
    seconds = _real(value)
    if not (seconds > 0 if above_zero else seconds >= 0):
        raise UsageError(
            f"{name}={value!r}: expected a number of seconds, {'above 0' if above_zero else '0 or more'}"
        )
    return seconds


def read_wait(name: str, value: SupportsFloat | None) -> float | None:
    """Return how long to wait, in seconds; None: without a limit.

    Args:
        name: of the argument, for the message.
        value: as for `read_seconds`. As in the standard library, a negative number is a time in the past.

    Raises:
        UsageError: it is not a number, or NaN.
    """
    if value is None:
        return None
    seconds = _real(value)
    if seconds != seconds:
        raise UsageError(f"{name}={value!r}: expected a number of seconds, or None for no limit")
    return max(0.0, seconds) if seconds < LONGEST_S else None


def read_count(name: str, value: SupportsIndex, *, least: int = 1) -> int:
    """Return a count.

    Args:
        name: of the argument, for the message.
        value: any whole number but a bool.
        least: the least that is allowed.

    Raises:
        UsageError: it is not a whole number, or is below `least`.
    """
    count = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else least - 1
    if count < least:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least {least}")
    return count


def _real(value: object) -> float:
    """Return the number as a float, or NaN if it is not a number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return float("nan")
    try:
        return float(value)
    except OverflowError:  # an int that no float can hold
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
