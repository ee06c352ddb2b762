"""The socket of the service: this user's alone from its creation on, and with no reads for anybody else.

The one rule: the kernel's word decides who may come in (SO_PEERCRED, unix(7)), before a byte of theirs is read. The
file's mode keeps others out as well; directories that others may write would let them put another in its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct

from infini_run.errors import UsageError, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 107  # bytes of a path: sun_path of unix(7), and its NUL
_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class UnixListener:
    """A listening socket. Its file goes with it, unless somebody has put another one there."""

    def __init__(self, path: str) -> None:
        """Raise UsageError if there is no safe way to make it there, or somebody already listens there."""
        above, name = os.path.split(os.path.abspath(path))
        above = os.path.realpath(above)  # what the check sees is what the bind uses
        self.path = os.path.join(above, name)
        if len(os.fsencode(self.path)) > _LONGEST:
            raise UsageError(f"--socket={self.path}: expected a path of at most {_LONGEST} bytes; use a shorter one")
        check_directories(above)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _alone(above):
                _make_room(self.path)
                self._listen()
            self._file = _identity(self.path)
        except OSError as error:
            self.socket.close()
            raise UsageError(f"--socket={self.path}: cannot create it: {error.strerror}; use another path") from None
        except UsageError:
            self.socket.close()
            raise

    def _listen(self) -> None:
        before = os.umask(0o177)  # bind(2) makes the file: 0600 from the first moment on
        try:
            self.socket.bind(self.path)
        finally:
            os.umask(before)
        self.socket.listen(_BACKLOG)

    def close(self) -> None:
        """Close the socket. Safe twice; the framework may have closed the socket itself."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self.path) == self._file:
                os.unlink(self.path)
        self._file = (0, 0)
        self.socket.close()


def check_directories(above: str) -> None:
    """Check the directories from the root down to `above` (without links). Only this user and root may change what is
    in them, save where the sticky bit protects each one's own. Raises UsageError."""
    if not os.path.isdir(above):
        raise UsageError(f"--socket: {above} is not a directory; run mkdir -m 700 {above}")
    while True:
        found = os.stat(above)
        if found.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"--socket: {above} belongs to another user, who could replace the socket; use a directory of "
                "your own"
            )
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise UsageError(f"--socket: others can write in {above}, and replace the socket; run chmod go-w {above}")
        if above == "/":
            return
        above = os.path.dirname(above)


@contextlib.contextmanager
def _alone(above: str) -> Iterator[None]:
    """Let one check at a time: of two that start at once, the second finds the first one's socket live."""
    fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_room(path: str) -> None:
    """Remove what a dead service left. Raises UsageError if it lives, or is something else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(f"--socket={path}: already exists, and is not your socket; use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        result = probe.connect_ex(path)
        if result in (0, errno.EAGAIN):  # EAGAIN: it lives, and is busy
            who = f" (process {_credentials(probe)[0]})" if result == 0 else ""
            raise UsageError(f"--socket={path}: already in use by a service{who}; use another path, or stop it")
    if result != errno.ECONNREFUSED:
        raise OSError(result, os.strerror(result))
    os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the other end, as they were when it connected or listened."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def refusal(connection: socket.socket) -> str:
    """Return why a client may not come in; "" for this user."""
    pid, uid = _credentials(connection)
    if uid == os.geteuid():
        return ""
    return printable(f"refused a connection of user {uid} (process {pid}): this service is only for its owner")
