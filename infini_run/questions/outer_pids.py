"""The pids of a launch in another PID namespace, as --isolate makes one: what they are for the process that asks."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def outer_pids(launcher: int) -> dict[int, int]:
    """Return the pid here of each process below a launcher, by its pid in the launcher's namespace.

    Args:
        launcher: The launcher's pid here; 0: not known.

    Returns:
        Empty: the launcher is in this namespace, or /proc doesn't show it.
    """
    depth = len(_status(launcher)[1]) - 1
    if depth < 1:
        return {}
    children: dict[int, list[tuple[int, int]]] = {}  # by parent: each with its pid there
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent, numbers = _status(int(name))
            if len(numbers) > depth:
                children.setdefault(parent, []).append((int(name), numbers[depth]))
    found, left = {}, [launcher]
    while left:
        for pid, inner in children.pop(left.pop(), ()):
            found[inner] = pid
            left.append(pid)
    return found


def _status(pid: int) -> tuple[int, list[int]]:
    """Return the parent of a process, and its pids from /proc's namespace down to its own (proc_pid_status(5))."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if line.startswith(("PPid:", "NSpid:")))
        return int(fields["PPid"]), [int(number) for number in fields["NSpid"].split()]
    except (OSError, LookupError, ValueError):
        return 0, []


def with_outer_pids(stack: Mapping[str, Any], pids: Mapping[int, int]) -> dict[str, Any]:
    """Return the stacks of a rank, with pids as `outer_pids` has them.

    Args:
        stack: What a launch says of the rank.
        pids: The pids here.
    """
    changed = {**stack, "pid": _outer(stack.get("pid"), pids)}
    processes = stack.get("processes")
    if type(processes) is list:
        found = [
            each if type(each) is not dict else {**each, "pid": _outer(each.get("pid"), pids)} for each in processes
        ]
        changed["processes"] = found
    return changed


def _outer(pid: object, pids: Mapping[int, int]) -> object:
    return pids.get(pid, pid) if type(pid) is int else pid
