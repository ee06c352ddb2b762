"""A function on every rank, live: one task for each worker, one result from each.

Whoever waits for it supervises it: there is one loop, over the workers' channels and what the core says of their
processes. What fails first, in time, is what is raised; the others are stopped, and nothing is left when it is.
"""

from __future__ import annotations

import select
import signal
import time
from _thread import RLock, get_ident
from weakref import WeakSet

from infini_run.crews.capture import capture_exception
from infini_run.crews.joinable_thread import JoinableThread
from infini_run.crews.payload import load
from infini_run.crews.protocol import Done, Failed, Hello, Log, Progress, Ready, Status, Task, decode, encode
from infini_run.crews.remote_exception import to_exception
from infini_run.crews.result import LaunchResult
from infini_run.errors import (
    ChannelBroken,
    ChannelEnd,
    ChannelError,
    InfiniRunError,
    LaunchTimeout,
    RemoteError,
    UsageError,
)
from infini_run.record import record
from infini_run.report.failures import WorkerDied
from infini_run.report.report import describe_end, duration_text
from infini_run.system.poller import poll_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.crews.progress import ProgressDisplay
    from infini_run.crews.protocol import Body, Message
    from infini_run.crews.spawner import Spawner, WorkerProcess
    from infini_run.report.report import Exit

_TASK = 0
_AT_ONCE = 1 << 16  # bytes that a channel takes before its worker reads
_TURN = 64  # messages of one worker before it is the next one's turn


@record
class LaunchSpec:
    """What was asked of a launch. log_level: of the records that come up; -1: none. start_timeout_s: for all workers
    to be up; timeout_s: for all of it; None: no limit."""

    path: tuple[str, ...]
    argv: tuple[str, ...]
    log_level: int = -1
    start_timeout_s: float | None = None
    timeout_s: float | None = None
    keep_going: bool = False


@record
class Failure:
    """What went wrong on a rank (-1: on none). time_s: when, since the epoch."""

    time_s: float
    rank: int
    error: BaseException


class RankState:
    """One rank's worker, and how far it has come."""

    def __init__(self, runner: WorkerProcess) -> None:
        self.runner = runner
        self.is_up = False
        self.has_result = False
        self.has_failed = False
        self.is_torn = False  # what came over its channel is not what a worker says
        self.ended_s: float | None = None  # when its channel did, since the epoch
        self.is_settled = False  # how its process ended has been looked at


