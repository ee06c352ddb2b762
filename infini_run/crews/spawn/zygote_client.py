"""A zygote, seen from the launcher: its process (ZygoteProcess), and one set of workers in it (ZygoteProxy).

The zygote is a process like any other of the launcher's, with a guard and a launch marker. Each set of workers is a
NodeLaunch inside it, whose events come over a separate socket.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from _thread import RLock

from infini_run.core.c_structs import Event
from infini_run.core.group import forking
from infini_run.crews.spawn.exec_spawner import python_command
from infini_run.crews.spawn.spawner import KILL_ANSWER_S
from infini_run.crews.spawn.zygote_protocol import MessageSocket, receive_with_fds, send_link, send_with_fds
from infini_run.errors import InfiniRunError, StartError, UsageError
from infini_run.node.launch import NodeLaunch
from infini_run.node.outcome import Outcome
from infini_run.node.ports import free_port, let_go
from infini_run.options.from_python import read_flags
from infini_run.plan.model import FoundProgram
from infini_run.plan.planner import make_plan
from infini_run.plan.program import find_command, inspect_node, new_launch_id
from infini_run.record import replace
from infini_run.report.text import describe_end
from infini_run.system.fork_hooks import call_in_forked_children, close_fd, close_link
from infini_run.system.poller import poll_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.report import Report

_LONGEST_S = 2e6  # 23 days: a socket waits no longer (poll(2) counts milliseconds in an int)


class ForkRefused(InfiniRunError):
    """A zygote that must not fork; the text says why."""


class ReadsRank(UsageError):
    """A module of the preload that reads, during its import, what differs between ranks."""


class ZygoteProcess:
    """The process of a zygote."""

    def __init__(self, environ: Mapping[str, str], cwd: str | None) -> None:
        self._lock = RLock()
        self._run: NodeLaunch | None = None
        with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
            self._control, self._theirs = socket.socketpair()
            call_in_forked_children(self)
        try:
            plan, options = _zygote_plan(environ)
            self._run = NodeLaunch(plan, options, environ=environ, cwd=cwd, stdins={0: self._theirs.fileno()})
            self._run.start()
        except BaseException:
            self.close()
            raise
        finally:
            close_link(self._theirs)

    def prepare(self, hello: tuple[object, ...], timeout_s: float | None) -> None:
        """Have it import modules. hello: its first message (zygote.py). timeout_s: None: no limit. Raises UsageError:
        an import failed; ReadsRank: the import must not come before the fork; StartError: the zygote is gone, or
        takes too long."""
        try:
            self._control.settimeout(None if timeout_s is None else min(timeout_s, _LONGEST_S))
            send_with_fds(self._control, hello)
            answer: Any = receive_with_fds(self._control)
            self._control.settimeout(None)
        except TimeoutError:
            self.kill()  # it reads nothing while it imports
            raise StartError(f"preload: the imports took longer than {timeout_s:g} s", "preloading", 110) from None
        except OSError:
            answer = None
        if answer is None:
            raise self.lost()
        (problem, is_refused), _ = answer
        if problem:
            raise (ReadsRank if is_refused else UsageError)(problem)

    def send(self, message: object, fds: Sequence[int], connection: MessageSocket, theirs: socket.socket) -> None:
        """Send it a request with descriptors over a new connection, whose other end is `theirs`. An interrupt may
        tear that, but no later request. Raises StartError if it is gone."""
        with self._lock:
            try:
                send_link(self._control, theirs)
                connection.send_with_fds(message, fds)
            except OSError:
                raise self.lost() from None

    def lost(self) -> StartError:
        """End it if it has not ended, and return the error that says how it did."""
        how = "it was closed"
        if self._run is not None:
            self._run.kill()
            while not self._run.ended:
                self._run.poll(None)
            how = describe_end(self._run.report().exits[0])
        return StartError(f"the process that imported the modules is gone: {how}", "forking", 32)

    def kill(self) -> None:
        """Send it SIGKILL; its guard ends all that it has forked."""
        if self._run is not None:
            self._run.kill()

    def close(self) -> None:
        """Close its control socket, at which it ends, and wait for its end. Safe twice."""
        close_link(self._control)
        if self._run is not None:
            deadline_s = time.monotonic() + KILL_ANSWER_S
            while not self._run.ended and time.monotonic() < deadline_s:
                self._run.poll(max(0.0, deadline_s - time.monotonic()))
            self._run.close()

    def after_fork_in_child(self) -> None:
        """Close the copies in a forked child."""
        self._control.close()
        self._theirs.close()
        if self._run is not None:
            self._run.after_fork_in_child()


def _zygote_plan(environ: Mapping[str, str]) -> tuple[Plan, Options]:
    words = tuple(python_command("spawn.zygote"))
    request = read_flags({"nproc_per_node": 1, "console": "inherit", "stdin": "none"}, words, {})
    assert request.options is not None
    port = free_port()
    plan = make_plan(
        request.options,
        (FoundProgram(options=request.options, command=find_command(words, environ), master_port=port),),
        (inspect_node(request.options, environ),),
        launch_id=new_launch_id(),
        environ=environ,
    )
    let_go(port)  # a zygote has no rendezvous
    return plan, request.options


class ZygoteProxy:
    """A NodeLaunch inside a zygote, with the same methods."""

    def __init__(
        self,
        zygote: ZygoteProcess,
        plan: Plan,
        options: Options,
        environ: Mapping[str, str],
        cwd: str | None,
        stdins: Mapping[int, int],
    ) -> None:
        self.plan = plan
        self._ended = False
        self._new_events: list[Event] = []  # that came while it was started
        self.outcome = Outcome(plan, options, oom_kills=-1)
        self._zygote = zygote
        self._request = (plan, options, dict(environ), cwd or os.getcwd())
        self._channels = [stdins[worker.rank] for worker in plan.workers]
        self._lock = RLock()
        self._connection: MessageSocket | None = None
        self._theirs: socket.socket | None = None
        self._console: list[int] = []  # copies of stdout and stderr, until they have gone
        self._has_started = False
        self._last_output: dict[int, tuple[str, tuple[str, ...], tuple[str, ...]]] = {}
        self._pings: dict[int, float] = {}  # by rank, its last WATCHDOG=1 (monotonic)

    @property
    def ended(self) -> bool:
        """Whether nothing is left, and `poll` has returned that event."""
        return self._ended and not self._new_events

    def start(self) -> None:
        """Start as NodeLaunch.start does. Raises ForkRefused, StartError, UsageError: then no worker is left."""
        try:
            with forking:  # a child that is forked meanwhile lets go of it, or has nothing of it
                ours, self._theirs = socket.socketpair()
                self._connection = MessageSocket(ours)
                for fd in (1, 2):
                    self._console.append(_copy(fd))
            self._zygote.send(self._request, [*self._console, *self._channels], self._connection, self._theirs)
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            self._ended = True
            raise
        finally:
            if self._theirs is not None:
                close_link(self._theirs)
            self._close_console()
        try:
            while not self._has_started and not self._ended:
                self._wait(None)
                self._new_events = self.poll()
        except BaseException:
            self.close()
            raise
        if not self._has_started:
            raise self._zygote.lost()

    def _close_console(self) -> None:
        while self._console:
            close_fd(self._console[-1], self._forget_copy)

    def _forget_copy(self) -> None:
        self._console.pop()

    def _wait(self, timeout_s: float | None) -> None:
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN | (select.POLLOUT if self._connection.is_full else 0))
        poll.poll(poll_ms(timeout_s))

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Return the new events."""
        with self._lock:
            events, self._new_events = self._new_events, []
            if self._connection is None or self._ended:
                return events
            new: list[Event] = []
            self._connection.flush()
            messages: Any = self._connection.receive()
            for kind, value in messages:
                if kind == "refused":
                    self._ended = True
                    raise ForkRefused(value)
                if kind == "failed":
                    self._ended = True
                    raise value
                if kind == "started":
                    self._has_started = True
                elif kind == "pinged":
                    self._pings |= value
                elif kind == "snapshots":
                    self.outcome.record_snapshots(*value)
                else:
                    some, words = value
                    self._last_output |= words
                    new += some
            if self._connection.has_ended and not any(event.kind == "ended" for event in new):
                new += self._all_lost()
            for event in new:
                self._note(event)
        return events + new

    def _note(self, event: Event) -> None:
        if event.kind not in ("hung", "late"):  # told by the snapshots
            self.outcome.record_event(event)
        if event.kind == "ended":
            self._ended = True
            first = self.outcome.first
            if first in self._last_output:
                self.outcome.set_last_output(*self._last_output[first])

    def _all_lost(self) -> list[Event]:
        """End all: the zygote died, and its forks with it, in an unknown way."""
        now_ns = time.monotonic_ns()
        self.outcome.add_notice("the process that forks the workers was killed")
        alive = self.outcome.running()
        return [
            *(replace(event, kind="exited", status_lost=True, time_ns=now_ns) for event in alive),
            Event(kind="ended", time_ns=now_ns),
        ]

    def last_output(self, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the last stderr output of a rank that ended badly, and its Python stack."""
        return self._last_output.get(rank, ("", (), ()))[1:]

    def fds(self) -> list[int]:
        return [] if self.ended or self._connection is None else [self._connection.fileno()]

    def next_deadline_s(self) -> float | None:
        return None

    def last_watchdog_ping_s(self, rank: int) -> float:
        """Return the time as NodeLaunch.last_watchdog_ping_s does, but to a tenth of a second: the zygote reads
        NOTIFY_SOCKET."""
        return self._pings.get(rank, 0.0)

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal as NodeLaunch.signal does; a rank whose end is still on its way here counts as reached."""
        if number and number not in signal.valid_signals():
            raise OSError(22, f"unknown signal {number}")
        # also those whose start is on its way here: the zygote has them
        alive = [one.rank for one in self.outcome.exits() if one.end_s is None and rank in (None, one.rank)]
        if alive:
            self._send("signal", number, rank)
        return len(alive)

    def stop(self, number: int = 0) -> None:
        self._send("stop", number)

    def kill(self) -> None:
        self._send("kill")

    def _send(self, kind: str, *values: object) -> None:
        with self._lock:
            if not self.ended and self._connection is not None:
                self._connection.send((kind, values))

    def report(self) -> Report:
        return self.outcome.report()

    def close(self) -> None:
        """Kill what is left and wait until it is gone. Safe twice."""
        self.kill()
        deadline_s = time.monotonic() + KILL_ANSWER_S
        while not self.ended and self._connection is not None:
            if time.monotonic() >= deadline_s:
                self._zygote.kill()  # it does not obey; its guard ends what it leaves
                break
            self._wait(deadline_s - time.monotonic())
            self.poll()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._ended, self._new_events = True, []

    def after_fork_in_child(self) -> None:
        self._lock, self._ended = RLock(), True
        if self._connection is not None:
            self._connection.close()
        if self._theirs is not None:
            self._theirs.close()
        self._close_console()


def _copy(fd: int) -> int:
    """Return a copy of stdout or stderr; the host program may have closed it."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
