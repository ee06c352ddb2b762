"""What to do about a module that a rank's Python lacks: infini-run may be in another environment than the program.

Imported once a rank has failed that this package's own Python runs.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.report.exit import Exit

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]{1,100})'")
_EARLY_S = 10.0  # imports are a program's first lines


def advise(exit_: Exit, argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what to do, after `next: `; "" if this is no failure of that kind.

    Where nobody has seen the rank's stderr, the advice is conditional, and given only if another Python comes first
    on PATH.

    Args:
        exit_: How the rank ended, with its last output.
        argv: Its arguments: the Python that `find_python` has chosen, -u, the program.
        environ: Its environment.
    """
    python, program = argv[0], " ".join(argv[2:5] if argv[2] == "-m" else argv[2:3])
    other = _first_on_path(environ.get("PATH", ""))
    is_other = bool(other) and _folder(other) != _folder(python)
    way = f"{os.path.basename(other)} on PATH is {other}; use infini-run ... {os.path.basename(other)} {program}"
    missing = _missing_module(exit_)
    if missing and is_other:
        return f"{python} ran the program and lacks {missing}; {way}"
    if missing:
        return (
            f"{python} ran the program and lacks {missing}; install it there, or use infini-run ... /PATH/TO/python "
            f"{program}"
        )
    is_unseen = not exit_.last_lines and not exit_.error_message
    is_early = (exit_.end_s or 0.0) - (exit_.start_s or 0.0) < _EARLY_S
    if is_unseen and is_early and is_other:
        return f"if a module is missing: {python} ran the program; {way}"
    return ""


def _missing_module(exit_: Exit) -> str:
    for line in (exit_.error_message, *reversed(exit_.last_lines)):
        found = _MISSING.search(line)
        if found:
            return found[1]
    return ""


def _first_on_path(path: str) -> str:
    """Return the Python that a user would have started; "" without one."""
    for name in ("python", "python3"):
        for folder in path.split(":"):
            if folder[:1] == "/" and os.access(f"{folder}/{name}", os.X_OK):
                return f"{folder}/{name}"
    return ""


def _folder(python: str) -> str:
    """Return the folder of an environment's Python, which identifies it; the file itself is a link to what all have
    in common."""
    return os.path.realpath(os.path.dirname(python))
