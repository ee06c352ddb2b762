"""The supervisor of workers: one thread with one loop, which alone starts, reads, writes and closes.

Other threads request something (`call`) and wait for its effect. Its end has phases, in order: RUNNING, DRAINING,
EXITED, CLOSED. In DRAINING workers do the accepted tasks. In EXITED every process is gone. In CLOSED everything that
it held for them is free. `problems` has what fails on that way, and a failure there stops nothing.

A subclass decides what the workers do, and what their failure means. CrewSupervisor has tasks from a queue, and
restarts; LaunchSupervisor has one task per worker, and the first failure ends all.
"""

from __future__ import annotations

import time
from threading import current_thread

from infini_run.crews.capture import capture_exception, capture_foreign
from infini_run.crews.spawn.process_watch import ProcessWatch
from infini_run.crews.spawn.start_errors import as_start_errors
from infini_run.crews.supervision.supervised_worker import SupervisedWorker
from infini_run.record import replace
from infini_run.system.call_loop import CallLoop
from infini_run.system.joinable_thread import JoinableThread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.crews.protocol import Body, TaskEnd, WorkerSetup
    from infini_run.crews.spawn.spawner import ProcessGroup, Spawner, WorkerProcess
    from infini_run.crews.supervision.pending_task import PendingTask, WorkerDeadlines

PHASES = ("RUNNING", "DRAINING", "EXITED", "CLOSED")
_LATE_S = 1.0  # a wait that took so much longer than asked for: this process itself was stopped


