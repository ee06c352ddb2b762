"""What became of the workers of one node: events in, one Exit per worker and a Report out.

Bookkeeping only: the place where an event comes up decides what to do about it.
"""

from __future__ import annotations

import time
from itertools import chain

import infini_run.lean_os as os
from infini_run.core.c_structs import STEPS, Event
from infini_run.errors import counted
from infini_run.record import replace
from infini_run.report.exit import Exit, LeftoverProcess
from infini_run.report.hang_snapshot import BEFORE_RESTART
from infini_run.report.report import PreloadUse, Report
from infini_run.report.text import signal_name
from infini_run.system.cgroup import oom_kills
from infini_run.system.signal_numbers import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.pace import SlowRank

_INTERRUPTED = (130, 131)  # by INT or QUIT, or so said by a program that has handled it
_UNPLACED = {  # why a kernel takes no memory policy
    1: ": a container's seccomp profile, as Docker's default, wants CAP_SYS_NICE for it",
    22: ": of several NUMA nodes only from Linux 5.15 on",
    38: ": a kernel without NUMA",
}
_PROC = {2: "it is missing", 18: "it shows another PID namespace"}  # ENOENT and EXDEV: the core's words
_LATE = 110  # ETIMEDOUT: the core's word for a console without a reader
_SNAPSHOTS = 256  # kept: of a job that hangs again and again the first ones


