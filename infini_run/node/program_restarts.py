"""--restart_scope=program: a program of which a rank failed ends and restarts, while the others run on.

Its ranks get the stop signal, then SIGKILL; so does what they leave. Once nothing of it is left, the delay of
--restart_delay has passed, and the programs that it waits for are up, its ranks start in the same group. Imported
with the flag.
"""

from __future__ import annotations

import os
import time

from infini_run.core.group import Event
from infini_run.errors import InfiniRunError, StartError
from infini_run.node.last_output import record_last_output
from infini_run.node.stdin_offset import rewind_stdin, stdin_offset
from infini_run.plan.restart_policy import NOT_ENDED, RestartState, with_restarted_program
from infini_run.record import replace
from infini_run.system.secure_files import remove_error_files, write_headings
from infini_run.system.signal_numbers import SIGINT, SIGKILL, SIGQUIT, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from infini_run.core.group import Group
    from infini_run.node.outcome import Outcome
    from infini_run.node.resources import LaunchResources
    from infini_run.options.options import OneProgram, Options
    from infini_run.plan.model import Plan
    from infini_run.report.pace import Pace
    from infini_run.report.report import Report

    class PartedLaunch(Protocol):
        """A NodeLaunch, as far as its programs restart alone."""

        plan: Plan
        options: Options

        @property
        def group(self) -> Group: ...
        @property
        def outcome(self) -> Outcome: ...
        @property
        def pace(self) -> Pace: ...
        @property
        def has_held(self) -> bool: ...
        def waits_for(self, programs: Sequence[str]) -> bool: ...
        def renew_counts(self, indexes: Sequence[int]) -> None: ...
        @property
        def resources(self) -> LaunchResources: ...
        def start_again(self, plan: Plan, indexes: Sequence[int]) -> bool: ...
        def stop_after_failure(self) -> None: ...
        def notice(self, text: str, *, is_kept: bool = True) -> None: ...
        def observe(self, event: Event) -> None: ...


_NEVER = float("inf")
_GIVE_UP_S = 5.0  # what SIGKILL does not end by then; as the core's GIVE_UP_MS
_TRACKERS_S = 1.0  # what resource trackers have without a grace; as the core's TRACKERS_MS
_RUNNING, _ENDING, _SWEEPING, _WAITING = range(4)


class _Step:
    """A signal of a stop, and how long what gets it may take."""

    def __init__(self, number: int, limit_s: float, *, leaders: bool = False) -> None:
        self.number, self.limit_s, self.leaders = number, limit_s, leaders


class _Part:
    """One program, and where it is between two of its attempts."""

    def __init__(self, launch: PartedLaunch, program: OneProgram) -> None:
        self.program = program
        self.indexes = [at for at, worker in enumerate(launch.plan.workers) if worker.program == program.name]
        self.restarts = RestartState(replace(launch.options, max_restarts=program.max_restarts))
        self.mark = os.fsencode(f"ROLE_NAME={program.name}")
        self.state = _RUNNING
        self.steps: list[_Step] = []  # that are left of the stop
        self.due_s = _NEVER  # when the next one is
        self.alive = set(self.indexes)  # of those that start or have started
        self.failed = -1  # the rank because of which it restarts

    def enter(self, state: int, steps: Sequence[_Step] = ()) -> None:
        """Enter a state, whose first step is due."""
        self.state, self.steps, self.due_s = state, list(steps), 0.0 if steps else _NEVER


