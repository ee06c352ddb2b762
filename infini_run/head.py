"""The head: reaches every node through an engine, and makes many nodes' launches one.

It holds a Link to the agent on each node, and acts: when all have come they start, when one fails the others stop,
when one is lost or silent the job ends. What ranks write comes out here in whole lines. It takes no signal itself:
who owns the process tells it.
"""

from __future__ import annotations

import os
import time

from infini_run import frame
from infini_run.clients import Clients
from infini_run.console import Outlet, Source
from infini_run.engines import Contact, find_engine
from infini_run.errors import InfiniRunError, LinkError, NodeLost, StartError, UsageError
from infini_run.frame import pack, pack_json, unpack_json
from infini_run.joint import join_reports
from infini_run.link import TOKEN, Handshake
from infini_run.peer import Peer
from infini_run.plain import record_of, to_plain
from infini_run.poller import READ, WRITE, Poller
from infini_run.record import replace
from infini_run.report import Report, signal_name
from infini_run.roster import Roster, options_of_agents
from infini_run.survey import new_launch_id
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from socket import socket
    from typing import Any

    from infini_run.clients import Ended
    from infini_run.link import Wire
    from infini_run.options import Options

_TOKEN_SIZE = 32  # random bytes
_BEATS = 4  # within the time after which a silent node is lost
_SAY_MISSING_S = 5.0
_HELD = 4 << 20  # bytes that our own reader has not taken: then the nodes wait
_INPUT_HELD = 1 << 20  # of our stdin that a node has not taken
_END_S = 5.0  # for commands to end whose agents have said all
_SPARE_S = 15.0  # beyond two graces: what a node may take for its own bounds
_NAMED = 8
_INT, _QUIT = 2, 3


