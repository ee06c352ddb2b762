"""What Launcher.start and Pool.start give: a launch that is supervised by a thread while the caller does something
else."""

from __future__ import annotations

import threading

from infini_run.crews.capture import capture_exception
from infini_run.crews.joinable_thread import JoinableThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from infini_run.crews.function_launch import Launch
    from infini_run.crews.result import LaunchResult
    from infini_run.report.report import Exit


class LaunchHandle:
    """A function that runs on every rank. Leaving the `with` block, or `close`, stops it where it still runs, and
    nothing of it is left. Usable from several threads."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._result: LaunchResult | None = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        launch.follower = JoinableThread(self._follow, "infini-run: launch")
        try:
            launch.follower.start()
        except BaseException:
            launch.follower = None
            launch.close()
            raise

    def _follow(self) -> None:
        try:
            self._result, self._error = capture_exception(self._launch.follow)
        finally:
            self._is_over.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank has ended and nothing is left; False when the time is up first."""
        return self._is_over.wait(timeout_s)

    def done(self) -> bool:
        """Whether that is so. Looks, and does not wait."""
        return self._is_over.is_set()

    def result(self, timeout_s: float | None = None) -> LaunchResult:
        """The results, once it has ended. Raises what Launcher.run raises, and TimeoutError: it has not ended in so
        many seconds; it goes on."""
        if not self._is_over.wait(timeout_s):
            raise TimeoutError(f"the launch has not ended within {timeout_s:g} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to one rank's process (None: to every rank's); return how many it reached."""
        return self._launch.signal(number, rank)

    def stop(self) -> None:
        """Begin to stop: the stop signal, SIGKILL after the grace. Returns at once; `wait` sees the end."""
        self._launch.stop()

    def kill(self) -> None:
        """SIGKILL to everything that is left. Returns at once; `wait` sees the end."""
        self._launch.kill()

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return self._launch.pids

    @property
    def exits(self) -> Sequence[Exit | None]:
        """By rank: how its process ended; None: it has not."""
        return self._launch.exits

    def close(self) -> None:
        """Stop what still runs (gracefully, within the grace) and wait until nothing is left. Safe twice."""
        try:
            if not self._is_over.is_set():
                self._launch.stop()
                self._is_over.wait()
        finally:
            self._launch.close()
            self._launch.follower.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
