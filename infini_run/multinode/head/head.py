"""The head: reaches every node through an engine, and makes the launches of many nodes one.

It holds a connection to the agent of each node, and acts. When all are ready the ranks start. When one fails the
others stop. When a node is lost or silent the job ends. The output of ranks comes out here in whole lines. The head
installs no signal handler: the owner of the process passes signals to it.

Each phase of a launch has its file (join_phase.py, attempts.py, end_phase.py), and so have heartbeats (liveness.py),
lost nodes (node_losses.py), and the report (head_report.py). They share head_state.py.
"""

from __future__ import annotations

import os
import time
from _signal import SIGCHLD, SIGCONT, SIGHUP, SIGTERM, SIGTSTP  # the C module: `signal` imports enum

from infini_run.core.signal_pipe import STOP_SIGNALS
from infini_run.errors import InfiniRunError, LinkError
from infini_run.multinode.engines import find_engine
from infini_run.multinode.head import stop_signal
from infini_run.multinode.head.agent_set import AgentSet
from infini_run.multinode.head.agent_state import OVER, STATES
from infini_run.multinode.head.attempts import Attempts
from infini_run.multinode.head.end_phase import EndPhase
from infini_run.multinode.head.engine_processes import EngineProcesses
from infini_run.multinode.head.hang_phase import HangPhase
from infini_run.multinode.head.head_control import HeadControl
from infini_run.multinode.head.head_report import is_node_failure, launch_report
from infini_run.multinode.head.head_state import HeadState
from infini_run.multinode.head.join_phase import JoinPhase
from infini_run.multinode.head.liveness import Liveness
from infini_run.multinode.head.node_losses import NodeLosses
from infini_run.multinode.head.stdin_forwarder import StdinForwarder
from infini_run.multinode.link import message_schema, protocol
from infini_run.multinode.link.agent_options import working_directory
from infini_run.multinode.link.clock_offset import clock_question
from infini_run.multinode.link.protocol import pack, pack_json, unpack_json
from infini_run.multinode.link.record_codec import decode_record
from infini_run.options.nodes import MANUAL
from infini_run.report.report import Report
from infini_run.report.text import signal_name
from infini_run.system.poller import READ, Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.head_observers import HeadObservers
    from infini_run.multinode.head.head_state import NodeChanges
    from infini_run.multinode.head.program_attempts import ProgramAttempts
    from infini_run.multinode.head.world_changes import WorldChanges
    from infini_run.multinode.link.agent_options import WorkerNeeds
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.options.nodes import NodeList

_MOST_EARLY_SIGNALS = 64  # that are kept until the first ranks start
_DUE_IN = {  # the states in which an agent may send a frame of that kind; others: in any state
    protocol.HELLO: ("connected", "ready", "running"),
    protocol.CHECKED: ("ready", "done"),
    protocol.NOTHING_OLD_LIVES: ("done",),
    protocol.EVENT: ("ready", "running", "done", "lost"),
    **dict.fromkeys((protocol.DONE, protocol.STREAM_UP, protocol.OBSERVATIONS, protocol.SNAPSHOTS), ("running",)),
}


