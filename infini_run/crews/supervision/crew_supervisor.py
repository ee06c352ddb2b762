"""The supervisor of a crew: tasks from a queue, events, restarts by a policy, and an end within a limit."""

from __future__ import annotations

import time
from collections import Counter, deque
from functools import partial
from threading import Event

from infini_run.crews.errors import CrewClosed, CrewFailed, DrainTimeout, crew_failed, drain_timeout
from infini_run.crews.protocol import TaskCancelled, TaskDone, TaskFailed, kind_of
from infini_run.crews.supervision.crew_placement import NEVER, PendingRestart
from infini_run.crews.supervision.event_queue import CrewEvent, EventQueue
from infini_run.crews.supervision.restart_policy import Budget, ranks_to_restart
from infini_run.crews.supervision.supervisor import Supervisor
from infini_run.crews.supervision.worker_death import death_error
from infini_run.errors import InfiniRunError
from infini_run.node.host_stderr import print_line
from infini_run.number_arguments import LONGEST_S
from infini_run.report.failures import WorkerDied
from infini_run.system.exit_hooks import close_at_exit, closed
from infini_run.system.fork_hooks import call_in_forked_children, stayed_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.crews.protocol import TaskEnd, WorkerSetup
    from infini_run.crews.spawn.spawner import Spawner
    from infini_run.crews.supervision.crew_placement import CrewPlacement
    from infini_run.crews.supervision.pending_task import PendingTask, WorkerDeadlines
    from infini_run.crews.supervision.restart_policy import Restart
    from infini_run.crews.supervision.supervised_worker import SupervisedWorker

AHEAD = 8  # shared tasks that a worker has at most, so that it need not wait for the next one
_SHORT_S = 0.0005  # a task that takes less is short
_MORE_AHEAD = 4  # times as many of these
_OWN_AHEAD = 64  # tasks that only it may do
_CAUSES = 100  # of failures are kept, the last ones


