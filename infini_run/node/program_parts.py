"""--restart_scope=program: how the ranks of one program end and restart, while those of the others run on.

With --snapshots=failure, the launcher looks at its ranks first. These get the stop signal, then SIGKILL; so does what
they leave. Once nothing of it is left, its ranks start in the same group, when they may. Who decides that is
elsewhere: on one node program_restarts.py, of many nodes a head, for which headed_programs.py acts.
"""

from __future__ import annotations

import os
import time

from infini_run.errors import InfiniRunError, StartError
from infini_run.node.stdin_offset import rewind_stdin, stdin_offset
from infini_run.plan.next_attempt import with_restarted_program
from infini_run.record import replace
from infini_run.system.resource_limits import with_limit_hint
from infini_run.system.secure_files import heading_line, remove_error_files
from infini_run.system.signal_numbers import SIGINT, SIGKILL, SIGQUIT, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from infini_run.core.c_structs import Event, SpawnSpec
    from infini_run.core.group import Group
    from infini_run.node.group_setup import GroupSetup
    from infini_run.node.outcome import Outcome
    from infini_run.node.program_starts import ProgramStarts
    from infini_run.options.launch_options import OneProgram, Options
    from infini_run.plan.model import Plan
    from infini_run.report.pace import Pace
    from infini_run.report.report import Report
    from infini_run.watchdog.watchdog import Watchdog

    class PartedLaunch(Protocol):
        """A NodeLaunch, as far as its programs restart alone."""

        plan: Plan
        options: Options
        setup: GroupSetup

        @property
        def group(self) -> Group: ...
        @property
        def outcome(self) -> Outcome: ...
        @property
        def pace(self) -> Pace: ...
        @property
        def watchdog(self) -> Watchdog: ...
        def stop_watching(self, indexes: Sequence[int]) -> None: ...
        def specs(self) -> list[SpawnSpec]: ...
        def stop_after_failure(self, failed_s: float) -> None: ...
        def notice(self, text: str, *, is_kept: bool = True) -> None: ...
        def observe(self, event: Event) -> None: ...


NEVER = float("inf")
_GIVE_UP_S = 5.0  # what SIGKILL does not end by then; as the core's GIVE_UP_MS
_TRACKERS_S = 1.0  # what resource trackers have without a grace; as the core's TRACKERS_MS
RUNNING, LOOKING, ENDING, SWEEPING, WAITING = range(5)


class _Step:
    """A signal of a stop, and how long what gets it may take."""

    def __init__(self, number: int, limit_s: float, *, leaders: bool = False) -> None:
        self.number, self.limit_s, self.leaders = number, limit_s, leaders


class Part:
    """The ranks of one program on this node, and where they are between two of their attempts."""

    def __init__(self, launch: PartedLaunch, program: OneProgram) -> None:
        self.program = program
        self.indexes = [at for at, worker in enumerate(launch.plan.workers) if worker.program == program.name]
        self.ranks = [launch.plan.workers[at].rank for at in self.indexes]
        self.mark = os.fsencode(f"ROLE_NAME={program.name}")
        self.state = RUNNING
        self.steps: list[_Step] = []  # that are left of the stop
        self.due_s = NEVER  # when the next one is
        self.alive = set(self.indexes)  # of those that start or have started

    def enter(self, state: int, steps: Sequence[_Step] = ()) -> None:
        """Enter a state, whose first step is due."""
        self.state, self.steps, self.due_s = state, list(steps), 0.0 if steps else NEVER


