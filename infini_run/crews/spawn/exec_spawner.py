"""Workers as fresh interpreters on this machine: the base of all other spawners."""

from __future__ import annotations

import os
import sys
from _functools import partial
from collections import deque
from contextlib import suppress

from infini_run.channel.errors import ChannelError
from infini_run.crews.spawn.worker_group import WorkerGroup
from infini_run.errors import UsageError
from infini_run.options.from_python import check_path, read_flags
from infini_run.plan.model import FoundProgram
from infini_run.plan.planner import make_plan
from infini_run.plan.program import (
    error_folder,
    find_command,
    inspect_node,
    launch_folder,
    new_launch_id,
    unshared_streams,
)
from infini_run.record import replace
from infini_run.system.interpreter import own_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.channel.serializer import Buffer
    from infini_run.crews.spawn.spawner import WorkerProcess
    from infini_run.crews.spawn.worker_group import ExecProcess
    from infini_run.plan.model import Plan, RankRange

RENDEZVOUS_FLAGS = ("standalone", "master_addr", "master_port", "rdzv_endpoint")
_PORTS = 64  # the jobs of one spawner have at most this many at once


def python_command(module: str = "worker.worker_main") -> list[str]:
    """Return the command that runs `main` of a module of crews/ in this Python, with its own flags (-O, -X, -W).

    -c gives the code: __main__ is empty, so a worker cannot import the caller's script by mistake. Also, this
    package's place does not matter.

    Args:
        module: the module's name within `crews`.

    Raises:
        UsageError: no known Python may start (system/interpreter.py).
    """
    return own_python(f"infini_run.crews.{module}.main", inherits=True)


class ExecSpawner:
    """Starts each worker in a separate Python, on this machine. Ranks that start together are one NodeLaunch.

    Args:
        nproc: the number of workers, or "auto", "gpu", "cpu".
        env: the workers' whole environment; None: this process's.
        cwd: the directory in which workers start; None: the current one.
        command: started in place of worker_main.py; descriptor 0 is its channel. None: worker_main.py.
        title: how --list shows what they run; empty: by their command.
        flags: as for `run`: log_dir, console, grace, gpus_per_proc, keep_going, ...

    Raises:
        UsageError, ProgramError: the request is invalid, or there is no such program.
    """

    def __init__(
        self,
        *,
        nproc: int | str = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        command: Sequence[str] | None = None,
        title: str = "",
        **flags: object,
    ) -> None:
        words = tuple(command or python_command())
        self.environ = dict(os.environ if env is None else env)
        self._cwd = check_path("cwd", cwd)
        if self._cwd is not None and not os.path.isdir(self._cwd):
            raise UsageError(f"cwd={self._cwd} is not a directory")
        if self._cwd is not None:  # restarts, and forks of a process that is there already, take it up later
            self._cwd = os.path.abspath(self._cwd)
        flags = {"console": "prefix", **flags, "nproc_per_node": nproc, "stdin": "none"}
        if flags.keys().isdisjoint(RENDEZVOUS_FLAGS):
            flags["standalone"] = True  # a free port: several crews may be up at once
        request = read_flags(flags, words, {})
        if request.node_list is not None:
            raise UsageError("these workers belong to one machine")
        assert request.options is not None
        self.options = replace(request.options, standalone=False, title=title)  # one run has several launches
        self._command = find_command(words, self.environ, cwd=self._cwd or "")
        if "pydevd" in sys.modules and command is None:
            from infini_run.plan.debugger import attach_debugger

            self._command = attach_debugger(self._command)
        self._node = inspect_node(self.options, self.environ)
        self.world_size = self._node.nproc
        self.notices = self._node.notices
        self._port = self.options.master_port  # 0: not chosen yet
        self._ports: deque[int] = deque(maxlen=_PORTS)  # of the jobs that may still run
        self._span: RankRange | None = None
        self._within = ""

    def become_node(
        self, node: int, nnodes: int, host: str, span: RankRange, rendezvous: tuple[str, int], within: str = ""
    ) -> None:
        """Become one node of several: later ranks are a part of their world.

        Args:
            node: this node's index, of `nnodes`.
            host: the name by which the caller knows this host.
            span: the ranks of this node.
            rendezvous: the rendezvous address: rank 0's host and port.
            within: id of the launch that this process is a rank of; "" for none. The ids of this spawner begin with
                it, so that an agent finds what is left of an earlier one (multinode/agent/old_world.py).
        """
        self.options = replace(self.options, nnodes=nnodes, node_rank=node, master_addr=rendezvous[0])
        self._node = replace(self._node, index=node, host=host)
        self._span, self._port, self._within = span, rendezvous[1], within

    def start(self, ranks: Sequence[int], restarts: int = 0, *, separate_groups: bool = False) -> list[ExecProcess]:
        """Start ranks as Spawner.start does. All ranks at once are a job with a separate rendezvous port; a part of
        them keeps the port of the others. One node of several uses the port of `join`."""
        is_job = len(ranks) == self.world_size and not self.options.master_port and self._span is None
        if is_job or not self._port:
            self._choose_port()
        processes: list[ExecProcess] = []
        try:
            for some in [[rank] for rank in ranks] if separate_groups else [ranks]:
                group = self._start_group(self._plan(some, restarts), processes)
                if is_job and not separate_groups:
                    group.on_close = partial(self._free_port, self._port)
        except BaseException:
            for process in processes:
                process.close()
            raise
        return processes

    def _choose_port(self) -> None:
        from infini_run.node.ports import free_port

        self._port = free_port()
        self._ports.append(self._port)

    def _free_port(self, port: int) -> None:
        from infini_run.node.ports import let_go

        with suppress(ValueError):
            self._ports.remove(port)
        let_go(port)

    def _start_group(self, plan: Plan, started: list[ExecProcess]) -> WorkerGroup:
        return WorkerGroup(plan, self.options, self.environ, self._cwd, started)

    def _plan(self, ranks: Sequence[int], restarts: int) -> Plan:
        launch_id = ".".join(filter(None, (self._within, new_launch_id())))
        folder = launch_folder(self.options, launch_id, self.environ)
        plan = make_plan(
            self.options,
            (FoundProgram(options=self.options, command=self._command, master_port=self._port),),
            (self._node,),
            launch_id=launch_id,
            environ=self.environ,
            folder=folder,
            error_dir=error_folder(self.options, folder),
            unshared=unshared_streams(),
            spans=() if self._span is None else (self._span,),
        )
        env = tuple(
            (name, str(restarts) if name == "TORCHELASTIC_RESTART_COUNT" else value) for name, value in plan.env
        )
        workers = {worker.rank: worker for worker in plan.workers}
        return replace(plan, env=env, workers=tuple(workers[rank] for rank in ranks))

    def broadcast(self, processes: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
        """Broadcast as Spawner.broadcast does; there is no link to cross."""
        for process in processes:
            try:
                process.tasks.send_bytes(frame)
            except ChannelError:
                continue  # it has died, or was closed: its exit will tell

    def ask_alive(self) -> None:
        """Ask as Spawner.ask_alive does; there is no other host."""

    def close(self) -> None:
        """Give the ports back. Nothing else is open."""
        if self._ports:
            from infini_run.node.ports import let_go

            while self._ports:
                let_go(self._ports.pop())

    def after_fork_in_child(self) -> None:
        """Do nothing in a forked child: nothing is open."""
