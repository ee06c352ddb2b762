"""`ProcessLauncher`: a launch on this machine that a Python program watches and steers.

Usable from any thread and several at a time: no signal handler is installed, and only processes that the launcher
started are signalled or reaped; the host program's other children are not seen. A process that left the process
group of its rank is known by INFINI_RUN_ID in its environment. Only the command, which owns its process, finds a
descendant without that variable, too.
"""

from __future__ import annotations

import os
from _functools import partial
from _thread import RLock
from warnings import warn

from infini_run.errors import InfiniRunError, UsageError
from infini_run.node import let_go_ports, plan_node
from infini_run.node.launch import NodeLaunch
from infini_run.node.shared_follower import SharedFollower
from infini_run.number_arguments import read_wait
from infini_run.options.from_python import (
    check_names,
    check_path,
    check_words,
    make_environment,
    prepare_environment,
    read_command,
    read_flags,
)
from infini_run.options.keyword_errors import KeywordErrors
from infini_run.options.table import TABLE
from infini_run.plan.rank_numbers import spans_of
from infini_run.record import replace
from infini_run.system.dropped_owners import close_dropped
from infini_run.system.exit_hooks import close_at_exit
from infini_run.system.fork_hooks import call_in_forked_children, stayed_with_parent
from infini_run.system.monkey_patches import check_waits
from infini_run.system.signal_numbers import check_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from infini_run.core.c_structs import Event
    from infini_run.display.observers import Observers
    from infini_run.node.restarting_launch import RestartingLaunch
    from infini_run.options.from_python import Program
    from infini_run.options.keywords import RunOptions
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import FoundProgram, Plan, RankRange
    from infini_run.report.exit import Exit
    from infini_run.report.report import Report


