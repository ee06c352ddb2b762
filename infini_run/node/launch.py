"""One node's part of a plan, live: open what it names, start the group, follow its events.

The one place that acts on a plan, for the command and for the Python API alike. What only a running launch needs is
imported while the workers start.
"""

from __future__ import annotations

import sys
import time
from _thread import RLock

import infini_run.lean_os as os
from infini_run.core.group import (
    GUARD,
    INHERIT,
    PIPE,
    TO_CONSOLE,
    TO_LOG,
    UNLABELLED,
    Group,
    SpawnSpec,
    debug_flags,
    forking,
    is_main_thread,
)
from infini_run.errors import OTHER_CODE, StartError, UsageError, counted, printable
from infini_run.node.resources import LaunchResources, has_descriptors
from infini_run.plan.model import LABELLED, about_launch, control_address
from infini_run.plan.program import folder_bases
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.control.listener import ControlListener
    from infini_run.core.group import Event, FoldLabel, ProcessState
    from infini_run.display.observers import Observers
    from infini_run.display.relay import ObserverRelay
    from infini_run.node.control_answers import NodeControl
    from infini_run.node.headed_programs import HeadedPrograms
    from infini_run.node.outcome import Outcome
    from infini_run.node.program_parts import ProgramParts
    from infini_run.node.program_starts import ProgramStarts
    from infini_run.options.keyword_errors import KeywordErrors
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import FoundProgram, Output, Plan, RankRange, SingleRank, Worker
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.pace import Pace
    from infini_run.report.report import Report
    from infini_run.watchdog.watchdog import HangFinding, Watchdog

