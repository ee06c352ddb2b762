"""--restart_scope=program on a node of several: what the head decides is done here, and reported to it.

The head ends the ranks of a program on all its nodes once one has failed. It gets a report when they are gone here,
and starts them again when it may. Imported with the flag.
"""

from __future__ import annotations

from infini_run.errors import StartError
from infini_run.node.last_output import record_last_output
from infini_run.node.program_parts import NEVER, RUNNING, WAITING, ProgramParts
from infini_run.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infini_run.core.c_structs import Event
    from infini_run.node.program_parts import Part, PartedLaunch
    from infini_run.node.program_starts import ProgramStarts
    from infini_run.report.report import Report


@record
class PartEnd:
    """The end of the ranks of a program on this node.

    Attributes:
        program: Its name.
        report: Of these ranks, as they were when the head ended them.
        progress: The highest PROGRESS= of one; -1: none.
        has_ended: Nothing is left of them.
    """

    program: str
    report: Report
    progress: int
    has_ended: bool


@record
class NotStarted:
    """A program whose ranks cannot restart on this node.

    Attributes:
        program: Its name.
        problem: Why, in a sentence.
        is_final: They will not be able to later, either.
    """

    program: str
    problem: str
    is_final: bool


class HeadedPrograms(ProgramParts):
    """The programs of a launch on a node of several. `end` and `restart` are the head's words."""

    def __init__(
        self, launch: PartedLaunch, starts: ProgramStarts | None, renew: Callable[[Sequence[int]], None]
    ) -> None:
        super().__init__(launch, starts, renew)
        self._failed: list[int] = []  # ranks of programs that run, in the order of their failures
        self._late: list[int] = []  # ranks that failed before the signal that ends them came
        self._failures: list[tuple[int, int]] = []  # failures for the head, each with its time
        self._ends: dict[str, PartEnd] = {}  # of programs that end, for later
        self._reports: list[PartEnd | NotStarted] = []  # for the head
        self._restarts: dict[str, tuple[int, str]] = {}  # of programs that may start: how many, and for their logs

    # ---- as a part of the launch's loop

    def note_failure(self, rank: int, time_ns: int) -> None:
        """Note a rank that failed, for the head."""
        self._failures.append((rank, time_ns))
        if self._part_with(rank).state == RUNNING:
            self._failed.append(rank)
        else:
            self._late.append(rank)

    def cancel(self) -> None:
        """Note that the job stops: no program starts any more, and the head learns of those that were ending."""
        super().cancel()
        self._reports += self._ends.values()
        self._ends.clear()

    def run_due(self) -> list[Event]:
        """Do what is due. Return events that the group has none of."""
        self._take_late()
        return super().run_due()

    def _take_late(self) -> None:
        """Take back the failures of ranks whose program ended already."""
        late, self._late = self._late, []
        for rank in late:
            part = self._part_with(rank)
            end = self._ends.get(part.program.name)
            if end is not None and end.report.first_failure is None:
                self._ends[part.program.name] = replace(end, report=self._report_failure(part, [rank]))
            self._clear_failures(part)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due`, or who takes the reports, has something to do, at most `asked_s`."""
        return 0.0 if self._reports or self._failures else super().timeout_s(asked_s)

    def take_failures(self) -> list[tuple[int, int]]:
        """Return the ranks that failed since the last call, with the time of that (CLOCK_MONOTONIC, ns)."""
        failures, self._failures = self._failures, []
        return failures

    def take_reports(self) -> list[PartEnd | NotStarted]:
        """Return what else the head is to know. Its events so far come before."""
        self._take_late()
        reports, self._reports = self._reports, []
        return reports

    # ---- the head's words

    def end(self, program: str, *, with_snapshot: bool) -> None:
        """End the ranks of a program here: one has failed on some node.

        Args:
            program: Its name.
            with_snapshot: With --snapshots=failure after a look at them. A hang had that of all nodes.
        """
        part = self._parts.get(program)
        if part is not None and part.state == WAITING and self._restarts.pop(program, None) is not None:
            part.due_s = NEVER  # another node could not start its ranks, before this one did
            report = self._report_failure(part, [])
            self._reports.append(PartEnd(program=program, report=report, progress=-1, has_ended=True))
        if part is None or part.state != RUNNING:
            return
        failed = [rank for rank in self._failed if rank in part.ranks]
        failed += [each.rank for each in self._launch.outcome.exits() if each.is_failure and each.rank in part.ranks]
        progress = self._latest_progress(part)
        report = self._report_failure(part, failed[:1])
        self._ends[program] = PartEnd(program=program, report=report, progress=progress, has_ended=True)
        self._clear_failures(part)
        if self._is_over:
            self.cancel()
        else:
            self._end(part, with_snapshot=with_snapshot)

    def _report_failure(self, part: Part, failed: list[int]) -> Report:
        """Return the report of a program so far, with the last output of a rank that failed, if one did."""
        launch = self._launch
        if failed:
            launch.outcome.set_first_failure(failed[0])
            record_last_output(launch.outcome, launch.group, launch.plan.workers)
        report = replace(self._report(part), snapshots=(), notices=(), leftover_processes=(), stuck=(), slow=())
        return report if failed else replace(report, first_failure=None)

    def _clear_failures(self, part: Part) -> None:
        """Take back the failures of a program that restarts. The first one of the others is that of the job."""
        outcome = self._launch.outcome
        outcome.clear_failures(part.ranks)
        self._failed = [rank for rank in self._failed if rank not in part.ranks]
        if outcome.first is None and self._failed:
            outcome.set_first_failure(self._failed[0])

    def restart(self, program: str, restarts: int, heading: str) -> bool:
        """Start the ranks of a program again.

        Args:
            program: Its name.
            restarts: How many restarts it had, with this one.
            heading: For its logs.

        Returns:
            False: it has not ended here.
        """
        part = self._parts.get(program)
        if self._is_over:
            return True
        if part is None or part.state != WAITING:
            return False
        self._restarts[program] = restarts, heading
        part.due_s = 0.0
        return True

    # ---- one program

    def _has_look_ended(self, part: Part, now_s: float) -> bool:
        return now_s >= part.due_s  # all nodes stop their ranks then: the end of one changes what others see

    def _on_gone(self, part: Part) -> None:
        self._report_end(part, has_ended=True)

    def _on_stuck(self, part: Part) -> list[Event]:
        self._report_end(part, has_ended=False)
        part.due_s = NEVER
        return []

    def _report_end(self, part: Part, *, has_ended: bool) -> None:
        end = self._ends.pop(part.program.name, None)
        if end is not None:  # else the head knows: it ends the job
            self._reports.append(replace(end, has_ended=has_ended))

    def _restart_if_due(self, part: Part, now_s: float) -> list[Event]:
        part.due_s = NEVER
        if part.program.name not in self._restarts:
            return []
        error = self._start(part, *self._restarts[part.program.name])
        if error is not None:
            is_final = not isinstance(error, StartError)
            self._reports.append(NotStarted(program=part.program.name, problem=str(error), is_final=is_final))
            part.enter(RUNNING)  # until the head ends it: some ranks may have started
        if part.state == RUNNING:
            del self._restarts[part.program.name]
        return []
