"""What the user's code in a worker gets: its ranks, and the way to report to the supervisor while it works.

No thread and no timer runs beside the user's code: that code reads the supervisor's messages when it asks for them.
"""

from __future__ import annotations

import time
from _thread import allocate_lock
from collections import deque

from infini_run.channel.errors import ChannelEnd
from infini_run.crews.protocol import (
    NO_TASK,
    Cancel,
    Closing,
    Emit,
    Extend,
    Ping,
    Progress,
    Ready,
    RunTask,
    Shutdown,
    StatusText,
    decode,
    dump,
    encode,
)
from infini_run.errors import UsageError
from infini_run.number_arguments import read_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from infini_run.channel import Receiver, Sender
    from infini_run.crews.protocol import Message, WorkerSetup

_FRESH_S = 0.001  # no second look within this time: between short tasks it would cost more than they do
_SIGNS = 4  # signs of life in the time in which one is due


class Cancelled(BaseException):
    """The cancellation of a task, by `checkpoint`. No Exception, so that no `except Exception` keeps it."""


class TaskInbox:
    """The supervisor's messages: tasks in order, and the cancellations among them.

    One thread at a time reads messages. The main thread waits for tasks. Any thread, and a signal handler, looks for
    messages, and never waits for another thread: that one reads what there is.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._lock = allocate_lock()
        self._tasks: deque[RunTask] = deque()
        self._read_s = 0.0  # when it last looked (monotonic)
        self.current = NO_TASK
        self.cancelled: set[int] = set()
        self.is_closing = False
        self.has_ended = False

    def next_task(self) -> RunTask | None:
        """Wait for the next task, and make it the current one; None: there will be no more. Raises ChannelBroken."""
        with self._lock:
            if self._tasks and time.monotonic() - self._read_s > _FRESH_S:
                self._read_all()
            while not self.has_ended and (not self._tasks or self._receiver.pending):
                self._read_one(None)
            task = self._tasks.popleft() if self._tasks else None
            self.current = NO_TASK if task is None else task.task
            return task

    @property
    def has_tasks(self) -> bool:
        """Whether a task waits here."""
        return bool(self._tasks)

    def finish_task(self) -> None:
        """Note the end of the current task."""
        with self._lock:
            self.cancelled.discard(self.current)
            self.current = NO_TASK

    def read(self) -> None:
        """Take in everything that has arrived, unless another thread does. Raises ChannelBroken."""
        if self._lock.acquire(blocking=False):
            try:
                self._read_all()
            finally:
                self._lock.release()

    def _read_all(self) -> None:
        """Take in everything that has arrived."""
        self._read_s = time.monotonic()
        try:
            while not self.has_ended:
                self._read_one(0.0)
        except TimeoutError:
            return

    def _read_one(self, timeout_s: float | None) -> None:
        """Take in the next message. Raises TimeoutError: there is none within this time (None: no limit)."""
        try:
            self._handle(decode(self._receiver.recv_bytes(timeout_s)))
        except ChannelEnd:
            self.has_ended = True

    def _handle(self, message: Message) -> None:
        if isinstance(message, RunTask):
            self._tasks.append(message)
        elif isinstance(message, Cancel):
            if message.task == self.current or any(message.task == task.task for task in self._tasks):
                self.cancelled.add(message.task)  # it has not ended meanwhile
        elif isinstance(message, (Closing, Shutdown)):
            self.is_closing = True


class Context:
    """What a worker knows of itself, and how it reports to your program. Any thread of the worker may call any
    method.

    Attributes:
        rank: Its rank, from 0, over all hosts.
        local_rank: Its rank among those on its host, from 0.
        world_size: The number of workers on all hosts.
        restarts: How often this worker restarted; of a launch with `max_restarts`, how often all ranks did. In a
            function's job it is 0 in each run: INFINI_JOB_ATTEMPT has the number of the run.
    """

    def __init__(self, setup: WorkerSetup, inbox: TaskInbox, sender: Sender) -> None:
        self.rank = setup.rank
        self.local_rank = setup.local_rank
        self.world_size = setup.world_size
        self.restarts = setup.restarts
        self._inbox = inbox
        self._sender = sender
        self._is_ready = False
        self._sign_s = setup.watchdog_s / _SIGNS if setup.watchdog_s else float("inf")
        self._signed_s = time.monotonic()

    def __dir__(self) -> list[str]:
        from infini_run.public_names import public_names

        return public_names(self)

    # ---- up

    def emit(self, what: object) -> None:
        """Send an object to the crew's program, as an event with this rank and the current task. If the program reads
        events, and this worker has `max_events` unread ones, the call waits until the program has read some.

        Args:
            what: any object that pickles.

        Raises:
            UnpicklableError: with the path of the part that does not pickle.
        """
        self._send(Emit(task=self._inbox.current, body=dump(what, "emitted", by_reference=True)))

    def status(self, text: str) -> None:
        """Report what the worker is doing.

        Args:
            text: what `Crew.status` and an event `status` then have.
        """
        self._send(StatusText(text=str(text)))

    def progress(self, done: float, of: float | None = None) -> None:
        """Report progress: with `of` the part of a task that is done, without `of` the step of the whole job.

        Args:
            done: with `of`, a number in any unit. Without `of`, a whole number (a step, a sample) that rises over all
                attempts, as PROGRESS= of a command's rank. A Launcher uses it for max_no_progress.
            of: all of the task, in the same unit; the bar and an event `progress` of a crew show both. None: see
                `done`.

        Raises:
            UsageError: without `of`, `done` is no whole number from 0 to 2**63 - 1.
        """
        if of is None and (type(done) is not int or not 0 <= done < 1 << 63):
            raise UsageError(
                f"progress({done!r}): expected a whole number from 0 to 2**63 - 1, or progress(done, of)"
            )
        amount, whole = (done, 0.0) if of is None else (float(done), float(of))
        self._send(Progress(task=self._inbox.current, done=amount, of=whole))

    def extend(self, seconds: float) -> None:
        """Postpone this worker's deadlines before a long silent step, as EXTEND_TIMEOUT_USEC of sd_notify(3) does.

        Args:
            seconds: the time from this call until which no deadline passes; another call may prolong it.

        Raises:
            UsageError: `seconds` is not above 0.
        """
        self._send(Extend(seconds=read_seconds("seconds", seconds, above_zero=True)))

    def ready(self) -> None:
        """Report that the worker takes tasks. infini-run does that when `start` returns; call this method to report
        it earlier."""
        if not self._is_ready:
            self._is_ready = True
            self._send(Ready())

    def ping(self) -> None:
        """Give a sign of life. `emit`, `status`, `progress` and `checkpoint` give one as well."""
        self._send(Ping())

    def _send(self, message: Message) -> None:
        self._note_sign()
        self._sender.send_bytes(encode(message))

    def _note_sign(self) -> None:
        self._signed_s = time.monotonic()

    # ---- what was said down

    @property
    def cancelled(self) -> bool:
        """Whether somebody canceled the current task."""
        self._read_inbox()
        return self._inbox.current in self._inbox.cancelled

    @property
    def stopping(self) -> bool:
        """Whether the crew is closing: a task that runs until then, such as a server, returns. Other accepted tasks
        still run. In `stop`, always true."""
        self._read_inbox()
        return self._inbox.is_closing or self._inbox.has_ended

    def checkpoint(self) -> None:
        """Raise Cancelled after a cancellation of the current task. Gives a sign of life."""
        if self.cancelled:
            raise Cancelled

    def _read_inbox(self) -> None:
        self._inbox.read()
        self._ping_if_due()

    def _ping_if_due(self) -> None:
        if time.monotonic() - self._signed_s >= self._sign_s:
            self.ping()


def this_worker() -> Context:
    """Return the context of this rank, or of this worker of a crew: who it is, and how to talk with its launcher. It
    works in the function of a job, too, except for `emit`. Raises UsageError in any other process."""
    if _current is None:
        raise UsageError(
            "this_worker(): this process is not a worker of a Launcher, a Pool, or a Crew; on a rank of a command, "
            "use RANK and the other variables, ir.progress, and ir.ready"
        )
    return _current


_current: Context | None = None


def set_current(context: Context) -> None:
    """Set the context; the worker calls this once."""
    global _current
    _current = context
