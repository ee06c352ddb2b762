"""`Executor`: a crew behind the interface of concurrent.futures, for code that is written for an executor.

Where that interface says something else than a crew, its users rely on its word: what a task does not know is how
many others there are, a dead worker breaks the executor, and errors are of the types, and with the words, of the
standard library (docs/decisions/0084-an-executor-is-a-crew-with-the-librarys-words.md).
"""

from __future__ import annotations

import concurrent.futures
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from infini_run.channel.errors import CannotUnpickle, MessageTooLong, UnpicklableError
from infini_run.crews.api.crew import Crew
from infini_run.crews.capture import capture_foreign
from infini_run.crews.errors import CrewFailed
from infini_run.crews.protocol import TaskFailed, check_parts, dump
from infini_run.crews.remote_exception import to_remote_error
from infini_run.crews.spawn.placement import goes_on_without_host, read_hosts
from infini_run.crews.supervision.future import Ask
from infini_run.crews.supervision.pending_task import PendingTask
from infini_run.crews.worker.crew_target import Caller, _UnreadableCall
from infini_run.environments.hostlist import parse_hosts
from infini_run.errors import RemoteError, UsageError, counted
from infini_run.number_arguments import read_count
from infini_run.options.from_python import check_names
from infini_run.options.table import TABLE
from infini_run.public_names import public_names
from infini_run.record import replace
from infini_run.report.failures import WorkerDied
from infini_run.value_types import MOST_RANKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from typing_extensions import ParamSpec, Unpack

    from infini_run.crews.supervision.crew_supervisor import CrewSupervisor
    from infini_run.crews.supervision.future import Answer
    from infini_run.crews.supervision.restart_policy import Restart
    from infini_run.options.keywords import CrewOptions

    P = ParamSpec("P")

R = TypeVar("R")
_UNREADABLE = f"{_UnreadableCall.__module__}.{_UnreadableCall.__qualname__}"  # the kind of a TaskFailed


class ExecutorFailed(CrewFailed, BrokenProcessPool):
    """A broken executor: a worker died, its initializer failed, or what travels cannot be unpickled. `causes`, `rank`
    and `exit_code` are those of CrewFailed."""


