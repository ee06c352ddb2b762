"""`Launcher.run(function)`: a Python function on every rank of every host, and its results back.

It reports everything that can be wrong with the request before anything starts.
"""

from __future__ import annotations

import os
import sys
from warnings import warn
from weakref import WeakSet

from infini_run.crews.api.handle import LaunchHandle
from infini_run.crews.api.log_level import read_log_level
from infini_run.crews.api.preload_detection import modules_to_preload
from infini_run.crews.api.worker_environ import make_environ, patterns_of
from infini_run.crews.callables import check_callable_runs, name_of, path_of_workers, title_of
from infini_run.crews.protocol import WorkerSetup, check_parts, dump
from infini_run.crews.spawn.exec_spawner import ExecSpawner
from infini_run.crews.spawn.placement import (
    check_flags,
    check_node_flags,
    read_hosts,
    read_nproc,
    read_worker_options,
)
from infini_run.crews.spawn.shared_spawner import SharedSpawner
from infini_run.crews.spawn.start_errors import as_start_errors
from infini_run.crews.supervision.launch_placement import LaunchPlacement
from infini_run.crews.supervision.launch_supervisor import LaunchLimits, LaunchSupervisor
from infini_run.crews.supervision.progress import open_show
from infini_run.crews.worker.import_guard import check_may_launch
from infini_run.errors import UsageError
from infini_run.number_arguments import read_seconds
from infini_run.options.from_python import check_environment, check_names, check_path
from infini_run.options.table import TABLE
from infini_run.plan.restart_policy import RestartState
from infini_run.public_names import public_names
from infini_run.system.dropped_owners import close_dropped
from infini_run.system.exit_hooks import close_at_exit, closed
from infini_run.system.fork_hooks import call_in_forked_children, stayed_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Literal, TypeVar

    from typing_extensions import ParamSpec, Self, Unpack

    from infini_run.crews.api.result import LaunchResult
    from infini_run.crews.protocol import Body
    from infini_run.crews.spawn.remote_spawner import RemoteSpawner
    from infini_run.crews.spawn.shared_spawner import SpawnerHold
    from infini_run.crews.spawn.spawner import Spawner
    from infini_run.options.keywords import FunctionOptions

    P = ParamSpec("P")
    R = TypeVar("R")

_GROUP_S = 600.0  # for an operation of a process group, by default
_FORKED_FROM = 2  # workers at once, from which on one import for all is faster than one per worker


