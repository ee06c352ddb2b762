"""Variables and descriptors that an MPI launcher gave to this process alone, and that ranks must not inherit.

Otherwise a rank that imports MPI would answer for this process, on its connection: PMI_FD of Hydra and of Slurm's
pmi2, HYDI_CONTROL_FD. Hydra 4.0 passes on a dozen more descriptors, its own pipes and connections.
"""

from __future__ import annotations

import infini_run.lean_os as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables that mpirun, mpiexec, and srun set for infini-run's process alone. A rank that imports MPI would use them
# in place of infini-run.
_LAUNCHER_PREFIXES = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PMI2_",
    "PRTE_",
    "ORTE_",
    "HYDI_",
    "MV2_COMM_WORLD_",
    "SLURM_PMI",
    "PALS_",
)
_LAUNCHER_NAMES = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def without_launcher_variables(environ: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment without the variables that an MPI launcher set for this process alone.

    Args:
        keep: names that stay in any case.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in keep or not (name.startswith(_LAUNCHER_PREFIXES) or name in _LAUNCHER_NAMES)
    }


def strip_launcher_environment(environ: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment for ranks, and set close-on-exec on the descriptors that the removed variables name.

    Args:
        keep: names of variables that stay in any case.
    """
    rest = without_launcher_variables(environ, keep)
    for name in environ.keys() - rest.keys():
        text = environ[name]
        if name.endswith("_FD") and text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) > 2:
            _close_on_exec(int(text))
    return rest


def close_inherited_on_exec() -> None:
    """Set close-on-exec on all descriptors but stdin, stdout and stderr. Call it if an engine has started this
    process: then no descriptor is the user's."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            _close_on_exec(int(name))


def _close_on_exec(fd: int) -> None:
    try:
        os.set_inheritable(fd, False)
    except OSError as error:
        if error.errno != os.EBADF:  # EBADF: it is not open any more
            raise
