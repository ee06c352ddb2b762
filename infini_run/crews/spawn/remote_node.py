"""A node with a spawn server, as the NodesThread knows it: its workers, their streams, and what it has said."""

from __future__ import annotations

from _functools import partial

from infini_run.crews.spawn.node_messages import UP, read
from infini_run.crews.spawn.stream_multiplexer import Multiplexer
from infini_run.errors import InfiniRunError, StartError, UsageError
from infini_run.multinode.link.record_codec import decode_record
from infini_run.report.exit import Exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.system.poller import Poller

    class RemoteWorker(Protocol):
        """A worker for the NodesThread, which calls `note` in its thread."""

        number: int
        node: RemoteNode

        def note(self, kind: str, value: object) -> None:
            """Note what happened to it. kind: pid, exit (an Exit), pinged, lost (an error), ended (what is stuck, in
            words), gone (what was stuck)."""


class RemoteNode:
    """A node of one world, as known here.

    Attributes:
        nproc: workers that it would run (0: not known yet).
        port: a free one.
        problem: why it is of no use any more.
        is_refused: it cannot fulfill the request, and so cannot the next one.

    Args:
        peer: its agent.
        world: the number of the world.
        send: sends bytes to its spawn server.
        changed: called when something becomes known that others may wait for.
    """

    def __init__(
        self,
        peer: RemoteAgent,
        world: int,
        poller: Poller,
        send: Callable[[RemoteAgent, bytes], None],
        changed: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.index = peer.index
        self.world = world
        self.nproc = 0
        self.port = 0
        self.notices: tuple[str, ...] = ()
        self.workers: dict[int, RemoteWorker] = {}
        self.answers: dict[int, object] = {}  # to what was asked of it: None, or an error
        self.problem: InfiniRunError | None = None
        self.is_refused = False
        self.is_set_up = False
        self._changed = changed
        self.streams = Multiplexer(poller, partial(send, peer), self._on_control)

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def clock_s(self) -> float:
        """What converts times of its clock to this host's."""
        return -self.peer.clock.offset_s

    def send_control(self, word: Mapping[str, object]) -> None:
        """Send a control message, in the link's thread."""
        self.streams.send_control(word)

    def _on_control(self, word: dict[str, Any]) -> None:
        kind, value = read(word, UP)
        worker = self.workers.get(value.get("worker", 0))
        if kind == "up":
            self.nproc, self.port, self.notices = value["nproc"], value["port"], tuple(value["notices"])
        elif kind == "refused":
            self.problem, self.is_refused = _error_of(value["error"], self.name), True
        elif kind == "answer":
            self.port = value["port"]
            self.answers[value["id"]] = value["error"] and _error_of(value["error"], self.name)
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
        if kind == "gone" or (kind == "ended" and not value):
            self.workers.pop(worker.number, None)
        worker.note(kind, value)
        self._changed()

    def end(self, problem: InfiniRunError | None) -> None:
        """Note the end: nothing more comes from it."""
        self.problem = problem or self.problem or InfiniRunError(f"{self.peer.title} is no longer held")
        workers, self.workers = self.workers, {}
        self.streams.close()
        for worker in workers.values():
            worker.note("lost", self.problem)


class World:
    """The nodes that run workers together, in the order of their node ranks. Each number occurs once.

    Args:
        number: of the world; -1: there was none yet.
        nodes: its nodes.
    """

    def __init__(self, number: int, nodes: Sequence[RemoteNode]) -> None:
        self.number = number
        self.nodes = tuple(nodes)

    @property
    def is_up(self) -> bool:
        """Whether all its nodes can start workers."""
        return bool(self.nodes) and all(node.nproc and node.problem is None for node in self.nodes)

    @property
    def size(self) -> int:
        """How many workers it has, if it is up."""
        return sum(node.nproc for node in self.nodes)


def _in_own_terms(exit_: Exit, clock_s: float, host: str) -> Exit:
    """Return the exit with its times by this host's clock, and the name by which the caller knows the host."""
    from infini_run.record import replace

    times = {name: getattr(exit_, name) for name in ("start_s", "ready_s", "end_s")}
    return replace(exit_, host=host, **{name: at + clock_s for name, at in times.items() if at is not None})


def _error_of(problem: Mapping[str, Any], host: str) -> InfiniRunError:
    """Return the error of a node that could not do something."""
    text = f"{host}: {problem['text']}"
    if problem["is_usage"]:
        return UsageError(text)
    return StartError(text, problem["step"], problem["errno"], problem["rank"])
