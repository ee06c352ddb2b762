"""The files of a launch: one log per worker, and the report, which exist before the first worker. Also how to read a
file that somebody else may have replaced.

Nobody but their owner may read or write them, whatever the umask. A folder may belong to strangers, too: nothing in
it is followed, waited for, or trusted for its name (docs/security.md).
"""

from __future__ import annotations

import errno
import os
import stat
import time

from infini_run.errors import StartError, UsageError, printable
from infini_run.system.resource_limits import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class FileOwner(Protocol):
        """The user and group that own the files."""

        @property
        def rank(self) -> int: ...

        @property
        def log(self) -> str: ...

        @property
        def error_log(self) -> str: ...

        @property
        def error_file(self) -> str: ...


_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_IN_THE_WAY = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: "it is a FIFO or a socket"}


def open_logs(
    folder: str,
    workers: Sequence[FileOwner],
    logs: dict[int, int],
    error_logs: dict[int, int],
    heading: str = "",
    nnodes: int = 1,
) -> None:
    """Open the log of every worker for appending, and remove the error files of earlier launches.

    Args:
        folder: the directory of --log_dir, which this creates; empty: do nothing.
        workers: the workers of this node.
        logs: gets a descriptor for each rank, as far as the function comes before it raises.
        error_logs: gets those for stderr alone (torchrun's layout).
        heading: a line to write to each log first, except to files that belong to one attempt.
        nnodes: nodes of the launch, which torchrun's layout has in its paths.

    Raises:
        UsageError: a log is not writable.
        StartError: there are too few descriptors.
    """
    if not folder:
        return
    _make_log_folder(folder)
    try:
        at = os.open(folder, _FOLDER)  # from here on nobody can put another folder in its place
    except OSError as error:
        raise UsageError(f"--log_dir={folder} cannot be opened: {error.strerror}") from None
    try:
        for worker in workers:
            if worker.error_log:
                _open_pair(worker, at, logs, error_logs, levels=3 if nnodes == 1 else 4)
                continue
            logs[worker.rank] = _open_log(worker.log, at)
            if heading:
                _write_heading(logs[worker.rank], worker.log, at, heading)
            _unlink_earlier(worker.error_file, at)
    finally:
        os.close(at)


def _open_pair(worker: FileOwner, at: int, logs: dict[int, int], error_logs: dict[int, int], levels: int) -> None:
    """Open the logs in torchrun's layout: RUN/ATTEMPT/LOCAL_RANK/ or RUN/NODE/ATTEMPT/LOCAL_RANK/, below the folder
    of the logs."""
    inner = _open_inner(worker.log.split("/")[-1 - levels : -1], at)
    try:
        logs[worker.rank] = _open_log(worker.log, inner)
        error_logs[worker.rank] = _open_log(worker.error_log, inner)
        _unlink_earlier(worker.error_file, inner)
    finally:
        os.close(inner)


def _open_inner(names: Sequence[str], at: int) -> int:
    """Open a folder some way below `at`, and create the missing part; nothing on the way may be a link."""
    here = os.dup(at)
    try:
        for name in names:
            _make_in(here, name)
            above, here = here, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(above)
    except OSError as error:
        os.close(here)
        raise UsageError(f"--log_dir: the folder {'/'.join(names)} cannot be made in it: {error.strerror}") from None
    return here


def _make_in(at: int, name: str) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=at)
    except FileExistsError:
        return


def _make_log_folder(folder: str) -> None:
    try:
        _make_folder(folder)
    except OSError as error:
        raise UsageError(f"--log_dir={folder} cannot be made: {error.strerror}") from None


