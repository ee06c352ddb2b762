"""Many nodes' reports as one: all ranks in order, and the first failure by one clock, whoever told first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infini_run.record import replace
from infini_run.report.exit import Exit
from infini_run.report.hang_groups import analyze_hang
from infini_run.report.hang_snapshot import HangSnapshot
from infini_run.report.merge import merge_reports
from infini_run.report.report import Report

INF = float("inf")


def of_node(node, failed=False, start_s=10.0, end_s=20.0):
    exits = tuple(
        Exit(rank=2 * node + local, local_rank=local, host=f"n{node}", code=node + 1 if failed else 0)
        for local in range(2)
    )
    return Report(
        launch_id="x", run_id="", host=f"n{node}", world_size=8, start_s=start_s, end_s=end_s, exits=exits,
        first_failure=exits[0] if failed else None, notices=(f"notice {node}",), leftover_count=node,
    )  # fmt: skip


def joined(*node_reports, **fields):
    given = {"received_signal": 0, "notices": ("ours",), "start_s": 1.0, "end_s": 99.0, **fields}
    return merge_reports(node_reports, launch_id="x", run_id="", host="head", world_size=8, **given)


def test_all_ranks_in_order_and_all_that_was_noticed():
    report = joined((of_node(0), INF), (of_node(1, start_s=5.0), INF), (of_node(2, end_s=30.0), INF))
    assert [exit_.rank for exit_ in report.exits] == list(range(6))
    assert (report.start_s, report.end_s) == (5.0, 30.0)
    assert report.notices == ("ours", "notice 0", "notice 1", "notice 2")
    assert report.leftover_count == 3
    assert (report.first_failure, report.exit_code) == (None, 0)


def test_the_signals_that_the_head_or_a_node_has_passed_on_are_all_there():
    node = replace(of_node(0), forwarded_signals=(10, 12))
    assert joined((node, INF), (of_node(1), INF), forwarded_signals={1, 10}).forwarded_signals == (1, 10, 12)


def test_the_first_failure_is_the_earliest_not_the_lowest():
    report = joined((of_node(0, failed=True), 7.0), (of_node(1, failed=True), 5.0), (of_node(2), INF))
    assert report.first_failure.host == "n1"
    assert report.exit_code == 2


def test_a_failure_whose_time_nobody_knows_is_one_all_the_same():
    assert joined((of_node(0), INF), (of_node(1, failed=True), INF)).first_failure.host == "n1"


def test_a_node_that_stopped_ranks_for_others_is_not_blamed():
    """Its report has no failure, whatever was noted of its time."""
    assert joined((of_node(0), 1.0), (of_node(1, failed=True), 2.0)).first_failure.host == "n1"


def test_where_nobody_has_told_the_times_are_ours():
    report = joined()
    assert (report.start_s, report.end_s, report.exits) == (1.0, 99.0, ())


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=6))
def test_whoever_failed_first_is_blamed(nodes):
    report = joined(*((of_node(node, failed), at_s) for node, (failed, at_s) in enumerate(nodes)))
    times = [(at_s, node) for node, (failed, at_s) in enumerate(nodes) if failed]
    assert (report.first_failure.host if report.first_failure else None) == (f"n{min(times)[1]}" if times else None)


def test_hangs_of_nodes_with_one_host_name_are_one_hang():
    """Each node counts its own hangs, and the earlier ones of the other one are none of its."""
    seen = {"pid": 1, "host": "same", "time_s": 1.0, "kind": "hung", "why": "no output for 9.0 s", "is_sure": True}
    waits, loads = ("barrier (torch/x.py:1)", "step (train.py:4)"), ("load (train.py:2)",)
    nodes = [
        [HangSnapshot(rank=0, frames=loads, **seen), HangSnapshot(rank=1, frames=waits, **seen)],
        [HangSnapshot(rank=rank, frames=waits, finding=finding, **seen) for finding in (1, 2) for rank in (2, 3)],
    ]
    merged = joined(*((replace(of_node(at), snapshots=tuple(node)), INF) for at, node in enumerate(nodes)))
    assert analyze_hang(merged.snapshots).headline == "no output for 9.0 s: 3 of 4 ranks wait for rank 0"
