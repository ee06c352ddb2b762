"""The same plan with something else: a folder, the ids and ports of the next attempt."""

from __future__ import annotations

import pytest

from infini_run.options.options import resolve
from infini_run.plan.changed_plan import with_error_folder, with_folder, with_new_launch_id
from infini_run.plan.model import Command, FoundProgram, Node
from infini_run.plan.planner import make_plan
from infini_run.record import replace
from tests.support.plans import plan_of


@pytest.mark.parametrize(
    ("folder", "abstract_id", "notify", "error_file"),
    [
        ("/g", "", "/g/notify.0", "/g/rank_0.error.json"),
        ("/g", "secret", "@infini-run/secret/0", "/g/rank_0.error.json"),
        ("", "secret", "@infini-run/secret/0", None),
    ],
)
def test_plan_moves_with_its_folder(folder, abstract_id, notify, error_file):
    plan = with_folder(plan_of(folder="/f", error_dir="/f"), folder, abstract_id=abstract_id)
    seen = plan.environ(plan.workers[0], {})
    assert (seen["NOTIFY_SOCKET"], seen.get("TORCHELASTIC_ERROR_FILE")) == (notify, error_file)
    assert (plan.workers[0].notify, plan.workers[0].error_file) == (notify, error_file or "")
    beside_logs = with_folder(plan_of(folder="/f", error_dir="/logs"), folder, abstract_id=abstract_id)
    assert beside_logs.workers[0].error_file == "/logs/rank_0.error.json"


@pytest.mark.parametrize(("folder", "error_file"), [("/g", "/g/rank_0.error.json"), ("", None)])
def test_plan_moves_error_files_alone(folder, error_file):
    before = plan_of(folder="/f", error_dir="/logs")
    plan = with_error_folder(before, folder)
    seen = plan.environ(plan.workers[0], {})
    assert seen.get("TORCHELASTIC_ERROR_FILE") == error_file
    assert plan.workers[0].error_file == (error_file or "")
    assert seen["NOTIFY_SOCKET"] == before.workers[0].notify
    assert with_error_folder(plan_of(folder="/f"), "/g").workers[0].error_file == ""


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
