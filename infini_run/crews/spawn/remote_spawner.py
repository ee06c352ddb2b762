"""Workers on other hosts: a Spawner, and WorkerProcesses (spawner.py).

The head reaches each host, and its agent runs one spawn server there; the NodesThread's thread holds the streams. A
channel is a socket here, as on one machine; its messages, and then its end, come from the spawn server. The loss of a
node ends all others: a launch raises NodeLost, a crew fails with it. With `nnodes=(MIN, MAX)` or `spares=` another
world follows (NodesThread), in which workers can restart.
"""

from __future__ import annotations

import os
import sys
from _functools import partial
from _thread import RLock
from itertools import accumulate

from infini_run.channel.encoder import bytes_frame, in_pieces
from infini_run.core.group import forking
from infini_run.crews.callables import path_of_workers
from infini_run.crews.spawn.nodes_thread import NodesThread
from infini_run.crews.spawn.placement import check_elastic, plain_flag, reaches, read_counts, resolve_hosts_and_engine
from infini_run.crews.spawn.remote_process import RemoteWorkerProcess
from infini_run.crews.spawn.stream_multiplexer import LARGEST
from infini_run.errors import InfiniRunError, NodeLost, UsageError
from infini_run.multinode.head.rendezvous import rendezvous_address
from infini_run.multinode.link.agent_options import WorkerNeeds
from infini_run.options.from_python import check_path
from infini_run.record import record, replace
from infini_run.system.fork_hooks import call_in_forked_children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.channel.serializer import Buffer
    from infini_run.crews.spawn.remote_node import RemoteNode, World
    from infini_run.crews.spawn.spawner import WorkerProcess


@record
class RankBlock:
    """Ranks that are on one host: `size` of them, from `first` on."""

    node: RemoteNode
    first: int
    size: int