class ProgramParts:
    """The programs of a launch on this node. Give it each event, then call `run_due`.

    Args:
        launch: The launch, before its ranks start.
        starts: Which programs wait for others. None: none does.
        renew: Forgets what ranks that restart have said, by their indexes in the plan.
    """

    def __init__(
        self, launch: PartedLaunch, starts: ProgramStarts | None, renew: Callable[[Sequence[int]], None]
    ) -> None:
        self._launch = launch
        self._starts = starts
        self._renew = renew
        self._first = launch.plan
        parts = [self._make_part(each) for each in launch.options.programs]
        self._parts = {part.program.name: part for part in parts if part.indexes}
        self._stdin_at = stdin_offset(launch.plan)
        self._is_over = False  # the job stops

    # ---- as a part of the launch's loop

    def on_event(self, event: Event) -> None:
        """Record one event of the group."""
        if event.kind in ("signalled", "ended"):
            self.cancel()
        elif event.kind == "started":
            self._part_of(event).alive.add(event.worker)
        elif event.kind == "exited":
            self._part_of(event).alive.discard(event.worker)

    def note_failure(self, rank: int, time_ns: int) -> None:
        """Note a rank because of which its program, or the job, ends.

        Args:
            rank: The rank.
            time_ns: When that was, by CLOCK_MONOTONIC.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Note that the job stops: no program starts any more."""
        self._is_over = True

    def decide(self) -> None:
        """Decide what follows the failures so far: before a stop of the job that is none."""

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        due_s = min((part.due_s for part in self._parts.values()), default=NEVER)
        if self._is_over or due_s == NEVER:
            return asked_s
        wait_s = max(0.0, due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> list[Event]:
        """Do what is due. Return events that the group has none of."""
        events: list[Event] = []
        for part in self._parts.values():
            if part.state != RUNNING and not self._is_over:
                events += self._advance(part)
        return events

    @property
    def is_idle(self) -> bool:
        """Whether all ranks exited, and none restarts."""
        parts = self._parts.values()
        return not any(part.alive or part.state != RUNNING for part in parts)

    def add_to(self, report: Report) -> Report:
        """Return the report of the launch with what became of the earlier attempts of its programs."""
        return report

    # ---- what a subclass decides

    def _make_part(self, program: OneProgram) -> Part:
        return Part(self._launch, program)

    def _on_gone(self, part: Part) -> None:
        """Act on the end of all ranks of a program, and of what they left."""
        raise NotImplementedError

    def _on_stuck(self, part: Part) -> list[Event]:
        """Act on what SIGKILL does not end. Return the events of that."""
        raise NotImplementedError

    def _restart_if_due(self, part: Part, now_s: float) -> list[Event]:
        """Start a program that waits, if it may. Return the events of that."""
        raise NotImplementedError

    # ---- one program

    def _part_of(self, event: Event) -> Part:
        return self._parts[self._launch.plan.workers[event.worker].program]

    def _part_with(self, rank: int) -> Part:
        return next(part for part in self._parts.values() if rank in part.ranks)

    def _latest_progress(self, part: Part) -> int:
        latest = self._launch.pace.latest()
        return max((latest[rank][0] for rank in part.ranks if rank in latest), default=-1)

    def _end(self, part: Part, *, with_snapshot: bool) -> None:
        """Begin to end the ranks of a program.

        Args:
            part: The program.
            with_snapshot: With --snapshots=failure after a look at them.
        """
        self._renew(part.indexes)
        part.enter(LOOKING)
        has_look = with_snapshot and self._launch.options.snapshots == "failure"
        part.due_s = self._launch.watchdog.look_before_restart(part.indexes) if has_look else 0.0

    def _has_look_ended(self, part: Part, now_s: float) -> bool:
        return now_s >= part.due_s or not self._launch.watchdog.is_looking_before_restart

    def _advance(self, part: Part) -> list[Event]:
        """Take the steps of a restart that are due."""
        now_s = time.monotonic()
        if part.state == LOOKING and self._has_look_ended(part, now_s):
            self._launch.stop_watching(part.indexes)
            part.enter(ENDING, _stop_steps(self._launch.options))
        for state, act in ((ENDING, self._signal), (SWEEPING, self._sweep)):
            if part.state == state:
                is_done, is_stuck = self._take_step(part, now_s, act)
                if is_stuck:
                    return self._on_stuck(part)
                if is_done and state == ENDING:
                    part.enter(SWEEPING, _sweep_steps(self._launch.options))
                elif is_done:
                    part.enter(WAITING)
                    self._on_gone(part)
        return self._restart_if_due(part, now_s) if part.state == WAITING else []

    def _take_step(self, part: Part, now_s: float, act: Callable[[Part, _Step | None], bool]) -> tuple[bool, bool]:
        """Take the next step of a stop if it is due. Return whether nothing is left, and whether something is left
        after the last step."""
        is_due = now_s >= part.due_s
        step = part.steps.pop(0) if is_due and part.steps else None
        if not act(part, step):
            return True, False
        if step is not None:
            part.due_s = now_s + step.limit_s
        return False, step is None and is_due

    def _signal(self, part: Part, step: _Step | None) -> bool:
        """Return whether ranks are left."""
        if step is not None:
            self._launch.group.part_signal(part.indexes, step.number, leaders=step.leaders)
        return bool(part.alive)

    def _sweep(self, part: Part, step: _Step | None) -> bool:
        """Return whether processes of ranks are left."""
        number = 0 if step is None else step.number
        return self._launch.group.part_leftovers(part.indexes, part.mark, number) > 0

    def _start(self, part: Part, restarts: int, heading: str) -> InfiniRunError | None:
        """Start the ranks of a program. If one has started, it runs. Else the console is full, which is tried again
        after the next event, or the launch stops.

        Args:
            part: The program.
            restarts: How many restarts it had, with this one.
            heading: For the logs of the ranks that start.

        Returns:
            Why they cannot start.
        """
        launch = self._launch
        plan = with_restarted_program(launch.plan, self._first, part.program.name, restarts)
        workers = [plan.workers[at] for at in part.indexes]
        try:
            remove_error_files(workers)
            if any(worker.stdin == "inherit" for worker in workers):
                rewind_stdin(self._stdin_at)
            started = self._start_again(plan, part, heading_line(heading))
        except InfiniRunError as error:
            return error
        if started:
            part.enter(RUNNING)
            part.alive.update(part.indexes[:started])
        if started is not None and started < len(part.indexes):
            self.cancel()  # the event of the stop is still to come
        return None

    def _start_again(self, plan: Plan, part: Part, heading: bytes) -> int | None:
        """Start the ranks of a program again, in order. It is the launch's plan from now on.

        Returns:
            How many have started; fewer: the launch stops. None: not yet, as the console has not taken all of their
            last output.

        Raises:
            UsageError: The port of --ready_port is in use.
            StartError: A rank could not be created. Some may have started.
        """
        launch, indexes = self._launch, part.indexes
        if self._starts is not None:
            self._starts.ask_port(part.program.name)
        launch.plan = plan
        specs = launch.specs()
        for index in indexes:
            specs[index].heading = heading
        try:
            started = launch.group.part_start(specs, launch.setup.base_env(plan), indexes)
        except StartError as error:
            raise with_limit_hint(error) from None
        if started:
            launch.stop_watching(indexes)
            launch.pace.drop(part.ranks)
            self._renew(indexes)
        return started

    def _report(self, part: Part) -> Report:
        """Return the report of one program so far."""
        report = self._launch.outcome.report()
        exits = tuple(each for each in report.exits if each.program == part.program.name)
        begun = [each.start_s for each in exits if each.start_s is not None]
        return replace(report, exits=exits, start_s=min(begun, default=report.start_s))


def _stop_steps(options: Options) -> list[_Step]:
    """Return how the ranks of a program are stopped, as the core stops all."""
    number, grace_s, last = options.stop_signal, options.grace_s, _Step(SIGKILL, _GIVE_UP_S)
    if grace_s <= 0:
        return [last]
    if options.stop_scope == "mixed":
        return [_Step(number, grace_s / 2, leaders=True), _Step(number, grace_s / 2), last]
    return [_Step(number, grace_s, leaders=options.stop_scope == "leader"), last]


def _sweep_steps(options: Options) -> list[_Step]:
    """Return how what they leave is stopped. A shell's background ignores INT and QUIT (POSIX, 2.11)."""
    number = SIGTERM if options.stop_signal in (SIGINT, SIGQUIT) else options.stop_signal
    first = _Step(number, options.grace_s) if options.grace_s > 0 else _Step(0, _TRACKERS_S)
    return [first, _Step(SIGKILL, _GIVE_UP_S)]
