"""Where workers are to run, as the caller said it."""

from __future__ import annotations

import os

from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def read_hosts(hosts: Sequence[str] | str | None) -> tuple[str, ...]:
    """Their names; none: this machine. Raises UsageError."""
    if hosts is None or hosts == "":
        return ()
    if hosts == "auto":
        from infini_run.auto import read_file
        from infini_run.sites import detect

        site = detect(os.environ, read_file)
        return tuple(host.name for host in site.hosts) if site is not None and site.nnodes > 1 else ()
    if isinstance(hosts, str):
        return (hosts,)
    found = tuple(hosts)
    if not found or not all(isinstance(host, str) and host for host in found):
        raise UsageError(f"hosts={hosts!r}: give a list of names, or 'auto'")
    return found


def read_nproc(nproc: int | str | Sequence[int], hosts: Sequence[str]) -> int | str | tuple[int, ...]:
    """Of a list, one for each host; of one machine its only number. Raises UsageError."""
    if isinstance(nproc, (str, int)) and not isinstance(nproc, bool):
        return nproc
    counts = tuple(nproc) if isinstance(nproc, (list, tuple)) else ()
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise UsageError(f"nproc_per_node={nproc!r}: a number from 1 on, 'gpu', 'cpu', or a list of numbers")
    if len(counts) != max(1, len(hosts)):
        raise UsageError(f"nproc_per_node={nproc!r}: {len(counts)} numbers for {max(1, len(hosts))} hosts")
    return counts if hosts else counts[0]
