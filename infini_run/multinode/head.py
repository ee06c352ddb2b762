"""The head: reaches every node through an engine, and makes many nodes' launches one.

It holds a Link to the agent on each node, and acts: when all have come they start, when one fails the others stop,
when one is lost or silent the job ends. What ranks write comes out here in whole lines. It takes no signal itself:
who owns the process tells it.
"""

from __future__ import annotations

import os
import time
from _signal import SIGCONT, SIGTSTP  # the C module: `signal` imports enum

from infini_run.core.group import forking
from infini_run.errors import InfiniRunError, LinkError, NodeLost, StartError, UsageError, printable
from infini_run.multinode import message_schema, protocol
from infini_run.multinode.agent_options import exported, options_of_agents
from infini_run.multinode.agent_set import AgentSet
from infini_run.multinode.agent_state import NEW, OVER, STATES
from infini_run.multinode.clock_offset import Absence, ask
from infini_run.multinode.connection import TOKEN
from infini_run.multinode.engine_processes import EngineProcesses
from infini_run.multinode.engines import Contact, find_engine
from infini_run.multinode.output import ConsoleWriters
from infini_run.multinode.protocol import pack, pack_json, unpack_json
from infini_run.multinode.record_codec import decode_record, to_jsonable
from infini_run.multinode.rendezvous import (
    address_warning,
    count_ranks,
    explain_missed,
    join_names,
    missing_names,
    rendezvous_address,
    unlike,
)
from infini_run.multinode.stdin_forwarder import StdinForwarder
from infini_run.options.nodes import HEADS_OWN, MANUAL, NodeList
from infini_run.plan.model import spans_of
from infini_run.plan.program import new_launch_id
from infini_run.plan.restart_policy import RestartState
from infini_run.record import replace
from infini_run.report.merge import lost_report, merge_reports
from infini_run.report.report import Report, duration_text, signal_name
from infini_run.system.addresses import read_hosts
from infini_run.system.poller import READ, Poller
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.multinode.connection import Connection
    from infini_run.multinode.engine_processes import Ended
    from infini_run.multinode.head_observers import HeadObservers
    from infini_run.multinode.listener import AgentListener
    from infini_run.options.options import Options

_TOKEN_SIZE = 32  # random bytes
_BEATS = 3  # within the time after which a silent node is lost
_SAY_MISSING_S = 5.0
_MISS_S = 2.0  # for others, after one node that does not come
_END_S = 5.0  # for commands to end whose agents have said all
_READER_S = 1.0  # after a stop from outside, for who does not read
_ECHO_S = 0.2  # in which TERM again is the same request: timeout(1) sends it to the process, and then to its group
_SPARE_S = 15.0  # beyond the graces: what a node may take for its own bounds
_AWAY = 10  # a gap of this part of --node_timeout is our own absence, less is how any machine is
_INT, _QUIT = 2, 3
_DUE = {protocol.HELLO: ("greeted", "joined", "running"), protocol.EVENT: ("running",), protocol.DONE: ("running",)}
_DUE[protocol.STREAM_UP] = _DUE[protocol.VIEW] = ("running",)


