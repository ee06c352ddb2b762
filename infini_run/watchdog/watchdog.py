"""The deadlines of live ranks: READY=1 in time, signs of life after that. A missed one gives snapshots of all ranks.

The watchdog only reports; node/launch.py acts on it. Without a deadline it is neither imported nor woken.
"""

from __future__ import annotations

import os
import time

from infini_run.core.c_structs import Event
from infini_run.plan.model import reads_output
from infini_run.record import record, replace
from infini_run.report.hang_snapshot import (
    AT_TERMINAL,
    BEFORE_RESTART,
    BEFORE_STOP,
    LOOK_S,
    NO_PROGRESS,
    STOP_S,
    SUSPENDED,
    TRIGGERED,
)
from infini_run.report.text import duration_text
from infini_run.system.procfs import ProcessTable
from infini_run.system.signal_numbers import SIGCONT, SIGSTOP, SIGTSTP
from infini_run.watchdog.gpu_reading import GpuReading
from infini_run.watchdog.hang_detector import HangDetector
from infini_run.watchdog.snapshot_collector import RankToInspect, SnapshotCollector, write_snapshots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from infini_run.core.c_structs import ProcessState
    from infini_run.core.group import Group
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan, Worker
    from infini_run.report.hang_snapshot import HangSnapshot

_IDLE = 0.01  # of a CPU: a rank that uses less has stopped to use it
_OWN_BYTES = 4  # that a rank's process writes before its exec: its pid, for the guard (csrc/spawn/child.c)
_GATHER = 0.05  # of a timeout: ranks that fall silent one after the other are checked together


@record
class HangFinding:
    """The result of a missed deadline, or of a look before a stop.

    Attributes:
        snapshots: Those of ranks that hang or are late come first.
        ranks_to_stop: The ranks because of which the job is to be stopped.
        problem: Why a file could not be written. Empty: all were.
        events: An event for each rank that hangs or is late.
        is_before_stop: The job is being stopped for another reason.
        is_before_restart: The same, of a program that restarts alone.
        is_cut_short: The same, and a look at a hang was not complete: it says too little to be printed.
    """

    snapshots: tuple[HangSnapshot, ...]
    ranks_to_stop: tuple[int, ...]
    problem: str
    events: list[Event]
    is_before_stop: bool = False
    is_before_restart: bool = False
    is_cut_short: bool = False


class _Rank:
    """A live rank. `ready`: it has sent READY=1, or there is no deadline for that."""

    def __init__(self, index: int, worker: Worker, event: Event, options: Options, *, is_awaited: bool) -> None:
        self.index = index
        self.worker = worker
        self.pid = event.pid
        self.start_s = event.time_ns / 1e9
        self.ready = not options.ready_timeout_s or not is_awaited
        self.detector = HangDetector(options.hang_timeout_s or float("inf"), self.start_s)
        self.reads_output = reads_output(worker)
        self.written_at_look: int | None = None  # when a look because of a hang began

    def written(self, table: ProcessTable) -> int | None:
        """Return what the rank has written. None: its output comes to the launcher, or this is unknown."""
        written = None if self.reads_output else table.written(self.pid)
        return None if written is None else max(0, written - _OWN_BYTES)


