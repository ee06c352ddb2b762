"""A launch of a function: the supervisor of workers that get one task each.

A launch raises the first failure in time, and stops the other ranks, unless it has keep_going. The ranks of a node
are one group of processes, which stops as a whole. With restarts, a failed attempt ends completely, and after a delay
every rank restarts in a fresh process, with the same call. One that ended because a node came or went costs no
restart. Results are those of the last attempt.
"""

from __future__ import annotations

import time
from _thread import RLock
from collections import deque
from threading import Condition

from infini_run.crews.protocol import Body, RunTask, TaskCancelled, TaskFailed, encode
from infini_run.crews.supervision.future import Ask
from infini_run.crews.supervision.loop_waiters import LoopWaiters
from infini_run.crews.supervision.pending_task import PendingTask, WorkerDeadlines
from infini_run.crews.supervision.supervised_worker import SupervisedWorker
from infini_run.crews.supervision.supervisor import Supervisor
from infini_run.crews.supervision.worker_death import ended_without_result, wrote_into_channel
from infini_run.errors import InfiniRunError, LaunchTimeout, NodeLost, RemoteError
from infini_run.node.host_stderr import print_line
from infini_run.plan.restart_policy import NOT_ENDED
from infini_run.record import record
from infini_run.system.exit_hooks import close_at_exit, closed
from infini_run.system.fork_hooks import call_in_forked_children
from infini_run.system.joinable_thread import JoinableThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.crews.protocol import TaskEnd, WorkerSetup
    from infini_run.crews.spawn.spawner import Spawner
    from infini_run.crews.supervision.launch_placement import LaunchPlacement
    from infini_run.crews.supervision.listed_delay import ListedDelay
    from infini_run.crews.supervision.progress import ProgressDisplay
    from infini_run.plan.restart_policy import RestartState

_TASK = 0
_SMALL = 1 << 16  # bytes that a channel takes before its worker reads
_NEVER = float("inf")
_NAMED = 4  # ranks of an error


@record
class LaunchLimits:
    """Seconds; None: no limit. start_timeout_s: for all workers to be up. timeout_s: for all of the launch."""

    start_timeout_s: float | None = None
    timeout_s: float | None = None


@record
class Failure:
    """A failure, the first or a later one.

    Args:
        time_s: when, since the epoch.
        rank: -1: of no rank.
        error: what to raise, or what a rank's task raised, still pickled.
        host: of the rank.
    """

    time_s: float
    rank: int
    error: BaseException | TaskFailed
    host: str = ""


class RankState:
    """The known state of one rank. ask: its result. is_up: its worker was ready. is_torn: its channel brought what is
    no message."""

    def __init__(self, ask: Ask[Any]) -> None:
        self.ask = ask
        self.is_up = self.has_result = self.has_failed = self.is_torn = False


