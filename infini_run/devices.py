"""What this machine gives the ranks: which GPUs under which names, and how many ranks that makes.

The rule: the caller's own choice is law. An inherited CUDA_VISIBLE_DEVICES is read as CUDA reads it,
and each rank gets some of its entries, spelled as the caller spelled them. NVML is asked, never CUDA:
counting makes no context. `survey` looks; everything else here only decides.
"""

from __future__ import annotations

from infini_run.cgroup import count_cpus
from infini_run.errors import DeviceError
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE = ("", "-1")  # its two ways to say no GPU, which need no driver

# From R570 on (CUDA 12.8) a process is shown one compute instance of every GPU instance; before, one of the
# whole machine (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/, "CUDA Device Enumeration").
_MANY_MIG_CUDA_VERSION = 12080


class _NoGpus(DeviceError):
    """There is no GPU for us here, and nothing is broken: what `auto` takes to mean CPUs."""


@record
class Gpu:
    """One GPU or MIG instance that a rank can be given. None: not known, or not told by the driver."""

    name: str  # what stands for it in CUDA_VISIBLE_DEVICES
    uuid: str | None = None
    product: str | None = None
    memory_mib: int | None = None
    bus_id: str | None = None  # of the board, as NVML writes it: 00000000:3B:00.0
    old_name: str | None = None  # of a MIG instance, for drivers before R470: MIG-GPU-<uuid>/<gi>/<ci>
    one_of: str | None = None  # CUDA shows a process only one of the GPUs in which this is the same


@record
class Card:
    """One board as NVML lists it, by PCI bus id, and what of it can be used: itself or its MIG instances."""

    itself: Gpu
    is_mig: bool
    gpus: tuple[Gpu, ...]  # named by their UUIDs; none: MIG mode without instances


def resolve_nproc(kind: str, environ: Mapping[str, str], gpus_per_proc: int) -> int:
    """How many ranks `--nproc_per_node=KIND` means here.

    kind: `gpu`: one for every `gpus_per_proc` visible GPUs (0: for each one). `cpu`: one for each CPU we may
    use. `auto`: as `gpu` where there are GPUs for us, else as `cpu`; but a broken driver, or a list that
    names no GPU, is an error even so: a CPU job on a GPU machine is not what was meant.

    Raises DeviceError: no GPU, too few for one rank, or they cannot be counted.
    """
    if kind == "cpu":
        return count_cpus()
    try:
        gpus = find_gpus(environ)
        if not gpus:
            raise _nothing_visible(environ.get(VISIBLE))
    except _NoGpus:
        if kind == "auto" and gpus_per_proc == 0:
            return count_cpus()
        raise
    if gpus_per_proc == 0:
        _check_shown_together(gpus)
    elif gpus_per_proc > len(gpus):
        raise DeviceError(_too_few(gpus, 1, gpus_per_proc, environ.get(VISIBLE)))
    return len(gpus) // max(gpus_per_proc, 1)


def assign(
    gpus: tuple[Gpu, ...], nproc: int, gpus_per_proc: int, inherited: str | None = None
) -> tuple[tuple[str, ...], ...]:
    """The names of each local rank's GPUs, in order, every GPU at most once.

    gpus: what `find_gpus` found. inherited: the CUDA_VISIBLE_DEVICES that it read, for the error's text.

    Raises DeviceError: there are too few, or CUDA would not show a process all that it is given.
    """
    if nproc * gpus_per_proc > len(gpus):
        raise DeviceError(_too_few(gpus, nproc, gpus_per_proc, inherited))
    shares = [gpus[rank * gpus_per_proc : (rank + 1) * gpus_per_proc] for rank in range(nproc)]
    for share in shares:
        _check_shown_together(share)
    return tuple(tuple(gpu.name for gpu in share) for share in shares)