class Executor(concurrent.futures.Executor):
    """A concurrent.futures.Executor whose workers are those of a Crew: here, or on other hosts.

    On this machine a worker starts when a call comes for which none is free; on other hosts, and with `preload`, all
    start at once. Leaving the `with` block waits for the submitted calls, then ends the workers and all that they
    started.

    Args:
        max_workers: the number of workers, spread evenly over the hosts. None: on this machine, one per CPU; with
            `hosts`, one per host, or four for `a:4`.
        initializer: called once in each worker before its first task; None: nothing. If it raises, the executor is
            broken.
        initargs: arguments for the initializer.
        hosts: the names of the hosts; "auto": the nodes of the current allocation; None: those of hostfile=, a file
            that names them, or this machine.
        preload: modules that one process imports once; workers are forks of it.
        max_tasks_per_child: a worker that has done this many tasks is replaced by a fresh process. None: never.
        restart: how often workers may restart. Then a dead worker fails its call alone (WorkerDied), and so does a
            call or a result that cannot be unpickled (RemoteError). None: never, and each of these breaks the
            executor (ExecutorFailed), as it breaks a ProcessPoolExecutor.
        env: variables to add to the workers' environment; None: none.
        inherit_env: workers have this process's environment, too; on other hosts the variables of it that jobs
            commonly need.
        cwd: the directory in which workers start; None: the current one.
        log_dir: a directory for rank_N.log files of the workers' output; None: none.
        log_level: the lowest level ("INFO", 20) of the logging records that go from workers to the loggers of this
            process. True: the root logger's level. False: records stay with the workers. None: as True if the root
            logger has a handler, else as False.
        flags: the command's flags by their names: console="none", gpus_per_proc=1, engine="slurm", ...

    Raises:
        ValueError: max_workers is not above 0.
        UsageError, UnpicklableError, ProgramError, StartError, NodeLost: then nothing runs.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        hosts: Sequence[str] | str | None = None,
        preload: Sequence[str] = (),
        max_tasks_per_child: int | None = None,
        restart: Restart | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        cwd: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        log_level: int | str | bool | None = None,
        **flags: Unpack[CrewOptions],
    ) -> None:
        check_names("Executor", flags, TABLE, Executor.__init__)
        given: dict[str, Any] = dict(flags)
        for name in ("nproc", "nproc_per_node"):
            if name in given:
                raise UsageError(f"{name}={given[name]!r}: not a keyword of an Executor; use max_workers=N")
        if isinstance(max_workers, int) and max_workers < 1:
            raise ValueError("max_workers must be greater than 0")
        if max_workers is not None:
            max_workers = read_count("max_workers", max_workers)
            if max_workers > MOST_RANKS:
                raise UsageError(f"max_workers={max_workers}: expected 1 to {MOST_RANKS}")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        names = read_hosts(hosts, given.pop("hostfile", None), count="max_workers")
        nproc: Any
        names, nproc = _spread(max_workers, names, given)
        self._breaks = restart is None
        self._is_shut_down = False
        self._crew: Crew[Any, Any] = _ExecutorCrew(
            Caller,
            args=(initializer, tuple(initargs)),
            nproc_per_node=nproc,
            hosts=names or None,
            preload=preload,
            max_tasks_per_child=max_tasks_per_child,
            restart=restart,
            env=env,
            inherit_env=inherit_env,
            cwd=cwd,
            log_dir=log_dir,
            log_level=log_level,
            **given,
        )

    def __repr__(self) -> str:
        crew = self.__dict__.get("_crew")
        return "<Executor: not started>" if crew is None else repr(crew)

    def __dir__(self) -> list[str]:
        return public_names(self)

    @property
    def max_workers(self) -> int:
        """How many workers it has."""
        return self._crew.nproc

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        """Submit the call `fn(*args, **kwargs)` for whichever worker is free first.

        Args:
            fn: a function; it travels by value if no module has it.
            args, kwargs: its arguments: anything that pickles.

        Returns:
            The future of what it returns. It can be canceled until a worker has the call. Its exception is what the
            call raised, SystemExit too; UnpicklableError: the call does not pickle; ExecutorFailed.

        Raises:
            RuntimeError: the executor was shut down, or this is a forked child.
            ExecutorFailed: the executor is broken.
        """
        crew = self._crew
        supervisor = crew._supervisor
        if supervisor.failure is not None:
            raise _as_executor_failed(supervisor.failure)
        if self._is_shut_down or supervisor.phase != "RUNNING":
            raise RuntimeError("cannot schedule new futures after shutdown")
        if supervisor.starts_on_demand:
            supervisor.call(supervisor.expect_task)
        future: ExecutorFuture[R] = ExecutorFuture(next(crew._tasks), supervisor, breaks=self._breaks)
        body, error = capture_foreign(dump, (fn, args, kwargs), "call")
        if body is not None:
            crew._submit(PendingTask(future.task, body, future, shared=True), None)
        elif isinstance(error, (UnpicklableError, MessageTooLong)):
            _, of_part = capture_foreign(check_parts, fn, args, kwargs)
            future.set_answer(of_part if isinstance(of_part, UnpicklableError) else error)
        else:
            future.set_answer(UnpicklableError(f"call cannot be sent: {type(error).__name__}: {error}", "call"))
        return future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **more: Any,
    ) -> Iterator[R]:
        """Submit a call for each item, and return an iterator over the results, in the order of the items.

        Args:
            fn: called with one item of each iterable.
            iterables: taken at once, and as far as the shortest goes.
            timeout: how long all results may take, in seconds from this call; None: no limit.
            chunksize: this many calls travel together, and one worker does them, which is faster for many short
                calls.
            more: further arguments of this Python's `Executor.map` (`buffersize`, from Python 3.14 on).

        Raises:
            ValueError: chunksize is below 1.
            BaseException: reading a result raises what its call raised, TimeoutError, or ExecutorFailed. The iterator
                then cancels the calls that no worker has.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **more)
        items = zip(*iterables, strict=False)
        chunks = iter(lambda: tuple(islice(items, chunksize)), ())
        return chain.from_iterable(super().map(partial(_call_each, fn), chunks, timeout=timeout, **more))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, do the submitted ones, and end the workers. You may call it again.

        Args:
            wait: return when everything is gone; False: at once.
            cancel_futures: cancel the calls that no worker has.
        """
        self._is_shut_down = True
        supervisor = self._crew._supervisor
        if cancel_futures:
            supervisor.call(supervisor.cancel_waiting)
        if wait:
            self._crew.close()
        else:
            supervisor.begin_to_close(drain=True)


class _ExecutorCrew(Crew):  # type: ignore[type-arg]
    """The crew of an Executor."""

    _name = "Executor"
    _keyword_names = {"nproc_per_node": "max_workers"}  # noqa: RUF012  the base class has its type
    _most_ahead = 1  # no call waits behind another one while a worker is free
    _starts_on_demand = True


class ExecutorFuture(Ask[R]):
    """The future of a call. It cannot be canceled once a worker has the call.

    Args:
        breaks: a dead worker, or what cannot be unpickled, is no error of this call alone: it breaks the executor.
    """

    def __init__(self, task: int, owner: CrewSupervisor, *, breaks: bool) -> None:
        super().__init__(task, owner)
        self._supervisor = owner
        self._breaks = breaks

    def running(self) -> bool:
        """Return whether a worker has the call, and it has not ended."""
        return concurrent.futures.Future.running(self)

    def claim(self) -> bool:
        with self._condition:  # no cancellation comes between
            return not self.cancelled() and (self.running() or self.set_running_or_notify_cancel())

    def set_answer(self, answer: Answer | BaseException) -> None:
        supervisor = self._supervisor
        if self._breaks and isinstance(answer, WorkerDied):
            supervisor.call(lambda: self._break(answer))  # once the crew has failed: submit is to raise
        elif isinstance(answer, tuple) and isinstance(answer[0], TaskFailed) and answer[0].kind == _UNREADABLE:
            error = to_remote_error(replace(answer[0], kind=CannotUnpickle.__name__), *answer[1:])
            if self._breaks:
                supervisor.fail(error)
                self._break(error)
            else:
                super().set_answer(error)
        else:
            super().set_answer(_as_executor_failed(answer) if isinstance(answer, CrewFailed) else answer)

    def _break(self, error: BaseException) -> None:
        failure = self._supervisor.failure
        super().set_answer(error if failure is None else _as_executor_failed(failure))

    def _outcome(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        value, error = super()._outcome(timeout)
        if error is not None and not isinstance(error, CrewFailed) and isinstance(error.__cause__, RemoteError):
            trace: Any = f'\n"""\n{error.__cause__.trace}"""'
            error.__cause__ = _RemoteTraceback(trace)  # as a ProcessPoolExecutor's
        return value, error

    def _open(self, answer: Answer) -> tuple[Any, BaseException | None]:
        value, error = super()._open(answer)
        if error is None or isinstance(answer[0], TaskFailed) or not self._breaks:
            return value, error
        supervisor = self._supervisor
        supervisor.call(lambda: supervisor.fail(error))
        return None, ExecutorFailed(f"the executor is broken\n  {error}", (error,))


def _as_executor_failed(failure: CrewFailed) -> ExecutorFailed:
    """Return the error of an executor whose crew failed, a new one each time."""
    error = ExecutorFailed(str(failure).replace("the crew failed", "the executor is broken", 1), failure.causes)
    error.__cause__ = failure.__cause__
    return error


def _call_each(fn: Callable[..., R], items: Sequence[tuple[Any, ...]]) -> list[R]:
    return [fn(*each) for each in items]


def _spread(
    count: int | None, hosts: tuple[str, ...], flags: Mapping[str, Any]
) -> tuple[tuple[str, ...], int | str | list[int] | None]:
    """Return the hosts of `count` workers (None: as many as there is room for), and how many each of them has.

    Raises:
        UsageError: They don't fit on the hosts.
    """
    if count is None:
        return hosts, None if hosts else "cpu"
    if not hosts:
        return hosts, count
    working = len(hosts) - (flags.get("spares") or 0)
    if count < working:
        raise UsageError(f"max_workers={count}: {working} hosts need a worker each; use hosts={list(hosts[:count])}")
    each, rest = divmod(count, working)
    if rest and goes_on_without_host(flags):
        raise UsageError(
            f"max_workers={count}: hosts with different numbers of workers cannot replace each other; use "
            f"max_workers={each * working}"
        )
    counts = [each + (at < rest) for at in range(working)]
    found = parse_hosts(",".join(hosts), "hosts")
    for host, here in zip(found, counts, strict=False):
        if 0 < host.slots < here:
            least = min(other.slots for other in found[:working] if other.slots)
            raise UsageError(
                f"max_workers={count}: needs {counted(here, 'worker')} on {host.name}, with room for {host.slots}; "
                f"use max_workers={least * working}"
            )
    return hosts, counts if rest else each
