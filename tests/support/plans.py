"""A plan of one program, made of flags."""

from __future__ import annotations

from infini_run.options.options import resolve
from infini_run.plan.model import Command, FoundProgram, Node
from infini_run.plan.planner import make_plan

COMMAND = Command(file="/bin/prog", argv=("prog", "--lr=1"))


def plan_of(
    *flags, environ=None, folder="", error_dir="", cpus=8, devices=(), nproc=None, is_terminal=False, **found
):
    options = resolve([*flags, "prog"], {}).options
    node = Node(
        index=options.node_rank,
        host="here",
        nproc=nproc or options.nproc_per_node,
        cpus=cpus,
        devices=devices,
        **found,
    )
    return make_plan(
        options,
        (FoundProgram(options=options, command=COMMAND, master_port=options.master_port or 4321),),
        (node,),
        launch_id="ir-1",
        environ=environ or {},
        folder=folder,
        error_dir=error_dir,
        stdin_is_terminal=is_terminal,
    )
