"""The Python API: `run` for a launch from start to end, `ProcessLauncher` for those who watch.

Usable from any thread and several at a time: no signal handler is installed, and only processes that we
started are signalled or reaped; the host program's own children are not seen. What left a rank's process
group is known by INFINI_RUN_ID in its environment; only the command, which owns its process, finds a
descendant that has wiped that, too.
"""

from __future__ import annotations

import atexit
import os
import time
from _thread import RLock
from warnings import warn
from weakref import WeakSet

from infini_run.core.group import Quietly, forking, write
from infini_run.errors import InfiniRunError, LaunchTimeout, UsageError, printable
from infini_run.node.launch import NodeLaunch
from infini_run.node.readiness import all_ready
from infini_run.options.grammar import metavar
from infini_run.options.options import resolve
from infini_run.options.table import TABLE
from infini_run.plan.model import make_plan, spans_of
from infini_run.plan.program import error_folder, find_command, inspect_node, new_launch_id, unshared_streams
from infini_run.record import replace
from infini_run.report.failures import WorkerError
from infini_run.system.fork_hooks import call_in_forked_children
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from infini_run.core.group import Event
    from infini_run.display.observers import Observers
    from infini_run.environments.environment import ClusterEnvironment
    from infini_run.multinode.head import Head
    from infini_run.multinode.head_observers import HeadObservers
    from infini_run.node.restarting_launch import RestartingLaunch
    from infini_run.options.nodes import NodeList
    from infini_run.options.options import Options, Request
    from infini_run.plan.model import Command, Plan, RankRange
    from infini_run.report.report import Exit, Report

_FOR_FLAGS = ("INFINI_RUN_", "PET_", "TORCH_ELASTIC_")
_PATHS = ("DIR", "FILE", "FILE.png")
_NOT_HERE = ("dry_run", "isolate", "report", "verbose")


def run(
    command: Sequence[str],
    *,
    check: bool = True,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    **flags: object,
) -> Report:
    """Run `command` on every rank, from start to end, and return how it ended.

    command: the program and its arguments. check: raise WorkerError when a rank failed. timeout_s: seconds
    after which everything is stopped and LaunchTimeout is raised; None: no limit. env: the whole environment
    (None: ours), to which the ranks' variables are added. cwd: where the ranks start (None: here); a relative
    program is looked for there.
    flags: the command's flags by their names, `nproc_per_node=8` (or `nproc=8`), `log_dir="logs", grace=30`; with
    `hosts=["a", "b"]` or `engine="slurm"` on many nodes; with `engine="auto"` as one node of those that the
    surroundings name, or on all of an allocation. stdin is "none" unless it is given: what is typed is for
    the host program.

    Raises UsageError and ProgramError before anything starts, StartError when a rank could not be created,
    WorkerError when one failed, NodeLost when a node could not be reached or was lost. Whatever is raised, Ctrl-C
    too, no rank is left.
    """
    words, environ = _words_of(command), dict(os.environ if env is None else env)
    request = read_flags(flags, words, environ)
    if request.node_list is not None:
        assert request.options is not None
        return _run_on_nodes(request.options, request.node_list, environ, check, timeout_s, cwd)
    with _WaitedFor(command, env=env, cwd=cwd, **flags) as launcher:
        launcher.launch()
        if not launcher.wait(timeout_s):
            raise LaunchTimeout(f"{command[0]} has not ended within {timeout_s:g} s; all ranks were stopped")
        report = launcher.report()
    if check and report.exit_code != 0:
        raise WorkerError(report)
    return report


def launch_local(
    program: str,
    num_processes: int,
    args: Sequence[str] = (),
    log_dir: str = "./logs",
    *,
    env: Mapping[str, str] | None = None,
    **flags: object,
) -> Report:
    """Run `program args` in `num_processes` processes of this machine, one GPU each where there are GPUs,
    with a log file each. Raises WorkerError, with `rank` and `exit_code`, when one fails.

    flags: as for `run`; gpus_per_proc=0 leaves CUDA_VISIBLE_DEVICES alone.
    """
    if "gpus_per_proc" not in flags:
        from infini_run.devices.visible import find
        from infini_run.errors import DeviceError

        try:
            enough = len(find(os.environ if env is None else env).gpus) >= num_processes
        except DeviceError:
            enough = False
        flags["gpus_per_proc"] = 1 if enough else 0
    flags |= {"nproc_per_node": num_processes, "log_dir": log_dir}
    return run([program, *args], env=env, **flags)  # type: ignore[arg-type]


