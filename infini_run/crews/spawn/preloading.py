"""In a zygote of functions: the imports of a preload (warm/imports.py), guarded against launches in them."""

from __future__ import annotations

from infini_run.crews.capture import capture_foreign
from infini_run.crews.worker.import_guard import import_for_worker
from infini_run.errors import printable
from infini_run.warm.imports import Preload, find_device, find_threads, threads_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_OF_CORE = "irun-drop"  # takes messages (csrc/io/rights_drop.c), and has no lock that a fork would miss


class FunctionPreload(Preload):
    """The preload of functions.

    Args:
        variables: As for Preload.
    """

    def __init__(self, variables: Collection[str]) -> None:
        super().__init__(variables, "preload", _import_one)

    def run(self, names: Sequence[str]) -> str:
        """Run the preload as Preload.run does."""
        return printable(super().run(names))


def _import_one(name: str) -> BaseException | None:
    return capture_foreign(import_for_worker, name)[1]


def find_refusal() -> str:
    """Return why a fork of this process is unsafe, or ""."""
    device = find_device()
    return refuse_threads() or (f"the imports opened {device}, which a fork cannot use" if device else "")


def refuse_threads() -> str:
    """Return which threads a fork would lack, or "". One of them may hold the lock of an import for ever."""
    threads = [name for name in find_threads() if name != _OF_CORE]
    return f"{threads_text(threads)}, which a fork would lack" if threads else ""
