"""The agent: the launcher of one node, under a head.

It runs its node's part of the plan as the command does, with the same NodeLaunch. The output of its ranks goes to the
head. If the head has gone, or is silent for too long, the agent kills everything here.
"""

from __future__ import annotations

import _signal
import time

import infini_run.lean_os as os
from infini_run.errors import InfiniRunError, LinkError, StartError, printable
from infini_run.multinode import message_schema, protocol
from infini_run.multinode.agent_setup import NodeSetup, check_version, free_ports, hello, make_node_plan, prepare
from infini_run.multinode.head_link import HeadLink, TurnedAway
from infini_run.multinode.lease import LEAST_LEASE
from infini_run.multinode.progress_messages import ProgressSender
from infini_run.multinode.protocol import HANDSHAKE_S, pack, pack_json, unpack_json
from infini_run.multinode.rank_stdio import RankStdio
from infini_run.multinode.record_codec import to_jsonable
from infini_run.record import replace
from infini_run.system.poller import READ, Poller
from infini_run.system.resource_limits import with_limit_hint
from infini_run.system.signal_numbers import SIGSTOP, SIGTSTP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.core.group import Event, ProcessState
    from infini_run.core.signal_pipe import SignalPipe
    from infini_run.display.relay import ObserverRelay
    from infini_run.multinode.agent_preload import AgentPreload
    from infini_run.multinode.byte_stream import AgentStream
    from infini_run.multinode.connection import Connection
    from infini_run.multinode.lease import Lease
    from infini_run.multinode.old_world import StuckProcesses
    from infini_run.node.guard_lease import GuardLease
    from infini_run.node.headed_programs import HeadedPrograms
    from infini_run.node.launch import NodeLaunch
    from infini_run.node.node_check import NodeCheck
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.hang_snapshot import HangSnapshot

