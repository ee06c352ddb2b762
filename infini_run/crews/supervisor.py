"""What keeps a crew going: one thread with one loop, which alone starts, reads, writes and closes.

Everybody else asks for something (`call`) and waits for what comes of it. The phases of its end are in order, each
with a deadline: RUNNING; DRAINING, what was accepted is done, and each worker told to end as soon as it has nothing
more to get; EXITED, every process is gone; CLOSED, so is everything that was ours of them. What goes wrong on the way
is noted, and the way is gone to its end.
"""

from __future__ import annotations

import os
import time
from _thread import RLock
from collections import deque
from threading import current_thread

from infini_run.crews.capture import capture_exception
from infini_run.crews.event_queue import CrewEvent, EventQueue
from infini_run.crews.joinable_thread import JoinableThread
from infini_run.crews.protocol import Done, Failed
from infini_run.crews.restart_policy import Budget, ranks_to_restart
from infini_run.crews.supervised_worker import Limits, SupervisedWorker
from infini_run.errors import InfiniRunError
from infini_run.record import replace
from infini_run.report.failures import CrewFailed, WorkerDied
from infini_run.system.poller import READ, Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from infini_run.crews.protocol import Body, Cancelled, Hello
    from infini_run.crews.restart_policy import Restart
    from infini_run.crews.spawner import Spawner
    from infini_run.crews.supervised_worker import PendingTask

PHASES = ("RUNNING", "DRAINING", "EXITED", "CLOSED")
_AHEAD = 8  # tasks that a worker has at most, so that it need not wait for the next one
_OWN_AHEAD = 64  # of those that only it may do
_LATE_S = 1.0  # a wait that took so much longer than asked for: we were stopped ourselves
_CAUSES = 100  # kept, the last of them


class PendingRestart:
    """Ranks that are to be started again together, when all of them are gone and it is time."""

    def __init__(self, ranks: set[int], due_s: float) -> None:
        self.ranks = ranks
        self.due_s = due_s


