"""What one rank was doing when somebody looked: as a few lines, as a file, as JSON. Pure."""

from __future__ import annotations

from infini_run.errors import printable
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.system.procfs import ProcessSnapshot

NO_PROGRESS = "no progress"  # the reason of a rank that may be busy
_NAMED, _FRAMES = 3, 4  # processes and Python frames in the few lines


@record
class HangSnapshot:
    """One rank at one moment.

    kind: hung, late (not ready in time), or "" where another rank was the reason. why: in words. status: its last
    STATUS=. python: what py-spy said of its processes; python_note: why it said nothing of one. file: where all of
    it is written. finding: the number of the hang on its node. is_sure: there were two looks, 2 s apart. What both
    agree on: frames, the Python frames of the main thread, innermost first; wait, the kernel's function; state, the
    letter of its state (`X`: the rank has exited). cpu: how much it used between them, in CPUs.
    """

    rank: int
    pid: int
    host: str
    time_s: float
    kind: str = ""
    why: str = ""
    status: str = ""
    processes: tuple[ProcessSnapshot, ...] = ()
    python: tuple[str, ...] = ()
    python_note: str = ""
    file: str = ""
    finding: int = 1
    is_sure: bool = False
    frames: tuple[str, ...] = ()
    wait: str = ""
    state: str = ""
    cpu: float | None = None

    @property
    def sentence(self) -> str:
        """`hung: no output and no CPU used for 30 s`, `was not ready after 30 s`."""
        return f"hung: {self.why}" if self.kind == "hung" else self.why

    def lines(self) -> list[str]:
        """What it waits in: its processes with the kernel's functions, then the innermost Python frames."""
        found = [f"  status: {self.status}"] if self.status else []
        waits = [f"{p.name} ({p.pid}) {waits_in(p)}" for p in self.processes]
        if waits:
            more = f", and {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
            found.append(f"  in: {', '.join(waits[:_NAMED])}{more}")
        if self.python:
            found += [f"  | {line}" for line in main_frames(self.python[0])[:_FRAMES]]
        elif self.python_note:
            found.append(f"  no Python stack: {self.python_note}")
        return found

    def text(self) -> str:
        """All of it, for people."""
        import time

        when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.time_s))
        lines = [f"{when} rank {self.rank} on {self.host}, pid {self.pid}: {self.sentence or 'seen beside another'}"]
        if self.status:
            lines.append(f"status: {self.status}")
        for process in self.processes:
            lines.append(f"process {process.pid} {process.name} {process.state}")
            for thread in process.threads:
                waits = thread.wchan or "-"
                lines.append(f"  thread {thread.tid} {thread.name} {thread.state} {waits} syscall {thread.syscall}")
                lines += [f"    {frame}" for frame in thread.stack]
        for text in self.python:
            lines += ["", *text.splitlines()]
        if self.python_note:
            lines += ["", f"no Python stack: {self.python_note}"]
        return "\n".join([*(printable(line) for line in lines), "", ""])

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "time": self.time_s,
            "kind": self.kind or None,
            "why": self.why or None,
            "status": self.status or None,
            "processes": [
                {"pid": p.pid, "name": p.name, "state": p.state, "threads": [_thread_json(t) for t in p.threads]}
                for p in self.processes
            ],
            "sure": self.is_sure,
            "frames": list(self.frames),
            "wait": self.wait or None,
            "state": self.state or None,
            "cpu": self.cpu,
            "python": list(self.python),
            "python_note": self.python_note or None,
            "file": self.file or None,
        }


def _thread_json(thread: Any) -> dict[str, Any]:
    return {
        "tid": thread.tid,
        "name": thread.name,
        "state": thread.state,
        "wchan": thread.wchan or None,
        "syscall": thread.syscall or None,
        "stack": list(thread.stack),
    }


def waits_in(process: ProcessSnapshot) -> str:
    """Return what its main thread waits in: a kernel function, else the number of the system call, else its state."""
    thread = process.threads[0] if process.threads else None
    if thread is None or thread.state == "R":
        return f"state {process.state}"
    number = thread.syscall.partition(" ")[0]
    return thread.wchan or (f"syscall {number}" if number.isdigit() else f"state {thread.state}")


def main_frames(text: str) -> list[str]:
    """Return the frames of the main thread, innermost first; of the only one where none is called so."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            threads.append([line])
        elif threads and line.startswith("    "):
            threads[-1].append(line)
    main = next((thread for thread in threads if '"MainThread"' in thread[0]), threads[0] if threads else [""])
    return [line.strip() for line in main[1:]]


def without_line(frame: str) -> str:
    """Return a frame without its line: `step (train.py)`."""
    head, colon, line = frame.rpartition(":")
    return f"{head})" if colon and line.rstrip(")").isdigit() else frame
