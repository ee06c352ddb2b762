"""Workers on other hosts, seen from their supervisor: Runners and a Spawner as any (spawner.py).

The head reaches each host and runs one outpost there, by its agent; the bridge's thread holds the streams. A channel
is a socket here as on one machine; what it says, and how it ends, comes from its outpost in that order. A node
that is lost ends all others: a launch raises NodeLost, a crew fails with it.
"""

from __future__ import annotations

import os
import sys
from _functools import partial
from _thread import RLock
from itertools import accumulate

from infini_run.channel.encoder import bytes_frame
from infini_run.core.group import forking
from infini_run.crews.node_link import NodeLink
from infini_run.crews.remote_process import RemoteWorkerProcess
from infini_run.crews.stream_multiplexer import LARGEST
from infini_run.crews.targets import plain_flag, reaches, read_counts, resolve_hosts_and_engine
from infini_run.errors import InfiniRunError, UsageError
from infini_run.multinode.rendezvous import rendezvous_address
from infini_run.system.fork_hooks import call_in_forked_children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.channel.serializer import Buffer
    from infini_run.crews.node_link import RemoteNode
    from infini_run.crews.spawner import WorkerProcess


class RemoteSpawner:
    """Workers on several hosts. `open` reaches them, and holds them until `close`.

    hosts: names, as --hosts has them. nproc: workers on each: a number, auto, gpu, cpu, or one number for each host;
    None: what each has room for, else one.
    env: what is added to the environment that a login gives there. cwd: where workers start, on every host (None:
    the name of the directory that we are in). preload, is_silent, start_timeout_s: as for a ForkSpawner; silent: only
    where there are several workers. flags: as for an ExecSpawner, and engine, ssh_config, remote_python, nnodes,
    node_timeout and what else the command has for many nodes.
    """

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        nproc: int | str | Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        preload: Sequence[str] = (),
        is_silent: bool = False,
        start_timeout_s: float | None = None,
        **flags: object,
    ) -> None:
        given = {name: plain_flag(value) for name, value in flags.items() if value is not None}
        reach = {name: value for name, value in given.items() if reaches(name)}
        self._flags = {name: value for name, value in given.items() if not reaches(name)}
        if hosts:
            reach["hosts"] = ",".join(hosts)
        self._options, self._roster = resolve_hosts_and_engine(reach, self._flags, nproc)
        self._nprocs = read_counts(nproc, self._roster)
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._setup = {
            "path": list(sys.path),
            "argv": list(sys.argv),
            "env": dict(env or {}),
            "nproc": self._nprocs,
            "preload": list(preload),
            "is_silent": is_silent,
            "start_timeout_s": start_timeout_s,
            "flags": self._flags,
        }
        self._lock = RLock()
        self._bridge: NodeLink | None = None
        self._numbers = 0  # given to lives, gifts and questions
        self._meeting = ("", 0)
        self._is_closed = False

    # ---- the nodes

    def open(self) -> None:
        """Reach all hosts, and wait until each is ready to start workers. Once. Raises NodeLost: one cannot be
        reached; UsageError, StartError, InfiniRunError: one cannot do what was asked."""
        with self._lock:
            if self._is_closed:
                raise UsageError("this was closed: no worker can be started by it any more")
            if self._bridge is None:
                with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
                    self._bridge = NodeLink(self._options, self._roster, self._cwd, self._setup)
                    call_in_forked_children(self)
                self._bridge.start()
            bridge = self._bridge
            bridge.wait(lambda: all(o.nproc for o in bridge.outposts) or self._has_problem())
            if bridge.is_over or self._has_problem():
                raise bridge.error()

    def _has_problem(self) -> bool:
        return self._bridge is not None and any(o.problem is not None for o in self._bridge.outposts)

    @property
    def world_size(self) -> int:
        """How many ranks there are: where that is for the hosts to say, they are reached now."""
        return sum(self._counts())

    def _counts(self) -> list[int]:
        """Ranks on each node."""
        if not all(isinstance(count, int) for count in self._nprocs):
            self.open()
        if self._bridge is None:
            return [int(count) for count in self._nprocs]
        return [
            outpost.nproc or int(count) for outpost, count in zip(self._bridge.outposts, self._nprocs, strict=True)
        ]

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user is to be told of the hosts."""
        outposts = () if self._bridge is None else self._bridge.outposts
        return tuple(f"{outpost.name}: {text}" for outpost in outposts for text in outpost.notices)

    # ---- workers

    def start(self, ranks: Sequence[int], restarts: int = 0, *, apart: bool = False) -> list[RemoteWorkerProcess]:
        """As Spawner.start; raises what `open` does, too."""
        with self._lock:
            self.open()
            assert self._bridge is not None
            counts = self._counts()
            firsts = [0, *accumulate(counts)][:-1]
            if len(ranks) == sum(counts) or not self._meeting[1]:
                self._meeting = self._meet(self._bridge)
            runners: list[RemoteWorkerProcess] = []
            answers: list[tuple[RemoteNode, int]] = []
            try:
                for outpost, first, count in zip(self._bridge.outposts, firsts, counts, strict=True):
                    mine = [rank for rank in ranks if first <= rank < first + count]
                    if mine:
                        some = [self._runner(outpost, rank, rank - first) for rank in mine]
                        runners += some
                        answers.append((outpost, self._ask_start(outpost, some, first, restarts, apart)))
                self._await(answers)
            except BaseException:  # KeyboardInterrupt may come between any two steps
                for runner in runners:
                    runner.close()
                raise
        by_rank = {runner.rank: runner for runner in runners}
        return [by_rank[rank] for rank in ranks]

    def _meet(self, bridge: NodeLink) -> tuple[str, int]:
        """Where rank 0 listens: a port for each launch, unless one was given."""
        address, port = rendezvous_address(self._options, bridge.head.peers)
        return address, port if self._options.rdzv_explicit else bridge.outposts[0].port

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _runner(self, outpost: RemoteNode, rank: int, local_rank: int) -> RemoteWorkerProcess:
        assert self._bridge is not None
        return RemoteWorkerProcess(self._bridge, outpost, self._number(), rank, local_rank)

    def _ask_start(
        self, outpost: RemoteNode, runners: Sequence[RemoteWorkerProcess], first: int, restarts: int, apart: bool
    ) -> int:
        assert self._bridge is not None
        question = self._number()
        asked = {
            "id": question,
            "lives": [[runner.number, runner.rank] for runner in runners],
            "restarts": restarts,
            "apart": apart,
            "first": first,
            "world_size": self.world_size,
            "node": outpost.index,
            "nnodes": len(self._roster.hosts),
            "host": outpost.name,
            "address": self._meeting[0],
            "port": self._meeting[1],
        }
        self._bridge.call(partial(outpost.say, {"start": asked}))
        return question

    def _await(self, answers: Sequence[tuple[RemoteNode, int]]) -> None:
        """Raises what any of them says."""
        bridge = self._bridge
        assert bridge is not None
        bridge.wait(lambda: all(question in outpost.answers or outpost.problem for outpost, question in answers))
        for outpost, question in answers:
            error = outpost.answers.pop(question, None) or outpost.problem
            if isinstance(error, InfiniRunError):
                raise error

    def spread(self, runners: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
        """As Spawner.spread: once to each node."""
        lives = [runner for runner in runners if isinstance(runner, RemoteWorkerProcess)]
        if self._bridge is not None and lives:
            self._bridge.spread(self._number(), lives, bytes_frame(frame, LARGEST).pieces)

    # ---- the end

    def close(self) -> None:
        """End the outposts, and whatever runs there; wait until nothing is left. Safe twice."""
        self._is_closed = True
        if self._bridge is not None:
            self._bridge.stop()
            self._bridge.join()

    def after_fork_in_child(self) -> None:
        """In a forked child: all of it is our parent's."""
        self._lock, self._is_closed = RLock(), True
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.after_fork_in_child()
