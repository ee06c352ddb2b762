"""Where a launch and its ranks put files: shared memory, the folder for temporary files, the home directory."""

from __future__ import annotations

import os

from infini_run.doctor.finding import Finding, failing, note, ok
from infini_run.plan.program import MEMORY, NEW_S, is_folder_name
from infini_run.system.secure_files import count_abandoned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_DOCKERS = 64 << 20  # bytes of /dev/shm in a container of Docker or Kubernetes
_LEAST = 100 << 20  # bytes of a folder for temporary files


def check_files(environ: Mapping[str, str]) -> list[Finding]:
    """Look at /dev/shm, at what infini-run has left there, at the folder for temporary files and at HOME."""
    return [check_memory(MEMORY), check_leftovers(MEMORY), check_temporary(environ), check_home(environ)]


def check_memory(folder: str) -> Finding:
    """Look at /dev/shm. folder: its path."""
    needs = "NCCL and the data loaders of PyTorch fail without it"
    if not os.path.isdir(folder):
        return failing(folder, f"does not exist: {needs}")
    reason = _not_writable(folder)
    if reason:
        return failing(folder, f"cannot be written ({reason}): {needs}")
    size, free = _space(folder)
    if free <= _DOCKERS:
        return note(
            folder,
            f"{free >> 20} of {size >> 20} MiB are free: SIGBUS may kill data loaders and NCCL; use docker run "
            "--shm-size=8g, or an emptyDir with medium: Memory",
        )
    return ok(folder, f"{free >> 20} of {size >> 20} MiB are free for data loaders and NCCL")


def check_leftovers(folder: str) -> Finding:
    """Look for what launches have left that were killed together with their guards. folder: of /dev/shm."""
    name = "left-over files"
    try:
        found = [f"{folder}/{entry}" for entry in os.listdir(folder) if is_folder_name(entry)]
    except OSError:
        return ok(name, f"{folder} cannot be listed")
    abandoned = count_abandoned(found, NEW_S)
    others = len(found) - abandoned
    verb = "belongs" if others == 1 else "belong"
    more = f"; {others} {verb} to running launches or other users" if others else ""
    if not abandoned:
        return ok(name, f"killed launches left none{more}")
    what = "a folder" if abandoned == 1 else f"{abandoned} folders"
    return note(name, f"{what} in {folder}, of killed launches: the next launch removes them{more}")


def check_temporary(environ: Mapping[str, str]) -> Finding:
    """Look at the folder for temporary files: TMPDIR, else /tmp."""
    name, folder = "temporary files", environ.get("TMPDIR") or "/tmp"
    reason = _not_writable(folder)
    if reason:
        text = f"{folder} cannot be written ({reason}): Python, PyTorch, and kernel compilers keep files there"
        return failing(name, f"{text}; set TMPDIR to another folder")
    _, free = _space(folder)
    if free < _LEAST:
        return note(name, f"{folder} has {free >> 20} MiB left: programs that compile kernels may need more")
    return ok(name, f"{folder}, {_size(free)} are free")


def check_home(environ: Mapping[str, str]) -> Finding:
    """Look at the home directory."""
    folder = environ.get("HOME", "")
    caches = "PyTorch, Triton, and Hugging Face have no place for caches, so ranks fail or compile each time"
    if not folder:
        return note("HOME", f"is not set: {caches}")
    reason = _not_writable(folder)
    if reason:
        return note("HOME", f"{folder} cannot be written ({reason}): {caches}")
    _, free = _space(folder)
    if free < _LEAST:
        return note("HOME", f"{folder} has {free >> 20} MiB left for caches and checkpoints")
    return ok("HOME", f"{folder}, {_size(free)} are free")


def _not_writable(folder: str) -> str:
    """Return why no file can be created there; empty: one can. Mode bits do not show a read-only or full file
    system."""
    probe = os.path.join(folder, f".infini-run-doctor-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        os.unlink(probe)
    except OSError as error:
        return str(error.strerror)
    return ""


def _space(folder: str) -> tuple[int, int]:
    """Return the bytes of its file system, and how many of them are free for this user."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _size(size: int) -> str:
    return f"{size >> 30} GiB" if size >= 10 << 30 else f"{size >> 20} MiB"
