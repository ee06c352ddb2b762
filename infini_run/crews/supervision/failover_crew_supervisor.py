"""The supervisor of a crew that goes on when it loses a host: the policy decides whether its workers start again, and
the spawner where and when (failover_spawner.py)."""

from __future__ import annotations

import time

from infini_run.crews.spawn.failover_spawner import FailoverSpawner
from infini_run.crews.spawn.remote_process import RemoteWorkerProcess
from infini_run.crews.supervision.crew_supervisor import CrewSupervisor, PendingRestart
from infini_run.errors import InfiniRunError, NodeLost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.crews.spawn.remote_node import RemoteNode
    from infini_run.crews.supervision.supervised_worker import SupervisedWorker

_NEVER = float("inf")


class FailoverCrewSupervisor(CrewSupervisor):
    """Arguments as for a CrewSupervisor. spawner: knows the hosts."""

    def __init__(self, spawner: FailoverSpawner, *given: Any, **more: Any) -> None:
        self._hosts = spawner
        self._losses: dict[RemoteNode, float | None] = {}  # what each has cost: how long to wait; None: too much
        self._wait_ends: dict[PendingRestart, float] = {}  # when it has waited for a host for too long
        super().__init__(spawner, *given, **more)

    def start(self) -> None:
        """As CrewSupervisor.start."""
        self._hosts.watchers.add(self.wake)
        super().start()

    def _spend(self, worker: SupervisedWorker, now_s: float) -> float | None:
        """A host that is lost, or leaves, is one failure with all its workers."""
        process = worker.process
        assert isinstance(process, RemoteWorkerProcess)
        node = process.node
        if node.problem is None and not node.peer.is_leaving:
            return super()._spend(worker, now_s)
        if node not in self._losses:
            held = {each.process.node for each in self.workers if isinstance(each.process, RemoteWorkerProcess)}
            self._losses = {each: cost for each, cost in self._losses.items() if each in held}
            self._losses[node] = super()._spend(worker, now_s)
        return self._losses[node]

    def _can_start(self, pending: PendingRestart) -> bool:
        return super()._can_start(pending) and self._start_due_s(pending) <= time.monotonic()

    def _start_due_s(self, pending: PendingRestart) -> float:
        return self._hosts.start_due_s(sorted(pending.ranks))

    def _restart_due(self) -> None:
        super()._restart_due()
        now_s, before = time.monotonic(), self._wait_ends
        waiting = [
            pending
            for pending in self._restarts
            if super(FailoverCrewSupervisor, self)._can_start(pending) and self._start_due_s(pending) == _NEVER
        ]
        error = self._hosts.end_error if waiting else None
        if error is not None:
            self._fail([*self._causes, error])
            return
        limit_s = self._hosts.join_timeout_s
        self._wait_ends = {pending: before.get(pending, now_s + limit_s) for pending in waiting}
        late = [pending for pending in waiting if now_s >= self._wait_ends[pending]]
        if late:
            ranks = ", ".join(map(str, sorted(late[0].ranks)[:8]))
            error = NodeLost(f"no host has come for ranks {ranks} within {limit_s:g} s (join_timeout)", "", -1)
            self._fail([*self._causes, error])

    def _on_start_failed(self, pending: PendingRestart, error: InfiniRunError) -> None:
        """If the host was lost meanwhile, there may be another one."""
        if isinstance(error, NodeLost) or self._start_due_s(pending) > time.monotonic():
            self._plan_restart(pending.ranks, pending.due_s)
        else:
            super()._on_start_failed(pending, error)

    def _due_s(self) -> float | None:
        settled = [each for each in self._restarts if super(FailoverCrewSupervisor, self)._can_start(each)]
        dues = [max(each.due_s, self._start_due_s(each)) for each in settled]
        dues += self._wait_ends.values()
        due_s = min((due for due in dues if due != _NEVER), default=None)
        base_s = super()._due_s()
        return due_s if base_s is None else base_s if due_s is None else min(due_s, base_s)

    def _on_workers_ended(self) -> None:
        self._hosts.watchers.discard(self.wake)
        super()._on_workers_ended()
