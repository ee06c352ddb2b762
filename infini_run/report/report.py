"""How a launch ended: one Exit per worker, the first failure, our exit code; as text and as JSON.

Pure. The first failure is the earliest to die of its own, never a worker that we had told to stop.
"""

from __future__ import annotations

import os

from infini_run.errors import printable
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.report.hang_snapshot import HangSnapshot

TEXT_LINES = 10
_WORDS = 5  # last lines of stderr that are shown


@record
class Exit:
    """How one worker ended. Times are seconds since the epoch; None: it never came so far.

    Attributes:
        rank: Its global rank.
        local_rank: Its rank on its node.
        host: The name of its node.
        pid: Its process.
        code: Its exit code. None: a signal ended it, it never ran, or its status is unknown.
        signal: The number of the signal that ended it; 0: none.
        dumped_core: It left a core dump.
        out_of_memory: The kernel killed it for memory.
        stopped: It ended after the stop signal of the launcher.
        stuck: SIGKILL did not end it.
        status_lost: Another part of the host program reaped it.
        start_failure: The step between its creation and its program that failed. Empty: none did.
        start_errno: The errno of that step.
        start_s: When it was created.
        ready_s: When it sent READY=1.
        end_s: When it ended; of a lost one, when the last frame came from its node.
        user_s: The CPU time that it used, in seconds.
        system_s: The CPU time of the kernel for it, in seconds.
        max_rss_kib: The most memory that it had resident, in KiB.
        log: The path of its log; empty: none.
        error_message: The message in its error file.
        last_lines: Its last lines on stderr.
        status: Its last STATUS= (sd_notify(3)).
        watchdog_reason: Why the watchdog stopped the job because of it: it hung, or was not ready in time. Empty:
            no.
        lost: Its node was lost, so nobody knows how it ended.
    """

    rank: int
    local_rank: int
    host: str
    pid: int | None = None
    code: int | None = None
    signal: int = 0
    dumped_core: bool = False
    out_of_memory: bool = False
    stopped: bool = False
    stuck: bool = False
    status_lost: bool = False
    start_failure: str = ""
    start_errno: int = 0
    start_s: float | None = None
    ready_s: float | None = None
    end_s: float | None = None
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kib: int = 0
    log: str = ""
    error_message: str = ""
    last_lines: tuple[str, ...] = ()
    status: str = ""
    watchdog_reason: str = ""
    lost: bool = False

    @property
    def is_failure(self) -> bool:
        """It ended badly, and not because we stopped it; or it was what we stopped the job for."""
        if self.lost:
            return not self.stopped
        if self.watchdog_reason:
            return True
        bad = self.code != 0 or self.signal != 0 or bool(self.start_failure)
        return self.end_s is not None and bad and not self.stopped

    @property
    def ended_well(self) -> bool:
        """It ran, and exited 0 by itself."""
        return self.end_s is not None and self.shell_code == 0

    @property
    def shell_code(self) -> int:
        """What a shell would say: its code (126 or 127: it could not be executed), 128 + its signal. 1 where the
        verdict was ours."""
        if self.watchdog_reason or self.lost:
            return 1
        if self.signal:
            return 128 + self.signal
        return 1 if self.code is None else self.code


@record
class LeftoverProcess:
    """A process that outlived the workers.

    Attributes:
        pid: Its number.
        name: Its program name.
        state: Its state letter in /proc (proc_pid_stat(5)) if SIGKILL has not ended it, else empty.
    """

    pid: int
    name: str
    state: str = ""


@record
class Clock:
    """The difference between a node's clock and the head's, which was subtracted from the times of the node's report.

    Attributes:
        host: The node's name.
        offset_s: The difference in seconds.
        bound_s: The error of it, at most, in seconds.
    """

    host: str
    offset_s: float
    bound_s: float


