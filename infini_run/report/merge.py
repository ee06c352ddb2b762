"""The report of many nodes, made of one report for each node. Pure."""

from __future__ import annotations

from infini_run.report.exit import Exit
from infini_run.report.report import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from infini_run.errors import InfiniRunError
    from infini_run.report.hang_snapshot import HangSnapshot
    from infini_run.report.pace import SlowRank


def merge_reports(
    node_reports: Sequence[tuple[Report, float]],
    *,
    launch_id: str,
    run_id: str,
    host: str,
    world_size: int,
    start_s: float,
    end_s: float,
    received_signal: int,
    forwarded_signals: Collection[int] = (),
    notices: Sequence[str],
    silent: int = 0,
    error: InfiniRunError | None = None,
    lost: Sequence[str] = (),
    slow: tuple[SlowRank, ...] = (),
    ended_by: str = "",
    unanswered: tuple[str, ...] = (),
) -> Report:
    """Merge the reports of the nodes of one launch.

    Args:
        node_reports: The reports in the order of their ranks, each with the time of its first failure by one clock. A
            node that was lost has the report that `lost_report` makes.
        launch_id: The launch's id.
        run_id: The id that the user gave (`--rdzv_id`); empty: none.
        host: The name of the head's host.
        world_size: How many ranks there were to be.
        start_s: When the launch started, if no node has reported: seconds since the epoch.
        end_s: When it ended, if no node has reported.
        received_signal: The signal from outside that ended the launch; 0: none did.
        forwarded_signals: The signals that the head has passed on to the ranks.
        notices: The head's own notices.
        silent: How many nodes have sent no report.
        error: Why the job ended, if no rank was the cause. None: a rank was, or nothing failed.
        lost: The nodes that were lost, each in a sentence.
        slow: The ranks that were slow.
        ended_by: The program with --ends_job whose good end stopped the others. Empty: none.
        unanswered: The hosts that did not answer at the last hang.
    """
    reports = [report for report, _ in node_reports]
    failed = [
        (failed_s, at) for at, (report, failed_s) in enumerate(node_reports) if report.first_failure is not None
    ]
    forwarded = {*forwarded_signals, *(number for report in reports for number in report.forwarded_signals)}
    first = reports[min(failed)[1]].first_failure if failed else None
    return Report(
        launch_id=launch_id,
        run_id=run_id,
        host=host,
        world_size=world_size,
        start_s=min((report.start_s for report in reports), default=start_s),
        end_s=max((report.end_s for report in reports), default=end_s),
        exits=tuple(sorted((exit_ for report in reports for exit_ in report.exits), key=lambda exit_: exit_.rank)),
        first_failure=first,
        received_signal=received_signal,
        forwarded_signals=tuple(sorted(forwarded)),
        silent=silent,
        leftover_processes=tuple(process for report in reports for process in report.leftover_processes),
        leftover_count=sum(report.leftover_count for report in reports),
        stuck=tuple(stuck for report in reports for stuck in report.stuck),
        notices=(*notices, *(notice for report in reports for notice in report.notices)),
        snapshots=_snapshots_of(reports),
        clocks=tuple(clock for report in reports for clock in report.clocks),
        preload=tuple(use for report in reports for use in report.preload),
        error="" if error is None else str(error),
        error_code=0 if error is None else error.exit_code,
        lost=tuple(lost),
        slow=slow,
        ended_by=ended_by,
        unanswered=unanswered,
    )


def _snapshots_of(reports: Sequence[Report]) -> tuple[HangSnapshot, ...]:
    if not any(report.snapshots for report in reports):
        return ()
    from infini_run.report.hang_groups import count_back

    return tuple(snapshot for report in reports for snapshot in count_back(report.snapshots))


def lost_report(
    host: str,
    ranks: Mapping[int, tuple[int, str, int]],
    pids: Mapping[int, int],
    progress: Mapping[int, tuple[int, float]],
    *,
    last_received_s: float,
    is_first_failure: bool,
) -> Report:
    """Make the report of a node that can no longer send it.

    Args:
        host: The node's name.
        ranks: Its ranks, each with its local rank, its program, and its number there.
        pids: The pids of the ranks that it had reported as started.
        progress: The PROGRESS= of ranks as far as it had come, each with its time: seconds since the epoch.
        last_received_s: When the last frame came from it: seconds since the epoch.
        is_first_failure: Nothing had failed before that.
    """
    exits = tuple(
        Exit(
            rank=rank,
            local_rank=local_rank,
            program=program,
            program_rank=program_rank,
            host=host,
            pid=pids.get(rank),
            end_s=last_received_s,
            stopped=not is_first_failure,
            lost=True,
            progress=progress[rank][0] if rank in progress else None,
            progress_s=progress[rank][1] if rank in progress else None,
        )
        for rank, (local_rank, program, program_rank) in ranks.items()
    )
    return Report(
        launch_id="",
        run_id="",
        host=host,
        world_size=0,
        start_s=last_received_s,
        end_s=last_received_s,
        exits=exits,
        first_failure=exits[0] if exits and is_first_failure else None,
    )
