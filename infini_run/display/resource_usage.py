"""The use of ranks at present: CPU and memory from /proc, GPUs from NVML. It reads them on request, and at no other
time."""

from __future__ import annotations

from infini_run.devices.nvidia import cards_of, processes_on
from infini_run.record import record
from infini_run.system.procfs import ProcessTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.plan.model import Worker

    class GpuReader(Protocol):
        """NvmlMeter, or GpuCards of a launcher."""

        def read(self, now_s: float) -> Sequence[GpuUsage]: ...
        def close(self) -> None: ...


@record
class Usage:
    """What one rank uses, its descendants included. None: not known.

    Attributes:
        cpu: CPU time per time since the last sample: 2.0 is two CPUs. None too in the first 0.2 s, which no clock
            of the kernel's is fine enough for.
        memory, gpu_memory: Bytes.
        gpu: How busy its GPUs are, from 0 to 1.
        is_suspended: Its process stopped (SIGSTOP, Ctrl-Z).
    """

    cpu: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    gpu: float | None = None
    is_suspended: bool = False


@record
class GpuUsage:
    """A GPU or MIG instance at one moment.

    Attributes:
        uuid: Its UUID.
        use: How busy it is, from 0 to 1. None: not known.
        memory: Bytes in use.
        held: Bytes of each process, by pid.
    """

    uuid: str
    use: float | None
    memory: int
    held: Mapping[int, int]  # bytes by pid, as far as NVML knows the pids of this namespace


# The kernel counts CPU time in ticks of 10 ms (proc(5)), so a shorter time gives nonsense: one in 1 ms is 1000 %.
_SHORTEST_S = 0.2


class Sampler:
    """Measures CPU, memory and GPUs of live ranks. It keeps the last values, because CPU use is a difference of
    two.

    Args:
        gpus: What reads the GPUs; this closes it. None: NVML, asked here. It may take seconds to start, and waits
            without end for a GPU that hangs.
    """

    def __init__(self, gpus: GpuReader | None = None) -> None:
        self._before: dict[int, tuple[float, float]] = {}  # by pid: when, CPU seconds
        self._gpus: GpuReader | None = gpus
        self._opened = gpus is not None

    def sample(self, ranks: Mapping[int, tuple[Worker, float]], now_s: float) -> dict[int, Usage]:
        """Return what ranks use, by pid.

        Args:
            ranks: For the pid of each rank its worker, and when it started (by the clock of `now_s`).
            now_s: CLOCK_MONOTONIC in seconds.
        """
        if not self._opened:
            self._opened, self._gpus = True, open_meter()
        table = ProcessTable()
        cards = () if self._gpus is None else self._gpus.read(now_s)
        found = {}
        for pid, (worker, start_s) in ranks.items():
            pids = {process.pid for process in table.tree(pid)} if cards else set()
            found[pid] = Usage(
                cpu=self._cpu(pid, table.cpu_s(pid), start_s, now_s),
                memory=table.memory(pid),
                is_suspended=table.state(pid) in ("T", "t"),
                **gpu_share(cards, worker.uuids, pids),
            )
        self._before = {pid: self._before[pid] for pid in ranks if pid in self._before}
        return found

    def _cpu(self, pid: int, cpu_s: float | None, start_s: float, now_s: float) -> float | None:
        if cpu_s is None:
            return None
        then_s, before_s = self._before.get(pid, (start_s, 0.0))
        if now_s - then_s < _SHORTEST_S:
            return None
        self._before[pid] = (now_s, cpu_s)
        return max(0.0, cpu_s - before_s) / (now_s - then_s)

    def close(self) -> None:
        """Close what reads the GPUs. Safe twice."""
        gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.close()


def gpu_share(cards: Sequence[GpuUsage], uuids: Sequence[str], pids: set[int]) -> dict[str, Any]:
    """Return the fields of a Usage that are about GPUs.

    The GPUs of a rank are those given to it alone, else those on which its processes hold memory. NVML may name none
    of them (a container, an unprivileged user). Then the memory is all that is in use on the GPUs given to the rank.

    Args:
        cards: All GPUs.
        uuids: The GPUs of the rank.
        pids: The processes of the rank.
    """
    given = [card for card in cards if card.uuid in uuids]
    held = [card for card in cards if pids & card.held.keys()]
    ours = given or held
    if not ours:
        return {}
    memory = sum(size for card in held for pid, size in card.held.items() if pid in pids)
    uses = [card.use for card in ours if card.use is not None]
    return {
        "gpu_memory": memory if held else sum(card.memory for card in ours),
        "gpu": sum(uses) / len(uses) if uses else None,
    }


class NvmlMeter:
    """NVML, started. It leaves out facts that it does not know; a permanent error ends it.

    Args:
        nvml: The module pynvml.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        uuids = [gpu.uuid for card in cards_of(nvml) for gpu in card.gpus]
        self._handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids if uuid is not None}

    def read(self, now_s: float = 0.0) -> list[GpuUsage]:
        """Return the state of every GPU, whatever the time."""
        return [self._card(uuid, handle) for uuid, handle in self._handles.items()]

    def _card(self, uuid: str, handle: Any) -> GpuUsage:
        nvml = self._nvml
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        running = self._ask(lambda of: processes_on(nvml, of), handle) or []
        return GpuUsage(
            uuid=uuid,
            use=None if use is None else use.gpu / 100,
            memory=0 if memory is None else memory.used,
            held={process.pid: process.usedGpuMemory or 0 for process in running},
        )

    def _ask(self, question: Any, handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Shut NVML down."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


def open_meter() -> NvmlMeter | None:
    """Return the meter; None: there is no GPU to look at."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return NvmlMeter(pynvml)
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        return None
