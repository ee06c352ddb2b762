"""What all parts of the head share: the options, the agents, the console, and why and how the job is to end."""

from __future__ import annotations

import os
import time

from infini_run.errors import printable
from infini_run.lean_os import encode_text
from infini_run.multinode.head.agent_state import NOT_READY
from infini_run.multinode.head.output import ConsoleWriters
from infini_run.multinode.link import protocol
from infini_run.multinode.link.clock_offset import OwnAbsence
from infini_run.multinode.link.protocol import pack_json
from infini_run.plan.program import new_launch_id
from infini_run.plan.rank_numbers import RankNumbers
from infini_run.plan.restart_policy import RestartState
from infini_run.report.pace import Pace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Protocol

    from infini_run.errors import InfiniRunError
    from infini_run.multinode.engines import Engine
    from infini_run.multinode.head.agent_set import AgentSet
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.multinode.head.folded_output import FoldedOutput
    from infini_run.multinode.head.head_observers import HeadObservers
    from infini_run.multinode.link.agent_options import WorkerNeeds
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.options.nodes import NodeList
    from infini_run.plan.rank_numbers import NodeRanks
    from infini_run.report.report import Report
    from infini_run.system.poller import Poller

    class NodeChanges(Protocol):
        """What WorldChanges and IndependentNodes are to those parts of the head on which they stand."""

        @property
        def has_started(self) -> bool: ...
        @property
        def is_running(self) -> bool: ...
        @property
        def next_deadline_s(self) -> float: ...
        def begin(self) -> None: ...
        def run_due(self, now_s: float) -> None: ...
        def postpone(self, by_s: float) -> None: ...
        def on_earlier_job(self, node_timeout_s: float) -> None: ...
        def on_ready(self, agent: RemoteAgent) -> None: ...
        def on_checked(self, agent: RemoteAgent, reason: str) -> None: ...
        def on_failed(self, agent: RemoteAgent) -> None: ...
        def on_stop_signal(self, agent: RemoteAgent, number: int) -> bool: ...
        def on_lost(self, agent: RemoteAgent, text: str) -> None: ...
        def on_ended(self, agent: RemoteAgent) -> None: ...

        def on_last_word(self, agent: RemoteAgent) -> None: ...

        @property
        def lost_agents(self) -> Iterable[RemoteAgent]: ...
        def on_nothing_old_lives(self, agent: RemoteAgent) -> None: ...
        def on_refused(self, agent: RemoteAgent, text: str) -> None: ...
        def refuse(self, agent: RemoteAgent, text: str) -> None: ...
        def reach_again(self, agent: RemoteAgent) -> None: ...
        def on_allocation_over(self, text: str, *, was_cancelled: bool) -> None: ...
        def is_over(self) -> bool: ...

    class Programs(Protocol):
        """What ProgramAttempts is to those parts of the head on which it stands."""

        def on_hang(self, ranks: Sequence[int]) -> None: ...
        def add_to(self, report: Report) -> Report: ...


HEARTBEATS = 3  # within --node_timeout, after which a silent node is lost
_ABSENCE = 0.95  # of --node_timeout, since the last heartbeat; a node gives the head up after all of it
_LEASE_ABSENCE = 0.65  # of --node_timeout; a lease lasts for LEAST_LEASE of it at least
_SLACK_S = 15.0  # beyond the graces: what a node may take to end


def stop_limit_s(grace_s: float, *, shares_grace: bool = False) -> float:
    """Return how long a node may take to stop ranks.

    Args:
        grace_s: Of the stop.
        shares_grace: Ranks and the processes that they left share one, as after a signal.
    """
    return (1 if shares_grace else 2) * grace_s + _SLACK_S


