"""Whether ranks of a job's earlier attempts still live on this machine, for an agent that rejoined, or that could not
end all of them."""

from __future__ import annotations

import posix
import select
import time
from _functools import partial

from infini_run.lean_os import fsencode
from infini_run.system.poller import READ
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.system.poller import Poller

_LIMIT = 1 << 20  # bytes of an environment that are read


def machine_id() -> str:
    """Return what two processes have in common that see the same processes: the boot of the machine, and the PID
    namespace (proc(5), boot_id; pid_namespaces(7)). It is "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read().strip().decode()
        return f"{boot} {posix.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def wait_until_gone(launch_id: str, limit_s: float) -> bool:
    """Wait until no rank of a launch lives here, and no guard that may have some still to end.

    Args:
        launch_id: of the launch; those of its attempts begin with it.
        limit_s: how long to wait.

    Returns:
        Whether they are gone. False, too, if /proc is not readable or the kernel has no pidfd (Linux before 5.3).
    """
    end_s = time.monotonic() + limit_s
    while pids := _living(launch_id):
        if not all(_wait_for_end(pid, end_s) for pid in pids):
            return False
    return pids is not None


class StuckProcesses:
    """Processes of a launch that SIGKILL did not end at once: those in uninterruptible sleep. It reaps the children
    of this process among them.

    Args:
        launch_id: of the launch; those within it begin with it.
        pids: the known processes, all of them children of this process or unknown to others: the kernel reuses no
            number.
        poller: it waits for their ends.
        on_end: called once, when nothing of the launch lives any more.
        on_unknown: called once instead, if that is unknown: without /proc, or pidfds (Linux before 5.3).
    """

    def __init__(
        self,
        launch_id: str,
        pids: Sequence[int],
        poller: Poller,
        on_end: Callable[[], None],
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        self._launch_id = launch_id
        self._poller = poller
        self._on_end = on_end
        self._on_unknown = on_unknown
        self._fds: set[int] = set()
        self._watch_living(pids)

    def _watch_living(self, known: Sequence[int] = ()) -> None:
        """Look for further ones after the end of the known ones. A process that hangs in the kernel may hold the lock
        of its memory, and a reader of its environment then hangs, too."""
        pids = known or _living(self._launch_id)
        if pids is None or not hasattr(posix, "pidfd_open"):
            self._on_unknown()
            return
        for pid in pids:
            try:
                fd = posix.pidfd_open(pid)
            except ProcessLookupError:
                continue
            except OSError:
                self.close()
                self._on_unknown()
                return
            self._fds.add(fd)
            self._poller.watch(fd, READ, partial(self._on_one_end, fd))
        if not self._fds:
            if known:
                self._watch_living()
            else:
                self._on_end()

    def _on_one_end(self, fd: int) -> None:
        _reap(fd)
        self._close_one(fd)
        if not self._fds:
            self._watch_living()

    def _close_one(self, fd: int) -> None:
        self._fds.discard(fd)
        self._poller.unwatch(fd)
        posix.close(fd)

    def close(self) -> None:
        """Wait no longer. Safe twice."""
        for fd in list(self._fds):
            self._close_one(fd)


def _living(launch_id: str) -> list[int] | None:
    """Return the living processes; None if that is unknown."""
    from infini_run.system.procfs import shows_own_namespace

    if not hasattr(posix, "pidfd_open") or not shows_own_namespace():
        return None
    own, found = posix.getpid(), []
    try:
        names = [name for name in posix.listdir("/proc") if name.isdecimal() and int(name) != own]
    except OSError:
        return None
    marks = [fsencode(f"{MARKER_VARIABLE}={launch_id}{end}") for end in ("\0", ".")]  # its own, or one within it
    for name in names:
        try:
            words = _read(f"/proc/{name}/environ") + _read(f"/proc/{name}/cmdline")
            if any(mark in words for mark in marks):
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] not in b"ZX":
                        found.append(int(name))
        except PermissionError:  # another user's, so not this launch's
            continue
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
            continue
        except OSError:  # no descriptor, no memory
            return None
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return b"\0" + file.read(_LIMIT)


def _wait_for_end(pid: int, end_s: float) -> bool:
    try:
        fd = posix.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(max(0.0, end_s - time.monotonic()) * 1000))
    finally:
        posix.close(fd)


def _reap(pidfd: int) -> None:
    try:
        posix.waitid(posix.P_PIDFD, pidfd, posix.WEXITED | posix.WNOHANG)
    except OSError:
        return  # not a child of this process; or there is no P_PIDFD (Linux before 5.4)
