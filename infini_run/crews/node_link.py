"""The link between this process and the spawn servers on other hosts: one thread, which polls the head.

It alone touches the head and the streams. Other threads ask it for something (`call`) and wait for the effect
(`wait`). A worker has a stream for its channel here, and notes of its process, in order with its messages.
"""

from __future__ import annotations

import os
from _functools import partial
from collections import deque
from threading import Condition

from infini_run.crews.capture import capture_exception
from infini_run.crews.joinable_thread import JoinableThread
from infini_run.crews.stream_multiplexer import Multiplexer
from infini_run.errors import InfiniRunError, LinkError, NodeLost, StartError, UsageError
from infini_run.multinode.head import Head
from infini_run.multinode.record_codec import decode_record
from infini_run.node.host_stderr import has_own_stderr, print_line
from infini_run.report.exit import Exit
from infini_run.report.text import describe_end
from infini_run.system.poller import READ, Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.channel.serializer import Buffer
    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.options.nodes import NodeList
    from infini_run.options.options import Options

    class RemoteWorker(Protocol):
        """A worker, as the NodeLink knows it. `note` is called in its thread."""

        number: int
        node: RemoteNode

        def note(self, kind: str, value: object) -> None:
            """Note what happened to it. kind: pid, exit (an Exit), pinged, lost (an error), ended."""


class RemoteNode:
    """A node, as it is known here. nproc: workers that it would run (0: not known yet). port: one that is free."""

    def __init__(self, link: NodeLink, peer: RemoteAgent, poller: Poller) -> None:
        self.peer = peer
        self.index = peer.index
        self.nproc = 0
        self.port = 0
        self.notices: tuple[str, ...] = ()
        self.workers: dict[int, RemoteWorker] = {}
        self.answers: dict[int, object] = {}  # to what was asked of it: None, or an error
        self.problem: InfiniRunError | None = None  # it is of no use any more
        self.is_set_up = False
        self._link = link
        self.streams = Multiplexer(poller, lambda data: link.head.send_stream(peer, data), self._on_control)

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def clock_s(self) -> float:
        """What makes its clock's times ours."""
        return -self.peer.clock.offset_s

    def send_control(self, word: Mapping[str, object]) -> None:
        """In the link's thread."""
        self.streams.send_control(word)

    def _on_control(self, word: dict[str, Any]) -> None:
        kind, value = word.popitem()
        worker = self.workers.get(value["worker"]) if "worker" in value else None
        if kind == "up":
            self.nproc, self.port, self.notices = int(value["nproc"]), int(value["port"]), tuple(value["notices"])
        elif kind == "refused":
            self.problem = _error_of(value, self.name)
        elif kind == "answer":
            self.port = int(value["port"])
            self.answers[value["id"]] = _error_of(value, self.name) if "text" in value else None
        elif worker is not None:
            stream = self.streams.find(worker.number)
            note = partial(self._note, worker, kind, value.get("value"))
            if stream is None or kind in ("pid", "pinged"):
                note()
            else:  # its end is noted after what it said before
                stream.when_written(note)

    def _note(self, worker: RemoteWorker, kind: str, value: Any) -> None:
        if kind == "exit":
            value = _in_own_terms(decode_record(Exit, value), self.clock_s, self.name)
        if kind == "ended":
            self.workers.pop(worker.number, None)
        worker.note(kind, value)
        self._link.changed()

    def end(self, problem: InfiniRunError | None) -> None:
        """Nothing more comes from it."""
        self.problem = problem or self.problem or InfiniRunError(f"{self.peer.title} is not held any more")
        workers, self.workers = self.workers, {}
        self.streams.close()
        for worker in workers.values():
            worker.note("lost", self.problem)


