"""The first phase of a launch: the head reaches every node, and each agent gets its options and says HELLO."""

from __future__ import annotations

import os
import time

from infini_run.core.group import forking
from infini_run.errors import InfiniRunError, LinkError, NodeLost, StartError, UsageError
from infini_run.multinode.engines import Contact
from infini_run.multinode.head.agent_state import NOT_READY
from infini_run.multinode.head.rendezvous import join_names, missing_names
from infini_run.multinode.link import message_schema, protocol
from infini_run.multinode.link.agent_options import exported, options_of_agents
from infini_run.multinode.link.clock_offset import clock_question
from infini_run.multinode.link.connection import TOKEN
from infini_run.multinode.link.protocol import pack_json
from infini_run.multinode.link.record_codec import to_jsonable
from infini_run.options.nodes import MANUAL
from infini_run.options.table import HANDED_OUT, HEADS_OWN
from infini_run.record import fields, replace
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Mapping, Sequence

    from infini_run.multinode.engines import EngineCommand
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.engine_processes import EngineProcesses
    from infini_run.multinode.head.head_state import HeadState
    from infini_run.multinode.head.listener import AgentListener, Identity
    from infini_run.multinode.head.node_losses import NodeLosses
    from infini_run.multinode.link.connection import Connection
    from infini_run.options.launch_options import Options

_LEASE = 0.9  # of --node_timeout: the ranks of a node that hears nothing of the head live for this long
_TOKEN_SIZE = 32  # random bytes
_NOTICE_S = 5.0  # between two lines about missing nodes


