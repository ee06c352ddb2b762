"""The commands that are measured side by side: how each one is told to run a program N times.

A peer is used only if it is installed and can run /bin/true once; what cannot is named with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bed import Bed
from sample import CommandFailed, expect, finish, start

TRUE = "/bin/true"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """`argv` turns a count and a command into a whole command line.

    `weight` is how often it is measured beside infini-run, `most` the largest count it is asked for,
    `prefix_flags` what makes it mark each line with its rank (None: it cannot), `ranked` that its workers
    know their rank, `stops_most` the largest count with which its teardown is measured (0: it leaves the
    other ranks running when one fails).
    """

    name: str
    argv: Callable[[int, Sequence[str]], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    most: int = 1024
    prefix_flags: tuple[str, ...] | None = None
    ranked: bool = True
    stops_most: int = 0


def infini_run(bed: Bed, *flags: str) -> Launcher:
    return Launcher(
        name="infini-run",
        argv=lambda n, command: [bed.infini_run, f"--nproc_per_node={n}", *flags, *command],
        prefix_flags=("--console=prefix",),
        stops_most=1024,
    )


def floor(bed: Bed) -> Launcher:
    """The bare clone loop as a launcher of its own: a C program that does nothing else."""
    program = bed.program("floor")
    return Launcher(
        name="floor",
        argv=lambda n, command: [program, "-n", str(n), "-r", "1", *command],
        ranked=False,
    )


def find_torchrun(bed: Bed, *flags: str) -> Launcher | None:
    path = str(bed.torch_venv / "bin" / "torchrun") if bed.torch_venv else shutil.which("torchrun")
    if not path:
        return None
    return Launcher(
        name="torchrun",
        argv=lambda n, command: [path, f"--nproc_per_node={n}", "--no-python", *flags, *command],
        weight=0.15,
        most=64,
        prefix_flags=("--tee=3",),
        stops_most=8,
    )


def is_open_mpi(path: str) -> bool:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in answer.stdout or "OpenRTE" in answer.stdout


def find_mpirun(_bed: Bed, *flags: str) -> Launcher | None:
    """Open MPI's; where MPICH is installed too, it owns the name `mpirun`."""
    path = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if not path or not is_open_mpi(path):
        return None
    common = [path, "--oversubscribe"] + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
    return Launcher(
        name="mpirun",
        argv=lambda n, command: [*common, *flags, "-n", str(n), *command],
        weight=0.15,
        most=64,
        prefix_flags=("--tag-output",),
        stops_most=64,
    )


def find_hydra(_bed: Bed, *flags: str) -> Launcher | None:
    """MPICH's. It stops the other ranks only when one calls MPI_Abort, so it has no teardown to measure."""
    path = shutil.which("mpiexec.hydra")
    if not path:
        return None
    return Launcher(
        name="mpiexec.hydra",
        argv=lambda n, command: [path, *flags, "-n", str(n), *command],
        weight=0.5,
        prefix_flags=("-prepend-rank",),
    )


def find_srun(_bed: Bed, *flags: str) -> Launcher | None:
    path = shutil.which("srun")
    if not path:
        return None
    common = [path, "--overcommit", "--mpi=none", "--kill-on-bad-exit=1"]
    return Launcher(
        name="srun",
        argv=lambda n, command: [*common, *flags, "-n", str(n), *command],
        weight=0.3,
        prefix_flags=("--label",),
        stops_most=64,
    )


def find_xargs(_bed: Bed, *_flags: str) -> Launcher | None:
    """`xargs -P N`: not a launcher (no ranks, no teardown), but what one would type."""
    shell, xargs = shutil.which("sh"), shutil.which("xargs")
    if not shell or not xargs:
        return None
    script = 'n=$1; shift; seq "$n" | exec xargs -P "$n" -n 1 "$@"'
    return Launcher(
        name="xargs -P",
        argv=lambda n, command: [shell, "-c", script, "sh", str(n), *command],
        weight=0.5,
        ranked=False,
    )


FINDERS = {
    "torchrun": find_torchrun,
    "mpirun": find_mpirun,
    "mpiexec.hydra": find_hydra,
    "srun": find_srun,
    "xargs -P": find_xargs,
}


def failure_of(bed: Bed, peer: Launcher) -> str | None:
    """Runs a peer once; None if it works."""
    argv = peer.argv(1, [TRUE])
    try:
        expect(argv, finish(start(argv, {**bed.env, **peer.env})))
    except (CommandFailed, OSError) as error:
        return " ".join(str(error).splitlines()[-1:])
    return None


def find_peers(bed: Bed) -> tuple[list[Launcher], list[str]]:
    """The peers that work here, and a remark for each that does not."""
    peers, remarks = [], []
    for name, find in FINDERS.items():
        peer = find(bed)
        failure = failure_of(bed, peer) if peer else "not installed"
        if peer and not failure:
            peers.append(peer)
        else:
            remarks.append(f"{name} left out: {failure}")
    return peers, remarks


def find_peer(bed: Bed, name: str, *flags: str) -> Launcher | None:
    """One peer with flags of its own, if it works here."""
    peer = FINDERS[name](bed, *flags)
    return peer if peer and not failure_of(bed, peer) else None