class Watchdog:
    """The deadlines of one launch on this node. Times are CLOCK_MONOTONIC's.

    Give each event to `on_event`, wait for `timeout_s` and `fds`, then call `run_due`.

    Args:
        plan: The plan of the launch.
        options: What the user asked for.
        group: Its processes.
        entry: The state of this process at its start. None: a host program's.
        environ: The environment, for py-spy.
        folder: The folder for files of snapshots. Empty: no files.
        recorder: The prefixes of the pipes and dumps of torch's Flight Recorder. None: it cannot be asked.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        group: Group,
        *,
        entry: ProcessState | None,
        environ: Mapping[str, str],
        folder: str,
        recorder: tuple[str, str] | None = None,
    ) -> None:
        self._plan = plan
        self._options = options
        self._group = group
        self._entry = entry
        self._environ = environ
        self._folder = folder
        self._recorder = recorder
        self._ranks: dict[int, _Rank] = {}
        self._indexes = {worker.rank: index for index, worker in enumerate(plan.workers)}
        self._awaited = {name for program in options.programs for name in program.after}  # all, if it is empty
        self._asking: set[int] = set()  # by index: ranks that have asked for the terminal
        self._suspended: set[int] = set()  # by index: ranks that got a signal to suspend them from the launcher
        self._was_suspended = False  # one of them may have been, since the last check for progress
        self._reasons: dict[int, tuple[str, str]] = {}  # by index: kind and why, without a snapshot so far
        self._found: dict[int, tuple[HangSnapshot, float]] = {}  # by index: of its last finding, and when that began
        self._collector: SnapshotCollector | None = None
        self._check_s = 0.0  # when the last look because of a hang began
        self._findings = 0
        self._gpus: GpuReading | None = None  # of the ranks that are looked at
        self._progress: dict[int, tuple[int, float]] = {}  # by index: the highest PROGRESS=, and when it came
        self._is_asked = False  # for snapshots
        self._is_look_due = self._has_looked = False  # before a stop
        self._is_before_restart = False  # the look that is not complete, if there is one
        self._look_end_s = 0.0  # of that look
        self._stop_due_s = float("inf")  # when to stop the job after a failure, whatever was seen until then
        self._waits_for_head = False  # which stops all nodes at once
        self._progress_s = 0.0  # when PROGRESS= of a rank rose last; 0: never, or its standstill was reported
        self._due_s: float | None = None  # the next deadline, or one before it: signs of life only put them off
        self._stopping = False
        self.on_look: Callable[[], None] | None = None  # called when a look begins because a rank here hangs

    # ---- the launch

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        self._due_s = None if event.kind in ("started", "triggered") else self._due_s
        if event.kind == "started":
            worker = self._plan.workers[event.worker]
            is_awaited = not self._awaited or worker.program in self._awaited
            self._ranks[event.worker] = _Rank(event.worker, worker, event, self._options, is_awaited=is_awaited)
        elif event.kind == "exited":
            self._ranks.pop(event.worker, None)
            self._found.pop(event.worker, None)
        elif event.kind == "asks_terminal":
            self._asking.add(event.worker)
        elif event.kind == "signalled":
            self.stop()
        elif event.kind == "forwarded" and event.signal == SIGCONT:
            self._resume()
        elif event.worker in self._ranks:
            self._note(self._ranks[event.worker], event)

    def drop(self, indexes: Sequence[int]) -> None:
        """Watch some ranks no more: they are stopped, to restart."""
        self._due_s = None
        for index in indexes:
            self._ranks.pop(index, None)
            self._found.pop(index, None)
            self._reasons.pop(index, None)
            self._progress.pop(index, None)
            self._asking.discard(index)
            self._suspended.discard(index)
        if not self._progress:
            self._progress_s = 0.0

    def note_up(self, program: str) -> None:
        """Record that a program is ready by its port."""
        for rank in self._ranks.values():
            rank.ready = rank.ready or rank.worker.program == program
        self._due_s = None

    def note_progress(self, event: Event) -> None:
        """Record that a rank has sent a higher PROGRESS= than before."""
        if not self._progress_s:
            self._due_s = None
        self._progress_s = event.time_ns / 1e9
        self._progress[event.worker] = event.value, self._progress_s

    def _note(self, rank: _Rank, event: Event) -> None:
        if event.kind == "ready":
            rank.ready = True
        elif event.kind == "triggered":
            why = rank.detector.trigger(time.monotonic(), self._signs(rank)[0])
            if why and not self._stopping:
                self._reasons[rank.index] = ("hung", why)

    def take_snapshots(self) -> None:
        """Make snapshots of all ranks: another node has a rank that hangs."""
        self._is_asked, self._due_s = self._collector is None, None

    def look_before_stop(self, failed_s: float = 0.0, *, waits_for_head: bool) -> bool:
        """Look at the ranks before they are stopped, if --snapshots=failure asks for it.

        Args:
            failed_s: When a rank of this node failed: `must_stop` says when to stop the job. 0: the head does.
            waits_for_head: The head looks at other nodes, too, and stops all of them.

        Returns:
            Whether there is a look, or a wait for the head. False: nothing delays the stop.
        """
        if self._stopping or self._options.snapshots != "failure":
            return False
        is_free = self._collector is None or self._is_before_restart
        if not self._has_looked and is_free and self._ranks:
            self._is_look_due, self._has_looked, self._due_s = True, True, None
            self._look_end_s = (failed_s or time.monotonic()) + LOOK_S
        if not failed_s or not (self._is_looking or waits_for_head):
            return self._is_looking
        self._stop_due_s = min(self._stop_due_s, failed_s + STOP_S)
        self._waits_for_head = waits_for_head
        return True

    def look_before_restart(self, indexes: Sequence[int]) -> float:
        """Look at ranks of a program before they are stopped, to restart; not during another look.

        Args:
            indexes: Their indexes in the plan.

        Returns:
            When that look ends, if it is not complete before: time.monotonic().
        """
        end_s = time.monotonic() + LOOK_S
        ranks = [self._ranks[index] for index in indexes if index in self._ranks]
        if ranks and self._collector is None and not (self._is_look_due or self._stopping):
            self._is_before_restart = True
            self._collector = self._look_at(ranks, BEFORE_RESTART, end_s)
        return end_s

    @property
    def is_looking_before_restart(self) -> bool:
        """Whether such a look is not complete."""
        return self._collector is not None and self._is_before_restart

    @property
    def _is_looking(self) -> bool:
        """Whether a look before a stop is not complete."""
        return self._is_look_due or (self._collector is not None and self._collector.is_before_stop)

    @property
    def must_stop(self) -> bool:
        """Whether a failure is to stop the job now: its time is up, or all was seen and no head looks elsewhere."""
        if self._stop_due_s == float("inf"):
            return False
        return time.monotonic() >= self._stop_due_s or not (self._is_looking or self._waits_for_head)

    def stop(self) -> None:
        """Note that the ranks are being stopped: no deadline counts any more, and no snapshot delays the stop."""
        self._stopping = True
        self._is_look_due, self._due_s, self._stop_due_s = False, None, float("inf")
        self._reasons.clear()
        if self._collector is not None:
            self._collector.finish_early("the job was being stopped")

    def on_signal(self, number: int, index: int | None = None) -> None:
        """Note that the launcher sends a signal to a rank: one that it suspends does not hang.

        Args:
            number: The signal.
            index: The rank's index in the plan. None: every rank.
        """
        if number == SIGCONT:
            self._resume(index)
        elif number in (SIGSTOP, SIGTSTP):
            self._suspended.update(range(len(self._plan.workers)) if index is None else (index,))
            self._was_suspended = True

    def _resume(self, index: int | None = None) -> None:
        """Count silence from now: until now the rank, or all and the launcher with them, were suspended."""
        now_s = time.monotonic()
        self._due_s = None
        self._suspended -= self._suspended if index is None else {index}
        self._was_suspended = bool(self._suspended)
        self._progress_s = now_s if self._progress_s else 0.0
        for rank in self._ranks.values():
            if index in (None, rank.index):
                rank.start_s = now_s
                rank.detector.refresh(now_s)

    def hung_ranks(self) -> dict[int, str]:
        """Return the ranks that hang or are late now, each with `hung` or `late`: those that were reported, and have
        given no sign of life since."""
        return {
            found.rank: found.kind
            for index, (found, since_s) in self._found.items()
            if found.kind == "late" or self._sign_s(self._ranks[index], found.why) <= since_s
        }

    def _sign_s(self, rank: _Rank, why: str) -> float:
        """Return the time of the last sign of life that ends a hang which was reported for this reason."""
        if why.startswith(NO_PROGRESS):
            return self._progress_s
        signs = self._signs(rank)
        return max(signs) if why.startswith(TRIGGERED) else rank.detector.seen_s(*signs)

    # ---- the wait

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until the next deadline, at most `asked_s`. None: there is no limit."""
        now_s = time.monotonic()
        deadline_s = min(self._deadline_s(now_s), self._stop_due_s)
        if deadline_s == float("inf"):
            return asked_s
        wait_s = max(0.0, deadline_s - now_s)
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def fds(self) -> list[int]:
        """Return descriptors that are readable when `run_due` has something to do."""
        gpus = [] if self._gpus is None else self._gpus.fds()
        return gpus if self._collector is None else [*self._collector.fds(), *gpus]

    def _deadline_s(self, now_s: float) -> float:
        if self._collector is not None:
            return self._collector.deadline_s
        if self._due_s is None or now_s >= self._due_s:
            self._due_s = self._next_s()
        return self._due_s

    def _next_s(self) -> float:
        if self._reasons or self._is_asked or self._is_look_due:
            return 0.0
        if self._stopping:
            return float("inf")
        late_s = min((self._late_s(rank) for rank in self._ranks.values()), default=float("inf"))
        hang_s = min((self._hang_s(rank) for rank in self._ranks.values()), default=float("inf"))
        return min(late_s, hang_s + self._options.hang_timeout_s * _GATHER, self._standstill_s)

    @property
    def _standstill_s(self) -> float:
        """When the job counts as hung, unless a rank makes progress before."""
        timeout_s = self._options.progress_timeout_s
        return self._progress_s + timeout_s if timeout_s and self._progress_s else float("inf")

    def _late_s(self, rank: _Rank) -> float:
        return float("inf") if rank.ready else rank.start_s + self._options.ready_timeout_s

    def _hang_s(self, rank: _Rank) -> float:
        return rank.detector.deadline_s(*self._signs(rank)) if self._options.hang_timeout_s else float("inf")

    def _signs(self, rank: _Rank) -> tuple[float, float]:
        output_ns, ping_ns = self._group.activity(rank.index)
        return output_ns / 1e9, ping_ns / 1e9

    # ---- a missed deadline

    def run_due(self) -> HangFinding | None:
        """Check the deadlines that have passed, or continue with snapshots. Never blocks.

        Returns:
            The finding, once it is complete; else None.
        """
        now_s = time.monotonic()
        if self._collector is None and now_s >= self._deadline_s(now_s):
            self._collector = self._look_at_all() if self._is_look_due else self._check_all(now_s)
        collector = self._collector
        if collector is None:
            return None
        collector.poll(now_s)
        if self._gpus is not None:
            self._gpus.poll()
        if not collector.done:
            return None
        self._collector = None
        is_before_restart, self._is_before_restart = self._is_before_restart, False
        if is_before_restart:
            finding = self._find(collector.snapshots, is_before_stop=True)
            return replace(finding, is_before_stop=False, is_before_restart=True)
        if not collector.snapshots and not collector.is_before_stop:
            return None
        return self._find(collector.snapshots, is_before_stop=collector.is_before_stop)

    def unfinished(self) -> HangFinding | None:
        """Return what a look before a stop has seen, if it is not complete. None: there is no such look."""
        collector = self._collector
        if collector is None or not collector.is_before_stop:
            return None
        return self._find(collector.unfinished(), is_before_stop=True)

    def _look_at_all(self) -> SnapshotCollector:
        """Begin a look before a stop."""
        self._is_look_due, self._due_s = False, None
        return self._look_at(self._ranks.values(), BEFORE_STOP, self._look_end_s)

    def _look_at(self, ranks: Iterable[_Rank], why: str, end_s: float) -> SnapshotCollector:
        return self._make_collector([_subject(rank, "", why) for rank in ranks], ProcessTable(), until_s=end_s)

    def _check_all(self, now_s: float) -> SnapshotCollector | None:
        """Begin snapshots of all ranks if one of them hangs or is late; else return None."""
        table = ProcessTable()
        self._check_s, self._due_s = now_s, None
        reasons, self._reasons = self._reasons, {}
        for rank in self._ranks.values() if not self._stopping else ():
            kind, why = self._check(rank, now_s, table)
            if why:
                reasons.setdefault(rank.index, (kind, why))
        if now_s >= self._standstill_s and not self._stopping:
            self._note_standstill(now_s, reasons, table)
        is_asked, self._is_asked = self._is_asked and not self._stopping, False
        if reasons.keys().isdisjoint(self._ranks) and not is_asked:
            return None
        for rank in self._ranks.values() if is_asked else ():
            rank.detector.note_report(now_s)
        for rank in self._ranks.values():
            rank.written_at_look = rank.written(table)
        if not is_asked and self.on_look is not None and {kind for kind, _ in reasons.values()} == {"hung"}:
            self.on_look()
        order = sorted(
            self._ranks.values(), key=lambda rank: _report_order(reasons.get(rank.index, ("", ""))[1], rank.index)
        )
        subjects = [_subject(rank, *reasons.get(rank.index, ("", ""))) for rank in order]
        return self._make_collector(subjects, table, is_asked=is_asked, sees=self._options.snapshots != "off")

    def _make_collector(self, subjects: list[RankToInspect], table: ProcessTable, **how: Any) -> SnapshotCollector:
        self._findings += 1
        is_sure = any(rank.worker.uuids for rank in self._ranks.values())
        self._gpus = GpuReading(self._group, self._entry, self._environ, is_sure=is_sure)
        return SnapshotCollector(
            subjects,
            table,
            group=self._group,
            entry=self._entry,
            environ=self._environ,
            folder=self._folder,
            finding=self._findings,
            recorder=self._recorder,
            **how,
        )

    def _note_standstill(self, now_s: float, reasons: dict[int, tuple[str, str]], table: ProcessTable) -> None:
        """Add the standstill to the reasons of every rank. While some are suspended, nobody expects progress."""
        if self._was_suspended:  # the rank may have caught the signal, and anybody may have continued it
            ranks = (rank for index, rank in self._ranks.items() if index in self._suspended)
            self._was_suspended = any(table.state(rank.pid) == "T" for rank in ranks)
            self._progress_s = now_s
            return
        why = f"{NO_PROGRESS} for {duration_text(now_s - self._progress_s)}"
        self._progress_s = 0.0
        for index in self._ranks:
            reasons.setdefault(index, ("hung", why))

    def _check(self, rank: _Rank, now_s: float, table: ProcessTable) -> tuple[str, str]:
        """Return a kind and a reason, as in HangSnapshot. Empty: nothing is wrong, or it is too early to know."""
        if now_s >= self._late_s(rank):
            rank.ready = True  # so that it is reported once
            return "late", f"was not ready after {duration_text(self._options.ready_timeout_s)}"
        if now_s < self._hang_s(rank):
            return "", ""
        state = table.state(rank.pid)
        why = rank.detector.check(
            now_s,
            *self._signs(rank),
            cpu_s=table.cpu_s(rank.pid),
            is_suspended=state == "t" or (state == "T" and rank.index in self._suspended),  # t: by a debugger
            reads_output=rank.reads_output,
            written=rank.written(table),
        )
        if why and state == "T":
            why += f": {AT_TERMINAL if rank.index in self._asking else SUSPENDED}"
        return "hung", why

    def _find(self, snapshots: list[HangSnapshot], *, is_before_stop: bool = False) -> HangFinding:
        if not is_before_stop:
            self._note_written()
        written, problem = write_snapshots([self._with_signs(snapshot) for snapshot in snapshots])
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None
        missed = [snapshot for snapshot in written if snapshot.kind]
        self._found |= {
            self._indexes[snapshot.rank]: (snapshot, self._check_s)
            for snapshot in missed
            if self._rank_of(snapshot) is not None
        }
        to_stop = [] if self._stopping else [snapshot.rank for snapshot in missed if self._must_stop(snapshot)]
        events = [self._event(snapshot) for snapshot in missed]
        return HangFinding(
            snapshots=written,
            ranks_to_stop=tuple(to_stop),
            problem=problem,
            events=events,
            is_before_stop=is_before_stop,
            is_cut_short=self._stopping and not is_before_stop,
        )

    def _note_written(self) -> None:
        """Record which ranks have written since the look began, as far as the launcher does not read it itself. The
        dump of a rank that was asked for its records is no sign of life."""
        now_s, table = time.monotonic(), ProcessTable()
        for rank in self._ranks.values():
            written, rank.written_at_look = rank.written_at_look, None
            if written is None or written == (later := rank.written(table)):
                continue
            if self._recorder is not None and os.path.exists(f"{self._recorder[0]}{rank.worker.rank}.pipe"):
                rank.detector.skip_written(now_s, later)
            else:
                rank.detector.note_written(now_s, later)

    def _rank_of(self, snapshot: HangSnapshot) -> _Rank | None:
        """Return the live rank of a snapshot. None: its process exited; its program may have restarted meanwhile."""
        rank = self._ranks.get(self._indexes[snapshot.rank])
        return None if rank is None or rank.pid != snapshot.pid else rank

    def _with_signs(self, snapshot: HangSnapshot) -> HangSnapshot:
        """Return a snapshot with the last signs of life of its rank."""
        rank = self._rank_of(snapshot)
        if rank is None:
            return snapshot
        epoch_s = time.time() - time.monotonic()
        value, progress_s = self._progress.get(rank.index, (None, 0.0))
        output_s = max(self._signs(rank)[0], rank.detector.written_s)
        idle_s = rank.detector.idle_since_s
        is_idle = self._options.hang_timeout_s and snapshot.cpu is not None and snapshot.cpu < _IDLE
        pids = {process.pid for process in snapshot.processes}
        return replace(
            snapshot,
            output_s=epoch_s + output_s if output_s else None,
            idle_s=epoch_s + idle_s if is_idle else None,
            progress=value,
            progress_s=epoch_s + progress_s if progress_s else None,
            gpu=None if self._gpus is None else self._gpus.use(rank.worker.uuids, pids),
        )

    def _event(self, snapshot: HangSnapshot) -> Event:
        index = self._indexes[snapshot.rank]
        return Event(
            kind=snapshot.kind, worker=index, rank=snapshot.rank, pid=snapshot.pid, time_ns=time.monotonic_ns()
        )

    def _must_stop(self, snapshot: HangSnapshot) -> bool:
        """Return whether to stop the job: the rank lives, and gave no sign of life while the snapshots were made."""
        rank = self._rank_of(snapshot)
        if rank is None or snapshot.kind == "late":
            return rank is not None
        if snapshot.why.startswith(NO_PROGRESS):
            return self._options.on_hang == "stop" and not self._progress_s
        return self._options.on_hang == "stop" and not rank.detector.has_come_back(max(self._signs(rank)))

    def close(self) -> None:
        """Kill and reap every py-spy."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None


def _report_order(why: str, index: int) -> tuple[bool, bool, int]:
    """Return a key: ranks with a reason come first, those that are stopped before others, which may wait for them."""
    return not why, not why.endswith((SUSPENDED, AT_TERMINAL)), index


def _subject(rank: _Rank, kind: str, why: str) -> RankToInspect:
    worker = rank.worker
    return RankToInspect(
        index=rank.index,
        rank=worker.rank,
        pid=rank.pid,
        kind=kind,
        why=why,
        program=worker.program,
        program_rank=worker.program_rank,
    )
