"""Where a file began that ranks read as stdin: those that restart read it from there."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.plan.model import Plan


def stdin_offset(plan: Plan) -> int:
    """Return the position of a file that ranks read as stdin; -1 without one. A pipe and a terminal do not come
    back."""
    try:
        is_read = any(worker.stdin != "null" for worker in plan.workers)
        return os.lseek(0, 0, os.SEEK_CUR) if is_read and stat.S_ISREG(os.fstat(0).st_mode) else -1
    except OSError:
        return -1


def rewind_stdin(offset: int) -> None:
    """Set that position again. -1: do nothing."""
    try:
        if offset >= 0:
            os.lseek(0, offset, os.SEEK_SET)
    except OSError:
        return  # a host may have closed it meanwhile
