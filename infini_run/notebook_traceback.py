"""The traceback that IPython shows to the caller of infini-run: the caller's frames, in the shell's style.

IPython prints each frame with its source, and the frames of infini-run say nothing about the caller's mistake. Python
itself shows every frame, and so does IPython for other errors. Imported only when IPython shows one.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FILE = re.compile(r'File "([^"\n]+)", line (\d+)')
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def render_shown() -> list[str]:
    """Return the lines of the exception that IPython is about to show, which it keeps in sys.last_value. A reference
    from an exception to itself would keep the variables of its callers until the next collection."""
    shown = sys.last_value
    assert shown is not None
    return render(shown)


def render(error: BaseException) -> list[str]:
    """Return the lines of an exception, for IPython's `_render_traceback_`."""
    from IPython import get_ipython

    shell: Any = get_ipython()
    above: BaseException | None = error
    seen = set()
    while above is not None and id(above) not in seen:
        seen.add(id(above))
        above.__traceback__ = _without_ours(above.__traceback__)
        above = above.__cause__ or (None if above.__suppress_context__ else above.__context__)
    chain = error.__cause__, error.__context__, error.__suppress_context__
    if hasattr(error.__cause__, "trace"):  # a RemoteError, whose traceback is a note, too
        error.__cause__ = error.__context__ = None
    try:
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = chain
    shown = "\n".join(lines)
    lines += [note for note in getattr(error, "__notes__", ()) if note.partition("\n")[0] not in shown]  # IPython 7
    return [_FILE.sub(partial(_name_cell, shell), line) for line in lines]


def _name_cell(shell: Any, place: re.Match[str]) -> str:
    """Return the place in a rank's traceback as the notebook calls it."""
    name_of = getattr(shell.compile, "format_code_name", None)  # IPython 7 names files after its cells
    cell = name_of and name_of(place[1])
    return place[0] if not cell else f"{' '.join(cell)}, line {place[2]}"


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            kept.append(trace)
        trace = trace.tb_next
    after: TracebackType | None = None
    for one in reversed(kept):
        after = TracebackType(after, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return after
