"""A rank of a function's job: it calls the function, and writes its result or exception to the job's directory.

The one rule: whatever the function does, the rank ends as a program does: exit code 1 and a traceback for an
exception, the code of sys.exit, or a signal.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import partial

from infini_run.channel.errors import CannotUnpickle
from infini_run.crews.capture import capture_exception
from infini_run.crews.protocol import NO_TASK, TaskDone, TaskFailed, WorkerSetup, dump
from infini_run.crews.remote_exception import from_exception
from infini_run.crews.worker.context import set_current
from infini_run.crews.worker.import_guard import load_task
from infini_run.errors import UsageError
from infini_run.jobs.allocation.result import AGAIN
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.task import Task
from infini_run.jobs.function import checkpoint_of, damaged, load, pack, unpack
from infini_run.jobs.lines import print_line, write_text
from infini_run.jobs.rank_context import RankContext
from infini_run.system.secure_files import write_atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NEEDED = ("INFINI_JOB_FOLDER", "INFINI_JOB_ATTEMPT", "RANK", "WORLD_SIZE")


def main() -> None:
    """Run as a rank's program."""
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        sys.exit(f"infini-job: {', '.join(missing)}: missing; only a job of ir.submit runs this program")
    path, index = os.environ["INFINI_JOB_FOLDER"], os.environ.get("INFINI_JOB_TASK", "")
    folder = Task(JobDir(os.path.dirname(os.path.dirname(path))), int(index)) if index else JobDir(path)
    sys.exit(run(folder, int(os.environ["INFINI_JOB_ATTEMPT"]), int(os.environ["RANK"])))


def run(folder: JobDir, attempt: int, rank: int) -> int:
    """Call the function of a job, and write its result. Return the exit code."""
    with suppress(OSError):  # of an earlier attempt of this run: this one may end without a result
        os.unlink(folder.result_file(attempt, rank))
    save = partial(_save, folder, attempt, rank, int(os.environ["WORLD_SIZE"]))  # the function may change it
    warning = signal.Signals(folder.read_submission().request.warn_signal)
    try:
        call = _load_call(folder, rank, warning)
    except CannotUnpickle as error:
        print_line(str(error))
        return save(from_exception(error, NO_TASK))
    set_current(RankContext(os.environ))
    _checkpoint_on_signals(folder, rank, call, warning, save)
    # the rank started with both blocked, and one may be pending
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {warning, signal.SIGTERM})
    value, error_ = capture_exception(call)
    if error_ is None:
        body, error_ = capture_exception(partial(dump, value, "result", f" of rank {rank}", by_reference=True))
        if body is not None:
            return save(TaskDone(task=0, body=body))
    assert error_ is not None
    failed = from_exception(error_, NO_TASK)
    write_text(failed.trace.rstrip())
    return save(failed)


def _checkpoint_on_signals(
    folder: JobDir,
    rank: int,
    call: Callable[[], object],
    warning: signal.Signals,
    save: Callable[[TaskDone | TaskFailed], int],
) -> None:
    """Let rank 0 make a checkpoint at the warning before the limit, and at a stop, if the callable has such a method.

    The others keep working at the warning: the job's end, or its next run, is rank 0's to ask for.
    """
    checkpoint = checkpoint_of(call)
    if checkpoint is None:
        return
    if rank:
        signal.signal(warning, signal.SIG_IGN)
        return

    def stop(number: int, frame: object) -> None:
        for each in (warning, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        code = _save_checkpoint(folder, checkpoint, save)
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError, OSError):  # None, closed, or on a full disk
                stream.flush()
        os._exit(code)  # the function may catch SystemExit

    for each in (warning, signal.SIGTERM):
        signal.signal(each, stop)


def _save_checkpoint(
    folder: JobDir, checkpoint: Callable[[], object], save: Callable[[TaskDone | TaskFailed], int]
) -> int:
    """Write the call of the next run. Return the exit code: 85 for that run."""
    call, error = capture_exception(checkpoint)
    if error is None and call is not None:
        _, error = capture_exception(partial(_write_next, folder, _as_callable(call)))
    if error is None:
        return AGAIN
    failed = from_exception(error, NO_TASK)
    write_text(failed.trace.rstrip())
    return save(failed)


def _write_next(folder: JobDir, call: Any) -> None:
    body = dump((call, None), "checkpoint")
    setup = WorkerSetup(path=tuple(sys.path), argv=tuple(sys.argv), target=body)
    write_atomic(folder.next_function, pack(setup, "checkpoint", saves=checkpoint_of(call) is not None))


def _as_callable(made: Any) -> object:
    """Return what a checkpoint made as a callable: a DelayedSubmission of submitit has its call as attributes."""
    if callable(made) or not all(hasattr(made, name) for name in ("function", "args", "kwargs")):
        return made
    return partial(made.function, *made.args, **made.kwargs)


def _load_call(folder: JobDir, rank: int, warning: signal.Signals) -> Callable[[], object]:
    """Return the call. Raises CannotUnpickle, in one line.

    TERM stays blocked if rank 0 will make a checkpoint of the call. Otherwise a stop may end its imports.
    """
    path, is_next = folder.function, os.path.lexists(folder.next_function)
    if is_next:
        path = folder.next_function
    try:
        head, setup = unpack(path)
    except OSError as error:
        raise CannotUnpickle(
            f"{path} on {os.uname().nodename}: {error.strerror}; use a directory that the nodes share"
        ) from None
    if not isinstance(setup, WorkerSetup):
        raise damaged(path)
    if (rank or not head.get("saves")) and warning is not signal.SIGTERM:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.path[:] = dict.fromkeys([*setup.path, *sys.path])
    sys.argv[:] = setup.argv
    function, items = load(partial(load_task, setup.target), f"the function of job {folder.name}")
    if folder.index < 0 or is_next:
        return function  # type: ignore[no-any-return]
    item: Any = folder.index if items is None else items[folder.index]
    return partial(function, item) if function is not None else item


def _save(folder: JobDir, attempt: int, rank: int, ranks: int, message: TaskDone | TaskFailed) -> int:
    """Write what a rank has to say; where that is too large, why. Return the exit code."""
    try:
        data = pack(message, f"result of rank {rank}", ranks)
    except UsageError as error:
        print_line(str(error))
        message = from_exception(error, NO_TASK)
        data = pack(message, f"result of rank {rank}", ranks)
    path = folder.result_file(attempt, rank)
    try:
        write_atomic(path, data)
    except OSError as error:
        print_line(f"{path} cannot be written: {error.strerror}; the result of rank {rank} is lost")
        return 1
    return isinstance(message, TaskFailed)
