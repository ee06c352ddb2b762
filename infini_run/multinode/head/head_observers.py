"""The head's side of --live, --trace, --events, and --metrics: what all nodes observe (display/relay.py), as one.

This module does for many nodes what display/observers.py does for one, and its import happens only for one of these
flags. Times of a node become the head's times as they arrive (clock_offset.py).
"""

from __future__ import annotations

import os
import time

from infini_run.core.c_structs import Event
from infini_run.display.relay import MOST_LINES
from infini_run.display.trace_format import IMPORTS
from infini_run.errors import LinkError, printable
from infini_run.multinode.head.observed_node import ObservedNode, RemoteGroup, partial_plan, whole_number
from infini_run.node.outcome import Outcome
from infini_run.plan.model import reads_output
from infini_run.plan.rank_numbers import RankNumbers
from infini_run.report.pace import Pace
from infini_run.report.text import duration_text, signal_name
from infini_run.system.signal_numbers import SIGCONT, SIGTSTP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.display.chrome_trace import ChromeTrace
    from infini_run.display.launch_feed import LaunchFeed
    from infini_run.display.live_table import LiveTable
    from infini_run.errors import InfiniRunError
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.options.launch_options import Options
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.report import Report

_SPANS = (IMPORTS, "fork")  # of a node's own work
_SPAN_TEXT = 1000  # characters
_INSTANTS = 10_000  # kept of the head's own
_SURE_S = 1e-3  # of a clock: below, its bound is not worth a word
_AWAY_S = 0.1  # of a clock that is said to be off


