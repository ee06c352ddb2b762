"""What two looks at one rank agree on. Pure.

A rank that computes is somewhere else at each look, and one that hangs is not. So what both looks have is where the
rank really is, and only that may name it.
"""

from __future__ import annotations

from infini_run.record import replace
from infini_run.report.hang_snapshot import main_frames, waits_in, without_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.system.procfs import ProcessSnapshot

_NAMED = 3  # processes


def agreed(first: HangSnapshot, second: HangSnapshot, cpu_s: float | None) -> HangSnapshot:
    """Return the second snapshot with what both agree on.

    Args:
        first: The earlier snapshot.
        second: The later one of the same rank.
        cpu_s: The CPU time that the rank used between them, in seconds. None: unknown.
    """
    apart_s = second.time_s - first.time_s
    both = place_of(first), place_of(second)
    frames = common_frames(both[0].frames, both[1].frames)
    is_readable = bool(frames) or not any(process.is_python for process in second.processes)
    state = both[0].state if both[0].state == both[1].state else ""
    return replace(
        second,
        is_sure=is_readable or state in ("T", "D"),
        frames=frames,
        wait=both[0].wait if both[0].wait == both[1].wait else "",
        state=state,
        cpu=None if cpu_s is None or apart_s <= 0 else max(0.0, cpu_s / apart_s),
    )


def place_of(snapshot: HangSnapshot) -> HangSnapshot:
    """Return a snapshot with where the rank was at that one look."""
    python = next((process for process in snapshot.processes if process.is_python), None)
    named = snapshot.processes[:_NAMED] if python is None else (python,)
    states = [process.threads[0].state if process.threads else process.state for process in named]
    return replace(
        snapshot,
        frames=() if python is None else _frames_of(python.pid, snapshot.python),
        wait=", ".join(waits_in(process) if python else f"{process.name} {waits_in(process)}" for process in named),
        state=next((state for state in "TD" if state in states), states[-1] if states else ""),
    )


def _frames_of(pid: int, texts: Sequence[str]) -> tuple[str, ...]:
    """The frames of that process, as far as py-spy has written any."""
    text = next((text for text in texts if text.startswith(f"Process {pid}:")), "")
    return tuple(main_frames(text)) if text else ()


def common_frames(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """Return the frames that two stacks share, innermost first. A function that is in another line at each look is
    there without a line, and what it calls is not."""
    shared: list[str] = []
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            if without_line(a) == without_line(b):
                shared.append(without_line(a))
            break
        shared.append(a)
    return tuple(reversed(shared))


def is_at_rest(first: ProcessSnapshot, second: ProcessSnapshot) -> bool:
    """Return whether the main thread is in the same system call with the same stack: so its Python frames are the
    same, too, and need not be read again (proc_pid_syscall(5))."""
    before, after = (process.threads[0].syscall if process.threads else "" for process in (first, second))
    return before == after and len(before.split()) > 2
