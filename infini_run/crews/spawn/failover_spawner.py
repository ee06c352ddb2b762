"""Workers of a crew on several hosts, which may lose one: its workers then restart on another one.

The ranks are in blocks, one per host of the request without the spares. A block is on one host at a time, and a host
usually has one block. After the loss of its host a block goes to a spare. Without a spare, and if `nnodes=(MIN, MAX)`
allows it, the block goes to the host with fewest blocks, which then runs them side by side. It moves only when
nothing of it can live on the old host any more (multinode/head/independent_nodes.py).
"""

from __future__ import annotations

import time

from infini_run.crews.spawn.remote_spawner import RankBlock, RemoteSpawner
from infini_run.errors import NodeLost, UsageError, counted
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.crews.spawn.nodes_thread import NodesThread
    from infini_run.crews.spawn.remote_node import RemoteNode
    from infini_run.errors import InfiniRunError

_NEVER = float("inf")


class FailoverSpawner(RemoteSpawner):
    """Arguments as for a RemoteSpawner, with `spares` or a range of `nnodes`."""

    is_independent = True

    def __init__(self, hosts: Sequence[str] = (), **given: Any) -> None:
        super().__init__(hosts, **given)
        self._options = replace(self._options, keep_going=True)  # a spawn server that fails stops no other
        self._hosts: list[RemoteNode] = []  # of each block

    @property
    def end_error(self) -> InfiniRunError | None:
        """Why no host is reachable any more; None: some host is."""
        return self._link.error() if self._link is not None and self._link.is_over else None

    @property
    def join_timeout_s(self) -> float:
        """How long workers wait for a host, in seconds."""
        return self._options.join_timeout_s

    def _wait_for_nodes(self, link: NodesThread) -> None:
        """Wait once for as many hosts as there are, for those that may be missing not longer than join_window."""
        if not self._hosts:
            try:
                self._hosts = self._choose_hosts(link)
            except BaseException:
                self.close()
                raise

    def _choose_hosts(self, link: NodesThread) -> list[RemoteNode]:
        """Return the host of each block, as soon as there are enough."""
        options, total = self._options, len(self._nprocs)
        link.wait(lambda: len(_up(link)) >= options.least_nodes or _is_hopeless(link), options.join_timeout_s)
        link.wait(lambda: len(_up(link)) == total or _is_hopeless(link), options.join_window_s)
        if _is_hopeless(link):
            raise link.refusal or link.error()
        up = _up(link)
        if len(up) < options.least_nodes:
            here = f"{len(up)} of at least {counted(options.least_nodes, 'host')} joined"
            places = {node.index for node in up}
            missing = [host.name for at, host in enumerate(self._node_list.hosts) if at not in places]
            after = f"after {options.join_timeout_s:g} s (join_timeout)"
            raise NodeLost(f"{here} {after}; missing: {', '.join(missing[:8])}", "", -1)
        if len({node.nproc for node in up}) > 1:
            each = ", ".join(f"{node.name}:{node.nproc}" for node in up)
            raise UsageError(f"hosts with different numbers of workers cannot replace each other: {each}")
        return [up[block % len(up)] for block in range(options.nnodes)]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        self.open()
        return len(self._hosts) * self._hosts[0].nproc

    # ---- blocks

    def start_due_s(self, ranks: Sequence[int]) -> float:
        """Return when these workers can restart (monotonic); infinite: there is no host for them yet, and `watchers`
        wake when that may change."""
        due_s = -_NEVER
        for block in self._blocks_of(ranks):
            node = self._hosts[block]
            if _is_well(node):
                continue
            if node.problem is None or self._find_host(block) is None:
                return _NEVER
            due_s = max(due_s, self._fence_s(node))
        return due_s

    def _fence_s(self, node: RemoteNode) -> float:
        """Return until when workers of a lost host may live."""
        assert self._link is not None
        if any(other is not node and other.peer is node.peer for other in self._link.world.nodes):
            return -_NEVER  # its agent has started another process there, after the end of all that this one had
        return node.peer.fence_s

    def _blocks_of(self, ranks: Sequence[int]) -> list[int]:
        return sorted({rank // self._hosts[0].nproc for rank in ranks})

    def _find_host(self, block: int) -> RemoteNode | None:
        """Return the host for a block: a spare, or else the one with fewest blocks, if enough are left."""
        assert self._link is not None
        size = self._hosts[block].nproc
        up = [node for node in _up(self._link) if node.nproc == size]
        spares = [node for node in up if node not in self._hosts]
        if spares:
            return spares[0]
        may_share = self._options.least_nodes < self._options.nnodes and len(up) >= self._options.least_nodes
        return min(up, key=self._hosts.count, default=None) if may_share else None

    def _blocks(self, ranks: Sequence[int]) -> list[RankBlock]:
        for block in self._blocks_of(ranks):
            node = self._hosts[block]
            if not _is_well(node):
                if node.problem is None or self._fence_s(node) > time.monotonic():  # it was lost just now
                    raise NodeLost(f"lost {node.name}, whose workers may still be alive", "", -1)
                host = self._find_host(block)
                if host is None:
                    raise NodeLost(f"lost {self._hosts[block].name}, and no other host is left", "", -1)
                self._hosts[block] = host
                if block == 0:
                    self._rendezvous = ("", 0)  # rank 0 has listened there
        size = self._hosts[0].nproc
        return [RankBlock(node=node, first=block * size, size=size) for block, node in enumerate(self._hosts)]


def _is_well(node: RemoteNode) -> bool:
    """Return whether that node can start workers."""
    return bool(node.nproc) and node.problem is None and not node.peer.is_leaving


def _up(link: NodesThread) -> list[RemoteNode]:
    return [node for node in link.world.nodes if _is_well(node)]


def _is_hopeless(link: NodesThread) -> bool:
    """Return whether workers will never start there."""
    return link.is_over or link.refusal is not None
