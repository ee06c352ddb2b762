"""Workers by fork from a zygote, which has imported what takes long: the launcher's side.

The zygote is a process like any other that we start, with a guard and a mark; each set of workers is a run in it,
whose events come to us over a socket of its own. So several threads may use one zygote, each for a launch.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from _thread import RLock
from warnings import warn

from infini_run.api import read_flags
from infini_run.core.group import Event
from infini_run.crews.spawner import ExecSpawner, WorkerGroup, python_command
from infini_run.crews.zygote_protocol import MessageSocket, receive_with_fds, send_with_fds
from infini_run.errors import InfiniRunError, StartError, UsageError
from infini_run.node.launch import NodeLaunch
from infini_run.node.outcome import Outcome
from infini_run.node.ports import free_port, let_go
from infini_run.plan.model import make_plan
from infini_run.plan.program import find_command, inspect_node, new_launch_id
from infini_run.record import replace
from infini_run.report.report import describe_end
from infini_run.system.fork_hooks import call_in_forked_children
from infini_run.system.poller import poll_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.crews.spawner import Run
    from infini_run.options.options import Options
    from infini_run.plan.model import Plan
    from infini_run.report.report import Report

_END_S = 15.0  # how long a zygote may take to end a run by SIGKILL; the core gives up after 5
_START_S = 60.0


class CannotFork(InfiniRunError):
    """The zygote must not be forked."""


class ForkSpawner(ExecSpawner):
    """Workers as forks of one process that has imported `preload`: milliseconds each. Else as an ExecSpawner, which
    it is where the zygote must not be forked: that is warned of once (RuntimeWarning), with the reason.

    preload: names of modules. start_timeout_s: for the imports; None: no limit. is_silent: it is not warned. stays:
    many launches are to come. path, argv: sys.path and sys.argv at the imports (None: ours). Other arguments: an
    ExecSpawner's.
    Raises UsageError: a module cannot be imported.
    """

    def __init__(
        self,
        preload: Sequence[str],
        *,
        start_timeout_s: float | None = _START_S,
        is_silent: bool = False,
        stays: bool = False,
        path: Sequence[str] | None = None,
        argv: Sequence[str] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        if self.options.bind != "none":
            raise UsageError("bind= and preload= do not go together: what is imported lies where the zygote ran")
        if self.options.log_dir:
            self.options = replace(self.options, log_dir=os.path.abspath(self.options.log_dir))
        self._preload = tuple(preload)
        self._start_timeout_s = start_timeout_s
        self._is_silent = is_silent
        self._stays = stays
        self._path, self._argv = path, argv
        self._zygote: ZygoteProcess | None = None
        self._lock = RLock()
        self.refusal = ""  # why nobody is forked

    def open(self) -> None:
        """Start the zygote and wait for its imports; `start` does so where it was not done before."""
        with self._lock:
            if self._zygote is None and not self.refusal:
                zygote = ZygoteProcess(self._zygote_environ(), self._cwd)
                try:
                    path = list(sys.path if self._path is None else self._path)
                    argv = list(sys.argv if self._argv is None else self._argv)
                    zygote.prepare((self._preload, path, argv, self._stays), self._start_timeout_s)
                except BaseException:
                    zygote.close()
                    raise
                self._zygote = zygote

    def _zygote_environ(self) -> dict[str, str]:
        """OpenMP reads its number of threads when it is loaded, and the workers' is known."""
        plan = self._plan([0], 0)
        threads = dict(plan.env).get("OMP_NUM_THREADS")
        return dict(self._environ) | ({"OMP_NUM_THREADS": threads} if threads else {})

    def _gang(self, plan: Plan) -> WorkerGroup:
        self.open()
        zygote = self._zygote
        if zygote is None:
            return super()._gang(plan)
        try:
            return _ForkGang(zygote, plan, self.options, self._environ, self._cwd)
        except CannotFork as refused:
            with self._lock:
                self.refusal = str(refused)
                self._zygote = None
            zygote.close()
            if not self._is_silent:
                warn(f"workers are started afresh and not forked: {refused}", RuntimeWarning, stacklevel=2)
        return super()._gang(plan)

    def close(self) -> None:
        with self._lock:
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()
        super().close()

    def after_fork_in_child(self) -> None:
        self._lock = RLock()
        if self._zygote is not None:
            self._zygote.after_fork_in_child()


