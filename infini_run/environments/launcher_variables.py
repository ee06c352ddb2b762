"""Variables and descriptors that an MPI launcher gave to this process alone, and that ranks must not inherit.

Otherwise a rank that imports MPI would answer for this process, on its connection: PMI_FD of Hydra and of Slurm's
pmi2, HYDI_CONTROL_FD. Hydra 4.0 passes on a dozen more descriptors, its own pipes and connections.
"""

from __future__ import annotations

import errno
import os

from infini_run.environments.environment import without_launcher_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def strip_launcher_environment(environ: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment for ranks, and set close-on-exec on the descriptors that the removed variables name.

    Args:
        keep: names of variables that stay in any case.
    """
    rest = without_launcher_variables(environ, keep)
    for name in environ.keys() - rest.keys():
        text = environ[name]
        if name.endswith("_FD") and text.isascii() and text.isdecimal() and 2 < int(text[:9]) == int(text):
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
        if error.errno != errno.EBADF:  # EBADF: it is not open any more
            raise
