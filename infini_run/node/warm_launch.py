"""A NodeLaunch whose ranks are forks of the process of --preload, or are started cold if they cannot be.

When the core gets the ranks, they are children of the launcher (decision 66). So it treats them like ranks that it
starts.
"""

from __future__ import annotations

import os
import time

from infini_run.core.c_structs import Event
from infini_run.core.group import NO_CGROUP
from infini_run.errors import StartError
from infini_run.node.forked_stdio import open_stdio
from infini_run.node.launch import NodeLaunch
from infini_run.node.warm_zygote import CannotFork
from infini_run.report.report import PreloadUse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from infini_run.core.c_structs import SpawnSpec
    from infini_run.display.observers import Observers
    from infini_run.display.relay import ObserverRelay
    from infini_run.node.warm_zygote import Fork, WarmZygote


class WarmLaunch(NodeLaunch):
    """The ranks of one attempt. The owner of `zygote` closes it; the other arguments are those of NodeLaunch."""

    def __init__(self, *args: Any, zygote: WarmZygote, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._zygote = zygote
        self._fork: Fork | None = None
        self._ends: list[int] = []  # of the ranks' pipes, until the core has copies
        self._began_s = 0.0  # to fork
        self._pids_s = 0.0  # when the forks were known
        self._forked_s: float | None = None
        self._failed_s: float | None = None  # the first of its ranks, by time.monotonic()
        self._early: list[Event] = []  # of a launch that was stopped before it had ranks

    def start(self) -> None:
        """Start the ranks as NodeLaunch.start does, after the imports. Raises UsageError: a module cannot be
        imported."""
        if self.options.live == "on" and self._head is None and not self._zygote.is_settled:
            names = ", ".join(self.options.preload)
            self.print_lines(f"importing {names}")  # the table comes with the ranks
        signalled = self._zygote.prepare()
        if signalled is not None:
            self._end_before_start(signalled)
            return
        if self._zygote.can_fork:
            self._debug = NO_CGROUP  # a fork is not born into one
        try:
            super().start()
            if self._fork is not None and self._started == len(self.plan.workers):
                self._fork.open_gate()
                self._forked_s = time.monotonic()
            if self.options.report or self._head is not None:
                self._record_use()
            if self._observers is not None:
                self._add_spans(self._observers)
        finally:
            self._drop_fork()

    def _record_use(self) -> None:
        zygote = self._zygote
        if zygote.cold_because:
            self.outcome.add_notice(f"ranks start cold: {zygote.cold_because}")
        use = PreloadUse(
            host=self.plan.nodes[0].host,
            modules=zygote.modules,
            wall_s=zygote.wall_s,
            cpu_s=zygote.cpu_s,
            fork_s=0.0 if self._forked_s is None else self._forked_s - self._began_s,
            cold_because=zygote.cold_because,
        )
        self.outcome.record_preload(use)

    def _add_spans(self, observers: Observers | ObserverRelay) -> None:
        """Add the imports, if they were made for this attempt, and the fork to the trace."""
        from infini_run.display.trace_format import IMPORTS

        begin_ns, end_ns = self._zygote.take_import_times()
        if end_ns:
            observers.add_span(IMPORTS, begin_ns, end_ns, ", ".join(self._zygote.modules))
        if self._pids_s:
            observers.add_span("fork", int(self._began_s * 1e9), int(self._pids_s * 1e9))

    def _end_before_start(self, signalled: Event) -> None:
        from infini_run.report.text import signal_name

        self._ended = True
        events = [signalled, Event(kind="ended", time_ns=time.monotonic_ns())]
        for event in events:
            self.outcome.record_event(event)
        self.print_lines(f"{signal_name(signalled.signal)}: stopped during the imports of --preload")
        self._early = events

    @property
    def ended(self) -> bool:
        return super().ended and not self._early

    def _handle_event(self, event: Event) -> None:
        if event.is_failure and self._failed_s is None:
            self._failed_s = event.time_ns / 1e9
        super()._handle_event(event)

    @property
    def lived_s(self) -> float | None:
        """Seconds from the fork to the first failure; None: there are no forks. Stopping the other ranks may take
        long."""
        return None if self._forked_s is None else (self._failed_s or time.monotonic()) - self._forked_s

    def poll(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> list[Event]:
        if self._early:
            events, self._early = self._early, []
            return events
        return super().poll(timeout_s, also)

    def specs(self) -> list[SpawnSpec]:
        specs = super().specs()
        if not self._zygote.can_fork:
            return specs
        try:
            self._fork_ranks(specs)
        except CannotFork as error:
            self._drop_fork()
            self._zygote.fall_back(error)
            return super().specs()
        return specs

    def _fork_ranks(self, specs: Sequence[SpawnSpec]) -> None:
        self._began_s = time.monotonic()
        fork = self._fork = self._zygote.begin_fork(len(specs), self.setup.base_env(self.plan))
        same = len(self._zygote.argv)
        for spec in specs:
            theirs = self._open_stdio(spec)
            try:
                fork.add(spec.env.split(b"\0"), spec.argv[same:], theirs, foreground=spec.foreground)
            finally:
                for fd in theirs:
                    os.close(fd)
            spec.env = b""
        for spec, pid in zip(specs, fork.end(), strict=True):
            spec.pid = pid
        self._pids_s = time.monotonic()

    def _open_stdio(self, spec: SpawnSpec) -> list[int]:
        """Return the descriptors that the rank gets. Raises StartError: no descriptor is left."""
        made: list[int] = []
        try:
            theirs, ours = open_stdio(spec, (0, 1, 2), (0, *self._console), made)
        except OSError as error:
            for fd in made:
                os.close(fd)
            raise StartError(os.strerror(error.errno or 0), "opening pipes", error.errno or 0, spec.rank) from None
        self._ends += ours
        return theirs

    def _drop_fork(self) -> None:
        """Forget the fork. Ranks end if their gate was not opened."""
        fork, self._fork = self._fork, None
        if fork is not None:
            fork.close()
        while self._ends:
            os.close(self._ends.pop())
