"""The deadlines of live ranks: READY=1 in time, signs of life after that; and the look at all of them when one is
missed. It looks and tells; what is done about it is decided where it is called.

Not imported, and nothing wakes up for it, where no deadline was asked for.
"""

from __future__ import annotations

import os
import time

from infini_run.core.group import Event
from infini_run.record import record
from infini_run.report.text import duration_text
from infini_run.system.procfs import ProcessTable
from infini_run.watchdog.hang_detector import HangDetector
from infini_run.watchdog.snapshot_collector import RankToInspect, SnapshotCollector, write_looks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from infini_run.core.group import Group, ProcessAtEntry
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan, Worker
    from infini_run.report.hang_snapshot import HangSnapshot

_GATHER = 0.05  # of a timeout: ranks that fall silent one after the other are looked at together
_CONT = 18


@record
class Finding:
    """What was seen, those first for whom it was looked; `blamed`: ranks for which the job is to be stopped;
    `problem`: why a file could not be written."""

    looks: tuple[HangSnapshot, ...]
    blamed: tuple[int, ...]
    problem: str
    events: list[Event]


class _Rank:
    """A live one. `ready`: it said so, or nobody asks."""

    def __init__(self, index: int, worker: Worker, event: Event, options: Options) -> None:
        self.index = index
        self.worker = worker
        self.pid = event.pid
        self.start_s = event.time_ns / 1e9
        self.ready = not options.ready_timeout_s
        self.vigil = HangDetector(options.hang_timeout_s or float("inf"), self.start_s)
        self.carries = worker.stdout.piped and worker.stderr.piped