class ProgramRestarts:
    """The restarts of the programs of a launch on this node. Give it each event, then call `run_due`.

    Args:
        launch: The launch, before its ranks start.
    """

    def __init__(self, launch: PartedLaunch) -> None:
        self._launch = launch
        self._first = launch.plan
        self._parts = {each.name: _Part(launch, each) for each in launch.options.programs}
        self._failed: list[int] = []  # ranks whose failure nobody has acted on
        self._stdin_at = stdin_offset(launch.plan)
        self._events: list[Event] = []  # that nobody has taken
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

    def note_failure(self, rank: int) -> None:
        """Note a rank because of which its program, or the job, ends: `run_due` acts on it."""
        self._failed.append(rank)

    def cancel(self) -> None:
        """Note that the job stops: no program starts any more."""
        self._is_over = True
        self._failed.clear()
        for part in self._parts.values():
            part.restarts.end_wait()

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return the seconds until `run_due` has something to do, at most `asked_s`. None: there is no limit."""
        due_s = min((part.due_s for part in self._parts.values()), default=_NEVER)
        if self._is_over or due_s == _NEVER:
            return asked_s
        wait_s = max(0.0, due_s - time.monotonic())
        return wait_s if asked_s is None else min(wait_s, asked_s)

    def run_due(self) -> list[Event]:
        """Do what is due. Return events that the group has none of."""
        self.decide()
        events, self._events = self._events, []
        for part in self._parts.values():
            if part.state != _RUNNING and not self._is_over:
                events += self._advance(part)
        if not self._is_over and not self._launch.has_held and self._is_idle:
            self._launch.group.stop()  # nothing is left that could start: all went well
        return events

    def decide(self) -> None:
        """Decide what follows the failures so far: before a stop of the job that is none."""
        while self._failed and not self._is_over:
            self._events += self._decide(self._failed.pop(0))

    @property
    def _is_idle(self) -> bool:
        """Whether all ranks exited, and none restarts."""
        parts = self._parts.values()
        return not any(part.alive or part.state != _RUNNING for part in parts)

    # ---- one program

    def _part_of(self, event: Event) -> _Part:
        return self._parts[self._launch.plan.workers[event.worker].program]

    def _decide(self, rank: int) -> list[Event]:
        """Let the program of a failed rank end, to restart, or all of them."""
        launch = self._launch
        part = next(each for each in self._parts.values() if rank in self._ranks(each))
        if part.state != _RUNNING:  # it ends already
            launch.outcome.clear_failures(self._ranks(part))
            return []
        self._failed = [each for each in self._failed if each not in self._ranks(part)]
        launch.outcome.set_first_failure(rank)
        record_last_output(launch.outcome, launch.group, launch.plan.workers)
        latest = launch.pace.latest()
        part.restarts.note_progress(
            max((latest[each][0] for each in self._ranks(part) if each in latest), default=-1)
        )
        return self._restart_or_stop(part, rank, part.restarts.decide(self._report(part)))

    def _restart_or_stop(self, part: _Part, rank: int, line: str) -> list[Event]:
        """Begin the restart that `line` announces. Empty: the failure ends the job."""
        launch, name = self._launch, part.program.name
        if not line:
            self.cancel()
            launch.outcome.set_first_failure(rank)
            launch.stop_after_failure()
            return []
        launch.outcome.clear_failures(self._ranks(part))
        launch.notice(f"{name}: {line}", is_kept=False)
        part.failed = rank
        launch.renew_counts(part.indexes)
        part.enter(_ENDING, _stop_steps(launch.options))
        event = Event(kind="restarting", code=part.restarts.total, name=name, time_ns=time.monotonic_ns())
        launch.observe(event)
        return [event, *self._advance(part)]

    def _advance(self, part: _Part) -> list[Event]:
        """Take the steps of a restart that are due."""
        now_s = time.monotonic()
        if part.state == _ENDING and self._is_done(part, now_s, self._signal):
            part.enter(_SWEEPING, _sweep_steps(self._launch.options))
        if part.state == _SWEEPING and self._is_done(part, now_s, self._sweep):
            part.enter(_WAITING)
            part.due_s = part.restarts.due_s
        if part.state == _WAITING and now_s >= part.restarts.due_s:
            part.due_s = _NEVER
            if not self._launch.waits_for(part.program.after):
                return self._start(part)
        return []

    def _is_done(self, part: _Part, now_s: float, act: Callable[[_Part, _Step | None], bool]) -> bool:
        """Take the next step of a stop if it is due; a stop without further ones ends the job. Return whether
        nothing is left."""
        is_due = now_s >= part.due_s
        step = part.steps.pop(0) if is_due and part.steps else None
        if not act(part, step):
            return True
        if step is not None:
            part.due_s = now_s + step.limit_s
        elif is_due:
            part.restarts.revoke(NOT_ENDED)
            self._restart_or_stop(part, part.failed, "")
        return False

    def _signal(self, part: _Part, step: _Step | None) -> bool:
        """Return whether ranks are left."""
        if step is not None:
            self._launch.group.part_signal(part.indexes, step.number, leaders=step.leaders)
        return bool(part.alive)

    def _sweep(self, part: _Part, step: _Step | None) -> bool:
        """Return whether processes of ranks are left."""
        number = 0 if step is None else step.number
        return self._launch.group.part_leftovers(part.indexes, part.mark, number) > 0

    def _start(self, part: _Part) -> list[Event]:
        """Start the ranks. Those that cannot start count as ranks that failed."""
        launch, restarts = self._launch, part.restarts
        plan = with_restarted_program(launch.plan, self._first, part.program.name, restarts.total)
        workers = [plan.workers[at] for at in part.indexes]
        try:
            remove_error_files(workers)
            if any(worker.stdin == "inherit" for worker in workers):
                rewind_stdin(self._stdin_at)
            if not launch.start_again(plan, part.indexes):
                return []  # the console is full: it is tried again after the next event
        except InfiniRunError as error:
            if isinstance(error, StartError):
                line = restarts.start_failed(str(error))
            else:
                restarts.give_up(str(error))
                line = ""
            return self._restart_or_stop(part, part.failed, line)
        write_headings(workers, launch.resources.logs, restarts.heading)
        restarts.begin()
        part.enter(_RUNNING)
        part.alive.update(part.indexes)
        return []

    def _ranks(self, part: _Part) -> list[int]:
        return [self._launch.plan.workers[at].rank for at in part.indexes]

    # ---- the report

    def _report(self, part: _Part) -> Report:
        """Return the report of one program so far."""
        report = self._launch.outcome.report()
        exits = tuple(each for each in report.exits if each.program == part.program.name)
        begun = [each.start_s for each in exits if each.start_s is not None]
        return replace(report, exits=exits, start_s=min(begun, default=report.start_s))

    def add_to(self, report: Report) -> Report:
        """Return the report of the launch with what became of the earlier attempts of its programs."""
        parts = self._parts.values()
        first = report.first_failure
        earlier = [each for part in parts for each in part.restarts.earlier if each != first]
        last = None if first is None else self._parts.get(first.program)
        return replace(
            report,
            restarts=sum(part.restarts.begun for part in parts),
            earlier_failures=tuple(sorted(earlier, key=lambda each: each.end_s or 0.0)),
            not_restarted="" if last is None else last.restarts.not_restarted,
        )


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
