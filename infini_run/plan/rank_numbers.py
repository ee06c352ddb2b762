"""The numbers of ranks: from node to node, and of several programs through all of them, in their order. Pure.

A launch of one program is one of several with one, whose name is "". A plain launch has one node, and needs none of
this.
"""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.plan.model import RankRange
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infini_run.options.launch_options import Options


def spans_of(counts: Sequence[int]) -> list[RankRange]:
    """Return the ranks of each node, from their numbers: those of all nodes before it come first.

    Args:
        counts: How many ranks each node has; at least one node.
    """
    world_size, most, first = sum(counts), max(counts), 0
    spans = []
    for count in counts:
        spans.append(RankRange(first=first, world_size=world_size, most=most))
        first += count
    return spans


def spans_on(counts: Sequence[int]) -> list[RankRange]:
    """Return the ranks of one of several programs on each node. Nodes without any don't count.

    Args:
        counts: How many ranks of it each node has; at least one node.
    """
    spans, at, nnodes = [], 0, sum(count > 0 for count in counts)
    for span, count in zip(spans_of(counts), counts, strict=True):
        spans.append(replace(span, node=at, nnodes=nnodes))
        at += count > 0
    return spans


class RankNumbers:
    """The numbers of all ranks of a launch.

    Args:
        names: Of the programs.
        sizes: How many ranks each has on all nodes.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names = names
        self.firsts = [sum(sizes[:at]) for at in range(len(sizes))]
        self.world_size = sum(sizes)
        self._sizes = sizes

    def programs(self) -> dict[int, str]:
        """Return the program of each rank."""
        rows = zip(self.names, self.firsts, self._sizes, strict=True)
        return {rank: name for name, first, size in rows for rank in range(first, first + size)}

    def find(self, name: str, rank: int) -> int:
        """Return the number of a rank of a program; -1: there is none."""
        at = self.names.index(name) if name in self.names else -1
        return self.firsts[at] + rank if at >= 0 and 0 <= rank < self._sizes[at] else -1

    def number(self, rank: int | str, flag: str = "") -> int:
        """Return the number of a rank that somebody names by its number, or by its program: `trainer:1`.

        Args:
            rank: What somebody gave.
            flag: The flag that has it, for the message.

        Raises:
            UsageError: There is no such rank.
        """
        where = f"{flag}: " if flag else ""
        name, _, digits = str(rank).rpartition(":")
        number = rank if isinstance(rank, int) else self.find(name, int(digits))
        if 0 <= number < self.world_size:
            return number
        if isinstance(rank, int) or name not in self.names:
            if not isinstance(rank, int) and flag:
                raise UsageError(f"{where}unknown program {name}; use {', '.join(self.names)}")
            raise UsageError(f"{where}unknown rank {rank}; use ranks 0 to {self.world_size - 1}")
        last = self._sizes[self.names.index(name)] - 1
        raise UsageError(f"{where}unknown rank {rank}; use {name}:0 to {name}:{last}")

    def place(self, number: int) -> tuple[str, int]:
        """Return the program of a rank, and its number there."""
        at = max((at for at, first in enumerate(self.firsts) if first <= number), default=0)
        return self.names[at], number - self.firsts[at]

    def in_options(self, options: Options) -> Options:
        """Return the options with numbers in place of the ranks that they name by program. Raises as `number`."""
        shown, reader = options.ranks_on_console, options.stdin
        return replace(
            options,
            ranks_on_console=shown and tuple(self.number(rank, "--ranks_on_console") for rank in shown),
            stdin=reader if reader in ("all", "none") else self.number(reader, "--stdin"),
        )


class NodeRanks:
    """The ranks of one node, in the order of its processes.

    Args:
        spans: Those of each program.
    """

    def __init__(self, spans: Sequence[range] = ()) -> None:
        self.spans = spans

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    def __iter__(self) -> Iterator[int]:
        return (rank for span in self.spans for rank in span)

    def __contains__(self, rank: object) -> bool:
        return any(rank in span for span in self.spans)

    def index(self, rank: int) -> int:
        """Return which process of the node a rank is."""
        before = 0
        for span in self.spans:
            if rank in span:
                return before + rank - span.start
            before += len(span)
        raise ValueError(f"{rank} is not here")