def _make_folder(path: str) -> None:
    """Create a folder with those above it. Only this user may write it even without a umask, which os.makedirs leaves
    to luck."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path.rstrip("/"))
    if above and not os.path.lexists(above):
        _make_folder(above)
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _open_log(path: str, at: int) -> int:
    try:
        fd = os.open(os.path.basename(path), _LOG, 0o600, dir_fd=at)
    except OSError as error:
        if error.errno in LIMITS:
            raise StartError(str(error.strerror), f"opening {path}", error.errno) from None
        reason = _IN_THE_WAY.get(error.errno or 0, error.strerror)
        raise UsageError(f"--log_dir: {path} cannot be written: {reason}") from None
    found = _not_ours(os.fstat(fd), os.fstat(at))
    if found:
        os.close(fd)
        raise UsageError(f"--log_dir: {path} cannot be written: {found}; remove it, or use another folder")
    return fd


def _write_heading(fd: int, path: str, at: int, heading: str) -> None:
    """Write the heading on its own line, though the last one before it may have no end. The next writer reports a
    full disk."""
    try:
        size = os.fstat(fd).st_size
        is_whole = size == 0 or _byte_at(os.path.basename(path), at, size - 1) == b"\n"
        os.write(fd, os.fsencode(("" if is_whole else "\n") + f"infini-run: {printable(heading)}\n"))
    except OSError:
        return


def _byte_at(name: str, at: int, offset: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    try:
        return os.pread(fd, 1, offset)
    finally:
        os.close(fd)


def _not_ours(log: os.stat_result, folder: os.stat_result) -> str:
    """Return why a file may be a stranger's: one to get the output, or one to have the output in this user's file.
    The settings fs.protected_regular and protected_hardlinks of proc_sys_fs(5) check this in sticky folders, where
    they are on."""
    if not stat.S_ISREG(log.st_mode):
        return "it is not a regular file"
    if log.st_nlink > 1:
        return "it is a hard link"
    if log.st_uid != os.geteuid() and folder.st_mode & stat.S_IWOTH:
        return f"it belongs to user {log.st_uid}, in a folder where everybody may write"
    return ""


def _unlink_earlier(error_file: str, at: int) -> None:
    """Remove an earlier launch's file, which a reader would take for this one's."""
    try:
        _unlink_if_exists(os.path.basename(error_file), at)
    except OSError as error:
        raise UsageError(f"--log_dir: {error_file} cannot be removed: {error.strerror}") from None


def check_writable(flag: str, path: str, log_dir: str = "") -> None:
    """Check that the file of a flag is writable, and remove an earlier launch's.

    The check creates and removes a file beside it, because a rename will bring the report or trace there. It never
    replaces a device.

    Args:
        flag: the name of the flag, for the message.
        path: the file; empty: do nothing.
        log_dir: the directory of --log_dir, which this creates if the file is directly in it.

    Raises:
        UsageError: the file is not writable.
    """
    if not path:
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"--{flag}={path} is not a regular file; use a file in a writable folder")
    try:
        target = os.path.abspath(path)
        if log_dir and os.path.dirname(target) == os.path.abspath(log_dir):
            _make_log_folder(log_dir)
        partial = _partial(target)
        os.close(os.open(partial, _NEW, 0o600))
        os.unlink(partial)
        _unlink_if_exists(path)  # an earlier launch's, which a reader would take for this one's
    except OSError as error:
        hint = "use a file in a folder that exists and is writable"
        raise UsageError(f"--{flag}={path} cannot be written: {error.strerror}; {hint}") from None


def write_report(path: str, content: dict[str, object]) -> None:
    """Write a report as JSON, as `write_atomic` does.

    Args:
        path: the file.
        content: plain types.

    Raises:
        OSError: the file is not writable.
    """
    import json

    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode("utf-8", "surrogateescape"))


def save_report(path: str, content: dict[str, object]) -> str:
    """Write a report, as `write_report` does.

    Args:
        path: the file.
        content: plain types.

    Returns:
        A sentence that says why the file is not writable; empty after a success.
    """
    try:
        write_report(path, content)
    except OSError as error:
        return f"the report {path} cannot be written: {error.strerror}"
    return ""


def write_atomic(path: str, data: bytes) -> None:
    """Write a file by rename: a reader finds all of it, or what was there before.

    Args:
        path: the file.
        data: its content.

    Raises:
        OSError: the file is not writable; then nothing is left beside it.
    """
    partial = _partial(path)
    try:
        with os.fdopen(os.open(partial, _NEW, 0o600), "wb") as file:
            file.write(data)
        os.rename(partial, path)
    except OSError:
        _unlink_if_exists(partial)
        raise


def _partial(path: str) -> str:
    """Return a name beside the file that nobody can have taken: as process 1 of a container the pid is always the
    same."""
    return f"{path}.{os.urandom(6).hex()}"


def append_text(path: str, text: str) -> None:
    """Append text to a file, with the same checks as for a log.

    Args:
        path: the file, which this creates if missing.
        text: the text, written in UTF-8.

    Raises:
        OSError: the file is not writable, or may be a stranger's (EPERM).
    """
    fd = os.open(path, _LOG, 0o600)
    try:
        found = _not_ours(os.fstat(fd), os.stat(os.path.dirname(path) or "."))
        if found:
            raise OSError(errno.EPERM, found)
        data = text.encode("utf-8", "surrogateescape")
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def open_regular(path: str, *, follows_links: bool = False) -> int:
    """Open a regular file for reading. It rejects anything else (a FIFO, a device, a folder), and never waits for it.
    An open(2) of a FIFO without O_NONBLOCK waits until somebody writes to it.

    Args:
        path: the file.
        follows_links: whether its last part may be a symbolic link.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: no regular file, or not readable; it has a `filename`.
    """
    try:
        fd = os.open(path, _READ if follows_links else _READ | os.O_NOFOLLOW)
    except OSError as error:
        if (error.errno or 0) in _IN_THE_WAY and not follows_links:
            error.strerror = _IN_THE_WAY[error.errno or 0]
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return fd


def read_regular(path: str, limit: int, *, follows_links: bool = False) -> bytes:
    """Read the whole of a regular file, as `open_regular` opens it.

    Args:
        path: the file.
        limit: the most bytes that it may have.
        follows_links: whether its last part may be a symbolic link.

    Raises:
        OSError: no regular file, not readable, or larger (EFBIG); it has a `filename`.
    """
    with open(open_regular(path, follows_links=follows_links), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1)
        while data and len(data) <= limit and (piece := file.read(limit + 1 - len(data))):
            data += piece
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes, and at most {limit} are read", path)
    return data


def read_end(path: str, size: int) -> bytes:
    """Read the last bytes of a regular file, as `open_regular` opens it, through a link, too.

    Args:
        path: the file.
        size: how many bytes at most.

    Raises:
        OSError: no regular file, or not readable; it has a `filename`.
    """
    with open(open_regular(path, follows_links=True), "rb", buffering=0) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


def remove_folder(path: str) -> None:
    """Remove a directory and all that is in it. What does not exist, or is not removable, stays."""
    from shutil import rmtree

    rmtree(path, ignore_errors=True)


def remove_abandoned(paths: Sequence[str], age_s: float) -> None:
    """Remove the folders of launches whose launcher and guard were killed at once.

    A scheduler does so with all that a job has left. The lock of a launcher comes a moment after its directory.

    Args:
        paths: directories. Only those with the form of a launch's, and without a lock that somebody holds, are
            removed.
        age_s: keep those that changed within this many seconds.
    """
    for path in paths:
        fd = _lock_abandoned(path, age_s)
        if fd is not None:
            remove_folder(path)
            os.close(fd)


def count_abandoned(paths: Sequence[str], age_s: float) -> int:
    """Return how many of these directories `remove_abandoned` would remove."""
    fds = [fd for path in paths if (fd := _lock_abandoned(path, age_s)) is not None]
    for fd in fds:
        os.close(fd)
    return len(fds)


def _lock_abandoned(path: str, age_s: float) -> int | None:
    """Return a descriptor with the lock of an abandoned directory, or None if it is not known to be abandoned."""
    import fcntl

    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # another user's, or gone
    try:
        status = os.fstat(fd)
        is_ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
        if is_ours and time.time() - status.st_mtime > age_s:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except OSError:  # its launcher lives, or there are no locks
        pass
    os.close(fd)
    return None


def _unlink_if_exists(path: str, at: int | None = None) -> None:
    try:
        os.unlink(path, dir_fd=at)
    except FileNotFoundError:
        return
