"""The head's side of --live and --trace: the observations of all nodes (display/relay.py) as one table and one trace.

This module does for many nodes what display/observers.py does for one, and its import happens only for one of the
two. Times of a node become the head's times as they arrive (clock_offset.py).
"""

from __future__ import annotations

import os
import time

from infini_run.display.relay import MOST_LINES
from infini_run.errors import LinkError, printable
from infini_run.multinode.observed_node import ObservedNode, RemoteGroup, partial_plan, whole_number
from infini_run.node.outcome import Outcome
from infini_run.report.text import duration_text, signal_name
from infini_run.system.signal_numbers import SIGCONT, SIGTSTP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.core.group import Event
    from infini_run.display.chrome_trace import ChromeTrace
    from infini_run.display.live_table import LiveTable
    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.options.options import Options

_SPANS = ("preload", "fork")  # of a node's own work
_SPAN_TEXT = 1000  # characters
_INSTANTS = 10_000  # kept of the head's own
_SURE_S = 1e-3  # of a clock: below, its bound is not worth a word
_AWAY_S = 0.1  # of a clock that is said to be off


class HeadObservers:
    """Of one launch, all its attempts. path: of the trace; empty: none. display: None: no table."""

    def __init__(self, path: str, display: LiveTable | None, options: Options) -> None:
        self._path = path
        self._display = display
        self._options = options
        self._nodes: dict[int, ObservedNode] = {}  # that run ranks, or ran them last
        self._gone: dict[int, ObservedNode] = {}  # that ran some before, and are still in the trace
        self._events: list[dict[str, Any]] = []
        self._instant_count = 0  # instants
        self._numbers = 0  # processes of the trace, beside the head
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._begin_ns = self._began_ns = time.monotonic_ns()  # the first attempt, this one
        self._stop_ns = 0
        self._restarts = 0
        self._launch_id = ""
        self._is_over = False
        self._echoes = 0  # after Ctrl-Z: the head continues its ranks, then hears the SIGCONT that continued it

    @property
    def wanted(self) -> list[str]:
        """What agents are to send."""
        return [name for name, is_wanted in (("live", self._display), ("trace", self._path)) if is_wanted]

    # ---- what the head does

    def begin(self, agents: Sequence[RemoteAgent], launch_id: str, restarts: int) -> None:
        """Begin an attempt: all ranks start or restart."""
        now_ns = time.monotonic_ns()
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

    def rest(self) -> None:
        """Rest between two attempts: the last frame stays."""
        self._end_attempt(time.monotonic_ns())

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

    def on_node_lost(self, agent: RemoteAgent, text: str) -> None:
        """Note the loss of a node, and of its ranks."""
        self.note(text)
        node = self._nodes.get(agent.index)
        if node is None:
            return
        if node.trace is not None:
            node.trace.on_disconnect(time.monotonic_ns())
        if self._display is not None:
            self._display.on_disconnect(agent.index)

    def on_signal(self, number: int) -> None:
        """Note a signal to all ranks."""
        self.note(f"passed {signal_name(number)} on")
        is_echo = number == SIGCONT and self._echoes == 1
        self._echoes = 2 if number == SIGTSTP else max(0, self._echoes - (number == SIGCONT))
        if self._display is not None and not is_echo:
            self._display.note_signal(number)

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
        """Return how long to wait at most. Only a table needs a clock."""
        wait_s = None if self._display is None else self._display.timeout_s(None)
        return float("inf") if wait_s is None else wait_s

    def run_due(self) -> None:
        """Redraw the table, if that is due."""
        if self._display is not None:
            self._display.run_due()

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
        elif kind == "written":
            node.group.volumes |= {
                node.index(at): (whole_number(out), whole_number(err)) for at, out, err in fields[1]
            }
            if node.trace is not None:
                node.trace.sample(node.ours_ns(fields[0]))
        elif kind == "span":
            if node.trace is not None:
                self._add_span(node.trace, node, *fields)
        elif kind == "stop":
            if node.trace is not None:
                node.trace.stop(node.ours_ns(fields[0]))
            if self._display is not None:
                self._display.stop(node.agent.index)
        elif kind == "end" and node.trace is not None:
            node.trace.end(node.ours_ns(fields[0]))

    def _add_span(self, trace: ChromeTrace, node: ObservedNode, name: str, start: int, end: int, text: str) -> None:
        """Raises LinkError: a node has no such span, or it ends before it begins."""
        start_ns, end_ns = node.ours_ns(start), node.ours_ns(end)
        if name not in _SPANS or type(text) is not str or end_ns < start_ns:
            raise LinkError("what came over the link is not what infini-run sends")
        trace.add_span(name, start_ns, end_ns, printable(text[:_SPAN_TEXT]))

    def _begin_node(self, node: ObservedNode, begin_ns: int, now_ns: int, file: str, ranks: list[Any]) -> None:
        agent, launch_id = node.agent, self._launch_id
        node.group = RemoteGroup()
        node.plan = plan = partial_plan(agent, launch_id, str(file), ranks)
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
            view = LaunchView(plan, group, lambda: outcome, lambda ranks, now_s: group.samples, agent.name)
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

    def close(self) -> str:
        """Close at the end of the launch: the last frame stays, and the trace goes to its file. Safe twice. Return
        why the file is incomplete, or ""."""
        if self._is_over:
            return ""
        self._is_over = True
        if self._nodes:
            self._end_attempt(time.monotonic_ns())
        if self._display is not None:
            self._display.close()
        if not self._path or not self._nodes:
            return ""
        from infini_run.display.trace_format import write_trace

        return write_trace(self._path, self.content())


def open_observers(
    options: Options, environ: Mapping[str, str], *, print_line: Callable[[str], None] | None
) -> tuple[HeadObservers | None, Options]:
    """Open the live table and the trace, if the options ask for them.

    Args:
        print_line: called with a line if there is no terminal for the table.

    Returns:
        None without both; and the options, in which live is "on" or "off" now.

    Raises:
        UsageError: rich is missing, or the trace is not writable.
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
    if display is None and not path:
        return None, options
    made.append(HeadObservers(path, display, options))
    return made[0], options
