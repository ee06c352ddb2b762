"""The Python API of crews: `Crew`, long-lived workers with a channel to each.

The supervisor's thread acts (crew_supervisor.py); the methods here check, submit and wait. Any thread and asyncio may
call them, and several at a time.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from typing import Generic, TypeVar
from warnings import warn

from infini_run.crews.api.crew_factory import check_spawner_alone, make_limits, make_placement, make_spawner
from infini_run.crews.api.crew_slice import Asks, CrewSlice
from infini_run.crews.api.crew_status import CrewStatus, crew_status, table_of_workers
from infini_run.crews.api.log_level import read_log_level
from infini_run.crews.api.task_map import MapOptions, ReadResults, TaskMap
from infini_run.crews.api.worker_environ import make_environ, patterns_of
from infini_run.crews.api.worker_handle import MethodCalls, WorkerHandle
from infini_run.crews.callables import name_of, path_of_workers, title_of
from infini_run.crews.errors import CrewClosed
from infini_run.crews.protocol import WorkerSetup, dump
from infini_run.crews.spawn.placement import (
    check_flags,
    check_node_flags,
    read_failure_options,
    read_hosts,
    read_nproc,
)
from infini_run.crews.spawn.start_errors import as_start_errors
from infini_run.crews.supervision.crew_supervisor import AHEAD, CrewSupervisor
from infini_run.crews.supervision.future import Ask
from infini_run.crews.supervision.pending_task import PendingTask
from infini_run.crews.supervision.progress import open_show
from infini_run.crews.supervision.restart_policy import NEVER, check
from infini_run.crews.worker.crew_target import MethodCall, methods_of, name_of_target, pack_target
from infini_run.crews.worker.import_guard import check_may_launch
from infini_run.errors import UsageError
from infini_run.node.host_stderr import print_line
from infini_run.number_arguments import read_count, read_wait
from infini_run.options.from_python import check_environment, check_names
from infini_run.options.table import TABLE
from infini_run.public_names import public_names
from infini_run.system.signal_numbers import check_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
    from types import CodeType, TracebackType
    from typing import Any, Literal, Protocol, overload

    from typing_extensions import Self, Unpack

    from infini_run.crews.errors import CrewFailed
    from infini_run.crews.protocol import Body
    from infini_run.crews.spawn.spawner import Spawner
    from infini_run.crews.supervision.event_queue import CrewEvent
    from infini_run.crews.supervision.pending_task import WorkerDeadlines
    from infini_run.crews.supervision.restart_policy import Restart
    from infini_run.crews.worker.context import Context
    from infini_run.options.keywords import CrewOptions
    from infini_run.options.launch_options import Options

T = TypeVar("T")
R = TypeVar("R")
_PRINTED = 8  # problems of one crew that are printed

if TYPE_CHECKING:
    T_contra = TypeVar("T_contra", contravariant=True)
    R_co = TypeVar("R_co", covariant=True)

    class Handler(Protocol[T_contra, R_co]):
        """An object that does tasks."""

        def task(self, ctx: Context, task: T_contra, /) -> R_co: ...

    class Plain(Protocol[T_contra, R_co]):
        """A function or method of the task alone; a class of one argument has no code."""

        @property
        def __code__(self) -> CodeType: ...

        def __call__(self, task: T_contra, /) -> R_co: ...


def _make_setup(
    target: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    log_level: int | str | bool | None,
    limits: WorkerDeadlines,
    failure_options: Options,
) -> WorkerSetup:
    """Return what each worker gets first.

    Raises:
        UsageError: The log level or the target is invalid.
        UnpicklableError: The target does not pickle.
    """
    may_hang = limits.watchdog_s or limits.ready_timeout_s or failure_options.hang_timeout_s
    return WorkerSetup(
        path=path_of_workers(),
        argv=tuple(map(str, sys.argv)),
        log_level=read_log_level(log_level),
        watchdog_s=limits.watchdog_s,
        stack_signal=failure_options.stop_signal if may_hang else 0,
        target=pack_target(target, args, kwargs),
    )


class Crew(MethodCalls, Generic[T, R]):
    """Long-lived workers, and a channel to each.

    Leaving the `with` block closes the crew once its accepted tasks are done. An exception that leaves the block
    closes it without that wait. A crew also finishes its tasks if you drop it without closing it, or if it is open
    when the interpreter exits. The attribute `nproc` is the number of workers on all hosts together.

    Args:
        target: a function `serve(ctx, task)` or `serve(task)`, which a worker calls for each of its tasks. Or a class
            with `task(self, ctx, task)`, of which each worker makes one object;
            `start(self, ctx)` and `stop(self, ctx)` are optional. Or a functools.partial of either, or an object with
            these methods, of which each worker gets a copy. A function that fits both calls gets ctx and task. The
            target travels by value if no module has it (`__main__`, closures): workers never import the caller's
            script.
        args, kwargs: arguments for the target: each worker makes its object of a class with them; a function gets
            them after the task.
        nproc_per_node: the number of workers on each host, "auto", "gpu", or "cpu", or a list with one number per
            host. None: what the hosts have room for (`a:4`), else one.
        nproc: another name of nproc_per_node.
        hosts: the names of the hosts; "auto": the nodes of the current allocation; None: those of hostfile=, a file
            that names them, or this machine.
        restart: what happens when a worker fails; None: the crew fails. The crew also fails when it loses a host. To
            restart the workers of that host on another one, set `spares=`, or let fewer hosts do:
            `nnodes=(MIN, MAX)`.
        ready_timeout_s: how long a worker's `start` may take, in seconds; 0: no limit.
        watchdog_s: how long a worker that has a task may give no sign of life, in seconds; 0: no limit. Signs are
            ctx.emit, status, progress, checkpoint and ping, and WATCHDOG=1 to NOTIFY_SOCKET. ctx.extend postpones
            this limit, ready_timeout_s, and drain_s.
        grace: seconds from the stop signal to SIGKILL; None: 25 after `infini-run --stop`, else 10.
        drain_s: how long `close` waits for accepted tasks, in seconds; None: no limit.
        max_events: how many unread events (emitted objects, results of `send`) the crew keeps for each worker. At
            this number the worker waits, if the program reads events. Otherwise the crew drops the oldest one, and
            counts it in `dropped`.
        max_tasks_per_child: after this many tasks, a worker runs its `stop`, exits, and restarts in a fresh process.
            No task is lost, and this counts as no failure. None: never.
        env: variables to add to the workers' environment; None: none.
        inherit_env: workers have this process's environment, too; on other hosts, those of its variables that jobs
            commonly need, and what the engine brings, such as a login's. False: without this process's.
        cwd: the directory in which workers start; None: the current one.
        log_dir: a directory for rank_N.log files of the workers' output; None: none.
        log_level: the lowest level ("INFO", 20) of the logging records that go from workers to the loggers of this
            process, with `rank` and `host`. True: the root logger's level. False: records stay with the workers.
            None: as True if the root logger has a handler, else as False.
        preload: modules that one process imports once. Workers are forks of that process, in milliseconds, also after
            a restart.
        spawner: for another way to start workers, an object with the methods of the class Spawner in
            infini_run/crews/spawn/spawner.py; leave out all arguments about where and how workers start. None:
            infini-run starts them by these arguments.
        flags: the command's flags by their names: console="none", gpus_per_proc=1, hang_timeout=60, ...

    Raises:
        UsageError, UnpicklableError, ProgramError, StartError, NodeLost: then nothing runs.
    """

    _name = "Crew"  # in its repr
    _keyword_names: Mapping[str, str] = {}  # of those not called as their flag, by the flag
    _most_ahead = AHEAD  # shared tasks that a worker has at a time
    _starts_on_demand = False  # a worker starts with its first task, if it is here and needs an interpreter

    def __init__(
        self,
        target: Callable[[Context, T], R]
        | Plain[T, R]
        | type[Handler[T, R]]
        | Handler[T, R]
        | Callable[..., Handler[T, R]],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        nproc_per_node: int | Literal["auto", "gpu", "cpu"] | Sequence[int] | None = None,
        nproc: int | Literal["auto", "gpu", "cpu"] | Sequence[int] | None = None,
        hosts: Sequence[str] | str | None = None,
        restart: Restart | None = None,
        ready_timeout_s: float = 0.0,
        watchdog_s: float = 0.0,
        grace: float | None = None,
        drain_s: float | None = None,
        max_events: int = 10_000,
        max_tasks_per_child: int | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        cwd: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        log_level: int | str | bool | None = None,
        preload: Sequence[str] = (),
        spawner: Spawner | None = None,
        **flags: Unpack[CrewOptions],
    ) -> None:
        check_may_launch()
        check_names("Crew", flags, TABLE, Crew.__init__)
        check_flags(flags, is_crew=True)
        limits = make_limits(ready_timeout_s, watchdog_s, drain_s)
        max_events = read_count("max_events", max_events)
        max_tasks = 0 if max_tasks_per_child is None else read_count("max_tasks_per_child", max_tasks_per_child)
        policy = check(NEVER if restart is None else restart)
        failure_options = read_failure_options(flags)
        given: dict[str, Any] = {"cwd": cwd, "grace": grace, "log_dir": log_dir, **flags}
        if spawner is not None:
            where = {"nproc_per_node": nproc_per_node, "nproc": nproc, "hosts": hosts, "preload": preload or None}
            check_spawner_alone({**where, "env": env, "inherit_env": None if inherit_env else False, **given})
        names = read_hosts(hosts, given.pop("hostfile", None))
        check_node_flags(given, names)
        setup = _make_setup(target, args, kwargs or {}, log_level, limits, failure_options)
        self._tasks = count()
        self._methods = frozenset(methods_of(target))
        self._target = name_of_target(target)
        with as_start_errors(self._keyword_names):
            if spawner is None:
                environ = make_environ(os.environ, patterns_of(inherit_env, names), None, check_environment(env))
                title = title_of(f"Crew({name_of(target)})" if self._name == "Crew" else self._name)
                # on_hang: of a worker that asks for it by WATCHDOG=trigger
                given = {"env": environ, "title": title, "on_hang": "stop", **given}
                spawner = make_spawner(names, preload, read_nproc(nproc_per_node, nproc, names), given)
            self.nproc = spawner.world_size
            self._supervisor = CrewSupervisor(
                spawner,
                setup,
                policy,
                limits,
                max_events=max_events,
                max_tasks=max_tasks,
                placement=make_placement(spawner, names),
                most_ahead=self._most_ahead,
                starts_on_demand=self._starts_on_demand and not names and not preload,
            )
            self._start()

    def _start(self) -> None:
        """Start the workers. Raises as the class."""
        try:
            self._supervisor.start()
        except BaseException:  # an interrupt may come when all workers run
            if self._supervisor.is_running:
                self.close(drain=False)
            raise

    def __repr__(self) -> str:
        supervisor = self.__dict__.get("_supervisor")
        if supervisor is None:
            return f"<{self._name}: not started>"
        how = "failed" if supervisor.failure is not None else supervisor.phase.lower()
        return f"<{self._name} of {self.nproc}: {how}>"

    def _repr_html_(self) -> str:
        """Return the state of each worker as a table, for a notebook."""
        if "_supervisor" not in self.__dict__:
            return table_of_workers(repr(self)[1:-1], ())
        return table_of_workers(repr(self)[1:-1], self.status().workers)

    def __dir__(self) -> list[str]:
        return public_names(self)

    # ---- work

    def worker(self, rank: int) -> WorkerHandle[T, R]:
        """Return the handle of one worker.

        Args:
            rank: of the worker, from 0.

        Raises:
            UsageError: there is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.nproc:
            raise UsageError(f"worker({rank!r}): unknown rank; use 0 to {self.nproc - 1}")
        return WorkerHandle(self, rank)

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, rank: int) -> WorkerHandle[T, R]: ...
        @overload
        def __getitem__(self, rank: slice) -> CrewSlice[T, R]: ...

    def __getitem__(self, rank: int | slice) -> WorkerHandle[T, R] | CrewSlice[T, R]:
        """Return the handle of one worker (`crew[-1]` is the last), or of several (`crew[1:3]`).

        Raises:
            IndexError: there is none.
            TypeError: it is neither a whole number nor a slice.
        """
        ranks = range(self.nproc)
        if isinstance(rank, slice):
            if not ranks[rank]:
                raise IndexError(f"crew[{rank.start}:{rank.stop}]: no worker; use ranks 0 to {self.nproc - 1}")
            return CrewSlice(self, ranks[rank])
        if not hasattr(rank, "__index__"):
            raise TypeError(f"crew[{rank!r}]: expected a rank or a slice, such as crew[0] or crew[0:2]")
        if not -self.nproc <= rank < self.nproc:
            raise IndexError(f"crew[{rank}]: unknown rank; use 0 to {self.nproc - 1}")
        return self.worker(ranks[rank])

    def broadcast(self, task: T) -> Asks[R]:
        """Submit the same task to each worker; it is pickled once.

        Args:
            task: any object that pickles.

        Returns:
            One future per worker, by rank. `result()` of them all is a list, as is what you get by `await`.

        Raises:
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self[:].ask(task)

    def ask(self, task: T) -> Ask[R]:
        """Submit a task for whichever worker is free first.

        Args:
            task: any object that pickles.

        Returns:
            The future of its result.

        Raises:
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self._ask(task, None)

    def map(
        self,
        *iterables: Iterable[object],
        timeout_s: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool | Literal["rich", "tqdm"] = False,
    ) -> Iterator[R]:
        """Submit a task for each item, and return an iterator over the results.

        This call submits as many tasks as `buffersize` allows, and the results that you read make room for more. So
        read all results, even if you don't need them. The crew does all submitted tasks, unless you close the
        iterator, or drop it after a result: then it cancels them.

        Args:
            iterables: one, whose items are the tasks; or several: each task is then a tuple with one item of each,
                until the shortest one ends. An iterable may be endless.
            timeout_s: how long all results may take, in seconds from this call; None: no limit.
            chunksize: this many items travel together, and one worker does them, which is faster for many short
                tasks. If one of them raises, the results of the others are lost.
            buffersize: the most submitted tasks (chunks of items) with an unread result; None: 64 for each worker.
            ordered: results come in the order of the items; False: as soon as they exist.
            progress: show a bar of the results that you read: True, False, "rich" or "tqdm".

        Raises:
            UsageError: an argument is invalid.
            BaseException: reading a result raises the first failure of any task, after results that have arrived:
                those before the first item without one, or with ordered=False those that arrived before the failure.
                The iterator then cancels all unfinished tasks.
            TimeoutError: reading a result raises it after `timeout_s`. The iterator then cancels all unfinished
                tasks.
        """
        if not iterables:
            raise UsageError("map(): missing tasks; use at least one iterable")
        display = open_show(progress, "map", 1)
        options = MapOptions(timeout_s, chunksize, buffersize, ordered, self.nproc, ReadResults(display, iterables))
        return TaskMap(self.ask, options.tasks_of(iterables), options, self._supervisor.on_thread_waits)

    def _ask(self, task: T, rank: int | None) -> Ask[R]:
        return self._submit_body(dump(task, "task"), rank)

    def _ask_each(self, task: T, ranks: Sequence[int]) -> Asks[R]:
        body = dump(task, "task")
        return Asks([self._submit_body(body, rank) for rank in ranks])

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int | None = None) -> Ask[Any]:
        return self._submit_body(self._dump_call(method, args, kwargs), rank)

    def _call_each(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Sequence[int]
    ) -> Asks[Any]:
        body = self._dump_call(method, args, kwargs)
        return Asks([self._submit_body(body, rank) for rank in ranks])

    def _dump_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Body:
        if method not in self._methods:
            known = ", ".join(f"call({name!r}, ...)" for name in sorted(self._methods))
            raise UsageError(
                f"call({method!r}): unknown method of {self._target}; use {known or 'a class with methods as target'}"
            )
        return dump(MethodCall(method, args, kwargs), "call")

    def _submit_body(self, body: Body, rank: int | None) -> Ask[R]:
        self._check_open()
        ask: Ask[R] = Ask(next(self._tasks), self._supervisor)
        self._submit(PendingTask(ask.task, body, ask, shared=rank is None), rank)
        return ask

    def _send(self, task: T, rank: int) -> int:
        body = dump(task, "task")
        self._check_open()
        job = PendingTask(next(self._tasks), body, None, shared=False)
        self._submit(job, rank)
        return job.task

    def _submit(self, job: PendingTask, rank: int | None) -> None:
        supervisor = self._supervisor  # and not self: a call that waits for its turn keeps no crew
        supervisor.call(lambda: supervisor.submit(job, rank))

    def _cancel(self, task: int) -> None:
        self._supervisor.cancel_task(task)

    def _check_open(self) -> None:
        if self._supervisor.failure is not None or self._supervisor.belongs_to_parent:
            raise self._supervisor.over_error()
        if self._supervisor.phase != "RUNNING":
            raise CrewClosed("this crew is closed and takes no more tasks")

    # ---- what happens

    def events(self, timeout_s: float | None = None) -> list[CrewEvent]:
        """Return the events since the last call. If there are none, wait for the next one.

        Args:
            timeout_s: how long to wait, in seconds; None: no limit.

        Returns:
            The events, in order; none if `timeout_s` passed, or if the crew is closed and you have read all events.

        Raises:
            CrewFailed: the crew failed, and no event is left.
        """
        events = self._supervisor.events.get(read_wait("timeout_s", timeout_s))
        if not events and self._supervisor.events.is_over:
            self._raise_failure()
        return events

    def __iter__(self) -> Iterator[CrewEvent]:
        while events := self.events():
            yield from events

    async def __aiter__(self) -> AsyncIterator[CrewEvent]:
        while (event := await self._supervisor.events.get_one()) is not None:
            yield event
        self._raise_failure()

    def status(self) -> CrewStatus:
        """Return how the crew and its workers are now."""
        return crew_status(self._supervisor)

    @property
    def failure(self) -> CrewFailed | None:
        """The reason why the crew failed; None: it did not."""
        return self._supervisor.failure

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal.

        Args:
            number: the signal's number.
            rank: to this worker's process; None: to every worker's.

        Returns:
            How many processes it reached.

        Raises:
            UsageError: there is no such signal or rank.
        """
        workers = self._supervisor.workers if rank is None else [self._supervisor.workers[self.worker(rank).rank]]
        number = check_signal(number)
        return sum(w.process.signal(number) for w in workers if w.process is not None and not w.is_settled)

    # ---- the end

    def close(self, *, drain: bool = True) -> CrewStatus:
        """End the crew: accept no more tasks, let the workers end, stop what is left, and free everything.

        You may call it twice, from several threads, and again after Ctrl-C interrupted it. In a callback of an Ask it
        does not wait.

        Args:
            drain: wait for the accepted tasks, at most drain_s seconds, unless a worker asks for more time
                (ctx.extend); False: do not.

        Returns:
            How it ended; `problems` has a sentence for everything that did not go in order.
        """
        self._supervisor.close(drain=drain)
        return self.status()

    async def aclose(self, *, drain: bool = True) -> CrewStatus:
        """Close as `close` does, for asyncio.

        Args:
            drain: wait for the accepted tasks, at most drain_s seconds; False: do not.

        Returns:
            How it ended.
        """
        self._supervisor.begin_to_close(drain=drain)
        await self._supervisor.events.wait_over()
        return self.close()

    def _raise_failure(self) -> None:
        if self._supervisor.failure is not None:
            raise self._supervisor.over_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(drain=kind is None)
        except BaseException:  # Ctrl-C while it waited for the tasks
            self.close(drain=False)
            raise
        if kind is None:
            self._raise_end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose(drain=kind is None)
        except BaseException:  # the coroutine was canceled while it waited for the tasks
            await self.aclose(drain=False)
            raise
        if kind is None:
            self._raise_end()

    def _raise_end(self) -> None:
        """Raise the reason why accepted tasks remain undone, if there is one; else print what did not go in order."""
        self._raise_failure()
        if self._supervisor.drain_error is not None:
            raise self._supervisor.drain_error
        problems = self._supervisor.problems
        for problem in problems[:_PRINTED]:
            print_line(problem)
        if len(problems) > _PRINTED:
            print_line(f"and {len(problems) - _PRINTED} more that did not end properly")

    def __del__(self) -> None:
        """Let the supervisor finish the tasks, then end: nothing refers to the crew any more. No wait here: the call
        may come anywhere, in a thread that holds any lock."""
        supervisor = self.__dict__.get("_supervisor")
        if supervisor is not None and supervisor.phase == "RUNNING":
            what = "; it finishes the remaining tasks first" if supervisor.has_work else ""
            text = f"{self!r} was dropped while its workers ran; close it{what}"
            supervisor.is_dropped = True
            supervisor.begin_to_close(drain=True)
            warn(text, ResourceWarning, stacklevel=2)  # last: -W error makes it an exception