class Launch:
    """Started by Launcher.start: a handle. Leave a `with` block, or close it, and nothing of it is left.

    Usable from several threads."""

    def __init__(
        self, spawner: Spawner, body: Body, terms: LaunchSpec, *, release: Callable[[], None], show: ProgressDisplay
    ) -> None:
        self._spawner = spawner
        self._body = body
        self._terms = terms
        self._release = release
        self._show = show
        self._lock = RLock()
        self._seats: list[RankState] = []
        self._values: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._stopped_s: float | None = None
        self._was_told = False  # to stop, by the caller
        self._start_due_s = self._due_s = float("inf")
        self._sender: Any = None  # a thread, where the task is large
        self.follower: Any = None  # a thread that supervises it, where there is one
        self._is_over = False

    # ---- starting

    def begin(self) -> None:
        """Start the workers and hand each its task. Raises what the spawner does; then nothing runs."""
        now_s = time.monotonic()
        terms = self._terms
        self._due_s = now_s + (float("inf") if terms.timeout_s is None else terms.timeout_s)
        self._start_due_s = now_s + (float("inf") if terms.start_timeout_s is None else terms.start_timeout_s)
        _live.add(self)
        try:
            runners = self._spawner.start(range(self._spawner.world_size))
            self._seats = [RankState(runner) for runner in runners]
            if sum(memoryview(part).nbytes for part in self._body.parts) <= _AT_ONCE:
                self._hand_out()
            else:  # a worker that does not read yet, for what it has written is not, must not hold us
                self._sender = JoinableThread(self._hand_out, "infini-run: arguments")
                self._sender.start()
        except BaseException:
            self.close()
            raise

    def _hand_out(self) -> None:
        task = encode(Task(task=_TASK, body=self._body))
        self._body = type(self._body)()
        greeted = []
        for seat in self._seats:
            runner = seat.runner
            hello = Hello(
                rank=runner.rank,
                local_rank=runner.local_rank,
                world_size=self._spawner.world_size,
                path=self._terms.path,
                argv=self._terms.argv,
                log_level=self._terms.log_level,
            )
            try:
                runner.tasks.send_bytes(encode(hello))
            except ChannelError:
                continue  # it has died, or was closed: seen where its end is
            greeted.append(runner)
        self._spawner.spread(greeted, task)

    # ---- following

    @property
    def is_over(self) -> bool:
        """Every worker has ended, and nothing of it is left."""
        return self._is_over

    def step(self, wait_s: float | None = None) -> None:
        """Wait until something happens, at most so long, and act on it."""
        self._wait(wait_s)
        with self._lock:
            if self._is_over:
                return
            for seat in self._seats:
                seat.runner.poll()
            for seat in self._seats:
                self._hear(seat)
            for seat in self._seats:
                self._settle(seat)
            self._check_time()
            self._stop_if_failed()
            if all(seat.runner.ended for seat in self._seats):
                self._finish()

    def _wait(self, wait_s: float | None) -> None:
        poll = select.poll()
        with self._lock:
            if self._is_over or any(seat.ended_s is None and seat.runner.events.pending for seat in self._seats):
                return
            fds = {fd for seat in self._seats for fd in seat.runner.fds()}
            fds |= {seat.runner.events.fileno() for seat in self._seats if seat.ended_s is None}
            due_s = min([self._next_due_s(), *(seat.runner.due_s() or float("inf") for seat in self._seats)])
        for fd in fds:
            poll.register(fd, select.POLLIN)
        left_s = due_s - time.monotonic()
        if wait_s is not None:
            left_s = min(left_s, wait_s)
        poll.poll(poll_ms(left_s))

    def _next_due_s(self) -> float:
        if self._stopped_s is not None:
            return float("inf")
        is_up = all(seat.is_up for seat in self._seats)
        return self._due_s if is_up else min(self._due_s, self._start_due_s)

    def _hear(self, seat: RankState) -> None:
        """What a worker says, as far as it is there."""
        for _ in range(_TURN):
            if seat.ended_s is not None:
                return
            try:
                frame = seat.runner.events.recv_bytes(0.0)
            except TimeoutError:
                return
            except (ChannelEnd, ChannelBroken):
                seat.ended_s = time.time()
                if seat.runner.events.is_torn:
                    self._tear(seat)
                return
            except (ChannelError, TypeError):  # it was passed over; it is an object, and ours are bytes
                self._tear(seat)
                return
            message, _ = capture_exception(decode, frame)
            if message is None:
                self._tear(seat)
                return
            self._take(seat, message)

    def _tear(self, seat: RankState) -> None:
        """Something that is no message was written into its channel: nothing that comes after it can be believed. It
        may wait for us, or write what nobody reads, so it is to end; how it does is told with this."""
        seat.ended_s = time.time()
        if not seat.has_result:
            seat.is_torn = True
            seat.runner.signal(signal.SIGKILL)
            seat.runner.tasks.close()
            seat.runner.events.close()

    def _take(self, seat: RankState, message: Message) -> None:
        runner = seat.runner
        if isinstance(message, Ready):
            seat.is_up = True
        elif isinstance(message, Done):
            self._keep(seat, message)
        elif isinstance(message, Failed):
            seat.has_failed = True
            self._fail(to_exception(message, runner.rank, runner.host), runner.rank, message.time_s + runner.clock_s)
            runner.tasks.close()  # it ends by itself, though it may not hear a signal
        elif isinstance(message, Log):
            from infini_run.crews.log_records import take_record

            take_record(message.body, runner.rank, runner.host)
        elif isinstance(message, Progress):
            self._show.progress(runner.rank, message.done, message.of)
        elif isinstance(message, Status):
            self._show.status(runner.rank, message.text)

    def _keep(self, seat: RankState, done: Done) -> None:
        """Its result. It has nothing more to do."""
        runner = seat.runner
        value, error = capture_exception(load, done.body)
        if error is None:
            self._values[runner.rank] = value
            seat.has_result = True
        else:
            text = f"the result of rank {runner.rank} on {runner.host} cannot be unpickled here: "
            failure = RemoteError(
                f"{text}{type(error).__name__}: {error}",
                kind=type(error).__name__,
                rank=runner.rank,
                host=runner.host,
            )
            failure.__cause__ = error
            seat.has_failed = True
            self._fail(failure, runner.rank)
        self._show.progress(runner.rank, 1, 1)
        runner.tasks.close()

    def _settle(self, seat: RankState) -> None:
        """Once its process has ended and all that it said was heard."""
        exit_ = seat.runner.exit
        if seat.is_settled or exit_ is None:
            return
        self._hear(seat)
        if seat.ended_s is None and seat.runner.events.pending:
            return
        seat.is_settled = True
        end_s = exit_.end_s or time.time()
        if seat.has_failed or (seat.has_result and not exit_.is_failure):
            return
        if seat.is_torn:
            self._fail(_torn(exit_), seat.runner.rank, seat.ended_s or end_s)
            return
        before_stop = self._stopped_s is None or min(end_s, seat.ended_s or end_s) < self._stopped_s
        if exit_.is_failure or (not exit_.stopped and not seat.has_result and before_stop):
            error = seat.runner.problem or _died(exit_, seat.has_result)
            self._fail(error, seat.runner.rank, min(end_s, seat.ended_s or end_s))

    def _check_time(self) -> None:
        if self._stopped_s is not None or time.monotonic() < self._next_due_s():
            return
        late = [seat.runner for seat in self._seats if not seat.is_up]
        if late and self._terms.start_timeout_s is not None and time.monotonic() >= self._start_due_s:
            names = ", ".join(f"rank {runner.rank} on {runner.host}" for runner in late[:4])
            more = f" and {len(late) - 4} more" if len(late) > 4 else ""
            text = f"{names}{more}: not up within {self._terms.start_timeout_s:g} s"
        else:
            text = f"the function has not returned on every rank within {self._terms.timeout_s:g} s"
        self._fail(LaunchTimeout(f"{text}; all ranks were stopped"), -1)
        self._stop_all()

    def _fail(self, error: BaseException, rank: int, time_s: float = 0.0) -> None:
        if any(failure.error is error for failure in self._failures):
            return  # a node is lost once, with all its ranks
        self._failures.append(Failure(time_s=time_s or time.time(), rank=rank, error=error))

    def _stop_if_failed(self) -> None:
        if self._failures and not self._terms.keep_going:
            self._stop_all()

    def _stop_all(self) -> None:
        if self._stopped_s is None:
            self._stopped_s = time.time()
            for seat in self._seats:
                seat.runner.stop()

    def _finish(self) -> None:
        for seat in self._seats:
            while seat.ended_s is None and seat.runner.events.pending:
                self._hear(seat)
            self._hear(seat)
            self._settle(seat)
        self._free()

    # ---- the end

    def outcome(self) -> LaunchResult:
        """Once it is over: the results, or the first failure raised."""
        with self._lock:
            failures = sorted(self._failures, key=lambda failure: failure.time_s)
            if failures:
                raise _with_notes(failures)
            if len(self._values) < len(self._seats) or not self._seats:
                raise InfiniRunError("the launch was stopped before every rank had returned")
            places = [(seat.runner.host, seat.runner.local_rank) for seat in self._seats]
            return LaunchResult([self._values[rank] for rank in sorted(self._values)], places)

    def stop(self) -> None:
        """Begin to stop: the stop signal, SIGKILL after the grace. Returns at once."""
        with self._lock:
            if not self._is_over:
                self._stop_all()

    def kill(self) -> None:
        """SIGKILL to everything that is left. Returns at once."""
        with self._lock:
            self._stopped_s = self._stopped_s or time.time()
            for seat in self._seats:
                seat.runner.kill()

    def signal(self, number: int, rank: int | None = None) -> int:
        """Send a signal to one rank's process (None: to every rank's); return how many it reached."""
        if number not in (0, *signal.valid_signals()):
            raise UsageError(f"number={number!r}: there is no such signal")
        if rank is not None and rank not in range(len(self._seats)):
            raise UsageError(f"rank={rank!r}: the ranks are 0 to {len(self._seats) - 1}")
        with self._lock:
            if self._is_over:
                return 0
            chosen = [seat.runner for seat in self._seats if rank in (None, seat.runner.rank)]
            return sum(runner.signal(number) for runner in chosen)

    @property
    def exits(self) -> Sequence[Exit | None]:
        """By rank: how its process ended; None: it has not."""
        return [seat.runner.exit for seat in self._seats]

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [seat.runner.pid for seat in self._seats]

    def follow(self) -> LaunchResult:
        """Supervise it to its end, here. An interrupt stops it (again: at once), and is raised when nothing is
        left."""
        try:
            while not self._is_over:
                self.step()
        except BaseException:
            try:
                self.stop()
                while not self._is_over:
                    self.step()
            finally:
                self.close()
            raise
        return self.outcome()

    def close(self) -> None:
        """Kill what is left, reap it, free everything. Safe twice."""
        if self.follower is not None and self.follower.ident != get_ident():
            self.kill()
            self.follower.join()  # it waits for descriptors: they are its own to close
            return
        with self._lock:
            if not self._is_over:
                self.kill()
                self._free()

    def _free(self) -> None:
        self._is_over = True
        for seat in self._seats:
            seat.runner.close()
        if self._sender is not None:
            self._sender.join()
        self._show.close()
        self._release()
        _live.discard(self)

    def after_fork_in_child(self) -> None:
        """In a forked child: it is our parent's."""
        self._lock, self._is_over = RLock(), True
        for seat in self._seats:
            seat.runner.after_fork_in_child()
        self._spawner.after_fork_in_child()


