"""What one rank was doing when somebody looked: as a few lines, as a file, as JSON. Pure."""

from __future__ import annotations

from infini_run.errors import printable
from infini_run.record import record
from infini_run.report.text import duration_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.report.torch_records import CollectiveRecord
    from infini_run.system.procfs import ProcessSnapshot

NO_PROGRESS = "no progress"  # the reason of a rank that may be busy
TRIGGERED = "it sent WATCHDOG=trigger"
SUSPENDED, AT_TERMINAL = "suspended by a signal", "waits for the terminal"  # at the end of a reason
BEFORE_STOP = "seen before the stop"  # that of a rank when another one has failed
BEFORE_RESTART = "seen before its program restarts"  # the same, with --restart_scope=program
LOOK_S, STOP_S = 0.7, 0.9  # from the failure to the end of that look, and to the stop: all nodes look meanwhile
_LATER_S = 0.1  # a sooner look counts as the same moment
_NAMED, _FRAMES = 3, 4  # processes and Python frames in the few lines
MAIN_THREAD = '"MainThread"'
_POOL, _OTHERS = "(concurrent/futures/", 16  # where the main thread waits for a thread; threads that are compared
_JOINS = ("Thread.join (threading.py:", "join (threading.py:", "_shutdown (threading.py:")


@record
class HangSnapshot:
    """One rank at one moment.

    Attributes:
        rank, pid, host: Which rank.
        time_s: When, in seconds since the epoch.
        kind: `hung`, or `late` (not ready in time); empty: another rank was the reason to look.
        why: The reason, or when infini-run looked (BEFORE_STOP, BEFORE_RESTART).
        status: Its last STATUS=.
        processes: The processes of the rank, with their threads.
        python: The stacks of its processes, from py-spy.
        python_note: Why a stack is missing.
        file: The file that has all of this as text.
        finding: The number of the hang on its node.
        is_sure: infini-run looked twice, 2 s apart. The next fields have what both looks agree on.
        frames: The Python frames of its telling_thread, innermost first.
        beside: The frames of its other threads, if the main thread waits for one of several.
        wait: The kernel's function, or how a rank exited.
        state: The letter of its state; `X`: it exited.
        cpu: How many CPUs it used between the two looks. None: unknown.
        records: The last collectives in each process group of torch.
        output_s: When its last output or message came, in seconds since the epoch. None: none came.
        idle_s: Since when it uses no CPU, in seconds since the epoch. None: it uses CPU.
        progress: Its highest PROGRESS=. None: none came.
        progress_s: When that came.
        gpu: How busy its GPUs are, from 0 to 1. None: unknown.
        program: With several programs, the name of the rank's program.
        program_rank: Its rank in that program.
        later_s: How long after `why` was measured this was seen, in seconds.
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
    beside: tuple[str, ...] = ()
    wait: str = ""
    state: str = ""
    cpu: float | None = None
    records: tuple[CollectiveRecord, ...] = ()
    output_s: float | None = None
    idle_s: float | None = None
    progress: int | None = None
    progress_s: float | None = None
    gpu: float | None = None
    program: str = ""
    program_rank: int = 0
    later_s: float = 0.0

    @property
    def name(self) -> str:
        """What people call the rank: `rank 3`, or `trainer 3`."""
        return f"{self.program} {self.program_rank}" if self.program else f"rank {self.rank}"

    @property
    def sentence(self) -> str:
        """Return `hung: no output and no CPU used for 30 s`, or `was not ready after 30 s`."""
        return f"hung: {self.why}" if self.kind == "hung" else self.why

    def lines(self) -> list[str]:
        """Return what it waits in: its processes with the kernel's functions, then the innermost Python frames."""
        found = [f"  status: {self.status}"] if self.status else []
        if self.signs():
            found.append(f"  {self.signs()}")
        waits = [f"{p.name} ({p.pid}) {waits_in(p)}" for p in self.processes]
        if waits:
            more = f", and {len(waits) - _NAMED} more" if len(waits) > _NAMED else ""
            found.append(f"  in: {', '.join(waits[:_NAMED])}{more}")
        if self.python:
            found += [f"  | {line}" for line in main_frames(self.python[0])[:_FRAMES]]
        elif self.python_note:
            found.append(f"  no Python stack: {self.python_note}")
        return found

    def signs(self) -> str:
        """Return when the signs of life stopped: `last signs, 2.0 s later: output 12.0 s ago, CPU 12.0 s ago,
        PROGRESS=7 14.2 s ago, GPU 0%`. Empty: none was seen.

        The reason counts until the first look, and these times until the last one.
        """
        times = (("output", self.output_s), ("CPU", self.idle_s), (f"PROGRESS={self.progress}", self.progress_s))
        now_s = self.time_s
        signs = [f"{name} {duration_text(max(0.0, now_s - at_s))} ago" for name, at_s in times if at_s is not None]
        if self.gpu is not None:
            signs.append(f"GPU {self.gpu * 100:.0f}%")
        later = f", {duration_text(self.later_s)} later" if self.kind and self.later_s >= _LATER_S else ""
        return f"last signs{later}: {', '.join(signs)}" if signs else ""

    def text(self) -> str:
        """Return the whole snapshot, for people."""
        import time

        when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.time_s))
        lines = [f"{when} {self.name} on {self.host}, pid {self.pid}: {self.sentence or 'seen beside another'}"]
        if self.status:
            lines.append(f"status: {self.status}")
        if self.signs():
            lines.append(self.signs())
        for process in self.processes:
            lines.append(f"process {process.pid} {process.name} {process.state}")
            for thread in process.threads:
                waits = thread.wchan or "-"
                waits += f" ({thread.waits_for})" if thread.waits_for else ""
                lines.append(f"  thread {thread.tid} {thread.name} {thread.state} {waits} syscall {thread.syscall}")
                lines += [f"    {frame}" for frame in thread.stack]
        for text in self.python:
            lines += ["", *text.splitlines()]
        if self.python_note:
            lines += ["", f"no Python stack: {self.python_note}"]
        if self.records:
            lines.append("")
        for each in self.records:
            pending = ", pending" if each.is_pending else ""
            lines.append(f"process group {each.group} ({each.about}): {each.text(each.number)}{pending}")
        return "\n".join([*(printable(line) for line in lines), "", ""])

    def to_json(self) -> dict[str, Any]:
        """Return what `Report.to_json` has of it: lists, texts, and numbers; None for what is unknown."""
        return {
            "rank": self.rank,
            "program": self.program or None,
            "program_rank": self.program_rank,
            "pid": self.pid,
            "host": self.host,
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
            "collectives": [_record_json(each) for each in self.records],
            "signs": {
                "output": self.output_s,
                "cpu": self.idle_s,
                "progress": self.progress_s,
                "progress_value": self.progress,
                "gpu": self.gpu,
            },
            "python": list(self.python),
            "python_note": self.python_note or None,
            "file": self.file or None,
        }


