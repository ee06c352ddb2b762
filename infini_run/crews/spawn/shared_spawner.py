"""A spawner of several launches: closed once its owner and all of them have let go of it."""

from __future__ import annotations

from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.crews.spawn.spawner import Spawner


class SharedSpawner:
    """A spawner and those that hold it. spawner: to start workers with, during a hold."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self._lock = RLock()  # not a Lock: the garbage collector may let go of it in a thread that has it
        self._holders: set[SpawnerHold] = set()
        self._is_closed = False

    def hold(self) -> SpawnerHold | None:
        """Return a new hold on it; None after its close."""
        with self._lock:
            if self._is_closed:
                return None
            hold = SpawnerHold(self)
            self._holders.add(hold)
            return hold

    def let_go(self, hold: SpawnerHold) -> None:
        """Drop one hold. Safe twice for the same one."""
        with self._lock:
            self._holders.discard(hold)
            if self._holders or self._is_closed:
                return
            self._is_closed = True
        self.spawner.close()


class SpawnerHold:
    """One of the reasons for which a spawner is open."""

    def __init__(self, shared: SharedSpawner) -> None:
        self._shared = shared
        self.spawner = shared.spawner

    def release(self) -> None:
        """Drop this hold. Safe twice."""
        self._shared.let_go(self)

    def another(self) -> SpawnerHold | None:
        """Return one more hold on the same spawner; None after its close."""
        return self._shared.hold()
