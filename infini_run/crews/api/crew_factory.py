"""What the arguments of a Crew ask for."""

from __future__ import annotations

from infini_run.crews.spawn.exec_spawner import ExecSpawner
from infini_run.crews.spawn.placement import goes_on_without_host
from infini_run.crews.supervision.crew_placement import CrewPlacement
from infini_run.crews.supervision.pending_task import WorkerDeadlines
from infini_run.errors import UsageError
from infini_run.number_arguments import read_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.crews.spawn.spawner import Spawner


def make_spawner(
    hosts: Sequence[str], preload: Sequence[str], count: int | str | tuple[int, ...] | None, given: dict[str, Any]
) -> Spawner:
    """Return the spawner of a crew: on these hosts (none: this machine), by fork with preloaded modules. given: the
    other arguments of a spawner. Raises UsageError."""
    if isinstance(preload, str):
        raise UsageError(f"preload={preload!r}: expected a list of modules; use [{preload!r}]")
    if hosts and goes_on_without_host(given):
        from infini_run.crews.spawn.failover_spawner import FailoverSpawner

        return FailoverSpawner(hosts, nproc=count, preload=preload, **given)
    if hosts:
        from infini_run.crews.spawn.remote_spawner import RemoteSpawner

        return RemoteSpawner(hosts, nproc=count, preload=preload, **given)
    assert isinstance(count, (int, str))
    if not preload:
        return ExecSpawner(nproc=count, **given)
    from infini_run.crews.spawn.fork_spawner import ForkSpawner

    return ForkSpawner(preload, nproc=count, **given)


def check_spawner_alone(given: Mapping[str, object]) -> None:
    """Raise UsageError if the caller gives one of these arguments, which make a spawner, beside a spawner."""
    found = [f"{name}=" for name, value in given.items() if value is not None]
    if found:
        raise UsageError(f"{', '.join(found)}: no effect with spawner=, which starts the workers; set them there")


def make_placement(spawner: Spawner, hosts: Sequence[str]) -> CrewPlacement:
    """Return the placement of a crew's workers. hosts: where they run; none: on this machine."""
    if hosts:
        from infini_run.crews.spawn.failover_spawner import FailoverSpawner

        if isinstance(spawner, FailoverSpawner):
            from infini_run.crews.supervision.failover_crew_placement import FailoverCrewPlacement

            return FailoverCrewPlacement(spawner)
    return CrewPlacement()


def make_limits(ready_timeout_s: float, watchdog_s: float, drain_s: float | None) -> WorkerDeadlines:
    """Return the limits of a crew. Raises UsageError: one is no number of seconds."""
    drain_s = float("inf") if drain_s is None else drain_s
    return WorkerDeadlines(
        ready_timeout_s=_finite("ready_timeout_s", ready_timeout_s),
        watchdog_s=_finite("watchdog_s", watchdog_s),
        drain_s=read_seconds("drain_s", drain_s),
    )


def _finite(name: str, value: float) -> float:
    seconds = read_seconds(name, value)
    if seconds == float("inf"):
        raise UsageError(f"{name}={value!r}: expected a number of seconds; 0: no limit")
    return seconds
