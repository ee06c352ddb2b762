"""The agent: one node's launcher, told what to do by the head over the Link.

    python -m infini_run.multinode.agent                      the link is its stdin and stdout
    python -m infini_run.multinode.agent --link=HOST,HOST:PORT --node=K|VARIABLE
                                                              it dials; INFINI_RUN_TOKEN is the token

It runs its node's part of the plan as the command does, with the same NodeLaunch. What its ranks write goes to the
head; when the head has gone, or is silent for too long, everything here is killed.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from _functools import partial  # the C module: `functools` costs 3 ms

from infini_run.errors import InfiniRunError, LinkError, ProgramError, UsageError, printable
from infini_run.multinode import message_schema, protocol
from infini_run.multinode.agent_options import options_of_agents
from infini_run.multinode.byte_stream import AgentStream
from infini_run.multinode.clock_offset import answer
from infini_run.multinode.connection import MAGIC, TOKEN, TOKEN_FILE, Connection, Handshake, Unheard
from infini_run.multinode.protocol import pack, pack_json, unpack_json
from infini_run.multinode.record_codec import decode_record, to_jsonable
from infini_run.options.nodes import HEADS_OWN
from infini_run.record import replace
from infini_run.system.poller import READ, WRITE, Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.core.group import Event, ProcessAtEntry
    from infini_run.display.relay import ObserverRelay
    from infini_run.node.launch import NodeLaunch
    from infini_run.options.options import Options
    from infini_run.plan.model import Command, Plan
    from infini_run.system.signal_pipe import CtrlZ

VERSION_FIELD = "version"
_PROVE_S = 10.0  # that a handshake may take
_HELD = 1 << 20  # bytes that the head has not taken: then our ranks wait
_PIECE = 1 << 16
_READER_S = 1.0  # as CONSOLE_WAIT_MS of csrc/group/group.h: how long for who does not read
_TSTP, _CONT, _STOP = 20, 18, 19
_EARLY = 64  # signals that are kept until there are ranks
_BEATS = 3  # signs of life within the head's patience, while Ctrl-Z has stopped us
_GONE = "the head has gone"


class RankStdio:
    """Our stdio, for the ranks: what they write to 1 and 2 is read here, what they read at 0 is written here."""

    def __init__(self, with_input: bool, poller: Poller) -> None:
        self._poller = poller
        self._own_err = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
        self.out_fd, out = os.pipe()
        self.err_fd, err = os.pipe()
        self.in_fd = -1
        source = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        if with_input:
            os.close(source)
            source, self.in_fd = os.pipe()
        for theirs, number in ((source, 0), (out, 1), (err, 2)):
            os.dup2(theirs, number)
            os.close(theirs)
        for fd in (self.out_fd, self.err_fd, self.in_fd):
            if fd >= 0:
                os.set_blocking(fd, False)
        self.pending = bytearray()  # for the ranks' stdin
        self._input_ends = False

    def give_back(self) -> None:
        """Our stderr is our own again: nobody reads the pipe that is in its place."""
        os.dup2(self._own_err, 2)

    def read(self, fd: int) -> bytes:
        """What the ranks have written; empty: nothing now."""
        try:
            return os.read(fd, _PIECE)
        except BlockingIOError:
            return b""

    def feed(self, data: bytes) -> None:
        """Give it to the ranks that read stdin; nothing: it ends here."""
        if data:
            self.pending += data
        else:
            self._input_ends = True
        self.write()

    def write(self) -> None:
        while self.pending and self.in_fd >= 0:
            try:
                sent = os.write(self.in_fd, memoryview(self.pending)[:_PIECE])
            except BlockingIOError:
                return
            except OSError:
                self.pending.clear()
                self._input_ends = True
                break
            del self.pending[:sent]
        if self._input_ends and self.in_fd >= 0 and not self.pending:
            self._poller.unwatch(self.in_fd)
            os.close(self.in_fd)
            self.in_fd = -1


class Agent:
    """One life: greet the head, then run what it says, as often as it says so, until it says good-bye.

    own: where the same command was given on every node, what this one was given; the head says only who comes when.
    environ: what our ranks inherit, by hand (None: ours). host: how the head may know us, where that is surer than
    the number `node`.
    """

    def __init__(
        self,
        wire: Connection,
        node: int,
        own: Options | None = None,
        told: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        host: str = "",
    ) -> None:
        self._wire = wire
        self._name = {"node": node, "host": host}
        self._own = own
        self._environ = os.environ if environ is None else environ
        self._about = list(told)  # what the engine asked us to say
        self._poller = Poller()
        self._frames: list[tuple[bytes, bytes]] = []  # come, and not acted on yet
        self._handshake: Handshake | None = None
        self._carrier: RankStdio | None = None
        self._run: NodeLaunch | None = None
        self._entry: ProcessAtEntry | None = None
        self._silence_s = float("inf")  # that we bear of the head
        self._heard_s = time.monotonic()
        self._told_failure = False
        self._lost = False
        self._loss = _GONE
        self._stop: dict[str, Any] | None = None  # the head said so, perhaps before our ranks were there
        self._is_killed = False  # likewise
        self._signals: list[int] = []  # likewise
        self._ctrl_z: CtrlZ | None = None
        self._cwd = ""
        self._stream: AgentStream | None = None  # between the head and what it runs here
        self._watched: tuple[str, ...] = ()  # what the head wants to see of our ranks
        self._relay: ObserverRelay | None = None
        self._said = b""  # lines of ours that wait for the end of a rank's
        self._is_in_line = False  # the last piece of the ranks' stderr that we sent did not end one

    def serve(self, token: bytes | None) -> int:
        """Our exit code. Raises LinkError: the head has gone, or is none of ours."""
        try:
            return self._serve(token)
        finally:
            if self._carrier is not None:
                self._carrier.give_back()

    def _serve(self, token: bytes | None) -> int:
        if token is not None:
            self._handshake = Handshake(self._wire, token, is_head=False)
            self._prove(self._handshake)
        payload = self._next(protocol.SPEC)[1]
        try:
            _check_version(unpack_json(payload))
            spec = message_schema.read(payload, message_schema.SPEC)
            self._silence_s = spec["silence_s"]
            options, command, environ = self._prepare(spec)
        except InfiniRunError as error:
            self._refuse(error)
            return error.exit_code
        while True:
            kind, payload = self._next(protocol.LAUNCH, protocol.GOODBYE)
            if kind == protocol.GOODBYE:
                code: int = message_schema.read(payload, message_schema.BYE)["exit_code"]
                return code if self._own is not None else 0
            try:
                self._launch(options, command, environ, message_schema.read(payload, message_schema.GO))
            except LinkError:
                raise
            except InfiniRunError as error:
                self._refuse(error)

    def _prove(self, handshake: Handshake) -> None:
        """That we are ours, and who of them. Whatever has the port may also take a connection and say nothing; by
        hand that may be a head which Ctrl-Z has stopped."""
        limit_s = _PROVE_S if self._own is None else self._own.join_timeout_s
        began_s, said = time.monotonic(), ""
        while not handshake.done:
            end_s = began_s + (limit_s if said else min(_PROVE_S, limit_s))
            self._turn(max(0.0, end_s - time.monotonic()))
            if self._lost:
                kind = LinkError if handshake.is_heard else Unheard
                raise kind("the head did not take our token, or is no infini-run")
            if time.monotonic() >= end_s and not handshake.done:
                silence_s = end_s - began_s
                said = f"what listens there has said nothing for {silence_s:g} s: is it node 0's infini-run?"
                if silence_s >= limit_s:
                    raise LinkError(said)
                _say(f"infini-run: {said}")
        self._wire.send(pack_json(protocol.IDENTITY, self._name))
        try:
            what, payload = self._next(protocol.SPEC, protocol.GOODBYE)
        except LinkError as error:
            if str(error) != _GONE:
                raise
            raise LinkError("the head has gone before it said what is to run") from None
        if what == protocol.GOODBYE:
            why = message_schema.read(payload, message_schema.TURNED_AWAY)["error"]
            raise LinkError(f"the head has turned node {self._name['node']} away: {why}")
        self._frames.append((what, payload))

    # ---- before the start

    def _prepare(self, spec: dict[str, Any]) -> tuple[Options, Command, dict[str, str]]:
        """See whether it can be done here, and tell what this node is like."""
        from infini_run.environments.launcher_variables import close_inherited_on_exec, strip_launcher_environment
        from infini_run.node.ports import free_port
        from infini_run.options.options import Options
        from infini_run.plan.program import find_command, inspect_node
        from infini_run.version import VERSION

        self._cwd = spec["cwd"] if self._own is None else os.getcwd()
        try:
            os.chdir(self._cwd)
        except OSError as error:
            raise UsageError(
                f"{self._cwd} on {os.uname().nodename}: {error.strerror}; start from a directory that every node has"
            ) from None
        environ = dict(self._environ)
        if not spec["is_by_hand"]:  # else the user has started us: what he has set for MPI is for the ranks
            environ = strip_launcher_environment(environ)
            close_inherited_on_exec()
        environ |= spec["environ"]
        for name in (TOKEN, TOKEN_FILE):
            environ.pop(name, None)
        options = decode_record(Options, spec["options"])
        if self._own is not None:
            _check_same(self._own, options)
            _tell_idle(self._own, options, spec["asked"])
            ours = options_of_agents(self._own)  # but the terminal, and what is read and shown there, is the head's
            options = replace(ours, live=options.live, stdin=options.stdin)
        self._watched = tuple(spec["watch"])
        command = find_command(options.program, environ, module=options.module, no_python=options.no_python)
        node = inspect_node(options, environ)
        if spec["has_stream"]:
            self._stream = AgentStream(self._poller, self._wire)  # what comes down may come with GO
        if self._own is not None:
            self._watch_ctrl_z()
        self._carrier = RankStdio(with_input=options.stdin != "none", poller=self._poller)
        self._wire.send(
            pack_json(
                protocol.HELLO,
                {
                    VERSION_FIELD: VERSION,
                    "host": node.host,
                    "pid": os.getpid(),
                    "begun": _begun(),
                    "nproc": node.nproc,
                    "port": free_port(),
                    "address": _own_address(),
                    "told": self._about,
                },
            )
        )
        import infini_run.node.launch  # noqa: F401  it will be needed, and others are still on their way

        self._heard_s = time.monotonic()  # we did not listen, and until it knows us the head says nothing

        return options, command, environ

    def _refuse(self, error: InfiniRunError) -> None:
        self._tell_error(error)
        self._drain_wire()

    def _tell_error(self, error: InfiniRunError) -> None:
        kind = "program" if isinstance(error, ProgramError) else "usage" if isinstance(error, UsageError) else "start"
        words = {"error": str(error), "exit_code": error.exit_code, "kind": kind}
        self._wire.send(pack_json(protocol.HELLO, {**words, "host": os.uname().nodename}))

    # ---- a launch

    def _launch(self, options: Options, command: Command, environ: dict[str, str], go: dict[str, Any]) -> None:
        from infini_run.core.group import release_caller_descriptors
        from infini_run.node.launch import NodeLaunch

        if self._entry is None:
            self._entry = _take_process()
        self._forget_ctrl_z()
        plan, options = self._plan(options, command, environ, go)
        for notice in plan.nodes[0].notices:
            self._say(f"infini-run: {go['host']}: {printable(notice)}")
        self._told_failure = False
        run = NodeLaunch(
            plan,
            options,
            environ=environ,
            entry=self._entry,
            cwd=self._cwd,
            print_line=self._say,
            has_head=True,
            heading=go["heading"],
            observers=self._open_relay(),
            stdins={} if self._stream is None else {plan.workers[0].rank: self._stream.theirs.fileno()},
        )
        run.start()
        if self._stream is not None:
            self._stream.theirs.close()
        self._run = run
        release_caller_descriptors()
        for number in self._signals:
            self._signal(run, number)
        if self._is_killed:
            run.kill()
        elif self._stop is not None:
            _stop(run, self._stop)
        while not run.ended:
            for event in run.poll(self._timeout_s(), also=(self._poller.fileno(),)):
                self._follow(event)
                if event.kind == "suspend":
                    self._suspend(run.suspend)
            self._follow_verdict(run)
            self._turn(0)
        run.close()
        self._run = None
        self._close_relay()
        self._carry_rest()
        if self._stream is not None:
            self._stream.finish()
        if self._lost:
            raise LinkError(self._loss)
        from infini_run.node.ports import free_port

        done = {"report": to_jsonable(run.outcome.report()), "port": free_port()}
        self._wire.send(pack_json(protocol.DONE, done))

    def _open_relay(self) -> ObserverRelay | None:
        if not self._watched:
            return None
        from infini_run.display.relay import ObserverRelay

        self._relay = ObserverRelay(
            lambda what: self._wire.send(pack_json(protocol.VIEW, what)),
            lambda: self._wire.waiting < _HELD,
            counts="trace" in self._watched,
        )
        return self._relay

    def _close_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def _plan(
        self, options: Options, command: Command, environ: dict[str, str], go: dict[str, Any]
    ) -> tuple[Plan, Options]:
        from infini_run.plan.model import RankRange, make_plan
        from infini_run.plan.program import error_folder, inspect_node

        options = replace(
            options,
            nnodes=go["nnodes"],
            node_rank=go["node"],
            nproc_per_node=go["nproc"],
            log_dir=os.path.join(self._cwd, options.log_dir) if options.log_dir else "",
            master_addr=go["master_addr"],
            master_port=go["master_port"],
        )
        launch_id = go["launch_id"]
        node = replace(inspect_node(options, environ), host=go["host"])
        plan = make_plan(
            options,
            command,
            [node],
            launch_id=launch_id,
            master_port=options.master_port,
            environ=environ,
            error_dir=error_folder(options, launch_id, environ),
            may_use_terminal=False,
            span=RankRange(first=go["first"], world_size=go["world_size"], most=go["most"]),
        )
        if go["restarts"]:
            from infini_run.plan.restart_policy import with_new_launch_id

            plan = with_new_launch_id(
                plan, launch_id=launch_id, master_port=options.master_port, restarts=go["restarts"]
            )
        return plan, options

    def _follow(self, event: Event) -> None:
        if event.kind == "signalled":
            self._wire.send(pack_json(protocol.EVENT, {"told": event.signal}))
        if event.is_failure:
            self._tell_failure(event.rank, event.time_ns)
        if event.kind in ("started", "ready"):
            self._wire.send(pack_json(protocol.EVENT, {event.kind: event.rank, "pid": event.pid}))

    def _follow_verdict(self, run: NodeLaunch) -> None:
        if not self._told_failure and run.first is not None:
            self._tell_failure(run.first, time.monotonic_ns())

    def _tell_failure(self, rank: int, at_ns: int) -> None:
        """With its age: no two nodes' clocks agree."""
        if not self._told_failure:
            self._told_failure = True
            age_ns = max(0, time.monotonic_ns() - at_ns)
            self._wire.send(pack_json(protocol.EVENT, {"failed": rank, "age_ns": age_ns}))

    # ---- waiting

    def _timeout_s(self) -> float | None:
        """How long the head may still be silent."""
        if self._silence_s == float("inf"):
            return None
        return max(0.0, self._heard_s + self._silence_s - time.monotonic())

    def _next(self, *kinds: bytes) -> tuple[bytes, bytes]:
        """The next frame of these kinds. Others mean nothing now."""
        while True:
            while self._frames:
                kind, payload = self._frames.pop(0)
                if kind in kinds:
                    return kind, payload
            if self._lost:
                raise LinkError(self._loss)
            self._turn(self._timeout_s())

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for the link and the ranks' output, and move what there is."""
        self._watch_all()
        self._poller.poll(timeout_s)
        left_s = self._timeout_s()
        if left_s is not None and left_s <= 0 and not self._lost:
            self._lose(f"nothing was heard of the head for {self._silence_s:g} s (--node_timeout)")
        self._watch_all()

    def _watch_all(self) -> None:
        """What the next wait waits for: our own epoll is one descriptor for the ranks' group."""
        wire, watch = self._wire, self._poller.watch
        if not wire.has_ended:
            write = WRITE if wire.wants_write else 0
            if wire.fileno() == wire.write_fd:
                watch(wire.fileno(), READ | write, self._meet)
            else:
                watch(wire.fileno(), READ, self._hear)
                watch(wire.write_fd, write, wire.flush)
        carrier = self._carrier
        if carrier is not None:
            read = READ if wire.waiting < _HELD else 0
            watch(carrier.out_fd, read, partial(self._carry, carrier.out_fd, protocol.OUT))
            watch(carrier.err_fd, read, partial(self._carry, carrier.err_fd, protocol.ERR))
            if carrier.in_fd >= 0:
                watch(carrier.in_fd, WRITE if carrier.pending else 0, carrier.write)
        if self._stream is not None:
            self._stream.watch(has_room=wire.waiting < _HELD)

    def _meet(self) -> None:
        """The link is one descriptor for both ways."""
        self._wire.flush()
        self._hear()

    def _hear(self) -> None:
        try:
            for kind, payload in self._wire.read():
                self._heard_s = time.monotonic()
                self._take(kind, payload)
        except LinkError as error:
            if self._handshake is None or self._handshake.done:
                self._tell_error(error)  # the other direction may be as it should
            self._lose(str(error))
            return
        if self._wire.has_ended:
            self._lose()

    def _take(self, kind: bytes, payload: bytes) -> None:
        run = self._run
        if self._handshake is not None and not self._handshake.done:
            self._handshake.take(kind, payload)
        elif kind == protocol.HEARTBEAT:
            asked = message_schema.read(payload, message_schema.ASK) if payload else None
            self._wire.send(
                pack(protocol.HEARTBEAT) if asked is None else pack_json(protocol.HEARTBEAT, answer(asked))
            )
        elif kind == protocol.INPUT and self._carrier is not None:
            self._carrier.feed(payload)
        elif kind == protocol.STREAM_DOWN and self._stream is not None:
            self._stream.feed(payload)
        elif kind == protocol.LOOK and self._relay is not None:
            self._relay.sample(message_schema.read(payload, message_schema.LOOK)["ranks"])
        elif kind == protocol.STOP:
            self._stop = message_schema.read(payload, message_schema.STOP)
            if run is not None:
                _stop(run, self._stop)
        elif kind == protocol.KILL:
            self._is_killed = True
            if run is not None:
                run.kill()
        elif kind == protocol.SIGNAL:
            number = message_schema.read(payload, message_schema.SIGNAL)["signal"]
            if run is not None:
                self._signal(run, number)
            elif len(self._signals) < _EARLY:
                self._signals.append(number)
        elif kind in (protocol.SPEC, protocol.LAUNCH, protocol.GOODBYE):
            self._stop, self._is_killed, self._signals = None, False, []  # what comes later is for what begins now
            self._frames.append((kind, payload))

    def _signal(self, run: NodeLaunch, number: int) -> None:
        """Ctrl-Z and its end are for whole process groups; all others for the ranks' own processes."""
        if number in (_TSTP, _CONT):
            run.signal_groups(_STOP if number == _TSTP else _CONT)
        else:
            run.signal(number)

    def _watch_ctrl_z(self) -> None:
        """Until our ranks' group has the signals: whoever stops us now would have the head give us up."""
        from infini_run.system.signal_pipe import CtrlZ, stop_self

        ctrl_z = self._ctrl_z = CtrlZ()

        def hear() -> None:
            if ctrl_z.has_come():
                self._suspend(stop_self)

        self._poller.watch(ctrl_z.fd, READ, hear)

    def _forget_ctrl_z(self) -> None:
        ctrl_z, self._ctrl_z = self._ctrl_z, None
        if ctrl_z is not None:
            self._poller.unwatch(ctrl_z.fd)
            ctrl_z.close()

    def _suspend(self, stop: Callable[[], None]) -> None:
        """Ctrl-Z: `stop` stops us, until we go on. A fork of us gives the signs of life meanwhile."""
        if self._lost:
            stop()
            return
        from infini_run.multinode.heartbeat_process import HeartbeatProcess

        stand_in = None
        try:
            stand_in = HeartbeatProcess([self._wire], self._silence_s / _BEATS)
        except OSError as error:
            self._say(f"infini-run: node 0 will hear nothing of us, and give up: {error.strerror}")
        stop()
        if stand_in is not None:
            stand_in.end()
        self._heard_s = time.monotonic()  # what the head has said meanwhile is still to be read

    def _lose(self, why: str = "") -> None:
        """Nobody is there to tell us what to do: nothing of the job may stay."""
        self._lost, self._loss = True, why or self._loss
        for fd in (self._wire.fileno(), self._wire.write_fd):
            self._poller.unwatch(fd)
        self._wire.close()
        if self._run is not None:
            self._run.kill()

    # ---- output

    def _carry(self, fd: int, kind: bytes) -> None:
        self._carry_piece(fd, kind)

    def _carry_piece(self, fd: int, kind: bytes) -> bool:
        assert self._carrier is not None
        data = self._carrier.read(fd)
        if data:
            self._wire.send(pack(kind, self._with_said(data) if kind == protocol.ERR else data))
        return bool(data)

    def _say(self, text: str) -> None:
        """A line of ours, between those of our ranks. Not by their pipe: it is we who read it, and it may be full."""
        self._said += os.fsencode(text + "\n")
        if not self._is_in_line:
            self._wire.send(pack(protocol.ERR, self._with_said(b"")))

    def _with_said(self, data: bytes) -> bytes:
        """What the ranks have written, and behind its first line what we have to say."""
        self._is_in_line = not data.endswith(b"\n") if data else self._is_in_line
        at = data.find(b"\n") + 1
        if self._said and (at or not data):
            data, self._said = data[:at] + self._said + data[at:], b""
        return data

    def _carry_rest(self) -> None:
        """Everyone has ended: what is still in the pipes is all."""
        assert self._carrier is not None
        for fd, kind in ((self._carrier.out_fd, protocol.OUT), (self._carrier.err_fd, protocol.ERR)):
            while self._carry_piece(fd, kind):
                pass
        if self._said:
            self._wire.send(pack(protocol.ERR, b"\n" + self._with_said(b"")))
        self._is_in_line = False  # of the head's lines of this launch none goes on

    def _drain_wire(self) -> None:
        """Until the head has taken what we have said, or has gone."""
        while self._wire.wants_write and not self._lost:
            self._turn(None)


