"""Worker processes of this machine that started together: one NodeLaunch, and a channel to each."""

from __future__ import annotations

from _functools import partial

from infini_run.channel import connect
from infini_run.core.group import forking
from infini_run.crews.spawn.lent_multiprocessing import Lender
from infini_run.node.last_output import last_output
from infini_run.node.launch import NodeLaunch
from infini_run.record import replace
from infini_run.report.exit import name_processes
from infini_run.system.fork_hooks import call_in_forked_children, close_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.crews.spawn.spawner import Run
    from infini_run.errors import InfiniRunError
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.exit import Exit, LeftoverProcess
    from infini_run.system.poller import Poller


class WorkerGroup:
    """A ProcessGroup, which starts at its creation. Raises what NodeLaunch.start does; then none of it is left.

    on_close: called when all of it is gone and freed.

    Args:
        started: gets its processes, too, as soon as there are any: an interrupt may come before the caller has got
            this object.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        environ: Mapping[str, str],
        cwd: str | None,
        started: list[ExecProcess],
    ) -> None:
        import socket

        self.processes: list[ExecProcess] = []
        self.run: Run | None = None
        self.on_close: Callable[[], None] | None = None
        self._worker_ends: dict[int, socket.socket] = {}  # by rank
        worker_ends = self._worker_ends
        with forking:
            self._lender = lender = Lender()
            call_in_forked_children(self)
        try:
            with forking:
                for worker in plan.workers:
                    ours, worker_ends[worker.rank] = socket.socketpair()
                    lender.endow(ours)
                    host = plan.nodes[0].host
                    process = ExecProcess(self, worker.rank, worker.local_rank, host, ours.detach())
                    started.append(process)  # first: bytes in this end are in the other one
                    self.processes.append(process)
            stdins = {rank: end.fileno() for rank, end in worker_ends.items()}
            self.run = self._make_run(plan, options, environ, cwd, stdins)
            self.run.start()
            self.poll()
        except BaseException:  # KeyboardInterrupt may come between any two steps
            for process in self.processes:
                process.close()
                started.remove(process)
            lender.close()
            raise
        finally:
            for end in worker_ends.values():
                close_link(end)
            lender.close_theirs()

    def _make_run(
        self,
        plan: Plan,
        options: Options,
        environ: Mapping[str, str],
        cwd: str | None,
        stdins: Mapping[int, int],
    ) -> Run:
        return NodeLaunch(plan, options, environ=environ, cwd=cwd, stdins=stdins)

    # ---- as a ProcessGroup

    @property
    def ended(self) -> bool:
        return self.run is None or self.run.ended

    def fds(self) -> Sequence[int]:
        fds = () if self.run is None else self.run.fds()
        return [*fds, self._lender.fileno()] if fds and self._lender.fileno() >= 0 else fds

    def next_deadline_s(self) -> float | None:
        return None if self.run is None else self.run.next_deadline_s()

    def poll(self) -> None:
        if self.run is None or self.run.ended:
            return
        self._lender.poll()
        if any(event.kind in ("started", "exited", "ended") for event in self.run.poll(0.0)):
            for process, exit_ in zip(self.processes, self.run.outcome.exits(), strict=True):
                process.update(exit_)

    def stop(self, number: int = 0) -> None:
        if self.run is not None:
            self.run.stop(number)

    def kill(self) -> None:
        if self.run is not None:
            self.run.kill()

    # ---- for its processes

    def last_output(self, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the last stderr output of that rank, and its Python stack."""
        assert isinstance(self.run, NodeLaunch)
        for index, worker in enumerate(self.run.plan.workers):
            if worker.rank == rank:
                return last_output(self.run.group, index, worker)[1:]
        return (), ()

    @property
    def stuck(self) -> Sequence[LeftoverProcess]:
        """What SIGKILL did not end, at the end of the group."""
        return () if self.run is None or not self.run.ended else self.run.outcome.stuck

    def close_if_last(self) -> None:
        """Kill and free all, after the close of its last process."""
        if self.run is not None and all(process.is_closed for process in self.processes):
            self.run.close()
            self._lender.close()
            on_close, self.on_close = self.on_close, None
            if on_close is not None:
                on_close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child."""
        for end in self._worker_ends.values():
            end.close()
        self._lender.after_fork_in_child()
        if self.run is not None:
            self.run.after_fork_in_child()


class ExecProcess:
    """A WorkerProcess of a WorkerGroup."""

    clock_s = 0.0

    def __init__(self, group: WorkerGroup, rank: int, local_rank: int, host: str, fd: int) -> None:
        self.group = group
        self.rank = rank
        self.local_rank = local_rank
        self.host = host
        self.pid = 0
        self.exit: Exit | None = None
        self.problem: InfiniRunError | None = None
        self.tasks, self.events = connect(fd)
        self.is_closed = False

    def update(self, exit_: Exit) -> None:
        """Note how far its process is, as its group says. One that SIGKILL did not end has an Exit without an end."""
        self.pid = exit_.pid or 0
        if self.exit is not None or (exit_.end_s is None and not exit_.stuck):
            return
        if exit_.shell_code and not exit_.last_lines:
            last_lines, stack = self.group.last_output(self.rank)
            exit_ = replace(exit_, last_lines=last_lines, python_stack=stack)
        self.exit = exit_

    def last_ping_s(self) -> float:
        run = self.group.run
        return 0.0 if run is None or run.ended else run.last_watchdog_ping_s(self.rank)

    def signal(self, number: int) -> int:
        run = self.group.run
        return 0 if run is None else run.signal(number, self.rank)

    @property
    def stuck(self) -> str:
        return name_processes(self.group.stuck)

    def watch_stuck(self, poller: Poller, on_end: Callable[[bool], None]) -> Callable[[], None]:
        from infini_run.multinode.agent.old_world import StuckProcesses

        assert self.group.run is not None
        pids = [process.pid for process in self.group.stuck]
        launch_id = self.group.run.plan.launch_id
        return StuckProcesses(launch_id, pids, poller, partial(on_end, True), partial(on_end, False)).close

    def close(self) -> None:
        self.is_closed = True
        self.tasks.close(0.0)
        self.events.close()
        self.group.close_if_last()

    def after_fork_in_child(self) -> None:
        self.is_closed = True  # the channel's copies are closed by its own module
        if self.group.run is not None:
            self.group.run.after_fork_in_child()