def _record_json(each: CollectiveRecord) -> dict[str, Any]:
    return {
        "group": each.group,
        "about": each.about or None,
        "members": list(each.members),
        "number": each.number,
        "pending": each.is_pending,
        "names": list(each.names),
    }


def _thread_json(thread: Any) -> dict[str, Any]:
    return {
        "tid": thread.tid,
        "name": thread.name,
        "state": thread.state,
        "wchan": thread.wchan or None,
        "syscall": thread.syscall or None,
        "waits_for": thread.waits_for or None,
        "stack": list(thread.stack),
    }


def waits_in(process: ProcessSnapshot) -> str:
    """Return what its main thread waits in: `anon_pipe_read (pipe)`, else the number of the system call, else its
    state."""
    thread = process.threads[0] if process.threads else None
    if thread is None or thread.state == "R":
        return f"state {process.state}"
    number = thread.syscall.partition(" ")[0]
    where = thread.wchan or (f"syscall {number}" if number.isdigit() else f"state {thread.state}")
    return f"{where} ({thread.waits_for})" if thread.waits_for else where


def telling_thread(text: str) -> list[str]:
    """Return the lines of the thread that shows where a process is, as py-spy wrote them; empty: there is none.

    That is the main thread, or the only one where none is called so. If the main thread only waits for the one
    other thread to end, the program runs there.
    """
    main, others = _threads_of(text)
    if len(others) == 1 and any(line.strip().startswith(_JOINS) for line in main[1:3]):
        return others[0]
    return main


def _threads_of(text: str) -> tuple[list[str], list[list[str]]]:
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            threads.append([line])
        elif threads and line.startswith("    "):
            threads[-1].append(line)
    main = next((thread for thread in threads if MAIN_THREAD in thread[0]), threads[0] if threads else [])
    return main, [thread for thread in threads if thread is not main]


def other_threads(text: str) -> dict[str, tuple[str, ...]]:
    """Return the frames of the other threads by thread id, if the main thread waits for one of them, and which one is
    unknown; else nothing."""
    main, others = _threads_of(text)
    joins = len(others) > 1 and any(line.strip().startswith(_JOINS) for line in main[1:3])
    if not joins and not any(_POOL in line for line in main[1:5]):
        return {}
    return {
        "".join(thread[0].split()[1:2]): tuple(line.strip() for line in thread[1:]) for thread in others[:_OTHERS]
    }


def main_frames(text: str) -> list[str]:
    """Return the frames of the thread that shows where a process is, innermost first."""
    return [line.strip() for line in telling_thread(text)[1:]]


def without_line(frame: str) -> str:
    """Return a frame without its line: `step (train.py)`."""
    head, colon, line = frame.rpartition(":")
    return f"{head})" if colon and line.rstrip(")").isdigit() else frame