class CrewSupervisor(Supervisor):
    """The supervisor of a crew.

    Attributes:
        events: the events of the crew.
        failure: why the crew failed; None: it did not.
        drain_error: which tasks were undone at the end of the time for them; None: none.

    Args:
        spawner, setup, limits: as for a Supervisor.
        restart: the policy.
        max_events: the most events that count before workers have to wait.
        max_tasks: the number of tasks after which a fresh process replaces a worker's; 0: never.
        placement: knows where workers can restart.
        most_ahead: the most shared tasks that a worker has at a time; 1: none waits behind another.
        starts_on_demand: `expect_task` starts workers, and `start` does not.
    """

    def __init__(
        self,
        spawner: Spawner,
        setup: WorkerSetup,
        restart: Restart,
        limits: WorkerDeadlines,
        *,
        max_events: int,
        max_tasks: int = 0,
        placement: CrewPlacement,
        most_ahead: int = AHEAD,
        starts_on_demand: bool = False,
    ) -> None:
        super().__init__(spawner, setup, limits, spawner.close)
        self._most_ahead = most_ahead
        self.starts_on_demand = starts_on_demand
        self._restart = restart
        self._budget = Budget(restart)
        self._max_tasks = max_tasks
        self._placement = placement
        self.events = EventQueue(max_events, self.wake)
        self.failure: CrewFailed | None = None
        self._causes: list[BaseException] = []
        self._shared: deque[PendingTask] = deque()
        self._will_offer = False  # of these; a call for that waits
        self._restarts: list[PendingRestart] = []
        self._stuck: dict[int, tuple[str, Callable[[], None]]] = {}  # by rank: in words, and what ends its watch
        self._drain_end_s = float("inf")
        self._is_closing = False  # and the workers know
        self._is_halted = False  # nothing restarts, and tasks fail
        self._is_late = False  # the time for the tasks has passed
        self._undone: Counter[int | None] = Counter()  # tasks that were not done in time, by rank
        self._idle: list[Event] = []  # to set when there is no work
        self.drain_error: DrainTimeout | None = None
        self.is_dropped = False  # nothing refers to the crew: its failure is printed, since no caller can get it

    def start(self) -> None:
        """Start as Supervisor.start does."""
        call_in_forked_children(self)
        self._exit_number = close_at_exit(self)
        self._placement.add_watcher(self.wake)
        super().start()

    # ---- tasks

    def submit(self, job: PendingTask, rank: int | None) -> None:
        """Accept a task for one worker; rank None: for any."""
        if self.failure is not None or self.phase != "RUNNING":
            self._fail_task(job, None, self.over_error())
        elif rank is None:
            self._shared.append(job)
            if self.starts_on_demand:
                self._offer()
                self._offer_to_starting()
                if self._shared:  # the worker that was free for it has got another thread's task meanwhile
                    self.expect_task()
                    self._offer_to_starting()
            elif not self._will_offer:
                self._will_offer = True
                self.call(self._offer)  # after the other calls that are here: their tasks go together
        else:
            self.workers[rank].queued.append(job)
            self.serve(self.workers[rank])

    def _offer(self) -> None:
        """Hand shared tasks to those that have the fewest."""
        self._will_offer = False
        for worker in sorted(self.workers, key=lambda worker: len(worker.assigned)):
            if not self._shared:
                return
            self.serve(worker)

    def expect_task(self) -> None:
        """Start a worker that has never run, if none is free: it starts while the caller pickles a task."""
        if self.phase != "RUNNING" or any(worker.state == "ready" for worker in self.workers):
            return
        worker = next((worker for worker in self.workers if not worker.starts), None)
        if worker is None:
            self.starts_on_demand = False
            return
        try:
            self._start_workers([worker.rank])
        except InfiniRunError as error:
            self.fail(error)

    def _offer_to_starting(self) -> None:
        """Give each worker that starts one task of those for which none is free."""
        for worker in self.workers:
            if self._shared and worker.state == "starting" and not worker.queued:
                job = self._shared.popleft()
                if job.claim():
                    worker.queued.append(job)

    def fail(self, error: BaseException) -> None:
        """Fail the crew for a reason that is no worker's."""
        self._fail([*self._causes, error])

    def serve(self, worker: SupervisedWorker) -> None:
        worker.note_pace()
        if not worker.queued and len(worker.assigned) > self._ahead(worker) // 2:
            return  # it has enough; later it gets several at once
        while worker.state in ("ready", "busy"):
            if self._max_tasks and worker.assigned_total >= self._max_tasks:
                if not worker.assigned:
                    self._replace(worker)
                return
            job = self._next_task(worker)
            if job is None:
                return
            worker.hand(job)
            worker.filled = len(worker.assigned), worker.last_sign_s

    def _next_task(self, worker: SupervisedWorker) -> PendingTask | None:
        """Take the next task that this worker has room for. This skips one whose caller has canceled it, though the
        call that removes it may be waiting still."""
        while True:
            if worker.queued and len(worker.assigned) < _OWN_AHEAD:
                job = worker.queued.popleft()
            elif not worker.queued and self._shared and len(worker.assigned) < self._ahead(worker):
                job = self._shared.popleft()
            else:
                return None
            if job.claim():
                return job

    def _replace(self, worker: SupervisedWorker) -> None:
        """Replace a worker that has done as many tasks as one process may: end it in order, then restart it. No
        failure."""
        worker.handle("drain")
        self._plan_restart({worker.rank}, time.monotonic())

    def _ahead(self, worker: SupervisedWorker) -> int:
        """Return how many tasks a worker may have: more while its tasks are short, so that it need not sleep between
        them; fewer when few are left, so that at the end none waits behind a long one."""
        is_short = self._most_ahead > 1 and worker.task_s < _SHORT_S
        most = self._most_ahead * (_MORE_AHEAD if is_short else 1)
        return min(most, max(1, len(self._shared) // (2 * len(self.workers))))

    def drop_tasks(self, jobs: Sequence[PendingTask], worker: SupervisedWorker) -> None:
        back = [job for job in jobs if job.shared and not job.started]
        self._shared.extendleft(reversed(back))
        if back and self.phase in ("RUNNING", "DRAINING"):
            self.call(self._offer)
        for job in jobs:
            if not job.shared or job.started:
                self._fail_task(job, worker, self._error_of_dropped(job, worker))

    def _error_of_dropped(self, job: PendingTask, worker: SupervisedWorker) -> InfiniRunError:
        """Return the error of a task that its worker will not do: a caller's `halt` is no failure of the worker."""
        is_closed = self._is_halted and not self._is_late and self.failure is None
        if is_closed and worker.state == "stopping" and job.ask is not None:
            return self.over_error()
        return death_error(worker, has_begun=job.started)

    def cancel_waiting(self) -> None:
        """Cancel the shared tasks that no worker has."""
        waiting = [job.ask for job in self._shared if job.ask is not None]
        for ask in waiting:
            ask.cancel()

    def cancel_task(self, task: int) -> None:
        """Cancel a task by its number, from any thread."""
        self.call(lambda: self._cancel(task))

    def _cancel(self, task: int) -> None:
        for job in self._shared:
            if job.task == task:
                self._shared.remove(job)
                if job.ask is not None:
                    job.ask.cancel()
                return
        any(worker.cancel(task) for worker in self.workers)

    def _fail_task(self, job: PendingTask, worker: SupervisedWorker | None, error: BaseException) -> None:
        if self._is_late and not job.is_cancelled:
            self._undone[None if worker is None else worker.rank] += 1
        if job.ask is not None:
            job.ask.set_answer(error)
        elif worker is not None and isinstance(error, WorkerDied):
            self.on_event("failed", worker, task=job.task, problem=error)

    def finish_task(self, job: PendingTask, worker: SupervisedWorker, message: TaskEnd) -> None:
        if job.ask is None:
            problem = message if isinstance(message, TaskFailed) else None
            more = {"body": message.body} if isinstance(message, TaskDone) else {"problem": problem}
            self.on_event(kind_of(message), worker, task=message.task, **more)
        elif isinstance(message, TaskCancelled):
            job.ask.cancel()
        else:
            assert worker.process is not None
            job.ask.set_answer((message, worker.rank, worker.process.host))

    @property
    def waiting(self) -> int:
        """How many tasks no worker has yet."""
        return len(self._shared)

    def over_error(self) -> InfiniRunError:
        """Return the error of a task that will not be done because of the crew's end; a new one each time."""
        if self.failure is not None:
            error = CrewFailed(str(self.failure), self.failure.causes)
            error.__cause__ = self.failure.__cause__
            return error
        if self.belongs_to_parent:
            return CrewClosed(stayed_with_parent("the crew"))
        return CrewClosed("the crew was closed before this task was done")

    # ---- events

    def on_event(self, kind: str, worker: SupervisedWorker, **more: Any) -> None:
        host = worker.process.host if worker.process is not None else ""
        restarts = max(0, worker.starts - 1)
        self.events.add(
            CrewEvent(kind=kind, rank=worker.rank, host=host, time_s=time.time(), restarts=restarts, **more)
        )

    def is_backlogged(self, worker: SupervisedWorker) -> bool:
        return self.events.is_full(worker.rank)

    def on_thread_waits(self) -> None:
        """Note that the current thread waits for an answer: it reads no events meanwhile."""
        if self.belongs_to_parent:
            raise self.over_error()
        self.events.readers.leave_thread()

    def on_coroutine_waits(self) -> None:
        """Note that the current task of asyncio waits for an answer: it reads no events meanwhile."""
        if self.belongs_to_parent:
            raise self.over_error()
        self.events.readers.leave_task()

    # ---- failures and restarts

    def stop_process(self, worker: SupervisedWorker) -> None:
        assert worker.process is not None
        worker.process.group.stop()

    def on_bad_end(self, worker: SupervisedWorker, how: str) -> None:
        when = "it was replaced" if self.phase == "RUNNING" else "the crew was closed"
        self.problems.append(f"rank {worker.rank} did not end properly when {when}: {how}")

    def on_stuck(self, worker: SupervisedWorker) -> None:
        """Start nothing in place of a stuck worker: it may still hold memory, files, and a GPU."""
        rank, process = worker.rank, worker.process
        assert process is not None
        text = f"rank {rank} on {process.host}: SIGKILL did not end process {process.stuck}"
        if any(rank in pending.ranks for pending in self._restarts):
            print_line(f"{text}; restarting it once that process is gone")
        unwatch = process.watch_stuck(self.poller, lambda known: self.call(lambda: self._end_stuck(rank, known)))
        self._stuck[rank] = text, unwatch

    def _end_stuck(self, rank: int, known: bool) -> None:
        """End a stuck worker. known: that it is gone; else that is unknown here."""
        text, _ = self._stuck[rank]
        if known:
            del self._stuck[rank]
        elif self.phase == "RUNNING" or self._restarts:
            self._fail(
                [*self._causes, InfiniRunError(f"{text}; this kernel cannot report when that process is gone")]
            )

    def on_crash(self, error: BaseException) -> None:
        self._fail([error])

    def on_failure(self, worker: SupervisedWorker) -> None:
        """Start workers again, or fail the crew if this was one failure too many."""
        assert worker.cause is not None
        self._causes = [*self._causes, worker.cause][-_CAUSES:]
        is_needless = self.phase != "RUNNING" and not self.tasks_left and worker.failed_while != "busy"
        if self.failure is not None or self._is_halted or is_needless:
            self.problems.append(str(worker.cause))
            return
        now_s = time.monotonic()
        for pending in self._restarts:
            if worker.rank in pending.ranks:  # another failure restarts it, too: both are one
                self.on_event("restarting", worker, delay_s=max(0.0, pending.due_s - now_s))
                return
        assert worker.process is not None
        processes = (each.process for each in self.workers)
        delay_s = self._placement.spend(worker.process, processes, partial(self._budget.spend, now_s))
        if delay_s is None:
            self._fail(self._causes)
            return
        ranks = set(ranks_to_restart(self._restart.strategy, worker.rank, len(self.workers)))
        for rank in ranks - {worker.rank}:
            self.halt_worker(self.workers[rank], f"rank {worker.rank} failed, and all workers restart together")
        self._plan_restart(ranks, now_s + delay_s)
        self.on_event("restarting", worker, delay_s=delay_s)

    def _plan_restart(self, ranks: set[int], due_s: float) -> None:
        """Plan a restart, merged with earlier plans that have ranks in common with this one."""
        for other in [pending for pending in self._restarts if pending.ranks & ranks]:
            ranks, due_s = ranks | other.ranks, max(due_s, other.due_s)
            self._restarts.remove(other)
        self._restarts.append(PendingRestart(ranks, due_s))

    def _settled_restarts(self) -> list[PendingRestart]:
        """Return the restarts of whose workers nothing is left."""
        return [
            pending
            for pending in self._restarts
            if all(self.workers[rank].is_settled and rank not in self._stuck for rank in pending.ranks)
        ]

    def _start_due_s(self, pending: PendingRestart) -> float:
        """Return when its workers can start (monotonic); infinite: they wait for a host."""
        return max(pending.due_s, self._placement.start_due_s(sorted(pending.ranks)))

    def _restart_due(self) -> None:
        for pending in self._settled_restarts():
            if self._start_due_s(pending) <= time.monotonic() and not self._restart_workers(pending):
                return
        waiting = [pending for pending in self._settled_restarts() if self._start_due_s(pending) == NEVER]
        error = self._placement.check_waits(waiting)
        if error is not None:
            self._fail([*self._causes, error])

    def _restart_workers(self, pending: PendingRestart) -> bool:
        """Return False if that has failed the crew."""
        ranks = sorted(pending.ranks)
        self._restarts.remove(pending)
        try:
            self._start_workers(ranks)
        except InfiniRunError as error:
            if not self._placement.may_retry(ranks, error):
                self._fail([*self._causes, error])
                return False
            self._plan_restart(pending.ranks, pending.due_s)
        return True

    def _fail(self, causes: Sequence[BaseException]) -> None:
        """Fail the crew: stop all workers, and fail every waiting task."""
        if self.failure is None:
            self.failure = crew_failed(causes, self._restart.max_restarts, self._restart.within_s)
            self.failure.__cause__ = causes[0] if causes else None
        self._halt(str(self.failure).partition("\n")[0])

    def _refuse_all(self) -> None:
        """Fail the tasks that no worker has."""
        waiting: list[tuple[PendingTask, SupervisedWorker | None]] = [(job, None) for job in self._shared]
        waiting += [(job, worker) for worker in self.workers for job in worker.queued]
        self._shared.clear()
        for worker in self.workers:
            worker.queued.clear()
        for job, owner in waiting:
            self._fail_task(job, owner, self.over_error())

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        for _, unwatch in self._stuck.values():
            unwatch()
        self.events = EventQueue(1, self.wake)  # another thread may have had the lock of the old one
        self.events.end()

    # ---- the end

    def drain(self, limit_s: float) -> None:
        """Accept nothing more, do the accepted tasks within `limit_s` seconds, then end. Again: the earlier limit
        holds."""
        self._drain_end_s = min(self._drain_end_s, time.monotonic() + limit_s)
        if self.phase == "RUNNING":
            self.phase = "DRAINING"
        self._announce_close()
        for worker in self.workers:
            worker.shorten_deadline(self._drain_end_s)

    def _announce_close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            for worker in self.workers:
                worker.announce_close()

    def _start_workers(self, ranks: Sequence[int]) -> None:
        super()._start_workers(ranks)
        for rank in ranks if self._is_closing else ():
            self.workers[rank].announce_close()

    def halt(self) -> None:
        """End at once; unfinished tasks fail."""
        self._halt("the crew was closed")

    def kill(self) -> None:
        """End as `halt` does, without a grace."""
        self.halt()
        for worker in self.workers:
            if worker.process is not None and not worker.is_settled:
                worker.process.group.kill()

    def _halt(self, why: str) -> None:
        self._is_halted = True
        self._restarts.clear()
        self.drain(0.0)
        self._refuse_all()
        for worker in self.workers:
            self.halt_worker(worker, why)

    def drain_left_s(self) -> float:
        return max(0.001, self._drain_end_s - time.monotonic())

    @property
    def tasks_left(self) -> int:
        """How many tasks have not ended."""
        return len(self._shared) + sum(len(worker.assigned) + len(worker.queued) for worker in self.workers)

    @property
    def has_work(self) -> bool:
        """Whether tasks, or calls that may bring some, are left. For any thread."""
        return bool(self._loop.calls or self.tasks_left)

    def wait_idle(self, limit_s: float) -> bool:
        """Wait at most `limit_s` seconds until every accepted task is finished. Return whether that is so. For other
        threads."""
        self.events.readers.leave_thread()
        event = Event()
        self.call(lambda: self._idle.append(event))
        if self.phase == "CLOSED":
            return True
        return event.wait(limit_s if limit_s < LONGEST_S else None)

    def _wake_idle_waiters(self) -> None:
        waiting, self._idle = self._idle, []
        for event in waiting:
            event.set()

    def finish_at_exit(self) -> None:
        """Finish the accepted tasks at the exit of the interpreter, as leaving a `with` block does."""
        failure = self.failure
        self.call(self._announce_close)
        if not self.wait_idle(self.limits.drain_s):
            self.call(lambda: self.drain(0.0))
            self.join()
        if self.is_dropped:  # its end reports it
            return
        if self.failure is not failure:
            _print_error(self.over_error())
        elif self.drain_error is not None:
            _print_error(self.drain_error)

    def close_at_exit(self) -> None:
        """End the workers at the exit of the interpreter, while there is one."""
        self.close(drain=False)

    def close(self, *, drain: bool) -> None:
        """End, from another thread, and wait until everything is free. drain: do the accepted tasks first."""
        self.begin_to_close(drain=drain)
        self.join()

    def begin_to_close(self, *, drain: bool) -> None:
        """Close as `close` does, without waiting."""
        self.events.readers.leave_thread()
        self.call((lambda: self.drain(self.limits.drain_s)) if drain else self.halt)

    def _due_s(self) -> float | None:
        dues = [super()._due_s(), self._placement.wait_end_s, *map(self._start_due_s, self._settled_restarts())]
        if self.phase == "DRAINING" and (self._restarts or any(worker.is_live for worker in self.workers)):
            dues.append(self._drain_end_s)
        return min((due for due in dues if due not in (None, NEVER)), default=None)

    def _advance(self) -> None:
        self._restart_due()
        if self._idle and not self.has_work:
            self._wake_idle_waiters()
        if self.phase == "DRAINING":
            self._drain_workers()
            if all(worker.is_settled for worker in self.workers) and not self._restarts:
                self.phase = "EXITED"
                self._refuse_all()
        if self.phase == "EXITED":
            self._end_all()

    def _drain_workers(self) -> None:
        """Ask the workers to end once no task is left. Until then one that fails restarts, and another may get its
        tasks. At the end of the time they get the request at once."""
        is_late = time.monotonic() >= self._drain_end_s
        if is_late:
            self._is_late = self._is_late or not self._is_halted
            self._is_halted = True
            self._restarts.clear()
            self._refuse_all()
        elif self._shared:
            return
        elif not self.tasks_left:
            self._restarts.clear()
        for worker in self.workers:
            if worker.is_live and (is_late or not (worker.queued or worker.assigned)):
                worker.handle("drain")

    def _on_workers_ended(self) -> None:
        self._placement.remove_watcher(self.wake)
        for text, unwatch in self._stuck.values():
            unwatch()
            self.problems.append(text)
        self._refuse_all()
        if self._undone:
            self.drain_error = drain_timeout(self._undone, self.limits.drain_s)

    def _on_closed(self) -> None:
        error = self.failure or self.drain_error
        if error is not None and self.is_dropped:
            _print_error(error)
        closed(self._exit_number)
        self._wake_idle_waiters()
        self.events.end()


def _print_error(error: BaseException) -> None:
    print_line("; ".join(map(str.strip, str(error).split("\n"))))