class Supervisor:
    """hello: what every worker is greeted with, its ranks to be filled in."""

    def __init__(
        self,
        spawner: Spawner,
        hello: Hello,
        restart: Restart,
        limits: Limits,
        *,
        max_events: int,
    ) -> None:
        self._spawner = spawner
        self._hello = hello
        self._restart = restart
        self._budget = Budget(restart)
        self.limits = limits
        self.members = [SupervisedWorker(rank, self) for rank in range(spawner.world_size)]
        self.news = EventQueue(max_events, self.wake)
        self.poller = Poller()
        self.phase = "RUNNING"
        self.failure: CrewFailed | None = None
        self.problems: list[str] = []
        self._causes: list[BaseException] = []
        self._shared: deque[PendingTask] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._revivals: list[PendingRestart] = []
        self._drain_end_s = float("inf")
        self._steps: list[tuple[str, Callable[[], None]]] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell_lock = RLock()
        self._is_forgotten = False
        self._thread = JoinableThread(self._run, "infini-run crew")

    # ---- from other threads

    def start(self) -> None:
        """Start the workers, and the thread. Raises what the spawner raises: then nothing is left."""
        try:
            self._start_members(range(len(self.members)))
            self.poller.watch(self._bell, READ, self._hear_bell)
            self._thread.start()
        except BaseException:
            self._end_all()
            raise

    def call(self, what: Callable[[], None]) -> None:
        """Do it in the loop, in order; after the end, at once."""
        with self._bell_lock:
            if self._bell >= 0:
                self._calls.append(what)
                os.eventfd_write(self._bell, 1)
                return
        what()

    def wake(self) -> None:
        """Let the loop look."""
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; whether it has come. In a callback of a future, which runs in its thread, it is not
        waited for."""
        if self._thread is current_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def after_fork_in_child(self) -> None:
        """In a forked child: the thread and the workers are our parent's."""
        self._is_forgotten, self._bell_lock = True, RLock()
        self.phase = "CLOSED"
        for member in self.members:
            if member.runner is not None and not member.is_settled:
                member.runner.after_fork_in_child()
        self._spawner.after_fork_in_child()
        self.poller.close()
        bell, self._bell = self._bell, -1
        if bell >= 0:  # else it had ended
            os.close(bell)

    # ---- the loop

    def _run(self) -> None:
        try:
            _, error = capture_exception(self._loop)
            if error is not None:  # a mistake of ours, or no memory: nobody is to wait for ever
                self._fail([error])
        finally:
            self._end_all()

    def _loop(self) -> None:
        while self.phase != "CLOSED":
            self._wait()
            self._do_calls()
            self._turn_members()
            self._revive()
            self._advance()

    def _wait(self) -> None:
        due_s = self._due_s()
        for member in self.members:
            member.watch()
        self.poller.poll(None if due_s is None else max(0.0, due_s - time.monotonic()))
        if due_s is not None and time.monotonic() - due_s > _LATE_S:
            for member in self.members:
                member.refresh()

    def _due_s(self) -> float | None:
        if self._calls or any(member.is_due for member in self.members):
            return 0.0
        dues = [due for due in (member.due_s() for member in self.members) if due is not None]
        dues += [revival.due_s for revival in self._revivals if self._can_start(revival)]
        if self.phase == "DRAINING" and any(member.is_live for member in self.members):
            dues.append(self._drain_end_s)
        return min(dues, default=None)

    def _hear_bell(self) -> None:
        os.eventfd_read(self._bell)

    def _do_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _turn_members(self) -> None:
        for member in self.members:
            due_s = member.due_s()
            now_s = time.monotonic()  # not before: what is due at once is due now
            if member.is_due or (due_s is not None and now_s >= due_s):
                member.turn()
            member.check_deadline(now_s)

    # ---- tasks

    def submit(self, job: PendingTask, rank: int | None) -> None:
        """A task for one worker, or for whichever comes to it first."""
        if self.failure is not None or self.phase != "RUNNING":
            self._refuse(job)
        elif rank is None:
            self._shared.append(job)
            self._offer()
        else:
            self.members[rank].held.append(job)
            self.serve(self.members[rank])

    def _offer(self) -> None:
        """Something new for anybody: to those who have least."""
        for member in sorted(self.members, key=lambda member: len(member.handed)):
            if not self._shared:
                return
            self.serve(member)

    def serve(self, member: SupervisedWorker) -> None:
        """Hand a worker what it may have now."""
        while member.state in ("ready", "busy"):
            if member.held and len(member.handed) < _OWN_AHEAD:
                member.hand(member.held.popleft())
            elif not member.held and self._shared and len(member.handed) < self._ahead():
                member.hand(self._shared.popleft())
            else:
                return

    def _ahead(self) -> int:
        """The more there is to do, the more a worker gets ahead: at the end none waits behind a long one."""
        return min(_AHEAD, max(1, len(self._shared) // (2 * len(self.members))))

    def take_back(self, jobs: Sequence[PendingTask]) -> None:
        """What a worker was handed and has not begun."""
        self._shared.extendleft(reversed(jobs))
        if jobs and self.phase in ("RUNNING", "DRAINING"):
            self.call(self._offer)

    def cancel(self, task: int) -> None:
        """Nobody waits for that one any more."""
        for job in self._shared:
            if job.task == task:
                self._shared.remove(job)
                if job.ask is not None:
                    job.ask.cancel()
                return
        any(member.cancel(task) for member in self.members)

    def fail(self, job: PendingTask, member: SupervisedWorker | None, error: BaseException) -> None:
        """It will not be done."""
        if job.ask is not None:
            job.ask.settle(error)
        elif member is not None and isinstance(error, WorkerDied):
            self.tell("failed", member, task=job.task, problem=error)

    def tell_cancelled(self, job: PendingTask, member: SupervisedWorker) -> None:
        """Nobody gets a result of it."""
        if job.ask is not None:
            job.ask.cancel()
        else:
            self.tell("cancelled", member, task=job.task)

    def _refuse(self, job: PendingTask) -> None:
        self.fail(job, None, self.over_error())

    @property
    def waiting(self) -> int:
        """Tasks that no worker has yet."""
        return len(self._shared)

    def over_error(self) -> InfiniRunError:
        """What whoever still waits gets; a new one each time."""
        if self.failure is not None:
            error = CrewFailed(str(self.failure), self.failure.causes)
            error.__cause__ = self.failure.__cause__
            return error
        return InfiniRunError("the crew was closed before this was done")

    # ---- what is told

    def tell(self, kind: str, member: SupervisedWorker, **more: Any) -> None:
        """An event."""
        host = member.runner.host if member.runner is not None else ""
        event = CrewEvent(
            kind=kind, rank=member.rank, host=host, time_s=time.time(), restarts=max(0, member.starts - 1), **more
        )
        self.news.add(event)

    def tell_result(self, member: SupervisedWorker, message: Done | Failed | Cancelled) -> None:
        """Of something that was sent, and not asked."""
        kind = type(message).__name__.lower()
        if isinstance(message, Done):
            self.tell(kind, member, task=message.task, body=message.body)
        else:
            self.tell(kind, member, task=message.task, problem=message if isinstance(message, Failed) else None)

    def log(self, member: SupervisedWorker, body: Body) -> None:
        """A logging record."""
        from infini_run.crews.log_records import take_record

        assert member.runner is not None
        take_record(body, member.rank, member.runner.host)

    def note_problem(self, text: str) -> None:
        """Something that went wrong, and that nothing waits for."""
        self.problems.append(text)

    def try_step(self, name: str, step: Callable[[], None]) -> None:
        """One step of cleaning up: that it fails is noted, and keeps nobody from the next."""
        _, error = capture_exception(step)
        if error is not None:
            self.note_problem(f"{name}: {type(error).__name__}: {error}")

    # ---- failures

    def decide(self, member: SupervisedWorker) -> None:
        """A worker has failed: who is started again, and when; or that this was once too often."""
        assert member.cause is not None
        self._causes = [*self._causes, member.cause][-_CAUSES:]
        if self.phase != "RUNNING" or self.failure is not None:
            self.note_problem(str(member.cause))
            return
        now_s = time.monotonic()
        delay_s = self._budget.spend(now_s)
        if delay_s is None:
            self._fail(self._causes)
            return
        ranks = set(ranks_to_restart(self._restart.strategy, member.rank, len(self.members)))
        for rank in ranks - {member.rank}:
            self._halt(self.members[rank], f"rank {member.rank} failed, and they are started again together")
        self._plan_revival(ranks, now_s + delay_s)
        self.tell("restarting", member, delay_s=delay_s)

    def _halt(self, member: SupervisedWorker, why: str) -> None:
        if member.is_live or member.state == "stopping":
            member.stopped_for = member.stopped_for or why
            member.happen("stop")

    def _plan_revival(self, ranks: set[int], due_s: float) -> None:
        """With those that were planned before, where they have ranks in common."""
        for other in [revival for revival in self._revivals if revival.ranks & ranks]:
            ranks, due_s = ranks | other.ranks, max(due_s, other.due_s)
            self._revivals.remove(other)
        self._revivals.append(PendingRestart(ranks, due_s))

    def _can_start(self, revival: PendingRestart) -> bool:
        return all(self.members[rank].is_settled for rank in revival.ranks)

    def _revive(self) -> None:
        """Start again whose time has come."""
        now_s = time.monotonic()
        for revival in list(self._revivals):
            if self.phase == "RUNNING" and revival.due_s <= now_s and self._can_start(revival):
                self._revivals.remove(revival)
                try:
                    self._start_members(sorted(revival.ranks))
                except InfiniRunError as error:
                    self._fail([*self._causes, error])

    def _start_members(self, ranks: Sequence[int]) -> None:
        restarts = max(self.members[rank].starts for rank in ranks)
        for rank, runner in zip(ranks, self._spawner.start(ranks, restarts, apart=True), strict=True):
            member = self.members[rank]
            member.begin(runner)
            whose = {"rank": rank, "local_rank": runner.local_rank, "world_size": len(self.members)}
            member.greet(replace(self._hello, **whose, restarts=restarts))

    def _fail(self, causes: Sequence[BaseException]) -> None:
        """The crew itself: all are stopped, and whoever waits is told why."""
        if self.failure is None:
            self.failure = _failure(causes, self._restart)
            self.failure.__cause__ = causes[0] if causes else None
        self._revivals.clear()
        self._begin_drain(0.0)
        for member in self.members:
            self._halt(member, str(self.failure).partition("\n")[0])
        self._refuse_all()

    def _refuse_all(self) -> None:
        """What no worker has will not be done."""
        waiting = [*self._shared, *(job for member in self.members for job in member.held)]
        self._shared.clear()
        for member in self.members:
            member.held.clear()
        for job in waiting:
            self._refuse(job)

    # ---- the end

    def drain(self, limit_s: float) -> None:
        """Accept nothing more, do what was accepted within so long, then end. Again: not later than that."""
        self._begin_drain(limit_s)

    def halt(self) -> None:
        """End now: nobody waits for what is not done."""
        self._begin_drain(0.0)
        self._refuse_all()
        for member in self.members:
            self._halt(member, "the crew was closed")

    def _begin_drain(self, limit_s: float) -> None:
        self._drain_end_s = min(self._drain_end_s, time.monotonic() + limit_s)
        if self.phase == "RUNNING":
            self.phase = "DRAINING"
        for member in self.members:
            member.hasten(self._drain_end_s)

    def drain_left_s(self) -> float:
        """What is left of the time that there was for it, in seconds; never 0, which would be for ever."""
        return max(0.001, self._drain_end_s - time.monotonic())

    def _advance(self) -> None:
        """One phase after the other, as far as it goes now."""
        if self.phase == "DRAINING":
            self._tell_those_with_nothing_to_do()
            if all(member.is_settled for member in self.members):
                self.phase = "EXITED"
                self._refuse_all()
        if self.phase == "EXITED":
            self._end_all()

    def _tell_those_with_nothing_to_do(self) -> None:
        """Each as soon as it has got all that it is to do: what it was handed it does before it ends."""
        is_late = time.monotonic() >= self._drain_end_s
        if is_late:
            self._refuse_all()
        elif self._shared:
            return
        for member in self.members:
            if member.is_live and not member.held:
                member.happen("tell")

    def _end_all(self) -> None:
        """EXITED to CLOSED, from wherever we are. Steps in order, each done once, whatever became of the others."""
        if self._is_forgotten or self.phase == "CLOSED":
            return
        for member in self.members:
            if member.runner is not None and not member.is_settled:
                self.try_step(f"ending rank {member.rank}", member.abandon)
        self._refuse_all()
        self.try_step("closing the spawner", self._spawner.close)
        self.try_step("closing the poller", self.poller.close)
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1
        self.phase = "CLOSED"
        while self._calls:
            self.try_step("a last call", self._calls.popleft())
        self.news.end()


def _failure(causes: Sequence[BaseException], restart: Restart) -> CrewFailed:
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
