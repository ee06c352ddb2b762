"""The keywords of `submit`, for type checkers; written by `make generated` from the table of flags.

Nothing imports it when a program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict


class SubmitOptions(TypedDict, total=False):
    """Flags of the command as keywords of `submit`."""

    slots: int | None
    slots_per_node: int | None
    slot_type: Literal["cuda", "rocm", "cpu"] | None
    gpu_type: str | None
    cpus_per_slot: int | None
    mem_per_slot: str | None
    single_node: bool | None
    spares: int | None
    round_up: bool | None
    layout: Literal["default", "determined"] | None
    scheduler: Literal["auto", "slurm", "pbs", "local"] | None
    pool: str | None
    account: str | None
    project: str | None
    time: float | str | None
    options: str | Sequence[str] | None
    gres: bool | None
    tres: bool | None
    title: str | None
    dir: str | PathLike[str] | None
    python: str | PathLike[str] | None
    run_options: str | Sequence[str] | None
    warn: float | str | None
    restarts: int | None
    max_timeouts: int | None
    container: str | None
    runtime: Literal["apptainer", "singularity", "podman", "enroot", "pyxis"] | None
    container_python: str | PathLike[str] | None
    bind: str | Sequence[str] | None
    container_options: str | Sequence[str] | None
