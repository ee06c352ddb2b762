"""One worker, seen from its supervisor: its state, the tasks that it has, and what it says, through all its restarts.

The transition table is in worker_states.py; this class performs its actions. All methods run in the supervisor's
thread.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial

from infini_run.crews.protocol import (
    NO_TASK,
    Cancel,
    Closing,
    Emit,
    Extend,
    Log,
    Progress,
    Ready,
    RunTask,
    Shutdown,
    StatusText,
    TaskCancelled,
    TaskDone,
    TaskFailed,
    TaskStarted,
)
from infini_run.crews.supervision import worker_states
from infini_run.crews.supervision.worker_connection import ENDED, TORN, WorkerConnection
from infini_run.crews.supervision.worker_death import cause_of_death, exit_of
from infini_run.report.failures import WorkerDied
from infini_run.report.text import describe_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from infini_run.crews.protocol import Body, Message, TaskEnd
    from infini_run.crews.spawn.spawner import WorkerProcess
    from infini_run.crews.supervision.pending_task import PendingTask, WorkerDeadlines
    from infini_run.system.poller import Poller

    class Owner(Protocol):
        """What a worker needs of its supervisor; supervisor.py says what each method means."""

        limits: WorkerDeadlines
        poller: Poller

        def serve(self, worker: SupervisedWorker) -> None: ...
        def finish_task(self, job: PendingTask, worker: SupervisedWorker, message: TaskEnd) -> None: ...
        def drop_tasks(self, jobs: Sequence[PendingTask], worker: SupervisedWorker) -> None: ...
        def on_event(self, kind: str, worker: SupervisedWorker, **more: Any) -> None: ...
        def on_log(self, worker: SupervisedWorker, body: Body) -> None: ...
        def on_torn(self, worker: SupervisedWorker) -> None: ...
        def on_exit(self, worker: SupervisedWorker) -> None: ...
        def on_bad_end(self, worker: SupervisedWorker, how: str) -> None: ...
        def on_failure(self, worker: SupervisedWorker) -> None: ...
        def stop_process(self, worker: SupervisedWorker) -> None: ...
        def release_process(self, worker: SupervisedWorker) -> None: ...
        def is_backlogged(self, worker: SupervisedWorker) -> bool: ...
        def drain_left_s(self) -> float: ...


_LAST = 1 << 16  # messages of one whose process is gone: more than its socket holds


class SupervisedWorker:
    """A worker.

    Attributes:
        state: one of worker_states.STATES.
        process: its latest one.
        process_state: of that: running, exited, or settled (see `is_settled`).
        connection: to it, until it is settled.
        queued: its tasks that are still here.
        assigned: those that it has, by number.
        cause: why it failed last.
        stopped_for: why it was stopped, except after its own failure.
        start_error: why it could not start, or not stop.
    """

    def __init__(self, rank: int, supervisor: Owner) -> None:
        self.rank = rank
        self.state = "stopped"
        self.process: WorkerProcess | None = None
        self.connection: WorkerConnection | None = None
        self.queued: deque[PendingTask] = deque()
        self.assigned: dict[int, PendingTask] = {}
        self.starts = 0
        self.process_state = "settled"
        self._supervisor = supervisor
        self._reset()

    def _reset(self) -> None:
        """Reset the worker for a new process."""
        self.status = ""
        self.progress = (0.0, 0.0)
        self.cause: WorkerDied | None = None
        self.stopped_for = ""
        self.start_error: TaskFailed | None = None
        self.failed_while = ""  # its state before it failed
        self.last_sign_s = 0.0  # when it was last heard from (monotonic)
        self.silence_s: float | None = None  # how long it had given no sign when its time was over
        self.deadline_s: float | None = None  # of what it is expected to do (monotonic)
        self.task_s = float("inf")  # that a task took on average lately
        self.filled = 0, 0.0  # how many tasks it had when it last got some, and when it was last heard from then
        self._has_room = False  # since a task ended
        self.assigned_total = 0  # tasks that this process was sent
        self._extended_s = 0.0

    @property
    def is_live(self) -> bool:
        """It works, or will."""
        return self.state in ("starting", "ready", "busy")

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left of its latest process, unless SIGKILL did not end it; or it has had none."""
        return self.process_state == "settled"

    @property
    def has_pending_messages(self) -> bool:
        """Whether there are received messages that nobody has read, so that no descriptor shows them."""
        return self.connection is not None and self.connection.has_pending

    # ---- states

    def begin(self, process: WorkerProcess) -> None:
        """Start anew, with this process."""
        self.process = process
        self.starts += 1
        self._reset()
        self.process_state = "running"
        supervisor = self._supervisor
        self.connection = WorkerConnection(
            process,
            supervisor.poller,
            partial(supervisor.is_backlogged, self),
            self._handle_message,
            self._end_channel,
        )
        self.handle("start")
        self._supervisor.on_event("started", self, pid=process.pid)

    def handle(self, event: str) -> None:
        """Go from one state to the next, as the table says."""
        before = self.state
        self.state, action = worker_states.transition(before, event)
        if self.state == "failed" != before:
            self.failed_while = before
        if action:
            getattr(self, f"_{action}")()

    def _begin(self) -> None:
        self.last_sign_s = time.monotonic()
        self._set_deadline(self._supervisor.limits.ready_timeout_s)

    def _serve(self) -> None:
        self.deadline_s = None
        self._supervisor.serve(self)

    def announce_close(self) -> None:
        """Let its tasks know that the crew is closing."""
        if self.is_live:
            self.post(Closing())

    def _shut_down(self) -> None:
        limit_s = self._supervisor.drain_left_s()
        self._set_deadline(limit_s)
        self.post(Shutdown(deadline_s=limit_s))
        assert self.connection is not None
        self.connection.post_end()

    def _stop(self) -> None:
        self.deadline_s = None
        self._drop_tasks()
        self._supervisor.stop_process(self)

    def _await_exit(self) -> None:
        self._set_deadline(self._supervisor.limits.exit_s)

    def _stop_late(self) -> None:
        self.silence_s = time.monotonic() - self.last_sign_s
        self._supervisor.stop_process(self)
        self._await_exit()

    def _fail(self) -> None:
        """Fail the worker, once for each process."""
        self.deadline_s = None
        if self.cause is None:
            self.cause = cause_of_death(self)
            self._drop_tasks()
            self._supervisor.on_event("died", self, problem=self.cause)
            self._supervisor.on_failure(self)
        self._supervisor.stop_process(self)

    def _release(self) -> None:
        self.deadline_s = None
        self._drop_tasks()
        assert self.process is not None
        if self.state == "stopped":
            self._note_end()
            self._supervisor.on_event("stopped", self, pid=self.process.pid)
        self._close_connection()
        self._supervisor.release_process(self)
        self.process_state = "settled"

    def _note_end(self) -> None:
        assert self.process is not None
        assert self.connection is not None
        exit_ = exit_of(self)
        if self.stopped_for or self.process.stuck or (exit_.ended_well and self.connection.has_ended_in_order):
            return
        if exit_.status_lost and self.process.problem is not None:
            how = str(self.process.problem)
        else:
            how = describe_end(exit_) if exit_.end_s is not None else "its end is unknown"
        if self.start_error is not None:
            how += f": {self.start_error.kind}: {self.start_error.text}"
        self._supervisor.on_bad_end(self, how)

    def abandon(self) -> None:
        """End what is left of it at once, in any state."""
        self.process_state = "settled"
        self.stopped_for = self.stopped_for or "the crew is gone"
        self._drop_tasks()
        self._close_connection()
        self._supervisor.release_process(self)
        self.state = "stopped"

    def _close_connection(self) -> None:
        if self.connection is not None:
            self.connection.unwatch()
            self.connection = None

    # ---- its tasks

    def hand(self, job: PendingTask) -> None:
        """Send it a task."""
        if not self.assigned:
            self.last_sign_s = time.monotonic()
            self._set_deadline(self._supervisor.limits.watchdog_s)
            self.handle("hand")
        self.assigned[job.task] = job
        self.assigned_total += 1
        assert self.connection is not None
        self.connection.post_task(RunTask(task=job.task, body=job.body))

    def note_pace(self) -> None:
        """Note how long its tasks take, from those that it has done since it got some."""
        count, since_s = self.filled
        done = count - len(self.assigned)
        if done > 0:
            self.task_s = (self.last_sign_s - since_s) / done

    def preassign(self, job: PendingTask) -> None:
        """Note a task that Spawner.broadcast sends to all workers together, before they are ready."""
        self.assigned[job.task] = job

    def cancel(self, task: int) -> bool:
        """Cancel a task; return whether it is this worker's."""
        for job in self.queued:
            if job.task == task:
                self.queued.remove(job)
                self._supervisor.finish_task(job, self, TaskCancelled(task=task))
                return True
        if task in self.assigned:
            self.post(Cancel(task=task))
            return True
        return False

    def _note_begin(self, task: int) -> None:
        if task in self.assigned:
            self.assigned[task].begin()

    def _finish(self, message: TaskEnd) -> None:
        job = self.assigned.pop(message.task, None) if self.state != "starting" else None
        if job is None:
            return  # no worker of infini-run sends that, so ignore it
        self._supervisor.finish_task(job, self, message)
        if not self.assigned:
            self.handle("idle")
        elif self.state == "busy":
            self._has_room = True

    def refill(self) -> None:
        """Get tasks in place of those that ended since the last call."""
        if self._has_room:
            self._has_room = False
            self._supervisor.serve(self)

    def _drop_tasks(self) -> None:
        jobs, self.assigned = list(self.assigned.values()), {}
        if jobs:
            self._supervisor.drop_tasks(jobs, self)

    # ---- its channel

    def post(self, message: Message) -> None:
        """Send it a message; what finds no room goes out later, in order."""
        assert self.connection is not None
        self.connection.post(message)

    def watch(self) -> None:
        """Tell the poller what to wait for in its channel."""
        if self.connection is not None:
            self.connection.watch()

    def read(self) -> None:
        """Take in the messages that are already here."""
        if self.connection is not None and self.connection.has_pending:
            self.connection.read()

    def _end_channel(self, how: str) -> None:
        if how == TORN:
            self._supervisor.on_torn(self)
        self.handle("channel_end" if how == ENDED else "channel_broken")

    def _handle_message(self, message: Message) -> None:
        self.last_sign_s = time.monotonic()
        if isinstance(message, TaskDone):
            self._finish(message)
            if message.then != NO_TASK:
                self._note_begin(message.then)
        elif isinstance(message, TaskStarted):
            self._note_begin(message.task)
        elif isinstance(message, Emit):
            self._supervisor.on_event("emitted", self, task=message.task, body=message.body)
        elif isinstance(message, TaskFailed) and message.task == NO_TASK:
            self.start_error = message
        elif isinstance(message, (TaskFailed, TaskCancelled)):
            self._finish(message)
        elif isinstance(message, Ready):
            assert self.process is not None
            self._supervisor.on_event("ready", self, pid=self.process.pid)
            self.handle("ready")
            if self.assigned and self.state == "ready":
                self.handle("hand")
        else:
            self._handle_sign(message)

    def _handle_sign(self, message: Message) -> None:
        if isinstance(message, StatusText):
            self.status = message.text
            self._supervisor.on_event("status", self, text=message.text)
        elif isinstance(message, Progress):
            self.progress = (message.done, message.of)
            self._supervisor.on_event("progress", self, task=message.task, done=message.done, of=message.of)
        elif isinstance(message, Extend):
            self._extended_s = time.monotonic() + message.seconds
        elif isinstance(message, Log):
            self._supervisor.on_log(self, message.body)

    # ---- its process

    def check_process(self) -> None:
        """Act on what its group has noted of its process."""
        process = self.process
        if process is None or self.is_settled:
            return
        if process.exit is not None and self.process_state == "running":
            self.process_state = "exited"
            assert self.connection is not None
            self.connection.read(_LAST)  # not to its end: a child of it may still hold the channel open
            self.connection.end()
            self._supervisor.on_exit(self)
            self.handle("exit")
        if process.group.ended:
            self.handle("reaped")

    # ---- deadlines

    def _set_deadline(self, limit_s: float) -> None:
        self.deadline_s = time.monotonic() + limit_s if limit_s else None

    def shorten_deadline(self, end_s: float) -> None:
        """Shorten the deadline: the crew has to end by this time (monotonic)."""
        if self.state == "stopping" and self.deadline_s is not None:
            self.deadline_s = min(self.deadline_s, end_s)

    def renew_deadline(self) -> None:
        """Count again from now: this process was itself stopped, or did not read."""
        self.last_sign_s = time.monotonic()
        if self.deadline_s is not None and self.state in ("starting", "busy"):
            limits = self._supervisor.limits
            self._set_deadline(limits.ready_timeout_s if self.state == "starting" else limits.watchdog_s)

    def check_deadline(self, now_s: float) -> None:
        """Act if the deadline has passed. Signs of life only postpone it, and the check reads them."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        assert self.process is not None
        if self.state == "busy":
            sign_s = max(self.last_sign_s, self.process.last_ping_s())
            self.deadline_s = sign_s + self._supervisor.limits.watchdog_s
            if self._supervisor.is_backlogged(self):
                self.renew_deadline()
        if self.state in ("starting", "busy", "stopping"):
            self.deadline_s = max(self.deadline_s, self._extended_s)
        if now_s >= self.deadline_s:
            self.handle("deadline")
