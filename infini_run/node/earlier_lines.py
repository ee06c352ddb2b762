"""What the ranks of a launch have written so far, for a process that follows it.

A log is read by that process, up to where it ends now. Without a log there are the last words of stderr.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from infini_run.core.group import Group
    from infini_run.node.resources import LaunchResources
    from infini_run.plan.model import Worker

MOST_RANKS = 256  # whose last words are kept for one process: 4 MiB


def earlier_lines(
    workers: Mapping[int, Worker], count: int, group: Group, resources: LaunchResources
) -> list[dict[str, Any]]:
    """Return, for each stream of each rank, its log and where that ends, or its last words.

    Args:
        workers: The ranks, by their indices in the group.
        count: How many lines of each are wanted.
        group: The processes.
        resources: What the launch has open.
    """
    found = []
    for index, worker in list(workers.items())[:MOST_RANKS]:
        logs = list(_logs(resources, worker.rank))
        found += logs
        if not logs and worker.stderr.piped:
            lines = group.tail(index).split(b"\n")[-count - 1 :]
            found.append({"rank": worker.rank, "stream": 1, "text": b"\n".join(lines).decode("utf-8", "replace")})
    return found


def _logs(resources: LaunchResources, rank: int) -> Iterator[dict[str, Any]]:
    """The paths of descriptors cost no look at the file's disk, and neither does the place of the next write."""
    fds = resources.logs.get(rank, -1), resources.error_logs.get(rank, -1)
    for stream, fd in enumerate(fds):
        try:
            path, end = os.readlink(f"/proc/self/fd/{fd}"), os.lseek(fd, 0, os.SEEK_CUR)
        except OSError:  # there is none, or no /proc
            continue
        yield {"rank": rank, "stream": stream, "path": path, "end": end, "has_both": fds[1] < 0}