class LaunchSupervisor(Supervisor):
    """The supervisor of a launch of a function.

    Attributes:
        asks: by rank, its result as a future.
        failures: in the order of their arrival.
        stopped_s: when the stop of all ranks began, since the epoch; None: it has not.

    Args:
        spawner, setup, release: as for a Supervisor.
        body: the call, pickled: (function, args, kwargs).
        limits: for the launch.
        keep_going: a failure does not stop the other ranks.
        display: shows the progress.
        restarts: how often all ranks restart after a failure.
        placement: knows where they can start.
    """

    separate_groups = False

    def __init__(
        self,
        spawner: Spawner,
        setup: WorkerSetup,
        body: Body,
        limits: LaunchLimits,
        *,
        keep_going: bool,
        release: Callable[[], None],
        display: ProgressDisplay,
        restarts: RestartState,
        placement: LaunchPlacement,
    ) -> None:
        super().__init__(spawner, setup, WorkerDeadlines(exit_s=0.0), release)
        self._body = body
        self._launch_limits = limits
        self._keep_going = keep_going
        self._display = display
        self.restarts = restarts
        self._placement = placement
        self._awaits_placement = False  # they start as soon as it is known where
        self._start_s = time.time()
        self._listed_delay: ListedDelay | None = None  # before a restart on this machine
        self._is_unwanted = False  # the caller has stopped it: nothing restarts
        self._stuck: set[str] = set()  # what SIGKILL did not end, on each node
        self._set_ranks()
        self.failures: list[Failure] = []
        self.stopped_s: float | None = None
        self._start_due_s = self._due_at_s = _NEVER
        self._sender: JoinableThread | None = None
        self._changed = Condition()
        self._waiters = LoopWaiters()
        self._arrived: deque[tuple[int, Ask[Any]]] = deque()
        self.is_over = False
        self.outcome_lock = RLock()
        self.is_awaited = False  # something waits for its end, or has done so
        self.is_dropped = False  # nothing refers to its handle: its failure is printed, since no caller can get it

    def _set_ranks(self) -> None:
        """Reset the state of all ranks: nothing is known of any."""
        self._ranks = [RankState(Ask(_TASK)) for _ in self.workers]
        self.asks = [rank.ask for rank in self._ranks]

    # ---- the start

    def start(self) -> None:
        """Start as Supervisor.start does; then every worker has its task, or gets it from a thread, if it is
        large."""
        limits = self._launch_limits
        self._due_at_s = _NEVER if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        call_in_forked_children(self)
        self._exit_number = close_at_exit(self)
        self._placement.add_watcher(self.wake)
        super().start()

    def _start_workers(self, ranks: Sequence[int]) -> None:
        """Start all ranks, as many as there are by now, or wait until that is known."""
        size = self._placement.find_size(len(self.workers))
        self._awaits_placement = size is None
        if size is None:
            return
        if len(self.workers) != size:
            self.workers = [SupervisedWorker(rank, self) for rank in range(size)]
            self._set_ranks()
            self._display.begin(size)
        for worker in self.workers:
            worker.starts = self.restarts.total
        try:
            self._start_attempt(range(size))
        except InfiniRunError:
            if not self._placement.is_superseded():
                raise
            self._awaits_placement = True

    def _start_attempt(self, ranks: Sequence[int]) -> None:
        limit_s = self._launch_limits.start_timeout_s
        self._start_due_s = _NEVER if limit_s is None else time.monotonic() + limit_s
        self._begin_s = time.time()
        super()._start_workers(ranks)
        process = self.workers[0].process
        assert process is not None
        self._placement.begin(process)
        self.restarts.begin()
        for rank in ranks:
            self.workers[rank].preassign(PendingTask(_TASK, Body(), self.asks[rank], shared=False))
        if sum(memoryview(part).nbytes for part in self._body.parts) <= _SMALL:
            self.call(self._spread_task)  # in the loop: once a rank has its task, an interrupt leaves it its grace
        else:  # a worker that does not read yet, because its own output is not taken, must not block this thread
            self._sender = JoinableThread(self._spread_task, "infini-run: arguments")
            self._sender.start()

    def _spread_task(self) -> None:
        processes = [worker.process for worker in self.workers if worker.process is not None]
        self._spawner.broadcast(processes, encode(RunTask(task=_TASK, body=self._body)))
        if not self._may_start_again:
            self._body = Body()

    # ---- as a Supervisor

    def serve(self, worker: SupervisedWorker) -> None:
        if not worker.assigned:  # it has done its task
            worker.handle("drain")

    def finish_task(self, job: PendingTask, worker: SupervisedWorker, message: TaskEnd) -> None:
        assert worker.process is not None
        rank, process = self._ranks[worker.rank], worker.process
        if isinstance(message, TaskFailed):
            rank.has_failed = True
            self.fail(message, worker.rank, message.time_s + process.clock_s, process.host)
            return
        if isinstance(message, TaskCancelled):  # it raised ir.Cancelled itself: a launch cancels no task
            rank.has_failed = True
            text = f"rank {worker.rank} on {process.host} raised infini_run.Cancelled"
            self.fail(
                RemoteError(text, kind="infini_run.Cancelled", rank=worker.rank, host=process.host), worker.rank
            )
            return
        rank.has_result = True
        self._display.progress(worker.rank, 1, 1)
        rank.ask.set_answer((message, worker.rank, process.host))
        with self._changed:
            self._arrived.append((worker.rank, rank.ask))
            self._wake()

    def on_event(self, kind: str, worker: SupervisedWorker, **more: Any) -> None:
        if kind == "ready":
            self._ranks[worker.rank].is_up = True
        elif kind == "progress" and not more["of"] and type(more["done"]) is int:
            self.restarts.note_progress(more["done"])
        elif kind == "progress":
            self._display.progress(worker.rank, more["done"], more["of"])
        elif kind == "status":
            self._display.status(worker.rank, more["text"])

    def on_torn(self, worker: SupervisedWorker) -> None:
        """End a worker with a torn channel: it may wait for this side, or write what nobody will read."""
        rank = self._ranks[worker.rank]
        if not rank.has_result:
            rank.is_torn = True
            assert worker.process is not None
            worker.process.signal(9)

    def on_exit(self, worker: SupervisedWorker) -> None:
        process, rank = worker.process, self._ranks[worker.rank]
        assert process is not None
        assert process.exit is not None
        assert worker.connection is not None
        exit_ = process.exit
        end_s = min(exit_.end_s or time.time(), worker.connection.end_s or _NEVER)
        if rank.has_failed or (rank.has_result and not exit_.is_failure):
            return
        if worker.start_error is not None:
            self.fail(worker.start_error, worker.rank, end_s, process.host)
        elif rank.is_torn:
            self.fail(wrote_into_channel(exit_), worker.rank, end_s)
        elif exit_.is_failure or (
            not exit_.stopped and not rank.has_result and (self.stopped_s is None or end_s < self.stopped_s)
        ):
            error = process.problem or ended_without_result(exit_, has_result=rank.has_result)
            self.fail(error, worker.rank, end_s)

    def on_stuck(self, worker: SupervisedWorker) -> None:
        """Note what is stuck, once for each node: its ranks are released together."""
        process = worker.process
        assert process is not None
        text = f"{process.host}: SIGKILL did not end process {process.stuck}"
        if text not in self._stuck:
            self._stuck.add(text)
            print_line(text)
            if self._may_start_again:
                self.restarts.give_up(NOT_ENDED)

    def on_crash(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # raised as it is, it would end the caller's program
            error, cause = InfiniRunError(f"{type(error).__name__} was raised while supervising the launch"), error
            error.__cause__ = cause
        self.fail(error, -1)

    # ---- failures

    def fail(self, error: BaseException | TaskFailed, rank: int, time_s: float = 0.0, host: str = "") -> None:
        """Note a failure. time_s: when it happened, since the epoch; 0: now. A lost node is one failure, with all its
        ranks."""
        now_s, is_first = time.time(), not self.failures
        if not any(failure.error is error for failure in self.failures):
            date_s = min(time_s or now_s, now_s)  # another host's clock is known to within a few milliseconds
            self.failures.append(Failure(time_s=date_s, rank=rank, error=error, host=host))
        if is_first:
            self._spawner.ask_alive()

    def fail_result(self, ask: Ask[Any], rank: int, error: BaseException) -> None:
        """Note that a result does not unpickle; do nothing if its attempt has restarted meanwhile."""
        if any(ask is own for own in self.asks):
            self.fail(error, rank)

    def stop_all(self) -> None:
        """Begin to stop every rank, for the caller: the stop signal, SIGKILL after the grace; no restart."""
        self._is_unwanted = True
        self._stop_ranks()

    def _stop_ranks(self) -> None:
        if self.stopped_s is None:
            self.stopped_s = time.time()
            for group in self._watches:
                group.stop()  # what a rank still says meanwhile counts, so it keeps its task

    def kill_all(self) -> None:
        """Send SIGKILL to everything that is left; no restart."""
        self._is_unwanted = True
        self.stopped_s = self.stopped_s or time.time()
        for group in self._watches:
            group.kill()

    def _next_due_s(self) -> float:
        if self.stopped_s is not None:
            return _NEVER
        is_up = self._is_waiting or all(rank.is_up for rank in self._ranks)
        return self._due_at_s if is_up else min(self._due_at_s, self._start_due_s)

    def _due_s(self) -> float | None:
        due_s = super()._due_s()
        own_s = min(self._next_due_s(), self.restarts.due_s)
        return own_s if due_s is None else min(due_s, own_s)

    def _check_time(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_due_s():
            return
        down = [worker for worker, rank in zip(self.workers, self._ranks, strict=True) if not rank.is_up]
        late = [worker for worker, rank in zip(self.workers, self._ranks, strict=True) if not rank.has_result]
        if down and not self._is_waiting and now_s >= self._start_due_s:
            text = f"{_names(down)}: not up within {self._launch_limits.start_timeout_s:g} s"
        elif late:
            text = f"{_names(late)}: did not return within {self._launch_limits.timeout_s:g} s"
        else:
            text = f"all ranks returned, but not all exited within {self._launch_limits.timeout_s:g} s"
        self.fail(LaunchTimeout(f"{text}; stopped all ranks"), -1)
        self._stop_ranks()

    def _advance(self) -> None:
        self._check_time()
        if self.failures and not self._keep_going:
            self._stop_ranks()
        if self._are_all_settled and self._is_waiting and not self._is_unwanted and not self.failures:
            self._restart_if_due()
            if not self.failures:
                return
        if self._are_all_settled and not self._plan_restart():
            self.phase = "EXITED"
            self._end_all()

    @property
    def _are_all_settled(self) -> bool:
        return all(worker.is_settled for worker in self.workers)

    # ---- restarts

    @property
    def _may_start_again(self) -> bool:
        """There may be another attempt."""
        return self._placement.may_move or self.restarts.is_possible

    @property
    def _is_waiting(self) -> bool:
        """Whether all ranks ended, and will restart."""
        return self._awaits_placement or self.restarts.is_waiting

    def _plan_restart(self) -> bool:
        """Begin to wait for the next attempt, if there is one, after the end of every rank."""
        first = self._first_failure()
        if self._is_unwanted or any(failure.rank < 0 for failure in self.failures):
            return False
        why = self._placement.why_ended()
        if why:
            return self._follow_nodes(why)
        moves = first is not None and self._placement.moves_after(first.error)
        if first is None or (isinstance(first.error, NodeLost) and not moves):
            return False
        line = self.restarts.fail(_describe(first), first.time_s - self._begin_s)
        if not line:
            return False
        print_line(line)
        if moves:
            self._placement.request_next(self.workers[first.rank].process, self.restarts.due_s)
            self._await_placement()
        else:
            self.try_step("listing the delay", self._list_delay)
        self.failures, self.stopped_s = [], None
        return True

    def _list_delay(self) -> None:
        """Let other processes find the launch until its restart. That on other machines has a head, which is
        listed."""
        from infini_run.crews.spawn.exec_spawner import ExecSpawner

        if not isinstance(self._spawner, ExecSpawner):
            return
        from infini_run.crews.supervision.listed_delay import ListedDelay

        self._listed_delay = ListedDelay(
            self.poller,
            self._spawner.options,
            self._spawner.environ,
            world=len(self.workers),
            start_s=self._start_s,
            restart_s=self.restarts.restart_s,
            on_stop=self.stop_all,
        )

    def _end_listed_delay(self) -> None:
        delay, self._listed_delay = self._listed_delay, None
        if delay is not None:
            self.try_step("closing the control socket of the delay", delay.close)

    def _follow_nodes(self, why: str) -> bool:
        """End the attempt for a node that came or went. If every rank had returned by then, nothing is lost."""
        if all(rank.has_result for rank in self._ranks):
            self.failures = [failure for failure in self.failures if not isinstance(failure.error, NodeLost)]
            if not self.failures:
                return False
        if not self.restarts.go_on(None, why):
            if not self.failures:
                self.fail(NodeLost(why, "", -1), -1)
            return False
        self._await_placement()
        self.failures, self.stopped_s = [], None
        return True

    def _await_placement(self) -> None:
        self._placement.leave()
        self._awaits_placement = True
        self.restarts.end_wait()

    def _first_failure(self) -> Failure | None:
        return min(self.failures, key=lambda failure: failure.time_s, default=None)

    def _restart_if_due(self) -> None:
        try:
            is_due = time.monotonic() >= self.restarts.due_s or (
                self._awaits_placement and self._placement.find_size(len(self.workers)) is not None
            )
        except InfiniRunError as error:
            self._awaits_placement = False
            self.fail(error, -1)
            return
        if is_due:
            self._restart()

    def _restart(self) -> None:
        """Start every rank again, with the same call."""
        self.restarts.end_wait()
        self._end_listed_delay()
        if self._sender is not None:
            self._sender.join()  # its channels are closed
        self._set_ranks()
        with self._changed:
            self._arrived.clear()
        try:
            self._start_workers(range(len(self.workers)))
        except InfiniRunError as error:
            self.fail(error, -1)

    # ---- the end

    def _on_workers_ended(self) -> None:
        self._end_listed_delay()
        self._placement.remove_watcher(self.wake)
        if self._sender is not None:
            self.try_step("ending the thread that sends the arguments", self._sender.join)
        self.try_step("closing the display", self._display.close)

    def _on_closed(self) -> None:
        if self.is_dropped:
            self.print_unseen()
        elif self._unseen_failure() is None:  # else it stays open: close_at_exit prints the failure
            closed(self._exit_number)
        with self._changed:
            self.is_over = True
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        self._waiters.wake()

    def finish_at_exit(self) -> None:
        """Wait for the end, at the exit of the interpreter."""
        self.join()

    def print_unseen(self) -> None:
        """Print the failure of a finished launch, if it has one and nothing will wait for it any more; once."""
        failure = self._unseen_failure()
        if failure is not None:
            self.is_awaited = True
            print_line(f"a launch failed, and nothing waited for it: {_describe(failure)}")
        closed(self._exit_number)

    def _unseen_failure(self) -> Failure | None:
        """Return the first failure, if nothing has waited for the end."""
        return None if self.is_awaited else self._first_failure()

    def close_at_exit(self) -> None:
        """Stop what runs, within the grace, at the exit of the interpreter, where no thread waits any more."""
        was_over = self.is_over
        self.call(self.stop_all)
        self.join()
        if was_over and not self.is_dropped:
            self.print_unseen()

    def close(self) -> None:
        """Kill what is left, and wait until all is free. Safe twice."""
        if self.phase != "CLOSED":
            self.call(self.kill_all)
        self.join()

    def after_fork_in_child(self) -> None:
        belongs_to_parent = self.belongs_to_parent or not self.is_over
        super().after_fork_in_child()
        if self._listed_delay is not None:
            self._listed_delay.after_fork_in_child()
        self.belongs_to_parent, self.outcome_lock = belongs_to_parent, RLock()  # another thread may have had it
        self._changed, self.is_over, self.is_awaited = Condition(), True, True

    # ---- for other threads

    def signal(self, number: int, workers: Sequence[SupervisedWorker]) -> int:
        """Send a signal to the processes of these workers, as far as they run; return how many it reached."""
        return sum(w.process.signal(number) for w in workers if w.process is not None and not w.is_settled)

    @property
    def has_results(self) -> bool:
        """There is a result that `next_result` returns at once."""
        return bool(self._arrived)

    async def next_result_async(self) -> tuple[int, Ask[Any]] | None:
        """Return as `next_result` does without a limit, for asyncio."""
        while True:
            with self._changed:
                if self._arrived:
                    return self._arrived.popleft()
                if self.is_over:
                    return None
                future = self._waiters.add()
            await future

    def next_result(self, timeout_s: float | None) -> tuple[int, Ask[Any]] | None:
        """Wait for a rank's result that no call has returned before, and return it with its rank. None: no more will
        come, or none within `timeout_s` seconds (None: no limit)."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self.is_over, timeout_s)
            return self._arrived.popleft() if self._arrived else None


def _describe(failure: Failure) -> str:
    """Return a failure in one line."""
    error = failure.error
    if isinstance(error, TaskFailed):
        return f"rank {failure.rank} on {failure.host}: {error.kind}: {error.text}"
    return str(error).partition("\n")[0]


def _names(workers: Sequence[SupervisedWorker]) -> str:
    """Return the first workers of an error, and how many more there are."""
    names = ", ".join(f"rank {worker.rank} on {_host(worker)}" for worker in workers[:_NAMED])
    return f"{names} and {len(workers) - _NAMED} more" if len(workers) > _NAMED else names


def _host(worker: SupervisedWorker) -> str:
    return "" if worker.process is None else worker.process.host
