"""The keywords of the Python API, for type checkers; written by `make generated` from the table of flags.

Nothing imports it when a program runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict


class CrewOptions(TypedDict, total=False):
    """Flags of the command as keywords of `Crew`."""

    nnodes: int | str | tuple[int, int] | None
    rdzv_endpoint: str | None
    master_addr: str | None
    master_port: int | None
    standalone: bool | None
    run_id: str | None
    engine: Literal["local", "ssh", "slurm", "pbs", "mpi", "auto"] | None
    hostfile: str | PathLike[str] | None
    ssh_config: str | PathLike[str] | None
    remote_python: str | PathLike[str] | None
    link_port: int | None
    link_address: str | None
    join_timeout: float | str | None
    node_timeout: float | str | None
    export: str | Sequence[str] | None
    spares: int | None
    join_window: float | str | None
    node_check: str | None
    node_check_timeout: float | str | None
    gpus_per_proc: int | None
    bind: Literal["none", "numa", "socket", "cores"] | None
    check_gpus: bool | Literal["off", "warn", "refuse"] | None
    omp_num_threads: int | Literal["auto"] | None
    log_layout: Literal["flat", "torchrun"] | None
    console: Literal["auto", "inherit", "lines", "prefix", "fold", "none"] | None
    timestamps: bool | None
    color: Literal["auto", "always", "never"] | None
    ranks_on_console: str | Sequence[int] | None
    redirects: int | str | Mapping[int, int] | None
    tee: int | str | Mapping[int, int] | None
    local_ranks_filter: str | Sequence[int] | None
    stop_signal: int | str | None
    stop_scope: Literal["group", "leader", "mixed"] | None
    hang_timeout: float | str | None
    on_hang: Literal["report", "stop"] | None
    rdzv_backend: Literal["static", "c10d"] | None
    rdzv_conf: str | None
    role: str | None
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None
    virtual_local_rank: bool | None


class FunctionOptions(CrewOptions, total=False):
    """Flags of the command as keywords of `Launcher` and `Pool`."""

    on_join: Literal["wait", "restart"] | None
    max_node_failures: int | None
    grace: float | str | None
    max_restarts: int | None
    restart_delay: float | str | None
    restart_window: float | str | None
    max_no_progress: int | None
    keep_going: bool | None


class ProgramOptions(FunctionOptions, total=False):
    """Flags of the command as keywords of `launch_local` and `launch_multi_node`."""

    node_rank: int | None
    one_world: bool | None
    module: bool | None
    no_python: bool | None
    distributed_args: bool | None
    preload: str | Sequence[str] | None
    preload_timeout: float | str | None
    token_file: str | PathLike[str] | None
    stdin: int | Literal["rank0", "all", "none"] | None
    restart_scope: Literal["job", "program"] | None
    ready_timeout: float | str | None
    progress_timeout: float | str | None
    snapshots: Literal["hang", "failure", "off"] | None
    live: bool | Literal["on", "off", "auto"] | None
    trace: str | PathLike[str] | None
    events: str | PathLike[str] | None
    metrics: str | PathLike[str] | None
    metrics_interval: float | str | None


class RunOptions(ProgramOptions, total=False):
    """Flags of the command as keywords of `run` and (no `hosts`, `preload`, `preload_timeout`) `ProcessLauncher`."""

    nproc_per_node: int | Literal["auto", "gpu", "cpu"] | None
    hosts: str | Sequence[str] | None
    log_dir: str | PathLike[str] | None
    nproc: int | Literal["auto", "gpu", "cpu"] | None
