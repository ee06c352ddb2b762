"""What is known of one accelerator that a rank can be given, whoever made it."""

from __future__ import annotations

from infini_run.errors import DeviceError
from infini_run.record import record


class NoGpus(DeviceError):
    """A machine without usable GPUs where nothing is broken: `auto` then counts CPUs."""


@record
class Accelerator:
    """One GPU, MIG instance, partition or NPU. None: not known, or the driver does not tell."""

    name: str  # what stands for it in the variable that shows it
    uuid: str | None = None
    product: str | None = None
    memory_mib: int | None = None
    bus_id: str | None = None  # of the board: 00000000:3B:00.0 as NVML writes it, 0000:3b:00.0 as /sys does
    old_name: str | None = None  # of a MIG instance, for drivers before R470: MIG-GPU-<uuid>/<gi>/<ci>
    one_of: str | None = None  # CUDA shows a process only one of the GPUs in which this is the same
    kfd_id: int | None = None  # AMD's number for it, in /sys/class/kfd


@record
class GpuUser:
    """A process that has memory on a GPU.

    Attributes:
        gpu: the GPU.
        pid: the process; None: this process may not see it.
        mib: its memory in MiB; None: the driver does not tell.
    """

    gpu: Accelerator
    pid: int | None
    mib: int | None
