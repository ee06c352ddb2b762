"""The placement of a launch of a function that continues after the loss of a node: each attempt is in a world.

The head decides which nodes a world has and when it may begin (multinode/head/membership_transitions.py); the spawner
reports when one is up. The number of ranks may be another one in each world.
"""

from __future__ import annotations

from infini_run.crews.spawn.remote_process import RemoteWorkerProcess
from infini_run.crews.supervision.launch_placement import LaunchPlacement
from infini_run.errors import NodeLost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from infini_run.crews.spawn.remote_node import World
    from infini_run.crews.spawn.remote_spawner import RemoteSpawner
    from infini_run.crews.spawn.spawner import WorkerProcess


class FailoverLaunchPlacement(LaunchPlacement):
    """The worlds of a spawner.

    Args:
        spawner: its worlds are those of the launch.
        owns_worlds: no other launch uses the spawner. Each attempt is then a world, which begins with checks of
            nodes, and may exclude a node whose ranks fail. Otherwise only a node that comes or goes ends a world.
    """

    may_move = True

    def __init__(self, spawner: RemoteSpawner, *, owns_worlds: bool) -> None:
        self._spawner = spawner
        self._owns_worlds = owns_worlds
        self._next: World | None = None
        self._number = -1  # of the world in which ranks run, or ran last
        self._over = -1  # this launch is done with this world and those before it

    def add_watcher(self, wake: Callable[[], None]) -> None:
        self._spawner.watchers.add(wake)

    def remove_watcher(self, wake: Callable[[], None]) -> None:
        self._spawner.watchers.discard(wake)

    def find_size(self, before: int) -> int | None:
        self._next = self._spawner.world_after(self._over)
        return None if self._next is None else self._next.size

    def begin(self, process: WorkerProcess) -> None:
        assert isinstance(process, RemoteWorkerProcess)
        self._number = process.node.world

    def is_superseded(self) -> bool:
        assert self._next is not None
        if self._spawner.world_after(self._next.number - 1) is self._next:
            return False
        self._over = self._next.number
        return True

    def why_ended(self) -> str:
        return self._spawner.why_ended(self._number)

    def moves_after(self, error: object) -> bool:
        return self._owns_worlds or isinstance(error, NodeLost)

    def request_next(self, process: WorkerProcess | None, due_s: float) -> None:
        assert isinstance(process, RemoteWorkerProcess)
        self._spawner.begin_next_world(self._number, process.node.index, due_s)

    def leave(self) -> None:
        self._over = self._number
