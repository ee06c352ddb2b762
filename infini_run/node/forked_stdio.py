"""Pipes for a rank that somebody else forks: its own ends, and the ends that the core gets."""

from __future__ import annotations

import os

from infini_run.core.c_structs import INHERIT, PIPE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.core.c_structs import SpawnSpec


def open_stdio(
    spec: SpawnSpec, streams: Sequence[int], console: Sequence[int], made: list[int]
) -> tuple[list[int], list[int]]:
    """Open what a forked rank has as stdio, and change `spec` to the core's side of it.

    Args:
        spec: The rank, as for a start.
        streams: The descriptors among 0, 1, 2 to open.
        console: By descriptor, what it inherits.
        made: Gets every descriptor that this opens.

    Returns:
        The rank's descriptors, one per stream, and the core's ends of the pipes among them.

    Raises:
        OSError: No descriptor is left.
    """
    theirs, ours = [], []
    for stream in streams:
        target = spec.stdio[stream]
        if target == PIPE:
            pair = os.pipe()
            made += pair
            end, own = pair if stream else pair[::-1]
            os.set_blocking(end, False)
            spec.stdio[stream] = end
            ours.append(end)
        else:
            own = os.dup(console[stream] if target == INHERIT else target)
            made.append(own)
            spec.stdio[stream] = INHERIT
        theirs.append(own)
    return theirs, ours
