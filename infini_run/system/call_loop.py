"""The loop of a thread: it waits for descriptors, which have handlers, and for calls from other threads."""

from __future__ import annotations

from collections import deque

from infini_run.system.poller import READ, Poller
from infini_run.system.wakeup import Wakeup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class CallLoop(Wakeup):
    """A loop whose thread alone uses `poller`, and runs the `calls` in order.

    Attributes:
        is_awake: the thread will look at `calls` before it waits, so a call need not wake it. The thread sets it to
            False before it looks for the last time.
    """

    is_awake = False

    def __init__(self) -> None:
        self.poller = Poller()
        self.calls: deque[Callable[[], None]] = deque()
        super().__init__()
        self.poller.watch(self.fileno(), READ, self._on_wakeup)

    def _on_wakeup(self) -> None:
        self.clear()

    def call(self, act: Callable[[], None]) -> bool:
        """Run a function in the loop. Return False if the loop is closed: then it does not run."""
        with self._lock:
            if self._fd < 0:
                return False
            self.calls.append(act)  # first: the loop may wake at once
            if self.is_awake:
                return True
            self.is_awake = True
            return self.wake()

    def run_calls(self) -> None:
        """Run the calls that were requested, and those that they request."""
        while self.calls:
            self.calls.popleft()()

    def close(self) -> None:
        """Close the descriptors; calls that have not run stay in `calls`. Safe twice."""
        super().close()
        self.poller.close()