def launch_multi_node(
    program: str,
    hosts: Sequence[str],
    num_processes_per_node: int,
    args: Sequence[str] = (),
    log_dir: str = "./logs",
    *,
    env: Mapping[str, str] | None = None,
    **flags: object,
) -> Report:
    """Run `program args` in so many processes on each of `hosts`, through ssh unless `engine=` says otherwise, with
    a log file each on its own host. Raises WorkerError, with `rank` and `exit_code`, when one fails; NodeLost."""
    flags |= {"hosts": hosts, "nproc_per_node": num_processes_per_node, "log_dir": log_dir}
    return run([program, *args], env=env, **flags)  # type: ignore[arg-type]


def _run_on_nodes(
    options: Options,
    roster: NodeList,
    environ: Mapping[str, str],
    check: bool,
    timeout_s: float | None,
    cwd: str | os.PathLike[str] | None,
) -> Report:
    from infini_run.multinode.head import Head

    folder = None if cwd is None else os.fspath(cwd)
    overview: HeadObservers | None = None
    if options.trace or options.live == "on":
        from infini_run.multinode.head_observers import open_overview

        overview, options = open_overview(options, os.environ, say=None)
    own = has_own_stderr()
    with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
        head = Head(options, roster, environ=environ, say=None if own else say, cwd=folder, overview=overview)
        _live.add(head)
        call_in_forked_children(head)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    is_late = False
    try:
        head.start()
        while not head.ended:
            head.step(None if deadline is None or is_late else max(0.0, deadline - time.monotonic()))
            if deadline is not None and not is_late and time.monotonic() >= deadline:
                is_late = True
                head.stop()
                head.limit_reader()
        report = head.report()
    finally:
        _live.discard(head)
        head.close()
        problem = "" if overview is None else overview.close()
    if problem:
        report = replace(report, notices=(*report.notices, problem))
    if is_late:
        program = options.program[0]
        raise LaunchTimeout(f"{program} has not ended within {timeout_s:g} s; all ranks were stopped")
    if head.error is not None and head.blames_node:
        raise head.error
    if check and report.exit_code != 0:
        raise WorkerError(report)
    return report


def has_own_stderr() -> bool:
    """Whether sys.stderr is this process's stderr, and not a notebook's or a test's."""
    import sys

    try:
        return sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.fileno() == 2
    except (OSError, ValueError):
        return False


def say(text: str) -> None:
    """On the host program's stderr, which may be anything, or nothing. Its own stream, and what that still holds, is
    left out of it: a line that finds no reader must not come up again when the program ends."""
    import sys

    line = f"infini-run: {printable(text)}\n"
    try:
        if sys.stderr is not sys.__stderr__:
            with Quietly():
                print(line, end="", file=sys.stderr or sys.__stderr__, flush=True)
        elif sys.stderr is not None:
            data = os.fsencode(line)
            while data:
                data = data[write(sys.stderr.fileno(), data) :]
    except (OSError, ValueError):
        return  # nobody reads it, or it is closed: no reason to end a job


