"""Between this process and its outposts on other hosts: one thread, which steps the head and moves what there is.

It alone touches the head and the lanes; others ask it (`call`) and wait for what comes of it (`wait`). Each worker is
a life here: a lane for its channel, and what is told of its process, in order with what it has said.
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
from infini_run.report.report import Exit, describe_end
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
        """A worker, as the bridge knows it. What is told comes from the bridge's thread."""

        number: int
        node: RemoteNode

        def note(self, kind: str, value: object) -> None:
            """Note what happened to it. kind: pid, exit (an Exit), pinged, lost (an error), ended."""


_HELD = 1 << 20  # bytes that a node has not taken: then its lanes wait


class RemoteNode:
    """A node, as it is known here. nproc: workers that it would run (0: not known yet). port: one that is free."""

    def __init__(self, bridge: NodeLink, peer: RemoteAgent, poller: Poller) -> None:
        self.peer = peer
        self.index = peer.index
        self.nproc = 0
        self.port = 0
        self.notices: tuple[str, ...] = ()
        self.lives: dict[int, RemoteWorker] = {}
        self.answers: dict[int, object] = {}  # to what was asked of it: None, or an error
        self.problem: InfiniRunError | None = None  # it is of no use any more
        self.has_been_told = False
        self._bridge = bridge
        self.lanes = Multiplexer(poller, lambda data: bridge.head.send_down(peer, data), self._take)

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def clock_s(self) -> float:
        """What makes its clock's times ours."""
        return -self.peer.clock.offset_s

    def say(self, word: Mapping[str, object]) -> None:
        """In the bridge's thread."""
        self.lanes.say(word)

    def _take(self, word: dict[str, Any]) -> None:
        kind, value = word.popitem()
        life = self.lives.get(value["life"]) if "life" in value else None
        if kind == "up":
            self.nproc, self.port, self.notices = int(value["nproc"]), int(value["port"]), tuple(value["notices"])
        elif kind == "refused":
            self.problem = _error_of(value, self.name)
        elif kind == "answer":
            self.port = int(value["port"])
            self.answers[value["id"]] = _error_of(value, self.name) if "text" in value else None
        elif life is not None:
            lane = self.lanes.find(life.number)
            told = partial(self._tell, life, kind, value.get("value"))
            if lane is None or kind in ("pid", "pinged"):
                told()
            else:  # who hears of its end has had what it said before
                lane.when_written(told)

    def _tell(self, life: RemoteWorker, kind: str, value: Any) -> None:
        if kind == "exit":
            value = _ours(decode_record(Exit, value), self.clock_s, self.name)
        if kind == "ended":
            self.lives.pop(life.number, None)
        life.note(kind, value)
        self._bridge.changed()

    def end(self, problem: InfiniRunError | None) -> None:
        """Nothing more comes from it."""
        self.problem = problem or self.problem or InfiniRunError(f"{self.peer.title} is not held any more")
        lives, self.lives = self.lives, {}
        self.lanes.close()
        for life in lives.values():
            life.note("lost", self.problem)