class HeadState:
    """One launch on many nodes, as far as more than one part of the head reads or changes it.

    Args:
        agents: all of them, in the order of their nodes.
        observers: the live table, the trace, the events and metrics; None: without all.
        print_line: called with each line for the user; None: it goes to the head's stderr, as the nodes' lines do.
        workers, keywords: as for a Head.
    """

    def __init__(
        self,
        options: Options,
        node_list: NodeList,
        engine: Engine,
        agents: AgentSet,
        poller: Poller,
        *,
        observers: HeadObservers | None,
        print_line: Callable[[str], None] | None,
        workers: WorkerNeeds | None,
        keywords: KeywordErrors | None,
    ) -> None:
        self.options = options
        self.workers = workers
        self.keywords = keywords
        self.node_list = node_list
        self.engine = engine
        self.agents = agents
        self.poller = poller
        self.observers = observers
        self.console = ConsoleWriters(poller)
        self._folded: FoldedOutput | None = None
        self.on_lines: Callable[[bytes, NodeRanks], None] | None = None  # gets lines of ranks, before any are folded
        self._print_line = print_line
        self.launch_id = new_launch_id()
        self.start_s = time.time()
        self.world: list[RemoteAgent] = agents.all  # that run the ranks, or ran them last, by node rank
        self.numbers = RankNumbers(("",), (0,))  # of all ranks, known as soon as all nodes are ready
        self.ender = ""  # the program with --ends_job whose end stopped the others
        self.restarts = RestartState(options)
        self.pace = Pace()  # of the ranks of this attempt
        self.unanswered: tuple[str, ...] = ()  # hosts that did not answer at the last hang of this attempt
        self.changes: NodeChanges | None = None  # of a job that continues after the loss of a node
        self.programs: Programs | None = None  # that restart alone
        self.absence = OwnAbsence(options.node_timeout_s * (_LEASE_ABSENCE if options.is_elastic else _ABSENCE))
        self.notices: list[str] = []
        self.losses: tuple[str, ...] = ()  # of nodes in earlier attempts, a sentence each, the latest first
        self.error: InfiniRunError | None = None  # why the job ended, unless a rank or a signal is the reason
        self.stop_signal = 0  # the signal from outside that asked for the end
        self.forwarded_signals: set[int] = set()  # that were passed on to the ranks of this attempt
        self.is_handing_out = False  # a node has joined that leaves its rank to the head
        self.goodbye = b""  # the frame that lets agents go; b"": it was not sent yet
        self.is_stopping = False
        self.stop_due_s = float("-inf")  # the agents stop their ranks then (monotonic), which run on until then
        self.is_new_stop = False  # nobody has looked yet whether anything is left to stop
        self.is_unwanted = False  # by the program that owns this launch: no other attempt follows
        self.stop_end_s = float("inf")  # a node that has not stopped by then is lost

    @property
    def has_check(self) -> bool:
        """Whether nodes get a check before they run anything, if the job continues after the loss of one."""
        needs = self.workers or self.options
        return bool(self.options.node_check or needs.log_dir or needs.gpus_per_proc)

    @property
    def world_size(self) -> int:
        """The number of all ranks; 0: it is not known yet."""
        return self.numbers.world_size

    @property
    def is_joining(self) -> bool:
        """Whether some nodes are not ready yet, and are still waited for."""
        if self.options.is_elastic:  # world_changes.py waits for them
            return False
        return not self.is_stopping and self.agents.counts.count(*NOT_READY) > 0

    @property
    def is_over(self) -> bool:
        """Whether the agents may go: the head misses none that goes."""
        return bool(self.goodbye)

    def begin_output(self, *, has_labels: bool) -> None:
        """Ranks are about to start, and their number is known: with --console=fold, equal lines are shown once."""
        self.flush_output()
        options = self.options
        if options.console != "fold" or not has_labels:
            return
        from infini_run.multinode.head.folded_output import FoldedOutput
        from infini_run.plan.labels import is_colored

        self._folded = FoldedOutput(
            self.world_size,
            len(options.ranks_on_console or range(self.world_size)),
            colored=is_colored(options.color, (1, 2), os.environ),
            has_time=options.timestamps,
            write=self._write_output,
        )

    def show(self, kind: bytes, lines: bytes, ranks: NodeRanks) -> None:
        """Write lines of these ranks to stdout or stderr; above the table, if there is one."""
        if self.on_lines is not None and lines:
            self.on_lines(lines, ranks)
        if self._folded is None:
            self._write_output(kind, lines)
        else:
            self._folded.add(kind, lines, ranks)

    @property
    def output_due_s(self) -> float:
        """When `flush_output` has something to write, by time.monotonic(); inf: never."""
        return float("inf") if self._folded is None else self._folded.due_s

    def flush_output(self, now_s: float = float("inf")) -> None:
        """Write the lines that wait for equal ones no longer at `now_s` (monotonic); by default all."""
        if self._folded is None:
            return
        if now_s == float("inf"):
            self._folded.flush()
        elif now_s >= self._folded.due_s:
            self._folded.flush(int(now_s * 1e9))

    def _write_output(self, kind: bytes, lines: bytes) -> None:
        if lines and self.observers is not None and self.observers.print_above(lines.decode("utf-8", "replace")):
            return
        self.console.write(kind, lines)

    def print(self, text: str, *details: str) -> None:
        """Print a line of the head for the user, after the lines that it is about, and lines below it."""
        self.flush_output()
        own = (text, *details) if self.keywords is None else self.keywords.rename_lines((text, *details))
        lines = [printable(line) for line in (f"infini-run: {own[0]}", *own[1:])]
        if self.observers is not None and self.observers.print_above("\n".join(lines)):
            return
        if self._print_line is None:
            self.console.write(protocol.ERR, encode_text("\n".join([*lines, ""])))
            return
        for line in own:
            self._print_line(line)

    def notice(self, text: str) -> None:
        """Print one line, and keep it for the report."""
        self.notices.append(text)
        self.print(text)

    def fail(self, error: InfiniRunError) -> None:
        """Stop the job for this reason, unless another one came first."""
        if self.error is None and not self.stop_signal:
            self.error = error
        self.stop()

    @property
    def is_stop_delayed(self) -> bool:
        """Whether the ranks run on, and are stopped later."""
        return self.is_stopping and time.monotonic() < self.stop_due_s

    def stop(self, number: int = 0, *, by_signal: bool = False, after_s: float = 0.0) -> None:
        """Begin to stop the ranks of every node.

        Args:
            number: the signal that ranks get; 0: the one of --stop_signal.
            by_signal: a signal from outside asked for it: ranks then have the grace for that.
            after_s: how long they run on before; such a signal ends that time.
        """
        if self.is_stopping and not (by_signal and self.is_stop_delayed):
            return
        self.stop_due_s = time.monotonic() + after_s
        self.is_stopping = self.is_new_stop = True
        grace_s = self.options.signal_grace_s if by_signal else self.options.grace_s
        self.stop_end_s = self.stop_due_s + stop_limit_s(grace_s, shares_grace=by_signal)
        content = {"signal": number, "by_signal": by_signal, "after_s": after_s}
        self.agents.send_all(pack_json(protocol.STOP, content), "running")
        if self.observers is not None:
            self.observers.stop()
