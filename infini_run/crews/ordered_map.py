"""Results for many items, in their order, of tasks that whichever worker is free does."""

from __future__ import annotations

import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from infini_run.crews.future import Ask


def ordered_map(ask: Callable[[object], Ask], items: Iterator[object], ahead: int) -> Iterator[Any]:
    """Yield the result for each item.

    Args:
        ask: submits a task.
        items: taken as there is room, so there may be any number.
        ahead: how many tasks are submitted before the oldest of them has ended.

    Raises:
        BaseException: the first failure of any task, as soon as it happens; the others are cancelled.
    """
    changed = threading.Condition()
    failed: list[Ask] = []
    asks: deque[Ask] = deque()

    def on_done(done: Any) -> None:
        with changed:
            if done.has_failed:
                failed.append(done)
            changed.notify()

    def fill() -> None:
        while len(asks) < ahead:
            for item in items:
                asks.append(ask(item))
                asks[-1].add_done_callback(on_done)
                break
            else:
                return

    try:
        fill()
        while asks:
            with changed:
                while not failed and not asks[0].done():
                    changed.wait()
            if failed:
                failed[0].result()
            yield asks.popleft().result()
            fill()
    finally:
        for left in asks:
            left.cancel()
