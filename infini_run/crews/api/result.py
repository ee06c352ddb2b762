"""What a function returned on every rank."""

from __future__ import annotations

import operator
from typing import Generic, TypeVar

from infini_run.crews.html_table import html_table
from infini_run.public_names import public_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import overload

R_co = TypeVar("R_co", covariant=True)


class LaunchResult(Generic[R_co]):
    """The results of a launch, by rank: `result.rank(3)`, `for value in result`, `len(result)`. As in a tuple:
    `result[3]`, `result[-1]`, `result[:2]` (a tuple). Or by place: `result.index("node1", 0)`. hosts: the names of
    the hosts, in order; by_host: the results of each."""

    __slots__ = ("_places", "_values")

    def __init__(self, values: Sequence[R_co], places: Sequence[tuple[str, int]]) -> None:
        self._values = tuple(values)
        self._places = tuple(places)

    def rank(self, rank: int) -> R_co:
        """Return what a rank returned.

        Args:
            rank: from 0.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < len(self._values):
            raise IndexError(f"rank {rank}: unknown rank; use 0 to {len(self._values) - 1}")
        return self._values[rank]

    def index(self, host: str, local_rank: int) -> R_co:
        """Return what the rank in a place returned.

        Args:
            host: its name, one of `hosts`.
            local_rank: of the rank on that host, from 0.

        Raises:
            LookupError: there is no rank in that place.
        """
        if (host, local_rank) in self._places:
            return self._values[self._places.index((host, local_rank))]
        if host not in self.hosts:
            raise KeyError(f"host {host!r}: unknown host; use {', '.join(self.hosts)}")
        count = len(self.by_host[host])
        raise IndexError(f"local rank {local_rank}: unknown on {host}; use 0 to {count - 1}")

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host for host, _ in self._places))

    @property
    def by_host(self) -> dict[str, list[R_co]]:
        found: dict[str, list[R_co]] = {}
        for (host, _), value in zip(self._places, self._values, strict=True):
            found.setdefault(host, []).append(value)
        return found

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, rank: int) -> R_co: ...
        @overload
        def __getitem__(self, rank: slice) -> tuple[R_co, ...]: ...

    def __getitem__(self, rank: int | slice) -> R_co | tuple[R_co, ...]:
        if isinstance(rank, slice):
            return self._values[rank]
        at = operator.index(rank)
        return self.rank(at + len(self._values) if -len(self._values) <= at < 0 else at)

    def __iter__(self) -> Iterator[R_co]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if type(other) is not LaunchResult:
            return NotImplemented
        return (self._values, self._places) == (other._values, other._places)

    __hash__ = None  # type: ignore[assignment] # what was returned may have none

    def __dir__(self) -> list[str]:
        return public_names(self)

    def __repr__(self) -> str:
        return f"LaunchResult({list(self._values)!r})"

    def _repr_html_(self) -> str:
        """Return what each rank returned as a table, for a notebook."""
        places = zip(self._places, self._values, strict=True)
        rows = ((rank, host, local_rank, repr(value)) for rank, ((host, local_rank), value) in enumerate(places))
        count = len(self._values)
        title = f"LaunchResult of {count} rank{'s' * (count != 1)}"
        return html_table(title, ("rank", "host", "local rank", "value"), rows)
