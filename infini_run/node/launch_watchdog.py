"""The watchdog of a launch, which acts on what it finds: for the report, the user, and the head.

Imported where a deadline was asked for, or once something is to be looked at.
"""

from __future__ import annotations

import time

from infini_run.plan.torch_recorder import recorder_prefixes
from infini_run.watchdog.watchdog import Watchdog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Protocol

    from infini_run.core.c_structs import Event, ProcessState
    from infini_run.core.group import Group
    from infini_run.node.launch_head import LaunchHead
    from infini_run.node.outcome import Outcome
    from infini_run.node.resources import LaunchResources
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan
    from infini_run.watchdog.watchdog import HangFinding

    class WatchedLaunch(Protocol):
        """A NodeLaunch, as far as its ranks are watched."""

        plan: Plan
        options: Options
        environ: Mapping[str, str]
        entry: ProcessState | None
        resources: LaunchResources

        @property
        def group(self) -> Group: ...
        @property
        def outcome(self) -> Outcome: ...
        @property
        def ended(self) -> bool: ...
        def notice(self, text: str) -> None: ...
        def print_lines(self, *lines: str, names_host: bool) -> None: ...
        def observe(self, event: Event) -> None: ...
        def ends_program(self, rank: int | None, time_ns: int) -> bool: ...
        def stop(self) -> None: ...


class LaunchWatchdog(Watchdog):
    """The watchdog of a launch. In place of `run_due`, call `handle_due`.

    Args:
        launch: The launch, which has a group.
        head: It decides about a hang, and lets other nodes look at the same time. None: there is no other node.
        running: A `started` event per rank that already runs, for a late watchdog.
    """

    def __init__(self, launch: WatchedLaunch, head: LaunchHead | None, running: Iterable[Event]) -> None:
        super().__init__(
            launch.plan,
            launch.options,
            launch.group,
            entry=launch.entry,
            environ=launch.environ,
            folder=launch.resources.log_folder,
            recorder=recorder_prefixes(launch.plan.common_environ(launch.environ)),
        )
        self._launch = launch
        self._head = head
        self.on_look = None if head is None else head.on_look
        for event in running:
            self.on_event(event)

    def handle_due(self) -> list[Event]:
        """Do what is due, and act on what was found. Return the events of that."""
        finding = None if self._launch.ended else self.run_due()
        events = [] if finding is None else self._handle_finding(finding)
        if self.must_stop:
            self._launch.stop()
        return events

    def _handle_finding(self, finding: HangFinding) -> list[Event]:
        launch, head = self._launch, self._head
        if finding.is_before_stop or finding.is_before_restart or finding.is_cut_short:
            self._keep(finding)
            if finding.is_before_stop and head is not None:
                head.on_looked()
        elif head is not None and not any(snapshot.kind == "late" for snapshot in finding.snapshots):
            from infini_run.report.hang_groups import with_exited

            launch.outcome.keep_snapshots(finding.snapshots)
            head.on_hang(with_exited(finding.snapshots, launch.outcome.exits()), finding.ranks_to_stop)
        else:
            lines = launch.outcome.record_snapshots(finding.snapshots, finding.ranks_to_stop)
            launch.print_lines(*lines, names_host=True)
            if finding.problem:
                launch.notice(finding.problem)
            if finding.ranks_to_stop:
                self._stop_ranks()
            for event in finding.events:
                launch.observe(event)
        return finding.events

    def _stop_ranks(self) -> None:
        """Stop all ranks, or those of one program. A stop of all nodes waits for the others: they look first."""
        launch = self._launch
        if launch.ends_program(launch.outcome.first, time.monotonic_ns()):
            return
        if self._head is None or not self.look_before_stop(time.monotonic(), waits_for_head=True):
            launch.stop()

    def _keep(self, finding: HangFinding) -> None:
        """Keep what was seen for the report: the ranks stop for another reason, or have stopped."""
        self._launch.outcome.keep_snapshots(finding.snapshots)
        if finding.problem:
            self._launch.notice(finding.problem)

    def close(self) -> None:
        """Keep what a look before a stop has seen so far, then kill and reap every py-spy."""
        unfinished = self.unfinished()
        if unfinished is not None:
            self._keep(unfinished)
        super().close()
