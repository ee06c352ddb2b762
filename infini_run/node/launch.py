"""One node's part of a plan, live: open what it names, start the group, follow its events.

The one place that acts on a plan, for the command and for the Python API alike. What only a running launch needs is
imported while the workers start.
"""

from __future__ import annotations

import time
from _thread import RLock

import infini_run.lean_os as os
from infini_run.core.group import forking
from infini_run.errors import OTHER_CODE, StartError, UsageError, counted, printable
from infini_run.node.group_setup import GroupSetup
from infini_run.node.resources import LaunchResources, has_descriptors
from infini_run.plan.model import control_address
from infini_run.plan.planner import inheriting, with_error_folder, with_folder
from infini_run.plan.program import folder_bases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Protocol

    from infini_run.control.listener import ControlListener
    from infini_run.core.c_structs import Event, ProcessState, SpawnSpec
    from infini_run.core.group import Group
    from infini_run.display.observers import Observers
    from infini_run.display.relay import ObserverRelay
    from infini_run.node.control_answers import NodeControl
    from infini_run.node.gpu_cards import GpuCards
    from infini_run.node.guard_lease import GuardLease
    from infini_run.node.headed_programs import HeadedPrograms
    from infini_run.node.launch_head import LaunchHead
    from infini_run.node.launch_programs import LaunchPrograms
    from infini_run.node.launch_watchdog import LaunchWatchdog
    from infini_run.node.outcome import Outcome
    from infini_run.node.program_parts import ProgramParts
    from infini_run.node.readiness import ReadyRanks
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.pace import Pace
    from infini_run.report.report import Report

    class LoopPart(Protocol):
        """A part of a launch that may have something to do before the next event of the group."""

        def timeout_s(self, asked_s: float | None) -> float | None: ...


_NEVER = float("inf")
_SHORT_S = 0.02  # a launch that is over by then is not looked at any closer