class NodeLink:
    """options, roster: as for a Head. cwd: where the spawn servers start. setup: the first message
    to each."""

    def __init__(self, options: Options, node_list: NodeList, cwd: str | None, setup: Mapping[str, object]) -> None:
        own = has_own_stderr()
        self.head = Head(
            options,
            node_list,
            environ=dict(os.environ),
            print_line=None if own else print_line,
            cwd=cwd,
            on_stream=self._on_data,
        )
        self._setup = setup
        self._poller = Poller()
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = Condition()
        self._is_over = self._is_closing = self._is_in_forked_child = False
        self._failure: BaseException | None = None
        self.nodes = [RemoteNode(self, peer, self._poller) for peer in self.head.agents]
        self._thread = JoinableThread(self._run, "infini-run: nodes")

    def start(self) -> None:
        """Begin to reach the nodes. Raises as Head.start: nothing was started."""
        self._poller.watch(self._wakeup_fd, READ, self._on_wakeup)
        try:
            self.head.start()
            self._thread.start()
        except BaseException:
            self._free()
            raise

    # ---- for other threads

    def call(self, what: Callable[[], None]) -> None:
        """Have it done in the link's thread, in order; not at all, where that has ended."""
        with self._changed:
            if not self._is_over:
                self._calls.append(what)
                os.eventfd_write(self._wakeup_fd, 1)

    def wait(self, is_there: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Until it is; False where nothing more can happen, or not within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._is_over, timeout_s)
            return is_there()

    def changed(self) -> None:
        """Whoever waits is to look."""
        with self._changed:
            self._changed.notify_all()

    def error(self) -> InfiniRunError:
        """Why nothing more can be had of the nodes."""
        if isinstance(self.head.error, InfiniRunError):
            return self.head.error
        if self._failure is not None:
            return InfiniRunError(f"the nodes were given up: {type(self._failure).__name__}: {self._failure}")
        problems = [node.problem for node in self.nodes if node.problem is not None]
        return problems[0] if problems else InfiniRunError("the nodes are not held any more")

    @property
    def is_over(self) -> bool:
        """It has ended, and with it everything on every node."""
        return self._is_over

    def spread(self, number: int, workers: Sequence[RemoteWorker], frame: Sequence[Buffer]) -> None:
        """Send one broadcast to each node, whose workers get the frame after what they were sent before. Wait until
        all of it is on its way."""
        waiting = {worker.number for worker in workers}
        by_node: dict[int, list[RemoteWorker]] = {}
        for worker in workers:
            by_node.setdefault(worker.node.index, []).append(worker)

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
            self.call(partial(send, self.nodes[node], some))
        self.wait(lambda: not waiting or all(self.nodes[node].problem is not None for node in by_node))

    def stop(self) -> None:
        """Let everything on every node end; `join` waits for it."""
        self._is_closing = True
        self.call(self.head.stop)

    def kill(self) -> None:
        """The same by SIGKILL."""
        self._is_closing = True
        self.call(self.head.kill)
        self.call(self.head.limit_reader)

    def join(self) -> None:
        """Until everything has ended, on every node."""
        self._thread.join()

    def after_fork_in_child(self) -> None:
        """In a forked child: all of it is our parent's."""
        if self._is_over:
            return
        self._changed, self._is_in_forked_child, self._is_over = Condition(), True, True
        self._poller.close()
        for node in self.nodes:
            node.streams.after_fork_in_child()
        self.head.after_fork_in_child()
        fd, self._wakeup_fd = self._wakeup_fd, -1
        if fd >= 0:
            os.close(fd)

    # ---- the thread

    def _loop(self) -> None:
        while not self.head.ended:
            self.head.poll(also=(self._poller.fileno(),))
            self._poller.poll(0.0)
            while self._calls:
                self._calls.popleft()()
            self._check_nodes()

    def _run(self) -> None:
        try:
            # a mistake of ours, or no memory: nobody is to wait for ever
            _, self._failure = capture_exception(self._loop)
        finally:
            self._free()

    def _on_wakeup(self) -> None:
        os.eventfd_read(self._wakeup_fd)

    def _on_data(self, peer: RemoteAgent, data: bytes) -> None:
        """What an node sends. Raises LinkError: it makes no sense."""
        node = self.nodes[peer.index]
        try:
            node.streams.feed(data)
        except (KeyError, TypeError, ValueError) as error:
            raise LinkError(f"what its node says is not what infini-run says ({error})") from None
        self.changed()

    def _check_nodes(self) -> None:
        """How far the nodes are."""
        for node in self.nodes:
            peer = node.peer
            if peer.state == "running":
                if not node.is_set_up:
                    node.is_set_up = True
                    node.send_control({"setup": {**self._setup, "node": peer.index}})
                node.streams.set_room(peer.connection is None or peer.connection.has_room)
            elif self.head.awaits_others:
                continue  # then it says why, of all that do not come
            elif peer.is_over and node.problem is None and not peer.is_unexplained:
                node.end(self._why(node))
                self.head.stop()
                self.changed()

    def _why(self, node: RemoteNode) -> InfiniRunError | None:
        """Why there is nothing more to be had of it."""
        peer, error = node.peer, self.head.error
        if isinstance(error, NodeLost) and error.node == peer.index:
            return error
        if self._is_closing:
            return None
        if error is not None and not node.workers:
            return error
        first = None if peer.report is None else peer.report.first_failure
        how = f": what holds its workers ended: {describe_end(first)}" if first is not None else ""
        return NodeLost(f"{peer.title} was lost{how}", peer.name, peer.index)

    def _free(self) -> None:
        if self._is_in_forked_child:
            return
        for node in self.nodes:
            node.end(node.problem or self._why(node))
        self.head.close()
        with self._changed:
            self._is_over = True
            self._calls.clear()
            self._poller.close()
            os.close(self._wakeup_fd)
            self._wakeup_fd = -1
            self._changed.notify_all()


def _in_own_terms(exit_: Exit, clock_s: float, host: str) -> Exit:
    """With its times by our clock, and the name that we know the host by."""
    from infini_run.record import replace

    times = {name: getattr(exit_, name) for name in ("start_s", "ready_s", "end_s")}
    return replace(exit_, host=host, **{name: at + clock_s for name, at in times.items() if at is not None})


def _error_of(problem: Mapping[str, Any], host: str) -> InfiniRunError:
    """The error of what a node could not do."""
    text = f"{host}: {problem['text']}"
    if problem["kind"] == "usage":
        return UsageError(text)
    return StartError(text, str(problem["step"]), int(problem["errno"]), problem["rank"])
