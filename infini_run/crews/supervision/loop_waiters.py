"""Coroutines, of any event loop of asyncio, that wait for something that a thread does."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future


class LoopWaiters:
    """Futures to await, all resolved by the next `wake`. Its owner holds its lock around `add` and `wake`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[AbstractEventLoop, Future[None]]] = []

    def add(self) -> Future[None]:
        """Return a future of the running loop."""
        from asyncio import get_running_loop

        loop = get_running_loop()
        future: Future[None] = loop.create_future()
        self._waiting.append((loop, future))
        return future

    def wake(self) -> None:
        """Resolve them. Called in any thread."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            resolve(loop, future)


def resolve(loop: AbstractEventLoop, future: Future[None]) -> None:
    """Wake the coroutine that awaits this future of its loop. Any thread may call it."""
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        return  # the loop has been closed, and the coroutine that waited there with it


def _resolve(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)