def _stop(run: NodeLaunch, how: dict[str, Any]) -> None:
    run.stop(int(how["signal"]), by_signal=bool(how["is_told"]))


def _take_process() -> ProcessAtEntry:
    """As the command does: signals are the group's to read from here on."""
    import _signal

    from infini_run.core.group import take_over_process

    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    return take_over_process(sum(1 << (number - 1) for number in before))


def _begun() -> str:
    """When this process began, in the kernel's ticks: with its number that names it and no other (proc(5), stat)."""
    with open("/proc/self/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19].decode()


def _say(text: str) -> None:
    """On our own stderr, which nobody may read."""
    from infini_run.core.nonblocking_writer import write_all

    write_all(2, os.fsencode(text + "\n"), _READER_S)


def _own_address() -> str:
    """The address by which the head has reached us, as sshd knows it (ssh(1), SSH_CONNECTION); else "". Slurm hands
    on the variable of whoever has logged in somewhere else: what is no address of this machine is none of ours."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and _is_ours(words[2]) else ""


def _is_ours(address: str) -> bool:
    """Whether something here could listen there."""
    from _socket import AF_INET, AF_INET6, SOCK_DGRAM, socket  # the C module: `socket` costs 5 ms

    try:
        probe = socket(AF_INET6 if ":" in address else AF_INET, SOCK_DGRAM)
    except OSError:  # no IPv6 here
        return False
    try:
        probe.bind((address, 0))
    except OSError:
        return False
    finally:
        probe.close()
    return True


def _check_version(spec: object) -> None:
    """Raises UsageError: the head is of another one, which may say other things."""
    from infini_run.version import VERSION

    theirs = spec.get(VERSION_FIELD) if isinstance(spec, dict) else None
    if isinstance(theirs, str) and theirs != VERSION:
        here = os.uname().nodename
        raise UsageError(f"infini-run {VERSION} is on {here}, {theirs} on the head: install the same version on both")


def _check_same(ours: Options, theirs: Options) -> None:
    """Raises UsageError: the commands of two nodes differ where they must not."""
    for name in ("nnodes", "master_port"):
        if getattr(ours, name) != getattr(theirs, name):
            raise UsageError(
                f"--{name}={getattr(ours, name)} here, {getattr(theirs, name)} on node 0: give every node the same"
            )


def _tell_idle(ours: Options, theirs: Options, asked: Sequence[str]) -> None:
    """Flags that are node 0's affair, and have no effect there."""
    idle = [f"--{name}" for name in HEADS_OWN if getattr(ours, name) not in ("", "auto", "off") and name not in asked]
    if ours.stdin not in (0, theirs.stdin):
        idle.append(f"--stdin={ours.stdin}")
    if idle:
        _say(f"infini-run: {', '.join(idle)}: no effect here, it is node 0's")


def main(argv: Sequence[str]) -> int:
    """Be the agent that the words say; return its exit code."""
    options = dict(word.removeprefix("--").partition("=")[::2] for word in argv)
    node = options.get("node", "-1")
    told = [os.environ.get(name, "") for name in options.get("tell", "").split(",") if name]
    try:
        index = _index(node)
        if "link" in options:
            from infini_run.multinode.tcp import connect, join

            host = (os.environ.get(options["host"]) or os.uname().nodename) if "host" in options else ""
            token = _token(options.get("token_file", ""))
            return join(lambda: Agent(connect(options["link"]), index, told=told, host=host).serve(token))
        wire = Connection(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3))
        wire.send(MAGIC)
        return Agent(wire, index).serve(None)
    except InfiniRunError as error:
        _say(f"infini-run: {error}")
        return error.exit_code


def _index(node: str) -> int:
    """Which node we are: a number, or the variable that has it."""
    text = node if node.lstrip("-").isdecimal() else os.environ.get(node, "")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{node} is {text or 'not set'} here: the engine does not say which node this is") from None


def _token(path: str) -> bytes:
    if not path:
        return os.fsencode(os.environ.get(TOKEN, ""))
    with open(path, "rb") as file:
        return file.read()


def run() -> None:
    """Be the agent that our words say, and end: the interpreter's own end has nothing to do here."""
    os._exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
