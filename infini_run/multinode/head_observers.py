"""The head's side of --live and --trace: what all nodes tell (display/relay.py), as one table and one trace.

It is for many nodes what display/observers.py is for one, and is imported only where one of the two was asked for.
Times of a node become ours as they come in, by what is known of its clocks then (clock_offset.py).
"""

from __future__ import annotations

import os
import time

from infini_run.core.group import KINDS, Event
from infini_run.display.relay import MOST_LINES
from infini_run.display.resource_usage import Usage
from infini_run.errors import LinkError, printable
from infini_run.node.outcome import Outcome
from infini_run.plan.model import Output, Plan, Worker
from infini_run.report.report import duration_text, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from infini_run.display.chrome_trace import ChromeTrace
    from infini_run.display.live_table import LiveTable
    from infini_run.multinode.agent_state import RemoteAgent
    from infini_run.options.options import Options

_TOLD = frozenset((*KINDS.values(), "hung", "late")) - {"suspend"}  # which is no news of a rank
_CONT, _TSTP = 18, 20
_INSTANTS = 10_000  # kept of the head's own
_SURE_S = 1e-3  # of a clock: below, its bound is not worth a word
_AWAY_S = 0.1  # of a clock that is said to be off


class _Far:
    """What is known of a node's group here."""

    def __init__(self) -> None:
        self.volumes: dict[int, tuple[int, int]] = {}
        self.words: dict[int, tuple[bytes, bytes]] = {}
        self.said_ns: dict[int, int] = {}
        self.samples: dict[int, Usage] = {}  # by pid

    def volume(self, worker: int) -> tuple[int, int]:
        return self.volumes.get(worker, (0, 0))

    def line(self, worker: int) -> bytes:
        return self.words.get(worker, (b"", b""))[0]

    def status(self, worker: int) -> bytes:
        return self.words.get(worker, (b"", b""))[1]

    def activity(self, worker: int) -> tuple[int, int]:
        return self.said_ns.get(worker, 0), 0


class _Node:
    """One node, in the attempt that runs."""

    def __init__(self, peer: RemoteAgent) -> None:
        self.peer = peer
        self.plan: Plan | None = None
        self.far = _Far()
        self.outcome: Outcome | None = None
        self.trace: ChromeTrace | None = None
        self.awaited = False  # it has been asked what its ranks use
        self.bound_s = 0.0  # the worst that any of its times may be off by

    def ours_ns(self, time_ns: Any) -> int:
        """A time of the node's, by our clock."""
        clock = self.peer.clock
        if clock.is_known:
            self.bound_s = max(self.bound_s, clock.bound_s)
        return _whole(time_ns) - round(clock.monotonic_s * 1e9)


