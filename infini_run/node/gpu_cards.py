"""The GPUs of a node for a table, read again and again as long as somebody looks at it."""

from __future__ import annotations

from infini_run.display.resource_usage import GpuUsage
from infini_run.watchdog.gpu_reading import GpuReading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from infini_run.core.c_structs import ProcessState
    from infini_run.core.group import Group
    from infini_run.plan.model import Plan

    class LaunchWithGpus(Protocol):
        """A NodeLaunch, as far as its GPUs are read."""

        plan: Plan
        environ: Mapping[str, str]
        entry: ProcessState | None

        @property
        def group(self) -> Group: ...
        @property
        def ended(self) -> bool: ...


_PAUSE_S = 5.0  # between two readings, each of which starts a process


class GpuCards:
    """The GPUs as another process has read them last (GpuReading). The launcher never waits for it.

    Args:
        launch: The launch, which has a group.
    """

    def __init__(self, launch: LaunchWithGpus) -> None:
        self._launch = launch
        self._cards: list[GpuUsage] = []
        self._reading: GpuReading | None = None
        self._due_s = 0.0  # when the next one may begin

    def read(self, now_s: float) -> Sequence[GpuUsage]:
        """Return what is known so far, and begin to read it anew, unless that was a moment ago. Never blocks.

        Args:
            now_s: CLOCK_MONOTONIC in seconds.
        """
        if self._reading is not None:
            self._use(self._reading)
        launch = self._launch
        if self._reading is None and now_s >= self._due_s and not launch.ended:
            self._due_s = now_s + _PAUSE_S
            is_sure = any(worker.uuids for worker in launch.plan.workers)
            self._reading = GpuReading(launch.group, launch.entry, launch.environ, is_sure=is_sure)
        return self._cards

    def _use(self, reading: GpuReading) -> None:
        reading.poll()
        if reading.fds():
            return
        self._reading = None
        self._cards = [GpuUsage(uuid=gpu.uuid, use=gpu.use, memory=gpu.memory, held=gpu.held) for gpu in reading.gpus]

    def close(self) -> None:
        """Kill and reap the reader. Safe twice."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()
