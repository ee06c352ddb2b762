"""The errors that only crews raise; errors.py has the tree of all."""

from __future__ import annotations

from infini_run.errors import InfiniRunError


class DrainTimeout(InfiniRunError, TimeoutError):
    """Tasks that a crew had accepted were not done within its drain_s. `tasks`: how many; `ranks`: the workers that
    had some of them."""

    def __init__(self, message: str, tasks: int = 0, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.tasks = tasks
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.tasks, self.ranks)
