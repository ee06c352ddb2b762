"""The programs of a launch on one node: which wait for others, whose end is that of the job, which restart alone.

Imported where a program's flag asks for one of the three.
"""

from __future__ import annotations

from infini_run.errors import StartError, counted
from infini_run.system.resource_limits import with_limit_hint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from infini_run.core.c_structs import Event
    from infini_run.node.headed_programs import HeadedPrograms
    from infini_run.node.launch_head import LaunchHead
    from infini_run.node.program_parts import PartedLaunch, ProgramParts
    from infini_run.node.program_starts import ProgramStarts
    from infini_run.node.readiness import ReadyRanks
    from infini_run.plan.model import Worker
    from infini_run.report.report import Report

    class ProgramsLaunch(PartedLaunch, Protocol):
        """A NodeLaunch, as far as its programs start, end, or restart each on its own."""

        ready: ReadyRanks | None

        @property
        def may_start(self) -> bool: ...
        def note_up(self, program: str) -> None: ...
        def stop(self) -> None: ...
        def close(self) -> None: ...


class LaunchPrograms:
    """The programs of a launch. Give it each event of the group; the launch's loop runs `starts` and `parts`.

    Args:
        launch: The launch, before its ranks start.
        head: It decides for all nodes. None: this node decides.

    Attributes:
        starts: Which programs wait for others. None: none does.
        parts: How they restart alone. None: they don't.
        headed: The same, where a head decides about it; else None.

    Raises:
        UsageError: The port of --ready_port is in use.
    """

    def __init__(self, launch: ProgramsLaunch, head: LaunchHead | None) -> None:
        self._launch = launch
        self._head = head
        programs = launch.options.programs
        counts = {each.name: self._count_ranks(each.name) for each in programs}
        self._running = {each.name: counts[each.name] for each in programs if each.ends_job and counts[each.name]}
        self.starts: ProgramStarts | None = None
        self.parts: ProgramParts | None = None
        self.headed: HeadedPrograms | None = None
        if any(program.after for program in programs):
            from infini_run.node.program_starts import ProgramStarts

            self.starts = ProgramStarts(programs, counts, self._on_up)
        if launch.options.restart_scope == "program" and head is not None:
            from infini_run.node.headed_programs import HeadedPrograms

            self.parts = self.headed = HeadedPrograms(launch, self.starts, self.renew)
        elif launch.options.restart_scope == "program":
            from infini_run.node.program_restarts import ProgramRestarts

            self.parts = ProgramRestarts(launch, self.starts, self.renew)

    def _count_ranks(self, program: str) -> int:
        return sum(worker.program == program for worker in self._launch.plan.workers)

    @property
    def starts_more(self) -> bool:
        """Whether ranks may start later: those of programs that wait, or that restart."""
        return self.parts is not None or (self.starts is not None and self.starts.has_held)

    # ---- what ranks do

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        if event.kind == "ready":
            self._note_up(self._launch.plan.workers[event.worker])
        elif event.kind == "exited" and not (event.code or event.signal or event.status_lost or event.after_stop):
            self._note_good_end(self._launch.plan.workers[event.worker])
        if self.parts is not None:
            self.parts.on_event(event)

    def note_failure(self, rank: int, time_ns: int) -> bool:
        """Note a rank that failed, hangs, or is late.

        Args:
            rank: The rank.
            time_ns: When that was, by CLOCK_MONOTONIC.

        Returns:
            Whether its program alone ends for it, or the parts decide. False: the job does.
        """
        if self.parts is not None:
            self.parts.note_failure(rank, time_ns)
        return self.parts is not None

    def _note_good_end(self, worker: Worker) -> None:
        """Stop the job after the good end of a program with --ends_job. Another one is up then."""
        name = worker.program
        if name in self._running:
            self._running[name] -= 1
            if not self._running[name]:
                self._end_job(name)
                return
        self._note_up(worker)

    def _end_job(self, name: str) -> None:
        if self._head is not None:
            self._head.on_program_end(name)
            return
        if self.parts is not None:
            self.parts.decide()  # a failure before this end may be none of the job's
        self._launch.outcome.record_ender(name)
        self._launch.stop()

    def _note_up(self, worker: Worker) -> None:
        """Note that a rank is ready, or exited with code 0."""
        if self.starts is not None:
            self.starts.note(worker.program, worker.rank)

    def _on_up(self, name: str) -> None:
        """Start the programs that wait for one, or let a head decide about that."""
        self._launch.note_up(name)
        if self._head is not None:
            self._head.on_program_up(name)
        elif self.starts is not None:
            self.start(self.starts.take_free(name))

    # ---- what the launch, or the head, does

    def start(self, names: Sequence[str]) -> None:
        """Start the ranks of programs that waited for others, unless the launch stops.

        Args:
            names: Of the programs.

        Raises:
            StartError: A rank could not be created. Then none is left.
        """
        launch = self._launch
        indexes = [index for index, worker in enumerate(launch.plan.workers) if worker.program in names]
        if not indexes or not launch.may_start:
            return
        try:
            started = launch.group.start_held(indexes)
        except StartError as error:
            launch.close()
            raise with_limit_hint(error) from None
        if launch.options.verbose:
            launch.notice(f"started {counted(started, 'rank')} of {', '.join(names)}", is_kept=False)

    def renew(self, indexes: Sequence[int]) -> None:
        """Forget what the ranks of a program have said, and that some may have exited: they restart.

        Args:
            indexes: The indexes of all of them in the plan.
        """
        if self._launch.ready is not None:
            self._launch.ready.remove(indexes)
        name = self._launch.plan.workers[indexes[0]].program
        if name in self._running:
            self._running[name] = len(indexes)
        if self.starts is not None:
            self.starts.renew(name, len(indexes))

    def cancel(self) -> None:
        """Note that the job stops: no program restarts any more."""
        if self.parts is not None:
            self.parts.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether all ranks here exited, and only the head knows whether some restart."""
        return self.headed is not None and self.headed.is_idle

    def add_to(self, report: Report) -> Report:
        """Return the report of the launch with what became of the earlier attempts of its programs."""
        return report if self.parts is None else self.parts.add_to(report)
