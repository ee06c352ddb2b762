"""The Python API of crews: `Crew`, long-lived workers that hold channels with us.

Everything that is done, is done by its supervisor's thread (supervisor.py); what is here checks, asks and waits.
Usable from any thread, from asyncio, and several at a time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from itertools import count
from warnings import warn

from infini_run.crews.crew_supervisor import CrewSupervisor
from infini_run.crews.exec_spawner import ExecSpawner
from infini_run.crews.future import Ask
from infini_run.crews.import_guard import check_may_launch
from infini_run.crews.protocol import Hello, dump
from infini_run.crews.restart_policy import NEVER, check
from infini_run.crews.supervised_worker import Limits, PendingTask
from infini_run.crews.targets import read_hosts, read_nproc
from infini_run.errors import InfiniRunError, UsageError
from infini_run.record import record
from infini_run.report.failures import CrewFailed
from infini_run.system.exit_hooks import close_at_exit, closed
from infini_run.system.fork_hooks import call_in_forked_children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from infini_run.crews.event_queue import CrewEvent
    from infini_run.crews.restart_policy import Restart
    from infini_run.crews.spawner import Spawner

_DRAIN_S = 30.0
_MAP_AHEAD = 64  # items of a map that are on their way, for each worker


@record
class WorkerStatus:
    """One worker, now. state: as in docs/crews.md. tasks: how many it has, begun or waiting. text, done, of: what it
    last said of itself."""

    rank: int
    state: str
    pid: int
    host: str
    restarts: int
    tasks: int
    text: str
    done: float
    of: float


@record
class CrewStatus:
    """A crew, now. phase: RUNNING, DRAINING, EXITED or CLOSED. waiting: tasks that no worker has yet. failure: why it
    has ended by itself. problems: what went wrong while workers were ended, a sentence each."""

    phase: str
    workers: tuple[WorkerStatus, ...]
    waiting: int
    failure: CrewFailed | None
    problems: tuple[str, ...]


class Crew:
    """Long-lived workers, and a channel to each.

    target: a function `serve(ctx, task)`, called for each task; or a class with `task(self, ctx, task)` and, where
    there is something to do, `start(self, ctx)` and `stop(self, ctx)`: each worker makes one object of it. It travels
    by value where it must (__main__, closures); workers never import the caller's script.
    nproc_per_node (or nproc): workers, or auto, gpu, cpu; None: what the hosts have room for (`a:4`), else one.
    hosts: where they run, so
    many on each (or a list of numbers); "auto": the nodes of the allocation that we are in; None: here.
    restart: what is done when one fails (None: the crew fails);
    a lost host fails the crew. ready_timeout_s: how long `start` may take; watchdog_s: how long a worker may give no
    sign of life while it has something to do (ctx.emit, status, progress, checkpoint and ping are signs, and
    WATCHDOG=1 to NOTIFY_SOCKET); 0: as long as it likes; ctx.extend puts both off. grace: seconds between the stop
    signal and SIGKILL. drain_s: how long `close` waits for what was accepted. max_events: how many emitted objects
    and results of `send` are kept for `events` before workers are made to wait. env: the workers' whole environment
    (None: ours); on other hosts, what is added to that of a login there (None: what jobs commonly need). log_dir: a
    file for each. log_level: logging records of at least this level come to our loggers, with `rank` and `host`.
    preload: modules that a small process imports once; workers are forked from it, and there again in milliseconds
    after a restart.
    flags: as for `run`.

    Leaving the `with` block closes it; by an exception, without waiting for what is not done. Raises UsageError,
    UnpicklableError, ProgramError, StartError: then nothing runs.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *,
        nproc_per_node: int | str | Sequence[int] | None = None,
        nproc: int | str | Sequence[int] | None = None,
        hosts: Sequence[str] | str | None = None,
        restart: Restart | None = None,
        ready_timeout_s: float = 0.0,
        watchdog_s: float = 0.0,
        grace: float | None = None,
        drain_s: float = _DRAIN_S,
        max_events: int = 10_000,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        log_level: int | None = None,
        preload: Sequence[str] = (),
        spawner: Spawner | None = None,
        **flags: Any,
    ) -> None:
        check_may_launch()
        if not callable(target) or (isinstance(target, type) and not callable(getattr(target, "task", None))):
            raise UsageError(
                f"target={target!r}: give a function of (ctx, task), or a class with task(self, ctx, task)"
            )
        limits = _limits(ready_timeout_s, watchdog_s, drain_s)
        if not isinstance(max_events, int) or max_events < 1:
            raise UsageError(f"max_events={max_events!r}: give a whole number above 0")
        policy = check(NEVER if restart is None else restart)
        hello = Hello(
            path=tuple(sys.path),
            argv=tuple(sys.argv),
            log_level=-1 if log_level is None else log_level,
            watchdog_s=limits.watchdog_s,
            target=dump(target, "target"),
        )
        if spawner is None:
            flags = {"on_hang": "stop", **flags}  # one that says so itself: WATCHDOG=trigger
            given = {"env": env, "cwd": cwd, "grace": grace, "log_dir": log_dir, **flags}
            names = read_hosts(hosts)
            spawner = _make_spawner(names, preload, read_nproc(nproc_per_node, nproc, names), given)
        self.nproc = spawner.world_size
        self._tasks = count()
        self._drain_s = limits.drain_s
        self._supervisor = CrewSupervisor(spawner, hello, policy, limits, max_events=max_events)
        call_in_forked_children(self)
        self._exit_number = close_at_exit(self)
        self._supervisor.start()

    # ---- work

    def worker(self, rank: int) -> WorkerHandle:
        """One of them. Raises UsageError: there is no such rank."""
        if type(rank) is not int or not 0 <= rank < self.nproc:
            raise UsageError(f"worker({rank!r}): the ranks are 0 to {self.nproc - 1}")
        return WorkerHandle(self, rank)

    def ask(self, what: object) -> Ask:
        """Give it to whichever worker comes to it first; its result is that future's. Raises UnpicklableError,
        CrewFailed, InfiniRunError: the crew was closed."""
        return self._ask(what, None)

    def map(self, items: Iterable[object]) -> Iterator[Any]:
        """The results for all items, in their order, each from whichever worker came to it first. At the first
        failure of any, that is raised and the rest is cancelled. Items are taken as there is room: there may be any
        number."""
        return _map(self, iter(items))

    def _ask(self, what: object, rank: int | None) -> Ask:
        body = dump(what, "task")
        self._check_open()
        ask = Ask(next(self._tasks), self._cancel)
        job = PendingTask(ask.task, body, ask, shared=rank is None)
        self._supervisor.call(lambda: self._supervisor.submit(job, rank))
        return ask

    def _send(self, what: object, rank: int) -> int:
        body = dump(what, "task")
        self._check_open()
        task = next(self._tasks)
        job = PendingTask(task, body, None, shared=False)
        self._supervisor.call(lambda: self._supervisor.submit(job, rank))
        return task

    def _cancel(self, task: int) -> None:
        self._supervisor.call(lambda: self._supervisor.cancel(task))

    def _check_open(self) -> None:
        if self._supervisor.failure is not None:
            raise self._supervisor.over_error()
        if self._supervisor.phase != "RUNNING":
            raise InfiniRunError("this crew has been closed: nothing can be asked of it any more")

    # ---- what happens

    def events(self, timeout_s: float | None = None) -> list[CrewEvent]:
        """What has happened since the last call, waiting for something at most `timeout_s` seconds (None: until there
        is). Empty when the time is up, or when the crew was closed and everything has been read. Raises CrewFailed
        when it has failed, and everything has been read."""
        events = self._supervisor.events.get(timeout_s)
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
        """How it is now."""
        supervisor = self._supervisor
        workers = []
        for worker in supervisor.workers:
            process = worker.process
            workers.append(
                WorkerStatus(
                    rank=worker.rank,
                    state=worker.state,
                    pid=process.pid if process is not None else 0,
                    host=process.host if process is not None else "",
                    restarts=max(0, worker.starts - 1),
                    tasks=len(worker.handed) + len(worker.held),
                    text=worker.status,
                    done=worker.progress[0],
                    of=worker.progress[1],
                )
            )
        return CrewStatus(
            phase=supervisor.phase,
            workers=tuple(workers),
            waiting=supervisor.waiting,
            failure=supervisor.failure,
            problems=tuple(supervisor.problems),
        )

    @property
    def failure(self) -> CrewFailed | None:
        """Why the crew has ended by itself; None: it has not."""
        return self._supervisor.failure

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to one worker's process, or to every worker's; return how many it reached."""
        workers = self._supervisor.workers if rank is None else [self._supervisor.workers[self.worker(rank).rank]]
        try:
            return sum(w.process.signal(number) for w in workers if w.process is not None and not w.is_settled)
        except OSError:
            raise UsageError(f"number={number}: there is no such signal") from None

    # ---- the end

    def close(self, *, drain: bool = True) -> CrewStatus:
        """End it: accept nothing more, wait for what was accepted (drain=False: do not), tell the workers to end,
        wait for them, stop what is left, free everything. How it ended; `problems` has what did not go as it should.

        Bounded by drain_s and the grace, where no worker asked for more time (ctx.extend). Safe twice, from several
        threads, and again where an exception (Ctrl-C) came while it waited. In a callback of an Ask it does not
        wait."""
        self._ask_end(drain)
        self._supervisor.join()
        closed(self._exit_number)
        return self.status()

    async def aclose(self, *, drain: bool = True) -> CrewStatus:
        """The same, for asyncio."""
        self._ask_end(drain)
        await self._supervisor.events.wait_over()
        return self.close()

    def _ask_end(self, drain: bool) -> None:
        supervisor = self._supervisor
        supervisor.call((lambda: supervisor.drain(self._drain_s)) if drain else supervisor.halt)

    def _raise_failure(self) -> None:
        if self._supervisor.failure is not None:
            raise self._supervisor.over_error()

    def close_at_exit(self) -> None:
        """The interpreter exits: end the workers while there is one."""
        self.close(drain=False)

    def after_fork_in_child(self) -> None:
        """In a forked child, to which the crew does not belong."""
        self._supervisor.after_fork_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)
        if kind is None:
            self._raise_failure()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=kind is None)
        if kind is None:
            self._raise_failure()

    def __del__(self) -> None:
        """A crew that was dropped takes its workers with it, with a warning."""
        supervisor = self.__dict__.get("_supervisor")
        if supervisor is not None and supervisor.phase != "CLOSED":
            warn(f"{self!r} was dropped while its workers ran: close it", ResourceWarning, stacklevel=2)
            supervisor.call(supervisor.halt)
            supervisor.join()


class WorkerHandle:
    """One worker of a crew, through all its lives."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self._crew = crew
        self.rank = rank

    def ask(self, what: object) -> Ask:
        """Give it this to do; its result is that future's, and its death that future's failure (WorkerDied). What it
        has not been handed, because it is being started again, waits for its next life. Raises as Crew.ask."""
        return self._crew._ask(what, self.rank)

    def send(self, what: object) -> int:
        """The same, where nobody waits for the result: it comes among the events, as done or failed, with the task's
        number, which is returned."""
        return self._crew._send(what, self.rank)

    def cancel(self, task: int) -> None:
        """Nobody wants the result of what was sent any more: the worker's ctx.checkpoint raises Cancelled, and a
        cancelled comes among the events. (An Ask has a `cancel` of its own.)"""
        self._crew._cancel(task)

    def signal(self, number: int) -> int:
        """Send its process a signal; 0: it is gone."""
        return self._crew.signal(number, self.rank)

    def status(self) -> WorkerStatus:
        """How it is now."""
        return self._crew.status().workers[self.rank]