class ProcessLauncher:
    """Ranks of one command on this machine, to watch and to steer.

    Leaving the `with` block terminates and reaps whatever still runs. One launch at a time; after its end
    another one may follow. Arguments as for `run`; `distributed_args=True` adds --distributed-rank=R and
    --distributed-world-size=W to each rank's arguments. Where `console` is not given the ranks inherit stdout and
    stderr: output that goes through us moves only while the host program is in `events`, `wait` or `running`.
    """

    _auto_console = "inherit"

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **flags: object,
    ) -> None:
        self._command = _words_of(command)
        self._environ = dict(os.environ if env is None else env)
        _checked("env", [f"{name}={value}" for name, value in self._environ.items()])
        self._cwd = None if cwd is None else os.fspath(cwd)
        request = read_flags(flags, self._command, self._environ)
        if request.node_list is not None:
            raise UsageError("a ProcessLauncher is one machine's: for many, run(..., hosts=[...])")
        assert request.options is not None
        self._options = request.options
        if self._options.console == "auto":
            self._options = replace(self._options, console=self._auto_console)
        self._span: RankRange | None = None
        if request.cluster is not None:
            self._environ = _settle_in(request.cluster, self._options, self._environ)
            if request.cluster.counts:
                self._span = spans_of(request.cluster.counts)[self._options.node_rank]
        self._run: NodeLaunch | RestartingLaunch | None = None
        # known to a child that another thread forks meanwhile
        self._starting: NodeLaunch | RestartingLaunch | None = None
        self._seeing: Observers | None = None
        self._port = 0  # that we chose
        self._untold: list[Event] = []  # seen by wait or status, not yet by events()
        self._lock = RLock()
        self._wakers: list[int] = []  # eventfds of threads that wait for what another one may see first
        _live.add(self)
        call_in_forked_children(self)

    # ---- starting

    def launch(self, args: Sequence[str] = ()) -> None:
        """Start every rank with `args` after the command's own arguments.

        Raises UsageError, ProgramError or StartError; then nothing runs. InfiniRunError: one is running.
        """
        with self._lock:
            if self.running():
                raise InfiniRunError("a launch is still running: wait for it, or terminate it")
            self._close_run()
            words = self._command + _checked("args", args)
            if self._cwd is not None and not os.path.isdir(self._cwd):
                raise UsageError(f"cwd={self._cwd} is not a directory")
            seeing, options = self._open_seeing()
            run: NodeLaunch | RestartingLaunch | None = None
            try:
                plan = self._plan(options, words)
                for notice in plan.nodes[0].notices:
                    warn(notice, RuntimeWarning, stacklevel=2)
                run = self._starting = self._make_run(plan, options, seeing)
                run.start()
                self._run, self._untold, self._seeing = run, [], seeing
            except BaseException:  # KeyboardInterrupt may come between any two steps
                if run is not None:
                    run.close()
                if seeing is not None:
                    seeing.close()
                raise
            finally:
                self._starting = None

    def _make_run(self, plan: Plan, options: Options, seeing: Observers | None) -> NodeLaunch | RestartingLaunch:
        if not options.max_restarts:
            return NodeLaunch(plan, options, environ=self._environ, cwd=self._cwd, observers=seeing)
        from infini_run.node.restarting_launch import RestartingLaunch

        return RestartingLaunch(plan, options, environ=self._environ, cwd=self._cwd, observers=seeing)

    def _open_seeing(self) -> tuple[Observers | None, Options]:
        """A table is shown where it was asked for, never of itself: the terminal is the host program's."""
        options = self._options
        if options.live != "on":
            options = replace(options, live="off")
        if options.live == "off" and not options.trace:
            return None, options
        from infini_run.display.observers import open_observers

        return open_observers(options, os.environ, print_line=None)

    def _plan(self, options: Options, words: tuple[str, ...]) -> Plan:
        launch_id = new_launch_id()
        return make_plan(
            options,
            self._find(words),
            [inspect_node(options, self._environ)],
            launch_id=launch_id,
            master_port=options.master_port or self._free_port(),
            environ=self._environ,
            error_dir=error_folder(options, launch_id, self._environ),
            stdin_is_terminal=options.stdin != "none" and os.isatty(0),
            may_use_terminal=False,
            span=self._span,
            unshared=unshared_streams(),
        )

    def _free_port(self) -> int:
        from infini_run.node.ports import free_port

        self._port = free_port()
        return self._port

    def _find(self, words: tuple[str, ...]) -> Command:
        options = self._options
        return find_command(
            words, self._environ, module=options.module, no_python=options.no_python, cwd=self._cwd or ""
        )

    # ---- watching

    def events(self, timeout_s: float | None = None) -> list[Event]:
        """What has happened since the last call, waiting for something at most `timeout_s` seconds (None: until
        there is). Empty when the time is up, or when everything has ended. kind: started, ready, exited, ...;
        restarting, where all ranks are to be started again (max_restarts): it is waiting here that does so."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._untold and self._poll(deadline):
            if deadline is not None and time.monotonic() >= deadline:
                break
        with self._lock:
            events, self._untold = self._untold, []
        return events

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank has ended and nothing is left; False when the time is up first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._poll(deadline):
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank has said READY=1 to its NOTIFY_SOCKET (sd_notify(3)). False when the time is up
        first, or as soon as a rank has ended without: then it never comes true, see `first_failure`. With
        max_restarts one that failed may still come back."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        run = self._launched()
        waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wakers.append(waker)
        try:
            while True:
                answer = all_ready(run.outcome.exits(), may_restart=self._options.max_restarts > 0)
                if answer is not None or run.ended or (deadline is not None and time.monotonic() >= deadline):
                    return bool(answer)
                self._poll(deadline, also=(waker,))
        finally:
            with self._lock:
                self._wakers.remove(waker)
                os.close(waker)

    def _poll(self, deadline: float | None, also: Sequence[int] = ()) -> bool:
        """Follow the launch, waiting until the deadline at most; whether it still goes on."""
        run = self._launched()
        if not run.ended:
            events = run.poll(None if deadline is None else max(0.0, deadline - time.monotonic()), also)
            if events:
                with self._lock:
                    self._untold += events
                    self._wake()
        return not run.ended

    def _wake(self) -> None:
        for waker in self._wakers:
            os.eventfd_write(waker, 1)

    def running(self) -> bool:
        """Whether anything of the launch is left. Looks, and does not wait."""
        return self._run is not None and self._poll(0.0)

    def status(self) -> tuple[Exit, ...]:
        """Each rank as far as it has come, by rank: pid and start; ready, and its last STATUS=, once it said so;
        end, code and signal once it has ended."""
        self.running()
        self._launched().record_statuses()
        return self._launched().outcome.exits()

    def exit_code(self, rank: int) -> int | None:
        """A rank's exit code as a shell says it (128 + n for signal n); None while it runs.

        Raises UsageError: there is no such rank.
        """
        for exit_ in self.status():
            if exit_.rank == rank:
                return None if exit_.end_s is None else exit_.shell_code
        workers = self._launched().plan.workers
        raise UsageError(f"rank={rank}: the ranks are {workers[0].rank} to {workers[-1].rank}")

    def first_failure(self) -> Exit | None:
        """The first rank that failed of its own, or None."""
        self.running()
        return self._launched().outcome.first_failure()

    def report(self) -> Report:
        """How it ended, or how far it has come."""
        run = self._launched()
        if run.ended:
            run.close()
        return run.report()

    # ---- steering

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to one rank's process (None: to every rank's); return how many it reached."""
        try:
            return self._launched().signal(number, rank)
        except OSError:
            raise UsageError(f"number={number}: there is no such signal") from None

    def terminate(self) -> None:
        """Begin to stop: the stop signal, SIGKILL after the grace. Returns at once; `wait` sees the end."""
        if self._run is not None:
            self._run.stop()

    def kill(self) -> None:
        """SIGKILL to everything that is left. Returns at once; `wait` sees the end."""
        if self._run is not None:
            self._run.kill()

    def close(self) -> None:
        """Stop what still runs (gracefully, within the grace), reap it, and free everything. Safe twice."""
        with self._lock:
            try:
                if self.running():
                    self.terminate()
                    self.wait()
            finally:
                self._close_run()

    def _close_run(self) -> None:
        with self._lock:
            if self._run is not None:
                self._run.close()
                self._wake()
            if self._port:
                from infini_run.node.ports import let_go

                let_go(self._run.plan.master_port if self._run is not None else self._port)
                self._port = 0
            seeing, self._seeing = self._seeing, None
            problem = "" if seeing is None else seeing.close()
            if problem:
                self._launched().outcome.add_notice(problem)

    def _launched(self) -> NodeLaunch | RestartingLaunch:
        if self._run is None:
            raise InfiniRunError("nothing was launched yet: call launch() first")
        return self._run

    def __del__(self) -> None:
        """A launcher that was dropped takes its ranks with it, at once and with a warning."""
        run = self.__dict__.get("_run")
        if run is not None and not run.ended:
            warn(f"{self!r} was dropped while its ranks ran: close it", ResourceWarning, stacklevel=2)
            run.close()
            if self._seeing is not None:
                self._seeing.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: the launch is our parent's."""
        runs = (self._run, self._starting)
        self._run, self._starting, self._lock, self._seeing = None, None, RLock(), None
        for run in runs:
            if run is not None:
                run.after_fork_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _WaitedFor(ProcessLauncher):
    """A launch that somebody waits in until its end: what goes through us always moves."""

    _auto_console = "auto"


