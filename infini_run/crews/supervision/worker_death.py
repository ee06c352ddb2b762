"""The reasons of a worker's failure, in the words of the error."""

from __future__ import annotations

from infini_run.crews.remote_exception import to_remote_error
from infini_run.errors import printable
from infini_run.report.exit import Exit
from infini_run.report.failures import WorkerDied
from infini_run.report.last_lines import choose_lines
from infini_run.report.text import describe_end, duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from infini_run.crews.protocol import TaskFailed
    from infini_run.crews.spawn.spawner import WorkerProcess

    class FailedWorker(Protocol):
        """What an error says of a SupervisedWorker."""

        rank: int
        process: WorkerProcess | None
        start_error: TaskFailed | None
        cause: WorkerDied | None
        stopped_for: str
        failed_while: str
        silence_s: float | None


_LAST_LINES = 5  # that an error shows
_LAST_FRAMES = 4


def exit_of(worker: FailedWorker) -> Exit:
    """Return how its process ended; an Exit without an end before that."""
    process = worker.process
    assert process is not None
    if process.exit is not None:
        return process.exit
    return Exit(rank=worker.rank, local_rank=process.local_rank, host=process.host, pid=process.pid or None)


def cause_of_death(worker: FailedWorker) -> WorkerDied:
    """Return the error of a worker of a crew that just failed."""
    exit_ = exit_of(worker)
    process = worker.process
    assert process is not None
    error = died(f"rank {worker.rank} on {exit_.host} {_reason(worker, exit_)} (pid {exit_.pid})", exit_)
    if worker.start_error is not None:
        error.__cause__ = to_remote_error(worker.start_error, worker.rank, exit_.host)
    elif process.problem is not None:
        error.__cause__ = process.problem
    return error


def death_error(worker: FailedWorker, *, has_begun: bool = True) -> WorkerDied:
    """Return the error of a task whose worker died or was stopped. It is a new one each time, because raising an
    exception twice grows its traceback."""
    error = _death_error(worker)
    if has_begun:
        return error
    unbegun = WorkerDied(f"{error}\n  this task had not begun", error.exit)
    unbegun.__cause__ = error.__cause__
    return unbegun


def _death_error(worker: FailedWorker) -> WorkerDied:
    if worker.cause is not None:
        error = WorkerDied(str(worker.cause), worker.cause.exit)
        error.__cause__ = worker.cause.__cause__
        return error
    if worker.process is not None and worker.process.problem is not None:  # another rank of that node was the first
        return cause_of_death(worker)
    return WorkerDied(
        f"rank {worker.rank} was stopped: {worker.stopped_for or 'the crew was closed'}", exit_of(worker)
    )


def _reason(worker: FailedWorker, exit_: Exit) -> str:
    assert worker.process is not None
    problem, failure = worker.process.problem, worker.start_error
    if failure is not None:
        return f"could not start: {failure.kind}: {failure.text}"
    if problem is not None:
        return f"is gone: {problem}"
    if exit_.watchdog_reason:
        return f"{exit_.watchdog_reason}; stopped"
    if worker.silence_s is not None:
        silence = duration_text(worker.silence_s)
        if worker.failed_while == "starting":
            return f"was not ready after {silence}; stopped"
        return f"hung: no sign of life for {silence}; stopped"
    if exit_.stuck:
        return f"does not end: {describe_end(exit_)}"
    if exit_.end_s is not None:
        before = "" if exit_.shell_code else ", without a request"
        return f"died: {describe_end(exit_)}{before}"
    return "closed its channel; stopped"


def ended_without_result(exit_: Exit, *, has_result: bool) -> WorkerDied:
    """Return the error of a rank of a function whose process is gone. has_result: it had returned before."""
    if exit_.watchdog_reason:
        return died(f"rank {exit_.rank} on {exit_.host} {exit_.watchdog_reason}; stopped ({_process(exit_)})", exit_)
    how = "failed after it returned" if has_result else "ended without a result"
    return died(f"rank {exit_.rank} on {exit_.host} {how}: {describe_end(exit_)} ({_process(exit_)})", exit_)


def wrote_into_channel(exit_: Exit) -> WorkerDied:
    """Return the error of a rank of a function whose channel brought what is no message."""
    text = (
        f"rank {exit_.rank} on {exit_.host} was stopped: it wrote into the channel to its launcher, perhaps through "
        f"a closed descriptor's number ({_process(exit_)})"
    )
    return died(text, exit_)


def _process(exit_: Exit) -> str:
    if exit_.end_s is None or exit_.start_s is None:
        return f"pid {exit_.pid}"
    return f"pid {exit_.pid}, after {duration_text(exit_.end_s - exit_.start_s)}"


def died(text: str, exit_: Exit) -> WorkerDied:
    """Return the error with this text, the innermost frames of the worker's Python, the last lines of its stderr, and
    the path of its log."""
    last = choose_lines(exit_.last_lines, _LAST_LINES)
    frames = [f"  in {printable(frame)}" for frame in exit_.python_stack[:_LAST_FRAMES]]
    lines = [text, *frames, *(f"  | {printable(line)}" for line in last)]
    if exit_.log:
        lines.append(f"  log: {exit_.log}")
    return WorkerDied("\n".join(lines), exit_)
