"""Jobs from Python: `submit` gives a Job, which is its directory and its scheduler.

job = ir.submit(["python", "train.py"], slots=16, time="4h")
status = job.wait()
job = ir.submit(train, slots=16, time="4h")
loss = job.result()
"""

from __future__ import annotations

import os
import time

from infini_run.errors import InfiniRunError, UsageError
from infini_run.jobs.errors import QueryError
from infini_run.jobs.folder.job_dir import JobDir
from infini_run.jobs.folder.job_store import all_names, begun_ns, find_folder, home, remove
from infini_run.jobs.folder.task import Task, task_of
from infini_run.jobs.options.table import TABLES
from infini_run.jobs.prepare import prepare, read_flags
from infini_run.jobs.request.array import split
from infini_run.jobs.scheduler import HOPELESS, LOST
from infini_run.jobs.schedulers.detect_scheduler import Absent, scheduler_of
from infini_run.jobs.status.each_job import for_each, kept
from infini_run.jobs.submit import submit as hand_in
from infini_run.options.from_python import check_names, check_words, make_environment
from infini_run.options.keyword_errors import KeywordErrors
from infini_run.options.python_values import check_environment
from infini_run.system.monkey_patches import check_waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import Any, overload
    from typing import Generic as Generic

    from typing_extensions import TypeVar, Unpack

    from infini_run.jobs.folder.records import Submission
    from infini_run.jobs.options.keywords import SubmitOptions
    from infini_run.jobs.scheduler import Scheduler
    from infini_run.jobs.status.job_status import Status

    T = TypeVar("T")
    R = TypeVar("R", default=Any)
else:

    class Generic:
        """typing's Generic, without the import: infini-job starts sooner."""

        def __class_getitem__(cls, _: object) -> type:
            return cls

    R = None

__all__ = ["Job", "find_job", "find_jobs", "submit"]

_COMMAND_ONLY = ("check", "json", "print", "wait")


if TYPE_CHECKING:

    @overload
    def submit(
        command: Callable[[], R], *, array: None = None, env: Mapping[str, str] | None = None,
        inherit_env: bool = True, cwd: str | os.PathLike[str] | None = None, **flags: Unpack[SubmitOptions],
    ) -> Job[R]: ...  # fmt: skip
    @overload
    def submit(
        command: Callable[[int], R], *, array: str | int, env: Mapping[str, str] | None = None,
        inherit_env: bool = True, cwd: str | os.PathLike[str] | None = None, **flags: Unpack[SubmitOptions],
    ) -> Job[list[R]]: ...  # fmt: skip
    @overload
    def submit(
        command: Callable[[T], R], *, array: Iterable[T], env: Mapping[str, str] | None = None,
        inherit_env: bool = True, cwd: str | os.PathLike[str] | None = None, **flags: Unpack[SubmitOptions],
    ) -> Job[list[R]]: ...  # fmt: skip
    @overload
    def submit(
        command: Sequence[str], *, array: str | int | Sequence[int] | None = None,
        env: Mapping[str, str] | None = None, inherit_env: bool = True,
        cwd: str | os.PathLike[str] | None = None, **flags: Unpack[SubmitOptions],
    ) -> Job[None]: ...  # fmt: skip


