"""The supervisor of a crew: tasks from a queue, events, restarts by a policy, and an end within a limit."""

from __future__ import annotations

import time
from collections import deque

from infini_run.crews.event_queue import CrewEvent, EventQueue
from infini_run.crews.protocol import Cancelled, Done, Failed
from infini_run.crews.restart_policy import Budget, ranks_to_restart
from infini_run.crews.supervisor import Supervisor
from infini_run.crews.worker_death import death_error
from infini_run.errors import InfiniRunError
from infini_run.report.failures import CrewFailed, WorkerDied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.crews.pending_task import Limits, PendingTask
    from infini_run.crews.protocol import Hello
    from infini_run.crews.restart_policy import Restart
    from infini_run.crews.spawner import Spawner
    from infini_run.crews.supervised_worker import SupervisedWorker

_AHEAD = 8  # shared tasks that a worker has at most, so that it need not wait for the next one
_OWN_AHEAD = 64  # tasks that only it may do
_CAUSES = 100  # of failures are kept, the last ones


class PendingRestart:
    """Ranks that are to be started again together, at a time, once all of them are settled."""

    def __init__(self, ranks: set[int], due_s: float) -> None:
        self.ranks = ranks
        self.due_s = due_s


class CrewSupervisor(Supervisor):
    """events: what has happened. failure: why the crew has ended by itself; None: it has not.

    Args:
        spawner, hello, limits: as for a Supervisor.
        restart: the policy.
        max_events: how many events that count are kept before workers are made to wait.
        max_tasks: a worker's process is replaced after so many tasks; 0: never.
    """

    def __init__(
        self, spawner: Spawner, hello: Hello, restart: Restart, limits: Limits, *, max_events: int, max_tasks: int = 0
    ) -> None:
        super().__init__(spawner, hello, limits, spawner.close)
        self._restart = restart
        self._budget = Budget(restart)
        self._max_tasks = max_tasks
        self.events = EventQueue(max_events, self.wake)
        self.failure: CrewFailed | None = None
        self._causes: list[BaseException] = []
        self._shared: deque[PendingTask] = deque()
        self._restarts: list[PendingRestart] = []
        self._drain_end_s = float("inf")

    # ---- tasks

    def submit(self, job: PendingTask, rank: int | None) -> None:
        """Accept a task for one worker; rank None: for any."""
        if self.failure is not None or self.phase != "RUNNING":
            self._fail_task(job, None, self.over_error())
        elif rank is None:
            self._shared.append(job)
            self._offer()
        else:
            self.workers[rank].held.append(job)
            self.serve(self.workers[rank])

    def _offer(self) -> None:
        """Hand shared tasks to those that have the fewest."""
        for worker in sorted(self.workers, key=lambda worker: len(worker.handed)):
            if not self._shared:
                return
            self.serve(worker)

    def serve(self, worker: SupervisedWorker) -> None:
        while worker.state in ("ready", "busy"):
            if self._max_tasks and worker.taken >= self._max_tasks:
                if not worker.handed:
                    self._replace(worker)
                return
            if worker.held and len(worker.handed) < _OWN_AHEAD:
                worker.hand(worker.held.popleft())
            elif not worker.held and self._shared and len(worker.handed) < self._ahead():
                worker.hand(self._shared.popleft())
            else:
                return

    def _replace(self, worker: SupervisedWorker) -> None:
        """It has done as many tasks as one process may: end it in order, then start it again. No failure."""
        worker.handle("drain")
        self._plan_restart({worker.rank}, time.monotonic())

    def _ahead(self) -> int:
        """How many tasks a worker may have. Fewer when few are left, so that at the end none waits behind a long
        one."""
        return min(_AHEAD, max(1, len(self._shared) // (2 * len(self.workers))))

    def drop_tasks(self, jobs: Sequence[PendingTask], worker: SupervisedWorker) -> None:
        back = [job for job in jobs if job.shared and not job.started]
        self._shared.extendleft(reversed(back))
        if back and self.phase in ("RUNNING", "DRAINING"):
            self.call(self._offer)
        for job in jobs:
            if not job.shared or job.started:
                self._fail_task(job, worker, death_error(worker))

    def cancel(self, task: int) -> None:
        """Cancel a task by its number."""
        for job in self._shared:
            if job.task == task:
                self._shared.remove(job)
                if job.ask is not None:
                    job.ask.cancel()
                return
        any(worker.cancel(task) for worker in self.workers)

    def _fail_task(self, job: PendingTask, worker: SupervisedWorker | None, error: BaseException) -> None:
        if job.ask is not None:
            job.ask.settle(error)
        elif worker is not None and isinstance(error, WorkerDied):
            self.on_event("failed", worker, task=job.task, problem=error)

    def finish_task(self, job: PendingTask, worker: SupervisedWorker, message: Done | Failed | Cancelled) -> None:
        if job.ask is None:
            problem = message if isinstance(message, Failed) else None
            more = {"body": message.body} if isinstance(message, Done) else {"problem": problem}
            self.on_event(type(message).__name__.lower(), worker, task=message.task, **more)
        elif isinstance(message, Cancelled):
            job.ask.cancel()
        else:
            assert worker.process is not None
            job.ask.settle((message, worker.rank, worker.process.host))

    @property
    def waiting(self) -> int:
        """How many tasks no worker has yet."""
        return len(self._shared)

    def over_error(self) -> InfiniRunError:
        """The error of a task that will not be done because the crew has ended; a new one each time."""
        if self.failure is not None:
            error = CrewFailed(str(self.failure), self.failure.causes)
            error.__cause__ = self.failure.__cause__
            return error
        return InfiniRunError("the crew was closed before this was done")

    # ---- events

    def on_event(self, kind: str, worker: SupervisedWorker, **more: Any) -> None:
        host = worker.process.host if worker.process is not None else ""
        restarts = max(0, worker.starts - 1)
        self.events.add(
            CrewEvent(kind=kind, rank=worker.rank, host=host, time_s=time.time(), restarts=restarts, **more)
        )

    def is_backlogged(self) -> bool:
        return self.events.is_full

    # ---- failures and restarts

    def stop_process(self, worker: SupervisedWorker) -> None:
        assert worker.process is not None
        worker.process.group.stop()

    def on_bad_end(self, worker: SupervisedWorker, how: str) -> None:
        self.problems.append(f"rank {worker.rank} did not end in order when the crew was closed: {how}")

    def on_crash(self, error: BaseException) -> None:
        self._fail([error])

    def on_failure(self, worker: SupervisedWorker) -> None:
        """Start workers again, or fail the crew if this was one failure too many."""
        assert worker.cause is not None
        self._causes = [*self._causes, worker.cause][-_CAUSES:]
        if self.phase != "RUNNING" or self.failure is not None:
            self.problems.append(str(worker.cause))
            return
        now_s = time.monotonic()
        delay_s = self._budget.spend(now_s)
        if delay_s is None:
            self._fail(self._causes)
            return
        ranks = set(ranks_to_restart(self._restart.strategy, worker.rank, len(self.workers)))
        for rank in ranks - {worker.rank}:
            self.halt_worker(self.workers[rank], f"rank {worker.rank} failed, and they are started again together")
        self._plan_restart(ranks, now_s + delay_s)
        self.on_event("restarting", worker, delay_s=delay_s)

    def _plan_restart(self, ranks: set[int], due_s: float) -> None:
        """Merged with restarts that were planned before and have ranks in common with this one."""
        for other in [pending for pending in self._restarts if pending.ranks & ranks]:
            ranks, due_s = ranks | other.ranks, max(due_s, other.due_s)
            self._restarts.remove(other)
        self._restarts.append(PendingRestart(ranks, due_s))

    def _can_start(self, pending: PendingRestart) -> bool:
        return all(self.workers[rank].is_settled for rank in pending.ranks)

    def _restart_due(self) -> None:
        now_s = time.monotonic()
        for pending in list(self._restarts):
            if (
                (self.phase == "RUNNING" or self._is_needed(pending))
                and pending.due_s <= now_s
                and self._can_start(pending)
            ):
                self._restarts.remove(pending)
                try:
                    self._start_workers(sorted(pending.ranks))
                except InfiniRunError as error:
                    self._fail([*self._causes, error])

    def _is_needed(self, pending: PendingRestart) -> bool:
        """While the crew drains: there are accepted tasks that only these workers can do."""
        if self.phase != "DRAINING" or not self._max_tasks:
            return False
        has_own = any(self.workers[rank].held for rank in pending.ranks)
        return has_own or bool(self._shared and not any(worker.is_live for worker in self.workers))

    def _fail(self, causes: Sequence[BaseException]) -> None:
        """Fail the crew: all workers are stopped, and every task that waits fails."""
        if self.failure is None:
            self.failure = _crew_failed(causes, self._restart)
            self.failure.__cause__ = causes[0] if causes else None
        self._restarts.clear()
        self.drain(0.0)
        for worker in self.workers:
            self.halt_worker(worker, str(self.failure).partition("\n")[0])
        self._refuse_all()

    def _refuse_all(self) -> None:
        """Fail the tasks that no worker has."""
        waiting = [*self._shared, *(job for worker in self.workers for job in worker.held)]
        self._shared.clear()
        for worker in self.workers:
            worker.held.clear()
        for job in waiting:
            self._fail_task(job, None, self.over_error())

    # ---- the end

    def drain(self, limit_s: float) -> None:
        """Accept nothing more, do what was accepted within `limit_s` seconds, then end. Again: the earlier limit
        holds."""
        self._drain_end_s = min(self._drain_end_s, time.monotonic() + limit_s)
        if self.phase == "RUNNING":
            self.phase = "DRAINING"
        for worker in self.workers:
            worker.shorten_deadline(self._drain_end_s)

    def halt(self) -> None:
        """End now; tasks that are not done fail."""
        self.drain(0.0)
        self._refuse_all()
        for worker in self.workers:
            self.halt_worker(worker, "the crew was closed")

    def drain_left_s(self) -> float:
        return max(0.001, self._drain_end_s - time.monotonic())

    def _due_s(self) -> float | None:
        dues = [super()._due_s(), *(pending.due_s for pending in self._restarts if self._can_start(pending))]
        if self.phase == "DRAINING" and any(worker.is_live for worker in self.workers):
            dues.append(self._drain_end_s)
        return min((due for due in dues if due is not None), default=None)

    def _advance(self) -> None:
        self._restart_due()
        if self.phase == "DRAINING":
            self._drain_workers()
            if all(worker.is_settled for worker in self.workers):
                self.phase = "EXITED"
                self._refuse_all()
        if self.phase == "EXITED":
            self._end_all()

    def _drain_workers(self) -> None:
        """Tell each worker to end as soon as it has been handed all its tasks; it does them first."""
        if time.monotonic() >= self._drain_end_s:
            self._refuse_all()
        elif self._shared:
            return
        for worker in self.workers:
            if worker.is_live and not worker.held:
                worker.handle("drain")

    def _on_workers_ended(self) -> None:
        self._refuse_all()

    def _on_closed(self) -> None:
        self.events.end()


def _crew_failed(causes: Sequence[BaseException], restart: Restart) -> CrewFailed:
    count = sum(isinstance(cause, WorkerDied) for cause in causes)
    if count and restart.max_restarts:
        head = (
            f"the crew failed: {count} failures, and {restart.max_restarts} restarts within {restart.within_s:g} s "
            "are allowed"
        )
    else:
        head = "the crew failed"
    lines = [line for cause in causes[-3:] for line in (str(cause) or repr(cause)).split("\n")]
    return CrewFailed("\n".join([head, *(f"  {line}" for line in lines[:9])]), tuple(causes))
