"""The head: reaches every node through an engine, and makes many nodes' launches one.

It runs the engine's commands in groups of the core, holds a Link to the agent on each node, and acts: when all have
come they start, when one fails the others stop, when one is lost or silent the job ends. What ranks write comes out
here in whole lines. It takes no signal itself: who owns the process tells it.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import socket
import time

from infini_run import frame
from infini_run.console import Lines, Outlet
from infini_run.engines import Contact
from infini_run.errors import InfiniRunError, LinkError, NodeLost, ProgramMissing, StartError, UsageError
from infini_run.frame import pack, pack_json, unpack_json
from infini_run.group import PIPE, Group, Spec, debug_flags
from infini_run.link import Handshake, Wire
from infini_run.plain import record_of, to_plain
from infini_run.plan import MARK
from infini_run.record import replace
from infini_run.report import Report, signal_name
from infini_run.survey import new_launch_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.engines import Client, Engine
    from infini_run.options import Options

_BEATS = 4  # within the time after which a silent node is lost
_SAY_MISSING_S = 5.0
_TRIES = 5  # of a command that fails for a reason that passes
_HELD = 4 << 20  # bytes that our own reader has not taken: then the nodes wait
_END_S = 5.0  # for commands to end whose agents have said all
_SPARE_S = 15.0  # beyond two graces: what a node may take for its own bounds
_TERM, _INT, _QUIT, _KILL = 15, 2, 3, 9
_PIECE = 1 << 16


class Peer:
    """A node, as we see it. state: starting, greeted, joined, running, done, lost."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.state = "starting"
        self.wire: Wire | None = None
        self.heard_s = time.monotonic()
        self.hello: dict[str, Any] = {}
        self.port = 0
        self.report: Report | None = None
        self.failed_s = float("inf")  # when its first failure was, by our clock
        self.lines = {frame.OUT: Lines(), frame.ERR: Lines()}

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "lost")

    def send(self, data: bytes) -> None:
        if self.wire is not None:
            self.wire.send(data)


class Running:
    """One of the engine's commands, alive in a group of its own."""

    def __init__(self, client: Client, tries: int) -> None:
        self.client = client
        self.tries = tries
        self.group: Group | None = None
        self.code: int | None = None  # what it exited with: 128 + n for signal n
        self.words = ""  # the last that it wrote to stderr