_live: WeakSet[ProcessLauncher | Head] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that just ends: its ranks end with it, while there still is an interpreter to do so."""
    for launch in list(_live):
        launch.close()


os.register_at_fork(after_in_child=_live.clear)


def _words_of(command: Sequence[str]) -> tuple[str, ...]:
    if isinstance(command, (str, bytes)) or not hasattr(command, "__len__") or not command:
        raise UsageError(f"command={command!r}: give a list, the program and its arguments")
    return _checked("command", command)


def read_flags(flags: Mapping[str, object], program: tuple[str, ...], environ: Mapping[str, str]) -> Request:
    """Python values become the words of the command line, so there is one parser, one check, one message. Of the
    environment an engine's own variables are read, and none that stands for a flag."""
    flags = {"stdin": "none", **flags}
    if "nproc" in flags:
        alias = flags.pop("nproc")
        flags["nproc_per_node"] = one_of_two(flags.get("nproc_per_node"), alias)[1]
    words = _checked("flags", [word for name, value in flags.items() for word in _words(name, value)])
    around = {
        name: value for name, value in environ.items() if name == MARKER_VARIABLE or not name.startswith(_FOR_FLAGS)
    }
    request = resolve([*words, "--", *program], around)
    options = request.options
    asked = request.question or next((name for name in _NOT_HERE if getattr(options, name)), "")
    if options is None or asked:
        raise UsageError(f"{asked}= belongs to the command, not to the Python API")
    if request.without_effect and options.engine != "auto":  # where a program finds itself is no mistake of its own
        raise UsageError(request.without_effect)
    return request


