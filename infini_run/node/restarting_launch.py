"""A launch that may restart: one NodeLaunch after the other, each ended completely before the next begins.

It replaces a NodeLaunch, for the command and for the Python API alike; its import comes with --max_restarts. Between
two attempts infini-run has nothing but a group of no workers. That takes signals as any group does, and the delay is
one wait for it. The control socket lives as long as the launch, so that other processes find it at any time.
"""

from __future__ import annotations

import os
import time
from _thread import RLock

from infini_run.control.listener import ControlListener
from infini_run.core.c_structs import Event
from infini_run.core.group import Group, debug_flags
from infini_run.errors import InfiniRunError, StartError, printable
from infini_run.node import let_go_ports
from infini_run.node.launch import NodeLaunch
from infini_run.node.stdin_offset import rewind_stdin, stdin_offset
from infini_run.plan.program import absolute_flag_path
from infini_run.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from infini_run.core.c_structs import ProcessState
    from infini_run.display.observers import Observers
    from infini_run.node.delay_control import DelayControl
    from infini_run.node.outcome import Outcome
    from infini_run.node.warm_zygote import WarmZygote
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.plan.restart_policy import RestartState
    from infini_run.report.report import Report


class RestartingLaunch:
    """The workers of a plan on this node, through all attempts. Call `start`, then `poll` until `ended`, then
    `close`.

    The working directory and the log directory are those of the first attempt, even if the process changes its
    directory.

    Args:
        plan: The plan of the first attempt.
        options: What the user asked for.
        environ, entry, cwd, print_line, observers: As for NodeLaunch.
        zygote: The process that forks the ranks, and that closes with the launch. None: ranks are no forks.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        environ: Mapping[str, str],
        entry: ProcessState | None = None,
        cwd: str | None = None,
        print_line: Callable[[str], None] | None = None,
        observers: Observers | None = None,
        zygote: WarmZygote | None = None,
    ) -> None:
        log_dir = absolute_flag_path("log_dir", options.log_dir) if options.log_dir else ""
        self._options = replace(options, log_dir=log_dir)
        self._environ = environ
        self._entry = entry
        self._cwd = cwd if cwd or entry is not None else _here()
        self._print_line = print_line
        self._observers = observers
        self._zygote = zygote
        self._plan = plan  # what an attempt has changed for want of a folder, or of descriptors, is its own
        self._stdin_at = stdin_offset(plan)
        self._lock = RLock()
        self._listener = ControlListener()
        self._run = self._attempt(plan)
        self._delay_group: Group | None = None
        self._control: DelayControl | None = None  # during the delay
        self._stopped = self._over = False
        self._restarts: RestartState | None = None  # no attempt has failed so far

    def _attempt(self, plan: Plan, heading: str = "") -> NodeLaunch:
        given: dict[str, Any] = {
            "environ": self._environ,
            "entry": self._entry,
            "cwd": self._cwd,
            "print_line": self._print_line,
            "heading": heading,
            "observers": self._observers,
            "listener": self._listener,
        }
        run: NodeLaunch
        if self._zygote is None:
            run = NodeLaunch(plan, self._options, **given)
        else:
            from infini_run.node.warm_launch import WarmLaunch

            run = WarmLaunch(plan, self._options, zygote=self._zygote, **given)
        run.on_asked_stop = self.stop
        return run

    # ---- as a NodeLaunch

    def start(self) -> None:
        """Start every worker for the first time. Raises as NodeLaunch.start."""
        try:
            self._run.start()
        except BaseException:
            self._close_zygote()
            self._listener.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether the last attempt ended, and nothing of it is left."""
        return self._over

    @property
    def went_well(self) -> bool:
        """Whether the last attempt went well, and there is nothing to report."""
        return self._over and self._run.went_well

    @property
    def plan(self) -> Plan:
        """The plan of the attempt that runs, or ran last."""
        return self._run.plan

    @property
    def outcome(self) -> Outcome:
        """The outcome of the attempt that runs, or ran last."""
        with self._lock:
            return self._run.outcome

    @property
    def lock(self) -> RLock:
        """The lock of events, as NodeLaunch.lock."""
        return self._lock

    def record_statuses(self) -> None:
        """Record the last STATUS= of each rank, as NodeLaunch.record_statuses."""
        with self._lock:
            self._run.record_statuses()

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal, as NodeLaunch.signal. Between two attempts it reaches no process.

        Args:
            number: The signal.
            rank: A rank of this node. None: all of them.
        """
        with self._lock:
            return self._run.signal(number, rank)

    def stop(self) -> None:
        """Begin to stop the ranks, and start no further attempt."""
        with self._lock:
            self._stopped = True
            self._run.stop()
            self._end_wait()

    def kill(self) -> None:
        """Send SIGKILL to everything that is left, and start no further attempt."""
        with self._lock:
            self._stopped = True
            self._run.kill()
            self._end_wait()

    def _end_wait(self) -> None:
        """End the delay, whoever waits for it."""
        if self._delay_group is not None:
            self._delay_group.close()

    def close(self) -> None:
        """Kill and reap what is left. Safe twice."""
        with self._lock:
            self._stopped = self._over = True
            self._close_delay_group()
            self._run.close()
            self._close_zygote()
            self._listener.close()

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()

    def after_fork_in_child(self) -> None:
        """Close the copies of descriptors in a forked child. The launch stays the parent's."""
        self._lock, self._over = RLock(), True
        self._run.after_fork_in_child()
        self._listener.after_fork_in_child()
        if self._control is not None:
            self._control.after_fork_in_child()
            self._control = None
        if self._delay_group is not None:
            self._delay_group.after_fork_in_child()
            self._delay_group = None

    def report(self) -> Report:
        """Return the report of the last attempt, with a line for each attempt before it."""
        with self._lock:
            report = self._run.report()
            return report if self._restarts is None else self._restarts.add_to(report)

    # ---- from one attempt to the next

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> list[Event]:
        """Return the events since the last call, as NodeLaunch.poll. An attempt that is not the last one ends with
        `restarting` in place of `ended`.

        Args:
            timeout_s: Seconds to wait at most. None: for ever.
            also: Descriptors that end the wait when they are readable.
        """
        with self._lock:
            run, delay_group = self._run, self._delay_group
        if delay_group is not None:
            events = self._wait_delay(delay_group, timeout_s, also)
            with self._lock:
                self._stop_listening_if_over()
            return events
        events = run.poll(timeout_s, also)
        with self._lock:
            more = self._after_attempt() if run is self._run and run.ended and self._delay_group is None else []
            is_last = run is self._run and self._over
            self._stop_listening_if_over()
        return [event for event in events if event.kind != "ended" or is_last] + more

    def wait(self, timeout_s: float | None, also: Sequence[int]) -> None:
        """Wait until `poll(0)` has something to do, as NodeLaunch.wait."""
        with self._lock:
            run, delay_group = self._run, self._delay_group
        if delay_group is None:
            run.wait(timeout_s, also)
        else:
            self._await_delay(delay_group, timeout_s, also)

    def _stop_listening_if_over(self) -> None:
        """Let nobody connect any more, unless another attempt follows: nobody would answer."""
        if self._over:
            self._listener.stop_listening()

    def _after_attempt(self) -> list[Event]:
        """Wait for the next attempt, or end, after the end of one."""
        if self._over or self._stopped or self._run.went_well:
            self._over = True
            return []
        self._run.close()
        if self._restarts is None:
            from infini_run.plan.restart_policy import RestartState

            self._restarts = RestartState(self._options)
        self._restarts.note_progress(self._run.progress)
        return self._wait_or_end(self._restarts, self._restarts.decide(self._run.report()))

    def _wait_or_end(self, restarts: RestartState, line: str) -> list[Event]:
        """Begin the delay before a restart that `line` announces; empty: end."""
        if line:
            try:
                self._delay_group = self._open_delay_group()
                self._control = self._open_control(restarts)
            except StartError as error:
                restarts.revoke(str(error))
                line = ""
        if not line:
            self._over = True
            return []
        self._print(line)
        if self._zygote is not None:
            self._zygote.renew(self._run.lived_s)
        return [self._observed(Event(kind="restarting", code=restarts.total, time_ns=time.monotonic_ns()))]

    def _open_delay_group(self) -> Group:
        return Group(
            0,
            mark=os.fsencode(self._plan.launch_id),
            grace_s=0,
            stop_signal=self._options.stop_signal,
            stop_scope=self._options.stop_scope,
            entry=self._entry,
            debug=debug_flags(self._environ),
        )

    def _open_control(self, restarts: RestartState) -> DelayControl | None:
        if self._listener.fileno() < 0:
            return None
        from infini_run.node.delay_control import DelayControl

        return DelayControl(self._run, self._listener, restarts.restart_s)

    def _wait_delay(self, delay_group: Group, timeout_s: float | None, also: Sequence[int]) -> list[Event]:
        """Wait for the delay to pass, at most `timeout_s`. A stopping signal, and a call of `stop`, end it."""
        restarts, control = self._restarts, self._control
        assert restarts is not None
        self._await_delay(delay_group, timeout_s, also)
        with self._lock:
            if control is not None and control is self._control:
                control.run_due()
            if self._observers is not None:
                self._observers.run_due()
            if delay_group is not self._delay_group:
                return []  # another thread was here
            signalled = [event for event in delay_group.run_once() if event.kind == "signalled"]
            if not signalled and not self._stopped:
                return self._begin(restarts) if time.monotonic() >= restarts.due_s else []
            self._close_delay_group()
            self._over = True
            if signalled:
                self._cancel(restarts, self._observed(signalled[0]).signal)
            return [*signalled[:1], Event(kind="ended", time_ns=time.monotonic_ns())]

    def _await_delay(self, delay_group: Group, timeout_s: float | None, also: Sequence[int]) -> None:
        """Wait until `_wait_delay` has something to do."""
        restarts, control = self._restarts, self._control
        assert restarts is not None
        left_s = max(0.0, restarts.due_s - time.monotonic())
        left_s = left_s if timeout_s is None else min(left_s, timeout_s)
        if self._observers is not None:
            left_s = self._observers.timeout_s(left_s) or 0.0
        delay_group.wait(left_s, also if control is None else [*also, control.fileno()])

    def _observed(self, event: Event) -> Event:
        """Tell observers of an event that no NodeLaunch has seen."""
        if self._observers is not None:
            self._observers.on_event(event)
        return event

    def _cancel(self, restarts: RestartState, number: int) -> None:
        from infini_run.report.text import signal_name

        restarts.cancel(number)
        self._print(f"no restart: stopped by {signal_name(number)}")

    def _begin(self, restarts: RestartState) -> list[Event]:
        """Start the next attempt. One whose ranks cannot start counts as one that failed."""
        from infini_run.plan.next_attempt import with_new_launch_id

        self._close_delay_group()
        restarts.begin()
        before = self._run
        rewind_stdin(self._stdin_at)
        plan = with_new_launch_id(
            self._plan,
            launch_id=f"{self._plan.launch_id}.{restarts.total}",
            master_ports=self._next_ports(),
            restarts=restarts.total,
        )
        try:
            self._run = self._attempt(plan, restarts.heading)  # set before its ranks start: an interrupt may come
            self._run.start()
        except InfiniRunError as error:
            self._run = before  # the report has the last failure of a rank
            if isinstance(error, StartError) and not self._stopped:
                return self._wait_or_end(restarts, restarts.start_failed(str(error)))
            restarts.give_up(str(error))
            self._over = True
        except BaseException:  # KeyboardInterrupt may come between any two steps
            self._run.close()
            raise
        if self._stopped:
            self._run.stop()
        return []

    def _next_ports(self) -> list[int]:
        """Return other ports where nobody named one: the last ones may still have connections."""
        from infini_run.node.ports import free_port

        programs = self._run.plan.programs
        let_go_ports(programs)
        return [program.options.master_port or free_port() for program in programs]

    def _close_delay_group(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()
        delay_group, self._delay_group = self._delay_group, None
        if delay_group is not None:
            delay_group.close()

    def _print(self, text: str) -> None:
        if self._print_line is not None:
            self._print_line(f"infini-run: {printable(text)}")


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # deleted: ranks inherit it
