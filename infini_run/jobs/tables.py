"""Statuses and schedulers as lines for people: `infini-job status`, `list`, `clusters`, and the last line of --wait.

The one rule: every text of a job, a rank, or a scheduler is made printable first.
"""

from __future__ import annotations

import time

from infini_run.errors import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from infini_run.jobs.scheduler import Facts, Kind, Scheduler
    from infini_run.jobs.status.job_status import Status

_OUTSIDE = 3  # lines of the scheduler's that are shown
_COMMAND = 40  # characters of one that are listed


def short_id(id_: str) -> str:
    """Return an id for people: of a process its number is enough."""
    return id_.partition("@")[0].partition(".")[0] if "@" in id_ else id_


def sentence(status: Status) -> str:
    """Return `FAILED exit 7 on node2, rank 5: rank 5 on node2 failed: exit code 7 (...)`."""
    return status.headline + (f": {status.reason}" if status.reason else "")


def statuses_text(found: Sequence[Status], *, is_long: bool) -> str:
    """Return a line per status; is_long: also each task, with what else is known."""
    rows = [row for status in found for row in (_rows(status) if is_long else [_row(status)])]
    if is_long:
        found = [one for status in found for one in (status, *status.tasks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for status, row in zip(found, rows, strict=True):
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True) if width)
        lines.append(printable(line.rstrip()))
        if is_long:
            lines += [f"  {printable(text)}" for text in _details(status)]
    return "\n".join(lines)


def _row(status: Status) -> tuple[str, ...]:
    from infini_run.jobs.submit import shown_command

    command = shown_command(status.command)
    if len(command) > _COMMAND:
        command = command[: _COMMAND - 3] + "..."
    span = _span(time.time() - status.since_s)  # since the last change of its state
    since = f"{span} ago" if status.is_final else f"for {span}"
    where = f"{status.scheduler} {short_id(status.id)}"
    return status.name, status.headline, since, where, status.shape, printable(status.title), command


def _rows(status: Status) -> list[tuple[str, ...]]:
    """Return the rows of an array, and of each of its tasks without what they have in common."""
    return [_row(status), *((*_row(task)[:4], "", "", "") for task in status.tasks)]


def _span(seconds: float) -> str:
    for unit, each_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= each_s:
            return f"{seconds / each_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def scheduler_lines(status: Status) -> list[str]:
    """Return the scheduler's own last lines on a job that ended badly, where no rank is to blame."""
    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.status.status_query import script_and_scheduler_lines
    from infini_run.report.last_lines import choose_lines

    status = next((task for task in status.tasks if task.task == status.task), status)
    if not status.is_final or status.rank >= 0 or status.state in ("COMPLETED", "CANCELLED", "LOST"):
        return []
    lines = [
        line for line in dict.fromkeys(script_and_scheduler_lines(JobDir(status.folder))) if line not in status.reason
    ]
    return [f"{status.scheduler}: {line}" for line in choose_lines(lines, _OUTSIDE)]


def _details(status: Status) -> list[str]:
    if status.tasks:  # each prints its own
        return []
    found = []
    if (status.is_final and status.reason) or status.state == "LOST":
        found.append(status.reason)
    found += scheduler_lines(status)
    if status.advice:
        found.append(f"{status.hold}: {status.advice}")
    if status.attempt > 0:
        found.append(f"run {status.attempt}, after {status.attempt} restart{'s' * (status.attempt > 1)}")
    if status.query_error:
        found.append(f"state unknown since then: {status.query_error}")
    return found


def facts_text(scheduler: Scheduler, facts: Facts) -> str:
    """Return what a scheduler is and has, or why it does not answer."""
    from infini_run.jobs.scheduler import Kind

    if facts.query_error:
        return printable(f"{scheduler.name} does not respond: {facts.query_error}")
    about = [f"{scheduler.name} {facts.version}"]
    about += [f"select/{facts.select}"] if facts.select else []
    about.append("GPUs as a resource" if facts.has_gres else "no GPUs as a resource")
    if scheduler.name == "slurm":
        about.append("accounting" if facts.has_accounting else "no accounting")
    if scheduler.name == "pbs":
        about.append("history" if facts.has_history else "no history")
    lines = [", ".join(about)]
    for pool in facts.pools:
        kinds = pool.kinds or (Kind(nodes=pool.nodes, cpus=pool.cpus_per_node, gpus=pool.gpus_per_node),)
        limit = f", up to {_span(pool.limit_s)}" if pool.limit_s else ""
        default = " (default)" if pool.is_default else ""
        lines.append(f"  {pool.name}{default}: {', '.join(map(_kind, kinds))}{limit}")
    return "\n".join(map(printable, lines))


def _kind(kind: Kind) -> str:
    """Return `2 nodes x 8 gpus (a100) x 64 cpus`."""
    types = ", ".join(f"{count} {name}" if len(kind.gpu_types) > 1 else name for name, count in kind.gpu_types)
    gpus = f"{kind.gpus} gpus" + (f" ({types})" if types else "")
    nodes = f"{kind.nodes} node{'s' * (kind.nodes != 1)}"
    return " x ".join([nodes, *([gpus] if kind.gpus else []), f"{kind.cpus} cpus"])