class Head:
    """A launch on many nodes: start, `step` until `ended`, `close`; then `report` and `error` tell how it went.

    hosts: a name for each node, in the order of their ranks. say: gets lines for the user. token: what agents that dial
    must know. environ: the head's own; `exported` of it goes to the nodes.
    """

    def __init__(
        self,
        options: Options,
        hosts: Sequence[str],
        engine: Engine,
        *,
        environ: Mapping[str, str],
        exported: Mapping[str, str],
        token: str,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._engine = engine
        self._environ = environ
        self._exported = exported
        self._token = token
        self._say = say
        self.launch_id = new_launch_id()
        self.peers = [Peer(index, host) for index, host in enumerate(hosts)]
        self.error: InfiniRunError | None = None
        self.ended = False
        self._told = 0
        self._notices: list[str] = []
        self._start_s = time.time()
        self._waiting: list[tuple[float, Client, int]] = []  # commands still to start: not before when, tries so far
        self._running: list[Running] = []
        self._listener: socket.socket | None = None
        self._strangers: dict[Wire, Handshake] = {}
        self._outlets = {frame.OUT: Outlet(1), frame.ERR: Outlet(2)}
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._interest: dict[int, int] = {}
        self._join_end_s = time.monotonic() + options.join_timeout_s
        self._next_said_s = time.monotonic() + _SAY_MISSING_S
        self._next_beat_s = time.monotonic()
        self._next_start_s = float("inf")
        self._stopping = False
        self._stop_end_s = float("inf")
        self._end_s = float("inf")  # for commands to end
        self._stdin_open = options.stdin != "none" and not os.isatty(0)

    # ---- starting

    def start(self) -> None:
        """Begin to reach the nodes. Raises UsageError or StartError: nothing was started."""
        contact = Contact()
        if not self._engine.OVER_STDIO:
            from infini_run.dial import listen, own_addresses

            self._listener = listen()
            port = self._listener.getsockname()[1]
            contact = Contact(target=f"{','.join(own_addresses())}:{port}")
        clients = self._engine.clients([peer.name for peer in self.peers], self._options, contact, self._environ)
        self._waiting = [(0.0, client, 0) for client in clients]
        try:
            self._start_waiting()
        except BaseException:
            self.close()
            raise

    def _start_waiting(self) -> None:
        """As many commands as the window lets, of those whose time has come."""
        now_s = time.monotonic()
        busy = sum(1 for running in self._running if running.group is not None and self._is_reaching(running))
        while self._waiting and busy < self._engine.WINDOW and self._waiting[0][0] <= now_s:
            _, client, tries = self._waiting.pop(0)
            self._start_client(client, tries)
            busy += 1
        has_room = bool(self._waiting) and busy < self._engine.WINDOW
        self._next_start_s = self._waiting[0][0] if has_room else float("inf")

    def _is_reaching(self, running: Running) -> bool:
        return any(self.peers[node].state in ("starting", "greeted") for node in running.client.nodes)

    def _start_client(self, client: Client, tries: int) -> None:
        """Its stderr is kept for the case that it fails; the mark is left out of its environment: a connection that
        ssh keeps open for others (ControlPersist) is no stray of ours."""
        path = shutil.which(client.argv[0], path=self._environ.get("PATH"))
        if path is None:
            raise ProgramMissing(f"{client.argv[0]} is not on PATH; --engine needs it", client.argv[0])
        running = Running(client, tries)
        argv = [os.fsencode(word) for word in client.argv]
        spec = Spec(0, os.fsencode(path), argv, [os.fsencode(f"{name}={value}") for name, value in client.env])
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        ours: socket.socket | None = None
        try:
            spec.stdio = [null, null, PIPE]
            theirs = null
            if self._engine.OVER_STDIO:
                ours, other = socket.socketpair()
                theirs = other.detach()
                spec.stdio = [theirs, theirs, PIPE]
            running.group = Group(
                1,
                mark=os.fsencode(f"{MARK}={self.launch_id}-head"),
                grace_s=0.0,
                stop_signal=_TERM,
                stop_scope="group",
                debug=debug_flags(self._environ),
            )
            base = {name: value for name, value in self._environ.items() if name != MARK}
            spec.dies_with_us = _is_main_thread()
            running.group.spawn([spec], [os.fsencode(f"{name}={value}") for name, value in base.items()])
        except BaseException:
            if running.group is not None:
                running.group.close()
            if ours is not None:
                ours.close()
            raise
        finally:
            os.close(null)
            if theirs != null:
                os.close(theirs)
        self._running.append(running)
        if ours is not None:
            self._adopt(self.peers[client.nodes[0]], Wire(fd := ours.detach(), fd, awaits_opening=True))

    def _adopt(self, peer: Peer, wire: Wire) -> None:
        """This wire is that node's: tell it all but who else there is."""
        if peer.wire is not None:
            peer.wire.close()
        peer.wire, peer.state, peer.heard_s = wire, "greeted", time.monotonic()
        from infini_run.version import VERSION

        content = {
            "version": VERSION,
            "silence_s": self._options.node_timeout_s,
            "cwd": os.getcwd(),
            "environ": dict(self._exported),
            "options": to_plain(self._options),
        }
        peer.send(pack_json(frame.SPEC, content))

    # ---- the loop

    def step(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> None:
        """Wait for something to do, at most `timeout_s`, or until a descriptor of `also` can be read; then do it."""
        self._watch_all(also)
        limit_s = self._timeout_s(timeout_s)
        for fd, _ in self._epoll.poll(-1 if limit_s is None else limit_s):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        for running in self._running:
            self._follow(running)
        self._act(time.monotonic())

    def _timeout_s(self, asked_s: float | None) -> float | None:
        now_s = time.monotonic()
        due = [self._next_beat_s, self._stop_end_s, self._end_s, self._next_start_s]
        if self._is_joining:
            due += [self._join_end_s, self._next_said_s]
        wait_s = max(0.0, min(due) - now_s)
        return wait_s if asked_s is None else min(wait_s, asked_s)

    @property
    def _is_joining(self) -> bool:
        return any(peer.state in ("starting", "greeted") for peer in self.peers) and not self._stopping

    def _watch_all(self, also: Sequence[int]) -> None:
        """What the next wait waits for, and who is called then."""
        wanted: dict[int, int] = dict.fromkeys(also, select.EPOLLIN)
        handlers: dict[int, Callable[[], None]] = {}
        is_held = any(outlet.waiting > _HELD for outlet in self._outlets.values())
        for outlet in self._outlets.values():
            if outlet.waiting and outlet.fileno() >= 0:
                wanted[outlet.fileno()] = select.EPOLLOUT
                handlers[outlet.fileno()] = outlet.flush
        wires: list[tuple[Wire, Callable[[], None]]] = [
            (peer.wire, lambda peer=peer: self._hear(peer)) for peer in self.peers if peer.wire is not None
        ]
        wires += [(wire, lambda wire=wire: self._hear_stranger(wire)) for wire in self._strangers]
        for wire, hear in wires:
            if wire.has_ended:
                continue
            fd = wire.fileno()
            events = (0 if is_held else select.EPOLLIN) | (select.EPOLLOUT if wire.wants_write else 0)
            if events:
                wanted[fd] = events
                handlers[fd] = hear
        for running in self._running:
            if running.group is not None:
                wanted[running.group.fileno()] = select.EPOLLIN
        if self._listener is not None:
            wanted[self._listener.fileno()] = select.EPOLLIN
            handlers[self._listener.fileno()] = self._accept
        self._set_interest(wanted)
        self._handlers = handlers

    def _set_interest(self, wanted: dict[int, int]) -> None:
        for fd in self._interest.keys() - wanted.keys():
            try:
                self._epoll.unregister(fd)
            except OSError:
                continue  # closed meanwhile: the kernel has forgotten it
        for fd, events in wanted.items():
            try:
                if fd not in self._interest:
                    self._epoll.register(fd, events)
                else:
                    self._epoll.modify(fd, events)
            except FileExistsError:
                self._epoll.modify(fd, events)
            except FileNotFoundError:  # another file has this number now
                self._epoll.register(fd, events)
        self._interest = wanted

    # ---- what nodes say

    def _accept(self) -> None:
        from infini_run.dial import accept

        assert self._listener is not None
        while (found := accept(self._listener)) is not None:
            wire, _ = found
            self._strangers[wire] = Handshake(wire, self._token.encode(), is_head=True)

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
            self._notice(f"somebody on the link's port was turned away: {error}")
            wire.close()
        if wire.has_ended:
            wire.close()
            del self._strangers[wire]

    def _admit(self, wire: Wire, node: int) -> None:
        """It is ours, and says which node it is."""
        del self._strangers[wire]
        if 0 <= node < len(self.peers) and self.peers[node].state == "starting":
            self._adopt(self.peers[node], wire)
        else:
            self._notice(f"a node said that it is number {node}, which is none, or had come before; turned away")
            wire.close()

    def _hear(self, peer: Peer) -> None:
        wire = peer.wire
        if wire is None:
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
        if "error" in hello:
            kind = UsageError if hello["kind"] == "usage" else InfiniRunError
            error = kind(f"{hello['host']}: {hello['error']}")
            error.exit_code = int(hello["exit_code"])
            peer.state = "lost"
            self._fail(error)
            return
        peer.hello, peer.port, peer.state = hello, int(hello["port"]), "joined"

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

    # ---- what the engine's commands do

    def _follow(self, running: Running) -> None:
        group = running.group
        if group is None:
            return
        for event in group.step():
            if event.kind == "exited":
                running.code = 128 + event.signal if event.signal else event.code
            elif event.kind == "start_failed":
                running.code = 1
                running.words = os.strerror(event.signal)
        if group.ended:
            running.words = running.words or group.tail(0).decode("utf-8", "replace")
            running.group = None
            group.close()
            self._bury(running)

    def _bury(self, running: Running) -> None:
        """A command has ended. Its nodes are lost, unless they have said all; or it is tried again."""
        code = running.code or 0
        nodes = running.client.nodes or tuple(range(len(self.peers)))
        for peer in (self.peers[node] for node in nodes):
            if peer.wire is not None and peer.state != "done":
                while not peer.wire.has_ended and self._drain(peer):
                    pass
            if peer.is_over and not (peer.state == "lost" and self._explains(peer)):
                continue
            is_new = peer.state in ("starting", "greeted") or not peer.hello
            if is_new and running.tries + 1 < _TRIES and self._engine.is_passing(code, running.words):
                self._retry(running, peer)
                continue
            noise = peer.wire.noise if peer.wire is not None else ""
            self._lose(peer, self._engine.explain(peer.name, code, running.words + noise))

    def _drain(self, peer: Peer) -> bool:
        """What was said before the end; whether there was anything."""
        before = peer.state, peer.heard_s
        self._hear(peer)
        return (peer.state, peer.heard_s) != before

    def _explains(self, peer: Peer) -> bool:
        return isinstance(self.error, NodeLost) and self.error.node == peer.index and self._reason == ""

    def _retry(self, running: Running, peer: Peer) -> None:
        if peer.wire is not None:
            peer.wire.close()
        peer.wire, peer.state = None, "starting"
        delay_s = random.uniform(0.1, 0.5) * 2**running.tries
        self._waiting.append((time.monotonic() + delay_s, running.client, running.tries + 1))
        self._waiting.sort(key=lambda item: item[0])

    # ---- acting

    _reason = ""

    def _lose(self, peer: Peer, reason: str) -> None:
        """It has gone: its ranks are lost, and so is the job."""
        was_running = peer.state == "running"
        peer.state = "lost"
        if peer.wire is not None:
            peer.wire.close()
        what = "was lost" if was_running else "could not be reached"
        text = f"node {peer.index} ({peer.name}) {what}" + (f": {reason}" if reason else "")
        if isinstance(self.error, NodeLost) and self.error.node == peer.index and not self._reason:
            self.error = NodeLost(text, peer.name, peer.index)
            self._reason = reason
            return
        peer.failed_s = min(peer.failed_s, time.monotonic())
        if self.error is None:
            self._reason = reason
        self._fail(NodeLost(text, peer.name, peer.index))

    def _fail(self, error: InfiniRunError) -> None:
        if self.error is None:
            self.error = error
        self.stop()

    def stop(self, number: int = 0) -> None:
        """Begin to stop every node, where something still runs."""
        if self._stopping:
            return
        self._stopping = True
        self._stop_end_s = time.monotonic() + 2 * self._options.grace_s + _SPARE_S
        self._waiting.clear()
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
        """We were told to stop by a signal: the first time gently, the second time not."""
        where = f" on {by}" if by else ""
        if self._told:
            if not by:
                self._say(f"{signal_name(number)} again: killing what is left")
                self.kill()
            return
        self._told = number
        self._say(f"{signal_name(number)}{where}: stopping; SIGKILL in {self._options.grace_s:g} s, or at once when told again")
        self.stop(number if number in (_INT, _QUIT) else 0)

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        self._say(text)

    def _act(self, now_s: float) -> None:
        if self._waiting:
            try:
                self._start_waiting()
            except StartError as error:
                self._fail(error)
        states = {peer.state for peer in self.peers}
        if states == {"joined"} and not self._stopping:
            self._go()
        elif self._is_joining:
            self._wait_for_nodes(now_s)
        if now_s >= self._next_beat_s:
            self._beat(now_s)
        if now_s >= self._stop_end_s:
            for peer in self.peers:
                if not peer.is_over:
                    self._lose(peer, "it has not stopped in time")
        self._end(now_s, states)

    def _wait_for_nodes(self, now_s: float) -> None:
        missing = [peer.name for peer in self.peers if peer.state in ("starting", "greeted")]
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        if now_s >= self._join_end_s:
            self._fail(
                UsageError(
                    f"{len(missing)} of {len(self.peers)} nodes have not come within "
                    f"{self._options.join_timeout_s:g} s (--join_timeout): {shown}"
                )
            )
            if self.error is not None:
                self.error.exit_code = 1
        elif now_s >= self._next_said_s:
            self._next_said_s = now_s + _SAY_MISSING_S
            self._say(f"waiting for {len(missing)} of {len(self.peers)} nodes: {shown}")

    def _beat(self, now_s: float) -> None:
        self._next_beat_s = now_s + self._options.node_timeout_s / _BEATS
        is_held = any(outlet.waiting > _HELD for outlet in self._outlets.values())
        for peer in self.peers:
            if peer.state not in ("joined", "running"):
                continue
            if is_held:  # we do not listen: what it says is on its way
                peer.heard_s = now_s
            elif now_s - peer.heard_s > self._options.node_timeout_s:
                self._lose(peer, f"nothing was heard of it for {self._options.node_timeout_s:g} s")
                continue
            peer.send(pack(frame.BEAT))

    def _go(self) -> None:
        """All have come: the ranks are known, and begin."""
        counts = {int(peer.hello["nproc"]) for peer in self.peers}
        if len(counts) > 1:
            each = ", ".join(f"{peer.name}: {peer.hello['nproc']}" for peer in self.peers[:8])
            self._fail(UsageError(f"the nodes differ in how many ranks they would run ({each}): give --nproc_per_node"))
            return
        first = self.peers[0]
        address, port = self._meeting(first)
        for peer in self.peers:
            peer.state = "running"
            content = {
                "node": peer.index,
                "nnodes": len(self.peers),
                "nproc": counts.copy().pop(),
                "host": peer.name.rpartition("@")[2],
                "master_addr": address,
                "master_port": port,
                "launch_id": self.launch_id,
            }
            peer.send(pack_json(frame.GO, content))

    def _meeting(self, first: Peer) -> tuple[str, int]:
        options = self._options
        if options.rdzv_explicit:
            return options.master_addr, options.master_port or first.port
        if len(self.peers) == 1:
            return "127.0.0.1", first.port
        return first.hello["address"] or first.name.rpartition("@")[2], first.port

    def _end(self, now_s: float, states: set[str]) -> None:
        """When nothing of the job is left anywhere, the agents are let go, and their commands have a moment to end."""
        is_aborted = self._stopping and not states & {"running"}
        if states <= {"done", "lost"} or is_aborted:
            if self._end_s == float("inf"):
                self._let_go(now_s)
            alive = [running for running in self._running if running.group is not None]
            if not alive or now_s >= self._end_s:
                self.ended = True

    def _let_go(self, now_s: float) -> None:
        self._end_s, self._stop_end_s = now_s + _END_S, float("inf")
        for peer in self.peers:
            peer.send(pack(frame.BYE))
        for running in self._running:
            if running.group is not None and self._is_reaching(running):
                running.group.kill()

    # ---- the end

    def report(self) -> Report:
        """How all of it ended: every node's ranks, the first failure of all."""
        reports = [peer.report for peer in self.peers if peer.report is not None]
        failed = [peer for peer in self.peers if peer.report is not None and peer.report.first_failure is not None]
        first = min(failed, key=lambda peer: (peer.failed_s, peer.index), default=None)
        return Report(
            launch_id=self.launch_id,
            run_id=self._options.run_id,
            host=os.uname().nodename,
            world_size=sum(len(report.exits) for report in reports),
            start_s=min((report.start_s for report in reports), default=self._start_s),
            end_s=max((report.end_s for report in reports), default=time.time()),
            exits=tuple(exit_ for report in reports for exit_ in report.exits),
            first_failure=first.report.first_failure if first is not None and first.report is not None else None,
            told=self._told,
            strays=tuple(stray for report in reports for stray in report.strays),
            stray_count=sum(report.stray_count for report in reports),
            stuck=tuple(stuck for report in reports for stuck in report.stuck),
            notices=(*self._notices, *(notice for report in reports for notice in report.notices)),
            looks=tuple(look for report in reports for look in report.looks),
        )

    @property
    def blames_node(self) -> bool:
        """The job ended for a node that was lost, or would not begin; not for a rank."""
        lost_s = min((peer.failed_s for peer in self.peers if peer.state == "lost"), default=float("inf"))
        ranks_s = min((peer.failed_s for peer in self.peers if peer.state != "lost"), default=float("inf"))
        return self.error is not None and (not isinstance(self.error, NodeLost) or lost_s <= ranks_s)

    def close(self) -> None:
        """Cut what is still connected, which kills what still runs there; end and reap our commands. Safe twice."""
        for peer in self.peers:
            if peer.wire is not None:
                peer.wire.close()
        for wire in self._strangers:
            wire.close()
        self._strangers.clear()
        for running in self._running:
            if running.group is not None:
                running.group.close()
                running.group = None
        if self._listener is not None:
            self._listener.close()
        for outlet in self._outlets.values():
            outlet.close()
        if not self._epoll.closed:
            self._epoll.close()


def _is_main_thread() -> bool:
    from _thread import get_native_id

    return get_native_id() == os.getpid()
