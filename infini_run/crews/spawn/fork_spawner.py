"""Workers by fork from a zygote, a process that has imported once what takes long: the spawner.

Several threads may make launches over one zygote.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock
from warnings import warn

from infini_run.crews.callables import path_of_workers
from infini_run.crews.spawn.exec_spawner import ExecSpawner
from infini_run.crews.spawn.worker_group import ExecProcess, WorkerGroup
from infini_run.crews.spawn.zygote_client import ForkRefused, ReadsRank, ZygoteProcess, ZygoteProxy
from infini_run.errors import UsageError
from infini_run.record import replace
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from infini_run.crews.spawn.spawner import Run
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Plan

_START_S = 60.0
_SHARED = (MARKER_VARIABLE, "OMP_NUM_THREADS")


class ForkSpawner(ExecSpawner):
    """Starts workers as forks of one process that has imported `preload`, in milliseconds each.

    If a fork of that process is unsafe, workers start as an ExecSpawner's do; a RuntimeWarning gives the reason,
    once.

    Args:
        preload: the names of the modules.
        start_timeout_s: how long the imports may take; None: no limit.
        is_silent: do not warn: nobody has asked for this preload.
        stays: several launches will follow, so the zygote prepares for the next one.
        path: sys.path at the imports; None: this process's.
        argv: sys.argv at the imports; None: this process's.
        given: an ExecSpawner's arguments.

    Raises:
        UsageError: the caller also gives bind=.
    """

    def __init__(
        self,
        preload: Sequence[str],
        *,
        start_timeout_s: float | None = _START_S,
        is_silent: bool = False,
        stays: bool = False,
        path: Sequence[str] | None = None,
        argv: Sequence[str] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        if self.options.bind != "none":
            raise UsageError(
                "bind=: conflicts with preload=, whose imports stay in the memory of one NUMA node; drop one of them"
            )
        if self.options.log_dir:
            self.options = replace(self.options, log_dir=os.path.abspath(self.options.log_dir))
        self._preload = tuple(preload)
        self._start_timeout_s = start_timeout_s
        self._is_silent = is_silent
        self._stays = stays
        self._path, self._argv = path, argv
        self._zygote: ZygoteProcess | None = None
        self._lock = RLock()
        self.refusal = ""  # why workers are not forked

    def open(self) -> None:
        """Start the zygote and wait for its imports; the first `start` does so otherwise. Raises UsageError: a module
        does not import, or reads its rank meanwhile, unless nobody has named it: then workers start afresh. Raises
        StartError: the zygote ended, or took too long."""
        with self._lock:
            if self._zygote is None and not self.refusal:
                zygote = ZygoteProcess(self._zygote_environ(), self._cwd)
                try:
                    path = list(path_of_workers() if self._path is None else self._path)
                    argv = list(sys.argv if self._argv is None else self._argv)
                    hello = self._preload, self._rank_variables(), path, argv, self._stays
                    zygote.prepare(hello, self._start_timeout_s)
                except ReadsRank as refused:
                    zygote.close()
                    if not self._is_silent:
                        raise
                    self.refusal = str(refused)
                except BaseException:
                    zygote.close()
                    raise
                else:
                    self._zygote = zygote

    def _rank_variables(self) -> list[str]:
        """Return what a plan sets for a rank or an attempt. The launch marker stays, because a search finds all
        processes by it; the number of threads is the same for all."""
        plan = self._plan([0], 0)
        return [name for name, _ in (*plan.env, *plan.workers[0].env) if name not in _SHARED]

    def _zygote_environ(self) -> dict[str, str]:
        """Return the environment of the zygote. OpenMP reads its number of threads when it loads, and the workers' is
        known."""
        plan = self._plan([0], 0)
        threads = dict(plan.env).get("OMP_NUM_THREADS")
        return dict(self.environ) | ({"OMP_NUM_THREADS": threads} if threads else {})

    def _start_group(self, plan: Plan, started: list[ExecProcess]) -> WorkerGroup:
        self.open()
        zygote = self._zygote
        if zygote is None:
            return super()._start_group(plan, started)
        try:
            return _ForkGroup(zygote, plan, self.options, self.environ, self._cwd, started)
        except ForkRefused as refused:
            with self._lock:
                self.refusal = str(refused)
                self._zygote = None
            zygote.close()
            if not self._is_silent:
                warn(f"starting workers as new processes instead of forks: {refused}", RuntimeWarning, stacklevel=2)
        return super()._start_group(plan, started)

    def close(self) -> None:
        with self._lock:
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()
        super().close()

    def after_fork_in_child(self) -> None:
        self._lock = RLock()
        if self._zygote is not None:
            self._zygote.after_fork_in_child()


class _ForkGroup(WorkerGroup):
    def __init__(self, zygote: ZygoteProcess, *given: Any) -> None:
        self._zygote = zygote
        super().__init__(*given)

    def _make_run(
        self, plan: Plan, options: Options, environ: Mapping[str, str], cwd: str | None, stdins: Mapping[int, int]
    ) -> Run:
        return ZygoteProxy(self._zygote, plan, options, environ, cwd, stdins)

    def last_output(self, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        assert isinstance(self.run, ZygoteProxy)
        return self.run.last_output(rank)