def submit(
    command: Sequence[str] | Callable[..., object],
    *arguments: object,
    array: str | int | Iterable[Any] | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: bool = True,
    cwd: str | os.PathLike[str] | None = None,
    **flags: Unpack[SubmitOptions],
) -> Job:
    """Submit a command or a function as a job, once, and return it; nothing waits for it to begin.

    Args:
        command: What each rank runs: a program and its arguments; or a function, such as `functools.partial(train,
            lr=0.1)`, which each rank calls. `Job.result` returns what that returned. If it has a method `checkpoint`,
            rank 0 calls that before the time limit, and the next run makes the call that it returns.
        arguments: Pass none: a function's arguments belong into `functools.partial`, a program's into its list.
        array: A list or range: run one task per item, and call the function with that item. A text such as "0-9%3",
            or a number, selects indices, and the function gets its task's index. None: no array.
        env: Variables to add to the environment of the ranks, which goes with the job; None: none.
        inherit_env: The ranks have this process's environment, too.
        cwd: The directory in which the ranks start, on every node; None: the current one.
        flags: Those of `infini-job submit` by their names: `slots=16, slots_per_node=8, scheduler="slurm",
            time="4h", pool="gpu", warn="5m", restarts=2`.

    Returns:
        The job, as its directory and its scheduler.

    Raises:
        TypeError: There are `arguments`, or an unknown flag.
        UsageError: The request is invalid, the function is too large or takes other arguments, or there is no
            scheduler; nothing is left.
        UnpicklableError: The function does not pickle; nothing is left.
        SubmitError: The scheduler did not take the job; nothing is left, unless its `kind` is `timed_out`: then the
            job may exist, and `find_job` finds it.
        QueryError: The scheduler does not answer; nothing is left.
    """
    check_waits("a job")
    if arguments:
        raise TypeError(_unexpected(command, arguments))
    check_names("submit", flags, TABLES["submit"], submit)
    environ = make_environment(env, inherit_env)
    if not callable(command):
        given = {**flags, "array": array}
        return _hand_in(command, given, _read_flags(given, environ), environ, env, cwd)
    from infini_run.jobs.function import split_array

    indices, items = split_array(array)
    return submit_function(command, items, {**flags, "array": indices}, environ, env, cwd)


def _unexpected(command: Sequence[str] | Callable[..., object], arguments: Sequence[object]) -> str:
    """Return the error of arguments that stand beside the command."""
    text = f"submit() takes 1 positional argument but {1 + len(arguments)} were given"
    if not callable(command):
        return f"{text}; use a list, the program and its arguments"
    from infini_run.crews.callables import name_of

    return f"{text}; use functools.partial({name_of(command)}, ...)"


