"""A launch of a function that goes on when it loses a node: its ranks end, and start again in the next world.

The head decides which nodes a world has and when it may begin (multinode/membership_transitions.py); the spawner
tells when one is up. An attempt that ends because a node came or went costs nothing of `max_restarts`. The number of
ranks may be another one in each world, and results are those of the last.
"""

from __future__ import annotations

import time

from infini_run.crews.spawn.remote_process import RemoteWorkerProcess
from infini_run.crews.spawn.remote_spawner import RemoteSpawner
from infini_run.crews.supervision.launch_supervisor import LaunchSupervisor
from infini_run.crews.supervision.supervised_worker import SupervisedWorker
from infini_run.errors import InfiniRunError, NodeLost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class FailoverLaunchSupervisor(LaunchSupervisor):
    """Arguments are those of a LaunchSupervisor, and:

    Args:
        spawner: its worlds are those of the launch.
        owns_worlds: no other launch uses the spawner: each attempt is a world, before which nodes are checked, and
            which may leave out a node whose ranks fail. Otherwise only a node that comes or goes ends a world.
    """

    def __init__(self, spawner: RemoteSpawner, *given: Any, owns_worlds: bool, **more: Any) -> None:
        self._worlds = spawner
        self._owns_worlds = owns_worlds
        self._world = -1  # the number of the one in which ranks run, or ran last
        self._over = -1  # this world and those before it are over for us
        self._awaits_world = False
        super().__init__(spawner, *given, **more)

    def start(self) -> None:
        """As LaunchSupervisor.start; a world that ends meanwhile is followed by another one."""
        self._worlds.watchers.add(self.wake)
        super().start()

    # ---- attempts

    @property
    def _may_start_again(self) -> bool:
        return True

    @property
    def _is_waiting(self) -> bool:
        return self._awaits_world or super()._is_waiting

    def _start_workers(self, ranks: Sequence[int]) -> None:
        """Start all ranks, as many as the world has now, or wait for a world."""
        world = self._worlds.world_after(self._over)
        self._awaits_world = world is None
        if world is None:
            return
        if len(self.workers) != world.size:
            self.workers = [SupervisedWorker(rank, self) for rank in range(world.size)]
            self._set_ranks()
            self._display.begin(world.size)
        for worker in self.workers:
            worker.starts = self.restarts.total
        try:
            super()._start_workers(range(world.size))
        except InfiniRunError:
            if self._worlds.world_after(world.number - 1) is world:  # it was not lost: no other one would do better
                raise
            self._over, self._awaits_world = world.number, True
            return
        process = self.workers[0].process
        assert isinstance(process, RemoteWorkerProcess)
        self._world = process.node.world

    def _restart_if_due(self) -> None:
        if not self._awaits_world:
            super()._restart_if_due()
            return
        try:
            is_up = self._worlds.world_after(self._over) is not None
        except InfiniRunError as error:
            self._awaits_world = False
            self.fail(error, -1)
            return
        if is_up:
            self._restart()

    def _plan_restart(self) -> bool:
        """Every rank has ended: whether they are started again, in this world or the next one."""
        if self._is_unwanted or any(failure.rank < 0 for failure in self.failures):
            return False
        if self._worlds.why_ended(self._world):
            return self._follow_world()
        if not self._owns_worlds and not isinstance(self._first_error(), NodeLost):
            return super()._plan_restart()
        first = self._first_failure()
        if first is None:
            return False
        healthy_s = first.time_s - self._begin_s
        delay_s = self.restarts.next_delay_s(first.rank, first.error, healthy_s, may_move=True)
        if delay_s is None:
            return False
        self._announce(first, delay_s)
        process = self.workers[first.rank].process
        assert isinstance(process, RemoteWorkerProcess)
        self._worlds.begin_next_world(self._world, process.node.index, time.monotonic() + delay_s)
        self._await_next_world()
        return True

    def _follow_world(self) -> bool:
        """The world has ended because a node came or went. If every rank had returned by then, nothing is lost."""
        if all(rank.has_result for rank in self._ranks):
            self.failures = [failure for failure in self.failures if not isinstance(failure.error, NodeLost)]
            if not self.failures:
                return False
        if not self.restarts.go_on():
            if not self.failures:
                self.fail(NodeLost(self._worlds.why_ended(self._world), "", -1), -1)
            return False
        self._await_next_world()
        return True

    def _await_next_world(self) -> None:
        self._over, self._awaits_world = self._world, True
        self.failures, self.stopped_s = [], None

    def _first_error(self) -> object:
        first = self._first_failure()
        return None if first is None else first.error

    def _on_workers_ended(self) -> None:
        self._worlds.watchers.discard(self.wake)
        super()._on_workers_ended()
