"""What the kernel knows of processes and descriptors."""

from __future__ import annotations

import os
import select
from pathlib import Path

OURS = ("TEST_RUN", os.urandom(6).hex())  # other tests may run on this machine; theirs are not ours to end


GUARD = "irun-guard"  # what the process is called that outlives a launcher, to end what that has left


def lead_group() -> None:
    """Before exec: be a job as a shell's. The kernel stops no process group that has no parent in its session, as all
    of these tests may be (setpgid(2), orphaned process groups)."""
    os.setpgid(0, 0)


def processes() -> dict[int, tuple[int, str, str]]:
    """pid: (parent, state, name) of every process there is."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            state, parent = stat[stat.rindex(")") + 2 :].split()[:2]
            found[int(entry)] = (int(parent), state, name)
    return found


def children() -> dict[int, str]:
    return {pid: f"{name} {state}" for pid, (parent, state, name) in processes().items() if parent == os.getpid()}


def state_of(pid: int) -> str:
    """The letter that /proc has for it; "" when it is gone."""
    return processes().get(pid, (0, "", ""))[1]


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def marked(mark: bytes = b"INFINI_RUN_ID=") -> dict[int, str]:
    """Live processes that carry the mark of a launch and that of this test run."""
    ours = "=".join(OURS).encode()
    found = {}
    for pid, (_, state, name) in processes().items():
        try:
            strings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_ours = ours in strings and any(string.startswith(mark) for string in strings)
        if pid != os.getpid() and state not in "ZX" and is_ours:
            found[pid] = name
    return found


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def is_full(stream):
    """Whether nothing more fits into a pipe, seen from its reading end."""
    end = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # not by FIONREAD: pages that are not filled count as well (pipe(7))
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)
