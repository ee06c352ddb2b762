"""The report of many nodes out of one of each. Pure."""

from __future__ import annotations

from infini_run.report import Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def join_reports(
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
) -> Report:
    """told_by: the nodes' reports in the order of their ranks, each with the time of its first failure by one clock.
    start_s, end_s: where none has told."""
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
        strays=tuple(stray for report in reports for stray in report.strays),
        stray_count=sum(report.stray_count for report in reports),
        stuck=tuple(stuck for report in reports for stuck in report.stuck),
        notices=(*notices, *(notice for report in reports for notice in report.notices)),
        looks=tuple(look for report in reports for look in report.looks),
        clocks=tuple(clock for report in reports for clock in report.clocks),
    )
