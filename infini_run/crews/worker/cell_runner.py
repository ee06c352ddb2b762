"""The target of a notebook's crew: each task is a cell, and all cells of a worker share one `__main__`.

What a cell prints goes up as events, before the task's end, so that the notebook shows all of it in the cell that
printed it. Whatever a cell raises is its answer, SystemExit and an interrupt too, and the worker continues.
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import signal
import sys
from types import ModuleType

from infini_run.crews.capture import capture_foreign
from infini_run.crews.protocol import NO_TASK
from infini_run.crews.remote_exception import from_exception
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType, FrameType
    from typing import Any, TextIO

    from infini_run.crews.worker.context import Context

NO_VARIABLES: Mapping[str, object] = {}


@record
class Cell:
    """Code for ranks.

    Args:
        source: the code, with as many lines above it as the notebook shows there.
        name: its file name in tracebacks.
        returns_value: the last expression is the answer; False: the rank prints it, as a console does.
        pushed: variables of the notebook, which the rank gets before the cell.
    """

    source: str
    name: str
    returns_value: bool
    pushed: Mapping[str, object] = NO_VARIABLES


@record
class CellEnd:
    """How a cell ended on a rank: its value, or the kind, the text and the traceback of what it raised."""

    value: object = None
    kind: str = ""
    text: str = ""
    trace: str = ""


class CellStream(io.TextIOBase):
    """stdout or stderr of a worker: whole lines become events. A forked child writes to the worker's own stream."""

    def __init__(self, context: Context, name: str, own: TextIO) -> None:
        self._context = context
        self._name = name
        self._own = own
        self._pid = os.getpid()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> Any:
        return self._own.buffer

    def fileno(self) -> int:
        return self._own.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:
            return self._own.write(text)
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._context.emit((self._name, lines))
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._pid:
            self._own.flush()

    def end_line(self) -> None:
        """Emit an unfinished line."""
        if self._rest:
            self.write("\n")


class CellRunner:
    """Runs cells. SIGINT interrupts a cell, and nothing between cells."""

    def start(self, ctx: Context) -> None:
        own = self._module = ModuleType("__main__")
        vars(own).update(rank=ctx.rank, world_size=ctx.world_size)
        sys.modules["__main__"] = own  # where pickle looks for the classes of cells
        self._streams = CellStream(ctx, "stdout", sys.stdout), CellStream(ctx, "stderr", sys.stderr)
        sys.stdout, sys.stderr = self._streams
        signal.signal(signal.SIGINT, _ignore)

    def task(self, ctx: Context, cell: Cell) -> CellEnd:
        vars(self._module).update(cell.pushed)
        linecache.cache[cell.name] = len(cell.source), None, cell.source.splitlines(keepends=True), cell.name
        codes, error = capture_foreign(_compiled, cell)
        value = None
        if codes is None:
            assert error is not None
            error.with_traceback(None)  # its frames are of this package
        else:
            value, error = self._run(ctx, codes)
        for stream in self._streams:
            stream.end_line()
        if error is None:
            return CellEnd(value=value)
        failed = from_exception(error, NO_TASK)
        return CellEnd(kind=failed.kind, text=failed.text, trace=failed.trace)

    def _run(self, ctx: Context, codes: list[CodeType]) -> tuple[object, BaseException | None]:
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # in C: tracebacks show no frame of it
                ctx.checkpoint()  # an interrupt may precede it
                return capture_foreign(self._evaluate, codes)
            finally:
                signal.signal(signal.SIGINT, _ignore)
        except KeyboardInterrupt as interrupt:  # the only one per cell
            signal.signal(signal.SIGINT, _ignore)
            return None, interrupt

    def _evaluate(self, codes: list[CodeType]) -> object:
        value = None
        for code in codes:
            value = eval(code, vars(self._module))
        return value


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. The worker's programs would inherit SIG_IGN."""


def _compiled(cell: Cell) -> list[CodeType]:
    """Return the code of a cell, and apart from it that of an expression at its end."""
    tree = ast.parse(cell.source, cell.name)
    last: list[ast.stmt] = tree.body[-1:] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    body = ast.Module(tree.body[: len(tree.body) - len(last)], tree.type_ignores)
    codes = [compile(body, cell.name, "exec")]
    if last and cell.returns_value:
        assert isinstance(last[0], ast.Expr)
        codes.append(compile(ast.Expression(last[0].value), cell.name, "eval"))
    elif last:
        codes.append(compile(ast.Interactive(last), cell.name, "single"))
    return codes