class NodeLaunch:
    """The ranks of a plan on this node, alive. Call `start`, then `poll` until `ended`, then `close`.

    Args:
        plan: The plan.
        options: What the user asked for.
        environ: The environment of the workers, to which the plan adds.
        entry: The state of this process at its start, if the process belongs to the launch (the command). None: it
            belongs to a host program.
        cwd: Where the workers start. None: the working directory.
        print_line: Gets a line for the user while the job runs. None: print nothing.
        keywords: Renames flags in these lines, for a caller of the Python API. None: the command's.
        heading: A line for the start of each log. Empty: none.
        observers: Get every event. Their owner closes them.
        head: The head of several nodes. It decides about the job, and reports to the user what stops it. None: there
            is no other node.
        is_last: The process ends with this launch.
        stdins: Descriptors for the stdin of some ranks, by rank.
        lease: For how long the ranks may live without `renew_lease`. None: there is no lease.
        listener: The control socket of a launch that may restart, which is its owner's. None: the core makes one.
    """

    _console = (1, 2)  # the descriptors of this process's stdout and stderr
    _debug = 0  # of the core's flags

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        environ: Mapping[str, str],
        entry: ProcessState | None = None,
        cwd: str | None = None,
        print_line: Callable[[str], None] | None = None,
        keywords: KeywordErrors | None = None,
        heading: str = "",
        observers: Observers | ObserverRelay | None = None,
        head: LaunchHead | None = None,
        is_last: bool = False,
        stdins: Mapping[int, int] | None = None,
        lease: GuardLease | None = None,
        listener: ControlListener | None = None,
    ) -> None:
        self.plan = plan
        self.options = options
        self.environ = environ
        self.entry = entry
        self._print_line = print_line
        self._keywords = keywords
        self._heading = heading
        self._observers = observers
        self._head = head
        self.lease_ended = False  # over: the ranks were killed, and the launch ends
        self.guard_ended = False  # the guard, which held the lease, ended before it: the ranks are dead
        self._pace: Pace | None = None  # of ranks that report PROGRESS=
        self._lock = RLock()  # the group has its own; this one keeps events and what they tell in one order
        self._group: Group | None = None
        self.resources = LaunchResources(listener)
        self.setup = GroupSetup(
            options,
            environ,
            entry=entry,
            cwd=cwd,
            stdins=stdins or {},
            has_head=head is not None,
            is_last=is_last,
            lease=lease,
        )
        self._history: list[Event] = []  # until there is an outcome that knows them
        self._outcome: Outcome | None = None
        self._watchdog: LaunchWatchdog | None = None  # where a deadline was asked for, or once one is needed
        self._refuses_questions = False  # and has said so
        self._control: NodeControl | None = None  # once another process has asked something
        self.on_asked_stop: Callable[[], None] | None = None  # in a host program: who may start the ranks again
        self._started = 0  # ranks
        self.ready: ReadyRanks | None = None  # once one is, and the parent of this process waits for all
        self.programs: LaunchPrograms | None = None  # of which some start, end or restart on their own
        self._oom_kills = -1  # not counted yet
        self._ended = False
        self._stop_due_s = _NEVER  # the ranks are stopped then (monotonic): one has asked for another run of the job

    # ---- starting

    def start(self) -> None:
        """Start every worker.

        Raises:
            UsageError: A file cannot be created.
            StartError: A worker could not start. Then none is left.
        """
        try:
            options = self.options
            if options.console == "auto":
                self._settle_console_mode()
            self._open()
            if options.programs:
                self.programs = self._divided()
            specs = self.specs()
            if options.ready_timeout_s or options.hang_timeout_s or options.progress_timeout_s:
                self._watchdog = self._make_watchdog()
            if self._observers is not None:
                self._observers.begin(
                    self.plan, self.group, lambda: self.outcome, self.pace, self.hung_ranks, self.gpu_cards
                )
            self._started = self.group.spawn(specs, self.setup.base_env(self.plan))
            self.resources.remove_abandoned(self.plan)
        except StartError as error:
            self.close()
            from infini_run.system.resource_limits import with_limit_hint

            raise with_limit_hint(error) from None
        except BaseException:
            self.close()
            raise
        finally:
            if not self.starts_more:
                self.resources.close_null()
        if self.options.verbose:
            bound = [f"  {worker.name}: {worker.cpu_binding}" for worker in self.plan.workers if worker.cpu_binding]
            self.print_lines(
                f"started {self._started} of {counted(len(specs), 'rank')} of {self.plan.launch_id}", *bound
            )

    def _divided(self) -> LaunchPrograms | None:
        """Return the programs, if one starts, ends the job, or restarts on its own."""
        options = self.options
        if options.restart_scope != "program" and not any(each.after or each.ends_job for each in options.programs):
            return None
        from infini_run.node.launch_programs import LaunchPrograms

        return LaunchPrograms(self, self._head)

    @property
    def starts_more(self) -> bool:
        """Whether ranks may start later: those of programs that wait, or that restart."""
        return self.programs is not None and self.programs.starts_more

    @property
    def may_start(self) -> bool:
        """Whether ranks may start: the launch is not about to stop, nor closed."""
        return self._group is not None and self._stop_due_s == _NEVER

    @property
    def headed(self) -> HeadedPrograms | None:
        """The programs that restart alone, where a head decides about them; else None."""
        return None if self.programs is None else self.programs.headed

    def stop_watching(self, indexes: Sequence[int]) -> None:
        """Watch ranks no more: they are stopped, to restart.

        Args:
            indexes: Their indexes in the plan.
        """
        if self._watchdog is not None:
            self._watchdog.drop(indexes)

    def observe(self, event: Event) -> None:
        """Tell the observers of an event that is none of the group's."""
        if self._observers is not None:
            self._observers.on_event(event)

    def note_up(self, program: str) -> None:
        """Note for its deadlines that a program is ready, perhaps by its port."""
        if self._watchdog is not None:
            self._watchdog.note_up(program)

    def _settle_console_mode(self) -> None:
        """Settle whether lines are whole. That needs a pipe for each rank and stream: without enough descriptors
        ranks write themselves."""
        if not any(output.unlabelled for worker in self.plan.workers for output in (worker.stdout, worker.stderr)):
            return
        if not has_descriptors(self.plan.workers):
            self.plan = inheriting(self.plan)
            if self.options.verbose and self._print_line is not None:
                self._print_line(
                    "infini-run: --console=lines: too few descriptors (ulimit -n); ranks write to the console "
                    "themselves"
                )

    @property
    def lived_s(self) -> float | None:
        """Seconds since the fork of the ranks; None: they are no forks."""
        return None

    @property
    def group(self) -> Group:
        """The live workers. Only between start and close."""
        assert self._group is not None, "not started, or closed"
        return self._group

    @property
    def ended(self) -> bool:
        """Whether every worker exited, and nothing of it is left."""
        return self._group is None or self._ended

    def _open(self) -> None:
        """Open everything that can fail, before the first worker."""
        bases = folder_bases(self.environ)
        has_sockets = self.resources.open_folder(self.plan, bases)
        if self.resources.folder != self.plan.folder or not has_sockets:
            abstract_id = "" if has_sockets else os.urandom(6).hex()
            self.plan = with_folder(self.plan, self.resources.folder, abstract_id=abstract_id)
        with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
            self._group = self.setup.group(
                self.plan, self.resources, self._console, has_sockets=has_sockets, debug=self._debug
            )
        if not (has_sockets and control_address(self.plan.folder)) and not (self._head is not None or self._heading):
            from infini_run.control.listener import NO_PLACE

            self.notice(NO_PLACE)
        for problem in self.resources.open_logs(self.plan, self.options, self._heading):
            self.notice(problem)
        if self.resources.error_folder is not None:
            self.plan = with_error_folder(self.plan, self.resources.error_folder)

    def specs(self) -> list[SpawnSpec]:
        """Return what the core gets of each rank, in the order of the plan."""
        starts = None if self.programs is None else self.programs.starts
        is_held = None if starts is None else starts.is_held
        return self.setup.specs(self.plan, self.resources, self._console, is_held)

    # ---- following

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> list[Event]:
        """Return the events since the last call, waiting for the first one.

        Args:
            timeout_s: Seconds to wait at most. None: for ever.
            also: Descriptors that end the wait when they are readable.
        """
        group = self._group  # another thread may close this meanwhile; a closed group is safe
        events = self._read_events()
        may_wait = not events and not self.ended
        if may_wait and group is not None and self._wait(group, *self._limits(timeout_s, also)):
            events = self._read_events()
        if self._stop_due_s != _NEVER and time.monotonic() >= self._stop_due_s:
            self.stop()
        return events + self._run_due()

    @property
    def lock(self) -> RLock:
        """The lock of events and what they tell. Whoever keeps events takes it before a lock of theirs."""
        return self._lock

    def wait(self, timeout_s: float | None, also: Sequence[int]) -> None:
        """Wait, as `poll` does, until `poll(0)` has something to do; read nothing."""
        group = self._group
        if group is not None and not self.ended:
            self._wait(group, *self._limits(timeout_s, also))

    def _limits(self, timeout_s: float | None, also: Sequence[int]) -> tuple[float | None, Sequence[int]]:
        """Return how long to wait at most, and for which other descriptors, so that no part has to wait."""
        with self._lock:
            for part in self._loop_parts():
                timeout_s = part.timeout_s(timeout_s)
            if self._observers is not None:
                timeout_s = self._observers.timeout_s(timeout_s)
            also = [*self._loop_fds(), *also]
        if self._stop_due_s != _NEVER:
            left_s = max(0.0, self._stop_due_s - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        return timeout_s, also

    def _run_due(self) -> list[Event]:
        """Let each part do what is due, in this order. Return the events of that."""
        events: list[Event] = []
        with self._lock:
            programs = self.programs
            if self._control is not None and not self.ended:
                self._control.run_due()
            if programs is not None and programs.starts is not None and not self.ended:
                programs.starts.run_due()
            if self._watchdog is not None:
                events += self._watchdog.handle_due()
            if programs is not None and programs.parts is not None:
                events += self._run_parts(programs.parts)
            if self._observers is not None:
                self._observers.run_due()
        return events

    def _loop_parts(self) -> list[LoopPart]:
        """Return what may have something to do before the next event of the group."""
        programs = self.programs
        ours = () if programs is None else (programs.starts, programs.parts)
        return [part for part in (self._control, *ours, self._watchdog) if part is not None]

    def _loop_fds(self) -> list[int]:
        return [fd for part in (self._control, self._watchdog) if part is not None for fd in part.fds()]

    def _run_parts(self, parts: ProgramParts) -> list[Event]:
        """Let programs end and restart. Return their events, and the group's of what that did: no descriptor shows
        them."""
        events = [] if self.ended else parts.run_due()
        while not self.ended:
            new = self._read_events()
            events += new
            if not new:
                break
            events += parts.run_due()
        return events

    def ends_program(self, rank: int | None, time_ns: int) -> bool:
        """Return whether a program alone ends because of a rank.

        Args:
            rank: The rank. None: there is none.
            time_ns: When it failed, by CLOCK_MONOTONIC.
        """
        return rank is not None and self.programs is not None and self.programs.note_failure(rank, time_ns)

    def stop_after_failure(self, failed_s: float) -> None:
        """Stop all ranks; with --snapshots=failure after a look at those that still run.

        Args:
            failed_s: When one failed: time.monotonic().
        """
        has_look = self.options.snapshots == "failure" and not self.ended
        if not (has_look and self.watchdog.look_before_stop(failed_s, waits_for_head=self._head is not None)):
            self.stop()

    def _wait(self, group: Group, timeout_s: float | None, also: Sequence[int]) -> bool:
        """Wait. Before a long wait, note what the kernel has killed for memory so far: a later SIGKILL may be its
        own."""
        if self._oom_kills < 0 and (timeout_s is None or timeout_s > _SHORT_S):
            if group.wait(_SHORT_S, also):
                return True
            self._count_oom_kills()
        return group.wait(timeout_s, also)

    def _count_oom_kills(self) -> None:
        from infini_run.system.cgroup import oom_kills

        self._oom_kills = oom_kills()

    def fds(self) -> list[int]:
        """Return descriptors for a caller that waits for several launches: `poll(0)` has something to do when one of
        them is readable. Call this before each wait."""
        with self._lock:
            if self._group is None or self.ended:
                return []
            if self._oom_kills < 0 and self._outcome is None:
                self._count_oom_kills()
            return [self._group.fileno(), *self._loop_fds()]

    def next_deadline_s(self) -> float | None:
        """Return when `poll` has something to do even if no descriptor is readable: time.monotonic(). None: never."""
        with self._lock:
            wait_s = None
            for part in () if self.ended else self._loop_parts():
                wait_s = part.timeout_s(wait_s)
        return None if wait_s is None else time.monotonic() + wait_s

    def last_watchdog_ping_s(self, rank: int) -> float:
        """Return when a rank last sent WATCHDOG=1: time.monotonic(). 0: never.

        Args:
            rank: A rank of this node.
        """
        group = self._group
        return 0.0 if group is None else group.activity(self._index(rank))[1] / 1e9

    def _read_events(self) -> list[Event]:
        with self._lock:
            if self._group is None:
                return []
            events = self._group.run_once()
            for event in events:
                self._handle_event(event)
            events = [event for event in events if event.kind != "client"]
            self._ended = self._ended or self._group.ended  # an interrupt may have lost the event of that
        return events

    def _handle_event(self, event: Event) -> None:
        kind = event.kind
        if kind == "client":
            self._add_clients()
            return
        if kind == "suspend":  # for who steps: it is about this process, and no news of a rank
            return
        self._ended = self._ended or kind == "ended"
        if kind == "exited" and event.is_failure and not self.options.keep_going:
            self._on_failure(event)
        if self.programs is not None:
            self.programs.on_event(event)
        if kind == "progress":  # often, and no news for the report
            self._note_progress(event)
            return
        if kind == "ready":
            self._count_ready(event.worker)
        elif kind == "lease_ended":
            self.lease_ended, self.guard_ended = True, bool(event.code)
        elif kind == "triggered" and self._watchdog is None:  # a rank itself reports a hang
            self._watchdog = self._make_watchdog()
        if self._watchdog is not None:
            self._watchdog.on_event(event)
        if self._observers is not None:
            self._observers.on_event(event)
        if self._outcome is None and event.is_routine and not self.options.verbose:
            self._history.append(event)
            return
        text = self.outcome.record_event(event)
        if self._head is not None and kind == "signalled":
            return
        if text or self.options.verbose:
            self.print_lines(text or self._described(event))
        if kind == "ended" and self.group.dropped_lines:
            self.outcome.record_dropped_lines(self.group.dropped_lines)

    @property
    def outcome(self) -> Outcome:
        """What became of the workers so far. Made when there is something to say: a good launch needs none."""
        with self._lock:
            if self._outcome is None:
                from infini_run.node.outcome import Outcome

                self._outcome = Outcome(self.plan, self.options, oom_kills=self._oom_kills)
                for event in self._history:
                    self._outcome.record_event(event)
            return self._outcome

    def take_snapshots(self, *, is_before_stop: bool) -> None:
        """Make snapshots of all ranks, for a hang on another node, or before the head stops all nodes."""
        with self._lock:
            if self._group is None or self.ended:
                return
            if not is_before_stop:
                self.watchdog.take_snapshots()
            elif not self.watchdog.look_before_stop(waits_for_head=True) and self._head is not None:
                self._head.on_looked()

    @property
    def watchdog(self) -> LaunchWatchdog:
        """The watchdog of the ranks. Made where a deadline was asked for, or once one is needed."""
        if self._watchdog is None:
            self._watchdog = self._make_watchdog()
        return self._watchdog

    def _make_watchdog(self) -> LaunchWatchdog:
        from infini_run.node.launch_watchdog import LaunchWatchdog

        running = self.outcome.running() if self._outcome or self._history else ()
        return LaunchWatchdog(self, self._head, running)

    def _on_failure(self, event: Event) -> None:
        """Act on the failure of a rank: all stop, or those of its program, or as it asked for another run."""
        if event.asks_again(self.options.again_code):
            self.stop_later(self.options.again_wait_s)
        elif self._stop_due_s == _NEVER and not self.ends_program(event.rank, event.time_ns):
            self.stop_after_failure(event.time_ns / 1e9)

    def _count_ready(self, index: int) -> None:
        """Count a ready rank, if the parent of this process wants to know when all are."""
        address = "" if self.entry is None else self.environ.get("NOTIFY_SOCKET", "")
        if not address:
            return
        if self.ready is None:
            from infini_run.node.readiness import ReadyRanks

            self.ready = ReadyRanks(len(self.plan.workers), address)
        problem = self.ready.add(index)
        if problem:
            self.notice(problem)

    def _note_progress(self, event: Event) -> None:
        is_news = self.pace.note(event.rank, event.value, event.time_ns / 1e9)
        if self._watchdog is not None:
            self._watchdog.note_progress(event)
        if self._observers is not None:
            self._observers.on_progress(event)
            if is_news:
                self._observers.note_slow(event.time_ns)

    @property
    def pace(self) -> Pace:
        """The progress of the ranks of this node."""
        if self._pace is None:
            from infini_run.report.program_pace import make_pace

            programs = {worker.rank: worker.program for worker in self.plan.workers}
            self._pace = make_pace(programs, one_world=self.options.one_world)
        return self._pace

    def gpu_cards(self) -> GpuCards:
        """Return what reads the GPUs of this node; the caller closes it before the group."""
        from infini_run.node.gpu_cards import GpuCards

        return GpuCards(self)

    def hung_ranks(self) -> dict[int, str]:
        """Return the ranks that hang or are late now, each with `hung` or `late`."""
        return {} if self._watchdog is None or self.ended else self._watchdog.hung_ranks()

    @property
    def slow_now(self) -> frozenset[int]:
        """The ranks of this node that are slow at present, compared with each other."""
        return frozenset() if self._pace is None else self._pace.slow

    @property
    def progress(self) -> int:
        """The highest PROGRESS= of a rank; -1: none has sent it."""
        return -1 if self._pace is None else max((value for value, _ in self._pace.latest().values()), default=-1)

    @property
    def first(self) -> int | None:
        """The rank of the first failure, as soon as there is one."""
        return None if self._outcome is None else self._outcome.first

    @property
    def went_well(self) -> bool:
        """Whether it ended, with exit code 0 of every worker and nothing else to report."""
        return self._ended and self._outcome is None

    def _described(self, event: Event) -> str:
        from infini_run.node.outcome import describe_event

        return describe_event(event, self.outcome.name_of(event.rank))

    def print_lines(self, *lines: str, names_host: bool = False) -> None:
        """Print a line, printable whatever is in it: a leftover process chose its own name.

        Args:
            lines: The line, and those that belong to it.
            names_host: They say themselves on which host.
        """
        if self._print_line is None or not any(lines):
            return
        is_one_of_many = self._head is not None and not names_host
        where = f"{self.plan.nodes[0].host}: " if is_one_of_many else ""  # beside those of other nodes
        shown = lines if self._keywords is None else self._keywords.rename_lines(lines)
        text = "infini-run: " + "\n".join(printable(where + line) for line in shown)
        if self._observers is not None and self._observers.print_above(text):
            return
        if not self.ended:
            self.group.print_line(text)
        else:
            self._print_line(text)

    # ---- what other processes ask

    @property
    def control(self) -> NodeControl:
        """What serves the control socket. Made when another process asks something."""
        if self._control is None:
            from infini_run.node.control_answers import NodeControl

            self._control = NodeControl(self)
        return self._control

    def _add_clients(self) -> None:
        take: Callable[[int], None] = os.close
        try:
            take = self.control.add
        except OTHER_CODE as error:
            self._refuse_questions(error)
        self.group.hand_clients(take)

    def _refuse_questions(self, error: Exception) -> None:
        if not self._refuses_questions:
            self.notice(f"this launch cannot answer questions of other processes: {type(error).__name__}: {error}")
        self._refuses_questions = True

    def trace_so_far(self) -> dict[str, Any] | None:
        """Return the trace as it would be written now. None: there is none."""
        return None if self._observers is None else self._observers.trace_so_far()

    def notice(self, text: str, *, is_kept: bool = True) -> None:
        """Print a line.

        Args:
            text: A sentence.
            is_kept: The report has it, too.
        """
        self.print_lines(self.outcome.add_notice(text) if is_kept else text)

    # ---- acting

    def signal(self, number: int, rank: int | None = None, by: str = "") -> int:
        """Send a signal to the process of a rank.

        Args:
            number: The signal.
            rank: A rank of this node. None: all of them.
            by: Who asked for it with --send, for the report. Empty: nobody did.

        Returns:
            How many processes it reached.
        """
        group, index = self._group, -1 if rank is None else self._index(rank)
        self._note_signal(number, None if rank is None else index)
        if by and rank is not None:
            self.outcome.record_sender(rank, number, by)
        return 0 if group is None else group.signal(index, number)

    def stop(self, number: int = 0, *, by_signal: bool = False) -> None:
        """Begin to stop the ranks, if any still runs.

        Args:
            number: The signal to send. 0: the stop signal.
            by_signal: A signal from outside asked for it, so its grace holds.
        """
        with self._lock:
            self._stop_due_s = _NEVER
            if self.programs is not None:
                self.programs.cancel()
            if self._watchdog is not None:
                self._watchdog.stop()
            is_idle = self.programs is not None and self.programs.is_idle
            if self._observers is not None and not self.ended and not is_idle:
                self._observers.stop()
        group = self._group
        if group is not None:
            group.stop(number, by_signal=by_signal)

    def stop_later(self, after_s: float) -> None:
        """Stop the ranks after a time, or with the first call of `stop`; no failure stops them before.

        Args:
            after_s: Seconds from now, if no earlier time is set.
        """
        self._stop_due_s = min(self._stop_due_s, time.monotonic() + after_s)

    def signal_groups(self, number: int) -> None:
        """Send a signal to the process group of every rank.

        Args:
            number: The signal.
        """
        group = self._group
        self._note_signal(number)
        if group is not None:
            group.signal_groups(number)

    def _note_signal(self, number: int, index: int | None = None) -> None:
        if self._watchdog is not None:
            with self._lock:
                self._watchdog.on_signal(number, index)

    def renew_lease(self, since_s: float = 0.0) -> bool:
        """Let the ranks live for another lease, as `Group.renew_lease` does. Return False after its end."""
        group = self._group
        return group is not None and group.renew_lease(since_s)

    def suspend(self) -> None:
        """Suspend the ranks and then this process, as Ctrl-Z does, until SIGCONT."""
        group = self._group
        if group is not None:
            group.suspend()

    def kill(self) -> None:
        """Send SIGKILL to everything that is left."""
        if self.programs is not None:
            with self._lock:
                self.programs.cancel()
        group = self._group
        if group is not None:
            group.kill()

    def _index(self, rank: int) -> int:
        for index, worker in enumerate(self.plan.workers):
            if worker.rank == rank:
                return index
        raise UsageError(f"unknown rank {rank} on this node")

    # ---- the end

    def close(self) -> None:
        """Kill and reap what is left, then close and remove what this launch made. Safe twice, and on a half-made
        run."""
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.close()
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._group is not None:
                if self._observers is not None:
                    self._observers.end()
                self._record_last_output()
                self._group.close()
                self._group = None
            self.resources.close()

    def after_fork_in_child(self) -> None:
        """Close only the copies of descriptors, in a forked child: all else is the parent's."""
        self._lock, self._watchdog = RLock(), None
        if self._observers is not None:
            self._observers.after_fork_in_child()
            self._observers = None
        if self._control is not None:
            self._control.after_fork_in_child()
            self._control = None
        self.resources.after_fork_in_child()
        group, self._group = self._group, None
        if group is not None:
            group.after_fork_in_child()
            group.close()
        self.resources.close()

    def record_statuses(self) -> None:
        """Record in the outcome each rank's last STATUS= and PROGRESS=."""
        from infini_run.node.last_output import record_statuses

        with self._lock:
            if self._pace is not None:
                self.outcome.record_progress(self._pace.latest())
            if self._group is not None:
                record_statuses(self.outcome, self._group, self.plan.workers)

    def _record_last_output(self) -> None:
        """Record what goes with the group, where there is, or will be, something to report. A caller in Python may
        ask for the report of any launch."""
        slow = () if self._pace is None or self._head is not None else self._pace.slow_ranks()
        is_wanted = self._outcome is not None or self.options.report or not self.setup.is_last
        if is_wanted or any(rank.is_costly for rank in slow):
            from infini_run.node.last_output import record_advice, record_last_output

            if self._pace is not None:
                self.outcome.record_progress(self._pace.latest(), slow)
            record_last_output(self.outcome, self.group, self.plan.workers)
            record_advice(self.outcome, self.plan, self.environ)

    def report(self) -> Report:
        """Return how it ended, or its state so far."""
        report = self.outcome.report()
        return report if self.programs is None else self.programs.add_to(report)
