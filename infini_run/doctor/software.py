"""What is installed: infini-run and its core, Python, and the driver of GPUs with who holds memory on them."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from infini_run.doctor.finding import Finding, failing, note, ok
from infini_run.errors import DeviceError
from infini_run.system.interpreter import executable_text
from infini_run.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.devices.visible import VisibleGpus


def check_installation() -> list[Finding]:
    """Name infini-run, its folder and its Python, and import the core."""
    python = ".".join(map(str, sys.version_info[:3]))
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        import_module("infini_run.core.group")
    except ImportError as error:
        return [failing("infini-run", f"{VERSION} in {folder}: its core cannot be imported: {error}")]
    return [ok("infini-run", f"{VERSION} in {folder}, Python {python} at {executable_text()}")]


def check_gpus(environ: Mapping[str, str]) -> list[Finding]:
    """Count the GPUs that ranks would see, and name who holds memory on them."""
    from infini_run.devices.gpu import NoGpus
    from infini_run.devices.in_use import describe_holders
    from infini_run.devices.visible import find, may_have_gpus, module_of

    try:
        found = find(environ)
    except NoGpus as reason:
        if may_have_gpus():
            return [failing("GPUs", f"a driver is here, but {reason}")]
        return [ok("GPUs", f"none ({reason}): --nproc_per_node=auto starts one rank per CPU")]
    except DeviceError as error:
        return [failing("GPUs", f"{error}; --nproc_per_node=gpu fails")]
    if not found.gpus:
        return [note("GPUs", f"{found.variable}={found.inherited} shows none: --nproc_per_node=gpu fails")]
    count = "1 GPU" if len(found.gpus) == 1 else f"{len(found.gpus)} GPUs"
    findings = [ok("GPUs", f"{count}{_models(found)}: --nproc_per_node=auto starts a rank per GPU")]
    try:
        holders = module_of(found.vendor).find_holders(found.gpus)
    except DeviceError as error:
        return [*findings, note("GPU memory", str(error))]
    if not holders:
        return [*findings, ok("GPU memory", "no process holds any")]
    text = describe_holders(holders).replace("GPUs of this job are already in use", "in use")
    return [
        *findings,
        note("GPU memory", f"{text}; ranks may run out of it; use --check_gpus=refuse to start none then"),
    ]


def _models(found: VisibleGpus) -> str:
    """Return their models and the driver's version, as far as they are known."""
    from infini_run.devices.visible import module_of

    models = ", ".join(dict.fromkeys(gpu.product for gpu in found.gpus if gpu.product))
    ask = getattr(module_of(found.vendor), "driver_version", None)
    try:
        version = ask() if ask else ""
    except DeviceError:  # it reports none
        version = ""
    return (f" ({models})" if models else "") + (f", driver {version}" if version else "")
