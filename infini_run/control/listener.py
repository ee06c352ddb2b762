"""A control socket that outlives the ranks: of a head, and of a launch that may restart.

The core makes that of a launch on one node without restarts (csrc/io/control.c). While an attempt runs, the core
serves this one, too.
"""

from __future__ import annotations

import os
from _socket import AF_UNIX, MSG_DONTWAIT, MSG_NOSIGNAL, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket
from fcntl import LOCK_NB, LOCK_SH, flock
from time import time

from infini_run.control.launch_facts import ABOUT, COUNTS, UCRED, pack_counts
from infini_run.core.group import forking
from infini_run.plan.model import control_address
from infini_run.plan.program import has_room, remove_launch_folder
from infini_run.system.fork_hooks import close_link
from infini_run.system.frames import pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_BACKLOG = 64
_TURN = 16  # connections that are taken at a time


NO_PLACE = (  # the notice of a launch without a control socket
    "cannot make a control socket in /dev/shm, /tmp, or TMPDIR: --list and other questions do not find this launch"
)


class ControlListener:
    """A folder of a launch, with a control socket that listens there until `close`.

    Attributes:
        folder: The folder. Empty: there is none.
        start_s: When it was made, since the epoch.
    """

    def __init__(self) -> None:
        self.folder = ""
        self.start_s = time()
        self._lock_fd = -1
        self._socket: socket | None = None

    def open(self, folders: Iterable[str], files: int = 0) -> bool:
        """Make the first of these folders that takes sockets, and listen there. Return whether one does.

        Args:
            folders: Their names.
            files: How many more files the folder needs room for.
        """
        for folder in folders:
            if (address := control_address(folder)) and self._make(folder, address, files):
                return True
            self.close()
        return False

    def _make(self, folder: str, address: str, files: int) -> bool:
        try:
            os.mkdir(folder, 0o700)
        except OSError:  # there is one already: of an agent on this machine, or a stranger's
            return False
        self.folder = folder
        try:
            os.chmod(folder, 0o700)  # a umask may have taken the owner's rights
            self._lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            flock(self._lock_fd, LOCK_SH | LOCK_NB)  # a folder that nobody holds may be removed
            self._socket = socket(AF_UNIX, SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.bind(address)
            os.chmod(address, 0o600)
            self._socket.listen(_BACKLOG)
        except OSError:
            return False
        return has_room(folder, files, of_bytes=0)

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1: there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def greeted(self, about: bytes, counts: Mapping[str, int], progress: int) -> Iterator[int]:
        """Take the connections that wait, and yield the descriptors of those that have got the greeting. Forks of
        other threads wait meanwhile: a child would keep a connection, for whose end its client waits.

        Args:
            about: What the launch is (about_text).
            counts, progress: As for `pack_counts`.
        """
        assert self._socket is not None
        data = pack(ABOUT, about) + pack(COUNTS, pack_counts(counts, progress))
        for _ in range(_TURN):
            with forking:
                try:
                    fd, _ = self._socket._accept()  # type: ignore[attr-defined]
                except OSError:
                    return
                os.set_inheritable(fd, False)
                os.set_blocking(fd, False)
                if _greet(fd, data):
                    yield fd

    def empty(self) -> None:
        """Remove what ranks have left in the folder."""
        with os.scandir(self.folder) as entries:
            left = [entry for entry in entries if entry.path != control_address(self.folder)]
        for entry in left:
            try:
                os.unlink(entry.path)
            except OSError:
                from infini_run.system.secure_files import remove_folder

                remove_folder(entry.path)

    def stop_listening(self) -> None:
        """Remove the socket. Safe twice."""
        ours, self._socket = self._socket, None
        if ours is None:
            return
        if self.folder:  # first: whoever finds the file is to find that somebody listens
            try:  # noqa: SIM105  contextlib is slow to import
                os.unlink(control_address(self.folder))
            except OSError:  # there was none, or somebody has removed it
                pass
        close_link(ours)

    def close(self) -> None:
        """Remove the socket and the folder. Safe twice."""
        self.stop_listening()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
        folder, self.folder = self.folder, ""
        if folder:
            remove_launch_folder(folder)

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child; the folder is the parent's."""
        self.folder = ""
        self.close()


def _greet(fd: int, data: bytes) -> bool:
    """Greet a connection of this user or of root, and close any other. Return whether it stays."""
    client = socket(fileno=fd)
    try:
        uid = UCRED.unpack(client.getsockopt(SOL_SOCKET, SO_PEERCRED, UCRED.size))[1]
        if uid in (0, os.geteuid()) and client.send(data, MSG_DONTWAIT | MSG_NOSIGNAL) == len(data):
            client.detach()
            return True
    except OSError:
        pass
    client.close()
    return False
