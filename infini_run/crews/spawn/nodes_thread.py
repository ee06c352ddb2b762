"""The link between this process and the spawn servers on other hosts: one thread, which polls the head.

It alone touches the head and the streams. Other threads ask it for something (`call`) and wait for the effect
(`wait`). A worker has a stream for its channel here, and notes of its process, in order with its messages.
"""

from __future__ import annotations

import os
from _functools import partial
from threading import Condition

from infini_run.crews.capture import capture_exception
from infini_run.crews.spawn.mux_stream import nonsense
from infini_run.crews.spawn.remote_node import RemoteNode, World
from infini_run.errors import InfiniRunError, NodeLost
from infini_run.multinode.head.head import Head
from infini_run.node.host_stderr import has_own_stderr, print_line
from infini_run.options.keyword_errors import KeywordErrors
from infini_run.report.text import describe_end
from infini_run.system.call_loop import CallLoop
from infini_run.system.joinable_thread import JoinableThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.channel.serializer import Buffer
    from infini_run.crews.spawn.remote_node import RemoteWorker
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.world_changes import WorldChanges
    from infini_run.multinode.link.agent_options import WorkerNeeds
    from infini_run.options.launch_options import Options
    from infini_run.options.nodes import NodeList


class NodesThread:
    """The nodes, their head, and the thread that polls it.

    A job that continues after the loss of a node (Options.is_elastic) has one world after the other. Each begins with
    a new spawn server on each of its nodes, once no process of the one before can live (membership_transitions.py).
    Others have one. If the nodes are independent, that one loses nodes and gets others.

    Args:
        options, node_list: as for a Head.
        cwd: where the spawn servers start.
        setup: returns the first message to the spawn servers of a world, by its number.
        is_independent, workers: as for a Head.

    watchers: called in the link's thread when a world comes or goes, or there will be none.
    """

    def __init__(
        self,
        options: Options,
        node_list: NodeList,
        cwd: str | None,
        setup: Callable[[int], Mapping[str, object]],
        *,
        is_independent: bool = False,
        workers: WorkerNeeds | None = None,
    ) -> None:
        own = has_own_stderr()
        self._keywords = KeywordErrors({})
        self._loop = CallLoop()
        try:
            self.head = Head(
                options,
                node_list,
                environ=dict(os.environ),
                print_line=None if own else print_line,
                cwd=cwd,
                on_stream=self._on_data,
                is_independent=is_independent,
                workers=workers,
                keywords=self._keywords,
            )
        except BaseException:
            self._loop.close()
            raise
        self._setup = setup
        self._changed = Condition()
        self._is_over = self._is_closing = self._is_in_forked_child = False
        self._failure: BaseException | None = None
        self.watchers: set[Callable[[], None]] = set()
        self._ends: dict[int, str] = {}  # why a world ended or ends, by its number
        self._nodes: dict[RemoteAgent, RemoteNode] = {}
        self.world = World(-1, ())
        self._reported: tuple[object, ...] = ()
        self._is_alone = not options.is_elastic  # the loss of a node ends all others
        if self._is_alone:
            self._begin_world(0, self.head.agents)
        self._thread = JoinableThread(self._run, "infini-run: nodes")

    def start(self) -> None:
        """Begin to reach the nodes. Raises as Head.start does: nothing was started."""
        try:
            self.head.start()
            self._thread.start()
        except BaseException:
            self._free()
            raise

    # ---- for other threads

    def call(self, what: Callable[[], None]) -> None:
        """Run a call in the link's thread, in order; not at all, after its end."""
        self._loop.call(what)

    def why_ended(self, world: int) -> str:
        """Return why a world ended, or is about to end, though no worker failed: which node came or went; "" for any
        other reason."""
        return self._ends.get(world, "")

    def begin_next_world(self, world: int, place_index: int, due_s: float) -> None:
        """Have a world end, because a worker failed; the next one follows.

        Args:
            world: its number; nothing happens after its end.
            place_index: the node of that worker, among all nodes.
            due_s: the next one begins not before (monotonic).
        """
        worlds = self.head.worlds
        assert worlds is not None
        self.call(lambda: worlds.restart(world, place_index, due_s))

    def wait(self, is_there: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until it is so. Return False where nothing more can happen, or not within `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._is_over, timeout_s)
            return is_there()

    def changed(self) -> None:
        """Wake whoever waits."""
        with self._changed:
            self._changed.notify_all()

    def error(self) -> InfiniRunError:
        """Return why the nodes can give nothing more."""
        if isinstance(self.head.error, InfiniRunError):
            return self.head.error
        if self._failure is not None:
            return InfiniRunError(f"gave up the nodes: {type(self._failure).__name__}: {self._failure}")
        problems = [node.problem for node in self.world.nodes if node.problem is not None]
        return problems[0] if problems else InfiniRunError("the nodes are no longer held")

    @property
    def is_over(self) -> bool:
        """Whether the thread and everything on every node are gone."""
        return self._is_over

    def broadcast(self, number: int, workers: Sequence[RemoteWorker], frame: Sequence[Buffer]) -> None:
        """Send one broadcast to each node, whose workers get the frame after all earlier ones. Wait until all of it
        is on its way."""
        waiting = {worker.number for worker in workers}
        by_node: dict[RemoteNode, list[RemoteWorker]] = {}
        for worker in workers:
            by_node.setdefault(worker.node, []).append(worker)

        def send(node: RemoteNode, some: list[RemoteWorker]) -> None:
            def use() -> None:
                for worker in some:
                    stream = node.streams.find(worker.number)
                    if stream is None:
                        waiting.discard(worker.number)
                    else:
                        stream.use(number)
                        stream.when_read(partial(waiting.discard, worker.number))
                node.streams.when_all_read([worker.number for worker in some], lambda: end(node))

            node.streams.send_broadcast(number, frame, use)

        def end(node: RemoteNode) -> None:
            node.send_control({"broadcast_sent": number})
            self.changed()

        for node, some in by_node.items():
            self.call(partial(send, node, some))
        left = [(worker.number, worker.node) for worker in workers]
        self.wait(lambda: all(number not in waiting or node.problem is not None for number, node in left))

    def stop(self) -> None:
        """Let everything on every node end; `join` waits for it."""
        self._is_closing = True
        self.call(self.head.finish)

    def kill(self) -> None:
        """Send SIGKILL to the same."""
        self._is_closing = True
        self.call(self.head.finish)
        self.call(self.head.kill)
        self.call(self.head.limit_reader)

    def join(self) -> None:
        """Wait for the end of everything, on every node."""
        self._thread.join()

    def after_fork_in_child(self) -> None:
        """Forget everything in a forked child: all of it is the parent's."""
        if self._is_over:
            return
        self._changed, self._is_in_forked_child, self._is_over = Condition(), True, True
        self._loop.after_fork_in_child()
        for node in self.world.nodes:
            node.streams.after_fork_in_child()
        self.head.after_fork_in_child()

    # ---- the thread

    def _serve(self) -> None:
        while not self.head.ended:
            self.head.poll(also=(self._loop.poller.fileno(),))
            self._loop.poller.poll(0.0)
            self._loop.is_awake = False
            self._loop.run_calls()
            self._check_nodes()

    def _run(self) -> None:
        try:
            # A bug or no memory: callers must not hang.
            _, self._failure = capture_exception(self._serve)
        finally:
            self._free()

    def _on_data(self, peer: RemoteAgent, data: bytes) -> None:
        """Read what a node sends. Raises LinkError for an invalid message."""
        if peer not in self._nodes:
            raise nonsense("bytes of no node of this world")
        self._nodes[peer].streams.feed(data)
        self.changed()

    def _begin_world(self, number: int, agents: Sequence[RemoteAgent]) -> None:
        for node in self.world.nodes:
            if node.problem is None:
                node.end(self._why(node))
        nodes = [RemoteNode(peer, number, self._loop.poller, self.head.send_stream, self.changed) for peer in agents]
        self._nodes = dict(zip(agents, nodes, strict=True))
        self.world = World(number, nodes)

    def _follow_worlds(self, worlds: WorldChanges) -> None:
        """Note which world ended, and which one has begun."""
        ended, reason = worlds.world_end
        if reason and ended not in self._ends:
            self._ends[ended] = self._keywords.rename(reason)
            self.world_changed()
        number, agents = worlds.world
        if number != self.world.number:
            self._begin_world(number, agents)

    def _follow_nodes(self) -> None:
        """Note which nodes joined and left, if each is for itself."""
        agents = set(self.head.agents)
        for agent, node in list(self._nodes.items()):
            if agent not in agents:
                if node.problem is None:
                    node.end(self._why(node))
                del self._nodes[agent]
        for agent in self.head.agents:
            old = self._nodes.get(agent)
            if agent.state == "running" and (old is None or (old.problem is not None and not old.is_refused)):
                self._nodes[agent] = RemoteNode(agent, 0, self._loop.poller, self.head.send_stream, self.changed)
        nodes = tuple(sorted(self._nodes.values(), key=lambda node: node.index))
        if nodes != self.world.nodes:
            self.world = World(0, nodes)

    def world_changed(self) -> None:
        """Tell all that wait for a world."""
        self.changed()
        for watcher in list(self.watchers):
            watcher()

    def _check_nodes(self) -> None:
        """Check the state of the nodes."""
        if self.head.worlds is not None:
            self._follow_worlds(self.head.worlds)
        elif not self._is_alone:
            self._follow_nodes()
        for node in self.world.nodes:
            peer = node.peer
            if peer.state == "running":
                if not node.is_set_up:
                    node.is_set_up = True
                    node.send_control({"setup": {**self._setup(node.world), "node": peer.index}})
                node.streams.set_room(peer.connection is None or peer.connection.has_room)
            elif self.head.awaits_others:
                continue  # then it says why, of all that do not come
            elif peer.is_over and node.problem is None and not (self._is_alone and peer.is_unexplained):
                node.end(self._why(node))
                if self._is_alone:
                    self.head.stop()
                self.changed()
        nodes = self.world.nodes
        now = (self.world.number, *((id(node), node.nproc, node.problem is None) for node in nodes))
        if now != self._reported:
            self._reported = now
            self.world_changed()

    @property
    def refusal(self) -> InfiniRunError | None:
        """Why a node cannot run workers at all; None without a refusal."""
        return next((node.problem for node in self.world.nodes if node.is_refused), None)

    def _why(self, node: RemoteNode) -> InfiniRunError | None:
        """Return why it has nothing more."""
        peer, error = node.peer, self.head.error
        if isinstance(error, NodeLost) and error.node == peer.index:
            return error
        if self._is_closing:
            return None
        if error is not None and not node.workers:
            return error
        first = None if peer.report is None else peer.report.first_failure
        if not self._is_alone and peer.state == "done" and first is None and not peer.loss:
            return InfiniRunError(f"{peer.title}: this attempt already ended")
        if self._is_alone and isinstance(error, NodeLost) and first is None and not peer.loss:
            return error  # it ended because of the loss of another, which may become known later
        how = f": the process that holds its workers is gone: {describe_end(first)}" if first is not None else ""
        text = self._keywords.rename(peer.loss) or f"lost {peer.title}{how}"
        return NodeLost(text, peer.name, peer.index)

    def _free(self) -> None:
        if self._is_in_forked_child:
            return
        for node in self.world.nodes:
            node.end(node.problem or self._why(node))
        self.head.close()
        with self._changed:
            self._is_over = True
            self._loop.close()
            self._loop.calls.clear()
            self._changed.notify_all()
        self.world_changed()