_NEVER = float("inf")
_STDIN = {"inherit": INHERIT, "pipe": PIPE}
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
        has_head: A head reports to the user what stops the job.
        is_last: The process ends with this launch.
        stdins: Descriptors for the stdin of some ranks, by rank.
        lease_s: The guard kills the ranks after this many seconds without `renew_lease`, also while this process is
            suspended; 0: no lease.
        lease_since_s: When the first lease began, by CLOCK_BOOTTIME in seconds; 0: now.
        last_word: What the guard of the lease sends to the peer of `link_fd` after the death of this process and the
            ranks; b"": nothing.
        link_fd: The connection to the head; -1: none.
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
        has_head: bool = False,
        is_last: bool = False,
        stdins: Mapping[int, int] | None = None,
        lease_s: float = 0.0,
        lease_since_s: float = 0.0,
        last_word: bytes = b"",
        link_fd: int = -1,
        listener: ControlListener | None = None,
    ) -> None:
        self.plan = plan
        self.options = options
        self._environ = environ
        self._entry = entry
        self._cwd = cwd
        self._print_line = print_line
        self._keywords = keywords
        self._heading = heading
        self._observers = observers
        self._has_head = has_head
        self._is_last = is_last
        self._stdins = stdins or {}
        self._lease_s, self._lease_since_s = lease_s, lease_since_s
        self._last_word, self._link_fd = last_word, link_fd
        self.lease_ended = False  # over: the ranks were killed, and the launch ends
        self.guard_ended = False  # the guard, which held the lease, ended before it: the ranks are dead
        self._pace: Pace | None = None  # of ranks that report PROGRESS=
        self._lock = RLock()  # the group has its own; this one keeps events and what they tell in one order
        self._group: Group | None = None
        self._listener = listener
        self._start_s = time.time() if listener is None else listener.start_s
        self._resources = LaunchResources(listener)
        self._argvs: dict[tuple[str, ...], list[bytes]] = {}
        self._encodings: dict[str, bytes] = {}  # of words that most ranks have alike
        self._ways: dict[int, tuple[int, int]] = {}  # of outputs, by their id
        self._history: list[Event] = []  # until there is an outcome that knows them
        self._outcome: Outcome | None = None
        self._watchdog: Watchdog | None = None  # where a deadline was asked for, or once one is needed
        self._log_folder = ""  # absolute: the launcher changes to / later
        self._refuses_questions = False  # and has said so
        self._control: NodeControl | None = None  # once another process has asked something
        self.on_asked_stop: Callable[[], None] | None = None  # in a host program: who may start the ranks again
        self.on_look: Callable[[], None] | None = None  # a head lets other nodes look at the same time
        self.on_hang: Callable[[Sequence[HangSnapshot], Sequence[int]], None] | None = None  # a head decides
        self.on_seen: Callable[[], None] | None = None  # reports a look before a stop to a head
        self.on_program_end: Callable[[str], None] | None = None  # of one with --ends_job; a head decides
        self._started = 0  # ranks
        self._ready: set[int] = set()  # ranks that said so, by index
        self._is_ready = False  # all have, and the parent of this process knows
        self._starts: ProgramStarts | None = None  # where some programs wait for others
        self.on_program_up: Callable[[str], None] | None = None  # a head decides who starts then
        self._restarts: ProgramParts | None = None  # of programs that restart alone
        self.headed: HeadedPrograms | None = None  # the same, where a head decides about them
        self._enders: dict[str, int] = {}  # programs whose end is that of the job: how many ranks have not exited
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
            if self.options.console == "auto":
                self._settle_console_mode()
            self._open()
            if any(program.after for program in self.options.programs):
                from infini_run.node.program_starts import ProgramStarts

                counts = {each.name: self._count_ranks(each.name) for each in self.options.programs}
                self._starts = ProgramStarts(self.options.programs, counts, self._program_up)
            if self.options.restart_scope == "program":
                self._restarts = self._divide_programs()
            specs = self._specs()
            base = self.plan.base(self._environ) | dict(self.plan.env)
            options = self.options
            if options.ready_timeout_s or options.hang_timeout_s or options.progress_timeout_s:
                self._watchdog = self._make_watchdog()
            if self._observers is not None:
                self._observers.begin(self.plan, self.group, lambda: self.outcome, self.pace)
            for program in options.programs:
                if program.ends_job and (count := self._count_ranks(program.name)):
                    self._enders[program.name] = count
            self._started = self.group.spawn(specs, [os.fsencode(f"{name}={value}") for name, value in base.items()])
            self._resources.remove_abandoned(self.plan)
        except StartError as error:
            self.close()
            raise self._explained(error) from None
        except BaseException:
            self.close()
            raise
        finally:
            if not self.starts_more:
                self._resources.close_null()
        if self.options.verbose:
            bound = [f"  {worker.name}: {worker.cpu_binding}" for worker in self.plan.workers if worker.cpu_binding]
            self._print(f"started {self._started} of {counted(len(specs), 'rank')} of {self.plan.launch_id}", *bound)

    def _divide_programs(self) -> ProgramParts:
        """Return what ends and restarts one program of several: on its own, or as a head decides."""
        if self._has_head:
            from infini_run.node.headed_programs import HeadedPrograms

            self.headed = HeadedPrograms(self)
            return self.headed
        from infini_run.node.program_restarts import ProgramRestarts

        return ProgramRestarts(self)

    def _count_ranks(self, program: str) -> int:
        return sum(worker.program == program for worker in self.plan.workers)

    @property
    def has_held(self) -> bool:
        """Whether programs wait for others to be up."""
        return self._starts is not None and self._starts.has_held

    @property
    def starts_more(self) -> bool:
        """Whether ranks may start later: those of programs that wait, or that restart."""
        return self.has_held or self._restarts is not None

    def waits_for(self, programs: Sequence[str]) -> bool:
        """Return whether one of some programs is not up."""
        return self._starts is not None and self._starts.waits_for(programs)

    def renew_counts(self, indexes: Sequence[int]) -> None:
        """Forget what the ranks of a program have said, and that some may have exited: they restart.

        Args:
            indexes: The indexes of all of them in the plan.
        """
        program = self.plan.workers[indexes[0]].program
        self._ready.difference_update(indexes)
        self.pace.drop([self.plan.workers[index].rank for index in indexes])
        if program in self._enders:
            self._enders[program] = len(indexes)
        if self._starts is not None:
            self._starts.renew(program, len(indexes))

    def stop_watching(self, indexes: Sequence[int]) -> None:
        """Watch ranks no more: they are stopped, to restart.

        Args:
            indexes: Their indexes in the plan.
        """
        if self._watchdog is not None:
            self._watchdog.drop(indexes)

    def look_before_restart(self, indexes: Sequence[int]) -> float:
        """Look at ranks before they are stopped, to restart, if --snapshots=failure asks for it.

        Args:
            indexes: Their indexes in the plan.

        Returns:
            When the look ends at the latest: time.monotonic(). 0: there is none.
        """
        if self.options.snapshots != "failure":
            return 0.0
        self._watchdog = self._watchdog or self._make_watchdog()
        return self._watchdog.look_before_restart(indexes)

    @property
    def is_looking_before_restart(self) -> bool:
        """Whether such a look is not complete."""
        return self._watchdog is not None and self._watchdog.is_looking_before_restart

    def start_again(self, plan: Plan, indexes: Sequence[int], heading: bytes) -> int | None:
        """Start ranks of a program again, in order, after their end and that of all that they started.

        Args:
            plan: The plan from now on.
            indexes: Their indexes in it.
            heading: A line for the log of each one that starts.

        Returns:
            How many have started; fewer: the launch stops. None: not yet, as the console has not taken all of their
            last output.

        Raises:
            UsageError: The port of --ready_port is in use.
            StartError: A rank could not be created. Some may have started.
        """
        if self._starts is not None:
            self._starts.ask_port(plan.workers[indexes[0]].program)
        self.plan = plan
        base = plan.base(self._environ) | dict(plan.env)
        environ = [os.fsencode(f"{name}={value}") for name, value in base.items()]
        specs = self._specs()
        for index in indexes:
            specs[index].heading = heading
        try:
            started = self.group.part_start(specs, environ, indexes)
        except StartError as error:
            raise self._explained(error) from None
        if started:
            self.stop_watching(indexes)
            self.renew_counts(indexes)
        return started

    def stop_after_failure(self) -> None:
        """Stop all ranks after the failure of one."""
        self._stop_after_failure(time.monotonic())

    def observe(self, event: Event) -> None:
        """Tell the observers of an event that is none of the group's."""
        if self._observers is not None:
            self._observers.on_event(event)

    def _note_up(self, worker: Worker) -> None:
        """Note that a rank is ready, or exited with code 0."""
        if self._starts is not None:
            self._starts.note(worker.program, worker.rank)

    def _program_up(self, name: str) -> None:
        """Start the programs that wait for one, or let a head decide about that."""
        if self._watchdog is not None:
            self._watchdog.note_up(name)
        if self.on_program_up is not None:
            self.on_program_up(name)
        elif self._starts is not None:
            self.start_programs(self._starts.take_free(name))

    def start_programs(self, names: Sequence[str]) -> None:
        """Start the ranks of programs that waited for others.

        Args:
            names: Of the programs.

        Raises:
            StartError: A rank could not be created. Then none is left.
        """
        group = self._group
        indexes = [index for index, worker in enumerate(self.plan.workers) if worker.program in names]
        if group is None or not indexes or self._stop_due_s != _NEVER:
            return
        try:
            started = group.start_held(indexes)
        except StartError as error:
            self.close()
            raise self._explained(error) from None
        self._started += started
        if self.options.verbose:
            self._print(f"started {counted(started, 'rank')} of {', '.join(names)}")

    def _settle_console_mode(self) -> None:
        """Settle whether lines are whole. That needs a pipe for each rank and stream: without enough descriptors
        ranks write themselves."""
        if not any(output.unlabelled for worker in self.plan.workers for output in (worker.stdout, worker.stderr)):
            return
        if not has_descriptors(self.plan.workers):
            from infini_run.plan.changed_plan import inheriting

            self.plan = inheriting(self.plan)
            if self.options.verbose and self._print_line is not None:
                self._print_line(
                    "infini-run: --console=lines: too few descriptors (ulimit -n); ranks write to the console "
                    "themselves"
                )

    def _explained(self, error: StartError) -> StartError:
        from infini_run.system.resource_limits import with_limit_hint

        return with_limit_hint(error)

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
        bases = folder_bases(self._environ)
        has_sockets = self._resources.open_folder(self.plan, bases)
        if self._resources.folder != self.plan.folder or not has_sockets:
            from infini_run.plan.changed_plan import with_folder

            abstract_id = "" if has_sockets else os.urandom(6).hex()
            self.plan = with_folder(self.plan, self._resources.folder, abstract_id=abstract_id)
        has_console = any(o.piped and o.console for w in self.plan.workers for o in (w.stdout, w.stderr))
        is_folded = has_console and self.options.console == "fold"
        with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
            self._group = Group(
                len(self.plan.workers),
                mark=os.fsencode(f"{MARKER_VARIABLE}={self.plan.launch_id}"),
                grace_s=self.options.grace_s,
                signal_grace_s=self.options.signal_grace_s,
                stop_signal=self.options.stop_signal,
                stop_scope=self.options.stop_scope,
                console=self._console if has_console else (-1, -1),
                stays=self.options.restart_scope == "program",
                message_fd=self._console[1],
                stdin_fd=0 if any(worker.stdin == "pipe" for worker in self.plan.workers) else -1,
                guard=GUARD,
                folder=os.fsencode(self._resources.folder),
                control=os.fsencode(control_address(self.plan.folder if has_sockets else "")),
                control_fd=-1 if self._listener is None else self._listener.fileno(),
                about=about_launch(self.plan, self.options, self._environ, self._start_s),
                lease_s=self._lease_s,
                lease_since_s=self._lease_since_s,
                last_word=self._last_word,
                link_fd=self._link_fd,
                entry=self._entry,
                is_last=self._is_last,
                suspend_as_event=self._has_head,
                shares_terminal=self._entry is not None and not self._has_head,
                timestamps=self.options.timestamps,
                fold_label=self._fold_label() if is_folded else None,
                first_rank=self.plan.workers[0].rank,
                debug=debug_flags(self._environ) | self._debug,
            )
        if not (has_sockets and control_address(self.plan.folder)) and not (self._has_head or self._heading):
            from infini_run.control.listener import NO_PLACE

            self._print(self.outcome.add_notice(NO_PLACE))
        for problem in self._resources.open_logs(self.plan, self.options, self._heading):
            self._print(self.outcome.add_notice(problem))
        if self.options.log_dir:
            self._log_folder = os.abspath(self.options.log_dir)
        if self._resources.error_folder is not None:
            from infini_run.plan.changed_plan import with_error_folder

            self.plan = with_error_folder(self.plan, self._resources.error_folder)

    @property
    def _is_colored(self) -> bool:
        from infini_run.plan.labels import is_colored

        return is_colored(self.options.color, self._console, self._environ)

    def _fold_label(self) -> FoldLabel:
        from infini_run.plan.labels import fold_label

        return fold_label(colored=self._is_colored)

    def _specs(self) -> list[SpawnSpec]:
        return [self._spec(worker) for worker in self.plan.workers]

    def _spec(self, worker: Worker) -> SpawnSpec:
        env = os.fsencode("\0".join(map("=".join, worker.env)))
        spec = SpawnSpec(worker.rank, self._encoded(worker.file), self._argv(worker.argv), env)
        cwd = worker.cwd or self._cwd
        spec.cwd = self._encoded(cwd) if cwd else None
        spec.notify = os.fsencode(worker.notify)
        if worker.cpu_binding is not None:
            spec.cpus, spec.nodes = worker.cpu_binding.cpus, worker.cpu_binding.nodes
        spec.held = self._starts is not None and self._starts.is_held(worker.program)
        # by which thread a held one starts is unknown
        spec.dies_with_us = self._entry is not None or (is_main_thread() and not spec.held)
        way = _STDIN.get(worker.stdin, self._resources.null)
        spec.stdio[0] = self._stdins.get(worker.rank, way)
        if worker.stdin == "inherit" and len(self.plan.workers) == 1 and self._entry is not None:
            spec.foreground = os.isatty(0)
        spec.stdio[1], spec.output[0] = self._way_of(worker.stdout)
        spec.stdio[2], spec.output[1] = self._way_of(worker.stderr)
        if self.options.console in LABELLED:
            from infini_run.plan.labels import label

            spec.label = label(worker.label, colored=self._is_colored)
        spec.log_fd = self._resources.logs.get(worker.rank, -1)
        spec.error_log_fd = self._resources.error_logs.get(worker.rank, -1)
        return spec

    def _encoded(self, word: str) -> bytes:
        found = self._encodings.get(word)
        if found is None:
            found = self._encodings[word] = os.fsencode(word)
        return found

    def _argv(self, argv: tuple[str, ...]) -> list[bytes]:
        """Return the same list for the same arguments: the core copies it once."""
        if argv not in self._argvs:
            self._argvs[argv] = [os.fsencode(word) for word in argv]
        return self._argvs[argv]

    def _way_of(self, output: Output) -> tuple[int, int]:
        """Return where a stream goes, and what the core does with it. Few outputs differ: the plan has one for many
        ranks."""
        found = self._ways.get(id(output))
        if found is None:
            alone = INHERIT if output.console else self._resources.null
            flags = (TO_CONSOLE if output.console else 0) | (TO_LOG if output.log else 0)
            flags |= UNLABELLED if output.unlabelled else 0
            found = self._ways[id(output)] = PIPE if output.piped else alone, flags
        return found

    # ---- following

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> list[Event]:
        """Return the events since the last call, waiting for the first one.

        Args:
            timeout_s: Seconds to wait at most. None: for ever.
            also: Descriptors that end the wait when they are readable.
        """
        group, events = (
            self._group,
            self._read_events(),
        )  # another thread may close this meanwhile; a closed group is safe
        if not events and group is not None and not self.ended:
            if self._watchdog is not None:
                with self._lock:
                    timeout_s, also = self._watchdog.timeout_s(timeout_s), [*self._watchdog.fds(), *also]
            if self._control is not None:
                with self._lock:
                    timeout_s, also = self._control.timeout_s(timeout_s), [*self._control.fds(), *also]
            if self._observers is not None:
                with self._lock:
                    timeout_s = self._observers.timeout_s(timeout_s)
            if self._starts is not None:
                timeout_s = self._starts.timeout_s(timeout_s)
            if self._restarts is not None:
                timeout_s = self._restarts.timeout_s(timeout_s)
            if self._stop_due_s != _NEVER:
                left_s = max(0.0, self._stop_due_s - time.monotonic())
                timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
            if self._wait(group, timeout_s, also):
                events = self._read_events()
        if self._stop_due_s != _NEVER and time.monotonic() >= self._stop_due_s:
            self.stop()
        if self._control is not None:
            with self._lock:
                if not self.ended:
                    self._control.run_due()
        if self._starts is not None:
            with self._lock:
                if not self.ended:
                    self._starts.run_due()
        if self._watchdog is not None:
            with self._lock:
                events += self._check_watchdog(self._watchdog)
        if self._restarts is not None:
            with self._lock:
                more = [] if self.ended else self._restarts.run_due()
                while not self.ended:
                    new = self._read_events()  # of what that did: no descriptor shows them
                    more += new
                    if not new:
                        break
                    more += self._restarts.run_due()
                events += more
        if self._observers is not None:
            with self._lock:
                self._observers.run_due()
        return events

    def _check_watchdog(self, watchdog: Watchdog) -> list[Event]:
        """Stop the job after a missed deadline, or a look before the stop. Return the events of that."""
        finding = None if self.ended else watchdog.run_due()
        events = [] if finding is None else self._act_on(finding, watchdog)
        if watchdog.must_stop:
            self.stop()
        return events

    def _act_on(self, finding: HangFinding, watchdog: Watchdog) -> list[Event]:
        from infini_run.report.hang_groups import with_exited

        if finding.is_before_restart:
            self._keep_seen(finding)
            return []
        if finding.is_before_stop:
            self._keep_seen(finding)
            if self.on_seen is not None:
                self.on_seen()
            return []
        if finding.is_cut_short:
            self._keep_seen(finding)
            return finding.events
        if self.on_hang is not None and not any(snapshot.kind == "late" for snapshot in finding.snapshots):
            self.outcome.keep_snapshots(finding.snapshots)
            self.on_hang(with_exited(finding.snapshots, self.outcome.exits()), finding.ranks_to_stop)
            return finding.events
        self._print(*self.outcome.record_snapshots(finding.snapshots, finding.ranks_to_stop), names_host=True)
        if finding.problem:
            self._print(self.outcome.add_notice(finding.problem))
        if finding.ranks_to_stop and self._restarts is not None and self.outcome.first is not None:
            self._restarts.note_failure(self.outcome.first, time.monotonic_ns())
        elif finding.ranks_to_stop and not self._waits_to_stop(watchdog):
            self.stop()
        if self._observers is not None:
            for event in finding.events:
                self._observers.on_event(event)
        return finding.events

    def _keep_seen(self, finding: HangFinding) -> None:
        self.outcome.keep_snapshots(finding.snapshots)
        if finding.problem:
            self._print(self.outcome.add_notice(finding.problem))

    def _waits_to_stop(self, watchdog: Watchdog) -> bool:
        """Whether the stop for a late rank waits for other nodes, which look at their ranks first."""
        return self._has_head and watchdog.look_before_stop(time.monotonic(), waits_for_head=True)

    def _stop_after_failure(self, failed_s: float) -> None:
        """Stop the ranks; with --snapshots=failure after a look at those that still run."""
        if self.options.snapshots == "failure" and not self.ended:
            self._watchdog = self._watchdog or self._make_watchdog()
            if self._watchdog.look_before_stop(failed_s, waits_for_head=self._has_head):
                return
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
            control = () if self._control is None else self._control.fds()
            return [self._group.fileno(), *control, *(self._watchdog.fds() if self._watchdog is not None else ())]

    def next_deadline_s(self) -> float | None:
        """Return when `poll` has something to do even if no descriptor is readable: time.monotonic(). None: never."""
        with self._lock:
            wait_s = None
            for each in () if self.ended else (self._watchdog, self._control, self._starts, self._restarts):
                wait_s = wait_s if each is None else each.timeout_s(wait_s)
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
        if kind == "exited" and (self._enders or self._starts is not None) and _went_well(event):
            self._count_down(event)
        if kind == "exited" and event.is_failure and not self.options.keep_going:
            if event.asks_again(self.options.again_code):
                self.stop_later(self.options.again_wait_s)
            elif self._stop_due_s == _NEVER and self._restarts is not None:
                self._restarts.note_failure(event.rank, event.time_ns)
            elif self._stop_due_s == _NEVER:
                self._stop_after_failure(event.time_ns / 1e9)
        if self._restarts is not None:
            self._restarts.on_event(event)
        if kind == "progress":  # often, and no news for the report
            self._note_progress(event)
            return
        if kind == "ready":
            self._count_ready(event.worker)
            self._note_up(self.plan.workers[event.worker])
        elif kind == "lease_ended":
            self.lease_ended, self.guard_ended = True, bool(event.code)
        elif kind == "triggered" and self._watchdog is None:
            self._watchdog = self._make_watchdog()
        if self._watchdog is not None:
            self._watchdog.on_event(event)
        if self._observers is not None:
            self._observers.on_event(event)
        if self._outcome is None and event.is_routine and not self.options.verbose:
            self._history.append(event)
            return
        text = self.outcome.record_event(event)
        if self._has_head and kind == "signalled":
            return
        if text or self.options.verbose:
            self._print(text or self._described(event))
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
            self._watchdog = self._watchdog or self._make_watchdog()
            if not is_before_stop:
                self._watchdog.take_snapshots()
            elif not self._watchdog.look_before_stop(waits_for_head=True) and self.on_seen is not None:
                self.on_seen()

    def _make_watchdog(self) -> Watchdog:
        """Make the watchdog. A late one, for a rank that itself reports a hang, learns of those that already run."""
        from infini_run.plan.torch_recorder import recorder_prefixes
        from infini_run.watchdog.watchdog import Watchdog

        watchdog = Watchdog(
            self.plan,
            self.options,
            self.group,
            entry=self._entry,
            environ=self._environ,
            folder=self._log_folder,
            recorder=recorder_prefixes(self.plan.base(self._environ) | dict(self.plan.env)),
        )
        watchdog.on_look = self.on_look
        for event in self.outcome.running() if self._outcome or self._history else ():
            watchdog.on_event(event)
        return watchdog

    def _count_down(self, event: Event) -> None:
        """Stop the job after the good end of a program with --ends_job."""
        worker = self.plan.workers[event.worker]
        program = worker.program
        if program not in self._enders:
            self._note_up(worker)
            return
        self._enders[program] -= 1
        if self._enders[program]:
            self._note_up(worker)
            return
        if self.on_program_end is not None:
            self.on_program_end(program)
        else:
            if self._restarts is not None:
                self._restarts.decide()  # a failure before this end may be none of the job's
            self.outcome.record_ender(program)
            self.stop()

    def _count_ready(self, index: int) -> None:
        """Count a ready rank. When all ranks are, notify the parent of this process once, if it asked for that."""
        self._ready.add(index)
        if self._is_ready or len(self._ready) < len(self.plan.workers):
            return
        self._is_ready = True
        address = self._environ.get("NOTIFY_SOCKET", "")
        if address and self._entry is not None:
            from infini_run.node.readiness import notify_ready

            problem = notify_ready(address)
            if problem:
                self._print(self.outcome.add_notice(problem))

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
            from infini_run.report.pace import Pace

            self._pace = Pace()
        return self._pace

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

    def _print(self, *lines: str, names_host: bool = False) -> None:
        """Print a line, printable whatever is in it: a leftover process chose its own name.

        Args:
            lines: The line, and those that belong to it.
            names_host: They say themselves on which host.
        """
        if self._print_line is None or not any(lines):
            return
        is_one_of_many = self._has_head and not names_host
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
        while (fd := self.group.next_client()) >= 0:
            try:
                control = self.control
            except OTHER_CODE as error:
                os.close(fd)
                self._refuse_questions(error)
            else:
                control.add(fd)

    def _refuse_questions(self, error: Exception) -> None:
        if not self._refuses_questions:
            self.notice(f"this launch cannot answer questions of other processes: {type(error).__name__}: {error}")
        self._refuses_questions = True

    @property
    def entry(self) -> ProcessState | None:
        """The state of this process at its start. None: it belongs to a host program."""
        return self._entry

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment that the ranks inherit."""
        return self._environ

    def trace_so_far(self) -> dict[str, Any] | None:
        """Return the trace as it would be written now. None: there is none."""
        return None if self._observers is None else self._observers.trace_so_far()

    @property
    def resources(self) -> LaunchResources:
        """What it has open for its ranks."""
        return self._resources

    def notice(self, text: str, *, is_kept: bool = True) -> None:
        """Print a line.

        Args:
            text: A sentence.
            is_kept: The report has it, too.
        """
        self._print(self.outcome.add_notice(text) if is_kept else text)

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
            if self._restarts is not None:
                self._restarts.cancel()
            if self._watchdog is not None:
                self._watchdog.stop()
            if self._observers is not None and not self.ended and not (self.headed and self.headed.is_idle):
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
        if self._restarts is not None:
            with self._lock:
                self._restarts.cancel()
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
                unfinished = self._watchdog.unfinished()
                if unfinished is not None:
                    self._keep_seen(unfinished)
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
            self._resources.close()

    def after_fork_in_child(self) -> None:
        """Close only the copies of descriptors, in a forked child: all else is the parent's."""
        self._lock, self._watchdog = RLock(), None
        if self._observers is not None:
            self._observers.after_fork_in_child()
            self._observers = None
        if self._control is not None:
            self._control.after_fork_in_child()
            self._control = None
        self._resources.after_fork_in_child()
        if self._group is not None:
            self._group.after_fork_in_child()
        self.close()

    def record_statuses(self) -> None:
        """Record in the outcome each rank's last STATUS= and PROGRESS=."""
        from infini_run.node.last_output import record_statuses

        with self._lock:
            if self._pace is not None:
                self.outcome.record_progress(self._pace.latest())
            if self._group is not None:
                record_statuses(self.outcome, self._group, self.plan.workers)

    def _record_last_output(self) -> None:
        """Record what goes with the group, where there is, or will be, something to report."""
        slow = () if self._pace is None or self._has_head else self._pace.slow_ranks()
        if self._outcome is not None or self.options.report or any(rank.is_costly for rank in slow):
            from infini_run.node.last_output import record_last_output

            if self._pace is not None:
                self.outcome.record_progress(self._pace.latest(), slow)
            record_last_output(self.outcome, self.group, self.plan.workers)
            self._advise()

    def _advise(self) -> None:
        """Advise on a rank whose Python infini-run chose: it may lack what the user's has."""
        first = self.outcome.first_failure()
        argv = next((worker.argv for worker in self.plan.workers if first and worker.rank == first.rank), ())
        named = [program.options.program[0] for program in self.plan.programs]
        if first is None or first.code != 1 or argv[1:2] != ("-u",) or argv[0] in named:
            return
        from infini_run.node.python_advice import advise

        self.outcome.set_advice(advise(first, argv, self._environ))

    def report(self) -> Report:
        """Return how it ended, or its state so far."""
        report = self.outcome.report()
        return report if self._restarts is None else self._restarts.add_to(report)