def find_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a CUDA program started with `environ` could use, in its order.

    Raises DeviceError: they cannot be counted (no driver, no permission, a broken driver, no pynvml).
    """
    if environ.get(VISIBLE) in _NONE:
        return ()
    return visible(survey(), environ)


def visible(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """What CUDA would show of `cards`, but all MIG instances rather than those for one process.

    Source: CUDA Programming Guide, "CUDA Environment Variables": an entry that names nothing hides itself
    and all after it. That a GPU named twice hides all, that the first entry decides between indexes and
    UUIDs, and that an index ends at its first non-digit is the driver's behaviour as torch.cuda knows it.
    """
    inherited = environ.get(VISIBLE)
    if inherited is None:
        # Indexes, which every program can read, wherever one means the same GPU to NVML and to CUDA:
        # not between unequal boards under FASTEST_FIRST, and MIG instances have none. Then UUIDs.
        if any(card.is_mig for card in cards) or not _is_order_known(cards, environ):
            return tuple(gpu for card in cards for gpu in card.gpus)
        return tuple(replace(card.itself, name=str(index)) for index, card in enumerate(cards))
    by_index = () if inherited.startswith(("GPU-", "MIG-")) else _by_index(cards, environ)
    found: dict[str, Gpu] = {}
    for entry in inherited.split(","):
        gpu = _nth(by_index, entry) if by_index else _by_uuid(cards, entry)
        if gpu is None:
            break
        if (gpu.uuid or gpu.name) in found:
            return ()
        found[gpu.uuid or gpu.name] = gpu
    return tuple(found.values())


def _is_order_known(cards: tuple[Card, ...], environ: Mapping[str, str]) -> bool:
    """Whether CUDA counts as NVML does: FASTEST_FIRST, its default, may sort boards that differ."""
    models = {(card.itself.product, card.itself.memory_mib) for card in cards}
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) <= 1


def _by_index(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[Gpu | None, ...]:
    """What each index means to CUDA: of a card in MIG mode its first instance, None where it has none."""
    if not _is_order_known(cards, environ):
        return tuple(Gpu(name=str(index)) for index in range(sum(bool(card.gpus) for card in cards)))
    return tuple(replace(card.gpus[0], name=str(i)) if card.gpus else None for i, card in enumerate(cards))


def _nth(by_index: tuple[Gpu | None, ...], entry: str) -> Gpu | None:
    text = entry.lstrip(" \t\n\v\f\r")
    is_negative = text.startswith("-")
    text = text[1:] if text.startswith(("+", "-")) else text
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    if not digits or len(digits) > 9 or (is_negative and digits.strip("0")):
        return None
    index = int(digits)
    return by_index[index] if index < len(by_index) else None


def _by_uuid(cards: tuple[Card, ...], entry: str) -> Gpu | None:
    """Whole names of MIG instances; of GPUs also as many first characters as no other GPU has."""
    if entry.startswith("MIG-"):
        matches = tuple(gpu for card in cards for gpu in card.gpus if entry in (gpu.uuid, gpu.old_name))
    else:
        named = [card for card in cards if entry.startswith("GPU-") and card.itself.name.startswith(entry)]
        matches = named[0].gpus if len(named) == 1 else ()
    return replace(matches[0], name=entry) if matches else None


def _check_shown_together(gpus: tuple[Gpu, ...]) -> None:
    shown = len({gpu.one_of or gpu.name for gpu in gpus})
    if shown < len(gpus):
        what = f"CUDA shows a process only {shown} of these {len(gpus)} MIG instances"
        raise DeviceError(f"{what}: --gpus_per_proc=1 gives each rank one of its own")


def _too_few(gpus: tuple[Gpu, ...], nproc: int, gpus_per_proc: int, inherited: str | None) -> str:
    setting = "not set" if inherited is None else repr(inherited)
    needed = f"{nproc} rank(s) with --gpus_per_proc={gpus_per_proc} need {nproc * gpus_per_proc} GPU(s)"
    return f"{needed}, and {len(gpus)} can be used here ({VISIBLE} is {setting})"


def _nothing_visible(inherited: str | None) -> DeviceError:
    if inherited is None:
        return _NoGpus("no GPU can be used here: the NVIDIA driver lists none, or MIG mode without instances")
    what = f"no GPU can be used here: {VISIBLE} is {inherited!r}"
    if inherited in _NONE:
        return _NoGpus(what)
    return DeviceError(f"{what} (an entry that names no GPU hides all from there on; one named twice, all)")


def survey() -> tuple[Card, ...]:
    """Every board that NVML lists and lets us use; NVML is shut down again.

    Raises DeviceError: NVML could not be loaded, started or asked.
    """
    try:
        import pynvml
    except ImportError:
        raise _NoGpus("GPUs are counted with pynvml, which is missing: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        try:
            count = pynvml.nvmlDeviceGetCount()
            cards = [card for index in range(count) if (card := _card(pynvml, index))]
            if count and not cards:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise _refusal(pynvml, error) from error
    return tuple(cards)


def _refusal(nvml: Any, error: Any) -> DeviceError:
    absent = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver here: libnvidia-ml.so.1 cannot be loaded",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver's library is here, but its kernel module is"
        " not loaded (or this container was started without GPUs)",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to use the GPUs of this machine: see the modes of"
        " /dev/nvidia*, and what the container or the batch system allows",
    }
    if error.value in absent:
        return _NoGpus(absent[error.value])
    broken = {
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver's library and kernel module are of"
        " different versions, as after an update: reload the module or reboot",
        nvml.NVML_ERROR_GPU_IS_LOST: "a GPU of this machine has fallen off the bus: see nvidia-smi and dmesg",
    }
    what = f"the NVIDIA driver does not answer: {error} (NVML error {error.value})"
    return DeviceError(broken.get(error.value, what))


def _card(nvml: Any, index: int) -> Card | None:
    # A board whose device file is closed to us is counted by NVML, but has no index in CUDA.
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


def _instances(nvml: Any, handle: Any, card: Gpu) -> Iterator[Gpu]:
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


def _gpu(nvml: Any, handle: Any, bus_id: str | None, **mig: str) -> Gpu:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    product = nvml.nvmlDeviceGetName(handle)
    try:
        memory_mib = nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20
    except nvml.NVMLError_NotSupported:  # memory shared with the CPU, as on GB10
        memory_mib = None
    return Gpu(name=uuid, uuid=uuid, product=product, memory_mib=memory_mib, bus_id=bus_id, **mig)
