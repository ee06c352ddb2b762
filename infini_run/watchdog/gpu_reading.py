"""How busy the GPUs of ranks are, when one hangs or somebody asks, from a process that reads it
(display/gpu_lines.py).

NVML may wait without end for a GPU that hangs, and such a wait cannot be killed. So the launcher does not ask it.
"""

from __future__ import annotations

import os

from infini_run.errors import StartError, UsageError
from infini_run.record import record
from infini_run.system.interpreter import own_python
from infini_run.watchdog.pyspy import GuestRun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from infini_run.core.c_structs import ProcessState
    from infini_run.core.group import Group

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # the second one is that of WSL
_MOST = 16384  # bytes of its lines


@record
class ReadGpu:
    """A GPU or MIG instance, as a reader saw it.

    Attributes:
        uuid: Its UUID.
        use: How busy it is, from 0 to 1. None: not known, as of a MIG instance.
        memory: Bytes in use.
        held: Bytes of each process, by pid.
    """

    uuid: str
    use: float | None
    memory: int
    held: dict[int, int]


class GpuReading:
    """One reading of all GPUs of this node, or none: a reader that fails, or takes too long, has read nothing.

    Args:
        ranks: The group of the ranks, which must not end the reader as a leftover process.
        entry: The entry of that group. None: a host program's.
        environ: The environment of the reader.
        is_sure: A rank was given GPUs. Otherwise there is a reading only where NVIDIA's driver is.

    Attributes:
        gpus: What was read so far.
    """

    def __init__(
        self, ranks: Group, entry: ProcessState | None, environ: Mapping[str, str], *, is_sure: bool
    ) -> None:
        self._ranks = ranks
        self._entry = entry
        self._run: GuestRun | None = None
        self.gpus: list[ReadGpu] = []
        if not is_sure and not any(map(os.path.exists, _DRIVERS)):
            return
        try:
            words = own_python("infini_run.display.gpu_lines.main")
            self._run = GuestRun("reader of GPUs", words, entry, environ)
        except (StartError, UsageError):
            return
        if entry is not None and self._run.pid:
            ranks.spare(self._run.pid)

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `poll` has something to do."""
        return [] if self._run is None else [self._run.group.fileno()]

    def poll(self) -> None:
        """Read what there is. Never blocks."""
        if self._run is not None and self._run.poll():
            self.gpus = _gpus(self._run.text(_MOST))
            self.close()

    def use(self, uuids: Sequence[str], pids: Collection[int]) -> float | None:
        """Return how busy the GPUs of a rank are, from 0 to 1. None: it has none, or nothing was read.

        Args:
            uuids: The GPUs that it was given. Others count if they hold memory of its processes.
            pids: Its processes.
        """
        known = [(gpu, gpu.use) for gpu in self.gpus if gpu.use is not None]
        given = [use for gpu, use in known if gpu.uuid in uuids]
        found = given or [use for gpu, use in known if not gpu.held.keys().isdisjoint(pids)]
        return sum(found) / len(found) if found else None

    def close(self) -> None:
        """Kill and reap the reader. Safe twice."""
        run, self._run = self._run, None
        if run is not None:
            run.close()
            if self._entry is not None and run.pid:
                self._ranks.spare(run.pid, False)


def _gpus(text: str) -> list[ReadGpu]:
    """Return the GPUs in a reader's lines, without lines that are none."""
    return [gpu for line in text.splitlines() if (gpu := _gpu(*line.split())) is not None]


def _gpu(uuid: str = "", use: str = "", memory: str = "", *held: str) -> ReadGpu | None:
    try:
        sizes = {int(pid): int(size) for pid, _, size in (each.partition("=") for each in held)}
        share = None if use == "-" else min(int(use), 100) / 100
        return ReadGpu(uuid=uuid, use=share, memory=int(memory), held=sizes)
    except ValueError:
        return None
