"""The launches of this machine, found by their folders, and asked over their control sockets.

A folder of another user is looked at by root alone. What is behind its socket must be that user's process: a link
may lead to any socket of the machine.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import time
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from infini_run.control.launch_facts import GREETING, LaunchFacts, greeting_decoder, read_greeting
from infini_run.errors import LinkError
from infini_run.plan.model import control_address
from infini_run.plan.program import PREFIX, folder_bases
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LOST, SILENT = "lost", "does not answer"
_AT_ONCE = 200  # connections: a process may have few descriptors
ANSWER_S = 1.0  # for the greeting, which takes no turn of the launch's
_UCRED = struct.Struct("3i")
_SOCK_FLAGS = 0o2000000 | 0o4000  # SOCK_CLOEXEC, SOCK_NONBLOCK
_STOPPED = ("T", "t")


@record
class FoundLaunch:
    """A launch that was found on this machine.

    Attributes:
        folder: Its folder.
        uid: Its user.
        pid: Its launcher, here; 0: not known.
        facts: What it says of itself. None: it did not answer, or is gone.
        problem: Why there are no facts: `does not answer`, `does not answer (stopped)`, `lost`. Empty: there are.
    """

    folder: str
    uid: int
    pid: int = 0
    facts: LaunchFacts | None = None
    problem: str = ""

    @property
    def launch_id(self) -> str:
        """Its id, which the name of its folder has, too."""
        if self.facts is not None:
            return self.facts.launch_id
        return os.path.basename(self.folder)[len(PREFIX) :][:15]


class _Call:
    """A connection to a launch, until it has said what it is."""

    def __init__(self, folder: str, uid: int) -> None:
        self.folder = folder
        self.uid = uid
        self.pid = 0
        self.socket = socket(AF_UNIX, SOCK_STREAM | _SOCK_FLAGS)
        self.problem = ""
        self.facts: LaunchFacts | None = None
        self._decoder = greeting_decoder()
        self._about: bytes | None = None

    def connect(self) -> bool:
        """Return whether the launch accepts it; `problem` has the reason if not."""
        try:
            self.socket.connect(control_address(self.folder))
            self.pid, uid, _ = _UCRED.unpack(self.socket.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED.size))
        except OSError as error:
            self.problem = LOST if error.errno == errno.ECONNREFUSED else SILENT
            return False
        self.problem = SILENT
        return bool(uid == self.uid)

    def read(self) -> bool:
        """Read what there is; whether nothing more is to come."""
        try:
            data = self.socket.recv(GREETING)
        except BlockingIOError:
            return False
        except OSError:
            return True
        try:
            for _, payload in self._decoder.feed(data):
                if self._about is None:
                    self._about = payload
                else:
                    self.facts, self.problem = read_greeting(self._about, payload), ""
                    return True
        except LinkError:
            return True
        return not data


def connect_to(launch: FoundLaunch) -> socket:
    """Return a connection to a launch that was found, from its greeting on; it does not block. Raises OSError."""
    call = _Call(launch.folder, launch.uid)
    if not call.connect():
        call.socket.close()
        raise OSError(errno.ECONNREFUSED, call.problem)
    return call.socket


def find_folders(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the folders of launches, and their users: those of this user; for root, of everybody.

    Args:
        environ: Has TMPDIR.
    """
    user, found = os.geteuid(), []
    for base in dict.fromkeys(folder_bases(environ)):
        try:
            with os.scandir(base) as entries:
                for entry in entries:
                    if entry.name.startswith(PREFIX) and (uid := _owner(entry)) >= 0 and user in (0, uid):
                        found.append((entry.path, uid))
        except OSError:
            continue
    return found


def _owner(entry: os.DirEntry[str]) -> int:
    """The user of a folder as a launch makes it; -1: it is something else."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return -1
    is_ours = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    return status.st_uid if is_ours else -1


def find_launches(environ: Mapping[str, str], limit_s: float = ANSWER_S) -> list[FoundLaunch]:
    """Return the launches that have a control socket, the oldest first; those that do not answer come last.

    Args:
        environ: Has TMPDIR.
        limit_s: For how long an answer is waited for, in seconds; 200 launches are asked at once.
    """
    folders = [each for each in find_folders(environ) if _has_socket(each[0])]
    found: list[FoundLaunch] = []
    for first in range(0, len(folders), _AT_ONCE):
        found += _ask(folders[first : first + _AT_ONCE], limit_s)
    return sorted(found, key=lambda each: float("inf") if each.facts is None else each.facts.start_s)


def _ask(folders: Sequence[tuple[str, int]], limit_s: float) -> list[FoundLaunch]:
    calls: list[_Call] = []
    try:
        for folder, uid in folders:
            calls.append(_Call(folder, uid))
        _read_all([call for call in calls if call.connect()], time.monotonic() + limit_s)
        return [_found(call) for call in calls]
    finally:
        for call in calls:
            call.socket.close()


def _has_socket(folder: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(control_address(folder)).st_mode)
    except OSError:
        return False


def _read_all(calls: Iterable[_Call], end_s: float) -> None:
    waiting = {call.socket.fileno(): call for call in calls}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            if waiting[fd].read():
                poll.unregister(fd)
                del waiting[fd]


def _found(call: _Call) -> FoundLaunch:
    problem = call.problem
    if problem == SILENT and _state(call.pid) in _STOPPED:
        problem += " (stopped)"
    return FoundLaunch(folder=call.folder, uid=call.uid, pid=call.pid, facts=call.facts, problem=problem)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read(4096).rpartition(b")")[2].lstrip()[0])
    except (OSError, IndexError):
        return ""


def own_launches(found: Sequence[FoundLaunch]) -> list[FoundLaunch]:
    """Return the launches without the parts of one whose head is here, too."""
    heads = {each.launch_id for each in found if each.facts is not None and each.facts.node < 0}
    return [each for each in found if each.facts is None or each.facts.node < 0 or each.launch_id not in heads]
