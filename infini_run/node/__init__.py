"""One node's launch: its plan, which is made here, and its ranks, from their start to their end (launch.py).

The plan is in the package's own file, which every launch reads anyway.
"""

from __future__ import annotations

import sys

import infini_run.lean_os as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infini_run.options.launch_options import Options
    from infini_run.plan.model import FoundProgram, Plan, RankRange, SingleRank


def plan_node(
    options: Options,
    environ: Mapping[str, str],
    *,
    launch_id: str = "",
    cwd: str = "",
    may_use_terminal: bool = True,
    task: SingleRank | None = None,
    span: RankRange | None = None,
) -> Plan:
    """Find the program, inspect this machine, and plan the ranks to start here.

    Args:
        options: What the user asked for.
        environ: The environment of the ranks, to which the plan adds.
        launch_id: The launch's id. Empty: a new one.
        cwd: Where to look for a relative program. Empty: here.
        may_use_terminal: As for `make_plan`; so are task and span.

    Raises:
        UsageError, ProgramError, StartError: As `find_command`, `inspect_node` and `make_plan`.
    """
    from infini_run.plan.model import FoundProgram
    from infini_run.plan.planner import make_plan
    from infini_run.plan.program import (
        absolute_flag_path,
        error_folder,
        find_command,
        inspect_node,
        launch_folder,
        new_launch_id,
        unshared_streams,
    )
    from infini_run.record import replace

    programs: tuple[FoundProgram, ...] = ()
    try:
        for each in options.programs or (options,):
            command = find_command(
                each.program,
                {**environ, **dict(each.env)} if each.env else environ,
                module=each.module,
                no_python=each.no_python,
                cwd=each.cwd or cwd,
            )
            if each.preload:
                from infini_run.plan.held_program import check_held

                check_held(command, environ, f"--preload={','.join(each.preload)}")
            if "pydevd" in sys.modules:
                from infini_run.plan.debugger import attach_debugger

                command = attach_debugger(command)
            if each.logs:
                each = replace(each, logs=absolute_flag_path("log_dir", each.logs))
            port = each.master_port
            if not port:
                from infini_run.node.ports import free_port

                port = free_port()
            programs += (FoundProgram(options=each, command=command, master_port=port),)
        node, launch_id = inspect_node(options, environ), launch_id or new_launch_id()
        folder = "" if task else launch_folder(options, launch_id, environ)
        return make_plan(
            options,
            programs,
            (node,),
            launch_id=launch_id,
            environ=environ,
            folder=folder,
            error_dir="" if task else error_folder(options, folder),
            stdin_is_terminal=options.stdin != "none" and os.isatty(0),
            may_use_terminal=may_use_terminal,
            unshared=unshared_streams(),
            task=task,
            spans=() if span is None else (span,),
        )
    except BaseException:
        let_go_ports(programs)
        raise


def let_go_ports(programs: Sequence[FoundProgram]) -> None:
    """Give the ports that nobody asked for free for other launches. Safe twice.

    Args:
        programs: The programs of a launch that ended.
    """
    from infini_run.node.ports import let_go

    for program in programs:
        if not program.options.master_port:
            let_go(program.master_port)
