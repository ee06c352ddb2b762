"""--check_gpus: who already has memory on the GPUs that the ranks get, told before anything starts."""

from __future__ import annotations

import os

from infini_run.devices.visible import module_of
from infini_run.errors import DeviceError, printable
from infini_run.system.cgroup import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.devices.gpu import Accelerator, GpuUser
    from infini_run.devices.visible import VisibleGpus

_REPORTED = 8  # holders; more are counted


def check_gpus(found: VisibleGpus, gpus: Sequence[Accelerator], mode: str, root: str = "") -> str:
    """Check whether processes already use the GPUs of the ranks.

    Args:
        found: the visible GPUs.
        gpus: those that the ranks get.
        mode: warn or refuse.
        root: is put before /sys and /proc.

    Returns:
        A sentence that names the processes; empty if there are none.

    Raises:
        DeviceError: a process uses them and `mode` is refuse; or the driver cannot tell.
    """
    holders: Sequence[GpuUser] = module_of(found.vendor).find_holders(gpus, root)
    if not holders:
        return ""
    text = describe_holders(holders, root)
    if mode == "refuse":
        raise DeviceError(
            f"{text}; end these processes, set {found.variable} to other GPUs, or use --check_gpus=warn"
        )
    return f"{text}; ranks may run out of memory there"


def describe_holders(holders: Sequence[GpuUser], root: str = "") -> str:
    """Return a sentence that names the processes which use GPUs of the job; root as for `check_gpus`."""
    users = "; ".join(f"GPU {holder.gpu.name}: {_describe(holder, root)}" for holder in holders[:_REPORTED])
    more = f"; and {len(holders) - _REPORTED} more" if len(holders) > _REPORTED else ""
    return f"GPUs of this job are already in use: {users}{more}"


def _describe(holder: GpuUser, root: str) -> str:
    size = "memory" if holder.mib is None else f"{holder.mib} MiB"
    if holder.pid is None:
        return f"{size}, of a process that is hidden here, as in another container"
    name = read_text(f"{root}/proc/{holder.pid}/comm").strip()
    who = printable(name) or "a process of another container"
    return f"{who} (pid {holder.pid}, {_user(holder.pid, root)}) has {size}"


def _user(pid: int, root: str) -> str:
    try:
        uid = os.stat(f"{root}/proc/{pid}").st_uid
    except OSError:  # another PID namespace, or gone since
        return "user not known"
    from pwd import getpwuid

    try:
        return getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