class Head:
    """A launch on many nodes: start, `step` until `ended`, `close`; then `report` and `error` tell how it went.

    environ: ours, of which the nodes get what --export names. cwd: where the ranks start (None: here), on every node.
    say: gets lines for the user.
    """

    def __init__(
        self,
        options: Options,
        roster: Roster,
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        cwd: str | None = None,
    ) -> None:
        self._options = options
        self._engine = engine = find_engine(roster.engine)
        self._environ = environ
        self._say = say
        self._cwd = os.getcwd() if cwd is None else os.path.abspath(cwd)
        self._token = environ.get(TOKEN) or os.urandom(_TOKEN_SIZE).hex()
        self._token_file = ""
        self.launch_id = new_launch_id()
        self.peers = [Peer(index, host) for index, host in enumerate(roster.hosts)]
        self.error: InfiniRunError | None = None  # why the job ended, where it was not a rank
        self.ended = False
        self._told = 0
        self._notices: list[str] = []
        self._start_s = time.time()
        self._nproc = 0
        self._clients = Clients(engine, environ, self.launch_id, self._is_reaching)
        self._listener: socket | None = None
        self._strangers: dict[Wire, Handshake] = {}
        self._outlets = {frame.OUT: Outlet(1), frame.ERR: Outlet(2)}
        self._source = Source(0, wanted=options.stdin != "none")
        self._poller = Poller()
        self._handlers: dict[int, Callable[[], None]] = {}
        now_s = time.monotonic()
        self._join_end_s = now_s + options.join_timeout_s
        self._next_said_s = now_s + _SAY_MISSING_S
        self._next_beat_s = now_s
        self._stopping = False
        self._stop_end_s = self._end_s = float("inf")

    # ---- starting

    def start(self) -> None:
        """Begin to reach the nodes. Raises UsageError, ProgramMissing or StartError: nothing was started."""
        try:
            contact = self._open_link()
            clients = self._engine.clients([peer.host for peer in self.peers], self._options, contact, self._environ)
            if self._listener is not None and not contact.token_file:
                clients = [replace(client, env=(*client.env, (TOKEN, self._token))) for client in clients]
            self._clients.add(clients)
            self._start_clients()
        except BaseException:
            self.close()
            raise

    def _open_link(self) -> Contact:
        """Where agents are to dial, the port they do so on, and the file with the token."""
        if self._engine.OVER_STDIO:
            return Contact()
        from infini_run.dial import listen, own_addresses

        self._listener = listen(self._options.link_port)
        target = f"{','.join(own_addresses())}:{self._listener.getsockname()[1]}"
        if not self._engine.TOKEN_BY_FILE:
            return Contact(target=target)
        path = os.path.join(self._cwd, f".infini-run-{self.launch_id}.token")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; start from a directory that the nodes share") from None
        self._token_file = path
        with open(fd, "w", encoding="ascii") as file:
            file.write(self._token)
        return Contact(target=target, token_file=path)

    def _remove_token(self) -> None:
        path, self._token_file = self._token_file, ""
        if path:
            os.unlink(path)

    def _start_clients(self) -> None:
        for client, wire in self._clients.start_due():
            self._adopt(self.peers[client.nodes[0]], wire)

    def _is_reaching(self, nodes: Sequence[int]) -> bool:
        return any(self.peers[node].is_new for node in nodes or range(len(self.peers)))

    def _adopt(self, peer: Peer, wire: Wire) -> None:
        """This wire is that node's: tell it all but who else there is."""
        peer.wire, peer.state, peer.heard_s = wire, "greeted", time.monotonic()
        content = {
            "version": VERSION,
            "silence_s": self._options.node_timeout_s,
            "cwd": self._cwd,
            "environ": exported(self._options.export, self._environ),
            "options": to_plain(options_of_agents(self._options)),
        }
        peer.send(pack_json(frame.SPEC, content))

    # ---- the loop

    def step(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> None:
        """Wait for something to do, at most `timeout_s`, or until a descriptor of `also` can be read; then do it."""
        self._watch_all(also)
        for fd in self._poller.poll(self._timeout_s(timeout_s)):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        for ended in self._clients.step():
            self._bury(ended)
        self._act(time.monotonic())

    def _timeout_s(self, asked_s: float | None) -> float | None:
        due = [self._next_beat_s, self._stop_end_s, self._end_s, self._clients.next_start_s]
        if self._is_joining:
            due += [self._join_end_s, self._next_said_s]
        if self._source.never_waits and self._readers():
            due.append(0.0)
        wait_s = max(0.0, min(due) - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    @property
    def _is_joining(self) -> bool:
        return not self._stopping and any(peer.is_new for peer in self.peers)

    @property
    def _is_held(self) -> bool:
        """Our own reader is behind: then nobody is listened to."""
        return any(outlet.waiting > _HELD for outlet in self._outlets.values())

    def _watch_all(self, also: Sequence[int]) -> None:
        """What the next wait waits for, and what is called then."""
        wanted: dict[int, int] = dict.fromkeys((*also, *self._clients.fds()), READ)
        handlers: dict[int, Callable[[], None]] = {}

        def watch(fd: int, events: int, handler: Callable[[], None]) -> None:
            wanted[fd], handlers[fd] = events, handler

        for outlet in self._outlets.values():
            if outlet.waiting and outlet.fileno() >= 0:
                watch(outlet.fileno(), WRITE, outlet.flush)
        heard = 0 if self._is_held else READ
        for peer in self.peers:
            if peer.wire is not None and not peer.wire.has_ended:
                events = heard | (WRITE if peer.wire.wants_write else 0)
                watch(peer.wire.fileno(), events, lambda peer=peer: self._hear(peer))  # type: ignore[misc]
        for wire in self._strangers:
            watch(wire.fileno(), READ, lambda wire=wire: self._hear_stranger(wire))  # type: ignore[misc]
        if self._listener is not None:
            watch(self._listener.fileno(), READ, self._accept)
        if self._readers():
            if self._source.never_waits:
                self._read_input()
            else:
                watch(self._source.fileno(), READ, self._read_input)
        self._poller.want(wanted)
        self._handlers = handlers

    # ---- what nodes say

    def _accept(self) -> None:
        from infini_run.dial import accept

        assert self._listener is not None
        while (found := accept(self._listener)) is not None:
            wire, address = found
            self._strangers[wire] = Handshake(wire, self._token.encode(), is_head=True, who=address)

    def _hear_stranger(self, wire: Wire) -> None:
        """Whoever cannot prove that he is ours is let go; the job is none of his affair."""
        handshake = self._strangers[wire]
        wire.flush()
        try:
            for kind, payload in wire.read():
                if not handshake.done:
                    handshake.take(kind, payload)
                elif kind == frame.NAME:
                    self._admit(wire, int(unpack_json(payload)["node"]))
                    return
        except LinkError as error:
            self._notice(f"{handshake.who} dialled the link's port and was turned away: {error}")
            self._close_wire(wire)
        if wire.has_ended:
            self._close_wire(wire)
            del self._strangers[wire]

    def _admit(self, wire: Wire, node: int) -> None:
        """It is ours, and says which node it is."""
        del self._strangers[wire]
        if 0 <= node < len(self.peers) and self.peers[node].state == "starting":
            self._adopt(self.peers[node], wire)
        else:
            self._notice(f"a node said that it is number {node}, which is none, or had come before; turned away")
            self._close_wire(wire)

    def _close_wire(self, wire: Wire) -> None:
        self._poller.forget(wire.fileno())
        wire.close()

    def _hear(self, peer: Peer) -> None:
        wire = peer.wire
        if wire is None or wire.has_ended:
            return
        wire.flush()
        try:
            for kind, payload in wire.read():
                peer.heard_s = time.monotonic()
                self._take(peer, kind, payload)
        except LinkError as error:
            self._lose(peer, str(error))
            return
        if wire.has_ended and peer.state in ("joined", "running"):
            self._lose(peer, "")  # one that never came to speak is told of when its command ends, which knows why

    def _take(self, peer: Peer, kind: bytes, payload: bytes) -> None:
        if kind in (frame.OUT, frame.ERR):
            self._outlets[kind].write(peer.lines[kind].feed(payload))
        elif kind == frame.HELLO:
            self._greet(peer, unpack_json(payload))
        elif kind == frame.EVENT:
            self._note(peer, unpack_json(payload))
        elif kind == frame.DONE:
            self._finish(peer, unpack_json(payload))

    def _greet(self, peer: Peer, hello: dict[str, Any]) -> None:
        if "error" not in hello:
            peer.hello, peer.port, peer.state = hello, int(hello["port"]), "joined"
            peer.name = peer.name or str(hello["host"])
            return
        error = (UsageError if hello["kind"] == "usage" else InfiniRunError)(
            f"{peer.name or hello['host']}: {hello['error']}"
        )
        error.exit_code = int(hello["exit_code"])
        peer.state = "lost"
        self._fail(error)

    def _note(self, peer: Peer, event: dict[str, Any]) -> None:
        if "failed" in event:
            peer.failed_s = min(peer.failed_s, time.monotonic() - int(event["age_ns"]) / 1e9)
            if not self._options.keep_going:
                self.stop()
        elif "told" in event:
            self.tell(int(event["told"]), by=peer.name)

    def _finish(self, peer: Peer, done: dict[str, Any]) -> None:
        peer.report = record_of(Report, done["report"])
        peer.port, peer.state = int(done["port"]), "done"
        for kind, lines in peer.lines.items():
            self._outlets[kind].write(lines.end())

    def _bury(self, ended: Ended) -> None:
        """A command has ended: its nodes are lost unless they have said all, or unless it is tried again."""
        peers = [self.peers[node] for node in ended.client.nodes or range(len(self.peers))]
        for peer in peers:
            while peer.wire is not None and not peer.wire.has_ended and self._engine.OVER_STDIO:
                self._hear(peer)  # what it said before the end
        for peer in peers:
            if peer.state == "done" or (peer.state == "lost" and not peer.is_unexplained):
                continue
            if peer.is_new and not self._stopping and self._clients.retry(ended):
                peer.state, peer.wire = "starting", None
                continue
            noise = "" if peer.wire is None else peer.wire.noise
            self._lose(peer, self._engine.explain(peer.name, ended.code, ended.words + noise))

    # ---- our stdin

    def _readers(self) -> list[Peer]:
        """The nodes whose ranks read our stdin; none as long as one of them is behind."""
        reader = self._options.stdin
        if self._source.has_ended or not self._nproc:
            return []
        nodes = range(len(self.peers)) if reader == "all" else [int(reader) // self._nproc]
        peers = [self.peers[node] for node in nodes if self.peers[node].state == "running"]
        is_behind = any(peer.wire is not None and peer.wire.waiting > _INPUT_HELD for peer in peers)
        return [] if is_behind else peers

    def _read_input(self) -> None:
        data = self._source.read()
        if data is not None:
            for peer in self._readers() or self.peers:
                peer.send(pack(frame.INPUT, data))

    # ---- acting

    def _lose(self, peer: Peer, reason: str) -> None:
        """It has gone: its ranks are lost, and so is the job."""
        was_running = peer.state == "running" or peer.was_running
        peer.was_running = was_running
        if peer.wire is not None:
            self._close_wire(peer.wire)
        what = "was lost" if was_running else "could not be reached"
        text = f"node {peer.index}{f' ({peer.name})' if peer.name else ''} {what}" + (f": {reason}" if reason else "")
        error = NodeLost(text, peer.name, peer.index)
        is_same = isinstance(self.error, NodeLost) and self.error.node == peer.index
        peer.state, peer.is_unexplained = "lost", not reason
        peer.failed_s = min(peer.failed_s, time.monotonic())
        if is_same:
            self.error = error
        self._fail(error)

    def _fail(self, error: InfiniRunError) -> None:
        if self.error is None and not self._told:
            self.error = error
        self.stop()

    def stop(self, number: int = 0) -> None:
        """Begin to stop every node, where something still runs."""
        if self._stopping:
            return
        self._stopping = True
        self._stop_end_s = time.monotonic() + 2 * self._options.grace_s + _SPARE_S
        for peer in self.peers:
            if peer.state == "running":
                peer.send(pack_json(frame.STOP, {"signal": number}))

    def kill(self) -> None:
        """SIGKILL to every rank of every node."""
        self.stop()
        for peer in self.peers:
            peer.send(pack(frame.KILL))

    def signal(self, number: int) -> None:
        """Pass a signal on to every rank."""
        for peer in self.peers:
            if peer.state == "running":
                peer.send(pack_json(frame.SIGNAL, {"signal": number}))

    def tell(self, number: int, by: str = "") -> None:
        """We, or the agent on a node, were told to stop by a signal: the first time gently, the second time not."""
        name, where = signal_name(number), f" on {by}" if by else ""
        if not self._told:
            self._told = number
            grace = f"{self._options.grace_s:g} s"
            self._say(f"{name}{where}: stopping; SIGKILL in {grace}, or at once when told again")
            self.stop(number if number in (_INT, _QUIT) else 0)
        elif not by:
            self._say(f"{name} again: killing what is left")
            self.kill()

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        self._say(text)

    def _act(self, now_s: float) -> None:
        if now_s >= self._clients.next_start_s and not self._stopping:
            try:
                self._start_clients()
            except StartError as error:
                self._fail(error)
        if not self._stopping and all(peer.state == "joined" for peer in self.peers):
            self._go()
        elif self._is_joining:
            self._wait_for_nodes(now_s)
        if now_s >= self._next_beat_s:
            self._beat(now_s)
        if now_s >= self._stop_end_s:
            for peer in self.peers:
                if not peer.is_over:
                    self._lose(peer, "it has not stopped in time")
        self._end(now_s)

    def _wait_for_nodes(self, now_s: float) -> None:
        missing = [peer.name or f"node {peer.index}" for peer in self.peers if peer.is_new]
        shown = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        if now_s >= self._join_end_s:
            limit = f"{self._options.join_timeout_s:g} s (--join_timeout)"
            text = f"{len(missing)} of {len(self.peers)} nodes have not come within {limit}: {shown}"
            node = next(peer for peer in self.peers if peer.is_new)
            self._fail(NodeLost(text, node.name, node.index))
        elif now_s >= self._next_said_s:
            self._next_said_s = now_s + _SAY_MISSING_S
            self._say(f"waiting for {len(missing)} of {len(self.peers)} nodes: {shown}")

    def _beat(self, now_s: float) -> None:
        self._next_beat_s = now_s + self._options.node_timeout_s / _BEATS
        for peer in self.peers:
            if peer.state not in ("joined", "running"):
                continue
            if self._is_held:  # we do not listen: what it says is on its way
                peer.heard_s = now_s
            elif now_s - peer.heard_s > self._options.node_timeout_s:
                self._lose(peer, f"nothing was heard of it for {self._options.node_timeout_s:g} s (--node_timeout)")
                continue
            peer.send(pack(frame.BEAT))

    def resume(self) -> None:
        """We were stopped, and go on: the nodes' silence meanwhile was ours."""
        now_s = time.monotonic()
        self._next_beat_s = now_s
        for peer in self.peers:
            peer.heard_s = now_s

    def _go(self) -> None:
        """All have come: the ranks are known, and begin."""
        counts = {int(peer.hello["nproc"]) for peer in self.peers}
        if len(counts) > 1:
            each = ", ".join(f"{peer.name}: {peer.hello['nproc']}" for peer in self.peers[:_NAMED])
            self._fail(
                UsageError(f"the nodes differ in how many ranks they would run ({each}): give --nproc_per_node")
            )
            return
        self._nproc = counts.pop()
        self._remove_token()
        address, port = self._meeting(self.peers[0])
        for peer in self.peers:
            peer.state = "running"
            content = {
                "node": peer.index,
                "nnodes": len(self.peers),
                "nproc": self._nproc,
                "host": peer.name,
                "master_addr": address,
                "master_port": port,
                "launch_id": self.launch_id,
            }
            peer.send(pack_json(frame.GO, content))

    def _meeting(self, first: Peer) -> tuple[str, int]:
        """Where rank 0 listens: what was asked for; else node 0's address as it was reached, a port free there."""
        if self._options.rdzv_explicit:
            return self._options.master_addr, self._options.master_port or first.port
        if len(self.peers) == 1:
            return "127.0.0.1", first.port
        return str(first.hello["address"]) or first.name, first.port

    def _end(self, now_s: float) -> None:
        """When nothing of the job is left anywhere, agents are let go, and their commands have a moment to end."""
        is_over = all(peer.is_over for peer in self.peers)
        if not is_over and (not self._stopping or any(peer.state == "running" for peer in self.peers)):
            return
        if self._end_s == float("inf"):
            self._end_s, self._stop_end_s = now_s + _END_S, float("inf")
            for peer in self.peers:
                peer.send(pack_json(frame.BYE, {"exit_code": self.exit_code}))
            self._clients.give_up()
        is_read = self._is_quiet or now_s >= self._end_s
        self.ended = (not self._clients.are_alive or now_s >= self._end_s) and is_read

    @property
    def _is_quiet(self) -> bool:
        """Our own reader has all that there was."""
        return not any(outlet.waiting for outlet in self._outlets.values())

    # ---- the end

    def report(self) -> Report:
        """How all of it ended: every node's ranks, the first failure of all."""
        told = [peer for peer in self.peers if peer.report is not None]
        failed = [peer for peer in told if peer.report is not None and peer.report.first_failure is not None]
        first = min(failed, key=lambda peer: (peer.failed_s, peer.index), default=None)
        return join_reports(
            [peer.report for peer in told if peer.report is not None],
            launch_id=self.launch_id,
            run_id=self._options.run_id,
            host=os.uname().nodename,
            world_size=self._nproc * len(self.peers),
            start_s=self._start_s,
            end_s=time.time(),
            first_failure=first.report.first_failure if first is not None and first.report is not None else None,
            told=self._told,
            notices=(*self._notices, *([str(self.error)] if self.error is not None else [])),
        )

    @property
    def blames_node(self) -> bool:
        """The job ended for a node that was lost, or would not begin; not for a rank, and not for a signal."""
        lost_s = min((peer.failed_s for peer in self.peers if peer.state == "lost"), default=float("inf"))
        ranks_s = min((peer.failed_s for peer in self.peers if peer.state != "lost"), default=float("inf"))
        return self.error is not None and (not isinstance(self.error, NodeLost) or lost_s <= ranks_s)

    @property
    def exit_code(self) -> int:
        """Ours, and that of all launchers that joined by hand."""
        return self.error.exit_code if self.error is not None and self.blames_node else self.report().exit_code

    def close(self) -> None:
        """Cut what is still connected, which kills what still runs there; end and reap our commands. Safe twice."""
        wires = [peer.wire for peer in self.peers if peer.wire is not None]
        for wire in (*wires, *self._strangers):
            wire.close()
        self._strangers.clear()
        self._remove_token()
        self._clients.close()
        if self._listener is not None:
            self._listener.close()
        for outlet in self._outlets.values():
            outlet.close()
        self._poller.close()


def exported(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ours that --export names; * and ? stand for any."""
    from fnmatch import fnmatchcase

    return {name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in patterns)}
