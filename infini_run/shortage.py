"""Which limit was hit, when a process, a descriptor or memory could not be had: fork(2), pipe(2), getrlimit(2)."""

from __future__ import annotations

import errno
import os

from infini_run.errors import StartError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.plan import Worker

LIMITS = {
    errno.EAGAIN: "the limit on processes was hit: ulimit -u, the cgroup's pids.max or kernel.threads-max",
    errno.EMFILE: "the limit on open descriptors was hit: ulimit -n, or ulimit -Hn",
    errno.ENFILE: "the machine's limit on open files was hit: fs.file-max",
    errno.ENOMEM: "no memory is left, or vm.overcommit_memory forbids more",
}


_PER_RANK = 2  # a pidfd, a notify socket
_OF_OURS = 32  # of a group, with its guard, and what else is opened at a start


def has_descriptors(workers: Sequence[Worker]) -> bool:
    """Whether a launch with the pipes of this plan stays within the limit on open descriptors. Both ends of every
    pipe are open until the ranks run."""
    pipes = sum(worker.stdout.piped + worker.stderr.piped + (worker.stdin == "pipe") for worker in workers)
    wanted = 2 * pipes + _PER_RANK * len(workers) + _OF_OURS
    try:
        held = len(os.listdir("/proc/self/fd"))
    except OSError:
        held = 3
    return held + wanted <= os.sysconf("SC_OPEN_MAX")


def explain(error: StartError) -> StartError:
    """The same error in a sentence: who, which step, the system's word, and the limit."""
    return _explained(error, "nothing can" if error.rank is None else f"rank {error.rank} cannot")


def explain_command(error: StartError, program: str) -> StartError:
    """The same of a command that reaches other nodes: its only worker is no rank."""
    return _explained(StartError(str(error), error.step, error.errno), f"{program} cannot")


def _explained(error: StartError, who: str) -> StartError:
    limit = LIMITS.get(error.errno, "")
    text = f"{who} be started: {error.step}: {error}"
    return StartError(f"{text}; {limit}" if limit else text, error.step, error.errno, error.rank)
