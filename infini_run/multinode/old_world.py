"""Whether ranks of a job's earlier attempts still live on this machine, as an agent that has come again can tell."""

from __future__ import annotations

import os
import select
import time

from infini_run.value_types import MARKER_VARIABLE

_LIMIT = 1 << 20  # bytes of an environment that are read


def machine_id() -> str:
    """Return what two processes have in common that see the same processes: the boot of the machine, and the PID
    namespace (proc(5), boot_id; pid_namespaces(7)); "" if it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
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


def _living(launch_id: str) -> list[int] | None:
    """The processes that are left; None: it cannot be known."""
    if not hasattr(os, "pidfd_open"):
        return None
    own, found = os.getpid(), []
    try:
        names = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != own]
    except OSError:
        return None
    mark = os.fsencode(f"{MARKER_VARIABLE}={launch_id}")
    for name in names:
        try:
            if mark in _read(f"/proc/{name}/environ") or mark in _read(f"/proc/{name}/cmdline"):
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] not in b"ZX":
                        found.append(int(name))
        except PermissionError:  # another user's: none of ours
            continue
        except OSError:  # gone meanwhile
            continue
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return b"\0" + file.read(_LIMIT)


def _wait_for_end(pid: int, end_s: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(max(0.0, end_s - time.monotonic()) * 1000))
    finally:
        os.close(fd)
