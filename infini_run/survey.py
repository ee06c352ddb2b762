"""What this machine is for the job, looked at once, before the plan.

Everything that a plan takes from its surroundings on one node comes from here.
"""

from __future__ import annotations

import os

from infini_run.errors import UsageError
from infini_run.plan import Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.options import Options


def survey(options: Options, environ: Mapping[str, str]) -> Node:
    """What this machine is for the job: how many workers, their GPUs, the CPUs they share.

    Raises DeviceError: the GPUs asked for are not there.
    """
    nproc, cpus = options.nproc_per_node, 0
    devices: tuple[tuple[str, ...], ...] = ()
    wants_cpus = options.omp_num_threads == 0 and nproc != 1 and "OMP_NUM_THREADS" not in environ
    if isinstance(nproc, str) or options.gpus_per_proc:
        from infini_run.devices import VISIBLE, assign, find_gpus, resolve_nproc

        if isinstance(nproc, str):
            nproc = resolve_nproc(nproc, environ, options.gpus_per_proc)
        if options.gpus_per_proc:
            devices = assign(find_gpus(environ), nproc, options.gpus_per_proc, environ.get(VISIBLE))
    if wants_cpus:
        cpus = len(os.sched_getaffinity(0))
        if cpus >= 2 * nproc:  # else it is one thread each, whatever the cgroup's quota
            from infini_run.cgroup import count_cpus

            cpus = count_cpus()
    return Node(index=options.node_rank, host=os.uname().nodename, nproc=nproc, cpus=cpus, devices=devices)


def free_port() -> int:
    """A port that nobody listens on now. Rank 0 opens it, not we, so another may still be quicker."""
    from _socket import AF_INET, SOCK_STREAM, socket  # the C module: `socket` costs 5 ms

    probe = socket(AF_INET, SOCK_STREAM)
    try:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    finally:
        probe.close()
    return port


def new_launch_id() -> str:
    """Unique on this machine and all others: strays are told from strangers by it."""
    return f"ir-{os.urandom(6).hex()}"


def absolute(flag: str, path: str) -> str:
    """The absolute path of a flag's file. Raises UsageError: there is no directory to begin from."""
    try:
        return os.path.abspath(path)
    except OSError:
        raise UsageError(
            f"--{flag}={path} cannot be found: this directory was deleted; give an absolute path"
        ) from None


def error_folder(options: Options, launch_id: str, environ: Mapping[str, str]) -> str:
    """Where workers may leave error files: beside the logs, or in a folder that goes when we do.

    In TMPDIR where that is set, else in memory where that is to be had: on a disk, removing an empty folder
    takes longer than creating a process.
    """
    if options.log_dir:
        return absolute("log_dir", options.log_dir)
    base = environ.get("TMPDIR") or ("/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else "/tmp")
    return os.path.join(base, f"infini-run-{launch_id}")
