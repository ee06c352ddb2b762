"""The launches of this machine, found by their folders, and asked over their control sockets.

A folder of another user is looked at by root alone. What is behind its socket must be that user's process: a link
may lead to any socket of the machine. A folder's name is the launch's id, whatever the launch says. Strangers
can give a folder the id of another user's launch, so an id and a user are one launch.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from infini_run.control.launch_facts import GREETING, UCRED, LaunchFacts, greeting_decoder, read_greeting
from infini_run.errors import LinkError
from infini_run.plan.model import control_address
from infini_run.plan.program import MEMORY, NEW_S, PREFIX, folder_bases, is_folder_name
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LOST, SILENT = "lost", "does not answer"
SUSPENDED = f"{SILENT} (suspended)"
_ENDED = "ended"  # meanwhile: it is no launch any more
_AT_ONCE = 200  # connections: a process may have few descriptors
_SOON_S = 0.1  # then one that has not answered is looked at
ANSWER_S = 1.0  # for all greetings, which take no turn of a launch's
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
        problem: Why there are no facts: `does not answer`, `does not answer (suspended)`, `lost`. Empty: there are.
    """

    folder: str
    uid: int
    pid: int = 0
    facts: LaunchFacts | None = None
    problem: str = ""

    @property
    def launch_id(self) -> str:
        """Its id, which the name of its folder has."""
        return _id_of(self.folder)


def _id_of(folder: str) -> str:
    return os.path.basename(folder)[len(PREFIX) :][:15]


class _Call:
    """A connection to a launch, until it has said what it is."""

    def __init__(self, folder: str, uid: int) -> None:
        self.folder = folder
        self.uid = uid
        self.pid = 0
        self.look_s = float("inf")  # when it is looked at
        self.socket = socket(AF_UNIX, SOCK_STREAM | _SOCK_FLAGS)
        self.problem = ""
        self.facts: LaunchFacts | None = None
        self._decoder = greeting_decoder()
        self._about: bytes | None = None

    def connect(self) -> bool:
        """Return whether the launch accepts it; `problem` has the reason if not."""
        self.look_s = time.monotonic() + _SOON_S
        try:
            self.socket.connect(control_address(self.folder))
            pid, uid, _ = UCRED.unpack(self.socket.getsockopt(SOL_SOCKET, SO_PEERCRED, UCRED.size))
        except OSError as error:
            self.problem = {errno.ECONNREFUSED: LOST, errno.ENOENT: _ENDED}.get(error.errno or 0, SILENT)
            if self.problem == LOST and not _has_socket(self.folder):  # so a file or a folder answers, too
                self.problem = _ENDED
            return False
        if uid != self.uid:
            self.problem = _ENDED
            return False
        self.pid, self.problem = pid, SILENT
        return True

    def read(self) -> bool:
        """Read what there is; whether nothing more is to come."""
        try:
            data = self.socket.recv(GREETING)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.problem = _ENDED  # it closes its socket before it greets those that wait
            return True
        try:
            for _, payload in self._decoder.feed(data):
                if self._about is None:
                    self._about = payload
                else:
                    facts = read_greeting(self._about, payload)
                    if facts.launch_id == _id_of(self.folder):
                        self.facts, self.problem = facts, ""
                    return True
        except LinkError:
            return True
        return False


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
                    if is_folder_name(entry.name) and (uid := _owner(entry)) >= 0 and user in (0, uid):
                        found.append((entry.path, uid))
        except OSError:
            continue
    return found


