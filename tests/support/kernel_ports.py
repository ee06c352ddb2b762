"""Ports for a notebook's kernel: none that the machine gives to somebody else between their choice and their use, and
none of another kernel of a test.

Jupyter asks the machine for free ports, lets them go, and starts a kernel, which sometimes finds one taken.
"""

from __future__ import annotations

from infini_run.node.ports import free_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from traitlets.config import Config

NAMES = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def client_config() -> Config:
    """Return the configuration of a NotebookClient whose kernel has such ports, while this process lives."""
    from traitlets.config import Config

    return Config(KernelManager={"cache_ports": False, **{name: free_port() for name in NAMES}})
