"""What the core gets of a launch: the group's configuration, and a spec per rank, in its bytes and descriptors.

On the path of every launch, and the one place whose cost counts per rank: what ranks have alike is encoded once.
"""

from __future__ import annotations

import infini_run.lean_os as os
from infini_run.core.c_structs import INHERIT, PIPE, TO_CONSOLE, TO_LOG, UNLABELLED, SpawnSpec
from infini_run.core.group import GUARD, Group, debug_flags, is_main_thread
from infini_run.plan.model import LABELLED, about_launch, control_address
from infini_run.value_types import MARKER_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from infini_run.core.c_structs import FoldLabel, ProcessState
    from infini_run.node.guard_lease import GuardLease
    from infini_run.node.resources import LaunchResources
    from infini_run.options.launch_options import Options
    from infini_run.plan.model import Output, Plan

_STDIN = {"inherit": INHERIT, "pipe": PIPE}


class GroupSetup:
    """Makes the group of a launch, and the specs of its ranks, for their start and each later one.

    Args:
        options: What the user asked for.
        environ: The environment of the launcher, to which the plan adds.
        entry: The state of the process at its start, if it belongs to the launch. None: to a host program.
        cwd: Where the ranks start, unless the plan says more. None: the working directory.
        stdins: Descriptors for the stdin of some ranks, by rank. They stay the caller's.
        has_head: A head of several nodes decides about the job, and has the terminal.
        is_last: The process ends with the launch.
        lease: The guard kills the ranks at its end. None: there is no lease.
    """

    def __init__(
        self,
        options: Options,
        environ: Mapping[str, str],
        *,
        entry: ProcessState | None,
        cwd: str | None,
        stdins: Mapping[int, int],
        has_head: bool,
        is_last: bool,
        lease: GuardLease | None,
    ) -> None:
        self._options = options
        self._environ = environ
        self._entry = entry
        self._cwd = cwd
        self._stdins = stdins
        self._has_head = has_head
        self.is_last = is_last
        self._lease = lease
        self._argvs: dict[tuple[str, ...], list[bytes]] = {}
        self._words: dict[str, bytes] = {}

    def group(
        self, plan: Plan, resources: LaunchResources, console: tuple[int, int], *, has_sockets: bool, debug: int
    ) -> Group:
        """Return the group, without workers so far.

        Args:
            plan: The plan.
            resources: The launch's folder, and its control socket if that outlives the ranks.
            console: The descriptors of the launcher's stdout and stderr.
            has_sockets: The folder takes sockets.
            debug: Flags for the core, beside those of the environment.

        Raises:
            StartError: A limit was hit.
        """
        options, entry = self._options, self._entry
        has_console = any(o.piped and o.console for w in plan.workers for o in (w.stdout, w.stderr))
        is_folded = has_console and options.console == "fold"
        return Group(
            len(plan.workers),
            mark=os.fsencode(f"{MARKER_VARIABLE}={plan.launch_id}"),
            grace_s=options.grace_s,
            signal_grace_s=options.signal_grace_s,
            stop_signal=options.stop_signal,
            stop_scope=options.stop_scope,
            console=console if has_console else (-1, -1),
            stays=options.restart_scope == "program",
            message_fd=console[1],
            stdin_fd=0 if any(worker.stdin == "pipe" for worker in plan.workers) else -1,
            guard=GUARD,
            folder=os.fsencode(resources.folder),
            control=os.fsencode(control_address(plan.folder if has_sockets else "")),
            control_fd=resources.control_fd,
            about=about_launch(plan, options, self._environ, resources.start_s),
            entry=entry,
            is_last=self.is_last,
            suspend_as_event=self._has_head,
            shares_terminal=entry is not None and not self._has_head,
            timestamps=options.timestamps,
            fold_label=self._fold_label(console) if is_folded else None,
            first_rank=plan.workers[0].rank,
            debug=debug_flags(self._environ) | debug,
            **self._lease_terms(),
        )

    def _lease_terms(self) -> dict[str, Any]:
        lease = self._lease
        if lease is None:
            return {}
        return {
            "lease_s": lease.length_s,
            "lease_since_s": lease.since_s,
            "last_word": lease.last_word,
            "link_fd": lease.link_fd,
        }

    def _is_colored(self, console: tuple[int, int]) -> bool:
        from infini_run.plan.labels import is_colored

        return is_colored(self._options.color, console, self._environ)

    def _fold_label(self, console: tuple[int, int]) -> FoldLabel:
        from infini_run.plan.labels import fold_label

        return fold_label(colored=self._is_colored(console))

    def base_env(self, plan: Plan) -> list[bytes]:
        """Return the variables that all ranks have alike, each as `NAME=value`."""
        return [os.fsencode(f"{name}={value}") for name, value in plan.common_environ(self._environ).items()]

    def specs(
        self, plan: Plan, resources: LaunchResources, console: tuple[int, int], is_held: Callable[[str], bool] | None
    ) -> list[SpawnSpec]:
        """Return a spec per rank, in the order of the plan. Its variables are those beyond `base_env`.

        Args:
            plan: The plan.
            resources: The descriptors that are open for the ranks, and stay open until they have theirs.
            console: The descriptors of the launcher's stdout and stderr.
            is_held: Returns whether a program, by its name, waits for others. None: none does.
        """
        label = self._labeler(console) if self._options.console in LABELLED else None
        owns_process = self._entry is not None
        may_have_terminal = owns_process and len(plan.workers) == 1
        dies_with_us = owns_process or is_main_thread()
        stdout = stderr = None
        out = err = (0, 0)
        specs = []
        for worker in plan.workers:
            env = os.fsencode("\0".join(map("=".join, worker.env)))
            spec = SpawnSpec(worker.rank, self._encoded(worker.file), self._argv(worker.argv), env)
            cwd = worker.cwd or self._cwd
            spec.cwd = self._encoded(cwd) if cwd else None
            spec.notify = os.fsencode(worker.notify)
            if worker.cpu_binding is not None:
                spec.cpus, spec.nodes = worker.cpu_binding.cpus, worker.cpu_binding.nodes
            spec.held = is_held is not None and is_held(worker.program)
            # by which thread a held one starts is unknown
            spec.dies_with_us = owns_process or (dies_with_us and not spec.held)
            spec.foreground = may_have_terminal and worker.stdin == "inherit" and os.isatty(0)
            if worker.stdout is not stdout:  # few differ: the plan has one for many ranks
                stdout, out = worker.stdout, _way_of(worker.stdout, resources.null)
            if worker.stderr is not stderr:
                stderr, err = worker.stderr, _way_of(worker.stderr, resources.null)
            stdin = self._stdins.get(worker.rank, _STDIN.get(worker.stdin, resources.null))
            spec.stdio = [stdin, out[0], err[0]]
            spec.output = [out[1], err[1]]
            if label is not None:
                spec.label = label(worker.label)
            spec.log_fd = resources.logs.get(worker.rank, -1)
            spec.error_log_fd = resources.error_logs.get(worker.rank, -1)
            specs.append(spec)
        return specs

    def _labeler(self, console: tuple[int, int]) -> Callable[[str], FoldLabel]:
        from infini_run.plan.labels import label

        colored = self._is_colored(console)
        return lambda name: label(name, colored=colored)

    def _encoded(self, word: str) -> bytes:
        found = self._words.get(word)
        if found is None:
            found = self._words[word] = os.fsencode(word)
        return found

    def _argv(self, argv: tuple[str, ...]) -> list[bytes]:
        """Return the same list for the same arguments: the core copies it once."""
        if argv not in self._argvs:
            self._argvs[argv] = [os.fsencode(word) for word in argv]
        return self._argvs[argv]


def _way_of(output: Output, null: int) -> tuple[int, int]:
    """Return where a stream goes, and what the core does with it."""
    alone = INHERIT if output.console else null
    flags = (TO_CONSOLE if output.console else 0) | (TO_LOG if output.log else 0)
    flags |= UNLABELLED if output.unlabelled else 0
    return PIPE if output.piped else alone, flags
