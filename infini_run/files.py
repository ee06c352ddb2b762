"""The files that a launch writes: one log for each worker, and the report. Made before the first worker.

None is opened through a symbolic link, or with more rights than their owner's: a log folder may be shared.
"""

from __future__ import annotations

import os

from infini_run.errors import StartError, UsageError
from infini_run.shortage import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.plan import Worker

_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def open_logs(folder: str, workers: Sequence[Worker], logs: dict[int, int]) -> None:
    """Open every worker's log for appending: descriptors by rank go into `logs`, as far as it comes.

    Raises UsageError: one cannot be written; StartError: there are too many for a limit.
    """
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log_dir={folder} cannot be made: {error.strerror}") from None
    for worker in workers:
        try:
            logs[worker.rank] = os.open(worker.log, _LOG, 0o600)
            _forget(worker.error_file)  # an earlier launch's, which would be taken for ours
        except OSError as error:
            if error.errno in LIMITS:
                raise StartError(str(error.strerror), f"opening {worker.log}", error.errno) from None
            raise UsageError(f"--log_dir: {worker.log} cannot be written: {error.strerror}") from None


def check_report(path: str) -> None:
    """By making the file that becomes the report. It is renamed, which must never replace a device."""
    if not path:
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"--report={path} is not a regular file; give a file in a folder that is writable")
    try:
        partial = f"{os.path.abspath(path)}.{os.getpid()}"
        os.close(os.open(partial, _NEW, 0o600))
        os.unlink(partial)
        _forget(path)  # an earlier launch's, which would be taken for ours
    except OSError as error:
        hint = "give a file in a folder that is there and writable"
        raise UsageError(f"--report={path} cannot be written: {error.strerror}; {hint}") from None


def write_report(path: str, content: dict[str, object]) -> None:
    """By rename, so that a reader finds the whole report or none. Raises OSError."""
    import json

    partial = f"{path}.{os.getpid()}"
    try:
        with os.fdopen(os.open(partial, _NEW, 0o600), "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.rename(partial, path)
    except OSError:
        _forget(partial)
        raise


def remove_folder(path: str) -> None:
    """A folder and all that is in it; what is not there, or not ours to remove, stays as it is."""
    from shutil import rmtree

    rmtree(path, ignore_errors=True)


def _forget(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
