"""One node's part of the table and the trace, out of what its relay sends, which may be anything.

The one rule: behind these methods every value is what it should be; anything else raises LinkError.
"""

from __future__ import annotations

from infini_run.core.c_structs import KINDS, LAUNCHERS_OWN, Event
from infini_run.display.resource_usage import Usage
from infini_run.errors import LinkError
from infini_run.plan.model import Output, Plan, Worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from infini_run.display.chrome_trace import ChromeTrace
    from infini_run.multinode.head.agent_state import RemoteAgent
    from infini_run.node.outcome import Outcome

_EVENT_KINDS = frozenset((*KINDS.values(), "hung", "late")) - LAUNCHERS_OWN


class RemoteGroup:
    """The group of a node, for the live table and the trace."""

    def __init__(self) -> None:
        self.volumes: dict[int, tuple[int, int]] = {}
        self.last_lines: dict[int, tuple[bytes, bytes]] = {}
        self.last_output_ns: dict[int, int] = {}
        self.samples: dict[int, Usage] = {}  # by pid
        self.hung_ranks: dict[int, str] = {}  # each with `hung` or `late`

    def volume(self, worker: int) -> tuple[int, int]:
        return self.volumes.get(worker, (0, 0))

    def line(self, worker: int) -> bytes:
        return self.last_lines.get(worker, (b"", b""))[0]

    def status(self, worker: int) -> bytes:
        return self.last_lines.get(worker, (b"", b""))[1]

    def update(self, lines: Any, usage: Any, hung: Any, count: int) -> None:
        """Use what a launch of `count` ranks says at its control socket. Raises LinkError, ValueError, TypeError: it
        is something else."""
        self.samples = {
            whole_number(pid): Usage(
                cpu=None if cpu is None else float(cpu),
                memory=None if memory is None else whole_number(memory),
                is_suspended=bool(is_suspended),
                gpu_memory=None if gpu_memory is None else whole_number(gpu_memory),
                gpu=None if gpu is None else float(gpu),
            )
            for pid, cpu, memory, is_suspended, gpu_memory, gpu in usage
        }
        self.hung_ranks = {whole_number(rank): _hung(kind) for rank, kind in hung}
        for at, line, status in lines:
            if not 0 <= whole_number(at) < count:
                raise LinkError("what came over the link is not what infini-run sends")
            self.last_lines[at] = _bytes(line), _bytes(status)

    def activity(self, worker: int) -> tuple[int, int]:
        return self.last_output_ns.get(worker, 0), 0


class ObservedNode:
    """One node, in the attempt that runs."""

    def __init__(self, agent: RemoteAgent) -> None:
        self.agent = agent
        self.plan: Plan | None = None
        self.group = RemoteGroup()
        self.outcome: Outcome | None = None
        self.trace: ChromeTrace | None = None
        self.awaited = False  # it has been asked what its ranks use
        self.bound_s = 0.0  # the worst that any of its times may be off by

    def ours_ns(self, time_ns: Any) -> int:
        """Convert a time of the node's to the head's clock."""
        clock = self.agent.clock
        if clock.is_known:
            self.bound_s = max(self.bound_s, clock.bound_s)
        return whole_number(time_ns) - round(clock.monotonic_s * 1e9)

    def index(self, value: Any) -> int:
        """Check and return the index of a worker. Raises LinkError."""
        if self.plan is None or not 0 <= whole_number(value) < len(self.plan.workers):
            raise LinkError("what came over the link is not what infini-run sends")
        return int(value)

    def event(self, kind: Any, worker: Any, *rest: Any) -> Event:
        """Return the event of the core that the node has seen. Raises LinkError."""
        pid, code, signal, flags, time_ns, user_us, system_us, max_rss_kib, name = rest
        if kind not in _EVENT_KINDS:
            raise LinkError("what came over the link is not what infini-run sends")
        at = -1 if worker == -1 else self.index(worker)
        assert self.plan is not None
        return Event(
            kind=kind,
            worker=at,
            rank=-1 if at < 0 else self.plan.workers[at].rank,
            pid=whole_number(pid),
            code=whole_number(code),
            signal=whole_number(signal),
            dumped_core=bool(whole_number(flags) & 1),
            after_stop=bool(flags & 2),
            status_lost=bool(flags & 4),
            time_ns=self.ours_ns(time_ns),
            user_us=whole_number(user_us),
            system_us=whole_number(system_us),
            max_rss_kib=whole_number(max_rss_kib),
            name=str(name),
        )

    def update_usage(self, rows: Any, lines: Any) -> None:
        """Use an answer to a usage request. Raises LinkError: it is none."""
        group, workers = self.group, () if self.plan is None else self.plan.workers
        group.samples.clear()
        group.hung_ranks.clear()
        for at, pid, cpu, memory, gpu_memory, gpu, is_suspended, hung in rows:
            if hung:
                group.hung_ranks[workers[self.index(at)].rank] = _hung(hung)
            group.samples[whole_number(pid)] = Usage(
                cpu=None if cpu is None else float(cpu),
                memory=None if memory is None else whole_number(memory),
                gpu_memory=None if gpu_memory is None else whole_number(gpu_memory),
                gpu=None if gpu is None else float(gpu),
                is_suspended=bool(is_suspended),
            )
        for at, line, status in lines:
            group.last_lines[self.index(at)] = _bytes(line), _bytes(status)


def whole_number(value: Any) -> int:
    """Check and return a whole number of 64 bits. Raises LinkError."""
    if type(value) is not int or abs(value) >= 1 << 63:
        raise LinkError("what came over the link is not what infini-run sends")
    return value


def _hung(value: Any) -> str:
    if value not in ("hung", "late"):
        raise LinkError("what came over the link is not what infini-run sends")
    return str(value)


def _bytes(value: Any) -> bytes:
    return str(value).encode("utf-8", "surrogateescape")


def partial_plan(
    node_rank: int,
    launch_id: str,
    file: str,
    ranks: list[Any],
    place: Callable[[int], tuple[str, int]] = lambda rank: ("", rank),
) -> Plan:
    """Return as much of a node's plan as the table, the trace, and the metrics need. Raises LinkError.

    Args:
        node_rank: The node.
        launch_id: The launch.
        file: The program.
        ranks: Of each rank: its number, its local one, its devices, and how many of its streams the launcher reads.
        place: Returns the program of a rank, and its number there.
    """
    workers = []
    for rank, local_rank, devices, streams in ranks:
        program, program_rank = place(whole_number(rank))
        stdout, stderr = (Output(console=False, log=False, piped=each) for each in (bool(streams), streams == 2))
        workers.append(
            Worker(
                rank=rank, local_rank=whole_number(local_rank), node=node_rank,
                program=program, program_rank=program_rank, name=f"{program or 'rank'} {program_rank}",
                file=file, cwd="", argv=(file,), env=(),
                devices=tuple(str(name) for name in devices), cpu_binding=None, stdin="null", stdout=stdout,
                stderr=stderr, label="", log="", error_log="", error_file="", notify="",
            )
        )  # fmt: skip
    return Plan(
        launch_id=launch_id, nodes=(), nnodes=1, world_size=len(workers), master_addr="", programs=(), env=(),
        workers=tuple(workers),
    )  # fmt: skip