class Outcome:
    """What became of the workers so far.

    Args:
        plan: The plan of the launch.
        options: What the user asked for.
        oom_kills: How many processes the kernel had killed for memory before the launch. -1: not known.
    """

    def __init__(self, plan: Plan, options: Options, *, oom_kills: int) -> None:
        self._plan = plan
        self._options = options
        self._had_terminal: set[int] = set()  # ranks, at their end
        host = os.uname().nodename
        self._host = host
        self._waiting = {
            worker.rank: Exit(
                rank=worker.rank,
                local_rank=worker.local_rank,
                host=host,
                log=worker.error_log or worker.log,
                program=worker.program,
                program_rank=worker.program_rank,
            )
            for worker in plan.workers
        }
        self._exits = dict(self._waiting)
        self._cleared: dict[int, Exit] = {}  # failures that are none of the job's
        self._preload: PreloadUse | None = None
        self.first: int | None = None  # rank of the first failure
        self.received_signal = 0  # the signal from outside that ended the job
        self._ender = ""  # the program whose end was that of the job
        self._senders: dict[tuple[int, int], str] = {}  # by rank and signal
        self._forwarded: set[int] = set()  # signals
        self._leftovers: list[LeftoverProcess] = []
        self._leftover_count = 0
        self._stuck: list[LeftoverProcess] = []
        self._notices: list[str] = []
        self._snapshots: list[HangSnapshot] = []
        self._before_restart: dict[str, tuple[HangSnapshot, ...]] = {}  # the last ones of each program
        self._slow: tuple[SlowRank, ...] = ()
        self._oom_kills = oom_kills
        self._epoch_s = time.time() - time.monotonic()
        self._start_s = self._end_s = time.time()  # until the first worker has a better one

    # ---- events in

    def record_event(self, event: Event) -> str:
        """Record one event of the group.

        Args:
            event: The event.

        Returns:
            A line for the user. Empty: none.
        """
        if event.kind in ("triggered", "progress", "client"):
            return ""
        text: str = getattr(self, f"_record_{event.kind}")(event) or ""
        return text

    def _record_started(self, event: Event) -> None:
        start_s = self._epoch_s + event.time_ns / 1e9
        if self._is_final(event.rank):
            return
        if self._exits[event.rank].end_s is not None:  # its program restarts
            self._exits[event.rank] = self._waiting[event.rank]
            self._cleared.pop(event.rank, None)
        self._start_s = min(self._start_s, start_s)
        self._change(event.rank, pid=event.pid, start_s=start_s)

    def _record_ready(self, event: Event) -> None:
        self._change(event.rank, ready_s=self._epoch_s + event.time_ns / 1e9)

    def _record_start_failed(self, event: Event) -> None:
        self._change(event.rank, start_failure=STEPS[event.code], start_errno=event.signal)

    def _is_final(self, rank: int) -> bool:
        """Whether a rank is the first failure of the job. It may have started once more, with others that could
        not."""
        return rank == self.first and self._exits[rank].end_s is not None

    def _record_exited(self, event: Event) -> None:
        if self._is_final(event.rank):
            return
        if event.had_terminal:
            self._had_terminal.add(event.rank)
        unknown = event.status_lost or event.signal != 0
        self._change(
            event.rank,
            asked_again=event.asks_again(self._options.again_code),
            code=None if unknown else event.code,
            signal=event.signal,
            dumped_core=event.dumped_core,
            stopped=event.after_stop,
            killed_after_s=event.value / 1e3,
            status_lost=event.status_lost,
            sent_by=self._senders.get((event.rank, event.signal), ""),
            end_s=self._epoch_s + event.time_ns / 1e9,
            user_s=event.user_us / 1e6,
            system_s=event.system_us / 1e6,
            max_rss_kib=event.max_rss_kib,
        )
        if self.first is None and (self._exits[event.rank].is_failure or self._exits[event.rank].asked_again):
            self.first = event.rank
            by_kernel = event.signal == SIGKILL and 0 <= self._oom_kills < oom_kills()
            self._change(event.rank, out_of_memory=by_kernel)

    def _record_signalled(self, event: Event) -> str:
        name = signal_name(event.signal)
        if self.received_signal:
            return f"{name} again: killing what is left"
        self.received_signal = event.signal
        is_stopping = self.first is not None and not self._options.keep_going
        grace_s = self._options.grace_s if is_stopping else self._options.signal_grace_s
        return f"{name}: stopping; SIGKILL in {grace_s:g} s, or now if repeated"

    def _record_forwarded(self, event: Event) -> None:
        self._forwarded.add(event.signal)

    def _record_leftover(self, event: Event) -> None:
        self._leftovers.append(LeftoverProcess(pid=event.pid, name=event.name))

    def _record_stuck(self, event: Event) -> None:
        self._stuck.append(LeftoverProcess(pid=event.pid, name=event.name, state=chr(event.code)))
        if event.rank >= 0:
            self._change(event.rank, stuck=True, stopped=True)

    def _record_output_lost(self, event: Event) -> str:
        if event.signal == _LATE:
            return self.add_notice("the console was not read in time; dropped its last output")
        reason = os.strerror(event.signal)
        what = (
            "the console takes no more output"
            if event.rank < 0
            else f"the log of {self.name_of(event.rank)} cannot be written"
        )
        return self.add_notice(f"{what} ({reason}); the job continues")

    def _record_output_held(self, event: Event) -> str:
        stream, who = ("stdout", "stderr")[event.code], self.name_of(event.rank)
        return self.add_notice(
            f"{stream} of {who} is still open in a process that infini-run may not end; not read any more"
        )

    @property
    def stuck(self) -> tuple[LeftoverProcess, ...]:
        """The processes that SIGKILL did not end."""
        return tuple(self._stuck)

    def _record_console_stuck(self, event: Event) -> str:
        return self.add_notice("all ranks exited; waiting for the reader of their output")

    def _record_unguarded(self, event: Event) -> str:
        how = f"{STEPS[event.code]}: {os.strerror(event.signal)}" if event.code else "it was killed"
        return self.add_notice(f"no guard ({how}): if infini-run is SIGKILLed, processes of ranks may survive")

    def _record_unseen(self, event: Event) -> str:
        reason = _PROC.get(event.signal) or os.strerror(event.signal)
        when = "" if event.code else "if infini-run is SIGKILLed, "
        return self.add_notice(
            f"cannot read /proc ({reason}): {when}processes that left their rank's process group may survive"
        )

    def _record_lease_ended(self, event: Event) -> str:
        why = "its guard was killed" if event.code else "it was not renewed in time"
        return self.add_notice(f"the lease of the ranks expired ({why}); killed them")

    def _record_asks_terminal(self, event: Event) -> str:
        who = self.name_of(event.rank)
        if not event.code:
            return f"{who} asks for the terminal: your next line goes to it"
        return self.add_notice(
            f"{who} is suspended: it cannot read the terminal here; use a file or a variable for its "
            f"input, or add --stdin={event.rank}"
        )

    def _record_unplaced(self, event: Event) -> str:
        return self.add_notice(
            f"ranks are bound to CPUs, but not to memory (set_mempolicy: {os.strerror(event.signal)}"
            f"{_UNPLACED.get(event.signal, '')}); the kernel uses the memory near those CPUs first"
        )

    def _record_ended(self, event: Event) -> None:
        self._end_s = self._epoch_s + event.time_ns / 1e9
        self._leftover_count = event.code

    def record_dropped_lines(self, count: int) -> None:
        """Record that infini-run's own lines were lost, because nobody read the console.

        Args:
            count: How many lines.
        """
        self.add_notice(f"the console was not read; dropped {counted(count, 'line')} of infini-run")

    def record_snapshots(self, snapshots: Sequence[HangSnapshot], ranks_to_stop: Sequence[int]) -> list[str]:
        """Record snapshots of ranks that hang or are late.

        Args:
            snapshots: One per inspected rank.
            ranks_to_stop: The ranks because of which the job stops. Empty: it continues.

        Returns:
            The lines for the user.
        """
        from infini_run.report.hang_groups import analyze_hang, hang_text, with_exited

        self.keep_snapshots(snapshots)
        snapshots = with_exited(snapshots, self.exits())
        hang = analyze_hang(snapshots)
        if ranks_to_stop:
            self.record_cause(ranks_to_stop if hang is None else hang.cause(ranks_to_stop))
        head, details = hang_text(snapshots, {exit_.rank: exit_.log for exit_ in self.exits()})
        return [f"{head}: stopping"] if ranks_to_stop else [head, *details]

    def keep_snapshots(self, snapshots: Sequence[HangSnapshot]) -> None:
        """Keep snapshots of one look for the report. Of those before a restart, each program has its last ones."""
        if snapshots and snapshots[0].why == BEFORE_RESTART:
            self._before_restart[snapshots[0].program] = tuple(snapshots)
            return
        self._snapshots += snapshots[: _SNAPSHOTS - len(self._snapshots)]

    def record_cause(self, ranks: Sequence[int]) -> None:
        """Record the ranks because of which the job is stopped: they hang, or others wait for them."""
        for snapshot in tuple(self._snapshots):
            if snapshot.rank in ranks and snapshot.rank in self._exits:
                reason = snapshot.sentence if snapshot.kind else "hung: other ranks wait for it"
                self._change(snapshot.rank, watchdog_reason=reason)
                self.first = snapshot.rank if self.first is None else self.first

    def set_first_failure(self, rank: int) -> None:
        """Make a failed rank the first failure."""
        self._exits[rank] = self._cleared.pop(rank, self._exits[rank])
        self.first = rank

    def clear_failures(self, ranks: Sequence[int]) -> None:
        """Take back the failures of ranks whose program restarts: they are none of the job's."""
        for rank in ranks:
            if self._exits[rank].is_failure:
                self._cleared[rank] = self._exits[rank]
                self._change(rank, stopped=True, watchdog_reason="")
        self.first = None if self.first in ranks else self.first

    def add_notice(self, text: str) -> str:
        """Add a notice to the report.

        Args:
            text: A sentence.

        Returns:
            The same text.
        """
        self._notices.append(text)
        return text

    def record_sender(self, rank: int, number: int, who: str) -> None:
        """Record who sent a signal to a rank with --send: it may be what ends that rank."""
        self._senders[rank, number] = who

    def record_ender(self, program: str) -> None:
        """Record that all ranks of a program with --ends_job exited with code 0, and the others are stopped.

        Args:
            program: Its name.
        """
        self._ender = self._ender or program

    def name_of(self, rank: int) -> str:
        """Return what people call a rank. Empty: there is no such rank."""
        return self._exits[rank].name if rank in self._exits else ""

    def _change(self, rank: int, **changes: object) -> None:
        self._exits[rank] = replace(self._exits[rank], **changes)

    # ---- the story out

    def record_preload(self, use: PreloadUse) -> None:
        """Record what --preload did, and so how the ranks were started."""
        self._preload = use
        for rank in self._exits:
            self._change(rank, is_forked=not use.cold_because)

    def exits(self) -> tuple[Exit, ...]:
        """Return the state of every worker, by rank: how it ended, or its state so far."""
        return tuple(self._exits[rank] for rank in sorted(self._exits))

    @property
    def is_interrupted(self) -> bool:
        """Whether the user ended the rank that had the terminal by Ctrl-C or Ctrl-\\: its failure is no news."""
        first = self.first_failure()
        return first is not None and first.rank in self._had_terminal and first.shell_code in _INTERRUPTED

    def first_failure(self) -> Exit | None:
        """Return the worker that failed first, and not because the launcher stopped it. None: none has failed."""
        return None if self.first is None else self._exits[self.first]

    def set_last_output(self, error_message: str, last_lines: tuple[str, ...], stack: tuple[str, ...]) -> None:
        """Set what the first failure wrote last. Without a failure it does nothing.

        Args:
            error_message: The message in its error file. Empty: none.
            last_lines: Its last lines of stderr.
            stack: The lines of its Python stack.
        """
        if self.first is not None:
            self._change(self.first, error_message=error_message, last_lines=last_lines, python_stack=stack)

    def set_advice(self, advice: str) -> None:
        """Set what to do about the first failure. Without a failure it does nothing.

        Args:
            advice: A sentence. Empty: none.
        """
        if self.first is not None:
            self._change(self.first, advice=advice)

    def running(self) -> list[Event]:
        """Return a `started` event for every worker that lives."""
        return [
            Event(kind="started", worker=index, rank=e.rank, pid=e.pid or 0, time_ns=time.monotonic_ns())
            for index, e in enumerate(self.exits())
            if e.start_s is not None and e.end_s is None
        ]

    def record_statuses(self, statuses: Mapping[int, str]) -> None:
        """Record the last STATUS= of ranks.

        Args:
            statuses: The text of each rank that sent one.
        """
        for rank, status in statuses.items():
            self._change(rank, status=status)

    def record_progress(self, latest: Mapping[int, tuple[int, float]], slow: tuple[SlowRank, ...] = ()) -> None:
        """Record the progress of ranks.

        Args:
            latest: The highest PROGRESS= of each rank that has sent it, and when it did (CLOCK_MONOTONIC, seconds).
            slow: The ranks that were slow.
        """
        self._slow = slow
        for rank, (value, time_s) in latest.items():
            self._change(rank, progress=value, progress_s=self._epoch_s + time_s)

    def report(self) -> Report:
        """Return the report. It is complete at the end of the launch."""
        first = self.first_failure()
        return Report(
            launch_id=self._plan.launch_id,
            run_id=self._options.run_id,
            host=self._host,
            world_size=self._plan.world_size,
            start_s=self._start_s,
            end_s=self._end_s,
            exits=self.exits(),
            first_failure=first,
            received_signal=self.received_signal,
            forwarded_signals=tuple(sorted(self._forwarded)),
            user_interrupted=self.is_interrupted,
            leftover_processes=tuple(self._leftovers),
            leftover_count=self._leftover_count,
            stuck=self.stuck,
            notices=tuple(self._notices),
            snapshots=(*chain.from_iterable(self._before_restart.values()), *self._snapshots),
            preload=() if self._preload is None else (self._preload,),
            slow=self._slow,
            port_in_use=self._port_in_use(),
            ended_by=self._ender,
        )

    def _port_in_use(self) -> int:
        """Return the rendezvous port, if rank 0 failed and another program listens there, after the end of all
        ranks."""
        first = self.first_failure()
        if first is None or first.program_rank != 0 or not first.code or first.watchdog_reason:
            return 0
        from infini_run.plan.program import is_port_in_use

        port = next(program.master_port for program in self._plan.programs if program.options.name == first.program)
        return port if is_port_in_use(port) else 0


def describe_event(event: Event, who: str) -> str:
    """Return the line of --verbose for an event. Empty: the event has none.

    Args:
        event: The event.
        who: The name of its rank.
    """
    if event.kind == "exited":
        how = f"signal {signal_name(event.signal)}" if event.signal else f"exit code {event.code}"
        return f"{who} exited, {how}"
    if event.kind == "ready":
        return f"{who} is ready"
    if event.kind == "forwarded":
        return f"{signal_name(event.signal)} forwarded"
    if event.kind == "leftover":
        return f"stopping leftover process {event.name} ({event.pid})"
    return ""
