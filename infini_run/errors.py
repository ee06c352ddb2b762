"""Every way in which infini-run says no. Data in attributes, the sentence in the text.

InfiniRunError                the root; exit_code says what the command exits with
├── UsageError          2     the request makes no sense; nothing was started
│   └── DeviceError     2     the GPUs asked for are not there
├── ProgramError              the program cannot be run; nothing was started
│   ├── ProgramMissing  127
│   └── NotExecutable   126
├── StartError          1     a worker could not be created: step, errno, and the limit that was hit
├── LinkError           1     a connection between nodes broke, or was not what it should be
├── NodeLost            1     a node could not be reached, or has gone silent
├── LaunchTimeout       1     a launch did not end within the time that the caller gave it (a TimeoutError, too)
├── DrainTimeout        1     a crew's tasks were not done within its drain_s (a TimeoutError, too; crews/errors.py)
├── CrewClosed          1     a crew was closed, and takes no more tasks (a RuntimeError, too; crews/errors.py)
├── ChannelError        1     a message could not be sent or received (channel/errors.py)
├── WorkerError               a worker failed; its report is at hand (exit code: the first failure's)
│   ├── WorkerDied            a worker with work to do has ended; its exit is at hand
│   └── CrewFailed            workers failed more often than a crew's policy allows (BrokenExecutor; crews/errors.py)
├── RemoteError         1     a worker's code raised what cannot be made again here: its words
├── SubmitError         1     a batch scheduler did not take a job, or did not say whether it has (jobs/errors.py)
└── QueryError          1     a batch scheduler did not answer, or nothing that can be understood (jobs/errors.py)
"""

from __future__ import annotations

NO_MEMORY = "check ulimit -v, the cgroup's limit, and the machine's memory"  # the kernel does not say which


def printable(text: str) -> str:
    """One line that cannot steer a terminal: control characters as escapes, the bytes 0x80 to 0x9f (C1) of names in
    another encoding too. Names may hold any of them."""
    return "".join(c if c.isprintable() or "\udca0" <= c <= "\udcff" else repr(c)[1:-1] for c in text)


class InfiniRunError(Exception):
    """The root of the tree."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return what IPython is to show: not our frames, with their source."""
        from infini_run.notebook_traceback import render

        return render(self)


class UsageError(InfiniRunError):
    """The request makes no sense: what was given, what is allowed, what was probably meant."""

    exit_code = 2


class DeviceError(UsageError):
    """The devices asked for are not there, or cannot be counted."""


class ProgramError(InfiniRunError):
    """The program to run cannot be run. `path` is what was asked for."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.path)


class ProgramMissing(ProgramError):
    """There is no such program (exit code 127, as a shell's)."""

    exit_code = 127


class NotExecutable(ProgramError):
    """The program is there but cannot be executed (exit code 126, as a shell's)."""

    exit_code = 126


class StartError(InfiniRunError):
    """A worker could not be created. `step`: the call that failed; `errno`: its number; `rank`: who is missing."""

    def __init__(self, message: str, step: str, errno: int, rank: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.errno = errno
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.step, self.errno, self.rank)


class LinkError(InfiniRunError):
    """A connection between nodes broke, or speaks something else."""


class NodeLost(InfiniRunError):
    """A node could not be reached, or was lost while the job ran. `host`: its name; `node`: its index."""

    def __init__(self, message: str, host: str, node: int) -> None:
        super().__init__(message)
        self.host = host
        self.node = node

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.host, self.node)


class LaunchTimeout(InfiniRunError, TimeoutError):
    """A launch did not end within the time that the caller gave it; it was stopped."""


class RemoteError(InfiniRunError):
    """A worker's code raised an exception that cannot be made again here. The text has its type and its words;
    `kind`: the type's full name; `trace`: the traceback as text; `rank` and `host`: whose it was."""

    def __init__(self, message: str, kind: str = "", trace: str = "", rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.kind, self.trace, self.rank, self.host)