class ZygoteProcess:
    """The zygote, seen from outside."""

    def __init__(self, environ: Mapping[str, str], cwd: str | None) -> None:
        self._lock = RLock()
        self._control, theirs = socket.socketpair()
        self._run: NodeLaunch | None = None
        call_in_forked_children(self)
        try:
            plan, options = _zygote_plan(environ)
            self._run = NodeLaunch(plan, options, environ=environ, cwd=cwd, stdins={0: theirs.fileno()})
            self._run.start()
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def prepare(self, hello: tuple[object, ...], timeout_s: float | None) -> None:
        """Have it import. hello: as it expects it. Raises UsageError: it cannot; StartError: it has ended, or takes
        too long."""
        try:
            self._control.settimeout(timeout_s)
            send_with_fds(self._control, hello)
            answer: Any = receive_with_fds(self._control)
            self._control.settimeout(None)
        except TimeoutError:
            raise StartError(f"preload: the imports took longer than {timeout_s:g} s", "preloading", 110) from None
        except OSError:
            answer = None
        if answer is None:
            raise self.lost()
        if answer[0]:
            raise UsageError(answer[0])

    def send(self, message: object, fds: Sequence[int]) -> None:
        """Raises StartError: it is gone."""
        with self._lock:
            try:
                send_with_fds(self._control, message, fds)
            except OSError:
                raise self.lost() from None

    def lost(self) -> StartError:
        """It has ended; how."""
        how = "it was closed"
        if self._run is not None:
            self._run.kill()
            while not self._run.ended:
                self._run.poll(None)
            how = describe_end(self._run.report().exits[0])
        return StartError(f"the process that had imported the modules is gone: {how}", "forking", 32)

    def kill(self) -> None:
        """And with it all that it has forked."""
        if self._run is not None:
            self._run.kill()

    def close(self) -> None:
        """It ends by itself when it hears nothing more. Safe twice."""
        self._control.close()
        if self._run is not None:
            deadline_s = time.monotonic() + _END_S
            while not self._run.ended and time.monotonic() < deadline_s:
                self._run.poll(max(0.0, deadline_s - time.monotonic()))
            self._run.close()

    def after_fork_in_child(self) -> None:
        """In a forked child."""
        self._control.close()
        if self._run is not None:
            self._run.after_fork_in_child()


def _zygote_plan(environ: Mapping[str, str]) -> tuple[Plan, Options]:
    words = tuple(python_command("zygote"))
    request = read_flags({"nproc_per_node": 1, "console": "inherit", "stdin": "none"}, words, {})
    assert request.options is not None
    plan = make_plan(
        request.options,
        find_command(words, environ),
        [inspect_node(request.options, environ)],
        launch_id=new_launch_id(),
        master_port=free_port(),
        environ=environ,
    )
    let_go(plan.master_port)  # nobody listens there
    return plan, request.options


class _ForkGang(WorkerGroup):
    def __init__(self, zygote: ZygoteProcess, *given: Any) -> None:
        self._zygote = zygote
        super().__init__(*given)

    def _make_run(
        self, plan: Plan, options: Options, environ: Mapping[str, str], cwd: str | None, stdins: Mapping[int, int]
    ) -> Run:
        return ZygoteLaunch(self._zygote, plan, options, environ, cwd, stdins)

    def last_lines(self, rank: int) -> tuple[str, ...]:
        assert isinstance(self.run, ZygoteLaunch)
        return self.run.last_lines(rank)


