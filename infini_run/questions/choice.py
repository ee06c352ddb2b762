"""Which launch a question is about: its id, a unique beginning of it, or the pid of one of its processes."""

from __future__ import annotations

from infini_run.errors import UsageError
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.control.launches import FoundLaunch

_NAMED = 4  # launches that an error names


def choose_launch(found: Sequence[FoundLaunch], origin: str, word: str) -> FoundLaunch:
    """Return the launch that a question is about.

    Args:
        found: The launches of this machine.
        origin: The question, as it was given.
        word: The launch, as it was given. Empty: the only one.

    Raises:
        UsageError: There is none, there are several, or it cannot be asked.
    """
    fitting = list(found) if not word else _by_pid(found, int(word)) if word.isdecimal() else _by_id(found, word)
    asked = f"{origin} {word}" if word else origin
    if not fitting:
        what = "not a launch that runs here" if word else "no launch runs here"
        raise UsageError(f"{asked}: {what}; run infini-run --list")
    if len(fitting) > 1:
        names = ", ".join(each.launch_id for each in fitting[:_NAMED])
        names += f", and {len(fitting) - _NAMED} more" if len(fitting) > _NAMED else ""
        raise UsageError(f"{asked}: {len(fitting)} launches run here ({names}); add the id of one")
    if fitting[0].facts is None:
        raise UsageError(f"{asked}: {fitting[0].launch_id} {fitting[0].problem}; run infini-run --list")
    return fitting[0]


def _by_id(found: Sequence[FoundLaunch], word: str) -> list[FoundLaunch]:
    same = [each for each in found if each.launch_id == word]
    return same or [each for each in found if each.launch_id.startswith(word)]


def _by_pid(found: Sequence[FoundLaunch], pid: int) -> list[FoundLaunch]:
    of_launcher = [each for each in found if each.pid == pid]
    mark = _mark(pid)
    return of_launcher or [each for each in found if mark and each.launch_id == mark]


def _mark(pid: int) -> str:
    """The id of the launch whose process it is; empty: not known."""
    name = f"{MARKER_VARIABLE}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return ""
    return next((each[len(name) :].decode("utf-8", "replace") for each in variables if each.startswith(name)), "")
