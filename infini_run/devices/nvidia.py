"""NVIDIA's GPUs: which there are, and which of them CUDA_VISIBLE_DEVICES shows.

The rule: the caller's own choice is law. An inherited list is read as CUDA reads it, and each rank gets some of its
entries, spelled as the caller spelled them. NVML is asked, never CUDA: counting makes no context. `list_cards` and
`find_holders` look, and who has NVML started does with `cards_of` and `processes_on`; all else here only decides.
"""

from __future__ import annotations

from infini_run.devices.gpu import Accelerator, GpuUser, NoGpus
from infini_run.errors import DeviceError
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T")

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE = ("", "-1")  # its two ways to say no GPU, which need no driver

# From R570 on (CUDA 12.8) a process is shown one compute instance of every GPU instance; before, one of the
# whole machine (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/, "CUDA Device Enumeration").
_MANY_MIG_CUDA_VERSION = 12080

_UNSHOWN_MIB = 256  # more than a driver keeps for itself on a GPU that nobody uses


@record
class Card:
    """One board as NVML lists it.

    Attributes:
        itself: the board.
        is_mig: whether it is in MIG mode.
        gpus: what of it can be used: the board, or its MIG instances.
    """

    itself: Accelerator
    is_mig: bool
    gpus: tuple[Accelerator, ...]  # named by their UUIDs; none: MIG mode without instances


def find_gpus(environ: Mapping[str, str], root: str = "") -> tuple[Accelerator, ...]:
    """Find the GPUs that a CUDA program started with `environ` could use, in its order.

    Args:
        environ: the environment with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        root: not used: NVML knows one machine.

    Raises:
        NoGpus, DeviceError: they cannot be counted (no driver, no permission, a broken driver, no pynvml).
    """
    if environ.get(VISIBLE) in _NONE:
        return ()
    return visible(list_cards(), environ)


def visible(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[Accelerator, ...]:
    """Return what CUDA would show of `cards`; but all MIG instances, where CUDA shows one process fewer.

    Args:
        cards: as `list_cards` returns them.
        environ: the environment with CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

    Source: CUDA Programming Guide, "CUDA Environment Variables": an entry that names nothing hides itself and all
    after it. That a GPU named twice hides all, that the first entry decides between indexes and UUIDs, and that an
    index ends at its first non-digit is the driver's behavior as torch.cuda knows it.
    """
    inherited = environ.get(VISIBLE)
    if inherited is None:
        # Indexes, which every program can read, wherever one means the same GPU to NVML and to CUDA:
        # not between unequal boards under FASTEST_FIRST, and MIG instances have none. Then UUIDs.
        if any(card.is_mig for card in cards) or not _is_order_known(cards, environ):
            return tuple(gpu for card in cards for gpu in card.gpus)
        return tuple(replace(card.itself, name=str(index)) for index, card in enumerate(cards))
    by_index = () if inherited.startswith(("GPU-", "MIG-")) else _by_index(cards, environ)
    found: dict[str, Accelerator] = {}
    for entry in inherited.split(","):
        gpu = _nth(by_index, entry) if by_index else _by_uuid(cards, entry)
        if gpu is None:
            break
        if (gpu.uuid or gpu.name) in found:
            return ()
        found[gpu.uuid or gpu.name] = gpu
    return tuple(found.values())


def _is_order_known(cards: tuple[Card, ...], environ: Mapping[str, str]) -> bool:
    """Return whether CUDA counts as NVML does. FASTEST_FIRST, its default, may sort boards that differ."""
    models = {(card.itself.product, card.itself.memory_mib) for card in cards}
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) <= 1


