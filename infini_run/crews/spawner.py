"""Workers' processes, seen from their supervisor: a Runner is one life of one worker, a Spawner starts them.

The rule: who waits is the caller. A runner says what to wait for (`fds`, `due_s`) and takes what happened without
blocking (`poll`); its channel is the caller's to read and write, and the runner's to close. Nothing here knows what a
message means.
"""

from __future__ import annotations

import os
import sys
from collections import deque

from infini_run.api import read_flags
from infini_run.channel import connect
from infini_run.core.group import forking
from infini_run.errors import ChannelError, UsageError
from infini_run.node.last_output import last_output
from infini_run.node.launch import NodeLaunch
from infini_run.plan.model import make_plan
from infini_run.plan.program import error_folder, find_command, inspect_node, new_launch_id, unshared_streams
from infini_run.record import replace
from infini_run.system.fork_hooks import call_in_forked_children
from infini_run.system.interpreter import inherited_flags, own_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from infini_run.channel import Receiver, Sender
    from infini_run.channel.serializer import Buffer
    from infini_run.core.group import Event
    from infini_run.errors import InfiniRunError
    from infini_run.node.outcome import Outcome
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan, RankRange
    from infini_run.report.report import Exit, Report

    class WorkerProcess(Protocol):
        """One life of one worker. Runners that were started together may be of one group: then `fds`, `poll`, `stop`
        and `kill` are the whole group's, and `ended` is too."""

        rank: int
        local_rank: int
        host: str
        pid: int
        tasks: Sender
        events: Receiver
        exit: Exit | None  # how its process ended, as soon as it has; what it left behind may still be there
        problem: InfiniRunError | None  # why that is not known: its node was lost

        @property
        def ended(self) -> bool:
            """Nothing is left of it, nor of what it had started."""

        @property
        def clock_s(self) -> float:
            """What makes times of its host's clock times of ours."""

        def fds(self) -> Sequence[int]:
            """`poll` has something to do when one of them can be read. Ask again before each wait."""

        def due_s(self) -> float | None:
            """`poll` has something to do by then (monotonic), whatever can be read; None: no."""

        def poll(self) -> None:
            """Take what happened; never blocks."""

        def pinged_s(self) -> float:
            """When it last said WATCHDOG=1 to its NOTIFY_SOCKET (monotonic); 0: never."""

        def signal(self, number: int) -> int:
            """Send a signal to its process; how many it reached (0: it is gone)."""

        def stop(self, number: int = 0) -> None:
            """Begin to stop: this signal (0: the stop signal), SIGKILL after the grace, then what is left behind."""

        def kill(self) -> None:
            """SIGKILL to everything that is left."""

        def report(self) -> Report:
            """How its group ended, or how far it has come."""

        def close(self) -> None:
            """Kill what is left, reap it, close the channel and all else. Safe twice."""

        def after_fork_in_child(self) -> None:
            """In a forked child: it is our parent's; only our copies of descriptors are closed."""

    class Run(Protocol):
        """What a gang needs of a NodeLaunch, or of what stands for one."""

        plan: Plan

        @property
        def ended(self) -> bool: ...
        @property
        def outcome(self) -> Outcome: ...
        def start(self) -> None: ...
        def poll(self, timeout_s: float = 0.0) -> list[Event]: ...
        def fds(self) -> list[int]: ...
        def due_s(self) -> float | None: ...
        def pinged_s(self, rank: int) -> float: ...
        def signal(self, number: int, rank: int | None = None) -> int: ...
        def stop(self, number: int = 0) -> None: ...
        def kill(self) -> None: ...
        def report(self) -> Report: ...
        def close(self) -> None: ...
        def after_fork_in_child(self) -> None: ...

    class Spawner(Protocol):
        """Starts workers."""

        @property
        def world_size(self) -> int:
            """How many ranks there are."""

        def start(self, ranks: Sequence[int], restarts: int = 0, *, apart: bool = False) -> Sequence[WorkerProcess]:
            """Start these, in order, as one group; apart: each as a group of its own. restarts: how often that was
            done before. Raises UsageError, ProgramError, StartError: then none is left."""

        def spread(self, runners: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
            """Send the same message to all of them, over what lies between once; those that are gone get nothing.
            Returns when it cannot be overtaken by what is sent after it."""

        def close(self) -> None:
            """What it holds beside its runners. Safe twice."""

        def after_fork_in_child(self) -> None:
            """In a forked child."""


MEETING = ("standalone", "master_addr", "master_port", "rdzv_endpoint")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PORTS = 64  # that the jobs of one spawner have at once


def python_command(module: str = "worker_main") -> list[str]:
    """This Python with its own flags (-O, -X, -W), and a module of ours in it. By -c: __main__ is empty, so nobody
    can import the caller's script by mistake, and this package is found wherever it lies.

    Raises UsageError: there is no Python to start (sys.executable)."""
    if not sys.executable:
        raise UsageError("sys.executable is empty: there is no Python that workers could be started with")
    code = f"{own_path([_ROOT])}from infini_run.crews.{module} import main; main()"
    return [sys.executable, *inherited_flags(), "-c", code]


class ExecSpawner:
    """Each worker in a Python of its own, on this machine. Ranks that are started together are one NodeLaunch.

    nproc: workers in all, or auto, gpu, cpu. env: their whole environment (None: ours). cwd: where they start.
    flags: as for `run`: log_dir, console, grace, gpus_per_proc, keep_going, ... `command`: what is started instead of
    our own worker, to which descriptor 0 is its channel.
    """

    def __init__(
        self,
        *,
        nproc: int | str = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        command: Sequence[str] | None = None,
        **flags: object,
    ) -> None:
        words = tuple(command or python_command())
        self._environ = dict(os.environ if env is None else env)
        self._cwd = None if cwd is None else os.fspath(cwd)
        if self._cwd is not None and not os.path.isdir(self._cwd):
            raise UsageError(f"cwd={self._cwd} is not a directory")
        flags = {"console": "prefix", **flags, "nproc_per_node": nproc, "stdin": "none"}
        if flags.keys().isdisjoint(MEETING):
            flags["standalone"] = True  # a free port: several crews may be up at once
        request = read_flags(flags, words, {})
        if request.roster is not None:
            raise UsageError("these workers are of one machine")
        assert request.options is not None
        self.options = replace(request.options, standalone=False)  # one run, of whatever launches
        self._command = find_command(words, self._environ, cwd=self._cwd or "")
        self._node = inspect_node(self.options, self._environ)
        self.world_size = self._node.nproc
        self.notices = self._node.notices
        self._port = self.options.master_port  # 0: to be chosen
        self._ports: deque[int] = deque(maxlen=_PORTS)  # that we have chosen: jobs may run at once
        self._span: RankRange | None = None

    def join(self, node: int, nnodes: int, host: str, span: RankRange, meeting: tuple[str, int]) -> None:
        """Be one node of several: what is started from now on is a part of theirs. meeting: where rank 0 listens."""
        self.options = replace(self.options, nnodes=nnodes, node_rank=node, master_addr=meeting[0])
        self._node = replace(self._node, index=node, host=host)
        self._span, self._port = span, meeting[1]

    def start(self, ranks: Sequence[int], restarts: int = 0, *, apart: bool = False) -> list[ExecRunner]:
        """As Spawner.start. All ranks at once are a job of their own, with a rendezvous port of their own; a part of
        them keeps that of the others. Of one node of several, that is not for it to say."""
        is_job = len(ranks) == self.world_size and not self.options.master_port and self._span is None
        if is_job or not self._port:
            self._choose_port()
        runners: list[ExecRunner] = []
        try:
            for group in [[rank] for rank in ranks] if apart else [ranks]:
                runners += self._gang(self._plan(group, restarts)).runners
        except BaseException:
            for runner in runners:
                runner.close()
            raise
        return runners

    def _choose_port(self) -> None:
        from infini_run.node.ports import free_port

        self._port = free_port()
        self._ports.append(self._port)

    def _gang(self, plan: Plan) -> WorkerGroup:
        return WorkerGroup(plan, self.options, self._environ, self._cwd)

    def _plan(self, ranks: Sequence[int], restarts: int) -> Plan:
        launch_id = new_launch_id()
        plan = make_plan(
            self.options,
            self._command,
            [self._node],
            launch_id=launch_id,
            master_port=self._port,
            environ=self._environ,
            error_dir=error_folder(self.options, launch_id, self._environ),
            unshared=unshared_streams(),
            span=self._span,
        )
        env = tuple(
            (name, str(restarts) if name == "TORCHELASTIC_RESTART_COUNT" else value) for name, value in plan.env
        )
        workers = {worker.rank: worker for worker in plan.workers}
        return replace(plan, env=env, workers=tuple(workers[rank] for rank in ranks))

    def spread(self, runners: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
        """As Spawner.spread: nothing lies between."""
        for runner in runners:
            try:
                runner.tasks.send_bytes(frame)
            except ChannelError:
                continue  # it has died, or was closed: seen where its end is

    def close(self) -> None:
        """Others may have our ports. Nothing else of its own is open."""
        if self._ports:
            from infini_run.node.ports import let_go

            while self._ports:
                let_go(self._ports.pop())

    def after_fork_in_child(self) -> None:
        """Nothing of its own is open."""


class WorkerGroup:
    """What was started together: one NodeLaunch, and a channel for each of its workers."""

    def __init__(self, plan: Plan, options: Options, environ: Mapping[str, str], cwd: str | None) -> None:
        import socket

        self.runners: list[ExecRunner] = []
        self._theirs: dict[int, socket.socket] = {}
        theirs = self._theirs
        self.run: Run | None = None
        call_in_forked_children(self)
        try:
            with forking:
                for worker in plan.workers:
                    ours, theirs[worker.rank] = socket.socketpair()
                    self.runners.append(
                        ExecRunner(self, worker.rank, worker.local_rank, plan.nodes[0].host, ours.detach())
                    )
            stdins = {rank: end.fileno() for rank, end in theirs.items()}
            self.run = self._make_run(plan, options, environ, cwd, stdins)
            self.run.start()
        except BaseException:  # KeyboardInterrupt may come between any two steps
            for runner in self.runners:
                runner.close()
            raise
        finally:
            for end in theirs.values():
                end.close()
        self.poll()

    def _make_run(
        self,
        plan: Plan,
        options: Options,
        environ: Mapping[str, str],
        cwd: str | None,
        stdins: Mapping[int, int],
    ) -> Run:
        return NodeLaunch(plan, options, environ=environ, cwd=cwd, stdins=stdins)

    def poll(self) -> None:
        """Take what happened to all of them."""
        if self.run is None or self.run.ended:
            return
        if any(event.kind in ("started", "exited", "ended") for event in self.run.poll(0.0)):
            for runner, exit_ in zip(self.runners, self.run.outcome.exits(), strict=True):
                runner.note(exit_)

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """What that one wrote last to stderr."""
        assert isinstance(self.run, NodeLaunch)
        for index, worker in enumerate(self.run.plan.workers):
            if worker.rank == rank:
                return last_output(self.run.group, index, worker)[1]
        return ()

    def after_fork_in_child(self) -> None:
        """In a forked child."""
        for end in self._theirs.values():
            end.close()
        if self.run is not None:
            self.run.after_fork_in_child()

    def close_if_last(self) -> None:
        """Kill and free all, once no runner needs it."""
        if self.run is not None and all(runner.is_closed for runner in self.runners):
            self.run.close()


class ExecRunner:
    """A Runner of an ExecSpawner."""

    def __init__(self, gang: WorkerGroup, rank: int, local_rank: int, host: str, fd: int) -> None:
        self._gang = gang
        self.rank = rank
        self.local_rank = local_rank
        self.host = host
        self.pid = 0
        self.exit: Exit | None = None
        self.problem: InfiniRunError | None = None
        self.clock_s = 0.0
        self.tasks, self.events = connect(fd)
        self.is_closed = False

    def note(self, exit_: Exit) -> None:
        """What its group says of it now."""
        self.pid = exit_.pid or 0
        if exit_.end_s is None or self.exit is not None:
            return
        if exit_.shell_code and not exit_.last_lines:
            exit_ = replace(exit_, last_lines=self._gang.last_lines(self.rank))
        self.exit = exit_

    @property
    def ended(self) -> bool:
        run = self._gang.run
        return run is None or run.ended

    def fds(self) -> Sequence[int]:
        run = self._gang.run
        return () if run is None else run.fds()

    def due_s(self) -> float | None:
        run = self._gang.run
        return None if run is None else run.due_s()

    def poll(self) -> None:
        self._gang.poll()

    def pinged_s(self) -> float:
        run = self._gang.run
        return 0.0 if run is None or run.ended else run.pinged_s(self.rank)

    def signal(self, number: int) -> int:
        run = self._gang.run
        return 0 if run is None else run.signal(number, self.rank)

    def stop(self, number: int = 0) -> None:
        if self._gang.run is not None:
            self._gang.run.stop(number)

    def kill(self) -> None:
        if self._gang.run is not None:
            self._gang.run.kill()

    def report(self) -> Report:
        assert self._gang.run is not None
        return self._gang.run.report()

    def close(self) -> None:
        self.is_closed = True
        self.tasks.close(0.0)
        self.events.close()
        self._gang.close_if_last()

    def after_fork_in_child(self) -> None:
        self.is_closed = True
        self.tasks.forget()
        self.events.forget()
        if self._gang.run is not None:
            self._gang.run.after_fork_in_child()
