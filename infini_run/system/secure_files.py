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
from infini_run.system.io_sizes import READ_CHUNK
from infini_run.system.resource_limits import LIMITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class FileOwner(Protocol):
        """The user and group that own the files."""

        @property
        def rank(self) -> int: ...

        @property
        def program(self) -> str: ...

        @property
        def log(self) -> str: ...

        @property
        def error_log(self) -> str: ...

        @property
        def error_file(self) -> str: ...


_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_MESSAGE = 4096  # bytes; Kubernetes reads no more
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_STREAM = {
    errno.ELOOP: "it is a symbolic link; use its target, or fd:N",
    errno.ENXIO: "nobody reads this FIFO, or it is a socket; start the reader first",
}
_IN_THE_WAY = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: "it is a FIFO or a socket"}


def open_logs(
    folder: str,
    workers: Sequence[FileOwner],
    logs: dict[int, int],
    error_logs: dict[int, int],
    heading: str = "",
    nnodes: int = 1,
    *,
    has_inner: bool = True,
) -> str:
    """Open the log of every worker for appending, and remove the error files of earlier launches.

    Each log has a lock as long as it is open here, but not on file systems that other machines share. There a lock
    may wait for a server, or stay after the crash of its machine.

    Args:
        folder: the directory of --log_dir, which this creates; empty: do nothing. A program with a name has a folder
            in it.
        workers: the workers of this node.
        logs: gets a descriptor for each rank, as far as the function comes before it raises.
        error_logs: gets those for stderr alone (torchrun's layout).
        heading: a line to write to each log first, except to files that belong to one attempt.
        nnodes: nodes of the launch, which torchrun's layout has in its paths.
        has_inner: a program with a name has a folder there; else the directory is its own.

    Returns:
        A sentence about logs that another launch has open. Empty: there are none.

    Raises:
        UsageError: a log is not writable.
        StartError: there are too few descriptors.
    """
    if not folder:
        return ""
    _make_log_folder(folder)
    try:
        at = os.open(folder, _FOLDER)  # from here on nobody can put another folder in its place
    except OSError as error:
        raise UsageError(f"--log_dir={folder} cannot be opened: {error.strerror}") from None
    inner: dict[str, int] = {}
    try:
        for worker in workers:
            if worker.error_log:
                _open_pair(worker, at, logs, error_logs, levels=3 if nnodes == 1 else 4)
                continue
            if worker.program and has_inner and worker.program not in inner:
                inner[worker.program] = _open_inner([worker.program], at)
            here = inner.get(worker.program, at)
            logs[worker.rank] = _open_log(worker.log, here)
            if heading:
                _write_heading(logs[worker.rank], worker.log, here, heading)
            _unlink_earlier(worker.error_file, here)
    finally:
        for fd in (at, *inner.values()):
            os.close(fd)
    return _lock_logs(folder, {worker.log: logs[worker.rank] for worker in workers})


def _lock_logs(folder: str, logs: Mapping[str, int]) -> str:
    """Lock the logs. Return a sentence about those that another launch has locked, or ""."""
    from infini_run.system.file_systems import is_remote

    taken = [] if is_remote(folder) else [path for path, fd in logs.items() if not _lock(fd)]
    if not taken:
        return ""
    more = f" and {len(taken) - 1} more" if taken[1:] else ""
    return f"another launch also writes {taken[0]}{more}; use another --log_dir"


def _lock(fd: int) -> bool:
    """Return whether nobody else has the lock of this file."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks there
        return True
    return True


def heading_line(heading: str) -> bytes:
    """Return the line with which a log continues, for the text of its heading."""
    return os.fsencode(f"infini-run: {printable(heading)}\n")


def remove_error_files(workers: Sequence[FileOwner]) -> None:
    """Remove the error files of the last attempt of workers that restart. The report has read them."""
    for worker in workers:
        try:
            if worker.error_file:
                os.unlink(worker.error_file)
        except OSError:
            continue  # there is none


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
        os.write(fd, (b"" if is_whole else b"\n") + heading_line(heading))
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
    return "it is a hard link" if log.st_nlink > 1 else _of_stranger(log, folder)


def _of_stranger(file: os.stat_result, folder: os.stat_result) -> str:
    if file.st_uid != os.geteuid() and folder.st_mode & stat.S_IWOTH:
        return f"it belongs to user {file.st_uid}, in a folder where everybody may write"
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


def clear_message(flag: str, path: str) -> None:
    """Check that the file of a flag can get a message, and empty it: a reader would take an earlier one for this
    launch's. The file may be a mount, which no rename can replace.

    Args:
        flag: the name of the flag, for the message.
        path: the file, which this creates if missing.

    Raises:
        UsageError: the file is not writable, or may be a stranger's.
    """
    problem = write_message(path, "")
    if problem:
        raise UsageError(
            f"--{flag}={path} cannot be written: {problem}; use a regular file of yours, or /dev/termination-log in "
            "a pod"
        )


def write_message(path: str, text: str) -> str:
    """Replace the content of a file in place by the beginning of a text, at most 4096 bytes of UTF-8.

    Args:
        path: the file, which this creates if missing.
        text: the text.

    Returns:
        Why that is not possible; empty after a success.
    """
    data = text.encode("utf-8", "replace")[:_MESSAGE].decode("utf-8", "ignore").encode("utf-8")
    try:
        fd = os.open(path, _LOG, 0o600)
        try:
            found = _not_ours(os.fstat(fd), os.stat(os.path.dirname(path) or "."))
            if not found:
                os.ftruncate(fd, 0)
                os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        return _IN_THE_WAY.get(error.errno or 0, str(error.strerror))
    return found


def save_message(path: str, text: str) -> str:
    """Write a message, as `write_message` does. Return a sentence if that is not possible, else ""."""
    problem = write_message(path, text)
    return f"the message {path} cannot be written: {problem}" if problem else ""


def write_atomic(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file by rename: a reader finds all of it, or what was there before.

    Args:
        path: the file.
        data: its content.
        mode: its permissions, without those that the umask takes.

    Raises:
        OSError: the file is not writable; then nothing is left beside it.
    """
    partial = _partial(path)
    try:
        with os.fdopen(os.open(partial, _NEW, mode), "wb") as file:
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