class JoinPhase:
    """Starts the engine's commands, accepts agents, and waits for their HELLO.

    Args:
        environ: the head's environment; nodes get the variables of it that --export names.
        cwd: absolute path of the directory in which ranks start, on every node.
        has_stream: each node runs one process with a byte stream to the head (byte_stream.py).
        listening: a socket that already listens on the link's port. None: the head opens one if it needs it.
    """

    def __init__(
        self,
        state: HeadState,
        losses: NodeLosses,
        processes: EngineProcesses,
        *,
        environ: Mapping[str, str],
        cwd: str,
        has_stream: bool,
        listening: socket | None = None,
    ) -> None:
        self._state = state
        self._losses = losses
        self._processes = processes
        self._environ = environ
        self._cwd = cwd
        self._has_stream = has_stream
        self._listening = listening
        self._token = environ.get(TOKEN) or os.urandom(_TOKEN_SIZE).hex()
        self._index_of_host = {agent.name: agent.index for agent in state.agents.all if agent.name}
        self._specs: dict[object, bytes] = {}  # SPEC frames, by what differs: ranks, and programs
        self._contact = Contact()
        self._turned_away: set[str] = set()  # lines that were printed
        self._link_address = ""  # a line about the address that other launchers must connect to, if it was given
        now_s = time.monotonic()
        self._join_end_s = now_s + state.options.join_timeout_s
        self._next_notice_s = now_s + _NOTICE_S
        self.listener: AgentListener | None = None

    @property
    def next_deadline_s(self) -> float:
        deadlines = [] if self._state.is_stopping else [self._processes.next_start_s]
        if self.listener is not None:
            deadlines.append(self.listener.next_deadline_s)
        if self._state.is_joining:
            deadlines += [self._join_end_s, self._next_notice_s]
        return min(deadlines, default=float("inf"))

    def postpone(self, by_s: float) -> None:
        """Move the limits by a suspension of this process, in which nobody could join."""
        self._join_end_s += by_s

    # ---- reaching nodes

    def start(self) -> None:
        """Listen, if agents connect, and start the first commands. Raises UsageError, ProgramMissing, StartError."""
        state, agents = self._state, self._state.agents.all
        contact = self._contact = self._listen()
        commands = state.engine.commands([agent.host for agent in agents], state.options, contact, self._environ)
        self._add(commands)
        self._start_commands()

    def _add(self, commands: Sequence[EngineCommand], due_s: float = 0.0) -> None:
        agents = self._state.agents.all
        if self._contact.target and not self._contact.token_file:
            commands = [replace(command, env=(*command.env, (TOKEN, self._token))) for command in commands]
        for command in commands:
            for node in command.nodes or range(len(agents)):
                agents[node].has_command = True
        self._processes.add(commands, due_s)

    def reach_again(self, index: int, due_s: float) -> None:
        """Start the command for a node once more, if the engine has one; not before `due_s` (monotonic)."""
        state, host = self._state, self._state.agents.all[index].host
        if self.listener is not None:
            self.listener.expect(True)
        self._add(state.engine.again_commands(host, index, state.options, self._contact, self._environ), due_s)

    def _listen(self) -> Contact:
        state, engine = self._state, self._state.engine
        if engine.USES_STDIO:
            return Contact()
        from infini_run.multinode.head.listener import AgentListener

        self.listener = AgentListener(
            self._token,
            len(state.agents.all),
            state.poller,
            self._on_authenticated,
            self._on_last_word,
            state.notice,
        )
        target = self.listener.open(state.options.link_port, state.options.link_address, self._listening)
        if state.options.link_address and state.node_list.engine == MANUAL:
            self._link_address = f"node 0 listens on {target}, the others connect to {state.options.master_addr}"
        path = os.path.join(self._cwd, f".infini-run-{state.launch_id}.token") if engine.TOKEN_BY_FILE else ""
        if path:
            self.listener.write_token(path)
        return Contact(target=target, token_file=path)

    def _start_commands(self) -> None:
        with forking:  # a child that is forked meanwhile would keep a connection that no agent has yet
            for command, connection in self._processes.start_due():
                self._attach(self._state.agents.all[command.nodes[0]], connection)

    def _on_authenticated(self, connection: Connection, identity: Identity, address: str) -> None:
        """Accept an agent that connected from `address`, and names its node. Its host's name counts more than the
        number. An engine may number nodes in another order, and rank 0 must be where the others look for it."""
        agents, run_id = self._state.agents.all, self._state.options.run_id
        host, is_other_job = identity.host, identity.run_id not in (None, run_id)
        is_of_another_head = identity.last_job not in ("", self._state.launch_id) and not is_other_job
        if self._state.changes is not None and is_of_another_head:
            self._state.changes.on_earlier_job(identity.last_timeout_s)
        node = identity.node if is_other_job else self._place_of(identity.node, host)
        if 0 <= node < len(agents) and agents[node].state == "connecting" and not is_other_job:
            agents[node].address = address
            self._attach(agents[node], connection)
            return
        if self._state.is_over and self._state.options.is_elastic and not is_other_job:  # it would retry
            connection.send(self._spec(self._state.options.nproc_per_node, self._state.options))
            connection.send(self._state.goodbye)
            connection.close()
            return
        why = f"the nodes are 0 to {len(agents) - 1}"
        if node == HANDED_OUT:
            now_s = time.monotonic()
            kept = join_names([each for each in agents if each.state == "connecting" and now_s < each.kept_end_s])
            why += f"; the place of {kept} is reserved for a moment" if kept else ", and all of them joined"
        if is_other_job:
            why = f"its --rdzv_id is {identity.run_id or 'none'}, that of this job is {run_id or 'none'}: "
            why += "use a different port for each job"
        elif 0 <= node < len(agents):
            first = " at ".join(filter(None, (agents[node].name, agents[node].address)))
            why = f"{first or 'another'} already has that number; use a different --node_rank on every node"
        name = host or "a node" if node == HANDED_OUT else f"node {node}"
        line = f"rejected {address}, which claims to be {name}: {why}"
        if line not in self._turned_away:  # whoever waits for a place retries again and again
            self._turned_away.add(line)
            self._state.notice(line)
        answer: dict[str, object] = {"error": why, "may_return": not is_other_job}
        answer |= {"launch_id": self._state.launch_id, "timeout_s": self._state.options.node_timeout_s}
        connection.send(pack_json(protocol.GOODBYE, answer))
        connection.close()

    def _on_last_word(self, word: bytes) -> None:
        """Act on what anybody has sent: the last word of a node, if its hash is known."""
        from infini_run.multinode.link.last_word import hash_of

        changes, hashed = self._state.changes, hash_of(word)
        if changes is None:
            return
        for agent in (*changes.lost_agents, *self._state.agents.all):
            if agent.last_word_hash == hashed:
                agent.last_word_hash, agent.last_word_s = b"", time.monotonic()
                changes.on_last_word(agent)
                return

    def _place_of(self, node: int, host: str) -> int:
        """Return the index of a node that names `node`, or that leaves it to the head (HANDED_OUT). An earlier agent
        gets its place again."""
        agents = self._state.agents.all
        if self._state.node_list.engine == MANUAL and node != HANDED_OUT:
            return node
        named = self._index_of_host.get(host, self._index_of_host.get(host.partition(".")[0], -1))
        if named >= 0 and agents[named].state == "connecting" and self._state.node_list.engine != MANUAL:
            return named
        if node != HANDED_OUT:
            return node
        self._state.is_handing_out = True
        now_s = time.monotonic()
        found: RemoteAgent | None = None
        for agent in agents:
            if agent.state != "connecting" or agent.has_command:
                continue
            if agent.name == host:
                return agent.index
            if now_s >= agent.kept_end_s and (found is None or (found.name and not agent.name)):
                found = agent
        return HANDED_OUT if found is None else found.index

    def _attach(self, agent: RemoteAgent, connection: Connection) -> None:
        """Give the agent its connection, and send it everything that does not depend on the other nodes."""
        self._state.agents.attach(agent, connection)
        counts = self._state.node_list.counts
        nproc = counts[agent.index] if counts else self._state.options.nproc_per_node
        own = self._state.options
        self._state.agents.send(agent, self._spec(nproc, own.on_node(agent.index) if own.programs else own))
        if self._state.is_over:  # too late for the GOODBYE to all
            self._state.agents.send(agent, self._state.goodbye)

    def _spec(self, nproc: int | str, own: Options) -> bytes:
        """Return the SPEC frame of a node. own: its options, without the ranks of programs that are not there."""
        key = nproc, tuple(each.nproc_per_node for each in own.programs)
        if key not in self._specs:
            self._specs[key] = self._make_spec(nproc, own)
        return self._specs[key]

    def _make_spec(self, nproc: int | str, own: Options) -> bytes:
        workers = self._state.workers if own.is_elastic else None
        options = replace(options_of_agents(own), nproc_per_node=nproc)
        if self._has_stream:
            options = replace(options, console="inherit")
        content = {
            "version": VERSION,
            "is_by_hand": self._state.node_list.engine == MANUAL,
            "silence_s": own.node_timeout_s,
            "lease_s": _LEASE * own.node_timeout_s if own.is_elastic else 0,
            "launch_id": self._state.launch_id,
            "cwd": self._cwd,
            "environ": exported(own.export, self._environ),
            "options": to_jsonable(options),
            "has_stream": self._has_stream,
            "workers": {} if workers is None else {name: getattr(workers, name) for name in fields(workers)},
            "asked": [name for name in HEADS_OWN if getattr(own, name) not in ("", "auto", "off")],
            "names_keywords": self._state.keywords is not None,
            "observe": [] if self._state.observers is None else self._state.observers.wanted,
        }
        return pack_json(protocol.SPEC, content)

    def on_hello(self, agent: RemoteAgent, payload: bytes) -> None:
        """Act on an agent that is ready, refuses, or cannot continue. Raises LinkError."""
        hello = message_schema.read(payload, message_schema.HELLO, message_schema.REFUSAL)
        agents = self._state.agents
        if "error" in hello:
            if self._state.changes is not None and agent.state == "running" and agent.rank_pids:
                raise LinkError(hello["error"])  # its ranks ran, and may live: that is a loss, and has a fence
            kind = UsageError if hello["kind"] == "usage" else InfiniRunError
            error = kind(f"{agent.name or hello['host']}: {hello['error']}")
            error.exit_code = hello["exit_code"]
            agents.set_state(agent, "lost")
            self._losses.on_refusal(agent, error)
            return
        if agent.state != "connected":
            raise LinkError("unexpected message over the link")
        programs = self._state.options.programs
        if len(hello["counts"]) != len(programs) or len(hello["ports"]) != max(1, len(programs)):
            raise LinkError("what came over the link is not what infini-run sends: other programs")
        if programs and sum(hello["counts"]) != hello["nproc"]:
            raise LinkError("what came over the link is not what infini-run sends: other counts")
        agent.hello, agent.free_ports = hello, hello["ports"]
        if not agent.name or self._state.node_list.engine == MANUAL:  # another launcher may have taken the place
            agent.name = hello["host"]
        agents.set_state(agent, "ready")
        agents.send(agent, clock_question())
        if self._state.changes is not None and not self._state.is_over:
            if self._state.changes.has_started:
                self.end()
            self._state.changes.on_ready(agent)

    # ---- waiting

    def run_due(self, now_s: float) -> None:
        """Start commands for which there is room, and drop connections that have proved nothing for too long."""
        if now_s >= self._processes.next_start_s and not self._state.is_stopping:
            try:
                self._start_commands()
            except StartError as error:
                self._state.fail(error)
        if self.listener is not None:
            self.listener.run_due(now_s)

    def wait(self, now_s: float) -> None:
        """Report every few seconds which nodes are not ready, and end the job at --join_timeout."""
        state, counts = self._state, self._state.agents.counts
        agents, missing = state.agents.all, counts.count(*NOT_READY)
        if now_s >= self._join_end_s:
            limit = f"{state.options.join_timeout_s:g} s (--join_timeout)"
            text = f"{missing} of {counts.total} nodes did not join within {limit}: {missing_names(agents)}"
            first = next(agent for agent in agents if agent.is_not_ready)
            state.fail(NodeLost(text, first.name, first.index))
        elif now_s >= self._next_notice_s:
            self._next_notice_s = now_s + _NOTICE_S
            reasons = "; ".join(filter(None, (self._processes.last_stderr_line(), self._link_address)))
            why = f" ({reasons})" if reasons else ""
            state.print(f"waiting for {missing} of {counts.total} nodes: {missing_names(agents)}{why}")

    def end(self) -> None:
        """End the phase: the nodes that run the job have joined. If no other can come the token file goes; after the
        last place, other connections can take their time."""
        if self.listener is not None:
            self.listener.expect(bool(self._state.agents.counts.count("connecting")))
            if not self._state.options.is_elastic:
                self.listener.remove_token()