def submit_function(
    function: Callable[..., object] | None,
    items: Any,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> Job[Any]:
    """Submit a function, or calls.

    Args:
        function: What each rank calls; None: each item is a call without arguments.
        items: A tuple, one per task of an array; None: its index is its item.
        flags: Those of `submit`; `array` has the indices.
        environ: The environment of the ranks.
        env: Those of its variables that the job sets itself; None: none.
        cwd: The directory in which they start.

    Raises:
        UsageError, UnpicklableError, SubmitError, QueryError: As `submit`.
    """
    from infini_run.jobs.function import command_of, pack_call

    values = _read_flags(flags, environ)
    content = pack_call(function, items, values)
    return _hand_in(command_of(function or items[0], values), flags, values, environ, env, cwd, content)


class _SubmitErrors(KeywordErrors):
    """As KeywordErrors, for a call of `submit` with the keywords `given`."""

    def __init__(self, given: Mapping[str, object]) -> None:
        own = ("options", "run_options", "container_options")
        super().__init__(given, table=TABLES["submit"], left_out=_COMMAND_ONLY, own=own)

    def rename(self, text: str) -> str:
        return super().rename(text).replace(" of infini-job", " of submit")


def _read_flags(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    with _SubmitErrors(given):
        return read_flags(given, environ)


def _hand_in(
    command: Sequence[str],
    given: Mapping[str, object],
    values: dict[str, Any],
    environ: Mapping[str, str],
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    function: bytes = b"",
) -> Job[Any]:
    # what this process has is in `environ`, of which an allocation replaces much: a copy of os.environ must not win
    added = {name: text for name, text in check_environment(env).items() if os.environ.get(name) != text}
    values["env"] = (*values["env"], *added.items())
    if cwd is not None:
        values["cwd"] = check_words("cwd", (cwd,))[0]
    errors = _SubmitErrors(given)
    with errors:
        try:
            planned, scheduler = prepare(command, values, environ, print_line=_print_line)
        except QueryError as error:
            error.args = (errors.rename(str(error)),)
            raise
        if planned.layout.remark:
            _print_line(errors.rename(planned.layout.remark))
        folder, _ = hand_in(planned, scheduler, environ, print_line=_print_line, function=function)
    return Job(folder, scheduler)


def _print_line(text: str) -> None:
    from infini_run.node.host_stderr import print_line  # with it comes the core, and rarely is anything said

    print_line(text, name="infini-job")


class Job(Generic[R]):
    """A job that this process submitted, or that `find_job` found. It needs no close.

    `Job[float]` is for type checkers: what `result` returns.

    name: its unique name. path: its directory.
    """

    _rank = 0  # that of `result`

    def __init__(self, folder: JobDir, scheduler: Scheduler) -> None:
        check_waits("a job")
        self._folder = folder
        self._scheduler = scheduler
        self.name = folder.name
        self.path = folder.path

    def __dir__(self) -> list[str]:
        from infini_run.public_names import public_names

        return public_names(self)

    def __repr__(self) -> str:
        return f"<Job {self.name} in {os.path.dirname(self.path)}>"

    @property
    def submission(self) -> Submission:
        """The submission. Raises UsageError if its directory is not readable."""
        return self._folder.read_submission()

    @property
    def id(self) -> str:
        """The scheduler's id of the job; "" if unknown (yet)."""
        return self._folder.id

    def status(self) -> Status:
        """Return the present state of the job. That takes at most one query of its scheduler, and none after the
        job's end."""
        from infini_run.jobs.status.status_query import query_status

        return query_status([self._folder], lambda _: self._scheduler)[0]

    def wait(self, timeout_s: float | None = None, *, changed: Callable[[Status], None] | None = None) -> Status:
        """Wait until the job is finished.

        Args:
            timeout_s: Seconds to wait at most; None: no limit.
            changed: A function that is called with each new status; None: none.

        Returns:
            The status at the end, or after `timeout_s`. While the job runs, `is_final` is False, and `exit_code` is
            None.

        Raises:
            UsageError: `timeout_s` is no number.
            InfiniRunError: Its directory is gone.
        """
        if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float))):
            raise UsageError(f"timeout_s={timeout_s!r}: give a number of seconds, or None for no limit")
        return self._wait_for_end(timeout_s, changed)

    def _wait_for_end(
        self, timeout_s: float | None, changed: Callable[[Status], None] | None, also: Sequence[int] = ()
    ) -> Status:
        """Wait as `wait` does; a descriptor of `also` that is readable, or closed at its other end, ends that."""
        from infini_run.jobs.status.watch import JobWatcher

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        follow = JobWatcher(self._folder, self._scheduler)
        try:
            if changed is not None:
                changed(follow.status)
            while not follow.has_ended:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                if follow.poll(left_s, also) and changed is not None:
                    changed(follow.status)
                if follow.is_interrupted:
                    break
            return follow.status
        finally:
            follow.close()

    def result(self, timeout_s: float | None = None) -> R:
        """Wait for the job of a function, and return what that returned on rank 0.

        Args:
            timeout_s: Seconds to wait at most; None: no limit.

        Returns:
            The value; of an array a list, one value per task.

        Raises:
            BaseException: What the function raised on the first rank to fail, with that rank's traceback. Of an
                array: in the failed task with the lowest index.
            JobFailed: The job ended without a result: it was canceled, reached its limit, or lost a node, or a
                rank exited or was killed.
            TimeoutError: The job is not finished within `timeout_s`.
            UsageError: The job runs a command.
            CannotUnpickle: The result needs code that is missing here, or other versions made it.
            InfiniRunError: Its directory is gone.
        """
        found: R = self._values(self._wait_for_function(timeout_s), self._value_of)
        return found

    def results(self, timeout_s: float | None = None) -> list[R]:
        """Wait for the job of a function, and return what that returned on every rank, in the order of ranks; of an
        array a list of such lists.

        Args:
            timeout_s: Seconds to wait at most; None: no limit.

        Raises:
            BaseException: What the function raised on the first rank to fail, with that rank's traceback. Of an
                array: in the failed task with the lowest index.
            JobFailed: The job ended without a result: it was canceled, reached its limit, or lost a node, or a
                rank exited or was killed.
            TimeoutError: The job is not finished within `timeout_s`.
            UsageError: The job runs a command.
            CannotUnpickle: A result needs code that is missing here, or other versions made it.
            InfiniRunError: Its directory is gone.
        """
        found: list[R] = self._values(self._wait_for_function(timeout_s), _of_all_ranks)
        return found

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the job of a function, and return the exception that `result` raises, or None if it returns.

        Args:
            timeout_s: Seconds to wait at most; None: no limit.

        Raises:
            TimeoutError: The job is not finished within `timeout_s`.
            UsageError: The job runs a command.
            InfiniRunError: Its directory is gone.
        """
        status = self._wait_for_function(timeout_s)
        return self._failure(self._each(status))

    def __await__(self) -> Generator[Any, None, R]:
        """Await what `result` returns. The job keeps running if the coroutine is canceled."""
        return self._await_result().__await__()

    async def _await_result(self) -> R:
        """Wait for the end in a thread, which ends with the coroutine."""
        from asyncio import get_running_loop
        from threading import Thread

        from infini_run.crews.supervision.loop_waiters import resolve

        self._check_function()
        loop = get_running_loop()
        ended: Future[None] = loop.create_future()
        found: list[Status] = []
        reader, writer = os.pipe()

        def wait() -> None:
            try:
                found.append(self._wait_for_end(None, None, (reader,)))
            except InfiniRunError:  # the directory is gone
                return  # `result` raises that anew
            finally:
                os.close(reader)
                resolve(loop, ended)

        thread = Thread(target=wait, name="infini-job-wait", daemon=True)
        try:
            try:
                thread.start()
            except RuntimeError:  # no more threads
                os.close(reader)
                raise
            await ended
            thread.join()  # it has nothing left to do
        finally:
            os.close(writer)
        if not found:
            return self.result()
        value: R = self._values(found[0], self._value_of)
        return value

    def _value_of(self, folder: JobDir, status: Status) -> Any:
        from infini_run.jobs.function import result_of

        return result_of(folder, status, self._rank)[0]

    def _values(self, status: Status, value_of: Callable[[JobDir, Status], Any]) -> Any:
        """Return the value of a finished job, or those of an array's tasks. Raises as `result`."""
        each = self._each(status)
        failure = self._failure(each)
        if failure is not None:
            raise failure
        values = [value_of(*pair) for pair in each]
        return values if status.tasks else values[0]

    def _failure(self, each: Sequence[tuple[JobDir, Status]]) -> BaseException | None:
        """Return what `result` raises, of the first task without a result; None: each has one."""
        from infini_run.crews.remote_exception import add_notes
        from infini_run.jobs.function import failure_of

        for folder, status in each:
            failure = failure_of(folder, status)
            if failure is not None:
                if status.task >= 0:
                    add_notes(failure, [f"task {status.task} of job {self.name}"])
                return failure
        return None

    def _each(self, status: Status) -> list[tuple[JobDir, Status]]:
        if not status.tasks:
            return [(self._folder, status)]
        return [(task_of(self._folder, task.task), task) for task in status.tasks]

    def _wait_for_function(self, timeout_s: float | None) -> Status:
        """Return how the job of a function ended. Raises UsageError, TimeoutError, InfiniRunError."""
        self._check_function()
        status = self.wait(timeout_s)
        if not status.is_final and timeout_s is not None:
            from infini_run.crews.errors import AskTimeout

            raise AskTimeout(f"job {self.name} is {status.state} after {timeout_s:g} s")
        return status

    def _check_function(self) -> None:
        """Raise UsageError: the job runs a command; InfiniRunError: its directory is gone."""
        self._folder.require()
        if not os.path.lexists(self._folder.function):
            raise UsageError(
                f"job {self.name}: its command is not a function and has no result; use wait() and logs()"
            )

    def logs(
        self, *, follow: bool = False, task: int | Sequence[int] | None = None, rank: int | str | None = None,
        node: str | int | None = None, attempt: int | None = None, tail: int | None = None,
        scheduler_log: bool = False,
    ) -> Iterator[str]:  # fmt: skip
        """Read what the ranks have written, line by line, each with the name of its rank in front.

        Args:
            follow: Continue until the job is finished.
            task: Index of a task of an array, or several; None: all. Of more than one, each line has its task in
                front.
            rank: The rank whose lines to return, as a number, or as `"trainer:0"` for a rank of a program; None: all.
            node: Index or host of the node whose lines to return; None: all.
            attempt: This run only, counted from 0; None: all.
            tail: The last lines only, at most this many; None: all.
            scheduler_log: Instead, read the output of the job's script and of its scheduler.

        Raises:
            UsageError: There is no such task, rank, node or attempt, or `tail` is no number from 0 on.
        """
        from infini_run.jobs.status.logs import blocks, last_lines, narrow, read_rank
        from infini_run.jobs.status.logs import scheduler_log as read

        if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 0):
            raise UsageError(f"tail={tail!r}: expected a whole number from 0, or None for all lines")
        most = -1 if tail is None else tail

        chosen = () if task is None else (task,) if isinstance(task, int) else tuple(task)
        folder, tasks = narrow(self._folder, chosen)
        if scheduler_log:
            yield from last_lines(read(folder, tasks), most).decode("utf-8", "surrogateescape").splitlines()
            return
        for block in blocks(
            folder,
            self._scheduler if follow else None,
            rank=-1 if rank in (None, -1) else read_rank(rank),
            node="" if node is None else str(node),
            attempt=-1 if attempt is None else attempt,
            tasks=tasks,
            tail=most,
        ):
            yield from block.decode("utf-8", "surrogateescape").split("\n")[:-1]

    def cancel(self) -> bool:
        """Cancel the job, unless it has finished.

        The ranks get the grace of infini-run. If you call it again, the scheduler stops them, with its own grace.

        Returns:
            True; False if the job had already finished.

        Raises:
            QueryError: The scheduler does not answer.
            UsageError: The scheduler is not here.
        """
        status = self.status()
        if status.is_final:
            return False
        if isinstance(self._scheduler, Absent):
            self._scheduler.refuse()
        again = self._folder.scheduler_was_asked
        if not again:
            self._folder.mark_cancelled()
        ids = self._ids(status)
        if status.tasks and status.query_error and not ids:
            raise QueryError(status.query_error)
        if ids:
            self._scheduler.cancel(*ids, again=again)
            self._folder.mark_cancelled(scheduler_was_asked=True)
        return True

    def _ids(self, status: Status) -> list[str]:
        """Return what the scheduler has to end: a job, or all unfinished tasks of an array."""
        if not status.tasks:
            found = status.id or self._scheduler.find(self._folder.queue_name)
            return [found] if found else []
        live = [task for task in status.tasks if not task.is_final]
        if self._scheduler.name != "local":  # the array's own id would be that of all tasks
            return [task.id for task in live if task.id]
        # a process starts them, and signals those that it has started: a second signal would end their grace
        if starts_tasks := self._scheduler.find(self._folder.queue_name):
            return [starts_tasks]
        # ids anew: what has begun since `status` may not have seen that it is canceled
        folders = [task_of(self._folder, task.task) for task in live]
        return [folder.id for folder in folders if folder.id]

    def forget(self) -> None:
        """Remove the directory of a finished job, or of one that its scheduler does not know (LOST).

        Raises:
            UsageError: The job may still run.
            InfiniRunError: Some files could not be removed.
        """
        forget(self._folder, self.status())


