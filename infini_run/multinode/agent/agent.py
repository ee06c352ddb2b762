"""The agent: the launcher of one node, under a head.

It runs its node's part of the plan as the command does, with the same NodeLaunch (agent_attempt.py). The output of
its ranks goes to the head. If the head has gone, or is silent for too long, the agent kills everything here.
"""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.errors import InfiniRunError, LinkError, StartError, printable
from infini_run.multinode.agent.agent_setup import NodeSetup, check_version, hello, make_node_plan, prepare
from infini_run.multinode.agent.agent_signals import AgentSignals
from infini_run.multinode.agent.head_link import HeadLink, TurnedAway
from infini_run.multinode.agent.rank_orders import RankOrders
from infini_run.multinode.agent.rank_stdio import RankStdio
from infini_run.multinode.link import message_schema, protocol
from infini_run.multinode.link.protocol import HANDSHAKE_S, pack, pack_json, unpack_json
from infini_run.system.poller import Poller
from infini_run.system.resource_limits import with_limit_hint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.core.c_structs import ProcessState
    from infini_run.multinode.agent.agent_attempt import AgentAttempt
    from infini_run.multinode.agent.agent_check import AgentCheck
    from infini_run.multinode.agent.agent_preload import AgentPreload
    from infini_run.multinode.agent.byte_stream import AgentStream
    from infini_run.multinode.agent.old_world import StuckProcesses
    from infini_run.multinode.link.connection import Connection
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan

_OLD_RANKS_S = 1.0  # for ranks of an earlier attempt, which a guard is ending


