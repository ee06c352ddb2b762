"""The report of many nodes out of one of each. Pure."""

from __future__ import annotations

from infini_run.report.report import Exit, Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.errors import InfiniRunError


def merge_reports(
    told_by: Sequence[tuple[Report, float]],
    *,
    launch_id: str,
    run_id: str,
    host: str,
    world_size: int,
    start_s: float,
    end_s: float,
    told: int,
    notices: Sequence[str],
    silent: int = 0,
    error: InfiniRunError | None = None,
    lost: Sequence[str] = (),
) -> Report:
    """told_by: the nodes' reports in the order of their ranks, each with the time of its first failure by one clock;
    of a node that was lost one of our own making (lost_report). start_s, end_s: where none has told. silent: how many
    nodes have not. error: why the job ended, where that was no rank; lost: nodes that were."""
    reports = [report for report, _ in told_by]
    failed = [(failed_s, at) for at, (report, failed_s) in enumerate(told_by) if report.first_failure is not None]
    first = reports[min(failed)[1]].first_failure if failed else None
    return Report(
        launch_id=launch_id,
        run_id=run_id,
        host=host,
        world_size=world_size,
        start_s=min((report.start_s for report in reports), default=start_s),
        end_s=max((report.end_s for report in reports), default=end_s),
        exits=tuple(exit_ for report in reports for exit_ in report.exits),
        first_failure=first,
        told=told,
        silent=silent,
        strays=tuple(stray for report in reports for stray in report.strays),
        stray_count=sum(report.stray_count for report in reports),
        stuck=tuple(stuck for report in reports for stuck in report.stuck),
        notices=(*notices, *(notice for report in reports for notice in report.notices)),
        looks=tuple(look for report in reports for look in report.looks),
        clocks=tuple(clock for report in reports for clock in report.clocks),
        error="" if error is None else str(error),
        error_code=0 if error is None else error.exit_code,
        lost=tuple(lost),
    )


def lost_report(host: str, ranks: range, pids: Mapping[int, int], *, heard_s: float, is_blamed: bool) -> Report:
    """What there is to say of a node that cannot say it. pids: of ranks, as far as it has told; heard_s: when it was
    last heard of; is_blamed: nothing had gone wrong before that."""
    exits = tuple(
        Exit(
            rank=rank,
            local_rank=rank - ranks.start,
            host=host,
            pid=pids.get(rank),
            end_s=heard_s,
            stopped=not is_blamed,
            lost=True,
        )
        for rank in ranks
    )
    return Report(
        launch_id="",
        run_id="",
        host=host,
        world_size=0,
        start_s=heard_s,
        end_s=heard_s,
        exits=exits,
        first_failure=exits[0] if exits and is_blamed else None,
    )