def open_stream(flag: str, path: str) -> int:
    """Open a file that gets lines while a job runs, for appending: a regular file, a FIFO that somebody reads, or a
    device. A missing one is created.

    Args:
        flag: the name of the flag, for the message.
        path: the file.

    Returns:
        A descriptor without blocking, which the caller closes. A new line begins there.

    Raises:
        UsageError: the file is not writable, or may be a stranger's.
    """
    try:
        fd = os.open(path, _LOG, 0o600)
    except OSError as error:
        reason = _NO_STREAM.get(error.errno or 0, error.strerror)
        raise UsageError(f"--{flag}={path} cannot be written: {reason}") from None
    try:
        status = os.fstat(fd)
        found = _not_a_stream(status, os.stat(os.path.dirname(path) or "."))
        if found:
            raise UsageError(f"--{flag}={path} cannot be written: {found}; use another file")
        if stat.S_ISREG(status.st_mode) and status.st_size and read_end(path, 1) != b"\n":
            os.write(fd, b"\n")  # a launch that was killed has cut its last line
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise UsageError(f"--{flag}={path} cannot be written: {error.strerror}") from None
        raise
    return fd


def _not_a_stream(file: os.stat_result, folder: os.stat_result) -> str:
    """Return why lines cannot go there, as `_not_ours` does for a regular file."""
    if stat.S_ISREG(file.st_mode):
        return _not_ours(file, folder)
    if stat.S_ISCHR(file.st_mode):
        return ""
    if stat.S_ISFIFO(file.st_mode):
        return _of_stranger(file, folder)
    return "it is not a file, FIFO, or character device"


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


def open_of_user(path: str, uid: int) -> int:
    """Open a regular file for reading that a user owns and can open. Whoever trusts a path of another user opens it
    as that user: root could also read what is kept from that user, through a link or below a folder of root.

    Args:
        path: the file.
        uid: the user. A file of this process's own user may also belong to another one.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: as for `open_regular`; or it is another user's, or this process may not act for that user.
    """
    own = os.geteuid()
    if uid == own:
        return open_regular(path, follows_links=True)
    import pwd

    groups, group = os.getgroups(), os.getegid()
    try:
        user = pwd.getpwuid(uid)
        others, its = os.getgrouplist(user.pw_name, user.pw_gid), user.pw_gid
    except KeyError:
        others, its = [], uid
    os.setgroups(others)
    try:
        os.setegid(its)
        os.seteuid(uid)
        fd = open_regular(path, follows_links=True)
    finally:
        os.seteuid(own)
        os.setegid(group)
        os.setgroups(groups)
    if os.fstat(fd).st_uid != uid:
        os.close(fd)
        raise OSError(errno.EPERM, "its owner is not the user of the launch", path)
    return fd


def read_regular(path: str, limit: int, *, follows_links: bool = False, only_own: bool = False) -> bytes:
    """Read the whole of a regular file, as `open_regular` opens it.

    Args:
        path: the file.
        limit: the most bytes that it may have.
        follows_links: whether its last part may be a symbolic link.
        only_own: whether it must belong to this user, and nobody else may write it.

    Raises:
        OSError: no regular file, not readable, larger (EFBIG), or another user's (EPERM); it has a `filename`.
    """
    with open(open_regular(path, follows_links=follows_links), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if only_own and (status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise OSError(errno.EPERM, "another user owns it, or may write it", path)
        size = status.st_size
        data = b"" if size > limit else file.read(size + 1)  # a read reserves what it asks for
        while data and len(data) <= limit and (piece := file.read(min(READ_CHUNK, limit + 1 - len(data)))):
            data += piece  # it grows, or is of /proc
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