class Launcher:
    """Functions on ranks, and how to run them. Each `run` is a separate launch; several may run at a time.

    A Launcher needs no close. The end of its `with` block waits for its launches; an exception that leaves the block
    stops them.
    """

    def __init__(
        self,
        hosts: Sequence[str] | str | None = None,
        nproc_per_node: int | Literal["auto", "gpu", "cpu"] | Sequence[int] | None = None,
        *,
        nproc: int | Literal["auto", "gpu", "cpu"] | Sequence[int] | None = None,
        preload: Sequence[str] | None = None,
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        copy_env: Sequence[str] | None = None,
        env_file: str | os.PathLike[str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        log_level: int | str | bool | None = None,
        worker_timeout_s: float = _GROUP_S,
        agent_timeout_s: float | None = 60.0,
        timeout_s: float | None = None,
        progress: bool | Literal["rich", "tqdm"] = False,
        **flags: Unpack[FunctionOptions],
    ) -> None:
        """Check the arguments. Nothing starts before `run`.

        Args:
            hosts: names of hosts, as ["a", "b:4"], or as "a,b:4"; engine= reaches them. `"auto"`: the nodes of the
                current allocation, or this machine without one. None: the hosts in the file hostfile=, or this
                machine.
            nproc_per_node: the number of workers on each host, "gpu" or "cpu" (one per device), "auto", or a list
                with one number per host. None: what each has room for ("b:4"), else one.
            nproc: another name of nproc_per_node.
            preload: modules that one process imports once; workers are forks of it. None: torch, if the function
                needs it and there are several workers; a Pool: none. (): none, every worker is a fresh interpreter.
            backend: "gloo", "nccl", or another that torch has: the function runs within torch.distributed's process
                group; None: without an import of torch.
            env: variables to add to the workers' environment; None: none.
            inherit_env: False: workers have no variable of this process, except those of env= and env_file=. With
                engine="slurm" they have all.
            copy_env: names or patterns (NCCL*) of the variables of this process that workers get. None: on this
                machine all variables, on other hosts those that jobs commonly need. With engine="slurm" they have
                all.
            env_file: a file of variables, NAME=value on each line; None: none.
            cwd: the directory in which workers start; None: the current one.
            log_dir: a directory for rank_N.log files of the workers' output, which also goes to this console; None:
                none.
            log_level: the lowest level ("INFO", 20) of the logging records that go from workers to the loggers of
                this process, with `rank` and `host`. True: the root logger's level. False: records stay with the
                workers. None: as True if the root logger has a handler, else as False.
            worker_timeout_s: how long an operation of the process group of `backend` may take, in seconds;
                default 600.
            agent_timeout_s: how long it may take until all workers are up, in seconds; None: no limit.
            timeout_s: how long the whole launch may take, in seconds; None: no limit.
            progress: show a bar of what workers report by `this_worker().progress`: True, False, "rich" or "tqdm".
            flags: the command's flags by their names: console="none", grace=30, gpus_per_proc=1, keep_going=True.
                max_restarts=2: after a failure all ranks restart in fresh processes, with the same call, at most
                twice.

        Raises:
            UsageError: the request is invalid.
        """
        check_names(type(self).__name__, flags, TABLE, Launcher.__init__)
        check_flags(flags, is_crew=False)
        self._launches: WeakSet[LaunchSupervisor] = WeakSet()
        self.hosts = read_hosts(hosts, flags.pop("hostfile", None))
        check_node_flags(flags, self.hosts)
        self.nproc_per_node = read_nproc(nproc_per_node, nproc, self.hosts)
        self.preload = None if preload is None else _preload(preload)
        if backend is not None and not (isinstance(backend, str) and backend):
            raise UsageError(f"backend={backend!r}: expected 'gloo', 'nccl', another backend of torch, or None")
        self.backend = backend.lower() if backend else None
        self.worker_timeout_s = read_seconds("worker_timeout_s", worker_timeout_s, above_zero=True)
        if backend is None and self.worker_timeout_s != _GROUP_S:
            raise UsageError(f"worker_timeout_s={worker_timeout_s!r}: no effect without backend=")
        self.agent_timeout_s = _limit("agent_timeout_s", agent_timeout_s)
        self.timeout_s = _limit("timeout_s", timeout_s)
        self.progress = progress
        self._log_level = log_level
        read_log_level(log_level)  # raise at once if it is invalid
        if copy_env is not None and not inherit_env:
            raise UsageError(f"inherit_env=False: conflicts with copy_env={copy_env!r}; drop one of them")
        patterns = patterns_of(inherit_env, self.hosts) if copy_env is None else copy_env
        self._environ = (patterns, env_file, check_environment(env))
        self._given: dict[str, Any] = {**flags, "cwd": cwd} | ({} if log_dir is None else {"log_dir": log_dir})
        check_path("cwd", cwd)
        self._failure_options = read_worker_options(self._given, self.nproc_per_node)

    _owns_nodes = True  # each launch reaches its hosts for itself

    def __repr__(self) -> str:
        where = f"hosts={list(self.hosts)!r}, " if self.hosts else ""
        return f"<{type(self).__name__}: {where}nproc_per_node={self.nproc_per_node!r}{self._state()}>"

    def __dir__(self) -> list[str]:
        return public_names(self, ("after_fork_in_child", "close_at_exit"))

    def _state(self) -> str:
        """Return its state for its repr."""
        return ""

    # ---- running

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> LaunchResult[R]:
        """Call `function(*args, **kwargs)` on every rank, and return what each returned.

        The function and what it refers to travel by value if no module has them: lambdas, closures, functions of
        `__main__` or a notebook. infini-run pickles the arguments once. After any exception, no worker is left.

        Args:
            function: any callable that pickles.
            args, kwargs: its arguments.

        Returns:
            The results, by rank.

        Raises:
            BaseException: what a rank raised first in time, with its type, the rank's traceback as a note, and `rank`
                and `host`. The launch stops the other ranks; later failures are notes.
            UsageError, UnpicklableError: before anything starts.
            StartError, NodeLost: workers did not start; a host was lost.
            WorkerDied: a worker ended without a result, also with exit code 0.
            RemoteError: an exception or a result that cannot be rebuilt here.
            LaunchTimeout: agent_timeout_s or timeout_s has passed.
        """
        return LaunchHandle(self._begin(function, args, kwargs)).result_or_stop()

    def start(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> LaunchHandle[R]:
        """Call `function(*args, **kwargs)` on every rank, and return a handle once the workers have started.

        Args:
            function: any callable that pickles.
            args, kwargs: its arguments.

        Returns:
            The handle. Its `result` waits for the end, and raises what fails after the start.

        Raises:
            UsageError, UnpicklableError: before anything starts.
            StartError, NodeLost: workers did not start; a host was lost.
        """
        return LaunchHandle(self._begin(function, args, kwargs))

    async def arun(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> LaunchResult[R]:
        """Call `function(*args, **kwargs)` on every rank, for asyncio: the event loop continues meanwhile. A
        cancellation of the coroutine stops the launch, and the coroutine ends when nothing is left of it.

        Args:
            function: any callable that pickles.
            args, kwargs: its arguments.

        Returns:
            The results, by rank.

        Raises:
            BaseException: what a rank raised first in time, with its type, the rank's traceback as a note, and `rank`
                and `host`.
            UsageError, UnpicklableError: before anything starts.
            StartError, NodeLost: workers did not start; a host was lost.
            WorkerDied: a worker ended without a result, also with exit code 0.
            RemoteError: an exception or a result that cannot be rebuilt here.
            LaunchTimeout: agent_timeout_s or timeout_s has passed.
        """
        from asyncio import CancelledError, ensure_future, shield, to_thread, wait

        starting = ensure_future(to_thread(self.start, function, *args, **kwargs))
        try:
            handle = await shield(starting)
        except CancelledError:
            starting.add_done_callback(_stop_started)  # whatever cancels this one once more
            await wait([starting])
            if starting.exception() is None:
                await starting.result().stop_async()
            raise
        return await handle.follow_async()

    def close(self, *, drain: bool = True) -> None:
        """Wait until no launch of this Launcher is left. You may call it again.

        Args:
            drain: True: wait until the launches finish; False: stop them, within the grace.
        """
        launches = [launch for launch in self._launches if not launch.is_over]
        try:
            for launch in launches if drain else ():
                launch.join()
        finally:
            _stop(launches)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _begin(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LaunchSupervisor:
        body = self._pack(function, args, kwargs)
        spawner = self._make_spawner(function)
        try:
            return self._launch(spawner, body, function, spawner.close)
        except BaseException:
            spawner.close()
            raise

    @as_start_errors()
    def _launch(
        self, spawner: Spawner, body: Body, function: Callable[..., Any], release: Callable[[], None]
    ) -> LaunchSupervisor:
        options = self._failure_options
        setup = WorkerSetup(
            path=path_of_workers(),
            argv=tuple(map(str, sys.argv)),
            log_level=read_log_level(self._log_level),
            stack_signal=options.stop_signal if options.hang_timeout_s else 0,
        )
        limits = LaunchLimits(start_timeout_s=self.agent_timeout_s, timeout_s=self.timeout_s)
        given: dict[str, Any] = {
            "keep_going": bool(self._given.get("keep_going")),
            "release": release,
            "restarts": RestartState(options),
            "placement": self._make_placement(spawner),
            "display": open_show(self.progress, getattr(function, "__name__", "function"), spawner.world_size),
        }
        launch = LaunchSupervisor(spawner, setup, body, limits, **given)
        self._launches.add(launch)
        try:
            launch.start()
        except BaseException:  # an interrupt may come when all ranks run
            if launch.is_running:
                _stop([launch])
            raise
        return launch

    def _make_placement(self, spawner: Spawner) -> LaunchPlacement:
        if self.hosts:
            from infini_run.crews.spawn.remote_spawner import RemoteSpawner

            if isinstance(spawner, RemoteSpawner) and spawner.is_elastic:
                from infini_run.crews.supervision.failover_launch_placement import FailoverLaunchPlacement

                return FailoverLaunchPlacement(spawner, owns_worlds=self._owns_nodes)
        return LaunchPlacement()

    def _pack(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Body:
        """Pack the call. Raises UsageError, UnpicklableError: nothing was started."""
        check_may_launch()
        if not callable(function):
            raise UsageError(f"{function!r} is not callable; use a function, then its arguments")
        check_callable_runs(function, "function")
        call: Any = (function, tuple(args), dict(kwargs))
        if self.backend is not None:
            from infini_run.crews.worker.torch_process_group import call_in_group

            call = (call_in_group, (self.backend, self.worker_timeout_s, *call), {})
        try:
            return dump(call, "call")
        except UsageError:
            raise
        except TypeError:
            check_parts(function, args, kwargs)
            raise

    @as_start_errors()
    def _make_spawner(self, function: Callable[..., Any] | None, stays: bool = False) -> Spawner:
        title = title_of(type(self).__name__ if function is None else f"{name_of(function)}()")
        given: dict[str, Any] = self._given | {"env": make_environ(os.environ, *self._environ), "title": title}
        if self.hosts:
            return self._make_node_spawner(function, given)
        preload, nproc = self.preload, self.nproc_per_node
        assert isinstance(nproc, (int, str))
        is_debugged = "pydevd" in sys.modules  # which does not follow these forks: each worker is a separate process
        if preload is None and function is not None and nproc != 1 and not is_debugged:
            preload = modules_to_preload(function) or (("torch",) if self.backend else ())
            if preload and nproc in ("cpu", "gpu", "auto"):
                nproc = ExecSpawner(nproc=nproc, **given).world_size
            if isinstance(nproc, int) and nproc < _FORKED_FROM:
                preload = ()
        if not preload:
            return ExecSpawner(nproc=nproc, **given)
        from infini_run.crews.spawn.fork_spawner import ForkSpawner

        is_silent = self.preload is None
        timeout_s = self.agent_timeout_s
        return ForkSpawner(preload, is_silent=is_silent, stays=stays, start_timeout_s=timeout_s, nproc=nproc, **given)

    def _make_node_spawner(self, function: Callable[..., Any] | None, given: dict[str, Any]) -> RemoteSpawner:
        from infini_run.crews.spawn.remote_spawner import RemoteSpawner

        preload = self.preload or ()
        if self.preload is None and function is not None:
            preload = modules_to_preload(function) or (("torch",) if self.backend else ())
        limits = [limit for limit in (self.agent_timeout_s, self.timeout_s) if limit is not None]
        return RemoteSpawner(
            self.hosts,
            nproc=self.nproc_per_node,
            preload=preload,
            is_silent=self.preload is None,
            start_timeout_s=self.agent_timeout_s,
            **({"join_timeout": min(limits)} if limits else {}) | given,
        )


class Pool(Launcher):
    """A Launcher that imports the modules of `preload` once for all launches, so that a launch takes milliseconds.
    Each launch has its own processes. The arguments are those of `Launcher`.

    The end of the `with` block waits for all launches, then closes the pool; an exception that leaves the block stops
    the launches. A pool that you drop without closing it ends with its last launch.

    Raises:
        UsageError, ProgramError, StartError, NodeLost: then nothing runs.
    """

    _owns_nodes = False
    _belongs_to_parent = False  # this is a forked child, and it is open in the parent

    if not TYPE_CHECKING:  # for a type checker its arguments are a Launcher's

        def __init__(self, *given, preload=(), **more):
            check_may_launch()
            super().__init__(*given, preload=preload or (), **more)
            self._open()

        __init__.__doc__ = Launcher.__init__.__doc__

    @as_start_errors()
    def _open(self) -> None:
        spawner = self._make_spawner(None, stays=True)
        self._hold: SpawnerHold | None = SharedSpawner(spawner).hold()
        self._is_open = bool(self.preload or self.hosts)
        call_in_forked_children(self)
        self._exit_number = close_at_exit(self)
        try:
            if self._is_open:
                spawner.open()  # type: ignore[attr-defined]
        except BaseException:
            self.close()
            raise

    def _begin(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LaunchSupervisor:
        body = self._pack(function, args, kwargs)
        own = self._hold
        hold = own.another() if own is not None else None
        if hold is None:
            if self._belongs_to_parent:
                raise UsageError(stayed_with_parent("this Pool"))
            raise UsageError("this Pool is closed and runs no more functions")
        try:
            return self._launch(hold.spawner, body, function, hold.release)
        except BaseException:
            hold.release()
            raise

    def _state(self) -> str:
        return ", closed" if self._hold is None else ""

    def close(self, *, drain: bool = False) -> None:
        """End the pool's launches and its idle processes. You may call it again.

        Args:
            drain: True: wait until the launches finish; False: stop them, within the grace.
        """
        try:
            super().close(drain=drain)
        finally:
            hold, self._hold = self._hold, None
            closed(self._exit_number)
            if hold is not None:
                hold.release()

    def close_at_exit(self) -> None:
        """Close at the exit of the interpreter. Its launches, which finish before, are in the registry themselves."""
        self.close()

    def after_fork_in_child(self) -> None:
        """Forget everything in a forked child, to which nothing of it belongs."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._belongs_to_parent = True
            hold.spawner.after_fork_in_child()

    def __del__(self) -> None:
        """Let its spawner end with the last launch that uses it: nothing refers to the pool any more. No wait here:
        the call may come anywhere, in a thread that holds any lock."""
        hold = self.__dict__.get("_hold")
        if hold is None:
            return
        shown = repr(self)
        self._hold = None
        running = sum(not launch.is_over for launch in self._launches)
        close_dropped(hold.release)
        if running or self._is_open:
            what = ""
            if running == 1:
                what = "; its launch keeps running until it finishes"
            elif running:
                what = f"; its {running} launches keep running until they finish"
            text = f"{shown} was dropped while open; close it{what}"
            warn(text, ResourceWarning, stacklevel=2)  # last: -W error makes it an exception


def _stop(launches: Sequence[LaunchSupervisor]) -> None:
    """Stop what still runs of these, and wait for the end; an exception that interrupts the wait kills it."""
    try:
        for launch in launches:
            if not launch.is_over:
                launch.call(launch.stop_all)
        for launch in launches:
            launch.join()
    finally:
        for launch in launches:
            launch.close()


def _stop_started(starting: asyncio.Task[LaunchHandle[Any]]) -> None:
    if starting.exception() is None:
        starting.result().stop()


def _preload(preload: Sequence[str]) -> tuple[str, ...]:
    if isinstance(preload, str) or not all(isinstance(name, str) and name for name in preload):
        raise UsageError(f"preload={preload!r}: expected a list of module names")
    return tuple(preload)


def _limit(name: str, value: float | None) -> float | None:
    return None if value is None else read_seconds(name, value, above_zero=True)