class Supervisor:
    """Holds workers from `start` to the end of its thread.

    Args:
        spawner: starts their processes.
        setup: the first message to each; the supervisor fills in the ranks.
        limits: how long workers may take.
        release: called at the end, to free the spawner.
    """

    separate_groups = True  # each worker's process is a separate group, which stops alone
    starts_on_demand = False  # `start` starts the thread alone

    def __init__(
        self, spawner: Spawner, setup: WorkerSetup, limits: WorkerDeadlines, release: Callable[[], None]
    ) -> None:
        self._spawner = spawner
        self._setup = setup
        self._release = release
        self.limits = limits
        self.workers = [SupervisedWorker(rank, self) for rank in range(spawner.world_size)]
        self._loop = CallLoop()
        self.poller = self._loop.poller
        self.phase = "RUNNING"
        self.problems: list[str] = []
        self._watches: dict[ProcessGroup, ProcessWatch] = {}
        self._unpolled: list[ProcessWatch] = []
        self._starting: Sequence[WorkerProcess] = ()  # some of them may have no worker yet
        self._is_in_forked_child = False
        self.belongs_to_parent = False  # this is a forked child, and it continues in the parent
        self._thread = JoinableThread(self._run, "infini-run: supervisor")

    # ---- from other threads

    def start(self) -> None:
        """Start the workers, and the thread. Raises what the spawner raises: then nothing is left. An exception of a
        signal's handler may come when the thread already runs: see `is_running`."""
        try:
            if not self.starts_on_demand:
                self._start_workers(range(len(self.workers)))
            self._thread.start()
        except BaseException:
            if not self.is_running:
                self._end_all()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the thread has started, and runs."""
        return self._thread.is_alive()

    def call(self, act: Callable[[], None]) -> None:
        """Run a call in the loop, in order; after the loop's end, run it at once."""
        if not self._loop.call(act):
            act()

    def wake(self) -> None:
        """Let the loop look at everything."""
        self._loop.wake()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the thread (None: without a limit). Return whether it is gone. In the thread itself,
        where callbacks of futures run, it does not wait."""
        if self._thread is current_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def after_fork_in_child(self) -> None:
        """Forget everything in a forked child, to which neither the thread nor the workers belong."""
        self.belongs_to_parent = self.belongs_to_parent or self.phase != "CLOSED"
        self._is_in_forked_child = True
        self.phase = "CLOSED"
        for worker in self.workers:
            if worker.process is not None and not worker.is_settled:
                worker.process.after_fork_in_child()
        self._spawner.after_fork_in_child()
        self._loop.after_fork_in_child()

    # ---- what a subclass decides; all of it in the loop

    def serve(self, worker: SupervisedWorker) -> None:
        """Give it tasks: it has room."""

    def finish_task(self, job: PendingTask, worker: SupervisedWorker, message: TaskEnd) -> None:
        """Note the end of a task."""

    def drop_tasks(self, jobs: Sequence[PendingTask], worker: SupervisedWorker) -> None:
        """Drop these tasks, which the worker had and will not do."""

    def on_event(self, kind: str, worker: SupervisedWorker, **more: Any) -> None:
        """Note an event of a worker. kind: as CrewEvent."""

    def on_torn(self, worker: SupervisedWorker) -> None:
        """Note that its channel brought what is no message."""

    def on_exit(self, worker: SupervisedWorker) -> None:
        """Note that its process exited, and that nothing of its output is unread."""

    def on_bad_end(self, worker: SupervisedWorker, how: str) -> None:
        """Note that it had to end, and did not end in order."""

    def on_stuck(self, worker: SupervisedWorker) -> None:
        """Note that SIGKILL did not end `process.stuck`; all else is gone."""

    def on_failure(self, worker: SupervisedWorker) -> None:
        """Note that it failed, for the reason `worker.cause`."""

    def on_crash(self, error: BaseException) -> None:
        """Note that the loop itself failed: nothing may wait for it for ever."""

    def stop_process(self, worker: SupervisedWorker) -> None:
        """Begin to stop the process of a worker, and what it started."""

    def is_backlogged(self, worker: SupervisedWorker) -> bool:
        """Return whether the worker has to wait, because nobody takes its events."""
        return False

    def drain_left_s(self) -> float:
        """Return how long a worker that has to end has for its tasks, in seconds; never 0, which would be no
        limit."""
        return float("inf")

    def on_log(self, worker: SupervisedWorker, body: Body) -> None:
        """Give a logging record to the loggers of this process."""
        from infini_run.crews.worker.log_records import take_record

        assert worker.process is not None
        take_record(body, worker.rank, worker.process.host)

    # ---- the loop

    def _run(self) -> None:
        try:
            _, error = capture_foreign(self._serve)  # a handler of logging may call sys.exit
            if error is not None:
                self.on_crash(error)
        finally:
            self._end_all()

    def _serve(self) -> None:
        while self.phase != "CLOSED":
            self._wait()
            self._loop.run_calls()
            self._check_processes()
            self._check_workers()
            self._advance()

    def _wait(self) -> None:
        self._loop.is_awake = False
        due_s = self._due_s()
        for watch in self._watches.values():
            watch.update()
        for worker in self.workers:
            worker.watch()
        self.poller.poll(None if due_s is None else max(0.0, due_s - time.monotonic()))
        self._loop.is_awake = True
        if due_s is not None and time.monotonic() - due_s > _LATE_S:
            for worker in self.workers:
                worker.renew_deadline()

    def _due_s(self) -> float | None:
        """Return when there is something to do, whatever is readable (monotonic); None: no such time."""
        if self._loop.calls or self._unpolled or any(worker.has_pending_messages for worker in self.workers):
            return 0.0
        dues = [worker.deadline_s for worker in self.workers]
        dues += [watch.group.next_deadline_s() for watch in self._watches.values()]
        return min((due for due in dues if due is not None), default=None)

    def _check_processes(self) -> None:
        """Poll the new groups, of which something may already be known, and those that are due."""
        while self._unpolled:
            self._unpolled.pop().poll()
        for watch in list(self._watches.values()):
            due_s = watch.group.next_deadline_s()
            if due_s is not None and time.monotonic() >= due_s:  # not before: what is due at once is due now
                watch.poll()

    def _check_workers(self) -> None:
        for worker in self.workers:
            if worker.has_pending_messages:
                worker.read()
            worker.refill()
            worker.check_deadline(time.monotonic())

    def _advance(self) -> None:
        """Continue to the next phase, as far as possible at present."""
        raise NotImplementedError

    # ---- workers

    def _start_workers(self, ranks: Sequence[int]) -> None:
        restarts = max(self.workers[rank].starts for rank in ranks)
        with as_start_errors():
            self._starting = self._spawner.start(ranks, restarts, separate_groups=self.separate_groups)
        for process in self._starting:
            worker = self.workers[process.rank]
            watch = self._watches.get(process.group)
            if watch is None:
                watch = self._watches[process.group] = ProcessWatch(process.group, self.poller)
            watch.workers.append(worker)
            worker.begin(process)
            own = {"rank": worker.rank, "local_rank": process.local_rank, "world_size": len(self.workers)}
            worker.post(replace(self._setup, **own, restarts=restarts))
            self._unpolled.append(watch)
        self._starting = ()

    def halt_worker(self, worker: SupervisedWorker, why: str) -> None:
        """Stop a worker for a reason that is not its own."""
        if worker.is_live or worker.state == "stopping":
            worker.stopped_for = worker.stopped_for or why
            worker.handle("stop")

    def release_process(self, worker: SupervisedWorker) -> None:
        """Release a process of which nothing is left, or which SIGKILL does not end: close what is held for it."""
        process = worker.process
        assert process is not None
        watch = self._watches.get(process.group)
        if watch is not None:
            watch.workers.remove(worker)
            if not watch.workers:
                del self._watches[process.group]
                watch.close()
        if process.stuck:
            self.on_stuck(worker)
        self.try_step(f"closing what is left of rank {worker.rank}", process.close)

    # ---- the end

    def try_step(self, name: str, step: Callable[[], None]) -> None:
        """Do one step of the end; after a failure, note it and let the next step run."""
        _, error = capture_exception(step)
        if error is not None:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")

    def _end_all(self) -> None:
        """Go to CLOSED, from any phase, in steps of which none can prevent the next."""
        if self._is_in_forked_child or self.phase == "CLOSED":
            return
        for worker in self.workers:
            if worker.process is not None and not worker.is_settled:
                self.try_step(f"ending rank {worker.rank}", worker.abandon)
        for process in self._starting:
            self.try_step(f"closing rank {process.rank}", process.close)
        self._on_workers_ended()
        self.try_step("closing the spawner", self._release)
        self.try_step("closing the loop", self._loop.close)
        self.phase = "CLOSED"
        while self._loop.calls:
            self.try_step("a last call", self._loop.calls.popleft())
        self._on_closed()

    def _on_workers_ended(self) -> None:
        """Act on the end of the last process."""

    def _on_closed(self) -> None:
        """Tell those that wait for the end."""
