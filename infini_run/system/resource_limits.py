"""The limit behind the failure to get a process, a descriptor, or memory: fork(2), pipe(2), getrlimit(2)."""

from __future__ import annotations

from infini_run.errors import StartError
from infini_run.lean_os import EAGAIN, EMFILE, ENFILE, ENOMEM

LIMITS = {
    EAGAIN: "the limit on processes was reached; raise ulimit -u, the cgroup's pids.max, or kernel.threads-max",
    EMFILE: "the limit on open descriptors was reached; raise ulimit -n or ulimit -Hn",
    ENFILE: "the machine's limit on open files was reached; raise fs.file-max",
    ENOMEM: "out of memory, or vm.overcommit_memory forbids more",
}


def with_limit_hint(error: StartError) -> StartError:
    """Return the error with a sentence for the user: the rank, the step, the system's message, and the limit behind
    it.

    Args:
        error: with its errno, and the rank if it has one.
    """
    return _explained(error, "nothing can" if error.rank is None else f"rank {error.rank} cannot")


def explain_command(error: StartError, program: str) -> StartError:
    """Return the error as `with_limit_hint` does, for a command that reaches other nodes.

    Args:
        error: with its errno; its rank is no rank of the job.
        program: the name of the command.
    """
    return _explained(StartError(str(error), error.step, error.errno), f"{program} cannot")


def _explained(error: StartError, who: str) -> StartError:
    limit = LIMITS.get(error.errno, "")
    text = f"{who} be started: {error.step}: {error}"
    return StartError(f"{text}; {limit}" if limit else text, error.step, error.errno, error.rank)
