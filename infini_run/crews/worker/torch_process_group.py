"""The function within torch.distributed's process group, in a worker. This is the only import of torch."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def call_in_group(
    backend: str, timeout_s: float, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call it between init_process_group (from the environment) and destroy_process_group. After a failure the group
    stays: its destruction would wait for the others.

    gloo counts a pair as connected on one side before the other side has answered (PyTorch 2.13). A rank whose
    function is short would close connections that another rank still makes, which fails there. Hence the barrier."""
    import datetime

    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, **_device(backend))
    if "gloo" in backend:
        dist.barrier()
    result = function(*args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _device(backend: str) -> dict[str, Any]:
    """Return the GPU of this rank for NCCL: else it guesses, and warns of it."""
    if "nccl" not in backend:
        return {}
    import os

    import torch

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return {"device_id": device}