def _owner(entry: os.DirEntry[str]) -> int:
    """Return the user of a folder as a launch makes it, or -1 if it is something else."""
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
        limit_s: For how long answers are waited for, in seconds, however many launches there are.
    """
    user = os.geteuid()
    folders = [each for each in find_folders(environ) if _may_have_socket(*each, user)]
    found = _ask(_in_turns(folders, user), time.monotonic() + limit_s)
    return sorted(found, key=lambda each: float("inf") if each.facts is None else each.facts.start_s)


def _in_turns(folders: Iterable[tuple[str, int]], user: int) -> list[tuple[str, int]]:
    """Return the folders in the order in which to ask: first one of each user, so nobody's many delay another's."""
    counts: dict[int, int] = {}
    turns = []
    for folder, uid in folders:
        counts[uid] = counts.get(uid, 0) + 1
        turns.append((counts[uid], uid != user, uid, folder))
    return [(folder, uid) for _, _, uid, folder in sorted(turns)]


def _ask(folders: Sequence[tuple[str, int]], end_s: float) -> list[FoundLaunch]:
    """Ask the launches in this order, as many at once as there may be connections."""
    left, found = iter(folders), []
    waiting: dict[int, _Call] = {}
    poll = select.poll()
    following = next(left, None)
    try:
        while following is not None or waiting:
            while following is not None and len(waiting) < _AT_ONCE:
                call = _begin(*following) if time.monotonic() < end_s else None
                if call is None and waiting:  # no descriptor is left, or no time
                    break
                if call is None:
                    found.append(FoundLaunch(folder=following[0], uid=following[1], problem=SILENT))
                elif call.connect():
                    waiting[call.socket.fileno()] = call
                    poll.register(call.socket, select.POLLIN)
                else:
                    found.append(_end(call))
                following = next(left, None)
            for fd in _over(waiting, poll, end_s, is_full=following is not None):
                poll.unregister(fd)
                found.append(_end(waiting.pop(fd)))
    finally:
        for call in waiting.values():
            call.socket.close()
    return [each for each in found if each.problem != _ENDED]


def _begin(folder: str, uid: int) -> _Call | None:
    try:
        return _Call(folder, uid)
    except OSError:
        return None


def _may_have_socket(folder: str, uid: int, user: int) -> bool:
    """Return whether a folder is worth a connection. In a stranger's, the name may be a link to another's socket."""
    return bool(control_address(folder)) and (uid == user or _has_socket(folder))


def _has_socket(folder: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(control_address(folder)).st_mode)
    except OSError:
        return False


def _over(waiting: Mapping[int, _Call], poll: select.poll, end_s: float, *, is_full: bool) -> list[int]:
    """Wait for answers once, and return the descriptors of the connections to close.

    Args:
        waiting: The connections, by their descriptors.
        poll: Has these.
        end_s: When all are closed.
        is_full: Others wait for their places: the user with the most leaves those that don't answer soon.
    """
    if not waiting:
        return []
    look_s = min(call.look_s for call in waiting.values())
    ready = poll.poll(max(0.0, min(end_s, look_s) - time.monotonic()) * 1000)
    over = [fd for fd, _ in ready if waiting[fd].read()]
    now_s = time.monotonic()
    if now_s >= end_s:
        return list(waiting)
    if now_s >= look_s:
        users = [call.uid for call in waiting.values()]
        crowd = max(users, key=users.count) if is_full else -1
        for fd, call in waiting.items():
            if now_s >= call.look_s and fd not in over:
                call.look_s = now_s + _SOON_S if is_full else float("inf")  # one that is stopped answers no more
                if call.uid == crowd or _state(call.pid) in _STOPPED:
                    over.append(fd)
    return over


def _end(call: _Call) -> FoundLaunch:
    """Close a connection, and return what is known of the launch."""
    call.socket.close()
    problem = call.problem
    if problem == SILENT and _state(call.pid) in _STOPPED:
        problem = SUSPENDED
    return FoundLaunch(folder=call.folder, uid=call.uid, pid=call.pid, facts=call.facts, problem=problem)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read(4096).rpartition(b")")[2].lstrip()[0])
    except (OSError, IndexError):
        return ""


def remove_lost(found: Sequence[FoundLaunch]) -> None:
    """Remove what killed launches of this user have left: as for a later launch, without a lock and a minute old."""
    paths = [each.folder for each in found if each.problem == LOST and os.path.dirname(each.folder) == MEMORY]
    if paths:
        from infini_run.system.secure_files import remove_abandoned

        remove_abandoned(paths, NEW_S)


def own_launches(found: Sequence[FoundLaunch]) -> list[FoundLaunch]:
    """Return the launches without the parts of one whose head is here, too. A lost one is there once."""
    heads = {(each.uid, each.launch_id) for each in found if each.facts is not None and each.facts.node < 0}
    ours, lost = [], set()
    for each in found:
        whole = each.uid, each.launch_id
        if each.problem == LOST:
            if whole not in lost:
                ours.append(each)
            lost.add(whole)
        elif each.facts is None or each.facts.node < 0 or whole not in heads:
            ours.append(each)
    return ours
