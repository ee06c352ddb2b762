"""One worker of a crew, as its supervisor has it: through all its lives, with what it is to do and has to say.

What it does with what happens is worker_states.py's; here is how. It is turned by the supervisor's loop, in one
thread.
"""

from __future__ import annotations

import os
import time
from collections import deque

from infini_run.crews import worker_states
from infini_run.crews.protocol import (
    NO_TASK,
    Cancel,
    Cancelled,
    Done,
    Emit,
    Extend,
    Failed,
    Log,
    Progress,
    Ready,
    Shutdown,
    Status,
    Task,
    TaskStarted,
    decode,
    encode,
)
from infini_run.crews.remote_exception import to_remote_error
from infini_run.errors import ChannelEnd, ChannelError, printable
from infini_run.record import record
from infini_run.report.failures import WorkerDied
from infini_run.report.report import Exit, describe_end, duration_text
from infini_run.system.poller import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from infini_run.crews.event_queue import EventQueue
    from infini_run.crews.future import Ask
    from infini_run.crews.protocol import Body, Hello, Message
    from infini_run.crews.spawner import WorkerProcess
    from infini_run.system.poller import Poller

    class Owner(Protocol):
        """The supervisor, as far as one of its workers needs it."""

        limits: Limits
        news: EventQueue
        poller: Poller

        def tell(self, kind: str, member: SupervisedWorker, **more: Any) -> None: ...

        def tell_result(self, member: SupervisedWorker, message: Done | Failed | Cancelled) -> None: ...

        def tell_cancelled(self, job: PendingTask, member: SupervisedWorker) -> None: ...

        def serve(self, member: SupervisedWorker) -> None: ...

        def take_back(self, jobs: Sequence[PendingTask]) -> None: ...

        def fail(self, job: PendingTask, member: SupervisedWorker | None, error: BaseException) -> None: ...

        def log(self, member: SupervisedWorker, body: Body) -> None: ...

        def decide(self, member: SupervisedWorker) -> None: ...

        def drain_left_s(self) -> float: ...

        def note_problem(self, text: str) -> None: ...

        def try_step(self, name: str, step: Callable[[], None]) -> None: ...


_TURN = 64  # messages that are taken at a time: then the others get their turn
_REST = 1 << 16  # messages of one that has ended: more than its socket holds
_EXIT_S = 2.0  # from the end of a channel to the exit of its process, where it is ending: an interpreter may be slow
_WORDS = 5  # last lines that an error shows


@record
class Limits:
    """Seconds. ready_timeout_s, watchdog_s: 0: none."""

    ready_timeout_s: float
    watchdog_s: float
    drain_s: float


class PendingTask:
    """A task on its way. shared: any worker may do it. taken: it was begun."""

    __slots__ = ("ask", "body", "shared", "taken", "task")

    def __init__(self, task: int, body: Body, ask: Ask | None, *, shared: bool) -> None:
        self.task = task
        self.body = body
        self.ask = ask
        self.shared = shared
        self.taken = False


