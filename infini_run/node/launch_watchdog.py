"""The watchdog of a launch: how it is made, and what follows from its findings for report, user, and head.

Imported where a deadline was asked for, or once something is to be looked at.
"""

from __future__ import annotations

from infini_run.plan.torch_recorder import recorder_prefixes
from infini_run.watchdog.watchdog import Watchdog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Protocol

    from infini_run.core.group import Event, Group, ProcessState
    from infini_run.node.launch_head import LaunchHead
    from infini_run.node.outcome import Outcome
    from infini_run.node.resources import LaunchResources
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.watchdog.watchdog import HangFinding

    class WatchedLaunch(Protocol):
        """A NodeLaunch, as far as a watchdog needs to know it."""

        plan: Plan
        options: Options
        environ: Mapping[str, str]
        entry: ProcessState | None
        resources: LaunchResources

        @property
        def group(self) -> Group: ...


def make_watchdog(launch: WatchedLaunch, head: LaunchHead | None, running: Iterable[Event]) -> Watchdog:
    """Return the watchdog of a launch.

    Args:
        launch: The launch, which has a group.
        head: It lets other nodes look at the same time. None: there is no other node.
        running: A `started` event per rank that already runs, for a late watchdog.
    """
    watchdog = Watchdog(
        launch.plan,
        launch.options,
        launch.group,
        entry=launch.entry,
        environ=launch.environ,
        folder=launch.resources.log_folder,
        recorder=recorder_prefixes(launch.plan.common_environ(launch.environ)),
    )
    watchdog.on_look = None if head is None else head.on_look
    for event in running:
        watchdog.on_event(event)
    return watchdog


def record_finding(
    finding: HangFinding,
    outcome: Outcome,
    head: LaunchHead | None,
    *,
    print_lines: Callable[[Sequence[str]], None],
    notice: Callable[[str], None],
) -> bool:
    """Record a finding, and report it to the head or to the user.

    Args:
        finding: What the watchdog has found.
        outcome: Of the launch.
        head: It decides about a hang. None: this node does.
        print_lines: Prints a line, with those that belong to it.
        notice: Prints a sentence, which the report has, too.

    Returns:
        Whether this node acts on the finding: it stops the ranks, and its observers get the events.
    """
    if finding.is_before_stop or finding.is_before_restart or finding.is_cut_short:
        keep_finding(finding, outcome, notice)
        if finding.is_before_stop and head is not None:
            head.on_looked()
        return False
    if head is not None and not any(snapshot.kind == "late" for snapshot in finding.snapshots):
        from infini_run.report.hang_groups import with_exited

        outcome.keep_snapshots(finding.snapshots)
        head.on_hang(with_exited(finding.snapshots, outcome.exits()), finding.ranks_to_stop)
        return False
    print_lines(outcome.record_snapshots(finding.snapshots, finding.ranks_to_stop))
    if finding.problem:
        notice(finding.problem)
    return True


def keep_finding(finding: HangFinding, outcome: Outcome, notice: Callable[[str], None]) -> None:
    """Keep what was seen for the report: the job, or a program, stops for another reason, or has stopped."""
    outcome.keep_snapshots(finding.snapshots)
    if finding.problem:
        notice(finding.problem)
