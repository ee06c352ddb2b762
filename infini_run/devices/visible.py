"""What this machine gives the ranks: whose accelerators, under which names, and how many ranks that makes.

The rule: the caller's own choice is law. An inherited variable is read as its runtime reads it, and each rank gets
some of its entries, spelled as the caller spelled them. What differs from vendor to vendor is in the table and in the
modules that it names.
"""

from __future__ import annotations

import os

from infini_run.devices.gpu import Accelerator, NoGpus
from infini_run.errors import DeviceError
from infini_run.record import record
from infini_run.system.cgroup import count_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@record
class Vendor:
    """A row of the table of vendors.

    Attributes:
        module: the module in devices/.
        file: a file that is there if the driver is.
        variables: those that choose devices, from the lowest layer to the topmost. The topmost one that is set is
            divided among the ranks, or else the first.
        signs: the variables that only this vendor's programs know.
    """

    module: str
    file: str
    variables: tuple[str, ...]
    signs: tuple[str, ...]


VENDORS = (
    Vendor(
        module="nvidia",
        file="/dev/nvidiactl",
        variables=("CUDA_VISIBLE_DEVICES",),
        signs=("CUDA_VISIBLE_DEVICES",),
    ),
    Vendor(
        module="amd",
        file="/dev/kfd",
        variables=("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        signs=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    ),
    Vendor(
        module="ascend",
        file="/dev/davinci_manager",
        variables=("ASCEND_RT_VISIBLE_DEVICES",),
        signs=("ASCEND_RT_VISIBLE_DEVICES",),
    ),
)


_OF_WSL = "/dev/dxg"  # all that NVIDIA's driver has there


@record
class VisibleGpus:
    """The accelerators of one vendor that this process may use.

    Attributes:
        vendor: the row of the table.
        variable: the variable that shows a rank its own.
        inherited: the value of that variable in this process; None: not set.
        gpus: the accelerators, in the order of the variable.
    """

    vendor: Vendor
    variable: str
    inherited: str | None
    gpus: tuple[Accelerator, ...]


def find(environ: Mapping[str, str], root: str = "") -> VisibleGpus:
    """Find the accelerators that a program started with `environ` could use.

    The first vendor of the table with accelerators is taken. A vendor whose own variable is set comes before the
    others, and decides even if its variable names no device.

    Args:
        environ: the environment with the vendors' variables.
        root: is put before /sys and /dev.

    Returns:
        The accelerators in the order in which the program would count them; `gpus` is empty if the variable gives it
        none.

    Raises:
        NoGpus: there is none.
        DeviceError: they cannot be counted (a broken driver, no permission).
    """
    reasons: list[str] = []
    for is_named in (True, False):
        vendors = [vendor for vendor in VENDORS if environ.keys().isdisjoint(vendor.signs) != is_named]
        nothing: VisibleGpus | None = None
        for vendor in vendors:
            try:
                found = _found(vendor, environ, module_of(vendor).find_gpus(environ, root))
            except NoGpus as reason:
                reasons.append(str(reason))
                continue
            if found.gpus:
                return found
            nothing = nothing or found
        if nothing is not None:
            return nothing
    raise NoGpus("; ".join(reasons))


def may_have_gpus(root: str = "") -> bool:
    """Return whether a driver's file exists. A cheap test: pynvml is not imported.

    Args:
        root: is put before /dev.
    """
    return any(os.path.exists(root + file) for file in (*(vendor.file for vendor in VENDORS), _OF_WSL))


def module_of(vendor: Vendor) -> Any:
    """Import and return the module of a vendor, which has `find_gpus(environ, root)` and `find_holders(gpus,
    root)`."""
    from importlib import import_module

    return import_module(f"infini_run.devices.{vendor.module}")


def _found(vendor: Vendor, environ: Mapping[str, str], gpus: tuple[Accelerator, ...]) -> VisibleGpus:
    given = [name for name in vendor.variables if name in environ and (environ[name] or name == vendor.variables[0])]
    variable = given[-1] if given else vendor.variables[0]
    return VisibleGpus(vendor=vendor, variable=variable, inherited=environ.get(variable), gpus=gpus)


def resolve_nproc(kind: str, environ: Mapping[str, str], gpus_per_proc: int, root: str = "") -> int:
    """Return how many ranks `--nproc_per_node=KIND` means on this machine.

    Args:
        kind: `gpu`: one for every `gpus_per_proc` visible GPUs. `cpu`: one per CPU that this process may use.
            `auto`: as `gpu` if there are GPUs, else as `cpu`; but a broken driver, or a list that names no GPU, is an
            error: a CPU job on a GPU machine is not what was meant.
        environ: the environment with the vendors' variables.
        gpus_per_proc: of --gpus_per_proc; 0: one rank for each GPU.
        root: is put before /sys and /dev.

    Raises:
        DeviceError: there is no GPU, or too few for one rank, or they cannot be counted.
    """
    if kind == "cpu":
        return count_cpus()
    try:
        found = find(environ, root)
        if not found.gpus:
            raise _nothing_visible(found)
    except NoGpus as error:
        if kind == "auto" and gpus_per_proc == 0:
            return count_cpus()
        raise NoGpus(f"--nproc_per_node={kind}: {error}; use --nproc_per_node=N") from None
    if gpus_per_proc == 0:
        _check_shown_together(found.gpus)
    elif gpus_per_proc > len(found.gpus):
        raise DeviceError(_too_few(found, 1, gpus_per_proc))
    return len(found.gpus) // max(gpus_per_proc, 1)


def partition(found: VisibleGpus, nproc: int, gpus_per_proc: int) -> tuple[tuple[Accelerator, ...], ...]:
    """Divide GPUs among the local ranks, in order, every GPU at most once.

    Args:
        found: the visible GPUs.
        nproc: the number of local ranks.
        gpus_per_proc: GPUs of each rank.

    Returns:
        The GPUs of each local rank.

    Raises:
        DeviceError: there are too few, or CUDA would not show one process all its GPUs.
    """
    if nproc * gpus_per_proc > len(found.gpus):
        raise DeviceError(_too_few(found, nproc, gpus_per_proc))
    shares = tuple(found.gpus[rank * gpus_per_proc : (rank + 1) * gpus_per_proc] for rank in range(nproc))
    for gpus in shares:
        _check_shown_together(gpus)
    return shares


def likely_shares(found: VisibleGpus, nproc: int) -> tuple[tuple[Accelerator, ...], ...]:
    """Return the GPU that each local rank will probably use without --gpus_per_proc: the one with the index of its
    local rank.

    Args:
        found: the visible GPUs, all of which every rank sees.
        nproc: the number of local ranks.

    Returns:
        The GPUs of each local rank; empty if there are fewer GPUs than ranks.
    """
    return tuple((gpu,) for gpu in found.gpus[:nproc]) if nproc <= len(found.gpus) else ()


def _check_shown_together(gpus: tuple[Accelerator, ...]) -> None:
    shown = len({gpu.one_of or gpu.name for gpu in gpus})
    if shown < len(gpus):
        what = f"CUDA shows a process only {shown} of these {len(gpus)} MIG instances"
        raise DeviceError(f"{what}; use --gpus_per_proc=1 for one per rank")


def _too_few(found: VisibleGpus, nproc: int, gpus_per_proc: int) -> str:
    setting = "not set" if found.inherited is None else repr(found.inherited)
    needed = f"{nproc} rank(s) with --gpus_per_proc={gpus_per_proc} need {nproc * gpus_per_proc} GPU(s)"
    return f"{needed}, and {len(found.gpus)} can be used here ({found.variable} is {setting})"


def _nothing_visible(found: VisibleGpus) -> DeviceError:
    if found.inherited is None:
        return NoGpus("no usable GPU: the NVIDIA driver lists none, or MIG mode without instances")
    what = f"no usable GPU: {found.variable} is {found.inherited!r}"
    if found.inherited in ("", "-1"):
        return NoGpus(what)
    return DeviceError(f"{what} (an entry that names no GPU hides all from there on; one named twice, all)")