_OLD_RANKS_S = 1.0  # for ranks of an earlier attempt, which a guard is ending
_EARLY_SIGNALS = 64  # that are kept until the ranks have started


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
        self._identity: dict[str, object] = {"node": node, "host": host}
        if own_options is not None:
            self._identity |= {"run_id": own_options.run_id, "last_job": last_job[0], "last_timeout_s": last_job[1]}
        self._own_options = own_options
        self._environ = os.own_environ() if environ is None else environ
        self._engine_facts = facts
        self._stdio: RankStdio | None = None
        self._stream: AgentStream | None = None  # between the head and the agent's one process
        self.entry = entry
        self.last_job = last_job
        self.has_joined = False
        self._observe: tuple[str, ...] = ()  # what the head wants to see of the ranks here
        self._relay: ObserverRelay | None = None
        self._setup: NodeSetup | None = None
        self._check: NodeCheck | None = None  # that runs
        self._stuck: StuckProcesses | None = None  # of the last attempt
        self._preload: AgentPreload | None = None  # of --preload
        self._keywords: KeywordErrors | None = None  # for a head in the Python API
        self._lived_s: float | None = None  # from the last attempt's fork to its failure here
        self._launch: NodeLaunch | None = None
        self._has_reported_failure = False
        self._stop: dict[str, Any] | None = None  # these three may come before the ranks have started
        self._is_killed = False
        self._signals: list[int] = []
        self._programs: list[str] = []  # that may start
        self._ending: list[dict[str, Any]] = []  # programs to end alone
        self._signal_pipe: SignalPipe | None = None  # of a launcher that the user has started
        self._is_idle = False  # no ranks run, and all that was to be said of the last ones is said
        self._has_run = False  # ranks
        self._end_signals = 0  # that came while no ranks ran here
        self._left_by = 0  # the one that ends this launcher, whatever the head says

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
            if self._left_by:
                return 128 + self._left_by
            raise
        finally:
            if self._own_options is not None and self.entry is not None:
                _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())  # none may come in between
                self._close_signal_pipe()
                self._restore_mask()
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
            self._is_idle = True
            self._leave_if_due()
            kind, payload = self._link.next_frame(protocol.LAUNCH, protocol.GOODBYE)
            self._is_idle = False
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
            from infini_run.multinode.byte_stream import AgentStream

            self._stream = AgentStream(self._poller, self._link.connection)
            self._link.watchers.append(self._watch_stream)  # its first bytes may come with LAUNCH
        if self._own_options is not None:
            self._take_signals()
            self._return_signals()
            self._link.watchers.append(self._leave_if_due)
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
            from infini_run.multinode.lease import Lease
            from infini_run.multinode.old_world import wait_until_gone

            nothing_old_lives = wait_until_gone(spec["launch_id"], _OLD_RANKS_S)
            self._setup = setup
            self._link.watchers.append(self._go_on_with_check)
            self._link.lease = Lease(spec["lease_s"])
            self._link.connection.send(self._link.lease.request())  # answered before LAUNCH can come
        self._link.connection.send(
            pack_json(protocol.HELLO, hello(setup, self._engine_facts, nothing_old_lives=nothing_old_lives))
        )
        if setup.options.preload:
            self._begin_imports(setup, spec["launch_id"])
        import infini_run.node.launch  # noqa: F401  now, while other nodes are still joining

        self._link.forgive_silence()  # until HELLO the head sends nothing, and nobody listened here
        return setup

    def _begin_imports(self, setup: NodeSetup, launch_id: str) -> None:
        from infini_run.multinode.agent_preload import AgentPreload

        assert self._stdio is not None
        self._take_signals()
        self._return_signals()
        if self._own_options is None:  # until there are ranks, an agent ends as any program
            self._restore_mask()
        assert self.entry is not None
        self._preload = AgentPreload(
            setup,
            launch_id,
            entry=_entry_of_ranks(self.entry, setup.options),
            poller=self._poller,
            print_line=self._stdio.print_line,
            on_refusal=self._send_refusal,
        )

    def _watch_stream(self) -> None:
        if self._stream is not None:
            self._stream.watch()

    # ---- the check of this node

    def _start_check(self, setup: NodeSetup) -> None:
        from infini_run.node.node_check import NodeCheck

        options = setup.options
        self._check = NodeCheck(
            options.node_check,
            environ=setup.check_environ,
            cwd=setup.cwd,
            timeout_s=options.node_check_timeout_s,
            gpus=setup.gpus,
            log_dir=setup.log_dir,
            entry=self.entry,
        )
        self._check.start()
        self._go_on_with_check()

    def _go_on_with_check(self) -> None:
        check = self._check
        if check is None or self._link.is_lost:
            return
        if not check.ended:
            self._poller.unwatch(check.fileno())  # at its end the descriptor is closed
        if check.poll(0):
            self._check, self._link.due_s = None, float("inf")
            self._reap_orphans()
            self._link.connection.send(pack_json(protocol.CHECKED, {"reason": check.reason}))
        else:
            self._poller.watch(check.fileno(), READ, self._go_on_with_check)
            self._link.due_s = check.due_s

    def _refuse(self, error: InfiniRunError) -> None:
        self._send_refusal(error)
        self._link.drain()

    def _send_refusal(self, error: InfiniRunError) -> None:
        if self._own_options is not None:  # this node's user may not see what the head says
            print_line(f"infini-run: {printable(str(error))}", 2 if self._stdio is None else self._stdio.own_stderr)
        self._link.send_error(error)

    # ---- ranks

    def _run_ranks(self, setup: NodeSetup, launch: dict[str, Any]) -> None:
        """Run the ranks of this node to their end, and report it."""
        plan, options = make_node_plan(setup, launch)
        if self._preload is not None and not self._preload.prepare(plan, self._lived_s, self._link, self._is_over):
            return
        if self._link.is_lost:
            raise self._link.lost_error()
        self._take_signals()
        try:
            self._run_attempt(setup, launch, plan, options)
        finally:
            self._return_signals()  # also if they cannot start: a launcher that rejoins may receive a stop

    def _is_over(self) -> bool:
        """Return whether the attempt that is about to start will be stopped at once."""
        return self._stop is not None or self._is_killed or self._link.is_lost

    def _run_attempt(self, setup: NodeSetup, launch: dict[str, Any], plan: Plan, options: Options) -> None:
        from infini_run.core.group import release_caller_descriptors
        from infini_run.node.launch import NodeLaunch

        assert self._stdio is not None
        for notice in plan.nodes[0].notices:
            self._stdio.print_line(f"infini-run: {launch['host']}: {printable(notice)}")
        self._has_reported_failure, self._has_run = False, True
        progress = ProgressSender(self._send_progress, lambda: self._link.connection.has_room, launch["nnodes"])
        given: dict[str, Any] = {
            "environ": setup.environ,
            "entry": self.entry and _entry_of_ranks(self.entry, options),
            "cwd": setup.cwd,
            "print_line": self._stdio.print_line,
            "keywords": self._keywords,
            "head": _LaunchReports(self._link.connection, self._stdio),
            "heading": launch["heading"],
            "observers": self._open_relay(options.metrics_interval_s),
            "lease": None if self._link.lease is None else self._guard_lease(self._link.lease),
            "stdins": {} if self._stream is None else {plan.workers[0].rank: self._stream.child_socket.fileno()},
        }
        zygote = None if self._preload is None else self._preload.zygote
        run: NodeLaunch
        if zygote is None:
            run = NodeLaunch(plan, options, **given)
        else:
            from infini_run.node.warm_launch import WarmLaunch

            run = WarmLaunch(plan, options, zygote=zygote, **given)
        self._start(run)
        if self._stream is not None:
            self._stream.child_socket.close()
        self._launch = run
        if not run.starts_more:  # those start here, with these descriptors
            release_caller_descriptors(0 if self.entry is None else self.entry.inherited_end)
        if run.programs is not None:
            run.programs.start(self._programs)
        if run.headed is not None:
            for content in self._ending:
                run.headed.end(**content)
        for number in self._signals:
            _forward_signal(run, number)
        if self._is_killed:
            run.kill()
        elif self._stop is not None:
            _stop(run, **self._stop)
        while not run.ended:
            events = run.poll(progress.wait_s(self._link.wait_s()), also=(self._poller.fileno(),))
            for event in events:
                self._send_event(event, options.again_code, is_headed=run.headed is not None)
                if event.kind == "progress":
                    progress.note(event)
                if event.kind == "suspend":
                    self._link.suspend(run.suspend, self._stdio.print_line)
            if run.headed is not None:
                self._send_failures(run.headed)
            if not run.ended:  # else the report has them
                self._send_exits([event for event in events if event.kind == "exited"], options.again_code)
            if run.headed is not None:
                self._send_ends(run.headed, progress)
            elif run.first is not None:
                self._send_failure(run.first, time.monotonic_ns())
            progress.run_due()
            self._link.poll(0)
            self._keep_lease(run)
        if run.headed is not None:
            self._send_ends(run.headed, progress)
        self._lived_s = None if run.first is None else run.lived_s
        run.record_statuses()  # the head's --report has them, also if nothing failed
        run.close()
        self._launch = None
        if self._link.lease is not None:
            self._return_signals()
        self._close_relay()
        self._stdio.drain()
        if self._stream is not None:
            self._stream.finish()
        if self._link.is_lost:
            raise self._link.lost_error()
        report = run.outcome.report()
        done = {"report": to_jsonable(report), "ports": free_ports(setup), "progress": run.progress}
        self._link.connection.send(pack_json(protocol.DONE, done))
        if report.stuck and self._link.lease is not None:
            self._await_end(launch["launch_id"], [process.pid for process in report.stuck])

    def _guard_lease(self, lease: Lease) -> GuardLease:
        """Return the lease for the guard, which also reports that the ranks are dead once this process is. The head
        gets the hash of that word before a rank lives."""
        from infini_run.node.guard_lease import GuardLease

        given: dict[str, Any] = {"length_s": lease.length_s, "since_s": lease.since_ns / 1e9}
        connection = self._link.connection
        if connection.write_fd == connection.fileno():  # with two pipes ssh reports it
            from infini_run.multinode.last_word import make_last_word

            word, hashed = make_last_word()
            connection.send(hashed)
            given |= {"last_word": word, "link_fd": connection.fileno()}
        return GuardLease(**given)

    def _start(self, run: NodeLaunch) -> None:
        """Start the ranks. Raises as NodeLaunch.start; LinkError if their lease has run out, which is no refusal."""
        self._keep_lease(run)  # LAUNCH may come late, after the head has given this node up
        if self._link.is_lost:
            raise self._link.lost_error()
        try:
            run.start()
        except StartError as error:
            if error.errno != os.ETIME or self._link.is_lost:
                raise
            self._link.give_up("the lease of the ranks expired before they could start")
            raise self._link.lost_error() from None

    def _await_end(self, launch_id: str, pids: Sequence[int]) -> None:
        """Report to the head when the processes are gone that SIGKILL did not end at once."""
        from infini_run.multinode.old_world import StuckProcesses

        connection = self._link.connection
        self._stuck = StuckProcesses(
            launch_id, pids, self._poller, on_end=lambda: connection.send(pack(protocol.NOTHING_OLD_LIVES))
        )

    def _take_signals(self) -> None:
        """Let the core read the signals of this process, while ranks run."""
        if self.entry is None:
            self.entry = _take_over_process()
        else:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        self._close_signal_pipe()  # what it has, it reports again

    def _return_signals(self) -> None:
        """Read the signals of this process in the agent, while no ranks run here. A launcher that the user started
        reports its signals to the head. An agent of a job that continues without it ends, as any program. The head
        would give up a silent launcher, so the agent acts on Ctrl-Z, too."""
        if self._own_options is not None:
            from infini_run.core.signal_pipe import SignalPipe

            self._signal_pipe = self._signal_pipe or SignalPipe(reaps=True)
            self._poller.watch(self._signal_pipe.fd, READ, self._on_signals)
        elif self._link.lease is not None:
            self._restore_mask()

    def _close_signal_pipe(self) -> None:
        pipe, self._signal_pipe = self._signal_pipe, None
        if pipe is not None:
            self._poller.unwatch(pipe.fd)
            pipe.close()

    def _restore_mask(self) -> None:
        blocked = 0 if self.entry is None else self.entry.blocked
        _signal.pthread_sigmask(
            _signal.SIG_SETMASK, {number for number in _signal.valid_signals() if blocked >> (number - 1) & 1}
        )

    def _on_signals(self) -> None:
        from infini_run.core.signal_pipe import END_SIGNALS, stop_self

        assert self._signal_pipe is not None
        for number in self._signal_pipe.read():
            if number == SIGTSTP:
                self._link.suspend(stop_self, print_line if self._stdio is None else self._stdio.print_line)
            elif number == _signal.SIGCHLD:
                self._reap_orphans()
            elif number in END_SIGNALS:
                self._end_by(number)

    def _end_by(self, number: int) -> None:
        """Report a stop signal to the head. A job that can do without this node continues, and the agent leaves. Else
        the head ends the job, and this agent with it, unless the user insists. Only the head may kill the ranks of
        other nodes, so that takes a third time."""
        self._end_signals += 1
        is_needed = self._link.lease is None
        is_insisted = self._end_signals > (2 if is_needed and self._has_run else 1)
        if self._link.is_lost or is_insisted or not is_needed:
            self._left_by = self._left_by or number
        if not self._link.is_lost:
            self._link.connection.send(pack_json(protocol.EVENT, {"signalled": number}))
            if is_insisted:
                self._link.give_up()

    def _leave_if_due(self) -> None:
        """Leave once the head has all that it needs."""
        if self._left_by and self._is_idle and not self._link.is_lost and not self._link.connection.wants_write:
            self._link.give_up()

    def _reap_orphans(self) -> None:
        """Reap the processes that a check has left, and as process 1 any: nobody needs their status. A check and the
        process of --preload are reaped by their own group."""
        while self._check is None and self._preload is None and _reap_any():
            pass

    def _keep_lease(self, run: NodeLaunch) -> None:
        """Renew the lease that the guard holds. After its end the ranks are dead, and the head may have given up this
        node."""
        lease = self._link.lease
        if lease is None or self._link.is_lost:
            return
        run.renew_lease(lease.since_ns / 1e9)
        why = ""
        if run.guard_ended:
            why = "the guard of the ranks is gone, and so are they"
        elif run.lease_ended or lease.left_s <= 0:
            length = f"{lease.length_s:g} s (0.9 of --node_timeout)"
            why = self._link.own_absence(LEAST_LEASE * self._link.silence_limit_s, f"its lease of {length} expired")
            why = why or f"the head has not renewed the lease for {length}"
        if why:
            if self._launch is not None:  # else the head would take it for a refusal to start them
                self._link.send_error(LinkError(why))  # as far as the connection works
            self._link.give_up(why)

    def _open_relay(self, signs_s: float) -> ObserverRelay | None:
        if not self._observe:
            return None
        from infini_run.display.relay import ObserverRelay

        self._relay = ObserverRelay(
            lambda content: self._link.connection.send(pack_json(protocol.OBSERVATIONS, content)),
            lambda: self._link.connection.has_room,
            counts="trace" in self._observe,
            signs_s=signs_s if "signs" in self._observe else 0.0,
        )
        return self._relay

    def _close_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def _send_event(self, event: Event, again_code: int, *, is_headed: bool) -> None:
        if event.kind == "signalled":
            self._link.connection.send(pack_json(protocol.EVENT, {"signalled": event.signal}))
        if event.is_failure and (not is_headed or event.asks_again(again_code)):
            self._send_failure(event.rank, event.time_ns, event.asks_again(again_code))
        if event.kind in ("started", "ready"):
            self._link.connection.send(pack_json(protocol.EVENT, {event.kind: event.rank, "pid": event.pid}))

    def _send_exits(self, exits: Sequence[Event], again_code: int) -> None:
        if exits:
            failed = [event.rank for event in exits if event.is_failure and not event.asks_again(again_code)]
            content = {"exited": [event.rank for event in exits], "failed_ranks": failed}
            self._link.connection.send(pack_json(protocol.EVENT, content))

    def _send_failure(self, rank: int, time_ns: int, asks_again: bool = False) -> None:
        """Report the first failure here, with its time by this node's CLOCK_MONOTONIC and with its age: no two nodes'
        clocks agree."""
        if not self._has_reported_failure:
            self._has_reported_failure = True
            self._send_failed(rank, time_ns, asks_again)

    def _send_failed(self, rank: int, time_ns: int, asks_again: bool = False) -> None:
        age_ns = max(0, time.monotonic_ns() - time_ns)
        event = {"failed": rank, "age_ns": age_ns, "time_ns": time_ns, "asks_again": asks_again}
        self._link.connection.send(pack_json(protocol.EVENT, event))

    def _send_failures(self, programs: HeadedPrograms) -> None:
        """Report the failures whose programs may restart alone."""
        for rank, time_ns in programs.take_failures():
            self._send_failed(rank, time_ns)

    def _send_ends(self, programs: HeadedPrograms, progress: ProgressSender) -> None:
        """Report the programs that ended here, alone. Their lines and exits go first."""
        from infini_run.node.headed_programs import NotStarted

        for each in programs.take_reports():
            if isinstance(each, NotStarted):
                event = {"not_started": each.program, "problem": each.problem, "is_final": each.is_final}
                self._link.connection.send(pack_json(protocol.EVENT, event))
                continue
            assert self._stdio is not None
            self._stdio.send_waiting()
            progress.drop(exit_.rank for exit_ in each.report.exits)
            done = {"program": each.program, "report": to_jsonable(each.report)}
            done |= {"progress": each.progress, "has_ended": each.has_ended}
            self._link.connection.send(pack_json(protocol.DONE, done))

    def _send_progress(self, entries: list[list[int]]) -> None:
        content = {"progress": entries, "time_ns": time.monotonic_ns()}
        self._link.connection.send(pack_json(protocol.EVENT, content))

    # ---- the head's words

    def _handle_frame(self, kind: bytes, payload: bytes) -> None:
        run = self._launch
        if kind == protocol.INPUT and self._stdio is not None:
            self._stdio.feed(payload)
        elif kind == protocol.STREAM_DOWN and self._stream is not None:
            self._stream.feed(payload)
        elif kind == protocol.USAGE_REQUEST and self._relay is not None:
            self._relay.sample(message_schema.read(payload, message_schema.USAGE_REQUEST)["ranks"])
        elif kind == protocol.STOP:
            self._on_stop(message_schema.read(payload, message_schema.STOP, message_schema.STOP_PROGRAM))
        elif kind == protocol.SNAPSHOT_REQUEST and run is not None:
            run.take_snapshots(**message_schema.read(payload, message_schema.SNAPSHOT_REQUEST))
        elif kind == protocol.START:
            self._on_start(message_schema.read(payload, message_schema.START, message_schema.RESTART))
        elif kind == protocol.CAUSE and run is not None:
            run.outcome.record_cause(message_schema.read(payload, message_schema.CAUSE)["ranks"])
        elif kind == protocol.KILL:
            self._is_killed = True
            if run is not None:
                run.kill()
        elif kind == protocol.SIGNAL:
            content = message_schema.read(payload, message_schema.SIGNAL)
            number = content["signal"]
            if content["ranks"]:
                _signal_ranks(run, number, content["ranks"], content["by"])
            elif run is not None:
                _forward_signal(run, number)
            elif len(self._signals) < _EARLY_SIGNALS:
                self._signals.append(number)
        elif kind == protocol.QUESTION:
            self._answer(**message_schema.read(payload, message_schema.QUESTION))
        elif kind == protocol.CHECK and self._check is None and run is None and self._setup is not None:
            self._start_check(self._setup)
        elif kind == protocol.LAUNCH:
            self._stop, self._is_killed, self._signals = None, False, []  # what comes later is for these ranks
            self._programs, self._ending = [], []
            if self._stream is not None and self._stream.is_closed:
                from infini_run.multinode.byte_stream import AgentStream

                self._stream = AgentStream(self._poller, self._link.connection)

    def _on_stop(self, content: dict[str, Any]) -> None:
        """Stop all ranks, or end those of one program."""
        run = self._launch
        if "program" not in content:
            self._stop = content
            if run is not None:
                _stop(run, **content)
        elif run is None:
            self._ending.append(content)
        elif run.headed is not None:
            run.headed.end(**content)

    def _on_start(self, content: dict[str, Any]) -> None:
        """Start programs that waited for others, or one that restarts alone."""
        run = self._launch
        if "programs" in content and run is None:
            self._programs += content["programs"]
        elif run is not None and "programs" in content:
            if run.programs is not None:
                run.programs.start(content["programs"])
        elif run is not None and run.headed is not None and not run.headed.restart(**content):
            raise LinkError("unexpected message over the link")

    def _answer(self, number: int, request: dict[str, Any]) -> None:
        """Answer what another process asks the head about the ranks of this node."""
        asker = _HeadAsks(self._link.connection, number)
        if self._launch is None:
            asker.finish({"error": "no ranks run on this node"})
        else:
            if request.get("question") == "earlier" and self._stdio is not None:
                self._stdio.send_waiting()  # what comes behind the answer is not in it
            self._launch.control.ask(asker, request)

    def _on_link_lost(self) -> None:
        """Kill all ranks: nobody can direct this node any more."""
        if self._launch is not None:
            self._launch.kill()


