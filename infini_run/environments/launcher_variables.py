"""What an MPI launcher gave to its own process stays with that: its variables, and the descriptors that they name.

A rank that imported MPI would otherwise answer in our place, on a connection that is ours: PMI_FD of Hydra and of
Slurm's pmi2, HYDI_CONTROL_FD. Hydra 4.0 leaves a dozen more to what it starts, its own pipes and connections.
"""

from __future__ import annotations

import errno
import os

from infini_run.environments.environment import without_place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def strip_launcher_environment(environ: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment that ranks are to have; what it no longer names they do not inherit either."""
    rest = without_place(environ, keep)
    for name in environ.keys() - rest.keys():
        text = environ[name]
        if name.endswith("_FD") and text.isascii() and text.isdecimal() and 2 < int(text[:9]) == int(text):
            _close_on_exec(int(text))
    return rest


def close_inherited_on_exec() -> None:
    """All but stdin, stdout and stderr: where an engine has started us, the user has left none here."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            _close_on_exec(int(name))


def _close_on_exec(fd: int) -> None:
    try:
        os.set_inheritable(fd, False)
    except OSError as error:
        if error.errno != errno.EBADF:  # it is open no longer: nobody inherits it
            raise
