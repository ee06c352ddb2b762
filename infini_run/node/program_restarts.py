"""--restart_scope=program on one node: whether a program restarts after the failure of a rank, and when.

It restarts once nothing of it is left (program_parts.py), the delay of --restart_delay has passed, and the programs
that it waits for are up. Imported with the flag.
"""

from __future__ import annotations

import time

from infini_run.core.c_structs import Event
from infini_run.errors import StartError
from infini_run.node.last_output import record_last_output
from infini_run.node.program_parts import NEVER, RUNNING, Part, ProgramParts
from infini_run.plan.restart_policy import NOT_ENDED, restart_states
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.node.program_parts import PartedLaunch
    from infini_run.node.program_starts import ProgramStarts
    from infini_run.plan.restart_policy import RestartState
    from infini_run.report.report import Report


class ProgramRestarts(ProgramParts):
    """The restarts of the programs of a launch on one node."""

    def __init__(
        self, launch: PartedLaunch, starts: ProgramStarts | None, renew: Callable[[Sequence[int]], None]
    ) -> None:
        super().__init__(launch, starts, renew)
        self._restarts = restart_states(launch.options)
        self._failed: list[int] = []  # ranks whose failure nobody has acted on
        self._causes: dict[str, int] = {}  # the rank because of which a program restarts
        self._events: list[Event] = []  # that nobody has taken

    def _restarts_of(self, part: Part) -> RestartState:
        return self._restarts[part.program.name]

    # ---- as a part of the launch's loop

    def note_failure(self, rank: int, time_ns: int) -> None:
        """Note a rank because of which its program, or the job, ends: `run_due` acts on it."""
        self._failed.append(rank)

    def cancel(self) -> None:
        """Note that the job stops: no program starts any more."""
        super().cancel()
        self._failed.clear()
        for restarts in self._restarts.values():
            restarts.end_wait()

    def decide(self) -> None:
        """Decide what follows the failures so far: before a stop of the job that is none."""
        while self._failed and not self._is_over:
            self._events += self._decide(self._failed.pop(0))

    def run_due(self) -> list[Event]:
        """Do what is due. Return events that the group has none of."""
        self.decide()
        events, self._events = self._events, []
        events += super().run_due()
        has_held = self._starts is not None and self._starts.has_held
        if not self._is_over and not has_held and self.is_idle:
            self._launch.group.stop()  # nothing is left that could start: all went well
        return events

    # ---- one program

    def _decide(self, rank: int) -> list[Event]:
        """Let the program of a failed rank end, to restart, or all of them."""
        launch, part = self._launch, self._part_with(rank)
        if part.state != RUNNING:  # it ends already
            launch.outcome.clear_failures(part.ranks)
            return []
        self._failed = [each for each in self._failed if each not in part.ranks]
        launch.outcome.set_first_failure(rank)
        record_last_output(launch.outcome, launch.group, launch.plan.workers)
        restarts = self._restarts_of(part)
        restarts.note_progress(self._latest_progress(part))
        first = launch.outcome.first_failure()
        with_snapshot = first is not None and not first.watchdog_reason  # a rank that hung, or was late, had its look
        return self._restart_or_stop(part, rank, restarts.decide(self._report(part)), with_snapshot=with_snapshot)

    def _restart_or_stop(self, part: Part, rank: int, line: str, *, with_snapshot: bool = False) -> list[Event]:
        """Begin the restart that `line` announces, after a look at its ranks if `with_snapshot`. Empty: the failure
        ends the job."""
        launch, name = self._launch, part.program.name
        if not line:
            self.cancel()
            launch.outcome.set_first_failure(rank)
            launch.stop_after_failure(time.monotonic())
            return []
        launch.outcome.clear_failures(part.ranks)
        launch.notice(f"{name}: {line}", is_kept=False)
        self._causes[name] = rank
        self._end(part, with_snapshot=with_snapshot)
        total = self._restarts_of(part).total
        event = Event(kind="restarting", code=total, name=name, time_ns=time.monotonic_ns())
        launch.observe(event)
        return [event, *self._advance(part)]

    def _on_gone(self, part: Part) -> None:
        part.due_s = self._restarts_of(part).due_s

    def _on_stuck(self, part: Part) -> list[Event]:
        self._restarts_of(part).revoke(NOT_ENDED)
        return self._restart_or_stop(part, self._causes[part.program.name], "")

    def _restart_if_due(self, part: Part, now_s: float) -> list[Event]:
        """Start the ranks, once the delay has passed. Those that cannot start count as ranks that failed."""
        restarts = self._restarts_of(part)
        if now_s < restarts.due_s:
            return []
        part.due_s = NEVER
        if self._starts is not None and self._starts.waits_for(part.program.after):
            return []
        error = self._start(part, restarts.total, restarts.heading)
        if error is None:
            if part.state == RUNNING:
                restarts.begin()
            return []
        line = ""
        if isinstance(error, StartError):
            line = restarts.start_failed(str(error))
        else:
            restarts.give_up(str(error))
        return self._restart_or_stop(part, self._causes[part.program.name], line)

    # ---- the report

    def add_to(self, report: Report) -> Report:
        """Return the report of the launch with what became of the earlier attempts of its programs."""
        first = report.first_failure
        last = None if first is None else self._restarts.get(first.program)
        earlier = [each for restarts in self._restarts.values() for each in restarts.earlier if each != first]
        return replace(
            report,
            restarts=sum(restarts.begun for restarts in self._restarts.values()),
            earlier_failures=tuple(sorted(earlier, key=lambda each: each.end_s or 0.0)),
            not_restarted="" if last is None else last.not_restarted,
        )
