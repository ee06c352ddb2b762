"""The sentences about one worker's end: what happened to it, and what to do next. Pure."""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.system.signal_numbers import SIGBUS, SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.report.exit import Exit, LeftoverProcess


ASKED_TO_STOP = "asked to stop this launch"  # after who did, at the end of a notice


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGTERM for 15, SIGRTMIN+3 for a real-time one."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def headline(first: Exit) -> str:
    """Return the first failure in a sentence without its full stop."""
    who = f"{first.name} on {first.host}"
    if first.start_failure:
        reason = os.strerror(first.start_errno)
        return f"{who} could not be started: {first.start_failure}: {reason}"
    if first.watchdog_reason:
        return f"{who} {first.watchdog_reason} (pid {first.pid})"
    if first.lost:
        return f"{who} was lost with its node"
    after = f"after {duration_text((first.end_s or 0) - (first.start_s or 0))}"
    if first.asked_again:
        return f"{who} asked to run again (exit code {first.code}, pid {first.pid}, {after})"
    if first.sent_by:  # last: its pid is not the rank's
        return f"{who} failed: {_describe_signal(first)} (pid {first.pid}, {after}), sent by {first.sent_by}"
    return f"{who} failed: {describe_end(first)} (pid {first.pid}, {after})"


def describe_end(exit_: Exit) -> str:
    """Return how a worker ended: `exit code 3`, or `killed by SIGSEGV (core dumped)`."""
    if exit_.start_failure:
        return f"it could not be started: {exit_.start_failure}: {os.strerror(exit_.start_errno)}"
    if exit_.status_lost:
        return "exit code unknown: this program ignores SIGCHLD, or waits for every child"
    if exit_.stuck:
        return "SIGKILL did not end it"
    if not exit_.signal:
        return f"exit code {exit_.code}"
    return _describe_signal(exit_) + (f", sent by {exit_.sent_by}" if exit_.sent_by else "")


def _describe_signal(exit_: Exit) -> str:
    notes = []
    if exit_.dumped_core:
        notes.append("core dumped")
    if exit_.out_of_memory:
        notes.append("by the kernel, for memory")
    return f"killed by {signal_name(exit_.signal)}" + (f" ({', '.join(notes)})" if notes else "")


def hint(first: Exit) -> str:
    """Return the advice for this kind of failure, after `next:`; empty if there is none."""
    if first.watchdog_reason or first.sent_by:
        return ""
    if first.start_failure and first.start_errno == os.ENOEXEC:
        return (
            "next: put its interpreter in front; the file is not a program for this machine, nor a script with a #! "
            "line"
        )
    if first.start_failure and first.start_errno == os.E2BIG:
        return "next: raise ulimit -s, or shorten the arguments and the environment, which are too large together"
    if first.out_of_memory:
        return "next: give the job more memory, or use less in each rank"
    if first.signal == SIGKILL:
        return "next: run dmesg, to see if the kernel sent SIGKILL for memory"
    if first.signal == SIGBUS:
        return "next: run df /dev/shm, because SIGBUS often means that it is full"
    # torch's excepthook puts [rank1]: before it
    if first.rank and any(line.endswith("bdb.BdbQuit") for line in first.last_lines):
        rank = first.rank
        return f"next: add --stdin={rank}, and call breakpoint() on rank {rank} alone; only one rank has input"
    return ""


def duration_text(seconds: float) -> str:
    """Return a duration in the units that people read: `20 ms`, `3.0 s`, `5 min 0 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def process_count(count: int, named: tuple[LeftoverProcess, ...]) -> str:
    """Return the number of processes, of which `named` are the first few: `1 process`, `3 processes`."""
    count = max(count, len(named))
    return "1 process" if count == 1 else f"{count} processes"


def process_names(leftover_processes: tuple[LeftoverProcess, ...]) -> str:
    """Return the names and pids of the first four."""
    shown = ", ".join(f"{stray.name} ({stray.pid})" for stray in leftover_processes[:4])
    return shown + (", ..." if len(leftover_processes) > 4 else "")
