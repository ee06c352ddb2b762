"""What the kernel, or a sandbox, lets the core do: each facility is tried, because versions say little in containers.
Numbers of system calls from 424 on are the same on all architectures (syscalls(2))."""

from __future__ import annotations

import ctypes
import errno
import os

from infini_run.doctor.finding import Finding, failing, note, ok

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN, _CLONE3, _CLOSE_RANGE = 424, 434, 435, 436
_TO_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9
_GET_SUBREAPER = 37  # PR_GET_CHILD_SUBREAPER, Linux 3.4
_OLDEST = (4, 18)  # on which this is tested: RHEL 8
_ABOVE_ALL = 0xFFFFFFFF  # no descriptor has this number


def check_kernel() -> list[Finding]:
    """Look at the version, and try what the core uses if the kernel has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return [_version(), _pidfd(libc), _subreaper(libc), _memfd(), _close_range(libc), _clone3(libc)]


def _version() -> Finding:
    uname = os.uname()
    text = f"Linux {uname.release} on {uname.machine}"
    if _numbers(uname.release) < _OLDEST:
        return note("kernel", f"{text}: older than 4.18, the oldest that infini-run is tested on")
    return ok("kernel", text)


def _numbers(release: str) -> tuple[int, int]:
    """Return the first two numbers of `5.14.0-427.el9`."""
    major, _, rest = release.partition(".")
    minor = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return (int(major), int(minor)) if major.isdecimal() and minor else (0, 0)


def _call(libc: ctypes.CDLL, number: int, *args: int) -> int:
    """Return a system call's result, or -errno."""
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(arg) for arg in args)))
    return -ctypes.get_errno() if result < 0 else result


def _pidfd(libc: ctypes.CDLL) -> Finding:
    fd = _call(libc, _PIDFD_OPEN, os.getpid(), 0)
    if fd < 0:
        why = "Linux 5.3 has it" if fd == -errno.ENOSYS else os.strerror(-fd)
        return note("pidfd", f"not available ({why}): signals go to process numbers, each checked just before")
    try:
        sent = _call(libc, _PIDFD_SEND_SIGNAL, fd, 0, 0, _TO_GROUP)
    finally:
        os.close(fd)
    text = "infini-run signals and reaps exactly its ranks, never a process that reuses a number"
    if sent in (-errno.EINVAL, -errno.ENOSYS):
        return ok("pidfd", f"{text}; process groups by a checked number (by pidfd since Linux 6.9)")
    return ok("pidfd", f"{text}; it signals exactly their process groups, too")


def _subreaper(libc: ctypes.CDLL) -> Finding:
    found = ctypes.c_int()
    if libc.prctl(_GET_SUBREAPER, ctypes.byref(found), 0, 0, 0) < 0:
        return note("subreaper", "refused: infini-run does not adopt orphans of ranks, and searches for them")
    return ok("subreaper", "infini-run adopts orphans of ranks, and ends them")


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("infini-run-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return failing(
            "memfd", f"refused ({error.strerror}): infini-job, and jobs that may lose nodes (--spares), need it"
        )
    return ok("memfd", "available; infini-job, and jobs that may lose nodes (--spares), need it")


def _close_range(libc: ctypes.CDLL) -> Finding:
    if _call(libc, _CLOSE_RANGE, _ABOVE_ALL, _ABOVE_ALL, 0) < 0:
        return ok("close_range", "not available (Linux 5.9 has it): the guard closes its descriptors one by one")
    return ok("close_range", "the guard closes all its descriptors at once")


def _clone3(libc: ctypes.CDLL) -> Finding:
    result = _call(libc, _CLONE3, 0, 0)
    if result == -errno.ENOSYS:
        return ok(
            "clone3",
            "not available (Linux 5.3, or a sandbox): ranks start by clone, without a cgroup each",
        )
    if result == -errno.EPERM:
        return ok("clone3", "a sandbox blocks it: ranks start by clone, without a cgroup each")
    return ok("clone3", "a rank can start in a cgroup")