class HeadObservers:
    """Of one launch, all its attempts. path: of the trace; empty: none. display, feed: None: no table, no events and
    metrics."""

    def __init__(self, path: str, display: LiveTable | None, feed: LaunchFeed | None, options: Options) -> None:
        self._path = path
        self._display = display
        self._feed = feed
        self._options = options
        self._nodes: dict[int, ObservedNode] = {}  # that run ranks, or ran them last
        self._gone: dict[int, ObservedNode] = {}  # that ran some before, and are still in the trace
        self._lost: set[RemoteAgent] = set()  # that were reported to the feed
        self._hung: set[int] = set()  # ranks of the attempt that the head has reported
        self._events: list[dict[str, Any]] = []
        self._instant_count = 0  # instants
        self._numbers = 0  # processes of the trace, beside the head
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._begin_ns = self._began_ns = time.monotonic_ns()  # the first attempt, this one
        self._stop_ns = 0
        self._restarts = 0
        self._launch_id = ""
        self._pace = Pace()
        self._numbers_of_ranks = RankNumbers(("",), (0,))
        self._is_over = False
        self._echoes = 0  # after Ctrl-Z: the head continues its ranks, then hears the SIGCONT that continued it

    @property
    def wanted(self) -> list[str]:
        """What agents are to send."""
        wanted = {
            "live": self._display,
            "trace": self._path,
            "events": self._feed,
            "signs": self._feed and self._options.metrics,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    # ---- what the head does

    def begin(
        self, agents: Sequence[RemoteAgent], launch_id: str, restarts: int, numbers: RankNumbers, pace: Pace
    ) -> None:
        """Begin an attempt: all ranks start or restart. numbers: of all of them; pace: their progress."""
        now_ns = time.monotonic_ns()
        self._numbers_of_ranks = numbers
        self._pace = pace
        self._hung.clear()
        self._launch_id, self._restarts = launch_id, restarts
        self._slice("rest" if restarts else "reach nodes", self._began_ns, now_ns)
        if restarts:
            self.note(f"restart {restarts}")
        self._began_ns, self._stop_ns = now_ns, 0
        before = self._nodes | self._gone
        self._nodes = {}
        for agent in agents:
            node = before.pop(agent.index) if agent.index in before else ObservedNode(agent)
            node.agent, node.awaited = agent, False  # another agent may have joined from the node
            self._nodes[agent.index] = node
        self._gone = before
        if self._display is not None:
            self._display.drop(self._gone)
        if self._feed is not None:
            self._feed.launched(
                launch_id,
                nodes=len(agents),
                ranks=numbers.world_size,
                restarts=restarts,
                last_sign_ns=self._last_sign_ns,
                place=numbers.place,
            )

    def _last_sign_ns(self, rank: int) -> int | None:
        node = self._node_of(rank)
        if node is None or node.plan is None:
            return None
        at = node.agent.ranks.index(rank)
        is_read = at < len(node.plan.workers) and reads_output(node.plan.workers[at])
        return node.group.activity(at)[0] if is_read else None

    def _node_of(self, rank: int) -> ObservedNode | None:
        return next((node for node in self._nodes.values() if rank in node.agent.ranks), None)

    def rest(self) -> None:
        """Rest between two attempts: the last frame stays."""
        if self._feed is not None:
            self._feed.restarting(self._restarts + 1)
        self._end_attempt(time.monotonic_ns())

    def restart_program(self, name: str, restarts: int) -> None:
        """Note that one program restarts alone.

        Args:
            name: The program.
            restarts: How many restarts it had, with this one.
        """
        if self._feed is not None:
            self._feed.restarting(restarts, name)
        event = Event(kind="restarting", code=restarts, name=name, time_ns=time.monotonic_ns())
        for node in self._nodes.values():
            ranks = [] if node.plan is None else [each.rank for each in node.plan.workers if each.program == name]
            if ranks and node.outcome is not None:
                node.outcome.clear_failures(ranks)
            if ranks and node.trace is not None:
                node.trace.on_event(event)

    def _end_attempt(self, now_ns: int) -> None:
        stop_ns = min(self._stop_ns or now_ns, now_ns)
        self._slice("run", self._began_ns, stop_ns)
        if self._stop_ns:
            self._slice("stop", stop_ns, now_ns)
        self._began_ns = now_ns
        if self._display is not None:
            self._display.end()

    def stop(self) -> None:
        """Note that the head stops all ranks."""
        self._stop_ns = self._stop_ns or time.monotonic_ns()
        if self._display is not None:
            self._display.stop()
        if self._feed is not None:
            self._feed.stop()

    def on_node_lost(self, agent: RemoteAgent, text: str) -> None:
        """Note the loss of a node, and of its ranks."""
        self.note(text)
        if self._feed is not None and agent not in self._lost:  # later calls only have a better reason
            self._lost.add(agent)
            self._feed.node_lost(agent.node_rank, agent.name, sorted(agent.ranks), text)
        node = self._nodes.get(agent.index)
        if node is None:
            return
        if node.trace is not None:
            node.trace.on_disconnect(time.monotonic_ns())
        if self._display is not None:
            self._display.on_disconnect(agent.index)

    def on_progress(self, agent: RemoteAgent) -> None:
        """Note the progress of the ranks of a node."""
        for rank, (value, sent_s) in agent.progress.take_news():
            self._note_progress(agent, rank, value, round(sent_s * 1e9))

    def _note_progress(self, agent: RemoteAgent, rank: int, value: int, time_ns: int) -> None:
        if self._feed is not None:
            self._feed.on_event(Event(kind="progress", rank=rank, value=value, time_ns=time_ns), agent.name)
        node = self._nodes.get(agent.index)
        if node is not None and node.trace is not None:
            node.trace.note_progress(agent.ranks.index(rank), value, time_ns)

    def on_hang(self, snapshots: Sequence[HangSnapshot]) -> None:
        """Note a hang that the head reports."""
        self._hung.update(snapshot.rank for snapshot in snapshots if snapshot.kind)
        if self._feed is None:
            return
        for snapshot in snapshots:
            if snapshot.kind:
                node = self._node_of(snapshot.rank)
                event = Event(kind=snapshot.kind, rank=snapshot.rank, time_ns=time.monotonic_ns())
                self._feed.on_event(event, "" if node is None else node.agent.name)

    def on_stop_signal(self, number: int, host: str, where: str) -> None:
        """Note a signal that stops the launch, at the launcher of `host`; empty: at the head."""
        self.note(f"got {where}")
        if self._feed is not None:
            self._feed.signalled(number, host)

    def finish(self, end: Report | InfiniRunError, *, stopper: str = "") -> None:
        """Note how the launch ended, before `close`, as Observers.finish does."""
        if self._feed is not None:
            self._feed.finish(end, stopper=stopper)

    def on_signal(self, number: int) -> None:
        """Note a signal to all ranks."""
        self.note(f"passed {signal_name(number)} on")
        is_echo = number == SIGCONT and self._echoes == 1
        self._echoes = 2 if number == SIGTSTP else max(0, self._echoes - (number == SIGCONT))
        if self._display is not None and not is_echo:
            self._display.note_signal(number)

    def note_slow(self) -> None:
        """Note that other ranks than before are slow."""
        for node in self._nodes.values():
            if node.trace is not None:
                node.trace.note_slow(self._pace.slow, time.monotonic_ns())

    def note(self, text: str) -> None:
        """Note something in the trace, at this moment."""
        self._instant_count += 1
        if self._path and self._instant_count <= _INSTANTS:
            at = {"ph": "i", "s": "g", "ts": self._us(time.monotonic_ns()), "pid": os.getpid(), "tid": os.getpid()}
            self._events.append({"name": printable(text), "cat": "event", "args": {}, **at})

    def print_above(self, text: str) -> bool:
        """Print lines above the table; False if there is none."""
        return self._display is not None and self._display.print_above(text)

    # ---- when

    def timeout_s(self) -> float:
        """Return how long to wait at most. A trace needs no clock."""
        wait_s = None if self._display is None else self._display.timeout_s(None)
        if self._feed is not None:
            wait_s = self._feed.timeout_s(wait_s)
        return float("inf") if wait_s is None else wait_s

    def run_due(self) -> None:
        """Redraw the table and write, if that is due."""
        if self._display is not None:
            self._display.run_due()
        if self._feed is not None:
            self._feed.run_due()

    def usage_requests(self) -> list[tuple[RemoteAgent, list[int]]]:
        """Return the agents to ask what their ranks use, each with the ranks whose last line the table shows. That
        happens once a second while the table is visible, and not before an agent has answered the last request."""
        if self._display is None or not self._display.is_usage_due():
            return []
        shown = sorted(self._display.shown)
        asked = []
        for node in self._nodes.values():
            if node.agent.state == "running" and node.plan is not None and not node.awaited:
                node.awaited = True
                ranks = {worker.rank for worker in node.plan.workers}
                asked.append((node.agent, [rank for rank in shown if rank in ranks][:MOST_LINES]))
        return asked

    # ---- what nodes say

    def on_observations(self, agent: RemoteAgent, content: Any) -> None:
        """Use what the relay of a node has sent. Raises LinkError: it is something else."""
        node = self._nodes.get(agent.index)
        if node is None or not isinstance(content, list):
            raise LinkError("unexpected message over the link")
        try:
            for what in content:
                self._handle_one(node, *what)
        except (LookupError, OverflowError):
            raise LinkError("what came over the link is not what infini-run sends") from None

    def _handle_one(self, node: ObservedNode, kind: str, *fields: Any) -> None:
        if kind == "begin":
            self._begin_node(node, *fields)
        elif kind == "usage":
            node.awaited = False
            node.update_usage(*fields)
        elif node.plan is None:
            raise LinkError("unexpected message over the link")
        elif kind == "event":
            self._on_event(node, node.event(*fields))
        elif kind == "progress":
            at, value, time_ns = fields
            rank = node.plan.workers[node.index(at)].rank
            self._note_progress(node.agent, rank, whole_number(value), node.ours_ns(time_ns))
        elif kind == "signs":
            node.group.last_output_ns |= {node.index(at): node.ours_ns(sign_ns) for at, sign_ns in fields[0]}
        elif kind == "written":
            node.group.volumes |= {
                node.index(at): (whole_number(out), whole_number(err)) for at, out, err in fields[1]
            }
            if node.trace is not None:
                node.trace.sample(node.ours_ns(fields[0]))
        elif kind == "span":
            self._add_span(node, *fields)
        elif kind == "stop":
            if node.trace is not None:
                node.trace.stop(node.ours_ns(fields[0]))
            if self._display is not None:
                self._display.stop(node.agent.index)
        elif kind == "end" and node.trace is not None:
            node.trace.end(node.ours_ns(fields[0]))

    def _add_span(self, node: ObservedNode, name: str, start: int, end: int, text: str) -> None:
        """Raises LinkError: a node has no such span, or it ends before it begins."""
        start_ns, end_ns = node.ours_ns(start), node.ours_ns(end)
        if name not in _SPANS or type(text) is not str or end_ns < start_ns:
            raise LinkError("what came over the link is not what infini-run sends")
        text = printable(text[:_SPAN_TEXT])
        if node.trace is not None:
            node.trace.add_span(name, start_ns, end_ns, text)
        if self._display is not None and name == IMPORTS:
            self._display.note_imports(text, end_ns - start_ns, node.agent.index)

    def _begin_node(self, node: ObservedNode, begin_ns: int, now_ns: int, file: str, ranks: list[Any]) -> None:
        agent, launch_id = node.agent, self._launch_id
        node.group = RemoteGroup()
        node.plan = plan = partial_plan(agent.node_rank, launch_id, str(file), ranks, self._numbers_of_ranks.place)
        outcome = node.outcome = Outcome(plan, self._options, oom_kills=-1)
        if self._path:
            if node.trace is None:
                node.trace = self._open_trace(node, node.ours_ns(begin_ns))
            if self._restarts:
                node.trace.renew(self._restarts)
            node.trace.begin(plan, node.group, now_ns=node.ours_ns(now_ns))
        if self._display is not None:
            from infini_run.display.live_table import LaunchView

            group = node.group
            view = LaunchView(
                plan,
                group,
                lambda: outcome,
                lambda ranks, now_s: group.samples,
                self._pace,
                lambda: {
                    rank: kind for rank, kind in group.hung_ranks.items() if kind == "late" or rank in self._hung
                },
                agent.name,
            )
            self._display.begin(view, agent.index)

    def _open_trace(self, node: ObservedNode, begin_ns: int) -> ChromeTrace:
        from infini_run.display.chrome_trace import MAX_SAMPLES, ChromeTrace
        from infini_run.display.rank_span import TracedNode

        count = len(self._nodes) + len(self._gone)
        remote = TracedNode(
            host=node.agent.name,
            pid=self._number(),
            order=node.agent.index - count,
            number=self._number,
            begin_ns=begin_ns,
            facts={"node": node.agent.node_rank, "pid": node.agent.hello.get("pid")},
        )
        return ChromeTrace(self._path, max_samples=max(1000, MAX_SAMPLES // count), node=remote)

    def _number(self) -> int:
        """Return a process number of the trace: two nodes may give one pid to two of theirs. None is the head."""
        self._numbers += 1 + (self._numbers + 1 == os.getpid())
        return self._numbers

    def _on_event(self, node: ObservedNode, event: Event) -> None:
        if node.outcome is not None and event.kind not in ("hung", "late"):
            node.outcome.record_event(event)
        if node.trace is not None:
            node.trace.on_event(event)
        if self._display is not None:
            self._display.on_event(event, node.agent.index)
        if self._feed is not None and event.kind != "signalled":  # the head says what a signal there means
            self._feed.on_event(event, node.agent.name)

    # ---- clocks

    def clocks(self) -> str:
        """Return what the table says of the nodes' clocks: how sure times from there are, and who is far off."""
        known = [node.agent for node in self._nodes.values() if node.agent.clock.is_known]
        if not known:
            return ""
        bound_s = max(agent.clock.bound_s for agent in known)
        off = sorted((agent for agent in known if abs(agent.clock.offset_s) > max(_AWAY_S, agent.clock.bound_s)),
                     key=lambda agent: -abs(agent.clock.offset_s))  # fmt: skip
        text = f"times by this machine's clock, to within {duration_text(max(bound_s, _SURE_S))}"
        if off:
            worst = off[0]
            way = "ahead" if worst.clock.offset_s > 0 else "behind"
            more = f", {len(off) - 1} more are off" if off[1:] else ""
            text += f"; {worst.name} is {duration_text(abs(worst.clock.offset_s))} {way}{more}"
        return printable(text)

    def _clocks_json(self) -> list[dict[str, Any]]:
        """Return for every node how far its clock is ahead of the head's, which its times take into account, and to
        within what."""
        return [
            {
                "node": node.agent.node_rank,
                "host": node.agent.name,
                "offset_s": node.agent.clock.offset_s if node.agent.clock.is_known else None,
                "bound_s": node.bound_s if node.agent.clock.is_known else None,
            }
            for node in self._nodes.values()
        ]

    # ---- the trace

    def _us(self, time_ns: int) -> int:
        return (self._epoch_ns + time_ns) // 1000

    def _slice(self, name: str, start_ns: int, end_ns: int) -> None:
        from infini_run.display.trace_format import slice_event

        event = slice_event(name, os.getpid(), self._us(start_ns), self._us(end_ns))
        self._events.append({**event, "cat": "launcher", "args": {}})

    def content(self) -> dict[str, Any]:
        """Return the whole trace so far: the head, and every node's launcher and ranks."""
        from infini_run.display.trace_format import process_names, trace_content

        nodes = [*self._nodes.values(), *self._gone.values()]
        name = f"infini-run, head of {len(nodes)} nodes, on {os.uname().nodename}"
        names = process_names(os.getpid(), name, -1 - len(nodes))
        events = list(self._events)
        world = 0
        for node in nodes:
            if node.trace is not None:
                theirs, happened = node.trace.parts()
                names += theirs
                events += happened
            world += 0 if node.plan is None or node.agent.index in self._gone else len(node.plan.workers)
        other = {"launch_id": self._launch_id, "world_size": world, "clocks": self._clocks_json()}
        return trace_content(names, events, other)

    def trace_so_far(self) -> dict[str, Any] | None:
        """Return the trace as it would be written now. None: there is none."""
        return self.content() if self._path else None

    def close(self) -> str:
        """Close at the end of the launch: the last frame stays, and the trace goes to its file. Safe twice. Return
        why a file is incomplete, or ""."""
        if self._is_over:
            return ""
        self._is_over = True
        if self._nodes:
            self._end_attempt(time.monotonic_ns())
        if self._display is not None:
            self._display.close()
        problem = "" if self._feed is None else self._feed.close()
        if not self._path or not self._nodes:
            return problem
        from infini_run.display.trace_format import write_trace

        return "; ".join(filter(None, (write_trace(self._path, self.content()), problem)))

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child."""
        if self._feed is not None:
            self._feed.after_fork_in_child()


def open_observers(
    options: Options, environ: Mapping[str, str], *, print_line: Callable[[str], None] | None
) -> tuple[HeadObservers | None, Options]:
    """Open the live table, the trace, the events, and the metrics, if the options ask for them.

    Args:
        print_line: called with a line if there is no terminal for the table. None: the process is a host program's.

    Returns:
        None without all; and the options, in which live is "on" or "off" now.

    Raises:
        UsageError: rich is missing, or a file is not writable.
    """
    from infini_run.display.observers import check_names, open_display
    from infini_run.plan.program import absolute_flag_path
    from infini_run.record import replace
    from infini_run.system.secure_files import check_writable

    check_names(options)
    path = absolute_flag_path("trace", options.trace) if options.trace else ""
    if path:
        check_writable("trace", options.trace)
    made: list[HeadObservers] = []
    display = open_display(options, environ, print_line, lambda: made[0].clocks())
    options = replace(options, live="off" if display is None else "on")
    feed = None
    if options.events or options.metrics:
        from infini_run.display.launch_feed import open_feed

        try:
            feed = open_feed(options, owns_process=print_line is not None)
        except BaseException:
            if display is not None:
                display.close()
            raise
    if display is None and feed is None and not path:
        return None, options
    made.append(HeadObservers(path, display, feed, options))
    return made[0], options