def _of_all_ranks(folder: JobDir, status: Status) -> list[Any]:
    from infini_run.jobs.function import result_of

    first, ranks = result_of(folder, status, 0)
    return [first, *(result_of(folder, status, rank)[0] for rank in range(1, ranks))]


def forget(folder: JobDir, status: Status) -> None:
    """Remove the directory of a job whose status was just read.

    Args:
        folder: Of the job.
        status: How it is.

    Raises:
        UsageError: It is not finished, as far as is known, or it is a task.
        InfiniRunError: Something of it stays.
    """
    refuse_task(folder)
    if not status.is_final and status.state != LOST:
        news = f" as far as is known ({status.query_error})" if status.query_error else ""
        raise UsageError(f"job {folder.name} is {status.state}{news}; run infini-job cancel {folder.name} first")
    remove(folder)
    if os.path.lexists(folder.path):
        raise InfiniRunError(f"job {folder.name}: cannot remove all of {folder.path}; check what is left in it")


def refuse_task(folder: JobDir) -> None:
    """Raise UsageError for a task: only the whole array can be removed."""
    if isinstance(folder, Task):
        raise UsageError(
            f"{folder.name}: a task is removed with its array; use infini-job forget {folder.array.name}"
        )


def find_job(name: str, *, dir: str | os.PathLike[str] = "") -> Job[Any]:  # noqa: A002
    """Return the job, or the task `NAME.K`, of that name.

    Args:
        name: Such as ir-0123456789.
        dir: The directory of all jobs; "": ~/.infini-run/jobs.

    Raises:
        UsageError: There is none that belongs to this user.
    """
    above = home(os.fspath(dir), os.environ)
    folder = find_folder(above, name)
    return Job(folder, scheduler_of(folder.read_submission(), above, os.environ))