def _went_well(event: Event) -> bool:
    """Return whether a rank exited with code 0, and was not stopped."""
    return not (event.code or event.signal or event.status_lost or event.after_stop)


def plan_node(
    options: Options,
    environ: Mapping[str, str],
    *,
    launch_id: str = "",
    cwd: str = "",
    may_use_terminal: bool = True,
    task: SingleRank | None = None,
    span: RankRange | None = None,
) -> Plan:
    """Find the program, inspect this machine, and plan the ranks to start here.

    Args:
        options: What the user asked for.
        environ: The environment of the ranks, to which the plan adds.
        launch_id: The launch's id. Empty: a new one.
        cwd: Where to look for a relative program. Empty: here.
        may_use_terminal: As for `make_plan`; so are task and span.

    Raises:
        UsageError, ProgramError, StartError: As `find_command`, `inspect_node` and `make_plan`.
    """
    from infini_run.plan.model import FoundProgram
    from infini_run.plan.planner import make_plan
    from infini_run.plan.program import (
        absolute_flag_path,
        error_folder,
        find_command,
        inspect_node,
        launch_folder,
        new_launch_id,
        unshared_streams,
    )
    from infini_run.record import replace

    programs: tuple[FoundProgram, ...] = ()
    try:
        for each in options.programs or (options,):
            command = find_command(
                each.program,
                {**environ, **dict(each.env)} if each.env else environ,
                module=each.module,
                no_python=each.no_python,
                cwd=each.cwd or cwd,
            )
            if each.preload:
                from infini_run.plan.held_program import check_held

                check_held(command, environ, f"--preload={','.join(each.preload)}")
            if "pydevd" in sys.modules:
                from infini_run.plan.debugger import attach_debugger

                command = attach_debugger(command)
            if each.logs:
                each = replace(each, logs=absolute_flag_path("log_dir", each.logs))
            port = each.master_port
            if not port:
                from infini_run.node.ports import free_port

                port = free_port()
            programs += (FoundProgram(options=each, command=command, master_port=port),)
        node, launch_id = inspect_node(options, environ), launch_id or new_launch_id()
        folder = "" if task else launch_folder(options, launch_id, environ)
        return make_plan(
            options,
            programs,
            (node,),
            launch_id=launch_id,
            environ=environ,
            folder=folder,
            error_dir="" if task else error_folder(options, folder),
            stdin_is_terminal=options.stdin != "none" and os.isatty(0),
            may_use_terminal=may_use_terminal,
            unshared=unshared_streams(),
            task=task,
            spans=() if span is None else (span,),
        )
    except BaseException:
        let_go_ports(programs)
        raise


def let_go_ports(programs: Sequence[FoundProgram]) -> None:
    """Give the ports that nobody asked for free for other launches. Safe twice.

    Args:
        programs: The programs of a launch that ended.
    """
    from infini_run.node.ports import let_go

    for program in programs:
        if not program.options.master_port:
            let_go(program.master_port)
