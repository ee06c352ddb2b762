"""How one worker ended, and the processes that outlived it. Pure."""

from __future__ import annotations

from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMED = 4  # processes that a line names


@record
class Exit:
    """How one worker ended. Times are seconds since the epoch; None: that has not happened.

    Attributes:
        rank: Its global rank; with several programs, its number among the ranks of all of them.
        local_rank: Its rank on its node.
        program: The name of its program; empty: nobody named it.
        program_rank: Its rank in that program.
        host: The name of its node.
        pid: Its process.
        code: Its exit code. None: a signal ended it, it never ran, or its status is unknown.
        signal: The number of the signal that ended it; 0: none.
        sent_by: Who sent that signal with --send: the user and the process. Empty: nobody did.
        dumped_core: It left a core dump.
        out_of_memory: The kernel killed it for memory.
        stopped: It ended after the stop signal of the launcher.
        killed_after_s: The grace after which infini-run killed it by SIGKILL, in seconds; 0: that was not necessary.
        stuck: SIGKILL did not end it.
        status_lost: Another part of the host program reaped it: its code and signal are unknown.
        start_failure: The step between its creation and its program that failed. Empty: none did.
        start_errno: The errno of that step.
        is_forked: It was forked from the process of --preload.
        start_s: When it was created.
        ready_s: When it sent READY=1.
        end_s: When it ended; for a lost rank, when its node was last known to be alive.
        user_s: The CPU time that it used, in seconds.
        system_s: The CPU time of the kernel for it, in seconds.
        max_rss_kib: The most memory that it had resident, in KiB.
        log: The path of its log; empty: none.
        error_message: The message in its error file.
        last_lines: Its last lines on stderr.
        python_stack: Where its Python was when it crashed, or was stopped for a hang: frames, innermost first. Known
            of ranks that run a Python function.
        status: Its last STATUS= (sd_notify(3)).
        progress: Its highest PROGRESS=.
        progress_s: When that came.
        watchdog_reason: Why the watchdog stopped the job because of it: it hung, or was not ready in time. Empty: the
            watchdog did not.
        lost: Its node was lost, so its end is unknown.
        asked_again: It asked for another run of the job, by its exit code.
        advice: What to do next, where that depends on what the node is like. Empty: nothing is known.
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
    killed_after_s: float = 0.0
    stuck: bool = False
    status_lost: bool = False
    start_failure: str = ""
    start_errno: int = 0
    is_forked: bool = False
    start_s: float | None = None
    ready_s: float | None = None
    end_s: float | None = None
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kib: int = 0
    log: str = ""
    error_message: str = ""
    last_lines: tuple[str, ...] = ()
    python_stack: tuple[str, ...] = ()
    status: str = ""
    progress: int | None = None
    progress_s: float | None = None
    watchdog_reason: str = ""
    lost: bool = False
    asked_again: bool = False
    advice: str = ""
    program: str = ""
    program_rank: int = 0
    sent_by: str = ""

    @property
    def name(self) -> str:
        """What people call it: `rank 3`, or `trainer 3`."""
        return f"{self.program} {self.program_rank}" if self.program else f"rank {self.rank}"

    @property
    def is_failure(self) -> bool:
        """Whether the rank failed before the launcher stopped it.

        True if, before the launcher stopped it, it ended badly (by its exit code, a signal, or a failed start) or was
        lost with its node; also if the launcher stopped the job because this rank was not ready in time or hung. One
        that asked for another run has not failed.
        """
        if self.asked_again:
            return False
        if self.lost:
            return not self.stopped
        if self.watchdog_reason:
            return True
        bad = self.code != 0 or self.signal != 0 or bool(self.start_failure)
        return self.end_s is not None and bad and not self.stopped

    @property
    def ended_well(self) -> bool:
        """Whether it ran, and exited 0 without being stopped."""
        return self.end_s is not None and self.shell_code == 0

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would report: the code, or 128 + the signal.

        126 or 127: it could not be executed. 1: the watchdog stopped the job because of it, or its node was lost.
        """
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


def name_processes(processes: Sequence[LeftoverProcess]) -> str:
    """Return the first of them in words; "" if there is none."""
    return ", ".join(f"{process.pid} ({process.name})" for process in processes[:_NAMED])