class SupervisedWorker:
    """rank: which one. state: one of states.STATES. held: what it is to do, and has not been handed. cause: why it
    failed last. stopped_for: why it was stopped, where that was not its own fault."""

    def __init__(self, rank: int, supervisor: Owner) -> None:
        self.rank = rank
        self.state = "stopped"
        self.runner: WorkerProcess | None = None
        self.held: deque[PendingTask] = deque()
        self.handed: dict[int, PendingTask] = {}
        self.starts = 0
        self.status = ""
        self.progress = (0.0, 0.0)
        self.cause: WorkerDied | None = None
        self.stopped_for = ""
        self.is_settled = True  # nothing is left of its last life
        self._supervisor = supervisor
        self._deadline_s: float | None = None
        self._extended_s = 0.0
        self._sign_s = 0.0  # when it was last heard of
        self._is_blamed = self._has_ended_well = self._is_over = self._has_left = False
        self._failed_while = ""  # its state before
        self._could_not: Failed | None = None  # why it could not start, or not stop
        self._watched: set[int] = set()
        self._copies: dict[int, int] = {}

    @property
    def is_live(self) -> bool:
        """It works, or will."""
        return self.state in ("starting", "ready", "busy")

    @property
    def is_due(self) -> bool:
        """More is to be read, though no descriptor says so."""
        if self.runner is None or self.is_settled or self._is_over or self._supervisor.news.is_full:
            return False
        return self.runner.events.pending

    # ---- what happens

    def begin(self, runner: WorkerProcess) -> None:
        """A new life."""
        self.runner = runner
        self.starts += 1
        self.status, self.progress, self.cause, self.stopped_for = "", (0.0, 0.0), None, ""
        self._is_blamed = self._has_ended_well = self._is_over = self._has_left = self.is_settled = False
        self._could_not, self._extended_s = None, 0.0
        self.happen("start")
        self._supervisor.tell("started", self, pid=runner.pid)

    def happen(self, event: str) -> None:
        """Something did."""
        before = self.state
        self.state, action = worker_states.step(before, event)
        if self.state == "failed" != before:
            self._failed_while = before
        if action:
            getattr(self, f"_{action}")()

    def _begin(self) -> None:
        self._sign_s = time.monotonic()
        self._set_deadline(self._supervisor.limits.ready_timeout_s)

    def _serve(self) -> None:
        self._deadline_s = None
        self._supervisor.serve(self)

    def _tell(self) -> None:
        limit_s = self._supervisor.drain_left_s()
        self._set_deadline(limit_s)
        self._post(Shutdown(deadline_s=limit_s))
        assert self.runner is not None
        try:
            self.runner.tasks.post_end()
        except ChannelError:
            return  # it is gone: its own end of the channel says so

    def _stop(self) -> None:
        assert self.runner is not None
        self._deadline_s = None
        self._drop_jobs()
        self.runner.stop()

    def _await(self) -> None:
        self._set_deadline(_EXIT_S)

    def _blame(self) -> None:
        """Once for each life."""
        self._deadline_s = None
        assert self.runner is not None
        if not self._is_blamed:
            self._is_blamed = True
            self.cause = self._make_cause()
            self._drop_jobs()
            self._supervisor.tell("died", self, problem=self.cause)
            self._supervisor.decide(self)
        self.runner.stop()

    def _settle(self) -> None:
        self._deadline_s = None
        self._drop_jobs()
        self._unwatch()
        assert self.runner is not None
        if self.state == "stopped":
            self._note_bad_end(self.runner.exit)
            self._supervisor.tell("stopped", self, pid=self.runner.pid)
        self._supervisor.try_step(f"closing what is left of rank {self.rank}", self.runner.close)
        self.is_settled = True

    def _note_bad_end(self, exit_: Exit | None) -> None:
        """It was told to end, and did not end in order."""
        if self.stopped_for or (exit_ is not None and exit_.code == 0 and self._has_ended_well):
            return
        how = describe_end(exit_) if exit_ is not None else "nothing is known of its end"
        if self._could_not is not None:
            how += f": {self._could_not.kind}: {self._could_not.text}"
        self._supervisor.note_problem(f"rank {self.rank} did not end in order when the crew was closed: {how}")

    def hasten(self, end_s: float) -> None:
        """The crew is to have ended by then."""
        if self.state == "stopping" and self._deadline_s is not None:
            self._deadline_s = min(self._deadline_s, end_s)

    def abandon(self) -> None:
        """End what is left of it now, whatever state it is in."""
        assert self.runner is not None
        self.is_settled = True
        self.stopped_for = self.stopped_for or "the crew has ended"
        self._drop_jobs()
        self._unwatch()
        self.runner.close()
        self.state = "stopped"

    # ---- what it does

    def greet(self, hello: Hello) -> None:
        """The first message."""
        self._post(hello)

    def hand(self, job: PendingTask) -> None:
        """Send it something to do."""
        if not self.handed:
            self._sign_s = time.monotonic()
            self._set_deadline(self._supervisor.limits.watchdog_s)
        self.handed[job.task] = job
        self.happen("hand")
        self._post(Task(task=job.task, body=job.body))

    def cancel(self, task: int) -> bool:
        """Whether it was its own."""
        for job in self.held:
            if job.task == task:
                self.held.remove(job)
                self._supervisor.tell_cancelled(job, self)
                return True
        if task in self.handed:
            self._post(Cancel(task=task))
            return True
        return False

    def _post(self, message: Message) -> None:
        assert self.runner is not None
        try:
            self.runner.tasks.post_bytes(encode(message))
        except ChannelError:
            return  # it has died: its own end of the channel says how

    def flush(self) -> bool:
        """Send on what found no room before; whether nothing waits for room."""
        assert self.runner is not None
        try:
            return self.runner.tasks.flush()
        except ChannelError:
            return True

    def _finish(self, message: Done | Failed | Cancelled) -> None:
        job = self.handed.pop(message.task, None)
        if job is None:
            return
        if isinstance(message, Cancelled):
            self._supervisor.tell_cancelled(job, self)
        elif job.ask is None:
            self._supervisor.tell_result(self, message)
        else:
            assert self.runner is not None
            job.ask.settle((message, self.rank, self.runner.host))
        if not self.handed:
            self.happen("idle")
        elif self.state == "busy":
            self._supervisor.serve(self)

    def _drop_jobs(self) -> None:
        """It will do nothing any more: what anybody may do, and was not begun, goes back; the rest fails."""
        jobs, self.handed = list(self.handed.values()), {}
        self._supervisor.take_back([job for job in jobs if job.shared and not job.taken])
        for job in jobs:
            if not job.shared or job.taken:
                self._supervisor.fail(job, self, self._why())

    def _why(self) -> WorkerDied:
        """A new one each time: an exception that is raised twice grows its traceback."""
        if self.cause is not None:
            error = WorkerDied(str(self.cause), self.cause.exit)
            error.__cause__ = self.cause.__cause__
            return error
        text = f"rank {self.rank} was stopped: {self.stopped_for or 'the crew was closed'}"
        return WorkerDied(text, self._exit())

    # ---- what it says

    def turn(self) -> None:
        """Take what has come, send what is to go."""
        if self.runner is None or self.is_settled:
            return
        self.runner.poll()
        self._read(_TURN)
        if not self._is_over:
            self.flush()
        if self.runner.exit is not None:
            self._leave()
        if self.runner.ended:
            self.happen("gone")

    def _leave(self) -> None:
        """Its process has ended: what it said last is in the channel, which a child of its may still hold open."""
        if not self._has_left:
            self._has_left = True
            self._read(_REST)
            self._is_over = True
            self.happen("exit")

    def _read(self, most: int) -> None:
        assert self.runner is not None
        events = self.runner.events
        for _ in range(most):
            if self._is_over or (self._supervisor.news.is_full and self.runner.exit is None):
                break
            try:
                self._take(decode(events.recv_bytes(0.0)))
            except TimeoutError:
                break
            except ChannelEnd:
                self._has_ended_well = self._is_over = True
                self.happen("end")
            except (ChannelError, TypeError, ValueError, KeyError, EOFError):  # the last ones: it is no message
                self._is_over = True
                self.happen("break")

    def _take(self, message: Message) -> None:
        self._sign_s = time.monotonic()
        if isinstance(message, TaskStarted):
            if message.task in self.handed:
                self.handed[message.task].taken = True
        elif isinstance(message, Emit):
            self._supervisor.tell("emitted", self, task=message.task, body=message.body)
        elif isinstance(message, Failed) and message.task == NO_TASK:
            self._could_not = message
        elif isinstance(message, (Done, Failed, Cancelled)):
            self._finish(message)
        elif isinstance(message, Ready):
            self._supervisor.tell("ready", self)
            self.happen("ready")
        else:
            self._take_word(message)

    def _take_word(self, message: Message) -> None:
        if isinstance(message, Status):
            self.status = message.text
            self._supervisor.tell("status", self, text=message.text)
        elif isinstance(message, Progress):
            self.progress = (message.done, message.of)
            self._supervisor.tell("progress", self, task=message.task, done=message.done, of=message.of)
        elif isinstance(message, Extend):
            self._extended_s = time.monotonic() + message.seconds
        elif isinstance(message, Log):
            self._supervisor.log(self, message.body)

    # ---- deadlines

    def _set_deadline(self, limit_s: float) -> None:
        self._deadline_s = time.monotonic() + limit_s if limit_s else None

    def refresh(self) -> None:
        """Nobody can have been heard until now: we were stopped ourselves, or did not listen."""
        self._sign_s = time.monotonic()
        if self._deadline_s is not None and self.state in ("starting", "busy"):
            limits = self._supervisor.limits
            self._set_deadline(limits.ready_timeout_s if self.state == "starting" else limits.watchdog_s)

    def due_s(self) -> float | None:
        """When there is something to do, whatever can be read."""
        if self.runner is None or self.is_settled:
            return None
        dues = [due for due in (self._deadline_s, self.runner.due_s()) if due is not None]
        return min(dues, default=None)

    def check_deadline(self, now_s: float) -> None:
        """Signs of life only put it off; whether there were any is looked up when it has passed."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        assert self.runner is not None
        if self.state == "busy":
            sign_s = max(self._sign_s, self.runner.pinged_s())
            self._deadline_s = sign_s + self._supervisor.limits.watchdog_s
            if self._supervisor.news.is_full:
                self.refresh()
        if self.state in ("starting", "busy", "stopping"):
            self._deadline_s = max(self._deadline_s, self._extended_s)
        if now_s >= self._deadline_s:
            self.happen("late")

    # ---- for the loop

    def watch(self) -> None:
        """Tell the poller what to wait for."""
        if self.runner is None or self.is_settled:
            return
        first, *more = self.runner.fds() or (-1,)
        wanted = dict.fromkeys([first] if first >= 0 else [], READ)
        wanted |= dict.fromkeys(self._copy(more), READ)
        if not self._is_over:
            listens = READ if not self._supervisor.news.is_full else 0
            talks = 0 if self.flush() else WRITE
            wanted[self.runner.events.fileno()] = listens | talks
        for fd in self._watched - wanted.keys():
            self._supervisor.poller.unwatch(fd)
        for fd, mask in wanted.items():
            self._supervisor.poller.watch(fd, mask, self.turn)
        self._watched = set(wanted)

    def _copy(self, fds: Sequence[int]) -> list[int]:
        """What comes and goes while it is looked at why it hangs: closed by others, at any time, so we watch copies
        (epoll(7), Q6)."""
        for fd in self._copies.keys() - set(fds):
            copy = self._copies.pop(fd)
            self._watched.discard(copy)
            self._supervisor.poller.unwatch(copy)
            os.close(copy)
        for fd in set(fds) - self._copies.keys():
            self._copies[fd] = os.dup(fd)
        return list(self._copies.values())

    def _unwatch(self) -> None:
        self._copy(())
        while self._watched:
            self._supervisor.poller.unwatch(self._watched.pop())

    # ---- words

    def _exit(self) -> Exit:
        assert self.runner is not None
        if self.runner.exit is not None:
            return self.runner.exit
        return Exit(
            rank=self.rank, local_rank=self.runner.local_rank, host=self.runner.host, pid=self.runner.pid or None
        )

    def _make_cause(self) -> WorkerDied:
        exit_ = self._exit()
        lines = [f"rank {self.rank} on {exit_.host} {self._how(exit_)} (pid {exit_.pid})"]
        lines += [f"  | {printable(line)}" for line in exit_.last_lines[-_WORDS:]]
        cause = WorkerDied("\n".join(lines), exit_)
        if self._could_not is not None:
            cause.__cause__ = to_remote_error(self._could_not, self.rank, exit_.host)
        elif self.runner is not None and self.runner.problem is not None:
            cause.__cause__ = self.runner.problem
        return cause

    def _how(self, exit_: Exit) -> str:
        if self._could_not is not None:
            return f"could not start: {self._could_not.kind}: {self._could_not.text}"
        if self.runner is not None and self.runner.problem is not None:
            return f"is gone: {self.runner.problem}"
        if exit_.verdict:
            return exit_.verdict
        if exit_.end_s is not None:
            before = "" if exit_.shell_code else ", without having been told to"
            return f"died: {describe_end(exit_)}{before}"
        if self._is_over:
            return "has closed its channel; stopped"
        if self._failed_while == "starting":
            return f"was not ready after {duration_text(time.monotonic() - self._sign_s)}; stopped"
        return f"hung: no sign of life for {duration_text(time.monotonic() - self._sign_s)}; stopped"
