"""AMD's GPUs: which there are, and which of them ROCm's variables show. Nothing of ROCm is loaded: /sys and /dev.

The rules of the variables are those of ROCR-Runtime (amd_filter_device.cpp) and CLR (rocdevice.cpp), and of
https://rocm.docs.amd.com ("GPU isolation techniques"): ROCR_VISIBLE_DEVICES takes some of the machine's GPUs, by
index or UUID; HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is not set or empty, takes some of those again.
The GPUs are KFD's nodes, as ROCR-Runtime's libhsakmt (topology.c) counts them: those whose render node opens.
"""

from __future__ import annotations

import os

from infini_run.devices.gpu import Accelerator, GpuUser, NoGpus
from infini_run.record import replace
from infini_run.system.cgroup import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KFD = "/sys/class/kfd/kfd"


def find_gpus(environ: Mapping[str, str], root: str = "") -> tuple[Accelerator, ...]:
    """Find the GPUs that a HIP program started with `environ` could use, in its order.

    Args:
        environ: the environment with the variables of ROCm.
        root: is put before /sys and /dev.

    Raises:
        NoGpus: there is none, or this process may not use them.
    """
    return visible(list_gpus(root), environ)


def visible(gpus: Sequence[Accelerator], environ: Mapping[str, str]) -> tuple[Accelerator, ...]:
    """Return what the variables of ROCm leave of all GPUs, each named as the topmost variable names it.

    Args:
        gpus: all of the machine.
        environ: the environment with ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES.
    """
    listed = environ.get("ROCR_VISIBLE_DEVICES")
    hip = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        gpus = tuple(_by_rocr(gpus, listed))
    elif hip and len({gpu.product for gpu in gpus}) > 1:
        # ROCr may count unequal GPUs in another order, so an index is passed on without a guess
        gpus = tuple(Accelerator(name=gpu.name, uuid=gpu.uuid if "GPU-" in hip else None) for gpu in gpus)
    return tuple(_by_hip(gpus, hip)) if hip else tuple(gpus)


def _by_rocr(gpus: Sequence[Accelerator], listed: str) -> Iterator[Accelerator]:
    """Up to the first entry that is none, is there twice, or could be two GPUs."""
    seen = set()
    for entry in listed.split(","):
        word = entry.strip().upper()
        if word.startswith("G"):
            found = [i for i, gpu in enumerate(gpus) if len(word) > 4 and (gpu.uuid or "").upper().startswith(word)]
        else:
            found = [i for i in (_c_number(word),) if i is not None and 0 <= i < len(gpus)]
        if len(found) != 1 or found[0] in seen:
            return
        seen.add(found[0])
        yield replace(gpus[found[0]], name=entry.strip())


def _c_number(word: str) -> int | None:
    """strtol(3) with base 0, of the whole word: 10, 0xA, 012."""
    try:
        return int(word, 0 if word[:1] != "0" or word[1:2] in ("X", "x") else 8)
    except ValueError:
        return None


def _by_hip(gpus: Sequence[Accelerator], listed: str) -> Iterator[Accelerator]:
    """Up to the first entry that is none; one that is there twice counts once."""
    seen = set()
    for entry in listed.split(","):
        index = next((i for i, gpu in enumerate(gpus) if entry in (str(i), gpu.uuid)), None)
        if index is None:
            return
        if index not in seen:
            seen.add(index)
            yield replace(gpus[index], name=entry)


def list_gpus(root: str = "") -> tuple[Accelerator, ...]:
    """Return every GPU that KFD lists and lets this process use, in KFD's order.

    Args:
        root: is put before /sys and /dev.

    Raises:
        NoGpus: there is none.
    """
    if not os.path.exists(f"{root}/dev/kfd"):
        raise NoGpus("no AMD GPU: missing /dev/kfd")
    if not os.access(f"{root}/dev/kfd", os.R_OK | os.W_OK):
        raise NoGpus("AMD's /dev/kfd cannot be opened; join its group (render)")
    nodes = f"{root}{_KFD}/topology/nodes"
    try:
        numbers = sorted(int(name) for name in os.listdir(nodes) if name.isdecimal())
    except OSError:
        numbers = []
    found = [gpu for number in numbers if (gpu := _gpu(f"{nodes}/{number}", root))]
    if not found:
        raise NoGpus("no usable AMD GPU: KFD lists none whose /dev/dri/renderD* this user may open")
    return tuple(replace(gpu, name=str(index)) for index, gpu in enumerate(found))


def _gpu(folder: str, root: str) -> Accelerator | None:
    """Return a GPU, or None for a CPU or for a GPU whose properties or render node the container closes."""
    kfd_id = read_text(f"{folder}/gpu_id").strip()
    properties = dict(line.split(" ", 1) for line in read_text(f"{folder}/properties").splitlines() if " " in line)
    values = {name: int(text) for name, text in properties.items() if text.strip().isdecimal()}
    render = f"{root}/dev/dri/renderD{values.get('drm_render_minor', 0)}"
    if kfd_id in ("", "0") or not kfd_id.isdecimal() or not os.access(render, os.R_OK | os.W_OK):
        return None
    unique = values.get("unique_id", 0)
    return Accelerator(
        name="",
        uuid=f"GPU-{unique:016x}" if unique else None,
        product=_architecture(values.get("gfx_target_version", 0)),
        bus_id=_bus_id(values.get("domain", 0), values.get("location_id", 0)),
        kfd_id=int(kfd_id),
    )


def _architecture(version: int) -> str | None:
    """90010 is gfx90a: two digits each for minor and step, which are written in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else None


def _bus_id(domain: int, location: int) -> str:
    """Bus, device and function as pci_dev_id() packs them; the bits above number the partitions of one board."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def find_holders(gpus: Sequence[Accelerator], root: str = "") -> tuple[GpuUser, ...]:
    """Find the processes, of all users, that have memory on GPUs.

    Args:
        gpus: as `find_gpus` returns them.
        root: is put before /sys.
    """
    holders = []
    try:
        pids = sorted(int(name) for name in os.listdir(f"{root}{_KFD}/proc") if name.isdecimal())
    except OSError:
        pids = []
    for gpu in gpus:
        for pid in pids:
            text = read_text(f"{root}{_KFD}/proc/{pid}/vram_{gpu.kfd_id}").strip()
            if text.isdecimal() and int(text):
                holders.append(GpuUser(gpu=gpu, pid=pid, mib=int(text) >> 20))
    return tuple(holders)
