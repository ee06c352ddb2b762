"""The control socket of a head: other processes find the launch of many nodes there, and ask for something.

One node has it from the core (csrc/io/control.c); a head has no group that lives as long as itself.
"""

from __future__ import annotations

import time

from infini_run.control.listener import NO_PLACE, ControlListener
from infini_run.multinode.link import protocol
from infini_run.multinode.link.protocol import pack_json
from infini_run.plan.model import about_text, job_in, shown_words
from infini_run.plan.program import PREFIX, folder_bases
from infini_run.system.poller import READ
from infini_run.value_types import MAX_INT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.control.server import Asker, ControlServer
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_followers import HeadFollowers
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.node.control_answers import Notes
    from infini_run.plan.rank_numbers import NodeRanks

_GATHER_S = 15.0  # for stacks of all nodes: py-spy has 10 s on each
_ORDER = {"stacks": "rank", "nodes": "node", "earlier": "rank"}  # by which answers are sorted


class HeadControl:
    """The control socket of a head. Without a folder for it the launch has none.

    Args:
        state: The head's.
        environ: The environment of the head.
        on_stop: Called for --stop, with whether the launch was asked to stop before: then it kills.
    """

    def __init__(self, state: HeadState, environ: Mapping[str, str], on_stop: Callable[[bool], None]) -> None:
        self._state = state
        self._environ = environ
        self._listener = ControlListener()
        self._server: ControlServer | None = None
        self._answers = _HeadAnswers(state, on_stop)

    def open(self) -> None:
        """Listen, in the first place that takes a folder with a socket."""
        bases = folder_bases(self._environ)
        if self._listener.open(f"{base}/{PREFIX}{self._state.launch_id}" for base in bases):
            self._state.poller.watch(self._listener.fileno(), READ, self._on_connect)
        else:
            self._state.notice(NO_PLACE)

    def _on_connect(self) -> None:
        from infini_run.control.server import ControlServer

        for fd in self._listener.greeted(self._about(), self._answers.counts(), self._answers.progress()):
            self._server = self._server or ControlServer(self._answers, self._state.poller)
            self._server.add(fd)

    def _about(self) -> bytes:
        state = self._state
        return about_text(
            launch_id=state.launch_id,
            start_s=state.start_s,
            program=shown_words(state.options),
            nodes=len(state.world),
            node=-1,
            world=state.world_size,
            ranks=(0, max(0, state.world_size - 1)),
            devices=(),
            job=job_in(self._environ),
            restart_s=state.restarts.restart_s,
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
        self._answers.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._listener.fileno() >= 0:
            self._state.poller.unwatch(self._listener.fileno())
        self._listener.close()

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child; the folder is the parent's."""
        if self._server is not None:
            self._server.after_fork_in_child()
            self._server = None
        self._listener.after_fork_in_child()


class _Gathering:
    """A question to several nodes, until all of them answered.

    Args:
        client: Who asks.
        nodes: The nodes, by the indices of their agents.
        kind: What each answer has a list of: stacks, or nodes.
        end_s: When it is given up (time.monotonic()).
        own: What the head itself says.

    Attributes:
        on_node: Called with the ranks of a node when its answer is here. None: not.
    """

    def __init__(
        self, client: Asker, nodes: dict[int, RemoteAgent], kind: str, end_s: float, own: Mapping[str, object]
    ) -> None:
        self.on_node: Callable[[NodeRanks], None] | None = None
        self.client = client
        self.missing = nodes
        self.kind = kind
        self.end_s = end_s
        self.own = own
        self.found: list[Any] = []
        self.problems: list[str] = []

    def add(self, agent: RemoteAgent, answer: dict[str, Any]) -> None:
        """Add the answer of a node, once."""
        if self.missing.pop(agent.index, None) is None:
            return
        if self.on_node is not None:
            self.on_node(agent.ranks)
        found, order = answer.get(self.kind), _ORDER[self.kind]
        if type(found) is list:
            self.found += [each for each in found if type(each) is dict and type(each.get(order)) is int]
        else:
            self.problems.append(f"{agent.title}: {answer.get('error')}")

    def finish(self) -> None:
        """Answer the client, with what came."""
        self.problems += [f"{agent.title}: it did not answer in time" for agent in self.missing.values()]
        self.found.sort(key=lambda each: int(each[_ORDER[self.kind]]))
        self.client.finish({**self.own, self.kind: self.found, "problems": self.problems})


class _HeadAnswers:
    """What a head does about the questions."""

    def __init__(self, state: HeadState, on_stop: Callable[[bool], None]) -> None:
        self._state = state
        self._on_stop = on_stop
        self._followers: HeadFollowers | None = None
        self._gatherings: dict[int, _Gathering] = {}
        self._count = 0
        self._known_notes: Notes | None = None

    @property
    def _notes(self) -> Notes:
        """What others have asked for. Made when somebody asks for something."""
        if self._known_notes is None:
            from infini_run.node.control_answers import Notes

            state = self._state
            self._known_notes = Notes(lambda text, is_kept: state.notice(text) if is_kept else state.print(text))
        return self._known_notes

    def answer(self, client: Asker, request: dict[str, Any]) -> None:
        """Answer a request, as Answers.answer."""
        answers = {
            "stop": self._stop,
            "send": self._send,
            "stacks": self._stacks,
            "facts": self._facts,
            "report": self._report,
            "trace": self._trace,
            "follow": self._add_follower,
            "earlier": self._earlier,
        }
        answers[request["question"]](client, request)

    def _stop(self, client: Asker, request: dict[str, Any]) -> None:
        from infini_run.node.control_answers import stop_text

        is_again, grace_s = bool(self._state.stop_signal), self._state.options.signal_grace_s
        self._notes.add_stop(client)
        self._on_stop(is_again)
        client.finish({"text": stop_text(is_again, grace_s)})

    def _send(self, client: Asker, request: dict[str, Any]) -> None:
        number, ranks = request["signal"], self._ranks(request["ranks"])
        sent = 0
        for agent in self._state.world:
            here = sorted(set(agent.ranks) & ranks)
            if here and agent.state == "running":
                sent += len(here)
                content = {"signal": number, "ranks": here, "by": client.who}
                self._state.agents.send(agent, pack_json(protocol.SIGNAL, content))
        self._notes.answer_send(client, number, sorted(ranks), sent)

    def _add_follower(self, client: Asker, request: dict[str, Any]) -> None:
        from infini_run.control.server import Client
        from infini_run.multinode.head.head_followers import HeadFollowers

        assert isinstance(client, Client)
        self._followers = self._followers or HeadFollowers(self._state)
        here = self._ranks_by_agent(request)
        follower = self._followers.add(client, None if request["ranks"] is None else self._ranks(request["ranks"]))
        if not request["tail"]:
            follower.finish({})
            return
        questions = {agent: {**request, "question": "earlier", "ranks": of} for agent, of in here.items() if of}
        self._gather(follower, "earlier", questions).on_node = follower.note_answered

    def _earlier(self, client: Asker, request: dict[str, Any]) -> None:
        questions = {agent: {**request, "ranks": of} for agent, of in self._ranks_by_agent(request).items() if of}
        self._gather(client, "earlier", questions)

    def _stacks(self, client: Asker, request: dict[str, Any]) -> None:
        here = self._ranks_by_agent(request)
        questions = {agent: {"question": "stacks", "ranks": of} for agent, of in here.items() if of}
        self._gather(client, "stacks", questions)

    def _facts(self, client: Asker, request: dict[str, Any]) -> None:
        here = self._ranks_by_agent(request)
        questions = {agent: {"question": "facts", "ranks": of, "usage": True} for agent, of in here.items()}
        self._gather(client, "nodes", questions, slow=sorted(self._state.pace.slow))

    def _report(self, client: Asker, request: dict[str, Any]) -> None:
        from infini_run.multinode.head.head_report import launch_report

        report = launch_report(self._state).to_json()
        questions = {agent: {"question": "report"} for agent in self._state.world}
        self._gather(client, "nodes", questions, report=report)

    def _trace(self, client: Asker, request: dict[str, Any]) -> None:
        observers = self._state.observers
        client.finish({"trace": None if observers is None else observers.trace_so_far()})

    def _ranks_by_agent(self, request: dict[str, Any]) -> dict[RemoteAgent, list[int]]:
        """Raises UsageError: one of them is not there."""
        ranks = self._ranks(request["ranks"])
        return {agent: sorted(set(agent.ranks) & ranks) for agent in self._state.world}

    def _gather(self, client: Asker, kind: str, questions: Mapping[RemoteAgent, object], **own: object) -> _Gathering:
        """Ask the nodes that run ranks, and answer with what all of them say."""
        nodes = {agent.index: agent for agent in questions if agent.state == "running"}
        self._count = (self._count + 1) % MAX_INT
        gathering = _Gathering(client, nodes, kind, time.monotonic() + _GATHER_S, own)
        self._gatherings[self._count] = gathering
        for agent in nodes.values():
            content = {"number": self._count, "request": questions[agent]}
            self._state.agents.send(agent, pack_json(protocol.QUESTION, content))
        self.run_due(time.monotonic())
        return gathering

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

    def close(self) -> None:
        """Tell who follows the launch that nothing more comes."""
        if self._followers is not None:
            self._followers.end()

    def _ranks(self, asked: Sequence[int | str] | None) -> set[int]:
        """Raises UsageError: one of them is not there."""
        numbers = self._state.numbers
        return set(range(numbers.world_size) if asked is None else map(numbers.number, asked))

    def progress(self) -> int:
        """Return the highest PROGRESS= of a rank, as far as the head knows; -1: no rank has sent it."""
        latest = [value for agent in self._state.world for value, _ in agent.progress.latest.values()]
        return max(latest, default=-1)

    def counts(self) -> dict[str, int]:
        """Return how many ranks are in each state, as far as the head knows."""
        counts: dict[str, int] = {}
        for agent in self._state.world:
            for state, count in _agent_counts(agent).items():
                counts[state] = counts.get(state, 0) + count
        return counts


def _agent_counts(agent: RemoteAgent) -> dict[str, int]:
    if agent.state == "running":
        ready, failed = len(agent.ready_ranks - agent.exited_ranks), len(agent.failed_ranks)
        started = len(agent.rank_pids.keys() - agent.exited_ranks)
        return {
            "waiting": len(agent.ranks) - started - len(agent.exited_ranks),
            "running": started - ready,
            "ready": ready,
            "done": len(agent.exited_ranks) - failed,
            "failed": failed,
        }
    if agent.state == "done" and agent.report is not None:
        failed = sum(exit_.is_failure for exit_ in agent.report.exits)
        return {"failed": failed, "done": len(agent.report.exits) - failed}
    return {"failed" if agent.state == "lost" else "waiting": len(agent.ranks)}