class Head:
    """A launch on many nodes: start, `step` until `ended`, `close`; then `report` and `error` tell how it went.

    environ: ours, of which the nodes get what --export names. cwd: where the ranks start (None: here), on every node.
    say: gets lines for the user; None: they go to our stderr, as those of the nodes do. hear: gets what each node's
    one rank writes to its descriptor 0, which is a socket then, and to which `send_down` writes (byte_stream.py); its
    output is labelled by itself. overview: is told what all nodes tell of their ranks; its owner closes it.
    """

    def __init__(
        self,
        options: Options,
        roster: NodeList,
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None] | None = None,
        cwd: str | None = None,
        hear: Callable[[RemoteAgent, bytes], None] | None = None,
        overview: HeadObservers | None = None,
    ) -> None:
        self._options = options
        self._overview = overview
        self._roster = roster
        self._hear = hear
        self._engine = engine = find_engine(roster.engine)
        self._environ = environ
        self._say_line = self._write_line if say is None else say
        self._cwd = os.getcwd() if cwd is None else os.path.abspath(cwd)
        self._token = environ.get(TOKEN) or os.urandom(_TOKEN_SIZE).hex()
        self.launch_id = new_launch_id()
        self.error: InfiniRunError | None = None  # why the job ended, where it was not a rank
        self.ended = False
        self._told = 0
        self._told_s = 0.0
        self._told_here = False
        self._notices: list[str] = []
        self._start_s = time.time()
        self._world_size = 0
        self._poller = Poller()
        self._clients = EngineProcesses(engine, environ, len(roster.hosts), self._poller)
        self._fleet = AgentSet(
            roster.hosts, self._poller, take=self._take, lose=self._lose, heard=self._clients.reached
        )
        self.peers = self._fleet.peers
        self._by_host = {peer.name: peer.index for peer in self.peers if peer.name}
        self._lobby: AgentListener | None = None
        self._outlets = ConsoleWriters(self._poller)
        self._feed = StdinForwarder(options.stdin, self._fleet, self._poller)
        self._specs: dict[int | str, bytes] = {}
        now_s = time.monotonic()
        self._join_end_s = now_s + options.join_timeout_s
        self._next_said_s = now_s + _SAY_MISSING_S
        self._next_beat_s = now_s
        self._listening = ""  # by hand, on one address: which one that is, and which one is dialled
        self._stopping = False
        self._stop_end_s = self._end_s = self._reader_end_s = float("inf")
        self._is_reader_limited = False
        self._is_last_resort = False
        self._engine_end: Ended | None = None  # of one command for all nodes, where it ended before they were over
        self._stops_for_engine = False
        self._missed: list[tuple[RemoteAgent, InfiniRunError]] = []  # nodes that do not come, and why
        self._miss_end_s = float("inf")
        self._repeats = RestartState(options)
        self._absence = Absence(options.node_timeout_s * (1 - 1 / _BEATS))  # then agents may have given us up

    # ---- starting

    def start(self) -> None:
        """Begin to reach the nodes. Raises UsageError, ProgramMissing or StartError: nothing was started."""
        try:
            contact = self._open_link()
            clients = self._engine.clients([peer.host for peer in self.peers], self._options, contact, self._environ)
            if contact.target and not contact.token_file:
                clients = [replace(client, env=(*client.env, (TOKEN, self._token))) for client in clients]
            for node in {node for client in clients for node in client.nodes or range(len(self.peers))}:
                self.peers[node].has_command = True
            self._clients.add(clients)
            self._start_clients()
        except BaseException:
            self.close()
            raise

    def _open_link(self) -> Contact:
        """Where agents are to dial, the port they do so on, and the file with the token."""
        if self._engine.OVER_STDIO:
            return Contact()
        from infini_run.multinode.listener import AgentListener

        self._lobby = AgentListener(self._token, len(self.peers), self._poller, self._admit, self._notice)
        target = self._lobby.open(self._options.link_port, self._options.link_address)
        if self._options.link_address and self._roster.engine == MANUAL:
            self._listening = f"node 0 listens on {target}, the others dial {self._options.master_addr}"
        path = os.path.join(self._cwd, f".infini-run-{self.launch_id}.token") if self._engine.TOKEN_BY_FILE else ""
        if path:
            self._lobby.write_token(path)
        return Contact(target=target, token_file=path)

    def _start_clients(self) -> None:
        with forking:  # until a wire is a peer's, a child that is forked meanwhile would not let go of it
            for client, wire in self._clients.start_due():
                self._adopt(self.peers[client.nodes[0]], wire)

    def _adopt(self, peer: RemoteAgent, wire: Connection) -> None:
        """This wire is that node's: tell it all but who else there is."""
        self._fleet.adopt(peer, wire)
        counts = self._roster.counts
        nproc = counts[peer.index] if counts else self._options.nproc_per_node
        if nproc not in self._specs:
            self._specs[nproc] = self._make_spec(nproc)
        self._fleet.send(peer, self._specs[nproc])

    def _make_spec(self, nproc: int | str) -> bytes:
        options = replace(options_of_agents(self._options), nproc_per_node=nproc)
        if self._hear is not None:
            options = replace(options, console="inherit")
        content = {
            "version": VERSION,
            "is_by_hand": self._roster.engine == MANUAL,
            "silence_s": self._options.node_timeout_s,
            "cwd": self._cwd,
            "environ": exported(self._options.export, self._environ),
            "options": to_jsonable(options),
            "has_stream": self._hear is not None,
            "asked": [name for name in HEADS_OWN if getattr(self._options, name) not in ("", "auto", "off")],
            "watch": [] if self._overview is None else self._overview.wants,
        }
        return pack_json(protocol.SPEC, content)

    def _admit(self, wire: Connection, node: int, host: str, address: str) -> None:
        """It is ours, and says which node it is. Its name is surer than its number: an engine may have an order of
        its own, and rank 0 is to be where the others look for it."""
        known = self._by_host.get(host, self._by_host.get(host.partition(".")[0], -1))
        if known >= 0 and self.peers[known].state == "starting":
            node = known
        if 0 <= node < len(self.peers) and self.peers[node].state == "starting":
            self.peers[node].address = address
            self._adopt(self.peers[node], wire)
            return
        why = f"there are nodes 0 to {len(self.peers) - 1}"
        if 0 <= node < len(self.peers):
            peer = self.peers[node]
            first = " at ".join(filter(None, (peer.name, peer.address)))
            why = f"{first or 'another'} is that one already: give every node a --node_rank of its own"
        self._notice(f"{address} says that it is node {node}, and was turned away: {why}")
        wire.send(pack_json(protocol.GOODBYE, {"error": why}))
        wire.close()

    # ---- the loop

    def step(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> None:
        """Wait for something to do, at most `timeout_s`, or until a descriptor of `also` can be read; then do it."""
        for fd in also:
            self._poller.watch(fd, READ, _nothing)
        wait_s = self._timeout_s(timeout_s)
        self._poller.poll(wait_s)
        self._excuse(self._absence.note(0.0 if wait_s is None else wait_s))
        for ended in self._clients.take_ended():
            self._bury(ended)
        for node in self._clients.take_killed():
            self._notice(f"{self.peers[node].title}: its agent did not answer, and was killed there with its ranks")
        self._act(time.monotonic())
        problem = self._outlets.take_problem()
        if problem:
            self._notice(f"the console takes no more output ({problem}); the job goes on")
        self._fleet.hold(self._outlets.are_behind)  # our own reader is behind: then nobody is listened to
        self._feed.turn()
        if self._overview is not None:
            self._overview.act()
            for peer, ranks in self._overview.questions():
                self._fleet.send(peer, pack_json(protocol.LOOK, {"ranks": ranks}))

    def _timeout_s(self, asked_s: float | None) -> float | None:
        due = [
            self._repeats.due_s,
            self._next_beat_s,
            self._stop_end_s,
            self._reader_end_s,
            self._clients.next_start_s,
        ]
        if self._lobby is not None:
            due.append(self._lobby.next_end_s)
        if self._is_joining:
            due += [self._join_end_s, self._next_said_s, self._miss_end_s]
        if self._end_s != float("inf"):
            due.append(self._end_s if self._clients.are_alive else self._next_said_s)
        if self._feed.is_due:
            due.append(0.0)
        if self._overview is not None:
            due.append(time.monotonic() + self._overview.timeout_s())
        wait_s = max(0.0, min(due) - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    @property
    def _is_joining(self) -> bool:
        return not self._stopping and self._fleet.census.count(*NEW) > 0

    # ---- what nodes say

    def _take(self, peer: RemoteAgent, kind: bytes, payload: bytes) -> None:
        if peer.state not in _DUE.get(kind, STATES):
            raise LinkError("what came over the link was not due")
        if kind in (protocol.OUT, protocol.ERR):
            self._show(kind, peer.lines[kind].feed(payload))
        elif kind == protocol.HELLO:
            self._greet(peer, message_schema.read(payload, message_schema.HELLO, message_schema.REFUSAL))
        elif kind == protocol.EVENT:
            self._note(
                peer,
                message_schema.read(
                    payload, message_schema.STARTED, message_schema.READY, message_schema.FAILED, message_schema.TOLD
                ),
            )
        elif kind == protocol.HEARTBEAT and payload:
            peer.clock.take(message_schema.read(payload, message_schema.ANSWER))
            if peer.clock.asks_again():
                self._ask(peer)
        elif kind == protocol.VIEW and self._overview is not None:
            self._overview.take(peer, unpack_json(payload))
        elif kind == protocol.STREAM_UP and self._hear is not None:
            self._hear(peer, payload)
        elif kind == protocol.DONE:
            self._finish(peer, message_schema.read(payload, message_schema.DONE))

    def _show(self, kind: bytes, lines: bytes) -> None:
        """On our stdout or stderr; above the table, where there is one."""
        if lines and self._overview is not None and self._overview.say(lines.decode("utf-8", "replace")):
            return
        self._outlets.write(kind, lines)

    def _say(self, text: str) -> None:
        if self._overview is None or not self._overview.say(f"infini-run: {printable(text)}"):
            self._say_line(text)

    def _greet(self, peer: RemoteAgent, hello: dict[str, Any]) -> None:
        if "error" not in hello and peer.state != "greeted":
            raise LinkError("what came over the link was not due")
        if "error" not in hello:
            peer.hello, peer.port = hello, hello["port"]
            self._fleet.move(peer, "joined")
            peer.name = peer.name or hello["host"]
            self._ask(peer)
            return
        error = (UsageError if hello["kind"] == "usage" else InfiniRunError)(
            f"{peer.name or hello['host']}: {hello['error']}"
        )
        error.exit_code = hello["exit_code"]
        self._fleet.move(peer, "lost")
        self._miss(peer, error)

    def _ask(self, peer: RemoteAgent) -> None:
        """What its clocks show; its answer is a sign of life, too."""
        self._fleet.send(peer, pack_json(protocol.HEARTBEAT, ask()))

    def _ask_all(self) -> None:
        """A rank has failed: a node that answers was there then, and one that does not may be the reason."""
        for peer in self.peers:
            if peer.state == "running":
                self._ask(peer)

    def _note(self, peer: RemoteAgent, event: dict[str, Any]) -> None:
        if "started" in event:
            peer.pids[event["started"]] = event["pid"]
        elif "failed" in event:
            is_first = all(each.failed_s == float("inf") for each in self.peers)
            peer.failed_s = min(peer.failed_s, time.monotonic() - event["age_ns"] / 1e9)
            if is_first:
                self._ask_all()
            if not self._options.keep_going:
                self.stop()
        elif "told" in event:
            self.tell(event["told"], by=peer.name)

    def _finish(self, peer: RemoteAgent, done: dict[str, Any]) -> None:
        peer.report = peer.clock.by_ours(decode_record(Report, done["report"]))
        peer.port = done["port"]
        self._fleet.move(peer, "done")
        for kind, lines in peer.lines.items():
            self._show(kind, lines.end())

    def _bury(self, ended: Ended) -> None:
        """A command has ended: its nodes are lost unless they have said all, or unless it is tried again. One for all
        nodes ends when any of them is lost: which one that is, their links know."""
        peers = [self.peers[node] for node in ended.client.nodes or range(len(self.peers))]
        for peer in peers:
            if self._engine.OVER_STDIO:
                self._fleet.hear_out(peer)  # what it said before the end
        for peer in peers:
            if peer.state == "done" or (peer.state == "lost" and not peer.is_unexplained):
                continue
            if len(peers) > 1 and not peer.is_new:
                self._engine_end = ended
                continue
            if peer.is_new and not self._stopping and self._clients.retry(ended):
                self._fleet.part(peer)
                self._fleet.move(peer, "starting")
                continue
            if peer.is_new and self._stopping:  # killed by us, or of no interest any more
                self._fleet.move(peer, "lost")
                continue
            noise = "" if peer.wire is None else peer.wire.noise
            name = "" if peer.is_new and not self._engine.OVER_STDIO else peer.name  # then its agent's words count
            self._lose(peer, self._engine.explain(name, ended.code, f"{noise}\n{ended.words}"))
        if self._engine_end is not None and not self._stopping:
            self._stops_for_engine = True
            self.stop()
        self._explain()

    def _explain(self) -> None:
        """What the engine's one command said at its end, to what our links know. Nodes that went together are told
        together: the engine ends them all, and may be faster than the news of the first."""
        if self._engine_end is None or self._told:
            return
        lost = sorted((peer for peer in self.peers if peer.is_unexplained), key=lambda peer: peer.failed_s)
        about = lost[0].name if len(lost) == 1 and lost[0].was_running else ""
        text = self._engine.explain(about, self._engine_end.code, self._engine_end.words)
        if lost and isinstance(self.error, NodeLost) and self.error.node == lost[0].index:
            others = f", and with it {join_names(lost[1:])}" if lost[1:] else ""
            lost[0].loss = f"{lost[0].title} was lost{others}: {text}"
            self.error = NodeLost(lost[0].loss, lost[0].name, lost[0].index)
        elif self._stops_for_engine and self.error is None and not lost and self._fleet.census.count("running") == 0:
            self.error = InfiniRunError(text)

    # ---- acting

    def _lose(self, peer: RemoteAgent, reason: str) -> None:
        """It has gone: its ranks are lost, and so is the job."""
        if peer.state == "done" and not self._repeats.is_waiting:  # it has said all that matters
            self._fleet.part(peer)
            return
        was_running = peer.state in ("running", "done") or peer.was_running
        peer.was_running = was_running
        self._fleet.part(peer)
        what = "was lost" if was_running else "could not be reached"
        text = f"{peer.title} {what}" + (f": {reason}" if reason else "")
        error: InfiniRunError = NodeLost(text, peer.name, peer.index)
        limit_s = self._options.node_timeout_s
        if was_running and self._absence.was_away(limit_s):
            away = duration_text(self._absence.away_s)
            error = InfiniRunError(
                f"infini-run itself was stopped for {away}, or its machine slept: the nodes heard nothing of it for "
                f"{limit_s:g} s (--node_timeout), and have ended their ranks"
            )
        is_same = isinstance(self.error, NodeLost) and self.error.node == peer.index
        was_new = peer.is_new
        peer.is_unexplained = not reason
        self._fleet.move(peer, "lost")
        peer.failed_s = min(peer.failed_s, time.monotonic())
        peer.loss = text if was_running else ""
        if self._overview is not None:
            self._overview.lose(peer, text)
        if was_new:
            self._miss(peer, error)
            return
        if is_same:
            self.error = error
        self._fail(error)

    def _miss(self, peer: RemoteAgent, error: InfiniRunError) -> None:
        """It does not come, before anything has begun. Where each node has a command of its own, others may not come
        either: they are told of together."""
        if self._engine.WINDOW == 1 or self._stopping:
            self._fail(error)
            return
        self._missed.append((peer, error))
        self._miss_end_s = min(self._miss_end_s, time.monotonic() + _MISS_S)

    @property
    def awaits_others(self) -> bool:
        """Nodes that do not come are known, and there may be more: the job ends when they have been heard of."""
        return bool(self._missed) and not self._stopping

    def _fail(self, error: InfiniRunError) -> None:
        if self.error is None and not self._told:
            self.error = error
        self.stop()

    def stop(self, number: int = 0, *, is_told: bool = False) -> None:
        """Begin to stop every node, where something still runs. is_told: a signal from outside asked for it."""
        if self._stopping:
            return
        self._stopping = True
        grace_s = self._options.signal_grace_s if is_told else self._options.grace_s
        graces = 1 if is_told else 2  # of who was told, ranks and strays share one
        self._stop_end_s = time.monotonic() + graces * grace_s + _SPARE_S
        self._fleet.send_all(pack_json(protocol.STOP, {"signal": number, "is_told": is_told}), "running")
        if self._overview is not None:
            self._overview.stop()

    def kill(self) -> None:
        """SIGKILL to every rank of every node."""
        self.stop()
        self._fleet.send_all(pack(protocol.KILL))

    def signal(self, number: int) -> None:
        """Pass a signal on to every rank."""
        if self._overview is not None:
            self._overview.note_signal(number)
        self._fleet.send_all(pack_json(protocol.SIGNAL, {"signal": number}), "running")

    def send_down(self, peer: RemoteAgent, data: bytes) -> None:
        """To descriptor 0 of what runs there; empty: no more comes."""
        if peer.state == "running":
            self._fleet.send(peer, pack(protocol.STREAM_DOWN, data))

    def tell(self, number: int, by: str = "") -> None:
        """We, or the agent on a node, were told to stop by a signal: the first time gently, the second time not. A
        scheduler that ends a job tells every agent, and us: for us that is the first time."""
        is_engine_gone = self._stops_for_engine or any(peer.is_unexplained for peer in self.peers)
        if by and is_engine_gone and not self._engine.OVER_STDIO:
            return  # an engine that lost a node ends all that it has started
        about = self._engine.blames(self._clients.said()) if by and not self._told else ""
        if about:
            self._fail(InfiniRunError(f"an agent has ended, and all others with it: {about}"))
            return
        is_echo = number == self._told and time.monotonic() - self._told_s < _ECHO_S
        if is_echo and not by and number not in (_INT, _QUIT):
            return
        name, where = signal_name(number), f" on {by}" if by else ""
        was_told, self._told_here = self._told_here, self._told_here or not by
        if not self._told:
            self._told, self._told_s = number, time.monotonic()
            if self._overview is not None:
                self._overview.note(f"told {name}{where}")
            grace_s = self._options.grace_s if self._stopping else self._options.signal_grace_s
            self._say(f"{name}{where}: stopping; SIGKILL in {grace_s:g} s, or at once when told again")
            self.stop(number if number in (_INT, _QUIT) else 0, is_told=True)
            self.limit_reader()
        elif was_told and not by:
            self._reader_end_s = time.monotonic()
            self._say(f"{name} again: killing what is left")
            self.kill()

    def _write_line(self, text: str) -> None:
        self._outlets.write(protocol.ERR, os.fsencode(f"infini-run: {printable(text)}\n"))

    def limit_reader(self) -> None:
        """A stop was asked for: who does not read our output has a second."""
        self._reader_end_s, self._is_reader_limited = time.monotonic() + _READER_S, True

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        self._say(text)

    def _act(self, now_s: float) -> None:
        if now_s >= self._clients.next_start_s and not self._stopping:
            try:
                self._start_clients()
            except StartError as error:
                self._fail(error)
        if self._lobby is not None:
            self._lobby.expire(now_s)
        has_come = self._fleet.census.count("joined") == self._fleet.census.total
        if not self._stopping and (has_come or now_s >= self._repeats.due_s):
            self._go()
        elif self.awaits_others and (not self._is_joining or now_s >= self._miss_end_s):
            self._fail(explain_missed(self._missed, self.peers))
        elif self._is_joining:
            self._wait_for_nodes(now_s)
        if now_s >= self._next_beat_s:
            self._beat(now_s)
        if now_s >= self._reader_end_s:
            self._reader_end_s = float("inf")
            if self._outlets.give_up():
                self._notice("nobody reads our output: what was still to come is lost")
        if now_s >= self._stop_end_s:
            for peer in self.peers:
                if not peer.is_over:
                    self._lose(peer, "it has not stopped in time")
        self._end(now_s)

    def _wait_for_nodes(self, now_s: float) -> None:
        total, count = self._fleet.census.total, self._fleet.census.count(*NEW)
        if now_s >= self._join_end_s:
            limit = f"{self._options.join_timeout_s:g} s (--join_timeout)"
            text = f"{count} of {total} nodes have not come within {limit}: {missing_names(self.peers)}"
            node = next(peer for peer in self.peers if peer.is_new)
            self._fail(NodeLost(text, node.name, node.index))
        elif now_s >= self._next_said_s:
            self._next_said_s = now_s + _SAY_MISSING_S
            words = self._clients.words()
            words = "; ".join(filter(None, (words, self._listening)))
            said = f" ({words})" if words else ""
            self._say(f"waiting for {count} of {total} nodes: {missing_names(self.peers)}{said}")

    def _beat(self, now_s: float) -> None:
        self._next_beat_s = now_s + self._options.node_timeout_s / _BEATS
        for peer in self.peers:
            if peer.state not in ("joined", "running", "done"):  # who is done waits for our last word, and listens
                continue
            if self._outlets.are_behind:  # we do not listen: what it says is on its way
                peer.heard_s = now_s
            elif now_s - peer.heard_s > self._options.node_timeout_s:
                peer.is_silent = True
                limit = f"{self._options.node_timeout_s:g} s (--node_timeout)"
                hint = "" if self._engine.ENDS_STOPPED else "; if its agent is only stopped, its ranks are there"
                self._lose(peer, f"nothing was heard of it for {limit}{hint}")
                continue
            self._ask(peer)

    def reap(self) -> None:
        """For process 1: those who lost their parents have come to us, and have ended."""
        self._clients.reap_others()

    def suspend(self) -> None:
        """Ctrl-Z: our ranks stop, and so do we, until continued. A fork of us sends the heartbeats meanwhile."""
        from infini_run.multinode.heartbeat_process import HeartbeatProcess
        from infini_run.system.signal_pipe import stop_self

        self.signal(SIGTSTP)
        wires = [peer.wire for peer in self.peers if peer.wire is not None and not peer.wire.has_ended]
        began_s, stand_in = time.monotonic(), None
        try:
            stand_in = HeartbeatProcess(wires, self._options.node_timeout_s / _BEATS)
        except OSError as error:
            limit = f"{self._options.node_timeout_s:g} s (--node_timeout)"
            self._notice(f"the nodes will hear nothing of us, and give up in {limit}: {error.strerror}")
        stop_self()
        if stand_in is not None:
            stand_in.end()
            self._absence.excuse()
            self._excuse(time.monotonic() - began_s)
        self._feed.resume()
        self.signal(SIGCONT)

    def _excuse(self, away_s: float) -> None:
        """We were not there for so long: that was no silence of the nodes, and nobody could come or stop in time."""
        now_s = time.monotonic()
        if away_s < self._options.node_timeout_s / _AWAY:
            return
        for peer in self.peers:
            peer.heard_s = min(now_s, peer.heard_s + away_s)
        self._join_end_s += away_s
        self._stop_end_s += away_s
        self._end_s += away_s
        self._next_beat_s = now_s

    def _go(self) -> None:
        """All have come: the ranks are known, and begin."""
        try:
            counts = count_ranks(self.peers, self._options.stdin)
        except UsageError as error:
            self._fail(error)
            return
        spans = spans_of(counts)
        self._world_size, self._feed.firsts = spans[0].world_size, [span.first for span in spans]
        if self._lobby is not None:
            self._lobby.rest()
        address, port = rendezvous_address(self._options, self.peers)
        self._repeats.end_wait()
        restarts = self._repeats.total
        difference = "" if restarts or self._roster.counts or self._hear is not None else unlike(self.peers, counts)
        if difference:
            self._notice(difference)
        if not restarts and self._roster.engine != MANUAL:  # by hand they have reached us there
            why = address_warning(address, self.peers, read_hosts())
            if why:
                self._notice(why)
        if self._overview is not None:
            self._overview.begin(self.peers, self.launch_id, restarts)
        for peer, span in zip(self.peers, spans, strict=True):
            self._fleet.move(peer, "running")
            peer.report, peer.failed_s = None, float("inf")
            peer.pids.clear()
            peer.ranks = range(span.first, span.first + counts[peer.index])
            content = {
                "node": peer.index,
                "nnodes": len(self.peers),
                "nproc": counts[peer.index],
                "first": span.first,
                "world_size": span.world_size,
                "most": span.most,
                "host": peer.name,
                "master_addr": address,
                "master_port": port,
                "launch_id": f"{self.launch_id}.{restarts}" if restarts else self.launch_id,
                "restarts": restarts,
                "heading": self._repeats.heading,
            }
            self._fleet.send(peer, pack_json(protocol.LAUNCH, content))

    def _rests(self) -> bool:
        """All nodes have ended: whether all ranks are to be started again, which a signal or a lost node ends."""
        if self._repeats.is_waiting:
            if not self._stopping and not self._told and self.error is None:
                return True
            self._repeats.cancel()
        if self._told or self.error is not None or not self._options.max_restarts:
            return False
        line = self._repeats.decide(self._joint_report()) if self._fleet.census.count("lost") == 0 else ""
        if line:
            self._stopping, self._stop_end_s = False, float("inf")
            for peer in self.peers:
                peer.failed_s = float("inf")  # that is behind us: what comes now is another reason
            if self._overview is not None:
                self._overview.rest()
            self._say(line)
        return bool(line)

    def _end(self, now_s: float) -> None:
        """When nothing of the job is left anywhere, agents are let go, and their commands have a moment to end."""
        is_over = self._fleet.census.count(*OVER) == self._fleet.census.total
        if not is_over and (not self._stopping or self._fleet.census.count("running")):
            return
        if self._end_s == float("inf"):
            if is_over and self._rests():
                return
            self._explain()
            self._end_s, self._stop_end_s = now_s + _END_S, float("inf")
            self._next_said_s = now_s + _SAY_MISSING_S
            exit_code = self.exit_code
            if self._options.verbose and self._lobby is not None:
                self._say(f"{self._lobby.let_go} connections to the link's port were let go that had proved nothing")
            self._fleet.send_all(pack_json(protocol.GOODBYE, {"exit_code": exit_code}))
            self._clients.give_up()
            if self._engine.OVER_STDIO:
                silent = [peer for peer in self.peers if peer.is_silent]
                # the ssh of a silent one may be what is stopped; of one that never began, nothing more is to come
                refused = [peer for peer in self.peers if peer.state == "lost" and not peer.was_running]
                self._clients.kill({peer.index for peer in (*silent, *refused)})
                self._end_agents(silent)
        if now_s >= self._end_s and self._clients.are_alive and not self._is_last_resort:
            self._is_last_resort = True
            alive = self._clients.alive_nodes()
            if self._end_agents([peer for peer in self.peers if peer.index in alive]):
                self._end_s = now_s + _END_S
        if self._clients.are_alive and now_s < self._end_s:
            return
        self.ended = self._outlets.are_done
        if self.ended or self._reader_end_s != float("inf"):
            return
        if self._is_reader_limited:
            self.limit_reader()  # it fell behind only after the stop
        elif now_s >= self._next_said_s:
            self._next_said_s = float("inf")
            self._notice("waiting for the reader of our output; Ctrl-C ends it")

    def _end_agents(self, peers: Sequence[RemoteAgent]) -> bool:
        """By the engine, for they do not listen: an agent that is stopped leaves its ranks for ever. Whether the
        engine can do anything about it."""
        told = [(peer.host, peer.index, peer.hello) for peer in peers if peer.hello and not peer.is_ended_by_engine]
        for peer in peers:
            peer.is_ended_by_engine = True
        clients = self._engine.ending(told, self._options) if told else []
        for client in clients:
            self._clients.add_ending(client)
        return bool(clients)

    # ---- the end

    def report(self) -> Report:
        """How all of it ended: every node's ranks, the first failure of all."""
        return self._repeats.add_to(self._joint_report())

    def _joint_report(self) -> Report:
        """Of the last attempt."""
        blamed = self.error if self.blames_node else None
        told_by = []
        for peer in self.peers:
            if peer.loss and peer.ranks:
                heard_s = peer.heard_s + time.time() - time.monotonic()
                is_blamed = isinstance(blamed, NodeLost) and blamed.node == peer.index and not self._told
                report = lost_report(
                    peer.name, peer.ranks, peer.pids, last_received_s=heard_s, is_first_failure=is_blamed
                )
                told_by.append((report, peer.heard_s))
            elif peer.report is not None:
                told_by.append((peer.report, peer.failed_s))
        return merge_reports(
            told_by,
            launch_id=self.launch_id,
            run_id=self._options.run_id,
            host=os.uname().nodename,
            world_size=self._world_size or self._planned_size(),
            start_s=self._start_s,
            end_s=time.time(),
            received_signal=self._told,
            silent=len(self.peers) - len(told_by),
            notices=(*self._notices, *([str(self.error)] if self.error is not None else [])),
            error=blamed,
            lost=[peer.loss for peer in self.peers if peer.loss],
        )

    def _planned_size(self) -> int:
        """Ranks, where they were not begun: 0 where a node that has not come would have said how many it runs."""
        asked = self._options.nproc_per_node
        counts = self._roster.counts or [peer.hello.get("nproc", asked) for peer in self.peers]
        return sum(map(int, counts)) if all(isinstance(count, int) for count in counts) else 0

    @property
    def blames_node(self) -> bool:
        """The job ended for a node that was lost, or would not begin; not for a rank, and not for a signal. A node is
        lost from when it was last heard of: a rank elsewhere may fail of that long before the loss is noticed."""
        lost_s = min((peer.heard_s for peer in self.peers if peer.state == "lost"), default=float("inf"))
        ranks_s = min((peer.failed_s for peer in self.peers if peer.state != "lost"), default=float("inf"))
        return self.error is not None and (not isinstance(self.error, NodeLost) or lost_s <= ranks_s)

    @property
    def exit_code(self) -> int:
        """Ours, and that of all launchers that joined by hand."""
        return self.report().exit_code

    def close(self) -> None:
        """Cut what is still connected, which kills what still runs there; end and reap our commands. Safe twice."""
        self._fleet.close()
        if self._lobby is not None:
            self._lobby.close()
        self._clients.close()
        self._feed.close()
        self._outlets.close()
        self._poller.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: all of it is our parent's; only our copies of descriptors are closed."""
        self._poller.close()
        self._fleet.close()
        if self._lobby is not None:
            self._lobby.after_fork_in_child()
        self._clients.after_fork_in_child()
        self._feed.close()
        self._outlets.close()
        self.ended = True


def _nothing() -> None:
    """Whoever asked for it looks himself."""
