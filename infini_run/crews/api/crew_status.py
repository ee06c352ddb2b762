"""A crew and its workers at one moment, as `Crew.status` returns them."""

from __future__ import annotations

from infini_run.crews.html_table import html_table
from infini_run.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from infini_run.crews.errors import CrewFailed
    from infini_run.crews.supervision.crew_supervisor import CrewSupervisor
    from infini_run.crews.supervision.supervised_worker import SupervisedWorker


@record
class WorkerStatus:
    """One worker, now.

    Args:
        rank: its rank.
        state: stopped, starting, ready, busy, stopping, or failed.
        pid, host: of its latest process; 0 and "" before its first process.
        restarts: how often it restarted.
        tasks: the number of its tasks, begun or waiting.
        text, done, of: its last report by ctx.status and ctx.progress.
        dropped: how many of its events the crew dropped, because nobody read them.
    """

    rank: int
    state: str
    pid: int
    host: str
    restarts: int
    tasks: int
    text: str
    done: float
    of: float
    dropped: int = 0


@record
class CrewStatus:
    """A crew, now.

    Args:
        phase: RUNNING, DRAINING, EXITED, or CLOSED.
        workers: by rank.
        waiting: the number of tasks that no worker has yet.
        failure: why the crew failed; None: it did not.
        problems: a sentence for each worker that did not end properly.
    """

    phase: str
    workers: tuple[WorkerStatus, ...]
    waiting: int
    failure: CrewFailed | None
    problems: tuple[str, ...]


def crew_status(supervisor: CrewSupervisor) -> CrewStatus:
    """Return the status of a supervisor's crew."""
    return CrewStatus(
        phase=supervisor.phase,
        workers=tuple(_worker_status(worker, supervisor.events.drops[worker.rank]) for worker in supervisor.workers),
        waiting=supervisor.waiting,
        failure=supervisor.failure,
        problems=tuple(supervisor.problems),
    )


def _worker_status(worker: SupervisedWorker, dropped: int) -> WorkerStatus:
    process = worker.process
    return WorkerStatus(
        rank=worker.rank,
        state=worker.state,
        pid=process.pid if process is not None else 0,
        host=process.host if process is not None else "",
        restarts=max(0, worker.starts - 1),
        tasks=len(worker.assigned) + len(worker.queued),
        text=worker.status,
        done=worker.progress[0],
        of=worker.progress[1],
        dropped=dropped,
    )


def table_of_workers(title: str, workers: Iterable[WorkerStatus]) -> str:
    """Return the state of each worker as a table in HTML."""
    rows = [(one.rank, one.host, one.pid or "", one.state, one.restarts, one.tasks, _reports(one)) for one in workers]
    return html_table(title, ("rank", "host", "pid", "state", "restarts", "tasks", "reports"), rows)


def _reports(worker: WorkerStatus) -> str:
    """Return a worker's last reports: its text, and how far it is."""
    return " ".join([worker.text, f"{worker.done:g} of {worker.of:g}" if worker.of else ""]).strip()
