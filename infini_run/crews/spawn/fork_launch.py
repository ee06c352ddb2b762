"""A plan's workers as forks of a zygote, in the hands of the same core that watches processes that it made itself.

A child waits at a gate until the core has it, so that it can do nothing unseen. It leaves by an exception, up to the
zygote's main function: nothing of the zygote is under it on the stack.
"""

from __future__ import annotations

import ctypes
import os

from infini_run.core.c_structs import INHERIT
from infini_run.core.group import NO_CGROUP, is_main_thread
from infini_run.errors import InfiniRunError, StartError
from infini_run.node.forked_stdio import open_stdio
from infini_run.node.launch import NodeLaunch
from infini_run.record import record
from infini_run.system.signal_numbers import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infini_run.core.c_structs import SpawnSpec
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan, Worker

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@record
class ChildSetup:
    """The needs of a forked child to become a worker: its own descriptors, and its environment. At the gate, a byte
    means that it may continue; the end, that it may not."""

    channel: int
    stdout: int
    stderr: int
    gate: int
    env: dict[str, str]
    cwd: str
    mark: str


class InForkedChild(BaseException):
    """Raised in the child, and only there."""

    def __init__(self, child_setup: ChildSetup) -> None:
        super().__init__()
        self.child_setup = child_setup


class UnsafeFork(InfiniRunError):
    """A process that must not fork any more; the text says why."""


class ForkLaunch(NodeLaunch):
    """A NodeLaunch whose workers are forks of this process. It closes all of its descriptors.

    Args:
        stdins: by rank, each worker's channel.
        stdout, stderr: the launcher's.
        find_refusal: returns why this process must not fork, or "". What is run at a fork may start a thread, so
            each fork asks.
    """

    _debug = NO_CGROUP  # a fork starts in no new cgroup; the zygote's own ends with the zygote

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        environ: Mapping[str, str],
        cwd: str | None,
        stdins: Mapping[int, int],
        stdout: int,
        stderr: int,
        find_refusal: Callable[[], str],
    ) -> None:
        super().__init__(plan, options, environ=environ, cwd=cwd)
        self._console = (stdout, stderr)
        self._cwd = cwd
        self._find_refusal = find_refusal
        self._channels = dict(stdins)
        self._gates: dict[int, int] = {}  # by pid: children that wait
        self._ends: list[int] = []  # of their pipes, until the core has copies

    def start(self) -> None:
        """Start the workers as a NodeLaunch does. Raises InForkedChild in each child; UnsafeFork: none is left."""
        assert is_main_thread(), "a fork's parent-death signal is that of the thread that forks"
        try:
            super().start()
        finally:
            self._close_channels()
            self._close_ends()
        while self._gates:
            gate = self._gates.popitem()[1]
            os.write(gate, b"+")
            os.close(gate)

    def specs(self) -> list[SpawnSpec]:
        specs = super().specs()
        for worker, spec in zip(self.plan.workers, specs, strict=True):
            self._fork_worker(worker, spec)
        return specs

    def _fork_worker(self, worker: Worker, spec: SpawnSpec) -> None:
        """Fork a worker, which waits at its gate. Its spec gets its PID."""
        refusal = self._find_refusal()
        if refusal:
            raise UnsafeFork(refusal)
        parent = os.getpid()
        made: list[int] = []
        try:
            outputs, ends = open_stdio(spec, (1, 2), (-1, *self._console), made)
            spec.stdio[0] = INHERIT
            gate, ours = os.pipe()
            made += (gate, ours)
            pid = os.fork()
        except OSError as error:
            for fd in made:
                os.close(fd)
            raise StartError(
                os.strerror(error.errno or 0), "creating the process", error.errno or 0, worker.rank
            ) from None
        if pid == 0:
            tie_to_parent(parent)
            os.close(ours)
            raise InForkedChild(self._child_setup(worker, outputs, ends, gate))
        self._gates[pid] = ours
        os.close(gate)
        for fd in outputs:
            os.close(fd)
        self._ends += ends
        spec.pid, spec.env = pid, b""

    def _child_setup(self, worker: Worker, outputs: list[int], ends: list[int], gate: int) -> ChildSetup:
        """Tie the child to the zygote, and keep what is its own of all that it has copies of."""
        os.setpgid(0, 0)
        channel = self._channels.pop(worker.rank)
        for fd in ends:
            os.close(fd)
        child_setup = ChildSetup(
            channel=channel,
            stdout=outputs[0],
            stderr=outputs[1],
            gate=gate,
            env=self.plan.environ(worker, self.environ),
            cwd=self._cwd or "",
            mark=self.plan.launch_id,
        )
        self.after_fork_in_child()
        return child_setup

    def _close_channels(self) -> None:
        while self._channels:
            os.close(self._channels.popitem()[1])

    def _close_ends(self) -> None:
        while self._ends:
            os.close(self._ends.pop())

    def close(self) -> None:
        super().close()
        self._close_channels()
        self._close_ends()
        console, self._console = self._console, (-1, -1)
        for fd in console:
            if fd >= 0:
                os.close(fd)
        while self._gates:  # the core has not had them: they see the gate's end
            pid, gate = self._gates.popitem()
            os.close(gate)
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:  # it had this one
                continue

    def after_fork_in_child(self) -> None:
        while self._gates:
            os.close(self._gates.popitem()[1])
        super().after_fork_in_child()


def tie_to_parent(parent: int) -> None:
    """Send this process SIGKILL when its parent ends (prctl(2)), also where that is already gone."""
    if _libc.prctl(_PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os._exit(128 + SIGKILL)
