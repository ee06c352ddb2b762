"""The traceback that IPython shows to the caller of infini-run: the caller's frames, in the shell's style.

IPython prints each frame with its source, and the frames of infini-run say nothing about the caller's mistake. Python
itself shows every frame, and so does IPython for other errors. Imported only when IPython shows one.
"""

from __future__ import annotations

import os
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


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
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    return lines


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