class Watchdog:
    """For one launch on this node: follow its events, wait as long as it says, then `act`. Times are monotonic."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        group: Group,
        *,
        entry: ProcessAtEntry | None,
        environ: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._options = options
        self._group = group
        self._entry = entry
        self._environ = environ
        self._folder = os.path.abspath(options.log_dir) if options.log_dir else ""  # we shall sit in /
        self._ranks: dict[int, _Rank] = {}
        self._reasons: dict[int, tuple[str, str]] = {}  # by index: kind and why, not looked at yet
        self._inquest: SnapshotCollector | None = None
        self._due_s: float | None = None  # the next deadline, or one before it: signs of life only put them off
        self._stopping = False

    # ---- what happens

    def follow(self, event: Event) -> None:
        """Take one event of the group in."""
        self._due_s = None if event.kind in ("started", "triggered") else self._due_s
        if event.kind == "started":
            worker = self._plan.workers[event.worker]
            self._ranks[event.worker] = _Rank(event.worker, worker, event, self._options)
        elif event.kind == "exited":
            self._ranks.pop(event.worker, None)
        elif event.kind == "signalled":
            self.stop()
        elif event.kind == "forwarded" and event.signal == _CONT:
            self._resume()
        elif event.worker in self._ranks:
            self._note(self._ranks[event.worker], event)

    def _note(self, rank: _Rank, event: Event) -> None:
        if event.kind == "ready":
            rank.ready = True
        elif event.kind == "triggered":
            why = rank.vigil.trigger(time.monotonic(), self._signs(rank)[0])
            if why and not self._stopping:
                self._reasons[rank.index] = ("hung", why)

    def stop(self) -> None:
        """The ranks are being stopped: nobody is late any more, and no look may hold them up."""
        self._stopping = True
        self._due_s = None
        self._reasons.clear()
        if self._inquest is not None:
            self._inquest.abandon("the job was being stopped")

    def _resume(self) -> None:
        """We were continued, and the ranks with us: how long we had all been stopped is nobody's silence."""
        now_s = time.monotonic()
        self._due_s = None
        for rank in self._ranks.values():
            rank.start_s = now_s
            rank.vigil.refresh(now_s)

    # ---- how long to wait

    def timeout_s(self, asked_s: float | None) -> float | None:
        """The time until the next deadline, or what was asked for; None: for ever."""
        now_s = time.monotonic()
        deadline_s = self._deadline_s(now_s)
        if deadline_s == float("inf"):
            return asked_s
        wait_s = max(0.0, deadline_s - now_s)
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def fds(self) -> list[int]:
        """What else to wait for."""
        return [] if self._inquest is None else self._inquest.fds()

    def _deadline_s(self, now_s: float) -> float:
        if self._inquest is not None:
            return self._inquest.deadline_s
        if self._due_s is None or now_s >= self._due_s:
            self._due_s = self._next_s()
        return self._due_s

    def _next_s(self) -> float:
        if self._reasons:
            return 0.0
        if self._stopping:
            return float("inf")
        late_s = min((self._late_s(rank) for rank in self._ranks.values()), default=float("inf"))
        hang_s = min((self._hang_s(rank) for rank in self._ranks.values()), default=float("inf"))
        return min(late_s, hang_s + self._options.hang_timeout_s * _GATHER)

    def _late_s(self, rank: _Rank) -> float:
        return float("inf") if rank.ready else rank.start_s + self._options.ready_timeout_s

    def _hang_s(self, rank: _Rank) -> float:
        return rank.vigil.deadline_s(*self._signs(rank)) if self._options.hang_timeout_s else float("inf")

    def _signs(self, rank: _Rank) -> tuple[float, float]:
        said_ns, ping_ns = self._group.activity(rank.index)
        return said_ns / 1e9, ping_ns / 1e9

    # ---- what to do then

    def act(self) -> Finding | None:
        """Do what is due, without blocking; what was found, once it is complete."""
        now_s = time.monotonic()
        if self._inquest is None and now_s >= self._deadline_s(now_s):
            self._inquest = self._judge_all(now_s)
        if self._inquest is None:
            return None
        self._inquest.step(now_s)
        if not self._inquest.done:
            return None
        looks, self._inquest = self._inquest.looks, None
        return self._find(looks) if looks else None

    def _judge_all(self, now_s: float) -> SnapshotCollector | None:
        """A look at all ranks, where one of them gives reason for it."""
        table = ProcessTable()
        self._due_s = None
        reasons, self._reasons = self._reasons, {}
        for rank in self._ranks.values() if not self._stopping else ():
            kind, why = self._judge(rank, now_s, table)
            if why:
                reasons.setdefault(rank.index, (kind, why))
        if reasons.keys().isdisjoint(self._ranks):
            return None
        order = sorted(self._ranks.values(), key=lambda rank: (rank.index not in reasons, rank.index))
        return SnapshotCollector(
            [_subject(rank, *reasons.get(rank.index, ("", ""))) for rank in order],
            table,
            group=self._group,
            entry=self._entry,
            environ=self._environ,
            folder=self._folder,
        )

    def _judge(self, rank: _Rank, now_s: float, table: ProcessTable) -> tuple[str, str]:
        """Its kind, and why; empty: nothing is wrong, or it is not its turn."""
        if now_s >= self._late_s(rank):
            rank.ready = True  # no second time
            return "late", f"was not ready after {duration_text(self._options.ready_timeout_s)}"
        if now_s < self._hang_s(rank):
            return "", ""
        return "hung", rank.vigil.judge(
            now_s,
            *self._signs(rank),
            cpu_s=table.cpu_s(rank.pid),
            is_stopped=table.state(rank.pid) in ("T", "t"),
            carries=rank.carries,
        )

    def _find(self, looks: list[HangSnapshot]) -> Finding:
        written, problem = write_looks(looks)
        reasons = [look for look in written if look.kind]
        blamed = () if self._stopping else tuple(look.rank for look in reasons if self._is_blamed(look))
        return Finding(looks=written, blamed=blamed, problem=problem, events=[self._event(look) for look in reasons])

    def _event(self, look: HangSnapshot) -> Event:
        index = look.rank - self._plan.workers[0].rank
        return Event(kind=look.kind, worker=index, rank=look.rank, pid=look.pid, time_ns=time.monotonic_ns())

    def _is_blamed(self, look: HangSnapshot) -> bool:
        """It lives, and has not come back to life while we looked."""
        rank = next((rank for rank in self._ranks.values() if rank.worker.rank == look.rank), None)
        if rank is None or look.kind == "late":
            return rank is not None
        return self._options.on_hang == "stop" and not rank.vigil.has_come_back(max(self._signs(rank)))

    def close(self) -> None:
        """End our helpers."""
        if self._inquest is not None:
            self._inquest.close()
            self._inquest = None


def _subject(rank: _Rank, kind: str, why: str) -> RankToInspect:
    return RankToInspect(index=rank.index, rank=rank.worker.rank, pid=rank.pid, kind=kind, why=why)
