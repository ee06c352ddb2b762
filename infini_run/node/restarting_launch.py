"""A launch that may be started again: one NodeLaunch after the other, each ended completely before the next begins.

It stands where a NodeLaunch stands, for the command and for the Python API alike, and is imported only where
--max_restarts is given. Between two attempts nothing of ours is there but a group of no workers: it takes signals
as any group does, and the delay is one wait for it.
"""

from __future__ import annotations

import os
import stat
import time
from _thread import RLock

from infini_run.core.group import Event, Group, debug_flags
from infini_run.errors import InfiniRunError, StartError, printable
from infini_run.node.launch import NodeLaunch
from infini_run.plan.program import absolute
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infini_run.core.group import ProcessAtEntry
    from infini_run.display.observers import Observers
    from infini_run.node.outcome import Outcome
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan
    from infini_run.plan.restart_policy import Decision, RestartCount
    from infini_run.report.report import Exit, Report

_KEPT = 100  # first failures, the last of them: a window may allow restarts without end


class RestartingLaunch:
    """A plan's workers on this node, through all attempts: start, poll until `ended`, close. As NodeLaunch says;
    cwd and the log directory are those of the first attempt, wherever the process goes meanwhile."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        environ: Mapping[str, str],
        entry: ProcessAtEntry | None = None,
        cwd: str | None = None,
        say: Callable[[str], None] | None = None,
        seeing: Observers | None = None,
    ) -> None:
        log_dir = absolute("log_dir", options.log_dir) if options.log_dir else ""
        self._options = replace(options, log_dir=log_dir)
        self._environ = environ
        self._entry = entry
        self._cwd = cwd if cwd or entry is not None else _here()
        self._say = say
        self._seeing = seeing
        self._launch_id = plan.launch_id
        self._stdin_at = _stdin_offset(plan)
        self._lock = RLock()
        self._run = self._attempt(plan)
        self._pause: Group | None = None
        self._due_s = 0.0
        self._heading = ""
        self._stopped = self._over = False
        self._told = 0  # the signal that ended a pause
        self._tally: RestartCount | None = None  # no restart so far
        self._earlier: list[Exit] = []
        self._why_not = ""

    def _attempt(self, plan: Plan, heading: str = "") -> NodeLaunch:
        return NodeLaunch(
            plan,
            self._options,
            environ=self._environ,
            entry=self._entry,
            cwd=self._cwd,
            say=self._say,
            heading=heading,
            seeing=self._seeing,
        )

    # ---- as a NodeLaunch

    def start(self) -> None:
        """Start every worker for the first time. Raises as NodeLaunch.start."""
        self._run.start()

    @property
    def ended(self) -> bool:
        return self._over

    @property
    def went_well(self) -> bool:
        """The last attempt did, and there is nothing to tell."""
        return self._over and self._run.went_well

    @property
    def plan(self) -> Plan:
        """Of the attempt that runs, or ran last; so is the outcome."""
        return self._run.plan

    @property
    def outcome(self) -> Outcome:
        return self._run.outcome

    def note_statuses(self) -> None:
        self._run.note_statuses()

    def signal(self, number: int, rank: int | None = None) -> int:
        """As NodeLaunch.signal; between two attempts it reaches nobody."""
        return self._run.signal(number, rank)

    def stop(self) -> None:
        """Begin to stop what runs, and start nothing any more."""
        with self._lock:
            self._stopped = True
            self._run.stop()
            self._wake()

    def kill(self) -> None:
        """The same with SIGKILL, at once."""
        with self._lock:
            self._stopped = True
            self._run.kill()
            self._wake()

    def _wake(self) -> None:
        """Whoever waits for the delay to pass."""
        if self._pause is not None:
            self._pause.close()

    def close(self) -> None:
        """Kill and reap what is left. Safe twice."""
        with self._lock:
            self._stopped = self._over = True
            self._end_pause()
            self._run.close()

    def after_fork_in_child(self) -> None:
        """In a forked child: all of it is our parent's."""
        self._lock, self._over = RLock(), True
        self._run.after_fork_in_child()
        if self._pause is not None:
            self._pause.after_fork_in_child()
            self._pause = None

    def report(self) -> Report:
        """How the last attempt ended, and what became of those before it."""
        with self._lock:
            report = replace(
                self._run.report(),
                restarts=0 if self._tally is None else self._tally.total,
                earlier_failures=tuple(self._earlier),
                not_restarted=self._why_not,
            )
            return replace(report, told=self._told, first_failure=None) if self._told else report

    # ---- from one attempt to the next

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> list[Event]:
        """As NodeLaunch.poll. An attempt that is not the last one ends with `restarting` in place of `ended`."""
        with self._lock:
            run, pause = self._run, self._pause
        if pause is not None:
            return self._rest(pause, timeout_s, also)
        events = run.poll(timeout_s, also)
        with self._lock:
            more = self._settle() if run is self._run and run.ended and self._pause is None else []
            is_last = run is self._run and self._over
        return [event for event in events if event.kind != "ended" or is_last] + more

    def _settle(self) -> list[Event]:
        """An attempt has ended: is there another one?"""
        if self._over or self._stopped or self._run.went_well:
            self._over = True
            return []
        self._run.close()
        from infini_run.plan.restart_policy import RestartCount, decide

        report = self._run.report()
        decision = decide(report, self._options, self._tally or RestartCount(), _chance())
        what = "; ".join(filter(None, (report.headline(), report.left_behind())))
        return self._take(decision, report.first_failure, what)

    def _take(self, decision: Decision, first: Exit | None, what: str) -> list[Event]:
        """Do as was decided. what: the failure in a sentence; first: the rank's, where there was one."""
        if not decision.again:
            self._over, self._why_not = True, decision.why or ("" if first else what)
            return []
        try:
            self._pause = self._open_pause()
        except StartError as error:
            self._over, self._why_not = True, str(error)
            return []
        from infini_run.plan.restart_policy import describe
        from infini_run.report.report import duration_text

        self._due_s = time.monotonic() + decision.delay_s
        self._tally = decision.tally
        self._earlier = [*self._earlier, *([] if first is None else [first])][-_KEPT:]
        count = describe(decision.tally, self._options)
        self._heading = f"{count}: {what}"
        self._tell(f"{count} in {duration_text(decision.delay_s)}: {what}")
        return [self._shown(Event(kind="restarting", code=decision.tally.total, time_ns=time.monotonic_ns()))]

    def _open_pause(self) -> Group:
        return Group(
            0,
            mark=os.fsencode(self._launch_id),
            grace_s=0,
            stop_signal=self._options.stop_signal,
            stop_scope=self._options.stop_scope,
            entry=self._entry,
            debug=debug_flags(self._environ),
        )

    def _rest(self, pause: Group, timeout_s: float | None, also: Sequence[int]) -> list[Event]:
        """Wait for the delay to pass, at most `timeout_s`; a signal that stops, or who calls stop, ends it."""
        left_s = max(0.0, self._due_s - time.monotonic())
        pause.wait(left_s if timeout_s is None else min(left_s, timeout_s), also)
        with self._lock:
            if pause is not self._pause:
                return []  # another thread was here
            told = [event for event in pause.step() if event.kind == "told"]
            if not told and not self._stopped:
                return self._begin() if time.monotonic() >= self._due_s else []
            self._end_pause()
            self._over = True
            if told:
                self._note_told(self._shown(told[0]).signal)
            return [*told[:1], Event(kind="ended", time_ns=time.monotonic_ns())]

    def _shown(self, event: Event) -> Event:
        """One that no NodeLaunch has seen."""
        if self._seeing is not None:
            self._seeing.follow(event)
        return event

    def _note_told(self, number: int) -> None:
        from infini_run.report.report import signal_name

        self._told = number
        self._tell(f"{signal_name(number)}: no restart")

    def _begin(self) -> list[Event]:
        """The next attempt. One that cannot be started for want of something counts as one that failed."""
        from infini_run.plan.restart_policy import RestartCount, spend, with_new_launch_id

        self._end_pause()
        tally, before = self._tally or RestartCount(), self._run
        _rewind(self._stdin_at)
        plan = with_new_launch_id(
            before.plan,
            launch_id=f"{self._launch_id}.{tally.total}",
            master_port=self._options.master_port or self._next_port(),
            restarts=tally.total,
        )
        try:
            self._run = self._attempt(plan, self._heading)  # ours before its ranks are: an interrupt may come
            self._run.start()
        except InfiniRunError as error:
            self._run = before  # what is reported is the last failure of a rank
            if isinstance(error, StartError) and not self._stopped:
                return self._take(spend(self._options, tally, 0.0, _chance()), None, str(error))
            self._over, self._why_not = True, str(error)
        except BaseException:  # KeyboardInterrupt may come between any two steps
            self._run.close()
            raise
        if self._stopped:
            self._run.stop()
        return []

    def _next_port(self) -> int:
        """Another one: of the last there may be connections still."""
        from infini_run.node.ports import free_port, let_go

        let_go(self._run.plan.master_port)
        return free_port()

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.close()

    def _tell(self, text: str) -> None:
        if self._say is not None:
            self._say(f"infini-run: {printable(text)}")


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # deleted: ranks inherit it


def _stdin_offset(plan: Plan) -> int:
    """Where a file that ranks read as stdin stood; -1: there is none. A pipe and a terminal do not come back."""
    try:
        is_read = any(worker.stdin != "null" for worker in plan.workers)
        return os.lseek(0, 0, os.SEEK_CUR) if is_read and stat.S_ISREG(os.fstat(0).st_mode) else -1
    except OSError:
        return -1


def _rewind(stdin_at: int) -> None:
    try:
        if stdin_at >= 0:
            os.lseek(0, stdin_at, os.SEEK_SET)
    except OSError:
        return  # a host may have closed it meanwhile


def _chance() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32