class Head:
    """A launch on many nodes. Call `start`, then `poll` until `ended`, then `close`; `report` and `error` tell how it
    ended.

    Args:
        options: of the launch.
        node_list: the engine and the hosts.
        environ: the head's environment; nodes get the variables of it that --export names.
        print_line: called with each line for the user; None: it goes to the head's stderr, as the nodes' lines do.
        cwd: directory in which ranks start, on every node; None: the current one.
        on_stream: called with an agent and the bytes that the one process on its node writes to its descriptor 0, a
            socket (byte_stream.py). The output of these processes gets no labels.
        observers: the live table, the trace, the events and metrics; their owner closes them. None: without both.
        listening: a socket that already listens on the link's port. None: the head opens one if it needs it.
        is_independent: if the job continues after the loss of a node, the processes on the others keep running.
        workers: what the processes need that infini-run's start on each node; None: infini-run's are the workers.
        heading: a line that the logs of the first attempt begin with, which may be an earlier launch's; empty: none.
        keywords: renames flags in lines and in the report, for a caller of the Python API; None: the command's.
    """

    def __init__(
        self,
        options: Options,
        node_list: NodeList,
        *,
        environ: Mapping[str, str],
        print_line: Callable[[str], None] | None = None,
        cwd: str | None = None,
        on_stream: Callable[[RemoteAgent, bytes], None] | None = None,
        observers: HeadObservers | None = None,
        listening: socket | None = None,
        is_independent: bool = False,
        workers: WorkerNeeds | None = None,
        heading: str = "",
        keywords: KeywordErrors | None = None,
    ) -> None:
        engine, poller = find_engine(node_list.engine), Poller()
        self._options = options
        self._observers = observers
        self._on_stream = on_stream
        self._poller = poller
        self._processes = EngineProcesses(engine, environ, len(node_list.hosts), poller)
        self._agents = AgentSet(
            node_list.hosts,
            poller,
            on_frame=self._handle_frame,
            on_lost=lambda agent, reason: self._losses.on_lost(agent, reason),
            on_reached=self._processes.on_reached,
        )
        self._state = HeadState(
            options,
            node_list,
            engine,
            self._agents,
            poller,
            observers=observers,
            print_line=print_line,
            workers=workers,
            keywords=keywords,
        )
        self._state.restarts.heading = heading
        self._losses = NodeLosses(self._state, self._processes)
        self._join = JoinPhase(
            self._state,
            self._losses,
            self._processes,
            environ=environ,
            cwd=working_directory() if cwd is None else os.path.abspath(cwd),
            has_stream=on_stream is not None,
            listening=listening,
        )
        self._liveness = Liveness(self._state, self._losses)
        self._hang = HangPhase(self._state)
        self._end = EndPhase(self._state, self._processes)
        self._stdin = StdinForwarder(self._agents, poller, is_wanted=options.stdin != "none")
        self._attempts = Attempts(self._state, self._join, self._stdin, has_stream=on_stream is not None)
        self._control = HeadControl(self._state, environ, self._stop_as_asked)
        self._programs = self._divide_programs() if options.restart_scope == "program" else None
        self._state.programs = self._programs
        self._worlds: WorldChanges | None = None
        if options.is_elastic:
            self._state.changes = self._make_changes(is_independent)
        self._stop_signal_s = 0.0
        self._signalled: set[int] = set()  # the nodes whose agents, or own launchers, received a stop; -1: the head
        self._early_signals: list[int] | None = []  # that came before the first ranks; None: these have started
        self._is_forgotten = False
        self._late_stop: tuple[int, RemoteAgent] | None = None  # a signal that a node got after its ranks exited

    @property
    def agents(self) -> Sequence[RemoteAgent]:
        """All agents, in the order of their nodes."""
        return self._agents.all

    @property
    def world(self) -> Sequence[RemoteAgent]:
        """The agents that run the ranks, or ran them last, in the order of their node ranks."""
        return self._state.world

    @property
    def launch_id(self) -> str:
        """The id of the launch; restarts add a number to it."""
        return self._state.launch_id

    def _divide_programs(self) -> ProgramAttempts:
        """Return what ends and restarts one program of several."""
        from infini_run.multinode.head.program_attempts import ProgramAttempts

        return ProgramAttempts(
            self._state,
            self._attempts,
            stop_job=lambda: self._hang.stop_after_failure(None),
            ask_running=self._liveness.ask_running,
            on_lost=self._losses.on_lost,
        )

    def _make_changes(self, is_independent: bool) -> NodeChanges:
        """Return what decides when a node is lost, and the job continues."""
        given: dict[str, Any] = {
            "start_ranks": self._start_ranks,
            "reach": self._join.reach_again,
            "free_place": self._losses.free_place,
            "let_others_start": self._processes.let_others_start,
        }
        if is_independent:
            from infini_run.multinode.head.independent_nodes import IndependentNodes

            return IndependentNodes(self._state, **given)
        from infini_run.multinode.head.world_changes import WorldChanges

        self._worlds = WorldChanges(self._state, **given)
        return self._worlds

    @property
    def worlds(self) -> WorldChanges | None:
        """The worlds of a job that continues after the loss of a node; None: it does not, or its nodes are
        independent."""
        return self._worlds

    @property
    def ended(self) -> bool:
        """Whether `poll` has nothing more to do."""
        return self._end.is_done or self._is_forgotten

    @property
    def error(self) -> InfiniRunError | None:
        """Why the job ended, unless a rank or a signal was the reason."""
        if self._state.keywords is not None:
            self._state.keywords.rename_error(self._state.error)
        return self._state.error

    @property
    def is_node_failure(self) -> bool:
        """Whether the job ended because of a node that was lost, or would not start."""
        return is_node_failure(self._state)

    @property
    def awaits_others(self) -> bool:
        """Whether some nodes are known to be missing, and the job ends as soon as the others have been heard of."""
        return self._losses.awaits_others

    def report(self) -> Report:
        """Return the report of the whole launch: the ranks of all nodes, the first failure, earlier attempts."""
        return launch_report(self._state)

    # ---- the loop

    def start(self) -> None:
        """Begin to reach the nodes. Raises UsageError, ProgramMissing, or StartError: then nothing was started."""
        try:
            self._join.start()
            self._control.open()
            if self._state.changes is not None:
                self._state.changes.begin()
        except BaseException:
            self.close()
            raise

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> None:
        """Wait for something to do, and do it.

        Args:
            timeout_s: return after this many seconds at most; None: no limit.
            also: return as soon as one of these descriptors is readable.
        """
        for fd in also:
            self._poller.watch(fd, READ, _return_to_caller)
        wait_s = self._wait_s(timeout_s)
        self._poller.poll(wait_s, lambda: self._postpone(self._state.absence.note(wait_s)))
        for ended in self._processes.take_ended():
            self._losses.on_engine_exit(ended)
        for agent in self._processes.take_killed():
            self._state.notice(f"{agent.title}: its agent did not respond; killed it and its ranks there")
            if self._state.changes is not None:
                self._state.changes.on_ended(agent)
        self._run_due(time.monotonic())
        problem = self._state.console.take_problem()
        if problem:
            self._state.notice(f"the console takes no more output ({problem}); the job continues")
        self._agents.pause_reading(self._state.console.is_backlogged)
        self._stdin.forward()
        if self._observers is not None:
            self._observers.run_due()
            for agent, ranks in self._observers.usage_requests():
                self._agents.send(agent, pack_json(protocol.USAGE_REQUEST, {"ranks": ranks}))

    def _wait_s(self, timeout_s: float | None) -> float:
        now_s, state = time.monotonic(), self._state
        if state.is_new_stop:  # between two calls of poll
            state.is_new_stop = False
            return 0.0
        deadline_s = min(
            state.restarts.due_s,
            state.stop_end_s,
            self._join.next_deadline_s,
            self._control.next_deadline_s,
            self._losses.next_deadline_s,
            self._liveness.next_deadline_s,
            self._hang.next_deadline_s,
            self._end.next_deadline_s,
            float("inf") if state.changes is None or self._end.has_begun else state.changes.next_deadline_s,
            now_s if self._stdin.is_due else float("inf"),
            state.output_due_s,
            float("inf") if self._programs is None else self._programs.next_deadline_s,
        )
        wait_s = max(0.0, deadline_s - now_s)
        if self._observers is not None:
            wait_s = min(wait_s, self._observers.timeout_s())
        return wait_s if timeout_s is None else min(wait_s, timeout_s)

    def _run_due(self, now_s: float) -> None:
        state, counts = self._state, self._agents.counts
        state.flush_output(now_s)
        if self._late_stop is not None and state.restarts.is_waiting:
            (number, agent), self._late_stop = self._late_stop, None
            self.on_stop_signal(number, host=agent.name, place_index=agent.index)
        self._join.run_due(now_s)
        are_ready = counts.count("ready") == counts.total
        if state.changes is not None and not self._end.has_begun:
            state.changes.run_due(now_s)
        elif not state.is_stopping and (are_ready or now_s >= state.restarts.due_s):
            self._start_ranks(self._attempts.in_order())
        elif not self._losses.fail_if_due(now_s) and state.is_joining:
            self._join.wait(now_s)
        self._control.run_due(now_s)
        self._liveness.run_due(now_s)
        self._hang.run_due(now_s)
        if self._programs is not None:
            self._programs.run_due(now_s)
        self._end.run_due(now_s)
        if now_s >= state.stop_end_s:
            for agent in state.world:
                if not agent.is_over:
                    self._losses.on_lost(agent, "it did not stop in time")
        if not self._end.has_begun and self._is_over():
            self._losses.add_engine_reason()
            if self._options.verbose and self._join.listener is not None:
                dropped = self._join.listener.dropped
                state.print(f"dropped {dropped} unauthenticated connections to the link's port")
            self._end.begin(now_s, self.report().exit_code)
        if self._end.has_begun:
            self._end.go_on(now_s)

    def _start_ranks(self, agents: Sequence[RemoteAgent]) -> None:
        """Start the ranks of these nodes, in the order of their node ranks."""
        self._state.forwarded_signals.clear()
        self._late_stop = None
        self._attempts.start_ranks(agents)
        if self._programs is not None and not self._state.is_stopping:
            self._programs.begin(agents)
        self._send_early_signals()

    def _is_over(self) -> bool:
        """Return whether nothing of the job is left on any node, and no restart follows."""
        counts = self._agents.counts
        if self._state.changes is not None:
            return self._state.changes.is_over()
        if counts.count(*OVER) == counts.total:
            return not self._attempts.should_restart()
        return self._state.is_stopping and counts.count("running") == 0

    def _postpone(self, away_s: float) -> None:
        """Move all deadlines by a suspension of this process: it was no silence of the nodes, and nothing could
        happen in time."""
        if self._liveness.was_away(away_s):
            self._join.postpone(away_s)
            self._end.postpone(away_s)
            if self._state.changes is not None:
                self._state.changes.postpone(away_s)
            if self._programs is not None:
                self._programs.postpone(away_s)
            self._state.stop_end_s += away_s

    # ---- frames from agents

    def _handle_frame(self, agent: RemoteAgent, kind: bytes, payload: bytes) -> None:
        if agent.state not in _DUE_IN.get(kind, STATES):
            raise LinkError("unexpected message over the link")
        self._liveness.keep_lease(agent)
        if kind in (protocol.OUT, protocol.ERR):
            self._state.show(kind, agent.line_buffers[kind].feed(payload), agent.ranks)
        elif kind == protocol.HELLO:
            self._join.on_hello(agent, payload)
        elif kind == protocol.EVENT:
            self._on_event(agent, payload)
        elif kind == protocol.HEARTBEAT and payload:
            agent.on_answer(payload)
            if agent.clock.needs_more():
                self._agents.send(agent, clock_question())
        elif kind == protocol.LEASE:
            self._agents.send(agent, agent.time.note(payload))
        elif kind == protocol.SNAPSHOTS:
            self._hang.on_snapshots(agent, payload)
        elif kind == protocol.ANSWERED:
            self._control.on_answered(agent, **message_schema.read(payload, message_schema.ANSWERED))
        elif kind == protocol.CHECKED and self._state.changes is not None:
            self._state.changes.on_checked(agent, message_schema.read(payload, message_schema.CHECKED)["reason"])
        elif kind == protocol.LAST_WORD_HASH:
            from infini_run.multinode.link.last_word import read_hash

            agent.last_word_hash = read_hash(payload)
        elif kind == protocol.NOTHING_OLD_LIVES and self._state.changes is not None:
            self._state.changes.on_nothing_old_lives(agent)
        elif kind == protocol.OBSERVATIONS and self._observers is not None:
            self._observers.on_observations(agent, unpack_json(payload))
        elif kind == protocol.STREAM_UP and self._on_stream is not None:
            self._on_stream(agent, payload)
        elif kind == protocol.DONE:
            done = message_schema.read(payload, message_schema.DONE, message_schema.PROGRAM_DONE)
            if "program" not in done:
                self._on_done(agent, done)
            elif self._programs is not None:
                self._programs.on_done(agent, done)
            else:
                raise LinkError("unexpected message over the link")

    def _on_event(self, agent: RemoteAgent, payload: bytes) -> None:
        event = message_schema.read(payload, *message_schema.EVENTS)
        if agent.state != "running" and "signalled" not in event:
            raise LinkError("unexpected message over the link")
        if agent.state == "lost":
            return  # it has refused; the job ends for that
        if agent.state == "done" and self._state.changes is None and not self._state.stop_signal:
            if self._late_stop is None and self._agents.counts.count("running") and not self._state.is_stopping:
                name = signal_name(event["signalled"])
                self._state.print(f"{name} on {agent.name}: its ranks finished; the others keep running")
            self._late_stop = event["signalled"], agent
        elif "started" in event:
            agent.rank_pids[event["started"]] = event["pid"]
        elif "ready" in event and event["ready"] in agent.ranks:
            agent.ready_ranks.add(event["ready"])
        elif "exited" in event:
            agent.exited_ranks.update(rank for rank in event["exited"] if rank in agent.ranks)
            agent.failed_ranks.update(agent.exited_ranks.intersection(event["failed_ranks"]))
            if self._programs is not None:
                self._programs.on_exits()
        elif "failed" in event:
            self._on_failed(agent, event)
        elif "signalled" in event:
            changes = self._state.changes
            number = event["signalled"]
            if self._state.stop_signal or changes is None or not changes.on_stop_signal(agent, number):
                self.on_stop_signal(number, host=agent.name, place_index=agent.index)
        elif "progress" in event:
            self._on_progress(agent, event["progress"], event["time_ns"])
        elif "suspects" in event:
            self._hang.on_look(agent)
        elif "up" in event:
            if self._programs is None or self._programs.runs(event["up"]):
                self._attempts.on_program_up(agent, event["up"])
        elif "not_started" in event and self._programs is not None:
            name, problem = event["not_started"], event["problem"]
            self._programs.on_not_started(agent, name, problem, is_final=event["is_final"])
        elif "finished" in event:
            self._attempts.on_program_end(agent, event["finished"])

    def _on_failed(self, agent: RemoteAgent, event: dict[str, Any]) -> None:
        failed_s = agent.clock.latest_s(event["time_ns"], event["age_ns"])
        if self._programs is not None and not event["asks_again"]:
            self._programs.on_failed(agent, event["failed"], failed_s)
            return
        # a spare that was lost may keep its place for a while
        is_first = all(each.first_failure_s == float("inf") for each in self._state.world)
        agent.first_failure_s = min(agent.first_failure_s, failed_s)
        if is_first:
            self._liveness.ask_running()
            if self._state.changes is not None:
                self._state.changes.on_failed(agent)
        if event["asks_again"] and self._options.again_wait_s:
            self._state.stop(after_s=self._options.again_wait_s)
        elif not self._options.keep_going:
            self._hang.stop_after_failure(agent)

    def _on_progress(self, agent: RemoteAgent, entries: list[list[int]], sent_ns: int) -> None:
        pace, is_news = self._state.pace, False
        used = agent.progress.update(entries, sent_ns, agent.ranks, agent.clock)
        for rank, value, time_s, count in used:
            is_news |= pace.note(rank, value, time_s, reports=count, error_s=agent.clock.bound_s)
            if self._programs is not None:
                self._programs.on_progress(rank, value)
        self._state.restarts.note_progress(max((value for _, value, _, _ in used), default=-1))
        if self._observers is not None:
            self._observers.on_progress(agent)
            if is_news:
                self._observers.note_slow()

    def _on_done(self, agent: RemoteAgent, done: dict[str, Any]) -> None:
        agent.report = agent.clock.to_our_time(decode_record(Report, done["report"]))
        if len(done["ports"]) != len(agent.free_ports):
            raise LinkError("what came over the link is not what infini-run sends: other programs")
        agent.free_ports = done["ports"]
        self._state.restarts.note_progress(done["progress"])
        self._agents.set_state(agent, "done")
        for kind, lines in agent.line_buffers.items():
            self._state.show(kind, lines.end(), agent.ranks)
        if self._programs is not None:
            self._programs.on_node_done()

    # ---- stopping

    def stop(self) -> None:
        """Begin to stop the ranks of every node."""
        self._state.stop()

    def finish(self) -> None:
        """Begin to stop the ranks of every node, and start none again, whatever happens."""
        self._state.is_unwanted = True
        self._state.stop()

    def kill(self) -> None:
        """Send SIGKILL to every rank of every node."""
        self._state.stop()
        self._agents.send_all(pack(protocol.KILL))

    def limit_reader(self) -> None:
        """Give a reader of the head's output that does not read one more second."""
        self._end.limit_reader()

    def on_signal(self, number: int) -> None:
        """Act on a signal to this process, as the command does."""
        if number == SIGTSTP:
            self._suspend()
        elif number == SIGCHLD:
            self.reap_orphans()
        elif number in STOP_SIGNALS or (number == SIGHUP and self._early_signals is not None):
            self.on_stop_signal(number)  # HUP is for the ranks; before the first, for whoever waits for them
        else:
            self.forward_signal(number)

    def on_stop_signal(self, number: int, host: str = "", place_index: int = -1) -> None:
        """Act on a signal that asks for the end, of this process or of the agent of that place on `host`
        (stop_signal.py)."""
        state = self._state
        since_s = time.monotonic() - self._stop_signal_s
        what = stop_signal.meaning(
            self._who_got_signal(host),
            number,
            first=state.stop_signal,
            since_s=since_s,
            was_signalled=place_index in self._signalled,
        )
        if what == stop_signal.STOP_OR_FAIL and (line := state.engine.first_failure_line(self._processes.stderr())):
            state.fail(InfiniRunError(f"an agent is gone, and all others with it: {line}"))
        elif what != stop_signal.IGNORE:
            self._signalled.add(place_index)
            where = f"{signal_name(number)}{f' on {host}' if host else ''}"
            if what == stop_signal.KILL:
                self._kill_again(where)
            elif what != stop_signal.NOTE:
                self._stop_by_signal(number, host, where)

    def _stop_as_asked(self, is_again: bool) -> None:
        """Act on --stop. is_again: the launch was asked to stop before, by whatever."""
        if is_again:
            self._kill_again(signal_name(SIGTERM))
        else:
            self.on_stop_signal(SIGTERM)

    def _kill_again(self, where: str) -> None:
        self._end.end_reader()
        self._state.print(f"{where} again: killing what is left")
        self.kill()

    def _who_got_signal(self, host: str) -> str:
        """Return who got the signal. host: of the agent; "": this process."""
        if not host:
            return stop_signal.HEAD
        is_losable = self._state.changes is not None
        if not is_losable and self._losses.is_engine_ending:
            return stop_signal.ENDING_AGENT
        if self._state.node_list.engine == MANUAL:
            return stop_signal.LAUNCHER
        return stop_signal.LOSABLE_AGENT if is_losable else stop_signal.AGENT

    def _stop_by_signal(self, number: int, host: str, where: str) -> None:
        state = self._state
        state.stop_signal, self._stop_signal_s = number, time.monotonic()
        if self._observers is not None:
            self._observers.on_stop_signal(number, host, where)
        is_later = state.is_stopping and not state.is_stop_delayed
        grace_s = self._options.grace_s if is_later else self._options.signal_grace_s
        state.print(f"{where}: stopping; SIGKILL in {grace_s:g} s, or now if repeated")
        state.stop(number if number in stop_signal.BY_USER else 0, by_signal=True)
        self._end.limit_reader()

    def forward_signal(self, number: int) -> None:
        """Pass a signal on to every rank. One that comes before the first ranks start reaches them at their start."""
        if self._early_signals is None:
            self._send_signal(number)
        elif len(self._early_signals) < _MOST_EARLY_SIGNALS:
            self._early_signals.append(number)

    def _send_early_signals(self) -> None:
        early, self._early_signals = self._early_signals or [], None
        for number in early:
            self._send_signal(number)

    def _send_signal(self, number: int) -> None:
        self._state.forwarded_signals.add(number)
        if self._observers is not None:
            self._observers.on_signal(number)
        self._agents.send_all(pack_json(protocol.SIGNAL, {"signal": number, "ranks": [], "by": ""}), "running")

    def _suspend(self) -> None:
        """Suspend the ranks on Ctrl-Z, and then this process until SIGCONT."""
        self._send_signal(SIGTSTP)
        self._state.flush_output()
        self._postpone(self._liveness.suspend())
        self._stdin.resume()
        self._send_signal(SIGCONT)

    def reap_orphans(self) -> None:
        """Reap the processes that lost their parents, and so became children of process 1."""
        self._processes.reap_others()

    def ask_alive(self) -> None:
        """Ask all nodes for a sign of life: one that answers was alive at this moment."""
        self._liveness.ask_running()

    def send_stream(self, agent: RemoteAgent, data: bytes) -> None:
        """Send bytes to descriptor 0 of the process on that node; empty: no more come."""
        if agent.state == "running":
            self._agents.send(agent, pack(protocol.STREAM_DOWN, data))

    # ---- the end

    def close(self) -> None:
        """Close every connection, which kills what still runs; end and reap the engine's commands. Safe twice."""
        self._agents.close()
        if self._join.listener is not None:
            self._join.listener.close()
        self._processes.close()
        self._stdin.close()
        self._control.close()
        self._state.console.close()
        self._poller.close()

    def close_at_exit(self) -> None:
        """End what still runs while there is an interpreter: it exits."""
        self.close()

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child, and touch nothing that is the parent's."""
        self._poller.close()
        self._agents.close()
        if self._join.listener is not None:
            self._join.listener.after_fork_in_child()
        self._processes.after_fork_in_child()
        self._control.after_fork_in_child()
        if self._observers is not None:
            self._observers.after_fork_in_child()
        self._stdin.close()
        self._state.console.close()
        self._is_forgotten = True


def _return_to_caller() -> None:
    """Return to the caller of `poll`, who reads the descriptor."""