class ProcessLauncher:
    """The ranks of one command on this machine, to watch and to steer.

    Leaving the `with` block terminates and reaps what still runs. There is one launch at a time; after its end
    another one may follow. Without `console=` the ranks inherit stdout and stderr, unless another flag needs their
    output, such as `log_dir=`. Output that goes through the launcher moves only while the host program is in
    `events`, `wait` or `running`.

    Args:
        command: The program and its arguments; or a list of `Program`, several programs of one job.
        env: Variables that are added to the environment of the ranks. None: none.
        inherit_env: The ranks have this process's environment, too.
        cwd: Where the ranks start, and where a relative program is looked for. None: this process's.
        flags: The command's flags by their names: `nproc_per_node=8`, `log_dir="logs"`, `grace=30`.
            `distributed_args=True` adds --distributed-rank=R and --distributed-world-size=W to each rank's arguments.

    Raises:
        UsageError: The request is invalid, or asks for other machines.
    """

    _auto_console = "inherit"

    def __init__(
        self,
        command: Sequence[str] | Sequence[Program],
        *,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        cwd: str | os.PathLike[str] | None = None,
        **flags: Unpack[RunOptions],
    ) -> None:
        check_waits("a launch")
        check_names("ProcessLauncher", flags, TABLE, ProcessLauncher.__init__)
        for name in ("preload", "preload_timeout"):
            if flags.get(name):
                raise UsageError(f"{name}=: not for a ProcessLauncher; use run")
        self._command, programs = read_command(command)
        self._errors = KeywordErrors(flags, has_programs=bool(programs))
        self._environ = make_environment(env, inherit_env)
        self._cwd = check_path("cwd", cwd)
        request = read_flags(flags, self._command, self._environ, programs)
        if request.node_list is not None:
            raise UsageError("a ProcessLauncher is for one machine; use run(..., hosts=[...]) for several")
        assert request.options is not None
        self._options = request.options
        if self._options.console == "auto":
            self._options = replace(self._options, console=self._auto_console)
        self._span: RankRange | None = None
        if request.cluster is not None:
            self._environ = prepare_environment(request.cluster, self._options, self._environ)
            if request.cluster.counts:
                self._span = spans_of(request.cluster.counts)[self._options.node_rank]
        self._launch: SharedFollower | None = None
        # for after_fork_in_child, if another thread forks meanwhile
        self._starting: NodeLaunch | RestartingLaunch | None = None
        self._observers: Observers | None = None
        self._programs: tuple[FoundProgram, ...] = ()  # whose ports this object has chosen
        self._has_parents_launch = False  # this is a forked child, and its parent had launched
        self._lock = RLock()
        close_at_exit(self)
        call_in_forked_children(self)

    def __dir__(self) -> list[str]:
        from infini_run.public_names import public_names

        return public_names(self, ("after_fork_in_child", "close_at_exit"))

    # ---- starting

    def launch(self, args: Sequence[str] = ()) -> None:
        """Start every rank.

        Args:
            args: Arguments after the command's own.

        Raises:
            UsageError: The launch is impossible: a flag names a rank that does not exist, or a directory is missing.
                Or `args` is no list of texts.
            ProgramError: The program does not exist, or cannot be executed. Nothing runs then.
            StartError: A rank could not be created. Nothing runs then.
            InfiniRunError: A launch is still running.
        """
        with self._lock:
            if self.running():
                raise InfiniRunError("a launch is already running; wait for it, or terminate it")
            self._close_run()
            words = self._command + check_words("args", args)
            if args and self._options.programs:
                raise UsageError("args: cannot follow several programs; give them to each Program")
            if self._cwd is not None and not os.path.isdir(self._cwd):
                raise UsageError(f"cwd={self._cwd} is not a directory")
            with self._errors:
                self._begin(words)

    def _begin(self, words: tuple[str, ...]) -> None:
        observers, options = self._open_observers()
        run: NodeLaunch | RestartingLaunch | None = None
        try:
            plan = self._plan(options, words)
            for notice in plan.nodes[0].notices:
                warn(self._errors.rename(notice), RuntimeWarning, stacklevel=3)
            run = self._starting = self._make_run(plan, options, observers)
            run.start()
            self._launch, self._observers = SharedFollower(run), observers
        except BaseException as error:  # KeyboardInterrupt may come between any two steps
            if observers is not None and isinstance(error, InfiniRunError):
                observers.finish(error)
            if run is not None:
                run.close()
            if observers is not None:
                observers.close()
            raise
        finally:
            self._starting = None

    def _make_run(self, plan: Plan, options: Options, observers: Observers | None) -> NodeLaunch | RestartingLaunch:
        if not options.max_restarts:
            return NodeLaunch(plan, options, environ=self._environ, cwd=self._cwd, observers=observers)
        from infini_run.node.restarting_launch import RestartingLaunch

        return RestartingLaunch(plan, options, environ=self._environ, cwd=self._cwd, observers=observers)

    def _open_observers(self) -> tuple[Observers | None, Options]:
        """Open the live table only for live="on", never for "auto": the terminal is the host program's."""
        options = self._options
        if options.live != "on":
            options = replace(options, live="off")
        if options.live == "off" and not (options.trace or options.events or options.metrics):
            return None, options
        from infini_run.display.observers import open_observers

        return open_observers(options, os.environ, print_line=None)

    def _plan(self, options: Options, words: tuple[str, ...]) -> Plan:
        plan = plan_node(
            replace(options, program=words),
            self._environ,
            cwd=self._cwd or "",
            may_use_terminal=False,
            span=self._span,
        )
        self._programs = plan.programs
        return plan

    # ---- watching

    def events(self, timeout_s: float | None = None) -> list[Event]:
        """Return the events since the last call, waiting for the first one.

        Args:
            timeout_s: Seconds to wait at most. None: until there is an event.

        Returns:
            The events in order; none if `timeout_s` passed, or if everything exited. An event `restarting` means that
                all ranks restart, or with restart_scope="program" those of the program `name`. A later call of
                `events`, `wait`, or `running` starts them.
        """
        return self._launched().events(read_wait("timeout_s", timeout_s))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank exited and no process of it is left.

        Args:
            timeout_s: Seconds to wait at most. None: for ever.

        Returns:
            False if the time was up first.
        """
        return self._launched().wait(read_wait("timeout_s", timeout_s))

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank has sent READY=1 to its NOTIFY_SOCKET (sd_notify(3)).

        Args:
            timeout_s: Seconds to wait at most. None: for ever.

        Returns:
            True; False after `timeout_s`, or as soon as a rank exited without READY=1 (see `first_failure`), unless
            max_restarts may still restart it.
        """
        limit_s = read_wait("timeout_s", timeout_s)
        programs = self._options.programs
        may_restart = self._options.max_restarts > 0 or any(program.max_restarts for program in programs)
        return self._launched().wait_ready(limit_s, may_restart=may_restart)

    def running(self) -> bool:
        """Return whether anything of the launch is left. Does not wait, but starts an attempt that is due."""
        return self._launch is not None and self._launch.poll(0.0)

    def status(self) -> tuple[Exit, ...]:
        """Return the state of each rank so far, by rank.

        Returns:
            pid and start of a rank that runs; ready_s and status once it has sent READY=1 or STATUS=; end, code and
                signal once it exited.

        Raises:
            InfiniRunError: Nothing was launched yet.
        """
        self.running()
        self._launched().run.record_statuses()
        return self._launched().run.outcome.exits()

    def exit_code(self, rank: int) -> int | None:
        """Return a rank's exit code as a shell has it: 128 + n for signal n.

        Args:
            rank: The rank.

        Returns:
            None while it runs.

        Raises:
            UsageError: There is no such rank.
        """
        for exit_ in self.status():
            if exit_.rank == rank:
                return None if exit_.end_s is None else exit_.shell_code
        workers = self._launched().run.plan.workers
        raise UsageError(f"rank={rank}: unknown rank; use {workers[0].rank} to {workers[-1].rank}")

    def first_failure(self) -> Exit | None:
        """Return the first rank that failed before any was stopped, or None if none failed. Its `last_lines`,
        `error_message`, and `python_stack` are there once nothing of the launch is left."""
        self.running()
        run = self._launched().run
        if run.ended:
            run.close()
        run.record_statuses()
        return run.outcome.first_failure()

    def report(self) -> Report:
        """Return how the launch ended, or its state so far.

        Raises:
            InfiniRunError: Nothing was launched yet.
        """
        run = self._launched().run
        if run.ended:
            run.close()
        return self._errors.rename_report(run.report())

    # ---- steering

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to the process of a rank.

        Args:
            number: The signal, as in the module `signal`.
            rank: The rank. None: every rank.

        Returns:
            How many processes it reached.

        Raises:
            UsageError: There is no such signal, or no such rank.
        """
        return self._launched().run.signal(check_signal(number), rank)

    def terminate(self) -> None:
        """Begin to stop all ranks: the stop signal, then SIGKILL after the grace. Returns at once."""
        if self._launch is not None:
            self._launch.run.stop()

    def kill(self) -> None:
        """Send SIGKILL to everything that is left. Returns at once; `wait` waits for the end."""
        if self._launch is not None:
            self._launch.run.kill()

    def close(self) -> None:
        """Stop what still runs, within the grace, reap it, and free everything. Safe twice."""
        with self._lock:
            try:
                if self.running():
                    self.terminate()
                    self.wait()
            finally:
                self._close_run()

    def _close_run(self) -> None:
        with self._lock:
            if self._launch is not None:
                self._launch.close()
            let_go_ports(self._programs if self._launch is None else self._launch.run.plan.programs)
            self._programs = ()
            observers, self._observers = self._observers, None
            if observers is not None:
                observers.finish(self._launched().run.report(), stopper="the Python program")
            problem = "" if observers is None else observers.close()
            if problem:
                self._launched().run.outcome.add_notice(problem)

    def _launched(self) -> SharedFollower:
        if self._launch is None and self._has_parents_launch:
            raise InfiniRunError(stayed_with_parent("this ProcessLauncher's launch"))
        if self._launch is None:
            raise InfiniRunError("nothing was launched; call launch() first")
        return self._launch

    def close_at_exit(self) -> None:
        """End the ranks with the program, while there is an interpreter to do so."""
        self.close()

    def __del__(self) -> None:
        """Have the ranks of a launcher killed that was dropped without `close`, with a warning. No wait here: the
        call may come anywhere, in a thread that holds any lock."""
        launch = self.__dict__.get("_launch")
        if launch is not None and not launch.run.ended:
            close_dropped(partial(_close_both, launch.run, self._observers), launch.run)
            text = f"{self!r} was dropped while its ranks ran: close it"
            warn(text, ResourceWarning, stacklevel=2)  # last: -W error makes it an exception

    def after_fork_in_child(self) -> None:
        """Forget the launch in a forked child: it is the parent's."""
        runs = (None if self._launch is None else self._launch.run, self._starting)
        self._has_parents_launch = self._has_parents_launch or any(run is not None for run in runs)
        self._launch, self._starting, self._lock, self._observers = None, None, RLock(), None
        for run in runs:
            if run is not None:
                run.after_fork_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_both(run: NodeLaunch | RestartingLaunch, observers: Observers | None) -> None:
    run.close()
    if observers is not None:
        observers.close()
