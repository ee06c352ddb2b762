"""A debugger that runs the launcher and is to be in the ranks, too: pydevd, which VS Code (debugpy) and PyCharm use.

It hooks Python's own ways to start a process, and the core's is none of them. So its own function rewrites the
command, as its hooks would (docs/decisions/0063). This import needs a loaded pydevd.
"""

from __future__ import annotations

import sys

from infini_run.plan.model import Command
from infini_run.record import replace


def attach_debugger(command: Command) -> Command:
    """Return the command that starts pydevd in front of a Python program.

    It is the same command if the program is no Python, or the debugger has hooked no start of a process. It hooks
    none if it is not to follow children (`"subProcess": false` in launch.json).
    """
    monkey = sys.modules.get("_pydev_bundle.pydev_monkey")
    starts = sys.modules.get("_posixsubprocess")
    if monkey is None or getattr(getattr(starts, "fork_exec", None), "__name__", "") != "new_fork_exec":
        return command
    return replace(command, argv=tuple(map(str, monkey.patch_args(list(command.argv)))))
