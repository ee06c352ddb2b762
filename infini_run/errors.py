"""The exceptions of infini-run. Attributes have the data, and the text has the sentence.

InfiniRunError                the root; exit_code says what the command exits with
├── UsageError          2     the request is invalid; nothing was started
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
│   ├── WorkerDied            a worker with work to do exited; its exit is at hand
│   └── CrewFailed            workers failed more often than a crew's policy allows (BrokenExecutor; crews/errors.py)
│       └── ExecutorFailed    the same of an executor (BrokenProcessPool; crews/api/executor.py)
├── RemoteError         1     a worker's code raised what cannot be made again here: its words
├── JobFailed                 a function's job ended without a result (exit code: the job's; jobs/errors.py)
├── SubmitError         1     a batch scheduler did not take a job, or did not say whether it has (jobs/errors.py)
└── QueryError          1     a batch scheduler did not answer, or nothing that can be understood (jobs/errors.py)
"""

from __future__ import annotations

NO_MEMORY = "check ulimit -v, the cgroup's limit, and the machine's memory"  # the kernel does not say which
# of a late import, where the package on the disk was replaced by another version under a running launch
OTHER_CODE = (ImportError, AttributeError, NameError, SyntaxError, TypeError)


def printable(text: str) -> str:
    """Return one line that cannot steer a terminal, with control characters as escapes, the bytes 0x80 to 0x9f (C1)
    of names in another encoding too. Names may hold any of them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or "\udca0" <= c <= "\udcff" else repr(c)[1:-1] for c in text)


def counted(count: int, what: str) -> str:
    """Return `1 rank`, `2 ranks`. what: a word whose plural has an s."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class InfiniRunError(Exception):
    """The base class of all errors of infini-run."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return the traceback for IPython, without the frames of infini-run."""
        from infini_run.notebook_traceback import render

        return render(self)


class UsageError(InfiniRunError):
    """An invalid request. The text has what was given, why it failed, and what to do next."""

    exit_code = 2


class DeviceError(UsageError):
    """The requested devices are missing, or cannot be counted."""


class ProgramError(InfiniRunError):
    """A program that cannot run. `path` is the requested program."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.path)


class ProgramMissing(ProgramError):
    """A program that does not exist (exit code 127, as in a shell)."""

    exit_code = 127


class NotExecutable(ProgramError):
    """A program that exists but cannot be executed (exit code 126, as in a shell)."""

    exit_code = 126


class StartError(InfiniRunError):
    """A worker that could not be created. `step` is the failed call, `errno` its number, `rank` the missing rank."""

    def __init__(self, message: str, step: str, errno: int, rank: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.errno = errno
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.step, self.errno, self.rank)


class LinkError(InfiniRunError):
    """A connection between nodes that broke, or that does not speak the protocol."""


class NodeLost(InfiniRunError):
    """A node that could not be reached, or was lost while the job ran. `host` is its name, `node` its index."""

    def __init__(self, message: str, host: str, node: int) -> None:
        super().__init__(message)
        self.host = host
        self.node = node

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.host, self.node)


class LaunchTimeout(InfiniRunError, TimeoutError):
    """A launch did not finish within its time limit (`timeout_s`, `agent_timeout_s`), and was stopped."""


class RemoteError(InfiniRunError):
    """An exception or a result of a worker cannot be rebuilt here. The text has the type and the message of the
    exception. `kind` is the full name of its type, `trace` its traceback as text; `rank` and `host` name the
    worker."""

    def __init__(self, message: str, kind: str = "", trace: str = "", rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.kind, self.trace, self.rank, self.host)