def _died(exit_: Exit, has_result: bool) -> WorkerDied:
    after = f"after {duration_text((exit_.end_s or 0) - (exit_.start_s or 0))}"
    what = "failed after it had returned" if has_result else "ended without a result"
    text = f"rank {exit_.rank} on {exit_.host} {what}: {describe_end(exit_)} (pid {exit_.pid}, {after})"
    lines = [text, *(f"  | {line}" for line in exit_.last_lines[-5:])]
    if exit_.log:
        lines.append(f"  log: {exit_.log}")
    return WorkerDied("\n".join(lines), exit_)


def _torn(exit_: Exit) -> WorkerDied:
    after = f"after {duration_text((exit_.end_s or 0) - (exit_.start_s or 0))}"
    text = (
        f"rank {exit_.rank} on {exit_.host} was ended: something in it wrote into the channel between it and its "
        f"launcher, perhaps to the number of a descriptor that was closed before (pid {exit_.pid}, {after})"
    )
    return WorkerDied("\n".join([text, *(f"  | {line}" for line in exit_.last_lines[-5:])]), exit_)


def _with_notes(failures: Sequence[Failure]) -> BaseException:
    """The first; it says of the others."""
    error = failures[0].error
    notes = []
    for other in failures[1:9]:
        words = str(other.error).split("\n", 1)[0]
        kind = "" if isinstance(other.error, InfiniRunError) else f"rank {other.rank}: {type(other.error).__name__}: "
        notes.append(f"later: {kind}{words}")
    if len(failures) > 9:
        notes.append(f"later: {len(failures) - 9} more failed")
    # a class may forbid it
    capture_exception(setattr, error, "__notes__", [*getattr(error, "__notes__", []), *notes])
    return error


_live: WeakSet[Launch] = WeakSet()


def close_all() -> None:
    """A program that just ends: its ranks end with it."""
    for launch in list(_live):
        launch.close()


def forget_all() -> None:
    for launch in list(_live):
        launch.after_fork_in_child()
    _live.clear()