@record
class Report:
    """How a launch ended. With restarts, all is of the last attempt, except `earlier_failures`.

    Attributes:
        launch_id: The launch's id, the value of INFINI_RUN_ID.
        run_id: The id that the user gave (`--rdzv_id`); empty: none.
        host: The name of the launcher's host.
        world_size: How many ranks there were to be.
        start_s: When the first worker was created: seconds since the epoch, by the head's clock.
        end_s: When the last process was gone.
        exits: How each worker ended, by rank.
        first_failure: The worker that failed first, and by itself. None: none did.
        received_signal: The signal from outside that ended the launch; 0: none did.
        forwarded_signals: Signals from outside that were passed on to the ranks.
        user_interrupted: The user ended a single rank by Ctrl-C in its own terminal.
        leftover_processes: The first few processes that outlived the workers.
        leftover_count: How many there were.
        stuck: Processes that SIGKILL did not end.
        notices: Sentences that the user was shown while the job ran.
        snapshots: What ranks were doing when they hung or were late.
        port_in_use: The rendezvous port, if another program listens there; else 0.
        silent: How many nodes have sent no report.
        restarts: How often all ranks were started again.
        earlier_failures: The first failure of each earlier attempt, the last hundred.
        not_restarted: Why no restart followed the last failure. Empty: it is plain.
        clocks: The clocks of the nodes of many.
        error: Why the job ended, if no rank was the cause: a node was lost, or would not begin. Empty: a rank was.
        error_code: The exit code of that.
        lost: The nodes that were lost, each in a sentence.
    """

    launch_id: str
    run_id: str
    host: str
    world_size: int
    start_s: float
    end_s: float
    exits: tuple[Exit, ...]
    first_failure: Exit | None = None
    received_signal: int = 0
    forwarded_signals: tuple[int, ...] = ()
    user_interrupted: bool = False
    leftover_processes: tuple[LeftoverProcess, ...] = ()
    leftover_count: int = 0
    stuck: tuple[LeftoverProcess, ...] = ()
    notices: tuple[str, ...] = ()
    snapshots: tuple[HangSnapshot, ...] = ()
    port_in_use: int = 0
    silent: int = 0
    restarts: int = 0
    earlier_failures: tuple[Exit, ...] = ()
    not_restarted: str = ""
    clocks: tuple[Clock, ...] = ()
    error: str = ""
    error_code: int = 0
    lost: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The launcher's exit code.

        In this order: error_code if there is an `error`; the first failure's code; 128 + received_signal, unless
        every rank exited 0; the code of the first rank that did not exit 0; 1 if something is stuck; 0.
        """
        if self.error:
            return self.error_code
        if self.first_failure is not None:
            return self.first_failure.shell_code
        if self.received_signal and (self.silent or not all(e.ended_well for e in self.exits)):
            return 128 + self.received_signal
        stopped = next((e.shell_code for e in self.exits if e.end_s is not None and e.shell_code), 0)
        return stopped or (1 if self.stuck else 0)

    def text(self) -> str:
        """Return ten lines at most for people: who failed, how, its last output, where to look."""
        first = self._first_of_ranks()
        lines = [f"infini-run: {self.error}{self._restarted()}"] if self.error else []
        others = [] if self.error or self.received_signal else [f"infini-run: {text}" for text in self.lost[:1]]
        if first is not None and not self.user_interrupted:
            after = "" if self.error else self._restarted()
            lines.append(f"infini-run: {_headline(first)}{self._others(first)}{after}")
            lines += self._details(first, TEXT_LINES - len(lines) - len(others))
        lines += others
        for stray in self.stuck[: max(1, TEXT_LINES - len(lines))]:
            lines.append(
                f"infini-run: process {stray.pid} ({stray.name}) did not end by SIGKILL, state {stray.state}; left"
            )
        if self.leftover_processes and len(lines) < TEXT_LINES:
            lines.append(f"infini-run: {self.left_behind()}")
        return "\n".join(printable(line.expandtabs()) for line in lines[:TEXT_LINES])

    def _first_of_ranks(self) -> Exit | None:
        """The first failure that was a rank's own: with a node that was lost, what that may have led to."""
        first = self.first_failure
        if not self.error or (first is not None and not first.lost):
            return first
        failed = [e for e in self.exits if e.is_failure and not e.lost]
        return min(failed, key=lambda e: e.end_s or 0.0, default=None)

    def headline(self) -> str:
        """Return the first failure in a sentence. Empty: there is none."""
        first = self.first_failure
        return "" if first is None else f"{_headline(first)}{self._others(first)}"

    def left_behind(self) -> str:
        """Return a sentence about processes that outlived the workers. Empty: there were none."""
        count = _count(self.leftover_count, self.leftover_processes)
        return f"stopped {count} left behind: {_names(self.leftover_processes)}" if self.leftover_processes else ""

    def _restarted(self) -> str:
        after = f"; after {self.restarts} restart{'s' * (self.restarts > 1)}" if self.restarts else ""
        return after + (f"; not restarted: {self.not_restarted}" if self.not_restarted else "")

    def _details(self, first: Exit, most: int) -> list[str]:
        """What it said and was doing, as much as there is room for; where there is more to read, last."""
        look = next((look for look in reversed(self.snapshots) if look.kind and look.rank == first.rank), None)
        lines = (
            look.lines() if look and first.watchdog_reason else [f"  status: {first.status}"] if first.status else []
        )
        if first.error_message:
            lines.append(f"  error: {first.error_message}")
        last = [f"  log: {first.log}"] if first.log else []
        if look and look.file and first.watchdog_reason:
            last.append(f"  all of it: {look.file}")
        hint = _hint(first) or self._port_hint(first)
        if hint:
            last.append(f"  {hint}")
        room = max(0, most - len(last) - len(lines))
        words = first.last_lines[-min(_WORDS, room) :] if room else ()
        return [*lines[: most - len(last)], *(f"  | {line}" for line in words), *last]

    def _port_hint(self, first: Exit) -> str:
        if not self.port_in_use or first.start_failure:
            return ""
        way = (
            "--standalone takes a free one"
            if self.world_size == len(self.exits)
            else "give every node another --rdzv_endpoint=HOST:PORT"
        )
        return f"next: port {self.port_in_use} is in use by another program; {way}"

    def _others(self, first: Exit) -> str:
        stopped = sum(e.stopped and not e.watchdog_reason and not e.lost for e in self.exits)
        failed = sum(e.is_failure and not e.lost for e in self.exits if e.rank != first.rank)
        said = []
        if failed:
            said.append(f"{failed} more failed")
        if stopped:
            said.append(f"{stopped} {'other was' if stopped == 1 else 'others were'} stopped")
        return f"; {', '.join(said)}" if said else ""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain types for JSON. `format` rises when a field changes."""
        return {
            "format": 2,
            "launch_id": self.launch_id,
            "run_id": self.run_id,
            "host": self.host,
            "world_size": self.world_size,
            "exit_code": self.exit_code,
            "start": self.start_s,
            "end": self.end_s,
            "received_signal": signal_name(self.received_signal) if self.received_signal else None,
            "first_failure": self.first_failure.rank if self.first_failure else None,
            "error": self.error or None,
            "lost": list(self.lost),
            "ranks": [_exit_json(e) for e in self.exits],
            "restarts": self.restarts,
            "earlier_failures": [_exit_json(e) for e in self.earlier_failures],
            "not_restarted": self.not_restarted or None,
            "leftover_processes": [{"pid": stray.pid, "name": stray.name} for stray in self.leftover_processes],
            "leftover_count": max(self.leftover_count, len(self.leftover_processes)),
            "stuck": [{"pid": s.pid, "name": s.name, "state": s.state} for s in self.stuck],
            "notices": list(self.notices),
            "snapshots": [look.to_json() for look in self.snapshots],
            "clocks": [{"host": c.host, "offset": c.offset_s, "bound": c.bound_s} for c in self.clocks],
        }


def _exit_json(exit_: Exit) -> dict[str, Any]:
    return {
        "rank": exit_.rank,
        "local_rank": exit_.local_rank,
        "host": exit_.host,
        "pid": exit_.pid,
        "start": exit_.start_s,
        "ready": exit_.ready_s,
        "end": exit_.end_s,
        "exit_code": exit_.code,
        "signal": signal_name(exit_.signal) if exit_.signal else None,
        "dumped_core": exit_.dumped_core,
        "out_of_memory": exit_.out_of_memory,
        "failed": exit_.is_failure,
        "stopped": exit_.stopped,
        "stuck": exit_.stuck,
        "start_failure": exit_.start_failure or None,
        "error_message": exit_.error_message or None,
        "last_lines": list(exit_.last_lines),
        "status": exit_.status or None,
        "watchdog_reason": exit_.watchdog_reason or None,
        "lost": exit_.lost,
        "log": exit_.log or None,
        "rusage": {"user": exit_.user_s, "system": exit_.system_s, "max_rss_kib": exit_.max_rss_kib},
    }


def signal_name(number: int) -> str:
    """SIGTERM for 15; SIGRTMIN+3 for a real-time one."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def _headline(first: Exit) -> str:
    who = f"rank {first.rank} on {first.host}"
    if first.start_failure:
        reason = os.strerror(first.start_errno)
        return f"{who} could not be started: {first.start_failure}: {reason}"
    if first.watchdog_reason:
        return f"{who} {first.watchdog_reason} (pid {first.pid})"
    if first.lost:
        return f"{who} was lost with its node"
    after = f"after {duration_text((first.end_s or 0) - (first.start_s or 0))}"
    return f"{who} failed: {describe_end(first)} (pid {first.pid}, {after})"


