"""The life of a job's ranks, run by run: from their reports; of one that runs, as far as its directory knows."""

from __future__ import annotations

import os

from infini_run.display.timeline import Bar, read_timeline
from infini_run.errors import InfiniRunError, UsageError
from infini_run.record import record
from infini_run.system.secure_files import open_regular
from infini_run.value_types import MOST_RANKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infini_run.jobs.folder.job_dir import JobDir
    from infini_run.jobs.folder.records import Phase


@record
class RunTimeline:
    """The timeline of one run.

    Args:
        attempt: its number.
        state: its phase, or its end.
        nodes: hosts, in the order of their node ranks.
        nproc: ranks on each; 0: unknown.
        bars: one per rank; of a rank that the launcher restarted, one more per first failure.
        failure: the first, in a sentence.
        is_whole: it has left its report; else all that is known is that they run, or ran.
    """

    attempt: int
    state: str
    nodes: tuple[str, ...]
    nproc: int
    bars: tuple[Bar, ...]
    failure: str
    is_whole: bool

    def to_json(self) -> dict[str, Any]:
        ranks = [vars(bar) for bar in self.bars]
        return {**{name: item for name, item in vars(self).items() if name != "bars"}, "ranks": ranks}


def read_timelines(folder: JobDir) -> list[RunTimeline]:
    """Return all of its runs, in their order. Raises InfiniRunError if infini-job did not write a file."""
    count = folder.attempts()
    return [_read(folder, number, is_last=number == count - 1) for number in range(count)]


def _read(folder: JobDir, number: int, is_last: bool) -> RunTimeline:
    phase = folder.phase(number)
    bars = _reported(folder.file(f"{number}/report.json"))
    ending = folder.result() if is_last else None
    return RunTimeline(
        attempt=number,
        state=ending.state if ending is not None else phase.state if phase is not None else "",
        nodes=phase.nodes if phase else (),
        nproc=phase.nproc if phase else 0,
        bars=bars if bars is not None else _going(phase, ending.end_s if ending else 0.0, is_last) if phase else (),
        failure=str(folder.failure(number).get("what", "")),
        is_whole=bars is not None,
    )


def _reported(path: str) -> tuple[Bar, ...] | None:
    """Return the bars of a report, or None without one (yet)."""
    try:
        os.close(open_regular(path, follows_links=True))
        return read_timeline([path]).bars
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfiniRunError(f"{path} cannot be read: {error.strerror}") from None
    except UsageError as error:
        raise InfiniRunError(f"{path}: not as infini-job wrote it: {error}") from None


def _going(phase: Phase, end_s: float, is_last: bool) -> tuple[Bar, ...]:
    """Return bars without a report: the ranks began together, and still run, or have an unknown end."""
    if not phase.begun_s:
        return ()
    kind = "running" if is_last and not end_s else "unknown"
    if len(phase.nodes) * phase.nproc > MOST_RANKS:  # no launch has that many ranks
        return ()
    hosts = [host for host in phase.nodes for _ in range(phase.nproc)]
    end_s = end_s or (phase.since_s if kind == "unknown" else 0.0)
    return tuple(
        Bar(rank=rank, host=host, start_s=phase.begun_s, end_s=end_s, kind=kind) for rank, host in enumerate(hosts)
    )
