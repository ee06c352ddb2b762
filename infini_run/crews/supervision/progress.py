"""The progress of the ranks, where the caller wants to see it: rich in a terminal, tqdm in a notebook, else no
drawing. Both are extras."""

from __future__ import annotations

import sys

from infini_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ProgressDisplay:
    """Shows nothing."""

    def begin(self, world_size: int) -> None:
        """Begin an attempt with `ranks` ranks."""

    def progress(self, rank: int, done: float, of: float) -> None:
        """Show how much of its task a rank has done."""

    def status(self, rank: int, text: str) -> None:
        """Show what it is doing."""

    def close(self) -> None:
        """Close the drawing. Safe twice."""


class MeanBar(ProgressDisplay):
    """One bar: the mean of all ranks. progress: of rich.progress or tqdm, behind one face."""

    def __init__(self, bar: Any, world_size: int) -> None:
        self._bar = bar
        self.begin(world_size)

    def begin(self, world_size: int) -> None:
        self._parts = [0.0] * world_size

    def progress(self, rank: int, done: float, of: float) -> None:
        self._parts[rank] = min(1.0, done / of) if of > 0 else 0.0
        self._bar.show(sum(self._parts) / len(self._parts))

    def status(self, rank: int, text: str) -> None:
        self._bar.show_text(f"rank {rank}: {text}")

    def close(self) -> None:
        self._bar.close()


class _Tqdm:
    def __init__(self, name: str) -> None:
        from importlib.util import find_spec

        if "ipykernel" in sys.modules and find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm
        else:  # tqdm.auto warns of a notebook without ipywidgets
            from tqdm import tqdm

        self._bar = tqdm(total=100, desc=name, bar_format="{desc} {bar} {percentage:3.0f}%{postfix}")

    def show(self, part: float) -> None:
        self._bar.update(100 * part - self._bar.n)

    def show_text(self, text: str) -> None:
        self._bar.set_postfix_str(text)

    def close(self) -> None:
        self._bar.close()


class _Rich:
    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(file=sys.stderr), auto_refresh=False)
        self._name = name
        self._task = self._progress.add_task(name, total=1.0)
        self._progress.start()

    def show(self, part: float) -> None:
        self._progress.update(self._task, completed=part)
        self._progress.refresh()

    def show_text(self, text: str) -> None:
        self._progress.update(self._task, description=f"{self._name} ({text})")
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def open_show(progress: object, name: str, world_size: int) -> ProgressDisplay:
    """Return the drawing. progress: False, True (rich in a terminal, tqdm in a notebook, else nothing), "rich", or
    "tqdm". Raises UsageError for any other, or without the extra."""
    if progress not in (None, False, True, "rich", "tqdm"):
        raise UsageError(f"progress={progress!r}: expected True, False, 'rich', or 'tqdm'")
    if not progress:
        return ProgressDisplay()
    kind = progress if isinstance(progress, str) else "tqdm" if "ipykernel" in sys.modules else "rich"
    if progress is True and kind == "rich" and not getattr(sys.stderr, "isatty", bool)():
        return ProgressDisplay()
    try:
        return MeanBar(_Rich(name) if kind == "rich" else _Tqdm(name), world_size)
    except ImportError as error:
        raise UsageError(f"progress={progress!r}: needs {kind}; run pip install {kind} ({error})") from None