def find_jobs(
    names: Sequence[str] = (),
    *,
    dir: str | os.PathLike[str] = "",  # noqa: A002
    problem: Callable[[str], None] | None = None,
) -> list[Status]:
    """Return the statuses of jobs, by one query of each scheduler, the latest job last.

    Args:
        names: The names of the jobs; empty: all jobs.
        dir: The directory of all jobs; "": ~/.infini-run/jobs.
        problem: A function that gets a line about each job that is unreadable, or whose directory does not respond
            within 10 s. That job is not in the result. None: if you named such a job, it raises an error, else a
            RuntimeWarning.

    Raises:
        UsageError: There is no such job, or the directory of all jobs is unreadable.
        InfiniRunError: A named job is unreadable, and `problem` is None.
    """
    from infini_run.jobs.status.status_query import query_each

    above = home(os.fspath(dir), os.environ)
    if names:
        folders = find_folders(above, check_words("names", names), problem)
    else:
        problem = problem or _warn
        folders = all_folders(above, problem)
    return query_each(folders, lambda order: scheduler_of(order, above, os.environ), problem)


def find_folders(above: str, names: Sequence[str], problem: Callable[[str], None] | None) -> list[JobDir]:
    """Return the directories of jobs or tasks.

    Args:
        above: The directory of all jobs.
        names: Of the jobs.
        problem: Gets a line per job that is unreadable, or does not answer; None: raise it.

    Raises:
        UsageError: There is no such job.
        InfiniRunError: One is unreadable, and `problem` is None.
    """
    found = for_each(names, lambda name: find_folder(above, name), lambda name: os.path.join(above, split(name)[0]))
    for outcome in found:
        if isinstance(outcome, UsageError):
            raise outcome
    return kept(found, problem)


def all_folders(above: str, problem: Callable[[str], None]) -> list[JobDir]:
    """Return the directories of this user's jobs, the latest last.

    Args:
        above: The directory of all jobs.
        problem: Gets a line for each one that does not answer.

    Raises:
        UsageError: It is unreadable.
    """
    paths = [os.path.join(above, name) for name in all_names(above)]
    begun = kept(for_each(paths, lambda path: (begun_ns(path), path), lambda path: path), problem)
    return [JobDir(path) for at, path in sorted(begun) if at >= 0]


def _warn(text: str) -> None:
    from warnings import warn

    warn(text, RuntimeWarning, stacklevel=5)


def is_hopeless(status: Status) -> bool:
    """Return whether the job begins only after its user or an administrator changes something, or not at all."""
    return status.hold == HOPELESS or (status.state == LOST and status.is_final)