class RemoteSpawner:
    """Workers on several hosts. `open` reaches them, and holds them until `close`.

    Args:
        hosts: names, as --hosts has them.
        nproc: workers on each: a number, auto, gpu, cpu, or one number per host; None: what each has room for, else
            one.
        env: variables to add to the environment that a login gives there.
        cwd: where workers start, on every host; None: the name of the current directory.
        preload, is_silent, start_timeout_s: as for a ForkSpawner; silent: only where there are several workers.
        title: as for an ExecSpawner.
        flags: as for an ExecSpawner, and engine, ssh_config, remote_python, nnodes, node_timeout, and what else the
            command has for many nodes.
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
        title: str = "",
        **flags: object,
    ) -> None:
        given = {name: value for name, value in flags.items() if value is not None}
        reach = {name: value for name, value in given.items() if reaches(name)}
        self._flags = {name: plain_flag(value) for name, value in given.items() if not reaches(name)}
        if hosts:
            reach["hosts"] = ",".join(hosts)
        self._options, self._node_list, workers = resolve_hosts_and_engine(reach, self._flags, nproc)
        self._options = replace(self._options, title=title)
        self._nprocs = read_counts(nproc, self._node_list)
        self._needs = WorkerNeeds(
            gpus_per_proc=workers.gpus_per_proc,
            nproc=self._nprocs[0],
            log_dir=workers.log_dir,
            environ=dict(env or {}),
        )
        if self.is_elastic:
            check_elastic(self._nprocs, given)
        self._cwd = check_path("cwd", cwd)
        self._setup: dict[str, object] = {
            "path": list(path_of_workers()),
            "argv": list(map(str, sys.argv)),
            "env": dict(env or {}),
            "nproc": self._nprocs,
            "preload": list(preload),
            "is_silent": is_silent,
            "start_timeout_s": start_timeout_s,
            "flags": {**self._flags, "title": title},
        }
        self._lock = RLock()
        self._first_nodes: list[str] = []  # the names of the node of rank 0, in each world
        self._link: NodesThread | None = None
        self.watchers: set[Callable[[], None]] = set()  # called when a world comes or goes
        self._numbers = 0  # given to processes, broadcasts and questions
        self._rendezvous = ("", 0)
        self._is_closed = False

    # ---- the nodes

    is_independent = False  # as for a NodesThread

    @property
    def is_elastic(self) -> bool:
        """Whether another world follows the loss of a node."""
        return self._options.is_elastic

    def open(self) -> None:
        """Reach all hosts, and wait until each is ready to start workers. Once. Raises NodeLost: one is unreachable;
        UsageError, StartError, InfiniRunError: one cannot fulfill the request."""
        with self._lock:
            if self._is_closed:
                raise UsageError("this spawner is closed and starts no more workers")
            if self._link is None:
                with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
                    self._link = NodesThread(
                        self._options,
                        self._node_list,
                        self._cwd,
                        self._setup_of,
                        is_independent=self.is_independent,
                        workers=self._needs,
                    )
                    self._link.watchers.add(self._wake_watchers)
                    call_in_forked_children(self)
                self._link.start()
            self._wait_for_nodes(self._link)

    def _wait_for_nodes(self, link: NodesThread) -> None:
        """Wait until workers can start. Raises what `open` does."""
        link.wait(lambda: link.world.is_up or self._has_problem(link))
        if link.is_over or self._has_problem(link):
            raise link.refusal or link.error()

    def _has_problem(self, link: NodesThread) -> bool:
        """Return whether no world will be up: none follows one that is not."""
        if self.is_elastic:
            return link.refusal is not None
        return any(node.problem is not None for node in link.world.nodes)

    def _setup_of(self, world: int) -> dict[str, object]:
        """Return the first message to the spawn servers of a world. Each has a separate folder for its logs: two
        machines that append to one file of a network file system lose lines."""
        folder = self._flags.get("log_dir")
        if not self.is_elastic or self.is_independent or not folder:
            return self._setup
        return {**self._setup, "flags": {**self._flags, "log_dir": os.path.join(folder, f"attempt_{world + 1}")}}

    def _wake_watchers(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    @property
    def world_size(self) -> int:
        """The number of ranks: where that is for the hosts to say, this reaches them first."""
        if self.is_elastic or not all(isinstance(count, int) for count in self._nprocs):
            self.open()
        return sum(self._counts())

    def _counts(self) -> list[int]:
        """Return the ranks on each node of the world, as far as known."""
        if self._link is None:
            return [int(count) for count in self._nprocs]
        return [node.nproc or int(self._nprocs[node.index]) for node in self._link.world.nodes]

    # ---- worlds

    def world_after(self, number: int) -> World | None:
        """Return the world in which workers can start at present; None: there is none yet after that of this number.
        Raises InfiniRunError: there will be none."""
        link = self._link
        if link is None or link.is_over or link.refusal is not None:
            raise UsageError("this spawner is closed") if link is None else link.refusal or link.error()
        world = link.world
        return world if world.number > number and world.is_up and not link.why_ended(world.number) else None

    def why_ended(self, world: int) -> str:
        """Return the reason as NodesThread.why_ended does."""
        return "" if self._link is None else self._link.why_ended(world)

    def begin_next_world(self, world: int, place_index: int, due_s: float) -> None:
        """Begin as NodesThread.begin_next_world does."""
        if self._link is not None:
            self._link.begin_next_world(world, place_index, due_s)

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes on the hosts for the user."""
        nodes = () if self._link is None else self._link.world.nodes
        return tuple(f"{node.name}: {text}" for node in nodes for text in node.notices)

    # ---- workers

    def start(
        self, ranks: Sequence[int], restarts: int = 0, *, separate_groups: bool = False
    ) -> list[RemoteWorkerProcess]:
        """Start as Spawner.start does; raises what `open` does, too. Raises NodeLost after the end of the world."""
        with self._lock:
            if not self.is_elastic or self._link is None:
                self.open()
            blocks = self._blocks(ranks)
            total = sum(block.size for block in blocks)
            if len(ranks) == total or not self._rendezvous[1]:
                self._rendezvous = self._find_rendezvous([block.node for block in blocks])
            processes: list[RemoteWorkerProcess] = []
            answers: list[tuple[RemoteNode, int]] = []
            try:
                for place, block in enumerate(blocks):
                    mine = [rank for rank in ranks if block.first <= rank < block.first + block.size]
                    if mine:
                        some = [self._make_process(block.node, rank, rank - block.first) for rank in mine]
                        processes += some
                        shape = {"node": place, "nnodes": len(blocks), "first": block.first, "world_size": total}
                        answers.append(
                            (block.node, self._ask_start(block.node, some, shape, restarts, separate_groups))
                        )
                self._await(answers)
                by_rank = {process.rank: process for process in processes}
                return [by_rank[rank] for rank in ranks]
            except BaseException:  # KeyboardInterrupt may come between any two steps
                for process in processes:
                    process.close()
                raise

    def _blocks(self, ranks: Sequence[int]) -> list[RankBlock]:
        """Return all blocks of the ranks, in order, for a start of these. Raises NodeLost after the end of the
        world."""
        assert self._link is not None
        world = self._link.world
        if self.is_elastic and (not world.is_up or max(ranks) >= world.size):
            raise NodeLost("lost a node before its workers were started", "", -1)
        firsts = accumulate((node.nproc for node in world.nodes), initial=0)
        return [
            RankBlock(node=node, first=first, size=node.nproc)
            for node, first in zip(world.nodes, firsts, strict=False)
        ]

    def _find_rendezvous(self, nodes: Sequence[RemoteNode]) -> tuple[str, int]:
        """Return where rank 0 listens: a port for each launch, or the caller's for all of them."""
        first, world = nodes[0].peer, nodes[0].world
        self._first_nodes += [first.name] * (world + 1 - len(self._first_nodes))
        names = [host.name for host in self._node_list.hosts] if self.is_elastic else ()
        served = self._first_nodes[:world]
        address, port = rendezvous_address(self._options, first, served, names, is_alone=len(nodes) == 1)
        return address, port if self._options.rdzv_explicit else nodes[0].port

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _make_process(self, node: RemoteNode, rank: int, local_rank: int) -> RemoteWorkerProcess:
        assert self._link is not None
        return RemoteWorkerProcess(self._link, node, self._number(), rank, local_rank)

    def _ask_start(
        self,
        node: RemoteNode,
        processes: Sequence[RemoteWorkerProcess],
        shape: Mapping[str, int],
        restarts: int,
        separate_groups: bool,
    ) -> int:
        assert self._link is not None
        question = self._number()
        asked = {
            "id": question,
            "workers": [[process.number, process.rank] for process in processes],
            "restarts": restarts,
            "apart": separate_groups,
            **shape,
            "host": node.name,
            "address": self._rendezvous[0],
            "port": self._rendezvous[1],
        }
        self._link.call(partial(node.send_control, {"start": asked}))
        return question

    def _await(self, answers: Sequence[tuple[RemoteNode, int]]) -> None:
        """Wait for all of them. Raises the first error that one of them returns."""
        link = self._link
        assert link is not None
        link.wait(lambda: all(question in node.answers or node.problem for node, question in answers))
        for node, question in answers:
            error = node.answers.pop(question, None) or node.problem
            if isinstance(error, InfiniRunError):
                raise error

    def broadcast(self, processes: Sequence[WorkerProcess], frame: list[Buffer]) -> None:
        """Broadcast as Spawner.broadcast does: once to each node."""
        own = [process for process in processes if isinstance(process, RemoteWorkerProcess)]
        if self._link is not None and own:
            self._link.broadcast(self._number(), own, in_pieces(bytes_frame(frame, LARGEST)).pieces)

    def ask_alive(self) -> None:
        """Ask as Spawner.ask_alive does."""
        if self._link is not None:
            self._link.call(self._link.head.ask_alive)

    # ---- the end

    def close(self) -> None:
        """End the spawn servers and everything that runs there; wait until nothing is left. Safe twice."""
        self._is_closed = True
        if self._link is not None:
            self._link.stop()
            self._link.join()

    def after_fork_in_child(self) -> None:
        """Forget everything in a forked child: all of it is the parent's."""
        self._lock, self._is_closed = RLock(), True
        link, self._link = self._link, None
        if link is not None:
            link.after_fork_in_child()
