"""Huawei's Ascend NPUs: which there are, and which of them ASCEND_RT_VISIBLE_DEVICES shows.

A process counts the devices that it is given from 0, also where a container has davinci4 and davinci5 alone: an id is
a place in the sorted list of /dev/davinci<N>. The list is read as CANN's reference says of ASCEND_RT_VISIBLE_DEVICES:
ids and commas, in rising order; whatever else is in it ends it. Without CANN, the NUMA node of an NPU is unknown.
"""

from __future__ import annotations

import os

from infini_run.devices.gpu import Accelerator, GpuUser, NoGpus
from infini_run.errors import DeviceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_DEVICE = "davinci"


def find_gpus(environ: Mapping[str, str], root: str = "") -> tuple[Accelerator, ...]:
    """Find the NPUs that a program started with `environ` could use, in its order.

    Args:
        environ: the environment with ASCEND_RT_VISIBLE_DEVICES.
        root: is put before /dev.

    Raises:
        NoGpus: there is none.
    """
    try:
        names = os.listdir(f"{root}/dev")
    except OSError:
        names = []
    count = sum(name.startswith(_DEVICE) and name[len(_DEVICE) :].isdecimal() for name in names)
    if count == 0:
        raise NoGpus("no Ascend NPU: missing /dev/davinci0")
    listed = environ.get(VISIBLE)
    return tuple(
        Accelerator(name=str(index)) for index in (range(count) if listed is None else _listed(listed, count))
    )


def _listed(listed: str, count: int) -> list[int]:
    found: list[int] = []
    for entry in listed.split(","):
        is_id = entry.isascii() and entry.isdecimal() and len(entry) < 10 and int(entry) < count
        if not is_id or int(entry) in found:
            break
        found.append(int(entry))
    return found


def find_holders(gpus: Sequence[Accelerator], root: str = "") -> tuple[GpuUser, ...]:
    """Raise DeviceError: only CANN's own tools (npu-smi) can tell which processes use an NPU."""
    raise DeviceError("--check_gpus: cannot tell who holds Ascend NPUs; drop the flag, and run npu-smi info")