def _make_spawner(
    hosts: Sequence[str], preload: Sequence[str], count: int | str | tuple[int, ...] | None, given: dict[str, Any]
) -> Spawner:
    if isinstance(preload, str):
        raise UsageError(f"preload={preload!r}: give a list of modules, [{preload!r}]")
    if hosts:
        from infini_run.crews.remote_spawner import RemoteSpawner
        from infini_run.crews.worker_environ import COPIED, make_environ

        if given["env"] is None:
            given["env"] = make_environ(os.environ, COPIED, None, None)
        return RemoteSpawner(hosts, nproc=count, preload=preload, **given)
    assert isinstance(count, (int, str))
    if not preload:
        return ExecSpawner(nproc=count, **given)
    from infini_run.crews.fork_spawner import ForkSpawner

    return ForkSpawner(preload, nproc=count, **given)


def _limits(ready_timeout_s: float, watchdog_s: float, drain_s: float) -> Limits:
    given = {"ready_timeout_s": ready_timeout_s, "watchdog_s": watchdog_s, "drain_s": drain_s}
    for name, value in given.items():
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise UsageError(f"{name}={value!r}: give a number of seconds, 0 or more")
    return Limits(**{name: float(value) for name, value in given.items()})


def _map(crew: Crew, items: Iterator[object]) -> Iterator[Any]:
    """Asks on their way, the oldest first; any that fails is heard of at once."""
    changed = threading.Condition()
    failed: list[Ask] = []
    asks: deque[Ask] = deque()

    def hear(ask: Any) -> None:
        with changed:
            if ask.has_failed:
                failed.append(ask)
            changed.notify()

    def fill() -> None:
        while len(asks) < _MAP_AHEAD * crew.nproc:
            for item in items:
                asks.append(crew.ask(item))
                asks[-1].add_done_callback(hear)
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
        for ask in asks:
            ask.cancel()