class Agent:
    """One agent, from its HELLO to GOODBYE; in between it runs ranks as often as the head says.

    Args:
        connection: to the head.
        node: index of this node; it may still change.
        own_options: of this node's own command line, if the user started it manually: the head then only says who
            joins and when. None: the head's options hold.
        facts: values of variables that the engine asked for.
        environ: environment that ranks inherit; None: that of this process.
        host: the name of this node in the head's list of hosts, for engines that may number nodes otherwise.
        entry: what an earlier agent of this process has taken over. None: none has.
        last_job: the launch id of an earlier job of which this process was a node, or asked to be; and its
            --node_timeout in seconds.
    """

    def __init__(
        self,
        connection: Connection,
        node: int,
        own_options: Options | None = None,
        facts: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        host: str = "",
        entry: ProcessState | None = None,
        last_job: tuple[str, float] = ("", 0.0),
    ) -> None:
        self._poller = Poller()
        self._link = HeadLink(connection, self._poller, on_frame=self._handle_frame, on_lost=self._on_link_lost)
        self._signals = AgentSignals(
            self._link,
            self._poller,
            entry=entry,
            is_manual=own_options is not None,
            print_line=self._print_line,
            may_reap=lambda: not self._is_checking and self._preload is None,
        )
        self._identity: dict[str, object] = {"node": node, "host": host}
        if own_options is not None:
            self._identity |= {"run_id": own_options.run_id, "last_job": last_job[0], "last_timeout_s": last_job[1]}
        self._own_options = own_options
        self._environ = os.own_environ() if environ is None else environ
        self._engine_facts = facts
        self._stdio: RankStdio | None = None
        self._stream: AgentStream | None = None  # between the head and the agent's one process
        self._keywords: KeywordErrors | None = None  # for a head in the Python API
        self._observe: tuple[str, ...] = ()  # what the head wants to see of the ranks here
        self._setup: NodeSetup | None = None  # of a node that may be checked
        self._check: AgentCheck | None = None  # the last one
        self._preload: AgentPreload | None = None  # of --preload
        self._orders = RankOrders()
        self._attempt: AgentAttempt | None = None  # the last one
        self._lived_s: float | None = None  # from the last attempt's fork to its failure here
        self._stuck: StuckProcesses | None = None  # of the last attempt
        self.last_job = last_job
        self.has_joined = False
        self.has_refused = False  # this node cannot run its ranks

    @property
    def entry(self) -> ProcessState | None:
        """The state of this process before it was taken over; None: it was not."""
        return self._signals.entry

    @property
    def _is_checking(self) -> bool:
        return self._check is not None and self._check.is_running

    def serve(self, token: bytes | None) -> int:
        """Do all that the head says, until the end.

        Args:
            token: the secret; None: the connection needs no handshake.

        Returns:
            The exit code of this process.

        Raises:
            LinkError: the head has gone, or does not know the token.
        """
        try:
            return self._serve(token)
        except LinkError:
            if self._signals.left_by:
                return 128 + self._signals.left_by
            raise
        finally:
            self._signals.close()
            if self._preload is not None:
                self._preload.close()
            if self._check is not None:
                self._check.close()
            if self._stuck is not None:
                self._stuck.close()
            if self._stdio is not None:
                self._stdio.close()
            self._poller.close()

    def _serve(self, token: bytes | None) -> int:
        if token is not None:
            limit_s = HANDSHAKE_S if self._own_options is None else self._own_options.join_timeout_s
            try:
                self._link.authenticate(token, self._identity, limit_s=limit_s, print_line=print_line)
            except TurnedAway as error:  # its job may run without this node: a later head has to know
                if self._own_options is not None and error.launch_id:
                    self.last_job = error.launch_id, error.timeout_s
                raise
        payload = self._link.next_frame(protocol.SPEC)[1]
        self.has_joined = True
        try:
            check_version(unpack_json(payload))
            spec = message_schema.read(payload, message_schema.SPEC)
            self._link.silence_limit_s = spec["silence_s"]
            self.last_job = spec["launch_id"], spec["silence_s"]
            setup = self._prepare(spec)
        except InfiniRunError as error:
            self._refuse(error)
            return error.exit_code
        while True:
            self._signals.is_idle = True
            self._signals.leave_if_due()
            kind, payload = self._link.next_frame(protocol.LAUNCH, protocol.GOODBYE)
            self._signals.is_idle = False
            if kind == protocol.GOODBYE:
                code: int = message_schema.read(payload, message_schema.GOODBYE)["exit_code"]
                return code if self._own_options is not None else 0
            try:
                self._run_ranks(setup, message_schema.read(payload, message_schema.LAUNCH))
            except LinkError:
                raise
            except InfiniRunError as error:
                self._refuse(error)

    # ---- joining

    def _prepare(self, spec: dict[str, Any]) -> NodeSetup:
        setup = prepare(spec, self._own_options, self._environ)
        for line in setup.warnings:
            print_line(line)
        self._observe = tuple(spec["observe"])
        if spec["names_keywords"]:
            from infini_run.options.keyword_errors import KeywordErrors

            self._keywords = KeywordErrors({})
        if spec["has_stream"]:
            from infini_run.multinode.agent.byte_stream import AgentStream

            self._stream = AgentStream(self._poller, self._link.connection)
            self._link.watchers.append(self._watch_stream)  # its first bytes may come with LAUNCH
        if self._own_options is not None:
            self._signals.give_to_core()
            self._signals.give_back()
            self._link.watchers.append(self._signals.leave_if_due)
        try:
            self._stdio = RankStdio(
                self._link.connection,
                self._poller,
                with_input=setup.options.stdin != "none",
                keywords=self._keywords,
            )
        except OSError as error:
            raise with_limit_hint(
                StartError(os.strerror(error.errno or 0), "opening pipes", error.errno or 0)
            ) from None
        self._link.watchers.append(self._stdio.watch)
        nothing_old_lives = False
        if spec["lease_s"]:
            from infini_run.multinode.agent.old_world import wait_until_gone
            from infini_run.multinode.link.lease import Lease

            nothing_old_lives = wait_until_gone(spec["launch_id"], _OLD_RANKS_S)
            self._setup = setup
            self._link.watchers.append(self._watch_check)
            self._link.lease = Lease(spec["lease_s"])
            self._link.connection.send(self._link.lease.request())  # answered before LAUNCH can come
        self._link.connection.send(
            pack_json(protocol.HELLO, hello(setup, self._engine_facts, nothing_old_lives=nothing_old_lives))
        )
        if setup.options.preload:
            self._begin_imports(setup, spec["launch_id"])
        import infini_run.multinode.agent.agent_attempt  # noqa: F401  now, while other nodes are still joining

        self._link.forgive_silence()  # until HELLO the head sends nothing, and nobody listened here
        return setup

    def _begin_imports(self, setup: NodeSetup, launch_id: str) -> None:
        from infini_run.multinode.agent.agent_preload import AgentPreload

        assert self._stdio is not None
        self._signals.give_to_core()
        self._signals.give_back()
        if self._own_options is None:  # until there are ranks, an agent ends as any program
            self._signals.restore_mask()
        entry = self._signals.entry_of_ranks(setup.options)
        assert entry is not None
        self._preload = AgentPreload(
            setup,
            launch_id,
            entry=entry,
            poller=self._poller,
            print_line=self._stdio.print_line,
            on_refusal=self._send_refusal,
        )

    def _watch_stream(self) -> None:
        if self._stream is not None:
            self._stream.watch()

    def _watch_check(self) -> None:
        if self._check is not None:
            self._check.go_on()

    def _start_check(self) -> None:
        """Check this node, unless a check or ranks run here."""
        from infini_run.multinode.agent.agent_check import AgentCheck

        if self._setup is None or self._is_checking or self._orders.run is not None:
            return
        self._check = AgentCheck(self._setup, link=self._link, poller=self._poller, signals=self._signals)
        self._check.start()

    def _refuse(self, error: InfiniRunError) -> None:
        self._send_refusal(error)
        self._link.drain()

    def _send_refusal(self, error: InfiniRunError) -> None:
        self.has_refused = True
        if self._own_options is not None:  # this node's user may not see what the head says
            print_line(f"infini-run: {printable(str(error))}", 2 if self._stdio is None else self._stdio.own_stderr)
        self._link.send_error(error)

    def _print_line(self, text: str) -> None:
        """Print a line for the user: at the head, as soon as ranks may write there."""
        if self._stdio is None:
            print_line(text)
        else:
            self._stdio.print_line(text)

    # ---- ranks

    def _run_ranks(self, setup: NodeSetup, launch: dict[str, Any]) -> None:
        """Run the ranks of this node to their end, and report it."""
        plan, options = make_node_plan(setup, launch)
        if self._preload is not None and not self._preload.prepare(plan, self._lived_s, self._link, self._is_over):
            return
        if self._link.is_lost:
            raise self._link.lost_error()
        self._signals.give_to_core()
        try:
            self._run_attempt(setup, launch, plan, options)
        finally:
            self._signals.give_back()  # also if they cannot start: a launcher that rejoins may receive a stop

    def _is_over(self) -> bool:
        """Return whether the attempt that is about to start will be stopped at once."""
        return self._orders.is_stopped or self._link.is_lost

    def _run_attempt(self, setup: NodeSetup, launch: dict[str, Any], plan: Plan, options: Options) -> None:
        from infini_run.multinode.agent.agent_attempt import AgentAttempt

        assert self._stdio is not None
        self._signals.has_run = True
        self._attempt = AgentAttempt(
            plan,
            options,
            setup=setup,
            launch=launch,
            link=self._link,
            poller=self._poller,
            stdio=self._stdio,
            stream=self._stream,
            orders=self._orders,
            signals=self._signals,
            zygote=None if self._preload is None else self._preload.zygote,
            keywords=self._keywords,
            observe=self._observe,
        )
        report = self._attempt.run_to_end()
        self._lived_s = self._attempt.lived_s
        if report.stuck and self._link.lease is not None:
            self._await_end(launch["launch_id"], [process.pid for process in report.stuck])

    def _await_end(self, launch_id: str, pids: Sequence[int]) -> None:
        """Report to the head when the processes are gone that SIGKILL did not end at once."""
        from infini_run.multinode.agent.old_world import StuckProcesses

        connection = self._link.connection
        self._stuck = StuckProcesses(
            launch_id, pids, self._poller, on_end=lambda: connection.send(pack(protocol.NOTHING_OLD_LIVES))
        )

    # ---- the head's words

    def _handle_frame(self, kind: bytes, payload: bytes) -> None:
        relay = None if self._attempt is None else self._attempt.relay
        if kind == protocol.INPUT and self._stdio is not None:
            self._stdio.feed(payload)
        elif kind == protocol.STREAM_DOWN and self._stream is not None:
            self._stream.feed(payload)
        elif kind == protocol.USAGE_REQUEST and relay is not None:
            relay.sample(message_schema.read(payload, message_schema.USAGE_REQUEST)["ranks"])
        elif kind == protocol.QUESTION:
            self._answer(**message_schema.read(payload, message_schema.QUESTION))
        elif kind == protocol.CHECK:
            self._start_check()
        elif kind == protocol.LAUNCH:
            self._orders.renew()
            self._renew_stream()
        else:
            self._orders.handle_frame(kind, payload)

    def _renew_stream(self) -> None:
        """Make another stream for the process of the next attempt, if that of the last one is closed."""
        if self._stream is not None and self._stream.is_closed:
            from infini_run.multinode.agent.byte_stream import AgentStream

            self._stream = AgentStream(self._poller, self._link.connection)

    def _answer(self, number: int, request: dict[str, Any]) -> None:
        """Answer what another process asks the head about the ranks of this node."""
        asker = _HeadAsks(self._link.connection, number)
        run = self._orders.run
        if run is None:
            asker.finish({"error": "no ranks run on this node"})
        else:
            if request.get("question") == "earlier" and self._stdio is not None:
                self._stdio.send_waiting()  # what comes behind the answer is not in it
            run.control.ask(asker, request)

    def _on_link_lost(self) -> None:
        """Kill all ranks: nobody can direct this node any more."""
        if self._orders.run is not None:
            self._orders.run.kill()


class _HeadAsks:
    """The head, which asks for another process, as an Asker of control/server.py."""

    who = "the head"
    is_closed = False

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number

    def finish(self, content: dict[str, object]) -> None:
        """Send the answer."""
        self._connection.send(pack_json(protocol.ANSWERED, {"number": self._number, "answer": content}))


def print_line(text: str, fd: int = 2) -> None:
    """Print a line on this process's stderr, and wait a second at most for its reader."""
    from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S, write_all

    write_all(fd, os.encode_text(text + "\n"), CONSOLE_WAIT_S)