class HeadObservers:
    """Of one launch, all its attempts. path: of the trace; empty: none. display: None: no table."""

    def __init__(self, path: str, display: LiveTable | None, options: Options) -> None:
        self._path = path
        self._display = display
        self._options = options
        self._nodes: dict[int, _Node] = {}
        self._events: list[dict[str, Any]] = []
        self._told = 0  # instants
        self._numbers = 0  # processes of the trace, beside us
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._begin_ns = self._began_ns = time.monotonic_ns()  # the first attempt, this one
        self._stop_ns = 0
        self._restarts = 0
        self._launch_id = ""
        self._is_over = False
        self._echoes = 0  # after Ctrl-Z: the head continues its ranks, then hears the SIGCONT that continued it

    @property
    def wants(self) -> list[str]:
        """What agents are asked for."""
        return [name for name, is_wanted in (("live", self._display), ("trace", self._path)) if is_wanted]

    # ---- what the head does

    def begin(self, peers: Iterable[RemoteAgent], launch_id: str, restarts: int) -> None:
        """All ranks are about to be started, or to be started again."""
        now_ns = time.monotonic_ns()
        self._launch_id, self._restarts = launch_id, restarts
        self._slice("rest" if restarts else "reach nodes", self._began_ns, now_ns)
        if restarts:
            self.note(f"restart {restarts}")
        self._began_ns, self._stop_ns = now_ns, 0
        self._nodes = {peer.index: self._nodes.get(peer.index) or _Node(peer) for peer in peers}
        for node in self._nodes.values():
            node.awaited = False

    def rest(self) -> None:
        """All have ended, and will be started again: the last frame stays."""
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
        """All ranks are being stopped."""
        self._stop_ns = self._stop_ns or time.monotonic_ns()
        if self._display is not None:
            self._display.stop()

    def lose(self, peer: RemoteAgent, text: str) -> None:
        """A node was lost, and its ranks with it."""
        self.note(text)
        node = self._nodes.get(peer.index)
        if node is None:
            return
        if node.trace is not None:
            node.trace.on_disconnect(time.monotonic_ns())
        if self._display is not None:
            self._display.on_disconnect(peer.index)

    def note_signal(self, number: int) -> None:
        """We were told this one, and pass it on."""
        self.note(f"passed {signal_name(number)} on")
        is_echo = number == _CONT and self._echoes == 1
        self._echoes = 2 if number == _TSTP else max(0, self._echoes - (number == _CONT))
        if self._display is not None and not is_echo:
            self._display.note_signal(number)

    def note(self, text: str) -> None:
        """Something that belongs into the trace, at this moment."""
        self._told += 1
        if self._path and self._told <= _INSTANTS:
            at = {"ph": "i", "s": "g", "ts": self._us(time.monotonic_ns()), "pid": os.getpid(), "tid": os.getpid()}
            self._events.append({"name": printable(text), "cat": "event", "args": {}, **at})

    def say(self, text: str) -> bool:
        """Lines for the user above the table; False: there is none."""
        return self._display is not None and self._display.print_above(text)

    # ---- when

    def timeout_s(self) -> float:
        """How long to wait at most. Only a table needs a clock."""
        wait_s = None if self._display is None else self._display.timeout_s(None)
        return float("inf") if wait_s is None else wait_s

    def act(self) -> None:
        """Something has happened, or the time is up."""
        if self._display is not None:
            self._display.run_due()

    def questions(self) -> list[tuple[RemoteAgent, list[int]]]:
        """Whom to ask what its ranks use, and of which ranks the last line is wanted: once a second, while the
        table is seen, and nobody who has not answered."""
        if self._display is None or not self._display.is_usage_due():
            return []
        shown = sorted(self._display.shown)
        asked = []
        for node in self._nodes.values():
            if node.peer.state == "running" and node.plan is not None and not node.awaited:
                node.awaited = True
                ranks = {worker.rank for worker in node.plan.workers}
                asked.append((node.peer, [rank for rank in shown if rank in ranks][:MOST_LINES]))
        return asked

    # ---- what nodes say

    def take(self, peer: RemoteAgent, content: Any) -> None:
        """What a Relay has told. Raises LinkError: it is something else."""
        node = self._nodes.get(peer.index)
        if node is None or not isinstance(content, list):
            raise LinkError("what came over the link was not due")
        try:
            for what in content:
                self._take_one(node, *what)
        except (LookupError, OverflowError):
            raise LinkError("what came over the link is not what infini-run sends") from None

    def _take_one(self, node: _Node, kind: str, *words: Any) -> None:
        if kind == "begin":
            self._begin_node(node, *words)
        elif kind == "usage":
            node.awaited = False
            self._take_look(node, *words)
        elif node.plan is None:
            raise LinkError("what came over the link was not due")
        elif kind == "event":
            self._follow(node, _event(node, *words))
        elif kind == "written":
            node.far.volumes |= {_index(node, at): (_whole(out), _whole(err)) for at, out, err in words[1]}
            if node.trace is not None:
                node.trace.sample(node.ours_ns(words[0]))
        elif kind == "stop":
            if node.trace is not None:
                node.trace.stop(node.ours_ns(words[0]))
            if self._display is not None:
                self._display.stop(node.peer.index)
        elif kind == "end" and node.trace is not None:
            node.trace.end(node.ours_ns(words[0]))

    def _begin_node(self, node: _Node, begin_ns: int, now_ns: int, file: str, ranks: list[Any]) -> None:
        peer, launch_id = node.peer, self._launch_id
        node.far = _Far()
        node.plan = plan = _plan(peer, launch_id, str(file), ranks)
        outcome = node.outcome = Outcome(plan, self._options, has_terminal=False, oom_kills=-1)
        if self._path:
            if node.trace is None:
                node.trace = self._open_trace(node, node.ours_ns(begin_ns))
            if self._restarts:
                node.trace.renew(self._restarts)
            node.trace.begin(plan, node.far, now_ns=node.ours_ns(now_ns))
        if self._display is not None:
            from infini_run.display.live_table import LaunchView

            far = node.far
            scene = LaunchView(plan, far, lambda: outcome, lambda ranks, now_s: far.samples, peer.name)
            self._display.begin(scene, peer.index)

    def _open_trace(self, node: _Node, begin_ns: int) -> ChromeTrace:
        from infini_run.display.chrome_trace import MOST_SAMPLES, ChromeTrace, Home

        count = len(self._nodes)
        home = Home(
            host=node.peer.name,
            pid=self._number(),
            order=node.peer.index - count,
            number=self._number,
            begin_ns=begin_ns,
            facts={"node": node.peer.index, "pid": node.peer.hello.get("pid")},
        )
        return ChromeTrace(self._path, most_samples=max(1000, MOST_SAMPLES // count), home=home)

    def _number(self) -> int:
        """A process of the trace: two nodes may give one pid to two of theirs. None is ours."""
        self._numbers += 1 + (self._numbers + 1 == os.getpid())
        return self._numbers

    def _follow(self, node: _Node, event: Event) -> None:
        if node.outcome is not None and event.kind not in ("hung", "late"):
            node.outcome.record_event(event)
        if node.trace is not None:
            node.trace.on_event(event)
        if self._display is not None:
            self._display.on_event(event, node.peer.index)

    def _take_look(self, node: _Node, rows: Any, lines: Any) -> None:
        far = node.far
        far.samples.clear()
        for at, pid, cpu, memory, gpu_memory, gpu, is_suspended, said_ns in rows:
            far.said_ns[_index(node, at)] = node.ours_ns(said_ns) if said_ns else 0
            far.samples[_whole(pid)] = Usage(
                cpu=None if cpu is None else float(cpu),
                memory=None if memory is None else _whole(memory),
                gpu_memory=None if gpu_memory is None else _whole(gpu_memory),
                gpu=None if gpu is None else float(gpu),
                is_suspended=bool(is_suspended),
            )
        for at, line, status in lines:
            far.words[_index(node, at)] = _bytes(line), _bytes(status)

    # ---- clocks

    def clocks(self) -> str:
        """What the table says of the nodes' clocks: how sure times are that came from there, and who is far off."""
        known = [node.peer for node in self._nodes.values() if node.peer.clock.is_known]
        if not known:
            return ""
        bound_s = max(peer.clock.bound_s for peer in known)
        off = sorted((peer for peer in known if abs(peer.clock.offset_s) > max(_AWAY_S, peer.clock.bound_s)),
                     key=lambda peer: -abs(peer.clock.offset_s))  # fmt: skip
        text = f"times by this machine's clock, to within {duration_text(max(bound_s, _SURE_S))}"
        if off:
            worst = off[0]
            way = "ahead" if worst.clock.offset_s > 0 else "behind"
            more = f", {len(off) - 1} more are off" if off[1:] else ""
            text += f"; {worst.name} is {duration_text(abs(worst.clock.offset_s))} {way}{more}"
        return printable(text)

    def _clocks_json(self) -> list[dict[str, Any]]:
        """Of every node: how far its clock is ahead of ours, which was taken off its times, and to within what."""
        return [
            {
                "node": node.peer.index,
                "host": node.peer.name,
                "offset_s": node.peer.clock.offset_s if node.peer.clock.is_known else None,
                "bound_s": node.bound_s if node.peer.clock.is_known else None,
            }
            for node in self._nodes.values()
        ]

    # ---- the trace

    def _us(self, time_ns: int) -> int:
        return (self._epoch_ns + time_ns) // 1000

    def _slice(self, name: str, start_ns: int, end_ns: int) -> None:
        start_us, end_us, pid = self._us(start_ns), self._us(max(start_ns, end_ns)), os.getpid()
        span = {"ph": "X", "ts": start_us, "dur": end_us - start_us, "pid": pid, "tid": pid}
        self._events.append({"name": name, "cat": "launcher", "args": {}, **span})

    def content(self) -> dict[str, Any]:
        """The whole trace so far: ourselves, and every node's launcher and ranks."""
        from infini_run.display.chrome_trace import process_names, whole

        name = f"infini-run, head of {len(self._nodes)} nodes, on {os.uname().nodename}"
        names = process_names(os.getpid(), name, -1 - len(self._nodes))
        events = list(self._events)
        world = 0
        for node in self._nodes.values():
            if node.trace is not None:
                theirs, happened = node.trace.parts()
                names += theirs
                events += happened
            world += 0 if node.plan is None else len(node.plan.workers)
        other = {"launch_id": self._launch_id, "world_size": world, "clocks": self._clocks_json()}
        return whole(names, events, other)

    def close(self) -> str:
        """The launch is over: the last frame stays, and the trace is written. Safe twice. Why that was not possible,
        or ""."""
        if self._is_over:
            return ""
        self._is_over = True
        if self._nodes:
            self._end_attempt(time.monotonic_ns())
        if self._display is not None:
            self._display.close()
        if not self._path or not self._nodes:
            return ""
        from infini_run.display.chrome_trace import write_trace

        return write_trace(self._path, self.content())


def open_overview(
    options: Options, environ: Mapping[str, str], *, say: Callable[[str], None] | None
) -> tuple[HeadObservers | None, Options]:
    """What was asked for, and the options as they are then: live is "on" or "off". say: where a sentence goes when
    there is no terminal for the table. Raises UsageError: rich is missing, or the trace cannot be written."""
    from infini_run.display.observers import check_names, open_display
    from infini_run.plan.program import absolute
    from infini_run.record import replace
    from infini_run.system.secure_files import check_writable

    check_names(options)
    path = absolute("trace", options.trace) if options.trace else ""
    if path:
        check_writable("trace", options.trace)
    made: list[HeadObservers] = []
    display = open_display(options, environ, say, lambda: made[0].clocks())
    options = replace(options, live="off" if display is None else "on")
    if display is None and not path:
        return None, options
    made.append(HeadObservers(path, display, options))
    return made[0], options


# ---- at the border: what a node says may be anything


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise LinkError("what came over the link is not what infini-run sends")
    return value


def _bytes(value: Any) -> bytes:
    return str(value).encode("utf-8", "surrogateescape")


def _index(node: _Node, value: Any) -> int:
    if node.plan is None or not 0 <= _whole(value) < len(node.plan.workers):
        raise LinkError("what came over the link is not what infini-run sends")
    return int(value)


def _event(node: _Node, kind: Any, worker: Any, *rest: Any) -> Event:
    pid, code, signal, flags, time_ns, user_us, system_us, max_rss_kib, name = rest
    if kind not in _TOLD:
        raise LinkError("what came over the link is not what infini-run sends")
    index = -1 if worker == -1 else _index(node, worker)
    assert node.plan is not None
    return Event(
        kind=kind,
        worker=index,
        rank=-1 if index < 0 else node.plan.workers[index].rank,
        pid=_whole(pid),
        code=_whole(code),
        signal=_whole(signal),
        dumped_core=bool(_whole(flags) & 1),
        after_stop=bool(flags & 2),
        status_lost=bool(flags & 4),
        time_ns=node.ours_ns(time_ns),
        user_us=_whole(user_us),
        system_us=_whole(system_us),
        max_rss_kib=_whole(max_rss_kib),
        name=str(name),
    )


def _plan(peer: RemoteAgent, launch_id: str, file: str, ranks: list[Any]) -> Plan:
    """As much of a node's plan as a table and a trace show."""
    workers = []
    for rank, local_rank, devices, carries in ranks:
        output = Output(console=False, log=False, piped=bool(carries))
        workers.append(
            Worker(
                rank=_whole(rank), local_rank=_whole(local_rank), node=peer.index, argv=(file,), env=(),
                devices=tuple(str(name) for name in devices), cpu_binding=None, stdin="null", stdout=output,
                stderr=output, label="", log="", error_log="", error_file="", notify="",
            )
        )  # fmt: skip
    return Plan(
        launch_id=launch_id, nodes=(), nnodes=1, world_size=len(workers), master_addr="", master_port=0, file=file,
        env=(), workers=tuple(workers),
    )  # fmt: skip
