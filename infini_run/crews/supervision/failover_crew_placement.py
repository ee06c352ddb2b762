"""The placement of a crew that continues after the loss of a host. The policy decides whether workers restart, and
the spawner where and when (failover_spawner.py)."""

from __future__ import annotations

import time

from infini_run.crews.spawn.remote_process import RemoteWorkerProcess
from infini_run.crews.supervision.crew_placement import NEVER, CrewPlacement
from infini_run.errors import InfiniRunError, NodeLost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from infini_run.crews.spawn.failover_spawner import FailoverSpawner
    from infini_run.crews.spawn.remote_node import RemoteNode
    from infini_run.crews.spawn.spawner import WorkerProcess
    from infini_run.crews.supervision.crew_placement import PendingRestart


class FailoverCrewPlacement(CrewPlacement):
    """spawner: knows the hosts."""

    def __init__(self, spawner: FailoverSpawner) -> None:
        self._hosts = spawner
        self._losses: dict[RemoteNode, float | None] = {}  # what each has cost: how long to wait; None: too much
        self._wait_ends: dict[PendingRestart, float] = {}

    def add_watcher(self, wake: Callable[[], None]) -> None:
        self._hosts.watchers.add(wake)

    def remove_watcher(self, wake: Callable[[], None]) -> None:
        self._hosts.watchers.discard(wake)

    def spend(
        self, failed: WorkerProcess, processes: Iterable[WorkerProcess | None], spend: Callable[[], float | None]
    ) -> float | None:
        """Use up one restart: a host that is lost, or leaves, is one failure with all its workers."""
        assert isinstance(failed, RemoteWorkerProcess)
        node = failed.node
        if node.problem is None and not node.peer.is_leaving:
            return spend()
        if node not in self._losses:
            held = {process.node for process in processes if isinstance(process, RemoteWorkerProcess)}
            self._losses = {each: cost for each, cost in self._losses.items() if each in held}
            self._losses[node] = spend()
        return self._losses[node]

    def start_due_s(self, ranks: Sequence[int]) -> float:
        return self._hosts.start_due_s(ranks)

    def may_retry(self, ranks: Sequence[int], error: InfiniRunError) -> bool:
        """Return whether there may be another host, if the host was lost meanwhile."""
        return isinstance(error, NodeLost) or self.start_due_s(ranks) > time.monotonic()

    def check_waits(self, waiting: Sequence[PendingRestart]) -> InfiniRunError | None:
        error = self._hosts.end_error if waiting else None
        if error is not None:
            return error
        now_s, limit_s = time.monotonic(), self._hosts.join_timeout_s
        self._wait_ends = {pending: self._wait_ends.get(pending, now_s + limit_s) for pending in waiting}
        self.wait_end_s = min(self._wait_ends.values(), default=NEVER)
        late = next((pending for pending, end_s in self._wait_ends.items() if now_s >= end_s), None)
        if late is None:
            return None
        ranks = ", ".join(map(str, sorted(late.ranks)[:8]))
        return NodeLost(f"no host joined for ranks {ranks} within {limit_s:g} s (join_timeout)", "", -1)
