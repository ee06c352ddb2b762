"""The plan of the next attempt."""

from __future__ import annotations

from infini_run.options.options import resolve
from infini_run.plan.model import Command, FoundProgram, Node
from infini_run.plan.next_attempt import with_new_launch_id
from infini_run.plan.planner import make_plan
from infini_run.record import replace


def test_the_next_plan_differs_in_mark_port_count_and_addresses_and_in_nothing_else():
    node = Node(index=0, host="h", nproc=2, cpus=4)
    common = {"environ": {}, "folder": "/f", "error_dir": "/e"}
    asked = resolve(["--max_restarts=3", "--restart_delay=2s", "program"], {}).options
    program = FoundProgram(options=asked, command=Command(file="/p", argv=("p",)), master_port=5)
    plan = make_plan(asked, (program,), (node,), launch_id="ir-1", **common)
    other = with_new_launch_id(plan, launch_id="ir-1.1", master_ports=(6,), restarts=1)
    wanted = make_plan(asked, (replace(program, master_port=6),), (node,), launch_id="ir-1.1", **common)
    changed = [("TORCHELASTIC_RESTART_COUNT", "1") if n.endswith("RESTART_COUNT") else (n, v) for n, v in wanted.env]
    assert other == replace(wanted, env=tuple(changed))
    assert with_new_launch_id(plan, launch_id="ir-1", master_ports=(5,), restarts=0) == plan
