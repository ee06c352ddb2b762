"""One task of an engine's step becomes one rank: this sets its environment, and the program replaces this process.

The one rule: after this there is no launcher. Signals, output and the end are the engine's, which started the task.
"""

from __future__ import annotations

import _signal
import os

from infini_run.errors import NotExecutable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from infini_run.plan.model import Plan, Worker


def exec_rank(plan: Plan, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the plan's only worker. Does not return.

    Args:
        plan: A plan of one worker.
        environ: This process's environment, to which the plan adds.

    Raises:
        NotExecutable: The program is not executable.
    """
    worker = plan.workers[0]
    env = plan.environ(worker, environ)
    env.pop("NOTIFY_SOCKET", None)  # whose-ever it is, it hears one process for all
    _connect(worker)
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and an exec would keep that
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(worker.file, worker.argv, env)
    except OSError as error:
        raise NotExecutable(f"{worker.file} cannot be executed: {error.strerror}", worker.file) from None


def _connect(worker: Worker) -> None:
    """Connect the streams that the flags took from this rank to /dev/null; the others stay as the engine made
    them."""
    silent = (worker.stdin == "null", not worker.stdout.console, not worker.stderr.console)
    for fd, is_silent in enumerate(silent):
        if is_silent:
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, fd)
            os.close(null)