def _by_index(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[Accelerator | None, ...]:
    """Return what each index means to CUDA. A card in MIG mode is its first instance, or None if it has none."""
    if not _is_order_known(cards, environ):
        return tuple(Accelerator(name=str(index)) for index in range(sum(bool(card.gpus) for card in cards)))
    return tuple(replace(card.gpus[0], name=str(i)) if card.gpus else None for i, card in enumerate(cards))


def _nth(by_index: tuple[Accelerator | None, ...], entry: str) -> Accelerator | None:
    text = entry.lstrip(" \t\n\v\f\r")
    is_negative = text.startswith("-")
    text = text[1:] if text.startswith(("+", "-")) else text
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    if not digits or len(digits) > 9 or (is_negative and digits.strip("0")):
        return None
    index = int(digits)
    return by_index[index] if index < len(by_index) else None


def _by_uuid(cards: tuple[Card, ...], entry: str) -> Accelerator | None:
    """Whole names of MIG instances. A board also by its UUID, or by first digits that no other board
    has them. Hyphens, the case of digits and what follows a whole UUID are of no account; MIG- is as good as GPU- for
    a board that is not in MIG mode. Source: what driver 580 showed of an H100 and an H200, neither in MIG mode."""
    matches = tuple(gpu for card in cards for gpu in card.gpus if entry in (gpu.uuid, gpu.old_name))
    if not matches and entry.startswith(("GPU-", "MIG-")) and len(entry) > len("GPU-"):
        boards = [card for card in cards if entry.startswith("GPU-") or not card.is_mig]
        digits = _digits(entry)
        named = [card for card in boards if (own := _digits(card.itself.name)).startswith(digits[: len(own)])]
        matches = named[0].gpus if len(named) == 1 else ()
    return replace(matches[0], name=entry) if matches else None


def _digits(uuid: str) -> str:
    return uuid[len("GPU-") :].replace("-", "").lower()


def list_cards() -> tuple[Card, ...]:
    """Return every board that NVML lists and lets this process use.

    Raises:
        NoGpus, DeviceError: NVML could not be loaded, started or asked.
    """
    return _ask(cards_of)


def _ask(question: Callable[[Any], T]) -> T:
    """Return what NVML answers, and shut it down."""
    try:
        import pynvml
    except ImportError:
        raise NoGpus("counting GPUs needs pynvml; run pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise _refusal(pynvml, error) from error


def driver_version() -> str:
    """Return the version of the driver.

    Raises:
        NoGpus, DeviceError: NVML could not be loaded, started or asked.
    """
    return _ask(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def cards_of(nvml: Any) -> tuple[Card, ...]:
    """Return every board, as `list_cards` does, from NVML that is started already.

    Args:
        nvml: the module pynvml.

    Raises:
        NVMLError: NVML could not be asked.
    """
    count = nvml.nvmlDeviceGetCount()
    cards = tuple(card for index in range(count) if (card := _card(nvml, index)))
    if count and not cards:
        raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
    return cards


def _refusal(nvml: Any, error: Any) -> DeviceError:
    absent = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver here: libnvidia-ml.so.1 cannot be loaded",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver's library is here, but its kernel module is"
        " not loaded (or this container was started without GPUs)",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to use the GPUs of this machine: see the modes of"
        " /dev/nvidia*, and what the container or the batch system allows",
    }
    if error.value in absent:
        return NoGpus(absent[error.value])
    broken = {
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver's library and kernel module are of"
        " different versions, as after an update: reload the module or reboot",
        nvml.NVML_ERROR_GPU_IS_LOST: "a GPU of this machine has fallen off the bus: see nvidia-smi and dmesg",
    }
    what = f"the NVIDIA driver does not respond: {error} (NVML error {error.value})"
    return DeviceError(broken.get(error.value, what))


def _card(nvml: Any, index: int) -> Card | None:
    # NVML counts a board whose device file this user cannot open, but CUDA gives it no index.
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError_NoPermission:
        return None
    try:
        is_mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        is_mig = False
    itself = _gpu(nvml, handle, nvml.nvmlDeviceGetPciInfo(handle).busId)
    gpus = tuple(_instances(nvml, handle, itself)) if is_mig else (itself,)
    return Card(itself=itself, is_mig=is_mig, gpus=gpus)


def _instances(nvml: Any, handle: Any, card: Accelerator) -> Iterator[Accelerator]:
    has_one_per_process = nvml.nvmlSystemGetCudaDriverVersion() < _MANY_MIG_CUDA_VERSION
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            continue
        part = f"MIG-{card.uuid}/{nvml.nvmlDeviceGetGpuInstanceId(mig)}"
        old_name = f"{part}/{nvml.nvmlDeviceGetComputeInstanceId(mig)}"
        one_of = "MIG" if has_one_per_process else part
        yield _gpu(nvml, mig, card.bus_id, old_name=old_name, one_of=one_of)


def _gpu(nvml: Any, handle: Any, bus_id: str | None, **mig: Any) -> Accelerator:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    product = nvml.nvmlDeviceGetName(handle)
    try:
        memory_mib = nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
    except nvml.NVMLError_NotSupported:  # memory shared with the CPU, as on GB10
        memory_mib = None
    return Accelerator(name=uuid, uuid=uuid, product=product, memory_mib=memory_mib, bus_id=bus_id, **mig)


def find_holders(gpus: Sequence[Accelerator], root: str = "") -> tuple[GpuUser, ...]:
    """Find the processes that have memory on GPUs. A process of another container is not listed, but its memory is
    counted.

    Args:
        gpus: as `find_gpus` returns them.
        root: not used: NVML knows one machine.

    Raises:
        DeviceError: NVML cannot tell, or CUDA's order of the GPUs is not known.
    """
    unknown = [gpu.name for gpu in gpus if gpu.uuid is None]
    if unknown:
        raise DeviceError(
            f"--check_gpus: cannot tell which GPU index {unknown[0]} is, because CUDA may sort unequal boards; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs of GPUs"
        )
    return _ask(lambda nvml: tuple(holder for gpu in gpus for holder in _holders(nvml, gpu)))


def _holders(nvml: Any, gpu: Accelerator) -> Iterator[GpuUser]:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    processes = processes_on(nvml, handle)
    for process in processes:
        mib = None if process.usedGpuMemory is None else process.usedGpuMemory >> 20
        yield GpuUser(gpu=gpu, pid=process.pid, mib=mib)
    try:  # from R510 on, which counts the driver's own part separately
        used = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used >> 20
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return
    if not processes and used >= _UNSHOWN_MIB:
        yield GpuUser(gpu=gpu, pid=None, mib=used)


def processes_on(nvml: Any, handle: Any) -> Any:
    """Return the processes on a GPU as NVML has them: `pid`, and `usedGpuMemory` in bytes or None.

    Args:
        nvml: the module pynvml, with NVML started.
        handle: of the GPU.

    Raises:
        NVMLError: NVML could not be asked.
    """
    try:  # by their versions: without one, pynvml raises another error for an old driver
        return nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError_FunctionNotFound:  # before R510; the same structure
        return nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