class ZygoteLaunch:
    """Workers in a zygote, with a NodeLaunch's face."""

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
        self._untold: list[Event] = []  # came while it was started
        self.outcome = Outcome(plan, options, has_terminal=False, oom_kills=-1)
        self._zygote = zygote
        self._what = (plan, options, dict(environ), cwd or os.getcwd())
        self._channels = [stdins[worker.rank] for worker in plan.workers]
        self._lock = RLock()
        self._wire: MessageSocket | None = None
        self._has_started = False
        self._words: dict[int, tuple[str, tuple[str, ...]]] = {}

    @property
    def ended(self) -> bool:
        """Nothing is left, and `poll` has said so."""
        return self._ended and not self._untold

    def start(self) -> None:
        """Raises Refused, StartError, UsageError: none is left."""
        ours, theirs = socket.socketpair()
        self._wire = MessageSocket(ours)
        console: list[int] = []
        try:
            console += (_copy(1), _copy(2))
            self._zygote.send(self._what, [theirs.fileno(), *console, *self._channels])
        except BaseException:
            self._wire.close()
            self._ended = True
            raise
        finally:
            theirs.close()
            for fd in console:
                os.close(fd)
        try:
            while not self._has_started and not self._ended:
                self._wait(None)
                self._untold = self.poll()
        except BaseException:
            self.close()
            raise
        if not self._has_started:
            raise self._zygote.lost()

    def _wait(self, timeout_s: float | None) -> None:
        assert self._wire is not None
        poll = select.poll()
        poll.register(self._wire.fileno(), select.POLLIN | (select.POLLOUT if self._wire.is_full else 0))
        poll.poll(poll_ms(timeout_s))

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened."""
        with self._lock:
            events, self._untold = self._untold, []
            if self._wire is None or self._ended:
                return events
            new: list[Event] = []
            self._wire.flush()
            messages: Any = self._wire.take()
            for kind, value in messages:
                if kind == "refused":
                    self._ended = True
                    raise CannotFork(value)
                if kind == "failed":
                    self._ended = True
                    raise value
                if kind == "started":
                    self._has_started = True
                else:
                    some, words = value
                    self._words |= words
                    new += some
            if self._wire.has_ended and not any(event.kind == "ended" for event in new):
                new += self._all_lost()
            for event in new:
                self._note(event)
        return events + new

    def _note(self, event: Event) -> None:
        self.outcome.note(event)
        if event.kind == "ended":
            self._ended = True
            first = self.outcome.first
            if first in self._words:
                self.outcome.add_words(*self._words[first])

    def _all_lost(self) -> list[Event]:
        """The zygote has died, and its forks with it: nobody knows how they ended."""
        now_ns = time.monotonic_ns()
        self.outcome.notice("the process that had forked the workers was killed")
        alive = self.outcome.running()
        return [
            *(replace(event, kind="exited", status_lost=True, time_ns=now_ns) for event in alive),
            Event(kind="ended", time_ns=now_ns),
        ]

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """What a rank that ended badly wrote last to stderr."""
        return self._words.get(rank, ("", ()))[1]

    def fds(self) -> list[int]:
        return [] if self.ended or self._wire is None else [self._wire.fileno()]

    def due_s(self) -> float | None:
        return None

    def pinged_s(self, rank: int) -> float:
        """Not known here: what a fork says to its NOTIFY_SOCKET is heard by the zygote."""
        return 0.0

    def signal(self, number: int, rank: int | None = None) -> int:
        """As NodeLaunch.signal; a rank whose end is just on its way to us counts as reached."""
        if number and number not in signal.valid_signals():
            raise OSError(22, f"there is no signal {number}")
        alive = [event.rank for event in self.outcome.running() if rank in (None, event.rank)]
        if alive:
            self._tell("signal", number, rank)
        return len(alive)

    def stop(self, number: int = 0) -> None:
        self._tell("stop", number)

    def kill(self) -> None:
        self._tell("kill")

    def _tell(self, kind: str, *values: object) -> None:
        with self._lock:
            if not self.ended and self._wire is not None:
                self._wire.send((kind, values))

    def report(self) -> Report:
        return self.outcome.report()

    def close(self) -> None:
        """Kill what is left and wait until it is gone. Safe twice."""
        self.kill()
        deadline_s = time.monotonic() + _END_S
        while not self.ended and self._wire is not None:
            if time.monotonic() >= deadline_s:
                self._zygote.kill()  # it does not do what it is told: its guard ends what it leaves
                break
            self._wait(deadline_s - time.monotonic())
            self.poll()
        with self._lock:
            if self._wire is not None:
                self._wire.close()
            self._ended, self._untold = True, []

    def after_fork_in_child(self) -> None:
        self._lock, self._ended = RLock(), True
        if self._wire is not None:
            self._wire.close()


def _copy(fd: int) -> int:
    """Of our stdout or stderr; the host program may have closed it."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
