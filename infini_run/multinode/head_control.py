"""The control socket of a head: other processes find the launch of many nodes there, and ask for something.

One node has it from the core (csrc/io/control.c); a head has no group that lives as long as itself.
"""

from __future__ import annotations

import os
import time
from _socket import AF_UNIX, MSG_DONTWAIT, MSG_NOSIGNAL, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket
from fcntl import LOCK_NB, LOCK_SH, flock

from infini_run.control.launch_facts import ABOUT, COUNTS, pack_counts
from infini_run.control.server import UCRED, ControlServer
from infini_run.errors import UsageError
from infini_run.multinode import protocol
from infini_run.multinode.protocol import pack, pack_json
from infini_run.node.control_answers import Notes, stop_text
from infini_run.plan.model import about_text, control_address, job_in
from infini_run.plan.program import PREFIX, folder_bases
from infini_run.system.poller import READ
from infini_run.system.signal_numbers import SIGTERM
from infini_run.value_types import MAX_INT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.control.server import Asker
    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.multinode.head_state import HeadState

_BACKLOG = 64
_GATHER_S = 15.0  # for stacks of all nodes: py-spy has 10 s on each
_TURN = 16  # connections that are taken at a time


class HeadControl:
    """The control socket of a head. Without a folder for it the launch has none.

    Args:
        state: The head's.
        environ: The environment of the head.
        on_stop: Called with a signal that stops the launch.
    """

    def __init__(self, state: HeadState, environ: Mapping[str, str], on_stop: Callable[[int], None]) -> None:
        self._state = state
        self._environ = environ
        self._folder = ""
        self._lock_fd = -1
        self._socket: socket | None = None
        self._server: ControlServer | None = None
        self._answers = _HeadAnswers(state, on_stop)

    def open(self) -> None:
        """Listen, in the first place that takes a folder with a socket."""
        for base in folder_bases(self._environ):
            self._folder = f"{base}/{PREFIX}{self._state.launch_id}"
            if (address := control_address(self._folder)) and self._listen(address):
                return
            self.close()

    def _listen(self, address: str) -> bool:
        try:
            os.mkdir(self._folder, 0o700)
        except OSError:
            self._folder = ""  # there is one already: of an agent on this machine, or a stranger's
            return False
        try:
            os.chmod(self._folder, 0o700)
            self._lock_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            flock(self._lock_fd, LOCK_SH | LOCK_NB)  # a folder that nobody holds may be removed
            self._socket = socket(AF_UNIX, SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.bind(address)
            os.chmod(address, 0o600)
            self._socket.listen(_BACKLOG)
        except OSError:
            return False
        self._state.poller.watch(self._socket.fileno(), READ, self._on_connect)
        return True

    def _on_connect(self) -> None:
        assert self._socket is not None
        for _ in range(_TURN):
            try:
                fd, _ = self._socket._accept()  # type: ignore[attr-defined]
            except OSError:
                return
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
            if self._greet(fd):
                self._server = self._server or ControlServer(self._answers, self._state.poller)
                self._server.add(fd)

    def _greet(self, fd: int) -> bool:
        """Greet a connection of this user or of root with the facts of the launch, and close any other. Return
        whether it stays."""
        client = socket(fileno=fd)
        try:
            uid = UCRED.unpack(client.getsockopt(SOL_SOCKET, SO_PEERCRED, UCRED.size))[1]
            data = pack(ABOUT, self._about()) + pack(COUNTS, pack_counts(self._answers.counts()))
            if uid in (0, os.geteuid()) and client.send(data, MSG_DONTWAIT | MSG_NOSIGNAL) == len(data):
                client.detach()
                return True
        except OSError:
            pass
        client.close()
        return False

    def _about(self) -> bytes:
        state = self._state
        return about_text(
            launch_id=state.launch_id,
            start_s=state.start_s,
            program=state.options.program,
            nodes=len(state.world),
            node=-1,
            world=state.world_size,
            ranks=(0, max(0, state.world_size - 1)),
            devices=(),
            job=job_in(self._environ),
        )

    @property
    def next_deadline_s(self) -> float:
        """When `run_due` has something to do: time.monotonic()."""
        return self._answers.next_deadline_s

    def on_answered(self, agent: RemoteAgent, number: int, answer: dict[str, Any]) -> None:
        """Use the answer of a node's agent."""
        self._answers.on_answered(agent, number, answer)

    def run_due(self, now_s: float) -> None:
        """Answer clients for whom every node answered, or whose time is up."""
        self._answers.run_due(now_s)

    def close(self) -> None:
        """End every connection, and remove the folder. Safe twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        ours, self._socket = self._socket, None
        if ours is not None:
            self._state.poller.unwatch(ours.fileno())
            ours.close()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
        folder, self._folder = self._folder, ""
        if folder:
            for remove, path in ((os.unlink, control_address(folder)), (os.rmdir, folder)):
                try:  # noqa: SIM105  contextlib is slow to import
                    remove(path)
                except OSError:  # somebody has removed it, or holds something in it
                    pass

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child; the folder is the parent's."""
        self._folder = ""
        if self._server is not None:
            self._server.after_fork_in_child()
            self._server = None
        ours, self._socket = self._socket, None
        if ours is not None:
            ours.close()
        self.close()


class _Gathering:
    """A question to several nodes, until all of them answered."""

    def __init__(self, client: Asker, nodes: dict[int, RemoteAgent], end_s: float) -> None:
        self.client = client
        self.missing = nodes
        self.end_s = end_s
        self.stacks: list[Any] = []
        self.problems: list[str] = []

    def add(self, agent: RemoteAgent, answer: dict[str, Any]) -> None:
        """Add the answer of a node, once."""
        if self.missing.pop(agent.index, None) is None:
            return
        stacks = answer.get("stacks")
        if type(stacks) is list:
            self.stacks += [stack for stack in stacks if type(stack) is dict and type(stack.get("rank")) is int]
        else:
            self.problems.append(f"{agent.title}: {answer.get('error')}")

    def finish(self) -> None:
        """Answer the client, with what came."""
        self.problems += [f"{agent.title}: it did not answer in time" for agent in self.missing.values()]
        self.stacks.sort(key=lambda stack: int(stack["rank"]))
        self.client.finish({"stacks": self.stacks, "problems": self.problems})


class _HeadAnswers:
    """What a head does about the questions."""

    def __init__(self, state: HeadState, on_stop: Callable[[int], None]) -> None:
        self._state = state
        self._on_stop = on_stop
        self._gatherings: dict[int, _Gathering] = {}
        self._count = 0
        self._notes = Notes(lambda text, is_kept: state.notice(text) if is_kept else state.print(text))

    def answer(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request, as Answers.answer."""
        answers = {"stop": self._stop, "send": self._send, "stacks": self._stacks}
        answers[request["question"]](client, request)

    def _stop(self, client: Asker, request: dict[str, Any]) -> None:
        is_again, grace_s = bool(self._state.stop_signal), self._state.options.signal_grace_s
        self._notes.add_stop(client)
        self._on_stop(SIGTERM)
        client.finish({"text": stop_text(is_again, grace_s)})

    def _send(self, client: Asker, request: dict[str, Any]) -> None:
        number, ranks = request["signal"], self._ranks(request["ranks"])
        sent = 0
        for agent in self._state.world:
            here = sorted(set(agent.ranks) & ranks)
            if here and agent.state == "running":
                sent += len(here)
                self._state.agents.send(agent, pack_json(protocol.SIGNAL, {"signal": number, "ranks": here}))
        self._notes.answer_send(client, number, sorted(ranks), sent)

    def _stacks(self, client: Asker, request: dict[str, Any]) -> None:
        ranks = self._ranks(request["ranks"])
        here = {agent: sorted(set(agent.ranks) & ranks) for agent in self._state.world if agent.state == "running"}
        nodes = {agent.index: agent for agent in here if here[agent]}
        self._count = (self._count + 1) % MAX_INT
        self._gatherings[self._count] = _Gathering(client, nodes, time.monotonic() + _GATHER_S)
        for agent in nodes.values():
            question = {"question": "stacks", "ranks": here[agent]}
            content = {"number": self._count, "request": question}
            self._state.agents.send(agent, pack_json(protocol.QUESTION, content))
        self.run_due(time.monotonic())

    def on_answered(self, agent: RemoteAgent, number: int, answer: dict[str, Any]) -> None:
        """Use the answer of a node's agent; one that comes too late has no use."""
        if number in self._gatherings:
            self._gatherings[number].add(agent, answer)
            self.run_due(time.monotonic())

    @property
    def next_deadline_s(self) -> float:
        """When the first of the questions to nodes is given up."""
        return min((gathering.end_s for gathering in self._gatherings.values()), default=float("inf"))

    def run_due(self, now_s: float) -> None:
        """Answer clients for whom every node answered, or whose time is up."""
        for number, gathering in list(self._gatherings.items()):
            if not gathering.missing or now_s >= gathering.end_s:
                del self._gatherings[number]
                gathering.finish()

    def _ranks(self, asked: Sequence[int] | None) -> set[int]:
        """Raises UsageError: one of them is not there."""
        world = range(self._state.world_size)
        unknown = sorted(rank for rank in asked or () if rank not in world)
        if unknown:
            raise UsageError(f"unknown rank {unknown[0]}; use ranks 0 to {len(world) - 1}")
        return set(world if asked is None else asked)

    def counts(self) -> dict[str, int]:
        """Return how many ranks are in each state, as far as the head knows."""
        counts: dict[str, int] = {}
        for agent in self._state.world:
            for state, count in _agent_counts(agent).items():
                counts[state] = counts.get(state, 0) + count
        return counts


def _agent_counts(agent: RemoteAgent) -> dict[str, int]:
    if agent.state == "running":
        return {"running": len(agent.ranks)}
    if agent.state == "done" and agent.report is not None:
        failed = sum(exit_.is_failure for exit_ in agent.report.exits)
        return {"failed": failed, "done": len(agent.report.exits) - failed}
    return {"failed" if agent.state == "lost" else "waiting": len(agent.ranks)}
