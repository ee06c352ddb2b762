"""Several workers of a crew at once: what `crew[1:3]` returns, and the answers of all of them."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Generic, TypeVar

from infini_run.crews.api.crew_status import table_of_workers
from infini_run.crews.errors import AskTimeout
from infini_run.crews.supervision.future import Ask, table_of_asks
from infini_run.number_arguments import read_wait
from infini_run.public_names import public_names

T = TypeVar("T")
R = TypeVar("R")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from typing import Any, Protocol

    from infini_run.crews.api.crew_status import CrewStatus
    from infini_run.crews.api.worker_handle import WorkerHandle

    class CrewOfSlice(Protocol[T, R]):
        """What a slice needs of its crew."""

        def worker(self, rank: int) -> WorkerHandle[T, R]: ...
        def status(self) -> CrewStatus: ...
        def _ask_each(self, task: T, ranks: Sequence[int]) -> Asks[R]: ...
        def _call_each(
            self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Sequence[int]
        ) -> Asks[Any]: ...


class Asks(tuple[Ask[R], ...], Generic[R]):
    """The asks of several workers, one each, in the order of their ranks: a tuple that waits, or that you await."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> list[R]:
        """Return what all of them returned, in order.

        Args:
            timeout: how long to wait for all, in seconds; None: no limit.

        Raises:
            BaseException: the first failure, as soon as it happens; the other workers continue.
            TimeoutError: the time is up.
        """
        for ask in self:
            ask.prepare_wait()
        done, not_done = wait(self, read_wait("timeout", timeout), FIRST_EXCEPTION)
        for ask in self:
            if ask in done and (ask.cancelled() or ask.has_failed):
                ask.result()
        if not_done:
            raise AskTimeout
        return [ask.result() for ask in self]

    def cancel(self) -> None:
        """Cancel those that have not ended."""
        for ask in self:
            ask.cancel()

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self._await_results().__await__()

    async def _await_results(self) -> list[R]:
        from asyncio import gather

        return await gather(*(ask._await_result() for ask in self))

    def __dir__(self) -> list[str]:
        return public_names(self)

    def __repr__(self) -> str:
        return f"<Asks: {', '.join(map(repr, self))}>"

    def _repr_html_(self) -> str:
        """Return how each ask is as a table, for a notebook."""
        return table_of_asks(f"Asks: {len(self)}", self)


class CrewSlice(Generic[T, R]):
    """Some workers of a crew, through all their restarts: `crew[1:3]`, `crew[:]`. len() counts them, and iterating
    gives the handle of each.

    Attributes:
        ranks: their ranks, in order.
    """

    def __init__(self, crew: CrewOfSlice[T, R], ranks: Sequence[int]) -> None:
        self._crew = crew
        self.ranks = tuple(ranks)

    def __dir__(self) -> list[str]:
        return public_names(self)

    def ask(self, task: T) -> Asks[R]:
        """Submit the same task to each of these workers; it is pickled once.

        Args:
            task: any object that pickles.

        Returns:
            One future per worker.

        Raises:
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self._crew._ask_each(task, self.ranks)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Asks[Any]:
        """Call a method of the object of each of these workers.

        Args:
            method: its name; the target is a class, or an object.
            args, kwargs: its arguments, which are pickled once.

        Returns:
            One future per worker.

        Raises:
            UsageError: the target has no such method.
            UnpicklableError: with the path of the part that does not pickle.
            MessageTooLong: the task exceeds the limit of a channel.
            CrewFailed, CrewClosed: the crew failed, or is closed.
        """
        return self._crew._call_each(method, args, kwargs, self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[WorkerHandle[T, R]]:
        return map(self._crew.worker, self.ranks)

    def __repr__(self) -> str:
        return f"<CrewSlice of ranks {', '.join(map(str, self.ranks))}>"

    def _repr_html_(self) -> str:
        """Return the state of each of these workers as a table, for a notebook."""
        workers = self._crew.status().workers
        return table_of_workers(repr(self)[1:-1], [workers[rank] for rank in self.ranks])