def describe_end(exit_: Exit) -> str:
    """`exit code 3`, or `killed by SIGSEGV (core dumped)`."""
    if exit_.status_lost:
        return "no exit code is known: this program ignores SIGCHLD, or waits for every child"
    if not exit_.signal:
        return f"exit code {exit_.code}"
    notes = []
    if exit_.dumped_core:
        notes.append("core dumped")
    if exit_.out_of_memory:
        notes.append("by the kernel, for memory")
    return f"killed by {signal_name(exit_.signal)}" + (f" ({', '.join(notes)})" if notes else "")


def _hint(first: Exit) -> str:
    if first.watchdog_reason:
        return ""
    if first.start_failure and first.start_errno == 8:
        return (
            "next: the file is no program for this machine, nor a script with a #! line; put its interpreter in front"
        )
    if first.start_failure and first.start_errno == 7:
        return "next: the arguments and the environment are too large together; ulimit -s raises the limit"
    if first.out_of_memory:
        return "next: give the job more memory, or each rank less to hold"
    if first.signal == 9:
        return "next: somebody sent SIGKILL; if it was the kernel, for memory, dmesg says so"
    if first.signal == 7:
        return "next: SIGBUS is often a full /dev/shm; look at df /dev/shm"
    return ""


def duration_text(seconds: float) -> str:
    """`20 ms`, `3.0 s`, `5 min 0 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _count(count: int, named: tuple[LeftoverProcess, ...]) -> str:
    """Not all of many are named."""
    count = max(count, len(named))
    return "1 process" if count == 1 else f"{count} processes"


def _names(leftover_processes: tuple[LeftoverProcess, ...]) -> str:
    shown = ", ".join(f"{stray.name} ({stray.pid})" for stray in leftover_processes[:4])
    return shown + (", ..." if len(leftover_processes) > 4 else "")