class NodeLink:
    """options, roster: as for a Head. cwd: where the outposts start. setup: what each is told first."""

    def __init__(self, options: Options, roster: NodeList, cwd: str | None, setup: Mapping[str, object]) -> None:
        own = has_own_stderr()
        self.head = Head(
            options, roster, environ=dict(os.environ), say=None if own else print_line, cwd=cwd, hear=self._hear
        )
        self._setup = setup
        self._poller = Poller()
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = Condition()
        self._is_over = self._is_closing = self._is_in_forked_child = False
        self._failure: BaseException | None = None
        self.outposts = [RemoteNode(self, peer, self._poller) for peer in self.head.peers]
        self._thread = JoinableThread(self._run, "infini-run: nodes")

    def start(self) -> None:
        """Begin to reach the nodes. Raises as Head.start: nothing was started."""
        self._poller.watch(self._bell, READ, self._hear_bell)
        try:
            self.head.start()
            self._thread.start()
        except BaseException:
            self._free()
            raise

    # ---- for other threads

    def call(self, what: Callable[[], None]) -> None:
        """Have it done in the bridge's thread, in order; not at all, where that has ended."""
        with self._changed:
            if not self._is_over:
                self._calls.append(what)
                os.eventfd_write(self._bell, 1)

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
        problems = [outpost.problem for outpost in self.outposts if outpost.problem is not None]
        return problems[0] if problems else InfiniRunError("the nodes are not held any more")

    @property
    def is_over(self) -> bool:
        """It has ended, and with it everything on every node."""
        return self._is_over

    def spread(self, number: int, lives: Sequence[RemoteWorker], frame: Sequence[Buffer]) -> None:
        """A gift for each node, from which each of these gets the frame after what it was sent before. Waits until
        all of it is on its way."""
        waiting = {life.number for life in lives}
        by_node: dict[int, list[RemoteWorker]] = {}
        for life in lives:
            by_node.setdefault(life.node.index, []).append(life)

        def give(outpost: RemoteNode, some: list[RemoteWorker]) -> None:
            def use() -> None:
                for life in some:
                    lane = outpost.lanes.find(life.number)
                    if lane is None:
                        waiting.discard(life.number)
                    else:
                        lane.use(number)
                        lane.when_read(partial(waiting.discard, life.number))
                outpost.lanes.when_all_read([life.number for life in some], lambda: end(outpost))

            outpost.lanes.give(number, frame, use)

        def end(outpost: RemoteNode) -> None:
            outpost.say({"given": number})
            self.changed()

        for node, some in by_node.items():
            self.call(partial(give, self.outposts[node], some))
        self.wait(lambda: not waiting or all(self.outposts[node].problem is not None for node in by_node))

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
        for outpost in self.outposts:
            outpost.lanes.after_fork_in_child()
        self.head.after_fork_in_child()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    # ---- the thread

    def _loop(self) -> None:
        while not self.head.ended:
            self.head.step(also=(self._poller.fileno(),))
            self._poller.poll(0.0)
            while self._calls:
                self._calls.popleft()()
            self._look()

    def _run(self) -> None:
        try:
            # a mistake of ours, or no memory: nobody is to wait for ever
            _, self._failure = capture_exception(self._loop)
        finally:
            self._free()

    def _hear_bell(self) -> None:
        os.eventfd_read(self._bell)

    def _hear(self, peer: RemoteAgent, data: bytes) -> None:
        """What an outpost sends. Raises LinkError: it makes no sense."""
        outpost = self.outposts[peer.index]
        try:
            outpost.lanes.feed(data)
        except (KeyError, TypeError, ValueError) as error:
            raise LinkError(f"what its outpost says is not what infini-run says ({error})") from None
        self.changed()

    def _look(self) -> None:
        """How far the nodes are."""
        for outpost in self.outposts:
            peer = outpost.peer
            if peer.state == "running":
                if not outpost.has_been_told:
                    outpost.has_been_told = True
                    outpost.say({"setup": {**self._setup, "node": peer.index}})
                outpost.lanes.set_room(peer.wire is None or peer.wire.waiting < _HELD)
            elif self.head.awaits_others:
                continue  # then it says why, of all that do not come
            elif peer.is_over and outpost.problem is None and not peer.is_unexplained:
                outpost.end(self._why(outpost))
                self.head.stop()
                self.changed()

    def _why(self, outpost: RemoteNode) -> InfiniRunError | None:
        """Why there is nothing more to be had of it."""
        peer, error = outpost.peer, self.head.error
        if isinstance(error, NodeLost) and error.node == peer.index:
            return error
        if self._is_closing:
            return None
        if error is not None and not outpost.lives:
            return error
        first = None if peer.report is None else peer.report.first_failure
        how = f": what holds its workers ended: {describe_end(first)}" if first is not None else ""
        return NodeLost(f"{peer.title} was lost{how}", peer.name, peer.index)

    def _free(self) -> None:
        if self._is_in_forked_child:
            return
        for outpost in self.outposts:
            outpost.end(outpost.problem or self._why(outpost))
        self.head.close()
        with self._changed:
            self._is_over = True
            self._calls.clear()
            self._poller.close()
            os.close(self._bell)
            self._bell = -1
            self._changed.notify_all()


def _ours(exit_: Exit, clock_s: float, host: str) -> Exit:
    """With its times by our clock, and the name that we know the host by."""
    from infini_run.record import replace

    times = {name: getattr(exit_, name) for name in ("start_s", "ready_s", "end_s")}
    return replace(exit_, host=host, **{name: at + clock_s for name, at in times.items() if at is not None})


def _error_of(told: Mapping[str, Any], host: str) -> InfiniRunError:
    """What an outpost could not do."""
    text = f"{host}: {told['text']}"
    if told["kind"] == "usage":
        return UsageError(text)
    return StartError(text, str(told["step"]), int(told["errno"]), told["rank"])