def _stop(run: NodeLaunch, signal: int, by_signal: bool, after_s: float) -> None:
    if after_s:
        run.stop_later(after_s)
    else:
        run.stop(signal, by_signal=by_signal)


def _forward_signal(run: NodeLaunch, number: int) -> None:
    """Pass a signal of the head's on as the launcher of one node does (csrc/group/signals.c)."""
    from infini_run.core.signal_pipe import GROUP_SIGNALS

    if number == SIGTSTP:
        run.signal_groups(SIGSTOP)
    elif number in GROUP_SIGNALS:
        run.signal_groups(number)
    else:
        run.signal(number)


class _LaunchReports:
    """What the launch of this node reports to the head, as a LaunchHead of node/launch_head.py."""

    def __init__(self, connection: Connection, stdio: RankStdio) -> None:
        self._connection = connection
        self._stdio = stdio

    def on_look(self) -> None:
        self._send_event({"suspects": True})

    def on_looked(self) -> None:
        self.on_hang((), ())

    def on_hang(self, snapshots: Sequence[HangSnapshot], ranks_to_stop: Sequence[int]) -> None:
        """Send what this node saw of its ranks, with the processes of one alone. This node's report has all."""
        hung = next((snapshot for snapshot in snapshots if snapshot.kind), None)
        short = [each if each is hung else replace(each, processes=(), python=()) for each in snapshots]
        content = {"snapshots": to_jsonable(short), "ranks": list(ranks_to_stop)}
        self._connection.send(pack_json(protocol.SNAPSHOTS, content))

    def on_program_up(self, name: str) -> None:
        """Report that a program is up here. Its lines so far go first: those of programs that waited come later."""
        self._stdio.send_waiting()
        self._send_event({"up": name})

    def on_program_end(self, name: str) -> None:
        self._send_event({"finished": name})

    def _send_event(self, content: dict[str, object]) -> None:
        self._connection.send(pack_json(protocol.EVENT, content))


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


def _signal_ranks(run: NodeLaunch | None, number: int, ranks: Sequence[int], by: str) -> None:
    """Send a signal that another process asked for to some ranks of this node."""
    here = set() if run is None else {worker.rank for worker in run.plan.workers}
    for rank in here.intersection(ranks):
        assert run is not None
        run.signal(number, rank, by=by)


def _entry_of_ranks(entry: ProcessState, options: Options) -> ProcessState:
    """Return the state that ranks start with: this process's, and the signals that they themselves unblock."""
    held = sum(1 << number - 1 for number in options.blocked_signals)
    return replace(entry, blocked=entry.blocked | held)


def _take_over_process() -> ProcessState:
    """Let the core read this process's signals from here on, as it does for the command."""
    from infini_run.core.group import take_over_process

    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    return take_over_process(sum(1 << (number - 1) for number in before))


def print_line(text: str, fd: int = 2) -> None:
    """Print a line on this process's stderr, and wait a second at most for its reader."""
    from infini_run.core.nonblocking_writer import CONSOLE_WAIT_S, write_all

    write_all(fd, os.fsencode(text + "\n"), CONSOLE_WAIT_S)


def _reap_any() -> bool:
    """Return whether there was a child to reap."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return False
