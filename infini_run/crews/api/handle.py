"""The result of Launcher.start and Pool.start: a launch that runs while the caller does something else."""

from __future__ import annotations

import time
from typing import Generic, TypeVar
from warnings import warn

from infini_run.crews.api.result import LaunchResult
from infini_run.crews.capture import capture_exception
from infini_run.crews.html_table import html_table
from infini_run.crews.protocol import TaskFailed
from infini_run.crews.remote_exception import add_notes, to_exception
from infini_run.errors import InfiniRunError, UsageError
from infini_run.number_arguments import read_wait
from infini_run.public_names import public_names
from infini_run.report.text import describe_end
from infini_run.system.fork_hooks import stayed_with_parent
from infini_run.system.signal_numbers import check_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from infini_run.crews.supervision.future import Ask
    from infini_run.crews.supervision.launch_supervisor import Failure, LaunchSupervisor
    from infini_run.plan.restart_policy import RestartState
    from infini_run.report.exit import Exit

R = TypeVar("R")
_NOTED = 8  # later failures that an error names


class LaunchHandle(Generic[R]):
    """A function that runs on every rank.

    `await handle` gives what `result` gives. If you cancel the waiting coroutine, the launch continues. The end of
    the `with` block, or `close`, stops a launch that still runs, and nothing of it is left. If you drop the handle,
    the launch continues. The thread that waits for results unpickles them. Several threads may use a handle.
    """

    def __init__(self, launch: LaunchSupervisor) -> None:
        self._launch = launch
        self._outcome: tuple[LaunchResult[Any] | None, BaseException | None] | None = None

    def __repr__(self) -> str:
        launch = self._launch
        count = len(launch.workers)
        if launch.belongs_to_parent:
            how = "its parent's"
        elif not launch.is_over:
            how = "stopping" if launch.stopped_s is not None else "running"
        else:
            how = "failed" if launch.failures else "stopped" if launch.stopped_s is not None else "done"
        return f"<LaunchHandle of {count} rank{'s' * (count != 1)}: {how}>"

    def _repr_html_(self) -> str:
        """Return how each rank is as a table, for a notebook."""
        processes = [worker.process for worker in self._launch.workers]
        rows = [
            (rank, "", "", "not started")
            if process is None
            else (rank, process.host, process.pid or "", describe_end(process.exit) if process.exit else "running")
            for rank, process in enumerate(processes)
        ]
        return html_table(repr(self)[1:-1], ("rank", "host", "pid", "state"), rows)

    def __dir__(self) -> list[str]:
        return public_names(self, ("follow_async", "result_or_stop", "stop_async"))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank exited and nothing is left.

        Args:
            timeout_s: in seconds; None: no limit.

        Returns:
            True; False if the launch still runs after `timeout_s`.

        Raises:
            InfiniRunError: this process is a fork, and the launch is its parent's.
        """
        timeout_s = read_wait("timeout_s", timeout_s)
        if self._launch.belongs_to_parent:
            raise InfiniRunError(stayed_with_parent("the launch"))
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        launch = self._launch
        launch.is_awaited = True
        try:
            while not launch.is_over or launch.has_results:
                left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
                found = launch.next_result(left_s)
                if found is not None:
                    self._open(*found)
                elif left_s is not None and not launch.is_over:
                    launch.is_awaited = False
                    return False
            launch.join()
        except BaseException:
            launch.is_awaited = False
            raise
        return True

    def _open(self, rank: int, ask: Ask[Any]) -> None:
        """Unpickle a result now: if that fails, the launch has failed."""
        error = ask.exception()
        if error is not None:
            self._launch.call(lambda: self._launch.fail_result(ask, rank, error))

    def done(self) -> bool:
        """Return whether every rank exited and nothing is left, without waiting. In a forked child, this is True for
        its parent's launches, whose results never arrive there."""
        return self._launch.is_over

    def result(self, timeout_s: float | None = None) -> LaunchResult[R]:
        """Wait for the end, and return what the function returned on every rank.

        Args:
            timeout_s: in seconds; None: no limit.

        Raises:
            TimeoutError: the time is up; the launch continues.
            BaseException: what a rank raised first in time, with its type, the rank's traceback as a note, and `rank`
                and `host`.
            StartError, NodeLost: workers did not start; a host was lost.
            WorkerDied: a worker ended without a result, also with exit code 0.
            RemoteError: an exception or a result that cannot be rebuilt here.
            LaunchTimeout: agent_timeout_s or timeout_s of the launcher has passed.
            InfiniRunError: the launch was stopped before all ranks returned.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the launch did not finish within {timeout_s:g} s; it keeps running")
        with self._launch.outcome_lock:
            if self._outcome is None:
                self._outcome = _outcome(self._launch)
            result, error = self._outcome
        try:
            if error is not None:
                raise error
            assert result is not None
            return result
        finally:
            del self, error  # the traceback has this frame: as a cycle, it would stay until the next collection

    def result_or_stop(self) -> LaunchResult[R]:
        """Return the result as `result` does. An exception that interrupts the wait stops the launch (a second one:
        at once), and passes on when nothing is left."""
        try:
            self.wait()
        except BaseException:
            try:
                self.stop()
                self._launch.join()
            finally:
                self._launch.close()
            raise
        try:
            return self.result()
        finally:
            del self  # as in result

    def __await__(self) -> Generator[Any, None, LaunchResult[R]]:
        return self._result_async().__await__()

    async def _result_async(self) -> LaunchResult[R]:
        await self._wait_async()
        return self.result()

    async def _wait_async(self) -> None:
        self._launch.is_awaited = True
        try:
            while (found := await self._launch.next_result_async()) is not None:
                self._open(*found)
        except BaseException:  # the coroutine was canceled
            self._launch.is_awaited = False
            raise

    async def follow_async(self) -> LaunchResult[R]:
        """Follow as `follow` does, for asyncio: the cancellation of the coroutine stops the launch."""
        try:
            await self._wait_async()
        except BaseException:
            await self.stop_async()
            raise
        return self.result()

    async def stop_async(self) -> None:
        """Stop it, and wait until nothing is left; a cancellation of the coroutine meanwhile kills it."""
        try:
            self.stop()
            await self._wait_async()
        finally:
            self._launch.close()

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal.

        Args:
            number: the signal's number; 0: none, only count.
            rank: to this rank's process; None: to every rank's.

        Returns:
            How many processes it reached.

        Raises:
            UsageError: there is no such signal or rank.
        """
        number = check_signal(number)
        workers = self._launch.workers
        if rank is not None and rank not in range(len(workers)):
            raise UsageError(f"rank={rank!r}: unknown rank; use 0 to {len(workers) - 1}")
        return self._launch.signal(number, workers if rank is None else workers[rank : rank + 1])

    def stop(self) -> None:
        """Begin to stop the launch: send the stop signal, and SIGKILL after the grace. To wait for the end, use
        `wait`."""
        self._launch.call(self._launch.stop_all)

    def kill(self) -> None:
        """Send SIGKILL to everything that is left. To wait for the end, use `wait`."""
        self._launch.call(self._launch.kill_all)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank; 0 for a rank whose start has not been reported yet."""
        return [worker.process.pid if worker.process is not None else 0 for worker in self._launch.workers]

    @property
    def restarts(self) -> int:
        """How often all ranks restarted."""
        return self._launch.restarts.begun

    @property
    def exits(self) -> Sequence[Exit | None]:
        """How each process ended, by rank; None for a process that still runs. `stuck` is True for a process that
        SIGKILL did not end. `status` and `progress` are not set: the bar of `progress=True` shows those of a
        function."""
        return [worker.process.exit if worker.process is not None else None for worker in self._launch.workers]

    def close(self) -> None:
        """Stop what still runs, within the grace, and wait until nothing is left. You may call it again."""
        try:
            if not self._launch.is_over:
                self.stop()
                self._launch.join()
        finally:
            self._launch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        launch = self.__dict__.get("_launch")
        if launch is None:
            return
        launch.is_dropped = True  # first: the launch looks at it at its end
        if launch.is_over:
            launch.print_unseen()
        else:
            text = f"{self!r} was dropped while its launch runs; wait for it or close it"
            warn(text, ResourceWarning, stacklevel=2)


def _outcome(launch: LaunchSupervisor) -> tuple[LaunchResult[Any] | None, BaseException | None]:
    """Return the results of a finished launch. Raises its first failure in time."""
    if launch.failures:
        failures = sorted(launch.failures, key=lambda failure: failure.time_s)
        return None, _with_notes(failures, launch.restarts)
    if not launch.asks or not all(ask.done() for ask in launch.asks):
        return None, InfiniRunError("the launch was stopped before all ranks returned")
    places = [(worker.process.host, worker.process.local_rank) for worker in launch.workers if worker.process]
    return capture_exception(lambda: LaunchResult([ask.result() for ask in launch.asks], places))


def _error_of(failure: Failure) -> BaseException:
    error = failure.error
    return to_exception(error, failure.rank, failure.host) if isinstance(error, TaskFailed) else error


def _with_notes(failures: Sequence[Failure], restarts: RestartState) -> BaseException:
    """Return the first failure's error, with a note for each later one, and notes about restarts before it."""
    error, total = _error_of(failures[0]), restarts.begun
    notes = [f"after {total} restart{'s' * (total > 1)} of all ranks"] if total else []
    if restarts.not_restarted:
        notes.append(f"not restarted: {restarts.not_restarted}")
    for failure in failures[1 : _NOTED + 1]:
        other = _error_of(failure)
        text = str(other).split("\n", 1)[0]
        place = f"rank {failure.rank}: " if isinstance(failure.error, TaskFailed) else ""
        kind = "" if isinstance(other, InfiniRunError) else f"{type(other).__name__}: "
        notes.append(f"later: {place}{kind}{text}")
    if len(failures) > _NOTED + 1:
        notes.append(f"later: {len(failures) - _NOTED - 1} more failed")
    if notes:
        capture_exception(add_notes, error, notes)  # a class may forbid it
    return error
