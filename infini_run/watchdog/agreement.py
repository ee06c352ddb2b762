"""What two looks at one rank agree on. Pure.

A rank that computes is somewhere else at each look, and one that hangs is not. So what both looks have is where the
rank really is, and only that may name it.
"""

from __future__ import annotations

from infini_run.record import replace
from infini_run.report.hang_snapshot import (
    MAIN_THREAD,
    main_frames,
    other_threads,
    telling_thread,
    waits_in,
    without_line,
)

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
    is_unread = not (first.python or second.python)  # there is only what the kernel says
    is_readable = bool(frames) or is_unread or not any(process.is_python for process in second.processes)
    state = both[0].state if both[0].state == both[1].state else ""
    return replace(
        second,
        is_sure=is_readable or state in ("T", "D"),
        frames=frames,
        beside=_beside(first, second),
        wait=both[0].wait if both[0].wait == both[1].wait else "",
        state=state,
        cpu=None if cpu_s is None or apart_s <= 0 else max(0.0, cpu_s / apart_s),
    )


def _beside(first: HangSnapshot, second: HangSnapshot) -> tuple[str, ...]:
    """Return the frames of the other threads that both looks have, as HangSnapshot has them: of each rank in the same
    order."""
    before, after = _threads_beside(first), _threads_beside(second)
    return tuple(
        frame
        for frames in sorted(common_frames(before[tid], after[tid]) for tid in before if tid in after)
        for frame in frames
    )


def _threads_beside(snapshot: HangSnapshot) -> dict[str, tuple[str, ...]]:
    python = next((process for process in snapshot.processes if process.is_python), None)
    return {} if python is None else other_threads(_text_of(python.pid, snapshot.python))


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
    """Return the frames of that process, as far as py-spy has written any."""
    text = _text_of(pid, texts)
    return tuple(main_frames(text)) if text else ()


def _text_of(pid: int, texts: Sequence[str]) -> str:
    return next((text for text in texts if text.startswith(f"Process {pid}:")), "")


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


def is_at_rest(first: ProcessSnapshot, second: ProcessSnapshot, text: str) -> bool:
    """Return whether the thread that shows where a process is, by the first look's text, is in the same system call
    with the same stack: so its Python frames are the same, too, and need not be read again (proc_pid_syscall(5))."""
    before, after = _telling_call(first, text), _telling_call(second, text)
    return before == after and len(before.split()) > 2


def _telling_call(process: ProcessSnapshot, text: str) -> str:
    head = next(iter(telling_thread(text)), "")
    number = str(process.pid) if MAIN_THREAD in head else "".join(head.split()[1:2])
    return next((thread.syscall for thread in process.threads if str(thread.tid) == number), "")