def one_of_two(nproc_per_node: object, nproc: object) -> tuple[str, Any]:
    """What the caller called it, and the number. Raises UsageError: both were given."""
    if nproc is None:
        return "nproc_per_node", nproc_per_node
    if nproc_per_node is not None:
        raise UsageError(f"nproc_per_node={nproc_per_node!r} and nproc={nproc!r} are one flag: give one of them")
    return "nproc", nproc


def _settle_in(site: ClusterEnvironment, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Tell what engine="auto" had to guess; the environment less what is for one process alone."""
    if site.is_task:
        raise UsageError(
            f"engine='auto': with {site.source('tasks_per_node')} each task is one rank already, and no launcher is "
            "above it; start one task for each node, or give engine='local'"
        )
    from infini_run.environments.launcher_variables import strip_launcher_environment

    if site.remark:
        warn(f"engine='auto': {printable(site.remark)}", RuntimeWarning, stacklevel=3)
    return strip_launcher_environment(environ, options.export)


def _checked(what: str, words: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The words as text. execve(2) ends a string at its first NUL: what follows must not be lost in silence."""
    texts = tuple(os.fspath(word) if isinstance(word, os.PathLike) else word for word in words)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"{what}: {text!r} is no text: give str({text!r}) if that is what is meant")
        if "\0" in text:
            raise UsageError(f"{what}: {text!r} has a NUL character in it, which no argument or variable can have")
    return texts


def _words(name: str, value: object) -> list[str]:
    if value is None:
        return []
    entry = TABLE.get(name)
    flag = None if entry is None else entry[0]
    if flag is not None and (value is True or value is False) and (flag.bare if value else flag.negated) is None:
        raise UsageError(f"{name}={value!r}: {metavar(flag)} is allowed")
    if flag is not None and flag.metavar in _PATHS and not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name}={value!r}: give a path, as text or a pathlib.Path")
    if value is True or value is False:
        return [f"--{name}" if value else f"--no{name}"]
    if isinstance(value, dict):  # redirects={0: 3}
        value = [f"{key}:{item}" for key, item in value.items()]
    if isinstance(value, (list, tuple, range)):
        value = ",".join(str(item) for item in value)
    return [f"--{name}={os.fspath(value) if isinstance(value, os.PathLike) else value}"]
